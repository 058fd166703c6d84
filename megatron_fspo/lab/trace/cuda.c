/* A CUDA runtime and driver with eight GPUs, host memory in place of theirs, and no kernels.

   Preloaded below a CUDA build of torch, it gives torch devices, streams, events, allocators and pinned memory:
   all that is asked for around kernels. Memory is reserved and gets pages when it is touched, so 80 GB cost
   nothing. Nothing is launched. */
#define __CUDA_RUNTIME_API_H__ /* its prototypes; the types alone are wanted */
#include <driver_types.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define DEVICES 8
#define DEVICE_BYTES ((size_t)80 << 30)
#define RANGES (1 << 16)

typedef int status;
enum { SUCCESS = 0, OUT_OF_MEMORY = 2, UNSUPPORTED = 801 };

static __thread int current_device;

static uintptr_t new_handle(void) {
  static uintptr_t last = 0x1000;
  return __sync_add_and_fetch(&last, 16);
}

/* Devices */
status cudaGetDeviceCount(int *count) { *count = DEVICES; return SUCCESS; }
status cuDeviceGetCount(int *count) { *count = DEVICES; return SUCCESS; }
status cudaGetDevice(int *device) { *device = current_device; return SUCCESS; }
status cudaSetDevice(int device) { current_device = device; return SUCCESS; }
status cuCtxGetDevice(int *device) { *device = current_device; return SUCCESS; }
status cuDeviceGet(int *device, int number) { *device = number; return SUCCESS; }
status cudaDriverGetVersion(int *version) { *version = 13000; return SUCCESS; }
status cudaRuntimeGetVersion(int *version) { *version = 13000; return SUCCESS; }
status cuDriverGetVersion(int *version) { *version = 13000; return SUCCESS; }
status cudaDeviceCanAccessPeer(int *can, int a, int b) { *can = 1; return SUCCESS; }
status cudaDeviceGetStreamPriorityRange(int *least, int *most) { *least = 0; *most = -5; return SUCCESS; }
status cudaDeviceGetPCIBusId(char *text, int size, int device) {
  snprintf(text, size, "0000:%02x:00.0", device + 1);
  return SUCCESS;
}
static int generation(void) { /* 9: Hopper, 10: Blackwell */
  const char *text = getenv("TRACE_GPU_GENERATION");
  return text ? atoi(text) : 9;
}
static int attribute(int which) {
  switch (which) {
    case cudaDevAttrComputeCapabilityMajor: return generation();
    case cudaDevAttrComputeCapabilityMinor: return 0;
    case cudaDevAttrMultiProcessorCount: return 132;
    case cudaDevAttrWarpSize: return 32;
    case cudaDevAttrMaxThreadsPerBlock: return 1024;
    case cudaDevAttrMaxThreadsPerMultiProcessor: return 2048;
    case cudaDevAttrMaxSharedMemoryPerBlock: return 49152;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: return 232448;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return 233472;
    default: return 1;
  }
}
status cudaDeviceGetAttribute(int *value, int which, int device) { *value = attribute(which); return SUCCESS; }
status cuDeviceGetAttribute(int *value, int which, int device) { *value = attribute(which); return SUCCESS; }
status cudaGetDeviceProperties(struct cudaDeviceProp *p, int device) {
  memset(p, 0, sizeof *p);
  strcpy(p->name, "NVIDIA H100 80GB HBM3 (no kernels)");
  p->major = generation();
  p->totalGlobalMem = DEVICE_BYTES;
  p->multiProcessorCount = 132;
  p->warpSize = 32;
  p->maxThreadsPerBlock = 1024;
  p->maxThreadsPerMultiProcessor = 2048;
  p->sharedMemPerBlock = 49152;
  p->sharedMemPerBlockOptin = 232448;
  p->sharedMemPerMultiprocessor = 233472;
  p->regsPerMultiprocessor = p->regsPerBlock = 65536;
  p->l2CacheSize = 50 << 20;
  return SUCCESS;
}
status cudaMemGetInfo(size_t *available, size_t *total) { *available = *total = DEVICE_BYTES; return SUCCESS; }
status cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
  *flags = 0;
  *active = 1;
  return SUCCESS;
}
status cuCtxGetCurrent(uintptr_t *context) { *context = 16; return SUCCESS; }
status cuDevicePrimaryCtxRetain(uintptr_t *context, int device) { *context = 16; return SUCCESS; }

/* Streams and events: whatever was asked of them is done. */
status cudaStreamCreate(uintptr_t *stream) { *stream = new_handle(); return SUCCESS; }
status cudaStreamCreateWithFlags(uintptr_t *stream, unsigned flags) { *stream = new_handle(); return SUCCESS; }
status cudaStreamCreateWithPriority(uintptr_t *stream, unsigned flags, int priority) {
  *stream = new_handle();
  return SUCCESS;
}
status cudaStreamGetPriority(uintptr_t stream, int *priority) { *priority = 0; return SUCCESS; }
status cudaStreamIsCapturing(uintptr_t stream, int *capturing) { *capturing = 0; return SUCCESS; }
status cudaStreamGetCaptureInfo(uintptr_t stream, int *capturing, uint64_t *id) {
  *capturing = 0;
  if (id) *id = 0;
  return SUCCESS;
}
status cudaEventCreate(uintptr_t *event) { *event = new_handle(); return SUCCESS; }
status cudaEventCreateWithFlags(uintptr_t *event, unsigned flags) { *event = new_handle(); return SUCCESS; }
status cudaEventElapsedTime(float *milliseconds, uintptr_t begin, uintptr_t end) {
  *milliseconds = 0;
  return SUCCESS;
}
status cudaLaunchHostFunc(uintptr_t stream, void (*function)(void *), void *data) {
  function(data);
  return SUCCESS;
}

