"""The model and every policy loss by their definitions, differentiated by autograd.

Plain torch in float64 on the CPU. Five model families are computed from Hugging Face weights, one unpadded
sequence with all its rows at a time, without packing, cache or kernels; the others by :mod:`.hf_model`. ::

    x = embed[ids]
    x = x + attention(rms_norm(x))          for every layer
    x = x + swiglu(rms_norm(x))             or Σ p_e·swiglu_e over a token's experts
    log π = log_softmax(rms_norm(x)·headᵀ / temperature)

Production computes each token's weight explicitly and detaches it. Here S keeps its graph, and autograd
differentiates min, clip and mean: J_i is the loss's ``definition``, which shares no code with its gradient
weights. Nothing else of the verified code is used. ::

    J    = (1/N) Σ_i J_i                                 FSPO, RLOO, GSPO, LUSPO, GMPO
         = (1/N) Σ_i (1/L_i) Σ_t J_it                    GRPO, SAPO, OPSM
         = (1/T) Σ_i Σ_t J_it                            CTPO, CPPO, PNPO, VESPO, DAPO, CISPO, DPPO-TV
    loss = −(J + entropy_coef·H − kl_coef·KL) + aux_loss_coef·B + z_loss_coef·Z
    H    = (1/T) Σ_i Σ_t entropy of π at y_it
    KL   = (1/T) Σ_i Σ_t ½ (log π(y_it) − log π_ref(y_it))²
    B    = (1/N) Σ_i Σ_layers E·Σ_e f_e·P_e              f_e share of expert e in the choices of a sequence's
    Z    = (1/N) Σ_i Σ_layers mean_t (logsumexp z_t)²    tokens, P_e mean of its softmax, z a router's logits

N is the number of samples with a response, and T the number of their response tokens, L_i each. Only tokens
that the policy wrote count, not those that an environment inserted. Units: nats.
Shapes: n samples, t tokens of one of them, h query heads, g KV heads, d head size, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_fspo.losses import PolicyLossConfig
from megatron_fspo.losses.common import Definition
from megatron_fspo.types import Sample
from megatron_fspo.weights import Architecture, Experts

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe", "mixtral")
"""Those of :func:`_logits`, if Mixtral has no window."""
ZERO = torch.zeros((), dtype=torch.float64)


@dataclass(frozen=True, kw_only=True)
class Scores:
    """One forward pass over n samples with its graph, for any number of losses."""

    weights: Mapping[str, Tensor]
    """Hugging Face name → float64 tensor; those with ``requires_grad`` get gradients."""
    advantages: tuple[float, ...]
    log_probs: tuple[Tensor, ...]
    """Per sample [L] log π(y_t), nats; L may be 0."""
    entropies: tuple[Tensor, ...]
    """Per sample [L]."""
    turns: tuple[tuple[int, ...], ...] = ()
    """Per sample the lengths of its turns, which sum to L; if empty, every sample is one turn."""
    router_losses: tuple[Tensor, ...] = ()
    """Per sample [2]: its terms of B and Z, summed over layers; empty for a dense model."""


@dataclass(frozen=True, kw_only=True)
class Reference:
    """One loss of one optimizer step over n samples; tensors are detached, and float64 unless stated."""

    log_probs: list[Tensor]
    """Per sample [L]."""
    log_ratio_sums: Tensor
    """S [n]; 0 for an empty response."""
    clipped: Tensor
    """[n] 1 if a clip removes the gradient of J_i where A ≠ 0, else 0; token level: the share of tokens."""
    out_of_band: Tensor
    """[n] bool: outside the band on either side, for any sign of A; token level: any token is."""
    objective: float
    """J, without entropy bonus and KL penalty; equals −``actor/pg_loss``."""
    loss: float
    """The minimised total."""
    entropy: float
    """H."""
    kl: float
    """KL to the reference policy; 0 without one."""
    gradients: dict[str, Tensor]
    """Hugging Face name → d loss / d weight."""
    grad_norm: float
    """2-norm over all of ``gradients``; a tied embedding is one tensor."""


@dataclass(kw_only=True)
class Routers:
    """The routers of all layers, applied to one sequence."""

    given: Tensor | None = None
    """[t - 1, layers, k] experts. Numbers ≥ E, and missing last tokens, leave the choice to the router."""
    first_layer: int = 0
    """The first layer with a router."""
    losses: list[Tensor] = field(default_factory=list)
    """Per layer [2]: terms of B and Z."""

    def choose(self, logits: Tensor, own: Tensor, scores: Tensor) -> Tensor:
        """Return the experts [t, k] of the next layer, from its router's logits [t, E], its ``own`` choice
        [t, k] and its scores [t, E], which sum to 1."""
        experts, chosen = logits.shape[1], own
        if self.given is not None:
            given = self.given[:, self.first_layer + len(self.losses)].long()
            known = torch.where(given < experts, given, own[: len(given)])
            chosen = torch.cat([known, own[len(given) :]])
        share = F.one_hot(chosen, experts).double().sum((0, 1)) / own.numel()
        balance = experts * (share * scores.mean(0)).sum()
        self.losses.append(torch.stack([balance, logits.logsumexp(-1).square().mean()]))
        return chosen


LogitsFunction = Callable[[Mapping[str, Tensor], Sequence[int], Tensor, Routers], Tensor]
"""(weights, token ids, rows [t], routers) → logits [t, V]; see :func:`_logits`."""


def forward(
    weights: Mapping[str, Tensor],
    arch: Architecture,
    samples: Sequence[Sample],
    temperature: float,
    routes: Sequence[Tensor] | None = None,
    compute_logits: LogitsFunction | None = None,
) -> Scores:
    """Score every sample at the temperature of sampling, which divides the logits. ``compute_logits`` is the
    model; default: this module's.

    ``routes``: per sample, :attr:`Routers.given` of its P + L - 1 tokens. Raises ``ValueError`` if a weight
    is not float64.
    """
    for name, weight in weights.items():
        if weight.dtype != torch.float64:
            raise ValueError(f"{name} is {weight.dtype}; the reference needs float64")
    rows, losses = [], []
    for number, sample in enumerate(samples):
        given = None if routes is None else routes[number]
        routers = Routers(given=given, first_layer=arch.dense_layers)
        ids = (sample.prompt.token_ids, sample.completion.token_ids)
        written = torch.tensor(sample.completion.loss_mask, dtype=torch.bool)
        starts = sample.completion.row_starts
        scored = log_probs_and_entropy(weights, arch, *ids, temperature, routers, starts, compute_logits)
        rows.append((scored[0][written], scored[1][written]))
        if routers.losses:
            losses.append(torch.stack(routers.losses).sum(0))
    return Scores(
        weights=weights,
        advantages=tuple(sample.advantage for sample in samples),
        log_probs=tuple(log_probs for log_probs, _ in rows),
        entropies=tuple(entropy for _, entropy in rows),
        turns=tuple(tuple(len(turn) for turn in sample.completion.turns if turn) for sample in samples),
        router_losses=tuple(losses),
    )


def reference(
    scores: Scores,
    loss: PolicyLossConfig,
    drifts: Sequence[Tensor],
    *,
    ref_drifts: Sequence[Tensor] | None = None,
    kl_coef: float = 0.0,
    aux_loss_coef: float = 0.0,
    z_loss_coef: float = 0.0,
) -> Reference:
    """Compute one loss and its gradient.

    Args:
        scores: of all samples of the optimizer step.
        loss: its configuration, without measured values: ``c_low`` and ``c_high`` apply whatever
            ``calibrate`` says, and a drift only if it is given.
        drifts: per sample [L] float64: log π − log π_old of each token; S is their sum. |S| must be below
            700, where e^S overflows.
        ref_drifts: the same for log π − log π_ref.
        kl_coef: factor of KL in the loss; needs ``ref_drifts``.
        aux_loss_coef: factor of B.
        z_loss_coef: factor of Z.

    Raises:
        ValueError: drifts do not fit the samples or are missing, or no sample has a response.
    """
    if kl_coef and ref_drifts is None:
        raise ValueError(f"kl_coef = {kl_coef} needs ref_drifts")
    log_ratios = _log_ratios(scores.log_probs, drifts)
    num_sequences = sum(len(row) > 0 for row in log_ratios)
    num_tokens = sum(len(row) for row in log_ratios)
    if not num_sequences:
        raise ValueError("no sample has a response")

    def token_mean(rows: Sequence[Tensor]) -> Tensor:
        return torch.stack([row.sum() for row in rows]).sum() / num_tokens

    turns = scores.turns or [()] * len(log_ratios)
    each = zip(log_ratios, scores.advantages, scores.log_probs, turns, strict=True)
    terms = [_defined(loss, *sample) if len(sample[0]) else None for sample in each]
    present = [term for term in terms if term is not None]
    means = [term.objective.mean() for term in present if term.mean == "sequence"]
    tokens = [term.objective.sum() for term in present if term.mean == "token"]
    objective = sum(means, ZERO) / num_sequences + sum(tokens, ZERO) / num_tokens
    entropy = token_mean(scores.entropies)
    kl = ZERO
    if ref_drifts is not None:
        kl = token_mean([row.square() / 2 for row in _log_ratios(scores.log_probs, ref_drifts)])
    total = -(objective + loss.entropy_coef * entropy - kl_coef * kl)
    for (balance, z_loss), row in zip(scores.router_losses, log_ratios, strict=False):
        if len(row):
            total = total + (aux_loss_coef * balance + z_loss_coef * z_loss) / num_sequences

    learned = {name: weight for name, weight in scores.weights.items() if weight.requires_grad}
    # The next loss needs the graph.
    slopes = torch.autograd.grad(total, list(learned.values()), retain_graph=True)
    gradients = dict(zip(learned, slopes, strict=True))
    return Reference(
        log_probs=[row.detach() for row in scores.log_probs],
        log_ratio_sums=torch.stack([row.detach().sum() for row in log_ratios]),
        clipped=torch.tensor([term.clipped if term else 0.0 for term in terms], dtype=torch.float64),
        out_of_band=torch.tensor([term is not None and term.out_of_band for term in terms]),
        objective=objective.item(),
        loss=total.item(),
        entropy=entropy.item(),
        kl=kl.item(),
        gradients=gradients,
        grad_norm=math.sqrt(sum(gradient.square().sum().item() for gradient in gradients.values())),
    )


def _defined(
    loss: PolicyLossConfig, row: Tensor, advantage: float, log_probs: Tensor, turns: tuple[int, ...]
) -> Definition:
    if not (turns and loss.by_turn()):
        return loss.definition(row, advantage, log_probs)
    each = [
        loss.definition(part, advantage, scored)
        for part, scored in zip(torch.split(row, [*turns]), torch.split(log_probs, [*turns]), strict=True)
    ]
    return Definition(
        objective=torch.cat([terms.objective for terms in each]).sum()[None],
        clipped=sum(terms.clipped for terms in each) / len(each),
        out_of_band=any(terms.out_of_band for terms in each),
    )


def _log_ratios(log_probs: Sequence[Tensor], drifts: Sequence[Tensor]) -> list[Tensor]:
    """Return log π − log π_old per sample [L], where log π_old is the constant log π − ``drifts``."""
    for index, (new, drift) in enumerate(zip(log_probs, drifts, strict=True)):
        if drift.shape != new.shape:
            raise ValueError(f"drifts of sample {index} are {[*drift.shape]}; it has {len(new)} tokens")
    return [new - (new.detach() - drift) for new, drift in zip(log_probs, drifts, strict=True)]


def log_probs_and_entropy(
    weights: Mapping[str, Tensor],
    arch: Architecture,
    prompt_ids: Sequence[int],
    response_ids: Sequence[int],
    temperature: float,
    routers: Routers | None = None,
    row_starts: Sequence[int] = (),
    compute_logits: LogitsFunction | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probs [L] of one response, and the entropies [L] of its tokens' distributions, with their graph.

    ``prompt_ids`` has at least one token; L may be 0. ``temperature`` divides the logits. ``routers`` has the
    given experts, and collects router losses. ``row_starts`` are positions in the response that begin a row,
    which cannot attend to earlier tokens. ``compute_logits`` as in :func:`forward`.
    """
    ids = [*prompt_ids, *response_ids]
    rows = torch.zeros(len(ids), dtype=torch.long)
    for start in row_starts:
        rows[len(prompt_ids) + start :] += 1
    compute = compute_logits or partial(_logits, arch=arch)
    logits = compute(weights, ids, rows, routers or Routers(first_layer=arch.dense_layers))
    # Position p predicts token p + 1: the prompt's last token predicts the response's first.
    first = len(prompt_ids) - 1
    log_p = F.log_softmax(logits[first : first + len(response_ids)] / temperature, dim=-1)  # [L, V]
    chosen = log_p.gather(-1, torch.tensor(response_ids, dtype=torch.long)[:, None])[:, 0]
    return chosen, -(log_p.exp() * log_p).sum(-1)


