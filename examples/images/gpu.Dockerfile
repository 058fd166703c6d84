# Trainer and vLLM servers on GPUs, from the root of the repository:
#
#   docker build -f examples/images/gpu.Dockerfile --target trainer -t fspo .
#   docker build -f examples/images/gpu.Dockerfile --target server -t fspo-vllm .
#
#   docker run --gpus all --ipc=host --ulimit memlock=-1 --ulimit nofile=65536 fspo
#
# The node's driver must be 580 or newer. Transformer Engine compiles for the trainer: minutes, and several GB of
# memory for each core.

FROM nvidia/cuda:13.0.1-cudnn-devel-ubuntu24.04 AS base
COPY . /opt/megatron_fspo
RUN /opt/megatron_fspo/examples/images/install.sh system python3-dev build-essential
WORKDIR /opt/megatron_fspo

FROM base AS server
RUN examples/images/install.sh server
ENV PATH=/opt/vllm/bin:$PATH
CMD ["megatron-fspo", "serve", "--help"]

FROM base AS trainer
# Ampere, Hopper, Blackwell.
ARG NVTE_CUDA_ARCHS="80;90;100"
RUN examples/images/install.sh trainer all wandb te
ENV PATH=/opt/fspo/bin:$PATH
CMD ["megatron-fspo", "doctor"]