/* Memory. Which of it is the host's, pinned, torch asks for every pointer. */
static struct { char *first; size_t bytes; } pinned[RANGES];
static int pinned_count;

static status reserve(void **pointer, size_t bytes) {
  *pointer = mmap(NULL, bytes + 1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return *pointer == MAP_FAILED ? OUT_OF_MEMORY : SUCCESS;
}
static status remember(void *pointer, size_t bytes) {
  int slot = __sync_fetch_and_add(&pinned_count, 1);
  if (slot >= RANGES) return OUT_OF_MEMORY;
  pinned[slot].first = pointer;
  pinned[slot].bytes = bytes;
  return SUCCESS;
}
static int slot_of(const void *pointer) {
  for (int slot = 0; slot < pinned_count && slot < RANGES; slot++)
    if ((char *)pointer >= pinned[slot].first && (char *)pointer < pinned[slot].first + pinned[slot].bytes)
      return slot;
  return -1;
}
static status forget(void *pointer) {
  int slot = slot_of(pointer);
  if (slot >= 0) pinned[slot].bytes = 0;
  return SUCCESS;
}
status cudaMalloc(void **pointer, size_t bytes) { return reserve(pointer, bytes); }
status cudaMallocAsync(void **pointer, size_t bytes, uintptr_t stream) { return reserve(pointer, bytes); }
status cudaHostAlloc(void **pointer, size_t bytes, unsigned flags) {
  status failed = reserve(pointer, bytes);
  return failed ? failed : remember(*pointer, bytes);
}
status cudaFreeHost(void *pointer) { return forget(pointer); }
status cudaHostRegister(void *pointer, size_t bytes, unsigned flags) { return remember(pointer, bytes); }
status cudaHostUnregister(void *pointer) { return forget(pointer); }
status cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *pointer) {
  memset(attributes, 0, sizeof *attributes);
  attributes->type = slot_of(pointer) >= 0 ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
  return SUCCESS;
}
status cudaMemcpy(void *to, const void *from, size_t bytes, int kind) {
  memcpy(to, from, bytes);
  return SUCCESS;
}
status cudaMemcpyAsync(void *to, const void *from, size_t bytes, int kind, uintptr_t stream) {
  memcpy(to, from, bytes);
  return SUCCESS;
}
status cudaGetSymbolAddress(void **pointer, const void *symbol) { return reserve(pointer, 4096); }
status cudaDeviceGetDefaultMemPool(uintptr_t *pool, int device) { *pool = new_handle(); return SUCCESS; }
status cudaMemPoolGetAttribute(uintptr_t pool, int which, void *value) {
  *(uint64_t *)value = 0;
  return SUCCESS;
}

/* Code objects of libraries, registered when they are loaded and never run */
void **__cudaRegisterFatBinary(void *binary) { static void *handle; return &handle; }
char __cudaInitModule(void **handle) { return 1; }
status cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *f, int s, size_t m, unsigned g) {
  *blocks = 1;
  return SUCCESS;
}
const char *cudaGetErrorString(int error) { return "there is no GPU: megatron_fspo.lab.trace"; }
const char *cudaGetErrorName(int error) { return "noGPU"; }

#define DONE(name) status name() { return SUCCESS; }
#define REFUSED(name) status name() { return UNSUPPORTED; }
DONE(__cudaRegisterFatBinaryEnd) DONE(__cudaUnregisterFatBinary) DONE(__cudaRegisterFunction) DONE(__cudaRegisterVar)
DONE(__cudaPushCallConfiguration) DONE(__cudaPopCallConfiguration) DONE(__cudaLaunchKernel) DONE(cudaLaunchKernel)
DONE(cudaLaunchKernelExC) DONE(cudaGetLastError) DONE(cudaPeekAtLastError) DONE(cudaDeviceSynchronize)
DONE(cudaStreamDestroy) DONE(cudaStreamSynchronize) DONE(cudaStreamQuery) DONE(cudaStreamWaitEvent)
DONE(cudaEventRecord) DONE(cudaEventRecordWithFlags) DONE(cudaEventQuery) DONE(cudaEventSynchronize)
DONE(cudaEventDestroy) DONE(cudaThreadExchangeStreamCaptureMode) DONE(cudaDeviceEnablePeerAccess) DONE(cudaFree)
DONE(cudaFreeAsync) DONE(cudaMemset) DONE(cudaMemsetAsync) DONE(cudaFuncGetAttributes) DONE(cudaFuncSetAttribute)
DONE(cudaMemPoolSetAttribute) DONE(cudaMemPoolSetAccess) DONE(cudaMemPoolTrimTo) DONE(cudaMemcpyPeerAsync)
DONE(cudaMemcpyToSymbol) DONE(cuInit) DONE(cuCtxSetCurrent) DONE(cudaProfilerStart) DONE(cudaProfilerStop)
REFUSED(cudaGetDriverEntryPointByVersion) REFUSED(cuGetProcAddress) REFUSED(cuGetProcAddress_v2)
REFUSED(cudaIpcGetMemHandle) REFUSED(cudaIpcOpenMemHandle) REFUSED(cudaStreamBeginCapture) REFUSED(cudaGraphLaunch)
REFUSED(cuLaunchKernel) REFUSED(cuModuleLoadData)