_MIXTRAL = {"block_sparse_moe": "mlp", "w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def plain_name(name: str) -> str:
    """Translate the name of a Mixtral weight to that of the other families."""
    return ".".join(_MIXTRAL.get(word, word) for word in name.split("."))


def rotary_table(arch: Architecture, count: int) -> tuple[Tensor, Tensor]:
    """cos and sin [t, 1, d] of p·θ^(−2i/d), for positions p and pairs i < d/2, repeated for both halves.

    In fp32, then widened: transformers and Megatron both define the table in fp32, so its rounding is part of
    the model. Llama 3's scaled RoPE divides frequencies with less than one period in 8192 tokens by its
    factor, keeps those with more than four, and interpolates linearly between.
    """
    pairs = torch.arange(0, arch.head_dim, 2, dtype=torch.float32)
    frequencies = 1.0 / (arch.rope_theta ** (pairs / arch.head_dim))
    if arch.rope_factor is not None:
        kept = ((8192 * frequencies / (2 * math.pi) - 1) / (4 - 1)).clamp(0, 1)
        frequencies = kept * frequencies + (1 - kept) * frequencies / arch.rope_factor
    angles = torch.outer(torch.arange(count, dtype=torch.float32), frequencies)
    angles = torch.cat([angles, angles], dim=-1)[:, None]
    return angles.cos().double(), angles.sin().double()


def _logits(
    weights: Mapping[str, Tensor], ids: Sequence[int], rows: Tensor, routers: Routers, arch: Architecture
) -> Tensor:
    """Return [t, V]. Tokens attend to earlier ones with the same number in ``rows`` [t]."""
    x = weights["model.embed_tokens.weight"][torch.tensor(ids)]
    places = torch.cat([torch.arange(int(count)) for count in rows.bincount()])
    cos, sin = rotary_table(arch, len(ids))
    table = cos[places], sin[places]
    for layer in range(arch.num_layers):
        prefix = f"model.layers.{layer}."
        own = {plain_name(name)[len(prefix) :]: w for name, w in weights.items() if name.startswith(prefix)}
        x = x + _attention(own, arch, _rms_norm(x, own["input_layernorm.weight"], arch), table, rows)
        y = _rms_norm(x, own["post_attention_layernorm.weight"], arch)
        mlp = _swiglu(own, "mlp", y) if arch.experts is None else _mixture(own, arch.experts, y, routers)
        x = x + mlp
    head = weights["model.embed_tokens.weight" if arch.tied else "lm_head.weight"]
    return _rms_norm(x, weights["model.norm.weight"], arch) @ head.T


def _attention(
    weights: Mapping[str, Tensor], arch: Architecture, x: Tensor, table: tuple[Tensor, Tensor], rows: Tensor
) -> Tensor:
    """Return softmax(q·kᵀ / √d)·v over earlier tokens of the row, [t, hidden] → [t, hidden].

    h / g adjacent query heads share a KV head. Qwen2 has biases, Qwen3 normalises q and k per head.
    """
    query, key, value = (
        F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias")).view(len(x), -1, arch.head_dim)
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    )  # [t, h, d], [t, g, d], [t, g, d]
    if "self_attn.q_norm.weight" in weights:
        query = _rms_norm(query, weights["self_attn.q_norm.weight"], arch)
        key = _rms_norm(key, weights["self_attn.k_norm.weight"], arch)
    query, key = _rotate(query, *table), _rotate(key, *table)
    sharing = arch.num_heads // arch.num_kv_heads
    key, value = key.repeat_interleave(sharing, dim=1), value.repeat_interleave(sharing, dim=1)

    scores = torch.einsum("thd,shd->hts", query, key) / math.sqrt(arch.head_dim)
    future = torch.ones(len(x), len(x), dtype=torch.bool).triu(diagonal=1)
    attended = scores.masked_fill(future | (rows[:, None] != rows), -math.inf).softmax(dim=-1)
    mixed = torch.einsum("hts,shd->thd", attended, value)
    return mixed.flatten(1) @ weights["self_attn.o_proj.weight"].T


def _swiglu(weights: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    """Return down·(silu(gate·x) ∘ up·x), [t, hidden] → [t, hidden]."""
    gate, up, down = (weights[f"{name}.{part}_proj.weight"] for part in ("gate", "up", "down"))
    return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T


def _mixture(weights: Mapping[str, Tensor], experts: Experts, x: Tensor, routers: Routers) -> Tensor:
    """Return Σ_e p_e·swiglu_e(x) over the k experts of each token, [t, hidden] → [t, hidden].

    p is the softmax over all experts, or with ``normalize_top_k`` over these k.
    """
    logits = x @ weights["mlp.gate.weight"].T
    own = logits.topk(experts.per_token, dim=-1).indices
    chosen = routers.choose(logits, own, logits.softmax(-1))  # [t, k]
    if experts.normalize_top_k:  # the softmax over these only
        p = logits.gather(-1, chosen).softmax(-1)
    else:
        p = logits.softmax(-1).gather(-1, chosen)
    out = torch.zeros_like(x)
    for expert in range(experts.count):
        token, place = (chosen == expert).nonzero(as_tuple=True)
        part = p[token, place, None] * _swiglu(weights, f"mlp.experts.{expert}", x[token])
        out = out.index_add(0, token, part)
    return out


def _rms_norm(x: Tensor, weight: Tensor, arch: Architecture) -> Tensor:
    """Return w ∘ x / √(mean(x²) + ε) over the last dimension."""
    return weight * x / (x.square().mean(dim=-1, keepdim=True) + arch.rms_norm_eps).sqrt()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (x_i, x_{i + d/2}) of x [t, heads, d] by their angles."""
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-right, left], dim=-1) * sin
