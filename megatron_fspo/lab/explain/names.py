"""The names of a dump's fields: ours, and those that TRL and verl give to the same quantities.

TRL's are the names in ``GRPOTrainer._compute_loss`` (1.16.0) and of the column of its completions table;
verl's those of its batch and of the arguments of a policy loss (0.9.1). Both were read in the published
wheels. A name that is not here is given on the command line, as in ``--fields advantage=adv``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from megatron_fspo.errors import InputError

NAMES: Mapping[str, tuple[str, ...]] = {
    "length": ("length", "L"),
    "log_ratio_sum": ("log_ratio_sum", "S"),
    "log_probs": ("log_probs", "per_token_logps", "log_prob"),
    "old_log_probs": ("old_log_probs", "old_per_token_logps", "old_log_prob"),
    "sampled_log_probs": ("sampled_log_probs", "sampling_per_token_logps", "rollout_log_probs"),
    "mask": ("mask", "completion_mask", "response_mask"),
    "advantage": ("advantage", "A", "advantages"),
    "reward": ("reward", "score"),
    "step": ("step",),
    "prompt": ("prompt", "uid"),
    "response": ("response",),
}
"""Field → names that it is known by, the first of which is ours."""


def given_names(words: Iterable[str]) -> dict[str, str]:
    """``advantage=adv`` → the name in the file by field. ``InputError`` for a field that there is not."""
    found = {}
    for word in words:
        field, _, name = word.partition("=")
        if field not in NAMES or not name:
            raise InputError(f"--fields {word}: must be FIELD=NAME, where FIELD is one of {', '.join(NAMES)}")
        found[field] = name
    return found


def names_in(keys: Sequence[str], given: Mapping[str, str]) -> dict[str, str]:
    """The name of each field that a row with these keys has.

    Raises:
        InputError: the row has two names of one field, or lacks a name that was given.
    """
    found = {}
    for field, known in NAMES.items():
        here = [name for name in ([given[field]] if field in given else known) if name in keys]
        if field in given and not here:
            raise InputError(f"no field {given[field]!r}, which --fields gives for {field}")
        if len(here) > 1:
            raise InputError(
                f"{here[0]!r} and {here[1]!r} both mean {field}: keep one, or say --fields {field}=…"
            )
        if here:
            found[field] = here[0]
    _check_enough(found)
    return found


def _check_enough(found: Mapping[str, str]) -> None:
    """Raise ``InputError`` unless L, S and A follow from these fields."""

    def known(field: str) -> str:
        return " or ".join(map(repr, NAMES[field]))

    if "advantage" not in found:
        raise InputError(f"no field {known('advantage')}: the advantage says which side of a band clips")
    both = {"log_probs", "old_log_probs"} <= found.keys()
    if not both and "log_ratio_sum" not in found:
        lacking = next((field for field in ("old_log_probs", "log_probs") if field not in found), "")
        other = {"log_probs": "old_log_probs", "old_log_probs": "log_probs"}[lacking]
        if other in found:
            raise InputError(f"{found[other]!r} without {known(lacking)}: a log-ratio needs both policies")
        raise InputError(
            f"no field {known('log_ratio_sum')}, and no token log-probs of both policies "
            f"('log_probs' and 'old_log_probs'): nothing here says how far the policy moved. "
            "docs/explain.md has how TRL and verl write them"
        )
    if not both and "length" not in found:
        raise InputError(f"no field {known('length')}: every band depends on the number of response tokens")
    if "sampled_log_probs" in found and not both:
        raise InputError(f"{found['sampled_log_probs']!r} without 'log_probs' and 'old_log_probs'")
