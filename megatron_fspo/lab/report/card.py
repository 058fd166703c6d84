"""The model card of a run, and its upload to the Hugging Face Hub."""

from __future__ import annotations

import json
import re
from pathlib import Path

from megatron_fspo.errors import InputError, TrainingError
from megatron_fspo.lab.report.figures import RunData, changed_keys, facts
from megatron_fspo.record.rows import METRICS, is_evaluation


def model_card(folder: Path) -> str:
    """Return the card: base model, settings, and accuracy with 95% intervals over prompts.
    Raises ``InputError`` if the folder holds no run with a step."""
    data = RunData(folder)
    series, loss, base = data.history.series, data.config.loss.name, _base(data.config.model.checkpoint)
    about: dict[str, object] = {"library_name": "transformers", "tags": ["reinforcement-learning", loss]}
    about |= {"base_model": base} if base else {}
    rows = []
    for name in filter(is_evaluation, data.history.names()):
        three = [series(key).values for key in (name, f"{name}/low", f"{name}/high")]
        ends = ["{:.3f} [{:.3f}, {:.3f}]".format(*(values[step] for values in three)) for step in (0, -1)]
        rows.append(f"| {name.removeprefix('val/')} | {' | '.join(ends)} |")
    split = [f"{key.removeprefix('parallel.')} {value}" for key, value in changed_keys(data.config)
             if key.startswith("parallel.")]  # fmt: skip
    layout = {"Layout": ", ".join(split) or "data parallel"}
    lines = [
        "---",
        *(f"{key}: {json.dumps(value)}" for key, value in about.items()),
        "---",
        f"\n# {data.config.run.name}\n",
        f"{base or data.config.model.checkpoint.name} after {data.steps[-1]:,} steps of {loss} "
        "with megatron_fspo. The configuration is in `fspo/config.toml`.\n",
        *(f"- **{name}**: {text}" for name, text in (facts(data) | layout).items()),
    ]
    if rows:
        lines += ["\n| held-out accuracy [95% interval] | first | last |", "|---|---|---|", *rows]
    return "\n".join(lines) + "\n"


def push(folder: Path, repo: str) -> str:
    """Upload the exported model, its card, configuration and metrics; return the address. Raises
    ``InputError`` without an export or a token, ``TrainingError`` if the Hub refuses."""
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError

    operations = [CommitOperationAdd(path, source) for path, source in contents(folder).items()]
    api = HfApi()
    try:
        api.create_repo(repo, private=True, exist_ok=True)
        done = api.create_commit(repo, operations, commit_message=f"{folder.name}, by megatron_fspo")
    except (HFValidationError, LocalTokenNotFoundError) as error:
        raise InputError(f"{repo}: {' '.join(str(error).split())}") from None
    except (HfHubHTTPError, OSError) as error:
        raise TrainingError(
            f"{repo}: the Hub does not take it: {' '.join(str(error).split())[:300]}"
        ) from None
    return str(done.commit_url)


def contents(folder: Path) -> dict[str, Path | bytes]:
    """Return name → file or text of all that :func:`push` uploads."""
    export = folder / "hf"
    if not (export / "config.json").is_file():
        raise InputError(f"{export}: holds no exported model; a run writes it at its end")
    files: dict[str, Path | bytes] = {
        str(path.relative_to(export)): path for path in sorted(export.rglob("*")) if path.is_file()
    }
    own = {f"fspo/{name}": folder / name for name in ("config.toml", METRICS)}
    return files | own | {"README.md": model_card(folder).encode()}


def _base(checkpoint: Path) -> str | None:
    """Return the name on the Hub of the model that was trained, if its path has one."""
    cached = re.search(r"models--([\w.-]+?)--([\w.-]+)", str(checkpoint))
    return f"{cached[1]}/{cached[2]}" if cached else None
