"""A TOML file and overrides: what is read, what is written back, and every complaint."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Annotated, Any

import pytest
import tomli_w
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from megatron_fspo.cli.train import describe_keys
from megatron_fspo.config import Config
from megatron_fspo.config.data import Data, DataSet
from megatron_fspo.config.loading import _line, legal_keys, load_config, save_config
from megatron_fspo.errors import InputError
from megatron_fspo.losses import FSPOLoss, RLOOLoss, loss_sections

REQUIRED: dict[str, Any] = {
    "run": {"steps": 3},
    "model": {"checkpoint": "checkpoint"},
    "data": {"train": "train.jsonl"},
    "reward": {"name": "exact_match"},
    "rollout": {"prompts": 8, "max_response_tokens": 100},
}
LOSSES = {section.model_fields["name"].default: section for section in loss_sections()}
NAMES = ", ".join(LOSSES)
CORRECTIONS = ("none", "token_tis", "icepop", "sequence_tis", "sequence_mask", "length_fair_gate")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file with the required keys alone."""
    path = tmp_path / "run.toml"
    path.write_text(tomli_w.dumps(REQUIRED), encoding="utf-8")
    return path


def complaint(path: Path, *overrides: str) -> str:
    """What the user is told, without the name of the file or flag in front."""
    with pytest.raises(InputError) as caught:
        load_config(path, overrides)
    file, flag = (
        rf"{re.escape(str(path))}( \+ command line)?: ",
        r"--[a-z][\w.:-]*: (?=unknown)|--(?=[\w.:]+ = )",
    )
    assert "\n" not in str(caught.value)
    return re.sub(rf"^({file}|{flag})", "", str(caught.value))


def values(field: FieldInfo) -> st.SearchStrategy[Any]:
    """Legal values of a field, from its type and limits alone (hypothesis reads the same annotations)."""
    if field.annotation in [Data.model_fields[key].annotation for key in ("train", "validation")]:
        return st.one_of(values(DataSet.model_fields["file"]), tables(weighted=field.is_required()))
    if field.annotation == Data.model_fields["template"].annotation:
        return st.sampled_from(["boxed", "Q: {prompt}\nA:"])
    if field.annotation in (Path, Path | None):
        return (st.just("none") | st.text(st.characters(exclude_categories=["Cs"]))).map(Path)
    if field.annotation is str:
        return st.text(st.characters(exclude_categories=["Cs"]))
    annotation: Any = Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation
    check = TypeAdapter(annotation, config=ConfigDict(allow_inf_nan=False))

    def legal(value: Any) -> bool:  # hypothesis does not look for limits inside `X | None`
        try:
            check.validate_python(value)
        except ValidationError:
            return False
        return True

    usual = st.from_type(annotation).filter(legal)
    # The word for None where text is not legal.
    return usual | st.just("none") if legal("none") else usual


@st.composite
def tables(draw: st.DrawFn, *, weighted: bool) -> list[dict[str, Any]]:
    """Of several data sets."""
    sets = []
    for name in draw(
        st.lists(st.from_regex("[a-z]{1,5}", fullmatch=True), min_size=1, max_size=3, unique=True)
    ):
        one: dict[str, Any] = {"file": f"{name}.parquet", "name": name}
        for key in set(DataSet.model_fields) - {"file", "name", "weight", *(["samples"] if weighted else [])}:
            if draw(st.booleans()):
                one[key] = draw(values(DataSet.model_fields[key]))
        sets.append(one | ({"weight": draw(st.floats(0.5, 3))} if weighted else {}))
    return sets


