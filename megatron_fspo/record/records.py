"""One record per sequence and optimizer step: the source of every per-sequence metric.

Rates are per sequence, over the whole batch and all ranks: gathered first, averaged once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fspo.objective import effective_sample_size, length_reweighting_error
from megatron_fspo.objective.calibration import fit_exponent, sigma_hat
from megatron_fspo.objective.surrogate import LossTerms
from megatron_fspo.packing.batch import MicroBatch
from megatron_fspo.parallel.segments import sequence_sums
from megatron_fspo.record.tokens import Piece, cut_pieces


@dataclass(frozen=True, kw_only=True)
class SequenceRecord:
    """One sequence in one optimizer step: its S and the clip decision on it."""

    sample: int
    """Index into the rollout's samples."""
    rank: int
    """Data-parallel rank that held it."""
    update: int = 0
    """The optimizer step on its rollout, from 1; 0 for one that was dropped before."""
    length: int
    log_ratio_sum: float
    """S, in nats."""
    advantage: float
    clipped_low: float = 0.0
    """1 or 0; with a token-level loss, the share of its tokens."""
    clipped_high: float = 0.0
    dual_clipped: float = 0.0
    out_of_band: bool = False
    below: bool = False
    """Out of band at the lower edge; False if limits are not on S."""
    nonfinite: bool = False
    ratio: float | None = None
    """Importance weight in its gradient, 0 where a clip acts; None where tokens have their own."""
    flipped: int = 0
    """Tokens that a router would have sent to other experts than the old pass did."""
    flipped_log_ratio_sum: float = 0.0
    """Their part of S."""
    drift: float = 0.0
    """Centre of the band, in nats per token."""

    @property
    def counts(self) -> bool:
        """True if it is in the denominator of a rate: it has a response, and was not dropped."""
        return self.length > 0 and not self.nonfinite

    @property
    def clipped(self) -> float:
        """The part of it that is clipped, on any side."""
        return self.clipped_low + self.clipped_high + self.dual_clipped


_COLUMNS = (
    *("log_ratio_sum", "clipped_low", "clipped_high", "dual_clipped", "out_of_band", "below", "nonfinite"),
    "ratio",
    *("flipped", "flipped_log_ratio_sum"),
)


class Recorder:
    """Observes a policy loss. What it sees stays on the device until the schedule is over."""

    def __init__(self, update: int, every: int = 0, drift: float = 0.0) -> None:
        self._update, self._drift = update, drift
        self.every = every
        """Token log-probs are kept of every so many samples; 0: of none."""
        self._seen: list[tuple[MicroBatch, Tensor]] = []
        self._log_ratios: list[tuple[MicroBatch, Tensor]] = []

    def __call__(self, batch: MicroBatch, terms: LossTerms, log_ratio: Tensor) -> None:
        clips = (terms.clipped_low, terms.clipped_high, terms.dual_clipped)
        below = torch.zeros_like(terms.out_of_band) if terms.below is None else terms.below
        columns = (terms.log_ratio_sum, *clips, terms.out_of_band, below, terms.nonfinite, terms.ratio)
        self._seen.append((batch.on_host, torch.stack([column.double() for column in columns])))
        if batch.router is not None or self.every:
            self._log_ratios.append((batch, log_ratio))

    def pieces(self) -> list[Piece]:
        """Return token log-probs of every so many samples, as far as this rank holds them."""
        of_batches = (cut_pieces(self._update, *seen, self.every) for seen in self._log_ratios if self.every)
        return [piece for pieces in of_batches for piece in pieces]

    def records(
        self, rank: int, flipped: Sequence[Tensor] = (), group: dist.ProcessGroup | None = None
    ) -> list[SequenceRecord]:
        """Return the records of all micro-batches, in one copy, with the data-parallel rank. ``flipped`` [t]
        bool is of each micro-batch that routers had a part in, see
        :meth:`~megatron_fspo.mcore.model.router.RouterPasses.flipped`; collective over ``group``, context
        parallel, with it."""
        if not self._seen:
            return []
        names = ("sample_index", "lengths", "advantages")
        known = [torch.cat([getattr(batch, name) for batch, _ in self._seen]).tolist() for name in names]
        decided = torch.cat([columns for _, columns in self._seen], dim=1)
        of_flips = [decided.new_zeros(2, decided.shape[1])]
        if flipped:
            assert group is not None
            seen = zip(self._log_ratios, flipped, strict=True)
            of_flips = [_flips(batch, log_ratio, tokens, group) for (batch, log_ratio), tokens in seen]
        columns = torch.cat([decided, torch.cat(of_flips, dim=1)])
        values = dict(zip(_COLUMNS, columns.tolist(), strict=True))
        for name in ("out_of_band", "below", "nonfinite"):
            values[name] = [flag > 0 for flag in values[name]]
        values["ratio"] = [None if math.isnan(ratio) else ratio for ratio in values["ratio"]]
        values["flipped"] = [int(count) for count in values["flipped"]]
        fields = dict(zip(("sample", "length", "advantage"), known, strict=True)) | values
        return [
            SequenceRecord(
                rank=rank, update=self._update, drift=self._drift, **dict(zip(fields, row, strict=True))
            )
            for row in zip(*fields.values(), strict=True)
        ]


