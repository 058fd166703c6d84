"""The cases of every layout: a small model, a batch of very different sequences, losses and splits.

Fixed seeds make them equal on all ranks without communication.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from megatron_fspo.config import Config, Parallel
from megatron_fspo.losses import FSPOLoss, PolicyLossConfig, loss_sections
from megatron_fspo.packing.batch import Sequences, no_route, route_dtype
from megatron_fspo.packing.pack import PackLayout, Plan, plan_packs
from megatron_fspo.packing.plan import attention_costs
from megatron_fspo.types import Completion, Prompt, Sample
from megatron_fspo.weights import Architecture, Experts, adapter_shapes, expected_hf_shapes

SMALL = Architecture(
    model_type="qwen3",
    num_layers=2,
    hidden_size=32,
    num_heads=8,
    num_kv_heads=4,
    head_dim=16,  # not hidden_size / num_heads; cuDNN needs multiples of 8
    ffn_size=48,
    vocab_size=61,  # divisible by no tensor-parallel size
    tied=False,
    rms_norm_eps=1e-6,
    rope_theta=10_000.0,
    max_position_embeddings=1024,
    dtype=torch.float32,
)
MIXTURE = replace(
    SMALL,
    model_type="qwen3_moe",
    experts=Experts(count=8, per_token=2, ffn_size=24, normalize_top_k=True),
)
TEMPERATURE = 0.8

# Lengths of each prompt and its responses. One response is longer than all others together; several have one
# token, two none; few lengths are multiples of 2·cp; a prompt of one token shares nothing. The responses have
# 256 tokens: Megatron divides gradients by this number in fp32, which is exact for a power of two.
_GROUPS = [
    *((1, (1,)), (3, (24, 7, 0, 1)), (6, (14, 2, 17)), (1, (9,)), (5, (155, 3, 5)), (9, (0,))),
    *((1, (6, 11)), (4, (1,))),
]
_SHAPES = [(prompt, response) for prompt, responses in _GROUPS for response in responses]
_INSERTED = {
    1: [(10, 5)],
    6: [(1, 3)],
    7: [(17, 4)],
    9: [(50, 9), (90, 4)],
    12: [(0, 3)],
    14: [(0, 2), (5, 1)],
}
"""Sample number → [(n, m), …]: after n of the response's own tokens, an environment inserts m tokens. This
covers insertions within a response, at its beginning and end, and in an empty one."""
_RESTARTED = {1, 9}
"""Samples in which each insertion begins a new row."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A loss, and a split of the batch."""

    name: str
    loss: PolicyLossConfig
    split: str
    clipped: bool = False
    """Old log-probs are such that every sequence is clipped: the policy gradient is exactly 0."""
    replay: bool = False
    """Both passes replay the experts of :func:`make_routes`."""
    share: bool = False
    """Responses share their prompt, if the layout supports it."""
    aux_loss_coef: float = 0.0
    z_loss_coef: float = 0.0

    @property
    def needs_experts(self) -> bool:
        """The case needs a model with experts."""
        return self.replay or self.aux_loss_coef > 0 or self.z_loss_coef > 0

    @property
    def title(self) -> str:
        """Name of the case's reference."""
        return f"{self.name}, replay" if self.replay else self.name

    def drifts(self, samples: Sequence[Sample]) -> list[Tensor]:
        """Return per sample [L] float64: log π − log π_old of each token."""
        return drifts(samples, seed=3, clipped=self.clipped)


LOSSES: dict[str, PolicyLossConfig] = {
    name: loss(**keys) for loss in loss_sections() for name, keys in loss.VERIFIED.items()
}
"""Name → configuration, from ``VERIFIED`` of every loss."""
SPLITS = ("1 micro-batch", "2 micro-batches", "8 micro-batches", "1 sequence each", "uneven")


