"""Replaces the policy's adapter in a vLLM worker while it serves requests.

``serve --lora-rank`` starts vLLM with an adapter under the policy's name, which every request uses. New
factors replace its factors in each worker's memory, under the same number and without disk access. (vLLM's
``load_inplace`` keeps cached keys and values of the old adapter; here each update resets the cache.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

_SLOT = 0
"""The only slot, with ``--max-loras 1``."""


class AdapterLoading:
    """Loads tensors named ``model.layers.0.self_attn.q_proj.lora_A.weight`` etc.; B includes the scale."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._factors: dict[str, Tensor] = {}

    def begin(self) -> None:
        """Discard factors of an earlier update."""
        self._factors = {}

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Store some of the factors. Raises ``ValueError`` for a tensor that is not a factor."""
        for name, tensor in tensors:
            if ".lora_" not in name:
                raise ValueError(f"{name}: this server was started with --lora-rank and loads adapters only")
            self._factors[f"base_model.model.{name}"] = tensor.cpu()

    def finish(self) -> None:
        """Serve the new factors, if any. There are none after a failed update."""
        if not self._factors:
            return
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.peft_helper import PEFTHelper

        manager = self._model.lora_manager
        rank = next(len(tensor) for name, tensor in self._factors.items() if ".lora_A." in name)
        targets = sorted({name.split(".")[-3] for name in self._factors})
        config = PEFTHelper(r=rank, lora_alpha=rank, target_modules=targets)
        config.validate_legal(manager.lora_config)
        (number,) = manager.list_adapters()
        adapter = LoRAModel.from_lora_tensors(
            number, self._factors, config, device="cpu", dtype=manager.lora_config.lora_dtype
        )
        manager.remove_adapter(number)
        manager.add_adapter(adapter)
        manager.activate_adapter(number)
        self._factors = {}

    def abandon(self) -> None:
        """Discard an incomplete update, keeping the previous adapter."""
        self._factors = {}


def factors(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield this worker's shards of the factors that it computes with, under the names they were sent with.
    Modules without factors are skipped."""
    manager: Any = getattr(model, "lora_manager", None)
    for number in manager.list_adapters() if manager is not None else ():
        rank = manager.get_adapter(number).rank
        for path, layer in manager.modules.items():
            parent, _, name = path.rpartition(".")
            names = manager.packed_modules_mapping.get(name, [name])
            for target, a, b in zip(names, layer.lora_a_stacked, layer.lora_b_stacked, strict=True):
                if a[_SLOT].any():
                    yield f"{parent}.{target}.lora_A.weight", a[_SLOT, 0, :rank]
                    yield f"{parent}.{target}.lora_B.weight", b[_SLOT, 0, :, :rank]
