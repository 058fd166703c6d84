"""``megatron-fspo verify`` itself: on two ranks what it prints, writes and returns; and what it refuses."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from launch import REPO, environment, forked, torchrun, why
from megatron_fspo.cli import main
from megatron_fspo.verify.cases import LOSSES, SPLITS
from megatron_fspo.verify.command import plan

RUN = "examples/make_sum/run.toml"
CASES = 3 * 2 * (len(LOSSES) + 1)


def verify(
    *arguments: str, program: tuple[str, ...] = ("-m", "megatron_fspo"), launch: Any = forked
) -> subprocess.CompletedProcess[str]:
    """On two ranks."""
    done: subprocess.CompletedProcess[str] = launch([*program, "verify", *arguments], nproc=2)
    return done


def table_lines(output: str) -> list[list[str]]:
    """The words of each line of the table."""
    _, _, body = output.partition("  verdict\n")
    return [line.split() for line in body.partition("\n\n")[0].splitlines()]


@pytest.fixture(scope="module")
def three_layouts(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """What is printed, and the JSON."""
    out = tmp_path_factory.mktemp("verify") / "verify.json"
    done = verify("--layouts", "cp2", "tp2.sp", "pp2.vpp2", "--json", str(out), launch=torchrun)
    assert done.returncode == 0, done.stdout + why(done.stderr)
    return done.stdout, json.loads(out.read_text(encoding="utf-8"))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_other_families_have_one_gradient_too(tmp_path: Path, family: str) -> None:
    """Scaled RoPE, biases of q, k and v; no norm of q and k."""
    common = {
        "hidden_act": "silu", "hidden_size": 48, "intermediate_size": 112, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 37, "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6, "rope_theta": 500_000.0, "tie_word_embeddings": False, "dtype": "float32",
    }  # fmt: skip
    rope = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    config = common | {"model_type": family} | ({"rope_scaling": rope} if family == "llama" else {})
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    text = (REPO / RUN).read_text(encoding="utf-8")
    text = re.sub(r"(?m)^checkpoint = .*$", f'checkpoint = "{tmp_path}"', text, count=1)
    (tmp_path / "run.toml").write_text(text, encoding="utf-8")
    done = verify("--config", str(tmp_path / "run.toml"), "--layouts", "tp2.sp", "--dtype", "float64")
    assert done.returncode == 0, done.stdout + why(done.stderr)
    (row,) = table_lines(done.stdout)
    assert row[:2] == ["tp2.sp", "float64"] and row[-2:] == [str(len(LOSSES) + 2), "pass"]
    assert float(row[2]) < 1e-12


@pytest.mark.slow
def test_the_table_has_a_line_for_each_layout_and_precision(
    three_layouts: tuple[str, dict[str, Any]],
) -> None:
    printed, _ = three_layouts
    rows = table_lines(printed)
    assert [row[:2] for row in rows] == [
        [layout, dtype] for layout in ("cp2", "tp2.sp", "pp2.vpp2") for dtype in ("float64", "float32")
    ]
    assert [row[-2:] for row in rows] == [[str(len(LOSSES) + 1), "pass"]] * 6
    assert printed.endswith(f"\n3 layouts, {CASES} cases: the same gradient in all of them\n")
    assert printed.count("\n") < 20, "nothing but the table"


@pytest.mark.slow
def test_json_has_every_loss_on_every_layout(three_layouts: tuple[str, dict[str, Any]]) -> None:
    _, found = three_layouts
    assert found["passed"] is True
    assert (found["world_size"], found["collectives"]) == (2, "gloo")
    assert found["torch"] == torch.__version__ and found["megatron_core"]
    asked = {(c["layout"], c["dtype"], c["loss"]) for c in found["cases"]}
    assert len(asked) == len(found["cases"]) == CASES
    assert {loss for _, _, loss in asked} == {*LOSSES, "all-clipped"}
    assert {c["split"] for c in found["cases"]} == set(SPLITS)
    for layout in ("cp2", "tp2.sp", "pp2.vpp2"):
        assert {c["tied"] for c in found["cases"] if c["layout"] == layout} == {True, False}


@pytest.mark.slow
def test_errors_are_within_the_promise(three_layouts: tuple[str, dict[str, Any]]) -> None:
    """1e-5 in fp32, 1e-10 in float64; log-probs to 1e-5; collectives as head and loss need them."""
    _, found = three_layouts
    for case in found["cases"]:
        limit = {"float32": 1e-5, "float64": 1e-10}[case["dtype"]]
        assert case["gradient_error"] <= limit, case
        assert case["log_prob_error"] <= limit and case["log_ratio_sum_error"] <= limit, case
        assert case["loss_error"] <= limit and case["grad_norm_error"] <= limit, case
        assert (case["grad_norm"] > 0) == (case["loss"] != "all-clipped")
        assert case["problems"] == []
        assert case["tp_collectives"] <= (4 if case["layout"] == "tp2.sp" else 0)
        assert case["cp_collectives"] <= (2 if case["layout"] == "cp2" else 0)
    assert any(case["tp_collectives"] == 4 for case in found["cases"])
    assert any(case["cp_collectives"] == 2 for case in found["cases"])
    assert any(case["gradient_error"] > 0 for case in found["cases"]), "all exactly 0: what was compared?"


@pytest.mark.slow
def test_a_runs_own_layout_and_loss(tmp_path: Path) -> None:
    out = tmp_path / "verify.json"
    done = verify("--config", RUN, "--dtype", "float32", "--json", str(out))
    assert done.returncode == 0, done.stdout + why(done.stderr)
    assert [row[:2] for row in table_lines(done.stdout)] == [["tp2.sp", "float32"]]
    cases = json.loads(out.read_text(encoding="utf-8"))["cases"]
    assert [case["loss"] for case in cases] == ["yours", *LOSSES, "all-clipped"]
    assert len({case["tied"] for case in cases}) == 1


@pytest.mark.slow
def test_a_layout_that_fails(tmp_path: Path) -> None:
    """Exit status 1; the worst parameter and what is wrong are printed; the JSON has it too."""
    out = tmp_path / "verify.json"
    program = (str(Path(__file__).with_name("faulty_command.py")), "loss_times_cp")
    done = verify("--layouts", "cp2", "--dtype", "float64", "--json", str(out), program=program)
    assert done.returncode == 1, done.stdout + why(done.stderr)
    (row,) = table_lines(done.stdout)
    failed, of = len(LOSSES), len(LOSSES) + 1
    assert row[-4:] == [f"{failed}", "of", f"{of}", "FAIL"], "all but the one whose gradient is 0"
    assert "cp2, float64, fspo, 1 micro-batch:\n  factor: " in done.stdout and "(2 x the ref" in done.stdout
    last = done.stdout.splitlines()[-1]
    where = r"worst parameter (\S+) \(relative error 1\.0e\+00, layout cp2, \S+\)"
    worst = re.fullmatch(rf"{failed} of {of} cases FAILED; {where}", last)
    assert worst is not None, last
    found = json.loads(out.read_text(encoding="utf-8"))
    assert found["passed"] is False
    assert worst[1] in {case["parameter"] for case in found["cases"] if case["problems"]}


# What is refused, before a process group forms.


@pytest.fixture
def refusal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Calls the command, and returns the one line it says."""

    def start_ranks(*_: object) -> None:
        pytest.fail("the input was found to be good: torchrun would start now, in place of pytest")

    monkeypatch.setattr(os, "execv", start_ranks)
    monkeypatch.chdir(REPO)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)

    def call(*arguments: str) -> str:
        assert main(["verify", *arguments]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert re.fullmatch(r"megatron-fspo: [^\n]+\n", err)
        assert not torch.distributed.is_initialized()
        return err.removeprefix("megatron-fspo: ").rstrip()

    return call


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--layouts", "tp2.xp2"], ["layout tp2.xp2", "'xp2'", "tpN, sp, ppN"]),
        (["--layouts", "tp3"], ["layout tp3", "a multiple of 3 ranks, not 1"]),
        (["--nproc", "4", "--layouts", "tp2.pp2.cp2"], ["a multiple of 8 ranks, not 4"]),
        (["--nproc", "4", "--layouts", "tp2", "tp2.dp4"], ["layout tp2.dp4 is for 8 ranks, not 4"]),
        (["--nproc", "2", "--layouts", "sp"], ["sp needs tp"]),
        (["--nproc", "3", "--layouts", "tp3"], ["parallel.tensor = 3", "num_attention_heads 8"]),
        (["--nproc", "8", "--layouts", "tp8"], ["parallel.tensor = 8", "num_key_value_heads 4"]),
        (["--nproc", "0"], ["--nproc 0"]),
        (["--config", RUN, "--nproc", "3"], ["a multiple of 2 ranks, not 3"]),
        (["--config", RUN, "--nproc", "8", "--layouts", "tp8"], ["parallel.tensor = 8"]),
        (["--config", "nothing.toml"], ["nothing.toml"]),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(
    refusal: Any, arguments: list[str], words: list[str]
) -> None:
    line = refusal(*arguments)
    assert all(word in line for word in words), line


@pytest.mark.slow
def test_the_program_ends_with_status_2() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "megatron_fspo", "verify", "--layouts", "tp3"],
        cwd=REPO,
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (2, "")
    # torch may have warned of a CUDA toolkit without a GPU.
    assert done.stderr.splitlines()[-1] == "megatron-fspo: layout tp3 is for a multiple of 3 ranks, not 1"


def test_a_precision_that_a_layout_does_not_have(capsys: pytest.CaptureFixture[str]) -> None:
    """Only it would leave nothing to check: refused by name, left out of --all."""
    assert main(["verify", "--nproc", "2", "--layouts", "dp2.do", "--dtype", "float64"]) == 2
    assert "dp2.do has a distributed optimizer, which knows no float64" in capsys.readouterr().err
    planned = plan(None, None, ["float64"], use_all=True, world_size=2)
    assert planned.layouts and not any(one.parallel.distributed_optimizer for one in planned.layouts)


@pytest.mark.parametrize(
    "arguments", [["--layouts", "cp2", "--all"], ["--layouts"], ["--dtype", "float16"], ["x"]]
)
def test_arguments_that_are_none(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["verify", *arguments])
    assert caught.value.code == 2
    assert "--help" in capsys.readouterr().err