def cases(config: Config | None, shift: int, *, experts: bool = False) -> list[Case]:
    """Return all losses on a split; layouts with other ``shift``, which rotates the splits, cover all pairs.

    The loss of ``config`` is added, and distillation alone: the KL to another model, without a policy
    gradient. With ``experts``, router losses are added, and every other group of cases
    replays routes. Every other split shares prompts. The next shift swaps which cases share and replay.
    """
    losses = LOSSES if config is None else {"yours": config.loss, **LOSSES}
    all_clipped = Case(name="all-clipped", loss=FSPOLoss(c_low=0.05, c_high=0.05), split="", clipped=True)
    balanced = Case(name="router-losses", loss=FSPOLoss(), split="", aux_loss_coef=0.3, z_loss_coef=0.1)
    every = [Case(name=name, loss=loss, split="") for name, loss in losses.items()]
    distil = replace(all_clipped, name="distil", loss=FSPOLoss(c_low=0.05, c_high=0.05, kl_coef=1.0))
    every += [all_clipped, distil, balanced] if experts else [all_clipped, distil]
    return [
        replace(
            case,
            split=SPLITS[(number + shift) % len(SPLITS)],
            replay=experts and (number // len(SPLITS) + shift) % 2 == 1,
            share=(number + shift) % len(SPLITS) % 2 == shift % 2 and not case.aux_loss_coef,
        )
        for number, case in enumerate(every)
    ]


def narrow(arch: Architecture) -> Architecture:
    """Reduce a run's model to small sizes, except head counts and tying; :func:`with_layers` adds layers."""
    arch = arch.shortened()
    linear = arch.linear and replace(arch.linear, key_size=8, value_size=6)
    latent = arch.latent and replace(
        arch.latent, q_rank=arch.latent.q_rank and 10, kv_rank=12, rope_size=4, value_size=6
    )
    experts = arch.experts
    one_size = experts is not None and experts.ffn_size == arch.ffn_size  # in some families one key
    if experts is not None:
        shared = 24 * (experts.shared_ffn_size // experts.ffn_size or experts.shared_ffn_size > 0)
        experts = replace(experts, ffn_size=24, shared_ffn_size=shared)
    return replace(
        arch,
        hidden_size=32,
        head_dim=8,
        # Divisible by the same powers of 2 (up to 64) as the run's own.
        ffn_size=24 if one_size else arch.ffn_size and math.gcd(arch.ffn_size, 64),
        experts=experts,
        latent=latent,
        linear=linear,
        prefix="model.",
        window=arch.window and 8,
        vocab_size=min(arch.vocab_size, 61),
        max_position_embeddings=1024,
        dtype=torch.float32,
    )


def with_layers(arch: Architecture, parallel: Parallel) -> Architecture:
    """Set the number of layers: at least 2 on one model chunk, else all kinds on every chunk and at least
    4."""
    chunks, kinds = parallel.pipeline * parallel.virtual_pipeline, arch.shortened().num_layers
    return replace(arch, num_layers=max(2, kinds) if chunks == 1 else max(chunks * kinds, 4))


def kinds(arch: Architecture) -> list[Architecture]:
    """Return an untied and a tied model; in that, routing weights of a token's experts do not sum to 1."""
    experts = arch.experts and replace(arch.experts, normalize_top_k=False)
    return [replace(arch, tied=False), replace(arch, tied=True, experts=experts)]


def random_weights(arch: Architecture) -> dict[str, Tensor]:
    """Return Hugging Face name → fp32 tensor with values large enough that attention and clips matter."""
    generator = torch.Generator().manual_seed(1)
    return {
        name: torch.randn(shape, generator=generator) * (0.1 if len(shape) == 1 else 0.2)
        + (_mean(name, arch) if len(shape) == 1 else 0)
        for name, shape in (expected_hf_shapes(arch) | adapter_shapes(arch)).items()
    }


def _mean(name: str, arch: Architecture) -> float:
    """Return about what a vector's values are in a model: norms 1, zero-centred ones 0; states last."""
    if name.endswith(("A_log", "dt_bias")):
        return -2.0
    return float(not arch.zero_centered_norms or ".linear_attn." in name)


def make_samples(arch: Architecture) -> list[Sample]:
    masks = [_loss_mask(length, _INSERTED.get(number, ())) for number, (_, length) in enumerate(_SHAPES)]
    shapes = [(prompt, len(mask)) for (prompt, _), mask in zip(_SHAPES, masks, strict=True)]
    samples = [
        replace(
            sample,
            completion=replace(
                sample.completion,
                loss_mask=mask,
                row_starts=tuple(
                    i for i in range(1, len(mask)) if mask[i] < mask[i - 1] and number in _RESTARTED
                ),
            ),
        )
        for number, (sample, mask) in enumerate(
            zip(random_samples(shapes, vocab_size=arch.vocab_size, seed=2), masks, strict=True)
        )
    ]
    firsts = (number for number, (_, responses) in enumerate(_GROUPS) for _ in responses)
    heads: dict[int, Prompt] = {}
    return [
        replace(sample, prompt=heads.setdefault(first, sample.prompt))
        for first, sample in zip(firsts, samples, strict=True)
    ]


def _loss_mask(length: int, inserted: Sequence[tuple[int, int]]) -> list[int]:
    """Loss mask of a response of which the policy wrote ``length`` tokens."""
    mask, done = [], 0
    for after, count in (*inserted, (length, 0)):
        mask += [1] * (after - done) + [0] * count
        done = after
    return mask


def make_routes(arch: Architecture, samples: Sequence[Sample], *, gaps: bool = True) -> list[Tensor]:
    """Return per sample random experts [P + L - 1, layers, k]. With ``gaps``, every fifth sample has
    none. Responses to one prompt have the same experts in the prompt, except at its last token."""
    assert arch.experts is not None
    generator = torch.Generator().manual_seed(5)
    routes: list[Tensor] = []
    for number, sample in enumerate(samples):
        tokens = len(sample.prompt.token_ids) + len(sample.completion.token_ids) - 1
        order = torch.rand(tokens, arch.num_layers, arch.experts.count, generator=generator).argsort(-1)
        chosen = order[..., : arch.experts.per_token].to(route_dtype(arch.experts.count))
        chosen = torch.full_like(chosen, no_route(chosen.dtype)) if gaps and number % 5 == 4 else chosen
        if number and sample.prompt == samples[number - 1].prompt:
            shared = len(sample.prompt.token_ids) - 1
            chosen[:shared] = routes[-1][:shared]
        routes.append(chosen)
    return routes


def random_samples(shapes: Sequence[tuple[int, int]], *, vocab_size: int, seed: int) -> list[Sample]:
    """Return one sample for each (prompt, response) length in tokens.

    Token 0, the padding token, may occur. Advantages have both signs and are exact in fp32.
    """
    generator = torch.Generator().manual_seed(seed)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(0, vocab_size, (count,), generator=generator).tolist())

    return [
        Sample(
            prompt=Prompt(index=i, token_ids=ids(prompt), text="", answer=""),
            number=0,
            completion=Completion(
                token_ids=ids(length), log_probs=(0.0,) * length, finish_reason="length", weight_version=0
            ),
            reward=0.0,
            advantage=(-1) ** i * (1 + i / 16),
        )
        for i, (prompt, length) in enumerate(shapes)
    ]


def drifts(samples: Sequence[Sample], *, seed: int, clipped: bool = False) -> list[Tensor]:
    """Return per sample [L] float64: log π − log π_old of each token, with values that are exact in fp32."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for number, sample in enumerate(samples):
        noise = torch.randn(sample.completion.length, generator=generator) * 0.04
        if clipped:  # far outside the band, on the side where the clip acts
            noise = torch.full_like(noise, 0.25 if sample.advantage > 0 else -0.25)
        else:
            noise += 0.02 * (number % 3 - 1)
        rows.append((noise * 2**16).round().double() / 2**16)
    return rows


def reference_drifts(samples: Sequence[Sample]) -> list[Tensor]:
    """Return per sample [L] float64: log π − log π_ref of each token."""
    return drifts(samples, seed=4)


def split(name: str, sequences: Sequences, arch: Architecture, layout: PackLayout) -> Plan:
    """Split the batch by one of ``SPLITS``: rank → micro-batch → indices of sequences."""
    ranks, multiple_of = layout.data_size, layout.count_multiple_of
    lengths = (sequences.prompt_lengths + sequences.response_lengths).tolist()
    if name == "uneven":
        # Rank 0 has nearly everything: the longest sequence alone, the empty responses, an empty pack, the
        # rest. The others have one short sequence each.
        empty = [i for i, (_, response) in enumerate(_SHAPES) if not response]
        *short, longest = sorted(
            (i for i in range(len(lengths)) if i not in empty), key=lambda i: (lengths[i], i)
        )
        others, rest = short[: ranks - 1], short[ranks - 1 :]
        plan = [[[longest], empty, [], sorted(rest)], *([[i]] for i in others)]
    elif name == "1 sequence each":
        plan = [[[i] for i in range(rank, len(lengths), ranks)] for rank in range(ranks)]
    else:
        count = int(name.split()[0])
        costs = partial(attention_costs, linear_size=arch.layer_size, attention_size=arch.q_size)
        count += -count % multiple_of
        wanted = replace(layout, costs=costs if name.startswith("8") else None, count_multiple_of=count)
        return plan_packs(sequences, wanted)[0]
    count = max(map(len, plan))
    count += -count % multiple_of
    return [packs + [[] for _ in range(count - len(packs))] for packs in plan]
