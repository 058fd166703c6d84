"""The comparison as text for the console, as one JSON object, and as a row for each response."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

from megatron_fspo.evaluation.intervals import Estimate
from megatron_fspo.evaluation.tables import Table, by_column, columns, number, percent, plain, with_interval
from megatron_fspo.lab.explain.decomposition import Parts
from megatron_fspo.lab.explain.explanation import Explanation, LossFigures
from megatron_fspo.lab.explain.flips import Flips
from megatron_fspo.lab.explain.losses import OUTCOMES
from megatron_fspo.objective import LengthReweightingError
from megatron_fspo.objective.calibration import Exponent

NOISE = {
    "sampler": "the measured difference between trainer and sampler",
    "signs": "the tokens' log-ratios with signs at random, as if all of S were chance",
    "normal": "a random walk with the spread of S, as if all of S were chance",
}
"""Source of the noise → its words."""
INDEPENDENT = {
    "prompt": "the {:,} prompts as independent, and all rows of a prompt as going together",
    "response": "the {:,} responses as independent, and all rows of a response as going together",
    "row": "all {:,} rows as independent: the dump names neither prompts nor responses",
}
"""Kind of the clusters → its words."""
LAWS = (
    ("does not grow with L, as with a fixed number of decisions", "a constant band (exponent 0)"),
    ("grows as L, as with independent tokens", "a √L band (exponent 0.5)"),
    ("grows as L², as with a shift that all tokens share", "a band that grows as L (exponent 1)"),
)
"""What Var(S) does, and the band that clips evenly then, for |S| near L^0, L^0.5 and L^1."""
_FIGURES = "sigma exponent parts flips bins given rate matched disagreements".split()


def as_json(explanation: Explanation) -> dict[str, Any]:
    """Return all figures as JSON types: NaN is null."""
    dump = explanation.dump
    content: dict[str, Any] = {
        "file": str(dump.path),
        "responses": len(dump),
        "with_advantage": int((dump.advantages != 0).sum()),
        "tokens": int(dump.lengths.sum()),
        "empty": dump.empty,
        "nonfinite": dump.nonfinite,
        "unread": dump.unread,
        "independent": dump.clustered_by,
        "clusters": dump.clusters_count,
        "noise": explanation.noise_source,
        "words": list(sentences(explanation)),
        **{name: getattr(explanation, name) for name in _FIGURES},
    }
    return {name: plain(value) for name, value in content.items()}


def outcomes(explanation: Explanation) -> Iterator[str]:
    """Yield a line of JSON for each response: its row, L, S, A, and its outcome with each loss."""
    dump = explanation.dump
    columns = {"row": dump.rows, "length": dump.lengths, "log_ratio_sum": dump.log_ratio_sum}
    tensors = [*columns.values(), dump.advantages]
    tensors += [decisions.outcomes(dump.advantages) for decisions in explanation.decisions]
    for values in zip(*(tensor.tolist() for tensor in tensors), strict=True):
        row = dict(zip([*columns, "advantage"], values, strict=False))
        codes = zip(explanation.given, values[len(row) :], strict=True)
        yield json.dumps(row | {"outcome": {loss.name: OUTCOMES[code] for loss, code in codes}}) + "\n"


def losses_table(losses: Sequence[LossFigures]) -> Table:
    """Return the figures of each loss over all responses."""
    within = [loss.lre_within_update for loss in losses if loss.lre_within_update is not None]
    return by_column(
        {
            "loss": [loss.name for loss in losses],
            "limits": [
                ", ".join(f"{key} = {value:.3g}" for key, value in loss.limits.items()) for loss in losses
            ],
            "outside": [percent(loss.out_of_band) for loss in losses],
            "by noise": [percent(loss.noise) for loss in losses],
            "clipped": [percent(loss.clipped) for loss in losses],
            "of tokens": [percent(loss.clipped_tokens) for loss in losses],
            "LRE clipped": [_lre(loss.lre_signed) for loss in losses],
            "by chance": [number(loss.lre_signed.null_mean, ".3f") for loss in losses],
            "within a sign": [number(loss.lre_within_sign.mean, ".3f") for loss in losses],
        }
        | ({"within a step": [number(lre.mean, ".3f") for lre in within]} if within else {})
        | {"LRE outside": [_lre(loss.lre) for loss in losses], "ESS": [number(loss.ess) for loss in losses]}
    )


def _lre(error: LengthReweightingError) -> str:
    return with_interval(error.mean, *error.mean_interval, ".3f")


def bins_table(explanation: Explanation, losses: Sequence[LossFigures]) -> Table:
    """Return the figures of each loss by length."""
    bins = explanation.bins
    spans = ["–".join(map(str, dict.fromkeys((bin.low, bin.high)))) for bin in bins]
    flips: dict[str, list[str]] = {}
    if explanation.flips is not None:
        by_length = explanation.flips.by_length
        flips["flipped"] = [percent(figures.tokens) for figures in by_length]
        flips["of variance"] = [percent(figures.variance.value) for figures in by_length]
    return by_column(
        {"tokens": spans, "responses": [percent(bin.share) for bin in bins]}
        | {f"outside {loss.name}": [percent(x.out_of_band) for x in loss.by_length] for loss in losses}
        | {
            f"clipped {loss.name}, A < 0 and > 0": [
                f"{percent(x.clipped_falling)}, {percent(x.clipped_rising)}" for x in loss.by_length
            ]
            for loss in losses
        }
        | {f"ESS {loss.name}": [number(x.ess) for x in loss.by_length] for loss in losses}
        | {f"mass {loss.name}": [percent(x.mass) for x in loss.by_length] for loss in losses}
        | flips
    )


def outcomes_table(explanation: Explanation) -> Table:
    """Return the responses that change outcome between two losses."""
    pairs = explanation.disagreements
    return by_column(
        {
            "kept by": [pair.kept_by for pair in pairs],
            "clipped by": [pair.clipped_by for pair in pairs],
            "responses": [f"{pair.responses:,}" for pair in pairs],
            "in part": [f"{pair.in_part:,}" for pair in pairs],
            "share": [percent(pair.share) for pair in pairs],
            "L, quartiles": ["–".join(map(str, pair.lengths)) if pair.responses else "-" for pair in pairs],
            "A > 0": [percent(pair.rising) for pair in pairs],
            "reward": [number(pair.mean_reward) for pair in pairs],
            "rows, such as": [" ".join(map(str, dict.fromkeys(pair.examples))) or "-" for pair in pairs],
        }
    )


def render(explanation: Explanation) -> str:
    """Return the text for the console."""
    given, matched = explanation.given, explanation.matched
    limits = "at this rate" if matched else "with the limits given"
    title = "with the limits given; clipped: of responses with an advantage; ESS of the importance weights"
    blocks = [(title, losses_table(given))]
    if matched:
        blocks.append((f"with {explanation.rate:.1%} outside for each", losses_table(matched)))
    blocks += [
        (f"by length, {limits}; mass: of the gradient", bins_table(explanation, matched or given)),
        ("responses that change outcome, with the limits given", outcomes_table(explanation)),
    ]
    tables = (["", title, *columns(*table)] for title, table in blocks)
    return "\n".join([*sentences(explanation), *(line for lines in tables for line in lines)])


def sentences(explanation: Explanation) -> Iterator[str]:
    """Yield the verdict, and then what the tables do not have."""
    given, matched, rate = explanation.given, explanation.matched, explanation.rate
    if matched:
        yield _verdict([loss for loss in matched if math.isfinite(loss.lre_signed.mean)], rate)
    else:
        yield (
            f"{given[0].name} has none or all of the responses outside its band, so there is no rate to "
            "compare the losses at: give one, such as --rate 0.1."
        )
    yield _growth(explanation.exponent)
    yield _dump(explanation)
    if explanation.parts is not None:
        yield _parts(explanation.parts)
    if explanation.flips is not None:
        yield _flips(explanation.flips)
    yield f"By noise: {NOISE[explanation.noise_source]}."
    if not any(pair.responses for pair in explanation.disagreements):
        yield "No response changes its outcome: the losses clip the same ones."
    for loss in matched:
        if loss.out_of_band > rate + 0.005:
            yield (
                f"{loss.name} has {loss.out_of_band:.1%} outside even at the widest limits of float64: "
                "it does not compare with the others."
            )


def _verdict(losses: Sequence[LossFigures], rate: float) -> str:
    """Say which losses clip less evenly over length than the best one, by the intervals of LRE."""
    even = sorted(losses, key=lambda loss: loss.lre_signed.mean)
    listed = "; ".join(f"{loss.name} {_lre(loss.lre_signed)}" for loss in even)
    ends = [loss.lre_signed.mean_interval for loss in even]
    apart = [loss.name for loss, (low, _) in zip(even, ends, strict=True) if low > ends[0][1]]
    first = f"{even[0].name} clips" if apart else "No loss clips clearly"
    verdict = f"{first} more evenly over length than {' and '.join(apart) or 'another'}"
    return f"{verdict}, with {rate:.1%} outside for each. LRE (0: even): {listed}."


def _growth(grown: Exponent | str) -> str:
    """Say which of the laws holds, if the interval of the exponent is nearest to one of them at both ends."""
    if isinstance(grown, str):
        return f"How Var(S) grows with L is not measured: {grown}."
    first, last = (min(max(round(2 * end), 0), 2) for end in grown.interval)
    (law, band), (other, _) = LAWS[first], LAWS[last]
    if first < last:
        return f"Var(S) {law}, or it {other}, which is open: |S| {_law(grown)}."
    return f"Var(S) {law}: |S| {_law(grown)}. So {band} would clip evenly."


def _dump(explanation: Explanation) -> str:
    dump, bins = explanation.dump, explanation.bins
    text = (
        f"{len(dump):,} responses of {bins[0].low:,} to {bins[-1].high:,} tokens, "
        f"{int((dump.advantages != 0).sum()):,} of them with an advantage; the {bins[-1].share:.0%} from "
        f"{bins[-1].low:,} tokens on have {bins[-1].tokens:.0%} of the tokens. S/√L has the spread "
        f"{explanation.sigma:.3g}, so a √L band of 2 sigma has c = {2 * explanation.sigma:.3g}"
    )
    text += f". Intervals take {INDEPENDENT[dump.clustered_by].format(dump.clusters_count)}"
    if dump.log_ratio is None:
        text += ". Without token log-probs losses that decide by tokens or prefixes are left out"
    left_out = [f"{n:,} {what}" for n, what in ((dump.empty, "empty"), (dump.nonfinite, "not finite")) if n]
    text += f". Left out: {', '.join(left_out)}" if left_out else ""
    return text + (f". Fields without a meaning here: {', '.join(dump.unread)}." if dump.unread else ".")


def _parts(parts: Parts) -> str:
    def figure(estimate: Estimate, form: str = ".3g") -> str:
        return with_interval(estimate.value, estimate.low, estimate.high, form)

    told = (
        f"equal to the noise at {parts.crossover:,.0f} tokens" if parts.signal.low > 0 else "not told from 0"
    )
    return (
        f"S is noise of {figure(parts.noise)} nats per √token, plus a shift of {figure(parts.signal)} nats "
        f"per token that all tokens of a response share ({told}). At the median of "
        f"{parts.median:,} tokens, S grows as L^{figure(parts.exponent, '.2f')}."
    )


def _law(exponent: Exponent) -> str:
    return f"grows as L^{with_interval(exponent.value, *exponent.interval)}"


def _flips(flips: Flips) -> str:
    share, grown = flips.all.variance, flips.exponent_without
    law = "" if isinstance(grown, str) else f"|S| {_law(grown)}, and "
    rates = flips.all.clipped.items()
    clipped = ", ".join(f"{name} {without:.1%} in place of {rate:.1%}" for name, (rate, without) in rates)
    return (
        f"Routers would send {flips.all.tokens:.1%} of the tokens to other experts than the old pass took; "
        f"{with_interval(share.value, share.low, share.high, '.1%')} of the variance of S/√L, about its "
        f"drift, goes with them. Without them {law}the losses clip: {clipped}."
    )