@st.composite
def trees(draw: st.DrawFn) -> dict[str, Any]:
    """Whole configurations; the keys that must agree with others stay as they are."""
    loss, correction = draw(st.sampled_from([*LOSSES])), draw(st.sampled_from(CORRECTIONS))
    tied = set(
        "run.name rollout.prompts rollout.max_response_tokens data.max_prompt_tokens batch.mini_batches "
        "batch.max_tokens model.layers loss.name parallel.sequence parallel.context fp8.recipe loss.drift "
        "parallel.virtual_pipeline parallel.collective_seconds loss.c_dual loss.exponent "
        "optimizer.lr optimizer.lr_min optimizer.lr_decay_steps reward.also "
        "reward.url reward.overlong_tokens log.profile "
        "correction.name rollout.top_p rollout.old_log_probs rollout.max_staleness vllm.transfer "
        "lora.rank lora.alpha lora.rslora lora.targets lora.start moe.replay environment.name "
        "environment.url environment.command teacher.checkpoint teacher.urls".split()
    )
    tree: dict[str, Any] = {section: dict(keys) for section, keys in REQUIRED.items()}
    tree["loss"], tree["correction"] = {"name": loss}, {"name": correction}
    for key, field, owner in legal_keys():
        section, _, name = key.partition(".")
        if (
            key not in tied
            and owner in ("", loss, correction)
            and (field.is_required() or draw(st.booleans()))
        ):
            tree.setdefault(section, {})[name] = draw(values(field))
    if LOSSES[loss].SUPERVISED:  # other keys are for rollouts
        supervised = ("run", "model", "data", "loss", "optimizer")
        tree = {section: keys for section, keys in tree.items() if section in supervised}
        tree |= {"rollout": REQUIRED["rollout"], "batch": {"mini_batches": 1}}
        tree["loss"].pop("kl_coef", None)
    elif "environment" in tree:
        tree["environment"]["name"] = "calculator"
    return tree


@settings(max_examples=15)
@given(tree=trees())
def test_a_configuration_written_and_read_is_the_same(
    tree: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "round_trip.toml"
    config = Config.model_validate(tree)
    save_config(config, path)
    assert load_config(path) == config


@pytest.mark.parametrize(
    ("text", "words", "key", "value"),
    [
        ("[data]\nsystem_prompt = 'none'", [], "data.system_prompt", "none"),
        ("[data]\nsystem_prompt = 'Be brief.'", ["none"], "data.system_prompt", None),
        ("[data]\nsystem_prompt = 'Be brief.'", ["'none'"], "data.system_prompt", "none"),
        ("[log]\ngroup = 'none'", [], "log.group", "none"),
        ("[log]\ngroup = 'none'", ["none"], "log.group", None),
        ("[loss]\nnoise = 'none'", [], "loss.noise", None),
        ("[loss]\nnoise = 'x.json'", ["none"], "loss.noise", None),
        ("[loss]\nnoise = 'x.json'", ["./none"], "loss.noise", Path("none")),
        ("[data]\nchat_template = 'none'", [], "data.chat_template", None),
        ("[run]\nname = 'none'", [], "run.name", "none"),
        ("[run]\nname = 'x'", ["none"], "run.name", "none"),
        ("[run]\nname = 12", [], "run.name", "12"),
    ],
)
def test_the_word_none(path: Path, text: str, words: list[str], key: str, value: object) -> None:
    """Nothing where nothing else could be meant: text that is written down stays text."""
    config = load_config(layers(path.parent, text), [f"--{key}", *words] if words else [])
    assert leaf(config, key) == value
    save_config(config, path.parent / "again.toml")
    assert load_config(path.parent / "again.toml") == config


def test_a_write_cut_short_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.toml"
    path.write_text("old")

    def killed(path: Path, text: str, encoding: str) -> int:
        path.write_bytes(b"")
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", killed)
    with pytest.raises(KeyboardInterrupt):
        save_config(Config.model_validate(REQUIRED), path)
    assert path.read_text() == "old"


def leaf(config: Config, key: str) -> Any:
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)


@pytest.mark.parametrize(
    ("words", "key", "value"),
    [
        (["--run.steps", "7"], "run.steps", 7),
        (["--run.steps=7"], "run.steps", 7),
        (["--loss.c-high", "0.04"], "loss.c_high", 0.04),
        (["--loss.c_high=4e-2"], "loss.c_high", 0.04),
        (["--loss.drift=given", "--loss.drift-value", "-0.001"], "loss.drift_value", -0.001),
        (["--data.shuffle", "false"], "data.shuffle", False),
        (["--data.validation", "held out.jsonl"], "data.validation", Path("held out.jsonl")),
        (["--run.name", '"quoted"'], "run.name", "quoted"),
        (["--data.prompt-key=a=b"], "data.prompt_key", "a=b"),
        # Text stays as it was typed, even where TOML would see a number, a date or a boolean.
        (["--run.name", "2026-10-17"], "run.name", "2026-10-17"),
        (["--run.name", "1e3"], "run.name", "1e3"),
        (["--run.name=007"], "run.name", "007"),
        (["--log.project", "true"], "log.project", "true"),
        (["--run.folder", "2026"], "run.folder", Path("2026")),
        (["--data.validation", "1.50"], "data.validation", Path("1.50")),
        (["--run.steps", "7", "--run.steps", "8"], "run.steps", 8),
        (["--loss.name", "rloo", "--loss.eps-low", "0.1"], "loss.eps_low", 0.1),
        (["--correction.name", "sequence_mask", "--correction.low=0.25"], "correction.low", 0.25),
        ([], "loss.name", "fspo"),
        ([], "correction.name", "none"),
    ],
)
def test_overrides(path: Path, words: list[str], key: str, value: object) -> None:
    assert leaf(load_config(path, words), key) == value