def _flips(batch: MicroBatch, log_ratio: Tensor, flipped: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return [2, n] response tokens with a flip, and the sum of their log-ratios."""
    values = torch.stack([flipped.double(), torch.where(flipped, log_ratio.double(), 0.0)])
    return sequence_sums(values, batch.loss_mask, batch.segment, batch.lengths.numel(), group=group)


def as_tensors(records: Sequence[SequenceRecord]) -> tuple[Tensor, Tensor]:
    """Return S [N] and L [N]."""
    return (
        torch.tensor([r.log_ratio_sum for r in records], dtype=torch.float64),
        torch.tensor([r.length for r in records]),
    )


def estimate_sigma(records: Sequence[SequenceRecord], exponent: float = 0.5) -> float | None:
    """Return σ̂ of S over the band's width; None where no sequence can say."""
    if not any(math.isfinite(r.log_ratio_sum) and r.length for r in records):
        return None
    return sigma_hat(*as_tensors(records), exponent)


def clip_metrics(
    records: Sequence[SequenceRecord],
    *,
    measured: Sequence[SequenceRecord] | None = None,
    samples: int,
    seed: int,
    exponent: float = 0.5,
) -> dict[str, float]:
    """Clip rates, length fairness and spread over the off-policy records of one step.

    Args:
        records: those of the first optimizer step left out where S = 0 by construction (old log-probs from
            the trainer). What was dropped as not finite, and empty responses, count nowhere.
        measured: those that ``fspo/sigma_hat`` and ``fspo/exponent_fit`` are of; all of them without it.
        samples: responses to a prompt, which go together.
        seed: for the errors of chance behind the null floor of LRE.
        exponent: a of the band, and of σ̂, which is around its centre.

    Returns:
        among them how evenly the sequences with an advantage carry the gradient, by their importance weights:
        ``fspo/ess``, their effective sample size as a share of their number (clipped ones weigh 0), and
        ``fspo/weight_max_share``, the largest one's part of their sum. Not with a token-level loss, as are
        the shares below and above the band and the effective sample size by length.
    """
    records = [r for r in records if r.counts]
    if not records:
        return {}
    lengths = as_tensors(records)[1]
    spread = records if measured is None else [r for r in measured if r.counts]
    sums, kept = as_tensors(spread)
    sums -= torch.tensor([r.drift for r in spread]) * kept
    outside = torch.tensor([r.out_of_band for r in records])
    # Sign-aware: a sequence without an advantage can never be clipped and says nothing.
    decided = [r for r in records if r.advantage != 0]
    clipped = torch.tensor([r.clipped > 0 for r in decided], dtype=torch.bool)
    prompts = torch.tensor([r.sample // samples for r in records])
    decided_lengths = torch.tensor([r.length for r in decided])
    asked = torch.tensor([r.sample // samples for r in decided])
    error = partial(length_reweighting_error, draws=200, interval=False, seed=seed)
    lre = error(~outside, lengths, clusters=prompts)
    signed = error(~clipped, decided_lengths, clusters=asked)
    signs, updates = [1 + (r.advantage > 0) for r in decided], [r.update for r in decided]
    count = len(decided) or math.nan
    metrics = {
        "actor/pg_clipfrac": sum(r.clipped_low + r.clipped_high for r in records) / count,
        "fspo/clip_low": sum(r.clipped_low for r in records) / count,
        "fspo/clip_high": sum(r.clipped_high for r in records) / count,
        "fspo/dual_clip_frac": sum(r.dual_clipped for r in records) / count,
        "fspo/out_of_band": outside.double().mean().item(),
        "fspo/lre_mean": lre.mean,
        "fspo/lre_max": lre.max,
        "fspo/lre_null": lre.null_mean,
        "fspo/lre_signed_mean": signed.mean,
        "fspo/lre_signed_max": signed.max,
        "fspo/lre_signed_null": signed.null_mean,
        "fspo/sigma_hat": sigma_hat(sums, kept, exponent) if spread else math.nan,
        "fspo/exponent_fit": fit_exponent(sums, kept) if spread else math.nan,
    }
    for name, values in (("sign", signs), ("update", updates)):
        once, stratum = partial(length_reweighting_error, ~clipped, draws=0), torch.tensor(values)
        metrics[f"fspo/lre_within_{name}"] = once(decided_lengths, strata=stratum).mean
        metrics[f"fspo/reweighting_{name}"] = once(stratum).mean
    weights = [r.ratio for r in decided]
    if by_sequence := bool(weights) and None not in weights:
        ratios = torch.tensor(weights, dtype=torch.float64)
        total = ratios.sum().item()
        metrics["fspo/ess"] = effective_sample_size(ratios)
        metrics["fspo/weight_max_share"] = ratios.max().item() / total if total else math.nan
    for number, bin in enumerate(lre.bins):
        metrics[f"fspo/clip_rate/bin_{number}"] = 1 - bin.accepted_rate
        metrics[f"fspo/clip_rate/length_{number}"] = (bin.low + bin.high) / 2
        if by_sequence:
            here = [r for r in records if bin.low <= r.length <= bin.high]
            metrics |= {f"fspo/{name}/bin_{number}": value for name, value in _sides(here).items()}
    return metrics


def _sides(records: Sequence[SequenceRecord]) -> dict[str, float]:
    """Return the shares below and above the band, and the effective sample size, of some records."""
    below, outside = (sum(getattr(r, name) for r in records) for name in ("below", "out_of_band"))
    weights = [r.ratio for r in records if r.advantage != 0 and r.ratio is not None]
    ess = effective_sample_size(torch.tensor(weights)) if weights else math.nan
    return {"below": below / len(records), "above": (outside - below) / len(records), "ess": ess}
