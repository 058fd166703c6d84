"""Checks of a layout against model and job. Does not import Megatron, so that plans do not need it."""

from __future__ import annotations

import math

from megatron_fspo.config import Config, Parallel
from megatron_fspo.config.sections import LoRA
from megatron_fspo.errors import InputError, InputErrors
from megatron_fspo.weights import Adapters, Architecture, check_tensor_parallel
from megatron_fspo.weights.table import adapter_targets


def padded_vocab_size(vocab_size: int, tensor: int) -> int:
    """Return the vocabulary size padded so that every tensor-parallel rank holds the same number of rows."""
    return math.ceil(vocab_size / tensor) * tensor


def check_parallel(arch: Architecture, parallel: Parallel) -> None:
    """Raise ``InputErrors`` unless the model can be split in this layout."""
    problems = []
    try:
        check_tensor_parallel(arch, parallel.tensor)
    except InputError as error:
        problems.append(f"parallel.tensor = {parallel.tensor}: {error}")
    chunks = parallel.pipeline * parallel.virtual_pipeline
    if arch.num_layers % chunks:
        problems.append(
            f"parallel.pipeline = {parallel.pipeline} x parallel.virtual_pipeline = "
            f"{parallel.virtual_pipeline} does not divide the model's {arch.num_layers} layers"
        )
    if arch.experts is None and parallel.expert > 1:
        problems.append(f"parallel.expert = {parallel.expert}, but the model has no experts")
    if arch.experts is not None and arch.num_experts % parallel.expert:
        problems.append(
            f"parallel.expert = {parallel.expert} does not divide the {arch.num_experts} experts of a layer"
        )
    if (arch.experts or arch.latent) and parallel.tensor > 1 and not parallel.sequence:
        kind = "a mixture of experts" if arch.experts else "latent attention"
        problems.append(f"parallel.tensor = {parallel.tensor} with {kind} needs parallel.sequence = true")
    if arch.linear and parallel.context > 1:
        problems.append(f"parallel.context = {parallel.context}: linear attention does not split sequences")
    last_chunk = (chunks - parallel.pipeline + 1) * arch.num_layers // chunks
    if arch.experts is not None and last_chunk <= arch.dense_layers:
        problems.append(
            f"parallel.pipeline = {parallel.pipeline}: the first stage would have none of the layers with "
            f"experts, which begin at {arch.dense_layers}"
        )
    if (one := arch.experts) and one.per_token == 1 and one.normalize_top_k and not one.sigmoid:
        problems.append("Megatron has no router for num_experts_per_tok = 1 with norm_topk_prob = true")
    if problems:
        raise InputErrors(problems)


def shares_prompts(config: Config, layers: str, arch: Architecture | None) -> bool:
    """Resolve ``batch.share_prompts`` for ``layers``, local or transformer_engine. Raises ``InputError`` if
    it is on, but the run does not support it."""
    wanted = config.batch.share_prompts
    if wanted == "off" or (wanted == "auto" and layers == "transformer_engine"):
        return False
    problem = None
    if config.parallel.context > 1:
        problem = f"parallel.context = {config.parallel.context} splits every sequence"
    elif arch is not None and arch.linear:
        problem = "linear attention has a state for every sequence"
    elif config.moe.aux_loss_coef or config.moe.z_loss_coef:
        problem = "the losses of [moe] need whole sequences"
    if problem is not None and wanted == "on":
        raise InputError(f"batch.share_prompts = on, but {problem}: set batch.share_prompts = auto")
    return problem is None


def check_world(parallel: Parallel, world_size: int) -> None:
    """Raise ``InputError`` unless the layout fits the number of ranks."""
    size = parallel.model_size
    if world_size % size:
        sizes = {name: getattr(parallel, name) for name in ("tensor", "pipeline", "context")}
        product = " x ".join(f"parallel.{name} = {n}" for name, n in sizes.items() if n > 1)
        raise InputError(
            f"{product} does not divide the world size {world_size}: "
            f"start a multiple of {size} ranks (torchrun --nproc-per-node)"
        )
    stage = world_size // parallel.pipeline
    if stage % parallel.expert:
        raise InputError(
            f"parallel.expert = {parallel.expert} does not divide the {stage} ranks of a pipeline stage"
        )


def make_adapters(keys: LoRA, arch: Architecture) -> Adapters | None:
    """Return the adapters that the keys ask for; None without LoRA. Raises ``InputError`` if the model does
    not support adapters for a target."""
    if not keys.rank:
        return None
    legal = adapter_targets(arch)
    if wrong := [target for target in keys.targets if target not in legal]:
        raise InputError(
            f"lora.targets: {wrong[0]}: {arch.model_type} has adapters of {', '.join(legal)} only"
        )
    scale = keys.alpha / (math.sqrt(keys.rank) if keys.rslora else keys.rank)
    targets = tuple(target for target in legal if target in (keys.targets or legal))
    return Adapters(rank=keys.rank, scale=scale, targets=targets)