def layers(folder: Path, *texts: str) -> list[Path]:
    """Files over that of the required keys."""
    paths = [folder / "run.toml", *(folder / f"layer{number}.toml" for number in range(len(texts)))]
    for path, text in zip(paths[1:], texts, strict=True):
        path.write_text(text, encoding="utf-8")
    return paths


def test_a_later_file_changes_the_keys_it_has(path: Path) -> None:
    files = layers(path.parent, "[run]\nname = 'one'\nsteps = 4", "[run]\nsteps = 5\n[parallel]\ntensor = 2")
    config = load_config(files, ["--parallel.tensor", "4"])
    assert (config.run.name, config.run.steps, config.parallel.tensor) == ("one", 5, 4)
    assert config.rollout == load_config(path).rollout
    assert load_config(files[:1]) == load_config(path)


def test_a_later_file_replaces_lists_and_tables_as_a_whole(path: Path) -> None:
    two = "[[data.validation]]\nfile = 'a.jsonl'\n[[data.validation]]\nfile = 'b.jsonl'\n"
    two += "[reward.also]\nformat = 1"
    one = "[[data.validation]]\nfile = 'c.jsonl'\n[reward]\nalso = {make_sum = 0.5}"
    config = load_config(layers(path.parent, two, one))
    assert [one.title for one in config.data.validation_sets] == ["c"]
    assert config.reward.also == {"make_sum": 0.5} and config.reward.name == "exact_match"


@pytest.mark.parametrize(
    ("first", "then", "loss"),
    [
        ("c_low = 0.05", "name = 'rloo'\neps_low = 0.1", RLOOLoss(eps_low=0.1)),
        ("c_low = 0.05", "c_high = 0.06", FSPOLoss(c_low=0.05, c_high=0.06)),
        ("c_low = 0.05", "name = 'fspo'\nc_high = 0.06", FSPOLoss(c_low=0.05, c_high=0.06)),
        ("name = 'rloo'\neps_low = 0.1", "eps_high = 0.3", RLOOLoss(eps_low=0.1, eps_high=0.3)),
        ("name = 'rloo'\neps_low = 0.1", "name = 'fspo'", FSPOLoss()),
    ],
)
def test_a_later_file_with_another_loss_replaces_it(path: Path, first: str, then: str, loss: Any) -> None:
    assert load_config(layers(path.parent, f"[loss]\n{first}", f"[loss]\n{then}")).loss == loss


@pytest.mark.parametrize(
    ("texts", "words", "told"),
    [
        (["[run]\nsteps = 0", "[run]\nname = 'x'"], "", "{folder}/layer0.toml: run.steps = 0"),
        (["[run]\nsteps = 0", "[run]\nsteps = -1"], "", "{folder}/layer1.toml: run.steps = -1"),
        (["[run]\nstep = 1"], "", "{folder}/layer0.toml: unknown key run.step; did you mean run.steps?"),
        (["[rnu]\nstep = 1"], "", "{folder}/layer0.toml: unknown key rnu; did you mean run?"),
        (["run = 1"], "", "{folder}/layer0.toml: run = 1"),
        (["[[data.train]]\nfile = 3"], "", "{folder}/layer0.toml: data.train[0].file = 3"),
        (["[parallel]\nsequence = true"], "", "{folder}/run.toml + {folder}/layer0.toml: parallel.sequence"),
        (["[run]\nsteps = 9"], "--run.steps 0", "--run.steps = 0"),
        (["[run"], "", "{folder}/layer0.toml: not TOML"),
    ],
)
def test_what_is_wrong_is_told_of_its_file(path: Path, texts: list[str], words: str, told: str) -> None:
    with pytest.raises(InputError) as caught:
        load_config(layers(path.parent, *texts), words.split())
    assert str(caught.value).startswith(told.format(folder=path.parent))


