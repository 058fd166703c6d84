"""Weight-transfer engines for vLLM's routes ``/init_weight_transfer_engine`` … ``/finish_weight_update``.

Tensors have Hugging Face names and are loaded by the model's ``load_weights``, as at start-up.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.platforms import current_platform
from vllm.v1.worker.lora_model_runner_mixin import LoRAModelRunnerMixin

from megatron_fspo.rollout.delta import Held
from megatron_fspo.rollout.links import Receiver, join_gloo, join_nccl
from megatron_fspo.rollout.server.inside.adapters import AdapterLoading


class WeightLoading:
    """Loads the tensors of a checkpoint in place, layer by layer."""

    def __init__(self, model: torch.nn.Module, model_config: Any) -> None:
        self._model, self._config = model, model_config

    def begin(self) -> None:
        """Prepare all layers for loading."""
        initialize_layerwise_reload(self._model)

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Load some of the tensors."""
        if type(self._model).__name__ == "GptOssForCausalLM":
            tensors = by_loaders(self._model, tensors)
        self._model.load_weights(tensors)  # type: ignore[operator]

    def finish(self) -> None:
        """Complete the update and serve the new weights."""
        finalize_layerwise_reload(self._model, self._config)
        repack(self._model)

    def abandon(self) -> None:
        """End an incomplete update. Incomplete layers get their previous weights back, so that the next
        update does not continue this one. Until then the server has a mixture of old and new layers."""
        for layer in self._model.modules():
            info = get_layerwise_info(layer)
            info.loaded_weights.clear()
            info.load_numel = 0
        self.finish()


class _Transfer(WeightTransferEngine):
    """Loads what :meth:`buckets` yields: adapters if the server has them, else all weights."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        adapters = self.vllm_config.lora_config is not None
        self.loading = (
            AdapterLoading(self.model) if adapters else WeightLoading(self.model, self.model_config)
        )

    def init_transfer_engine(self, init_info: WeightTransferInitInfo) -> None:
        """Do nothing."""

    def start_weight_update(self) -> None:
        self.loading.begin()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        try:
            self.receive_weights(self.parse_update_info(update_info))
        except BaseException:
            self.shutdown()  # for the others in a group, which would wait for this worker
            self.loading.abandon()
            raise
        # vLLM's own method would synchronise an accelerator even if there is none.
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: WeightTransferUpdateInfo) -> None:
        for bucket in self.buckets(update_info):
            self.loading.load(bucket)

    def buckets(self, update_info: WeightTransferUpdateInfo) -> Iterator[Iterable[tuple[str, Tensor]]]:
        raise NotImplementedError

    def finish_weight_update(self) -> None:
        self.loading.finish()

    def shutdown(self) -> None:
        """Do nothing."""


def by_loaders(model: torch.nn.Module, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Load sinks, and yield experts one by one. gpt-oss's ``load_weights`` would copy sinks and tensors of
    all experts into parameters that have no storage during a reload, and silently keep the old values."""
    for name, tensor in tensors:
        block, of_experts, word = name.rpartition(".experts.")
        if of_experts:
            yield from ((f"{block}.experts.{number}.{word}", one) for number, one in enumerate(tensor))
        elif name.endswith(".sinks"):
            sinks: Any = model.get_parameter(name.replace(".self_attn.", ".attn."))
            sinks.weight_loader(
                sinks, tensor.chunk(get_tensor_model_parallel_world_size())[get_tensor_model_parallel_rank()]
            )
        else:
            yield name, tensor


def repack(model: torch.nn.Module) -> int:
    """Pack every weight of the CPU backend again; return their number. A linear layer multiplies with a
    packed copy of its weight there. A reload renews it, except for a head tied to the embedding, which would
    silently keep the old weights."""
    count = 0
    module: Any
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if hasattr(module, "cpu_linear") and weight is not None and weight.numel():
            module.quant_method.process_weights_after_loading(module)
            count += 1
    return count


_setup_kernel = UnquantizedFusedMoEMethod._setup_kernel


def setup_and_pack(method: Any, layer: Any, **weights: Tensor) -> None:
    """Pack experts for the CPU after a reload, which vLLM does at the start only. Otherwise the kernel would
    silently read the new weights as packed ones."""
    reload = method.moe_kernel is not None
    _setup_kernel(method, layer=layer, **weights)
    if reload:
        method.moe_kernel.fused_experts.process_weights_after_loading(layer)


if current_platform.is_cpu():
    UnquantizedFusedMoEMethod._setup_kernel = setup_and_pack


# After every update vLLM drops all adapters, as they may belong to old base weights. Here updates contain
# adapters only, and the server would return to the one that it started with.
LoRAModelRunnerMixin.reset_lora_state = lambda _: None


@dataclass
class BroadcastInit(WeightTransferInitInfo):
    """Address at which the ranks of the transfer connect. Rank 0 is the trainer."""

    master_address: str
    master_port: int
    world_size: int
    rank_offset: int
    """Rank of this server's first worker."""
    timeout_seconds: float = 300.0
    joined: bool = False
    """Only check that the worker is in that group already."""
    delta: bool = False
    """The trainer sends changes since its last update in the group."""


class GlooTransfer(_Transfer):
    """Receives broadcasts through CPU and TCP, in a group of the trainer's first rank and all workers."""

    init_info_cls = BroadcastInit
    update_info_cls = WeightTransferUpdateInfo  # empty: names, dtypes and shapes are broadcast, too

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._receiver = self.receiver()
        self._held: Held | None = None

    def receiver(self) -> Receiver:
        """Create the receiver of tensors, the only difference between the kinds of broadcast."""
        return Receiver(join_gloo, torch.device("cpu"))

    def init_transfer_engine(self, init_info: BroadcastInit) -> None:
        parallel = self.parallel_config
        self._receiver.connect(
            init_info.master_address,
            init_info.master_port,
            rank=init_info.rank_offset + parallel.data_parallel_index * parallel.world_size + parallel.rank,
            size=init_info.world_size,
            timeout=timedelta(seconds=init_info.timeout_seconds),
            joined=init_info.joined,
        )
        if not init_info.joined:
            self._held = Held() if init_info.delta else None

    def buckets(self, update_info: WeightTransferUpdateInfo) -> Iterator[Iterable[tuple[str, Tensor]]]:
        for sent in self._receiver.buckets():
            decoded = sent if self._held is None else self._held.decode(sent)
            yield ((name, tensor.to(self.device)) for name, tensor in decoded)

    def shutdown(self) -> None:
        self._receiver.close()


class NCCLTransfer(GlooTransfer):
    """Receives broadcasts from GPU to GPU."""

    def receiver(self) -> Receiver:
        return Receiver(join_nccl, self.device)


@dataclass
class DiskUpdate(WeightTransferUpdateInfo):
    """Safetensors files that this server can read."""

    paths: list[str]


class DiskTransfer(_Transfer):
    """Reads files from a disk that trainer and server share."""

    init_info_cls = WeightTransferInitInfo  # empty: files need no connection
    update_info_cls = DiskUpdate

    def buckets(self, update_info: DiskUpdate) -> Iterator[Iterable[tuple[str, Tensor]]]:
        for path in update_info.paths:
            with safe_open(path, framework="pt") as file:
                yield ((name, file.get_tensor(name).to(self.device)) for name in file.keys())
