"""The findings in sentences: what somebody says who has read the tables."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_fspo.lab.explain.findings import Disagreement, Findings, OfLoss
from megatron_fspo.lab.explain.parts import Figure, Parts

NOISE = {
    "sampler": "the measured difference between trainer and sampler",
    "signs": "the tokens' log-ratios with signs at random, as if all of S were chance",
    "normal": "a random walk with the spread of S, as if all of S were chance",
}
"""Where noise comes from."""
INDEPENDENT = {
    "prompt": "the {:,} prompts as independent, and all rows of a prompt as going together",
    "response": "the {:,} responses as independent, and all rows of a response as going together",
    "row": "all {:,} rows as independent: the dump names neither prompts nor responses",
}
"""By what a dump is clustered."""
_SEVERAL = 3
"""Disagreements that are told of, the largest."""


def sentences(found: Findings) -> Iterator[str]:
    """In the order of the tables."""
    yield _dump(found)
    if found.parts is not None:
        yield _parts(found.parts)
    yield (
        "Outside their bands: "
        + ", ".join(f"{one.name} {one.out_of_band:.1%} ({limits_of(one.limits)})" for one in found.given)
        + f". Noise alone ({NOISE[found.noise_source]}) would put there: "
        + ", ".join(f"{one.name} {one.noise:.1%}" for one in found.given)
        + "."
    )
    yield from _fates(found)
    yield from _matched(found)
    yield from _weights(found)


def limits_of(limits: dict[str, float]) -> str:
    """``c_low = 0.03, c_high = 0.03``."""
    return ", ".join(f"{name} = {value:.3g}" for name, value in limits.items())


def _dump(found: Findings) -> str:
    dump, bins = found.dump, found.bins
    text = (
        f"{len(dump):,} responses of {bins[0].low:,} to {bins[-1].high:,} tokens, "
        f"{int((dump.advantages != 0).sum()):,} of them with an advantage. S/√L has the spread "
        f"{found.sigma:.3g}, so a √L band of 2 sigma has c = {2 * found.sigma:.3g}"
    )
    grown = found.exponent
    if isinstance(grown, str):
        text += f"; how |S| grows with L is not measured: {grown}"
    else:
        low, high = grown.interval
        text += f"; |S| grows as L^{grown.value:.2f} [{low:.2f}, {high:.2f}], where a random walk has 0.5"
    text += f". Intervals take {INDEPENDENT[dump.clustered_by].format(len(dump.clusters.unique()))}"
    if dump.log_ratio is None:
        text += ". Without token log-probs CTPO, which decides for every prefix, is left out"
    left_out = [f"{n:,} {what}" for n, what in ((dump.empty, "empty"), (dump.nonfinite, "not finite")) if n]
    return text + (f". Left out: {', '.join(left_out)}." if left_out else ".")


def _parts(parts: Parts) -> str:
    text = (
        f"Taken apart by the halves of each response, S has noise of {_figure(parts.noise)} nats per √token "
        f"and, in all tokens of a response alike, {_figure(parts.signal)} nats per token"
    )
    if parts.signal.low > 0:
        text += f"; the two are equal at {parts.crossover:,.0f} tokens"
    else:
        text += ", which is not told from 0"
    return f"{text}. At the median of {parts.median:,} tokens it grows as L^{_figure(parts.exponent, '.2f')}."


def _figure(found: Figure, form: str = ".3g") -> str:
    return f"{found.value:{form}} [{found.low:{form}}, {found.high:{form}}]"


def _fates(found: Findings) -> Iterator[str]:
    told = sorted((one for one in found.disagreements if one.responses), key=lambda one: -one.responses)
    if not told:
        yield "No response changes its fate: the losses clip the same ones."
    for one in told[:_SEVERAL]:
        yield _disagreement(one)


def _disagreement(one: Disagreement) -> str:
    low, median, high = one.lengths
    in_part = f", {one.in_part:,} of them in part" if one.in_part else ""
    text = (
        f"{one.kept_by} keeps {one.responses:,} responses ({one.share:.1%} of those with an advantage) that "
        f"{one.clipped_by} clips{in_part}: half of them have {low:,} to {high:,} tokens, "
        f"the median is {median:,}; {one.rising:.0%} have A > 0"
    )
    if one.mean_reward == one.mean_reward:
        text += f", the mean reward is {one.mean_reward:.3g}"
    return text + "."


def _matched(found: Findings) -> Iterator[str]:
    first = found.given[0].name
    for one in found.limits_for:
        if one.name == first:
            yield (
                f"{first} puts as many outside as {one.to} does ({one.out_of_band:.1%}) with "
                f"{limits_of(one.limits)}."
            )
    if not found.matched:
        yield (
            f"{first} has none or all of the responses outside its band, so there is no rate to compare the "
            "losses at: give one, such as --rate 0.1."
        )
        return
    fairest = sorted(
        (one for one in found.matched if one.lre.mean == one.lre.mean), key=lambda one: one.lre.mean
    )
    yield (
        f"With {found.rate:.1%} outside for each, as near as responses allow, LRE is "
        + ", ".join(f"{_lre(one)} for {one.name}" for one in fairest)
        + "; LRE whose interval reaches the floor of chance shows no dependence on length."
    )
    for loss in found.matched:
        if loss.out_of_band > found.rate + 0.005:
            yield (
                f"{loss.name} has {loss.out_of_band:.1%} outside even at the widest limits of float64: "
                "it does not compare with the others."
            )


def _lre(one: OfLoss) -> str:
    low, high = one.lre.mean_interval
    return f"{one.lre.mean:.3f} [{low:.3f}, {high:.3f}; by chance {one.lre.null_mean:.3f}]"


def _weights(found: Findings) -> Iterator[str]:
    longest = found.bins[-1]
    compared = [one for one in found.matched or found.given if one.by_length[-1].ess == one.by_length[-1].ess]
    if not compared:
        return
    span = (
        f"{longest.low:,} tokens"
        if longest.low == longest.high
        else f"{longest.low:,} to {longest.high:,} tokens"
    )
    yield (
        f"The longest responses, of {span}, are {longest.share:.0%} of all and have "
        f"{longest.tokens:.0%} of the tokens. Of the gradient they have "
        + ", ".join(f"{one.by_length[-1].mass:.0%} with {one.name}" for one in compared)
        + "; and their weights are worth "
        + ", ".join(f"{one.by_length[-1].ess:.0%} with {one.name}" for one in compared)
        + " of their number."
    )