ENGINE = "fp8.recipe = tensorwise needs bfloat16 and layers of Transformer Engine on a GPU, not model."


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--run.step 7", "unknown key run.step; did you mean run.steps?"),
        ("--loss.c-hihg 1", "unknown key loss.c_hihg; did you mean loss.c_high?"),
        ("--rolout.prompts 7", "unknown key rolout; did you mean rollout?"),
        ("--zzz.zzz 7", "unknown key zzz"),
        ("--parallel.virtual-pipeline 2", "parallel.virtual_pipeline = 2 needs parallel.pipeline > 1"),
        ("--loss.name fspo --loss.eps-low 0.1", "unknown key loss.eps_low for loss.name = fspo"),
        ("--loss.name gspo --loss.c-low 0.1", "unknown key loss.c_low for loss.name = gspo"),
        ("--loss.name gpso", f"loss.name = 'gpso': did you mean gspo? It must be one of {NAMES}"),
        ("--loss.name 3", f"loss.name = 3: must be one of {NAMES}"),
        ("--correction.name tis", f"correction.name = 'tis': must be one of {', '.join(CORRECTIONS)}"),
        ("--correction.cap 2", "unknown key correction.cap for correction.name = none"),
        ("--correction.name token_tis --correction.cap 0.5", "correction.cap = 0.5: "),
        ("--correction.name token_tis --rollout.old-log-probs sampled", "rollout.old_log_probs = sampled"),
        ("--rollout.old-log-probs sampled --rollout.top-p 0.9", "rollout.old_log_probs = sampled needs"),
        ("--correction.name sequence_mask --rollout.top-p 0.9", "correction.name = sequence_mask needs"),
        ("--loss.drift wild", "loss.drift = 'wild': input should be 'auto', 'none' or 'given'"),
        ("--run.steps 0", "run.steps = 0: input should be greater than 0"),
        ("--run.steps many", "run.steps = 'many': input should be a valid integer"),
        ("--optimizer.lr inf", "optimizer.lr = inf: input should be a finite number"),
        ("--data.shuffle perhaps", "data.shuffle = 'perhaps': input should be a valid boolean"),
        ("--run.name a/b", "run.name = 'a/b': "),
        ("--run.name ..", "run.name = '..': "),
        ("--run.steps 0 --run.seed -1", "run.seed = -1: input should be greater than or equal to 0 (and 1"),
        ("--rollout.prompts 9", "rollout.prompts = 9 is not a multiple of batch.mini_batches = 4"),
        ("--batch.max-tokens 1123", "batch.max_tokens = 1123 is less than data.max_prompt_tokens + rollout."),
        ("--parallel.sequence true", "parallel.sequence = true needs parallel.tensor > 1"),
        ("--parallel.wait-seconds 1e9", "parallel.wait_seconds = 1000000000.0: input should be less than"),
        (
            "--rollout.engine vllm --parallel.collective-seconds 60",
            "parallel.collective_seconds = 60 is less than 180, which rollout.engine = vllm needs",
        ),
        (
            "--model.backend cpu --model.layers transformer_engine",
            "model.layers = transformer_engine needs model.backend = cuda",
        ),
        ("--fp8.recipe delayed", "fp8.recipe = 'delayed': delayed is not supported"),
        ("--fp8.recipe tensorwise", f"{ENGINE}dtype = float32"),
        ("--fp8.recipe tensorwise --model.dtype bfloat16 --model.layers local", f"{ENGINE}layers = local"),
        ("--fp8.recipe tensorwise --model.dtype bfloat16 --model.backend cpu", f"{ENGINE}backend = cpu"),
        ("--log.profile [3,2]", "log = {'profile': [3, 2]}: profile = [3, 2]: the first step comes after"),
        ("--run.name", "--run.name needs a value"),
        ("--run.name --run.steps 7", "--run.name needs a value"),
        ("steps 7", "unexpected argument 'steps'"),
        ("--steps 7", "unexpected argument '--steps'"),
        ("-run.steps 7", "unexpected argument '-run.steps'"),
    ],
)
def test_a_wrong_override_is_told_in_one_line(path: Path, words: str, told: str) -> None:
    assert complaint(path, *words.split()).startswith(told)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (b"[run]\nsteps = \n", "not TOML: Invalid value (at line 2, column 9)"),
        (b"", "run is missing (and 4 more)"),
        (b"run = 3", "run = 3: input should be a valid dictionary or instance of Run (and 4 more)"),
        (b"loss = 3", "run is missing (and 5 more)"),
        (b"\xff\xfe", "not TOML: 'utf-8' codec can't decode"),
        (None, "cannot be read: No such file or directory"),
    ],
)
def test_a_wrong_file_is_told_in_one_line(path: Path, text: bytes | None, told: str) -> None:
    path.unlink() if text is None else path.write_bytes(text)
    assert complaint(path).startswith(told)


@pytest.mark.parametrize("key", [key for key, field, _ in legal_keys() if field.is_required()])
def test_a_required_key_that_is_missing(path: Path, key: str) -> None:
    section, _, name = key.partition(".")
    rest = {other: value for other, value in REQUIRED[section].items() if other != name}
    path.write_text(tomli_w.dumps(REQUIRED | {section: rest}))
    assert complaint(path) == f"{key} is missing"
    path.write_text(tomli_w.dumps(REQUIRED | {section: rest | {f"{name}z": 3}}))
    assert complaint(path) == f"unknown key {key}z; did you mean {key}? (and 1 more)"


@pytest.mark.parametrize("section", ["loss", "run"])
def test_a_section_that_is_a_value(path: Path, section: str) -> None:
    path.write_text(tomli_w.dumps({section: 3} | {k: v for k, v in REQUIRED.items() if k != section}))
    assert complaint(path).startswith(f"{section} = 3: input should be a valid dictionary")
    assert complaint(path, f"--{section}.name", "x") == f"{section} is a section, not a value"


@pytest.mark.parametrize(("loss", "correction"), [*zip(LOSSES, itertools.cycle(CORRECTIONS))])
def test_legal_keys_are_all_fields_once(loss: str, correction: str) -> None:
    if LOSSES[loss].SUPERVISED:  # without rollouts, there is nothing to correct
        correction = "none"
    listed = [(key, field) for key, field, owner in legal_keys() if owner in ("", loss, correction)]
    config = Config.model_validate(REQUIRED | {"loss": {"name": loss}, "correction": {"name": correction}})
    sections = {section: getattr(config, section) for section in Config.model_fields}
    fields = {f"{section}.{key}": value for section, keys in sections.items() for key, value in keys}
    assert sorted(key for key, _ in listed) == sorted(fields)
    for key, field in listed:
        variant = key in ("loss.name", "correction.name")
        variant |= LOSSES[loss].SUPERVISED and key == "batch.mini_batches"
        assert field.is_required() or variant or field.default == fields[key], key


def test_the_reference_has_a_line_for_every_key() -> None:
    lines = [line for line in describe_keys().splitlines() if line.startswith("  --")]
    named = {line.split()[0].removeprefix("--").replace("-", "_") for line in lines}
    assert named == {key for key, _, _ in legal_keys()}
    widths = {name: section.model_fields.get("c_high") for name, section in LOSSES.items()}
    assert [line.split(" [")[1] for line in lines if "--loss.c-high " in line] == [
        f"{name}] (default {field.default})" for name, field in widths.items() if field
    ]
    assert ["(required)" in line for line in lines if "--run.steps " in line] == [True]
    (name,) = [line for line in lines if "--correction.name " in line]
    assert f"{', '.join(CORRECTIONS[:-1])} or {CORRECTIONS[-1]} (default none)" in name


def test_our_own_words_keep_their_letters() -> None:
    details = {"loc": ("loss", "x"), "type": "value_error", "input": 1, "msg": "Value error, FSPO needs it"}
    assert _line(details) == ("loss.x", "loss.x = 1: FSPO needs it")
    details |= {"type": "int_type", "msg": "Input should be a valid integer"}
    assert _line(details) == ("loss.x", "loss.x = 1: input should be a valid integer")
