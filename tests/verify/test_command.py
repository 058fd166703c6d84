"""``megatron-fspo verify`` itself: on two ranks what it prints, writes and returns; and what it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from launch import REPO, forked, why
from megatron_fspo.cli import main
from megatron_fspo.verify.cases import LOSSES, SPLITS
from megatron_fspo.verify.command import plan

RUN = "examples/make_sum/run.toml"


def verify(*arguments: str, program: tuple[str, ...] = ("-m", "megatron_fspo"), status: int = 0) -> str:
    """What it prints on two ranks."""
    done = forked([*program, "verify", *arguments], nproc=2)
    assert done.returncode == status, done.stdout + why(done.stderr)
    return done.stdout


def table_lines(output: str) -> list[list[str]]:
    """The words of each line of the table."""
    _, _, body = output.partition("  verdict\n")
    return [line.split() for line in body.partition("\n\n")[0].splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "layout"),
    [
        ({"model_type": "qwen2"}, None),  # biases of q, k and v; no norm of q and k
        (
            {
                "model_type": "qwen3_moe", "head_dim": 20, "num_experts": 6, "num_experts_per_tok": 3,
                "moe_intermediate_size": 40, "norm_topk_prob": False,
            },
            "tp2.sp.ep2",
        ),
        ({"model_type": "mixtral", "num_local_experts": 6, "num_experts_per_tok": 2}, "ep2.dp2"),
    ],
    ids=["qwen2", "qwen3_moe", "mixtral"],
)  # fmt: skip
def test_another_family_has_one_gradient_too(
    tmp_path: Path, more: dict[str, Any], layout: str | None
) -> None:
    """In the run's own layout where none is named, and by the run's own loss besides all others."""
    config = {
        "hidden_act": "silu", "hidden_size": 48, "intermediate_size": 112,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 37,
        "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "rope_theta": 500_000.0,
        "tie_word_embeddings": False, "dtype": "float32", **more,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    text = (REPO / RUN).read_text(encoding="utf-8")
    text = re.sub(r"(?m)^checkpoint = .*$", f'checkpoint = "{tmp_path}"', text, count=1)
    (tmp_path / "run.toml").write_text(text, encoding="utf-8")
    out = tmp_path / "verify.json"
    words = ["--config", str(tmp_path / "run.toml"), "--dtype", "float64", "--json", str(out)]
    (row,) = table_lines(verify(*words, *([] if layout is None else ["--layouts", layout])))
    cases = json.loads(out.read_text(encoding="utf-8"))["cases"]
    routers = ["router-losses"] * ("num_experts_per_tok" in more)
    assert [case["loss"] for case in cases] == ["yours", *LOSSES, "all-clipped", "distil", *routers]
    assert len({case["tied"] for case in cases}) == 1
    assert row[:2] == [layout or "tp2.sp", "float64"] and row[-2:] == [str(len(cases)), "pass"]
    assert float(row[2]) < 1e-12


@pytest.mark.slow
def test_three_layouts_in_two_precisions(tmp_path: Path) -> None:
    """A line for each, every loss in the JSON, errors within 1e-5 in fp32 and 1e-10 in float64, and no more
    collectives than head and loss need."""
    layouts, count, out = ("cp2", "tp2.sp", "pp2.vpp2"), len(LOSSES) + 2, tmp_path / "verify.json"
    printed = verify("--layouts", *layouts, "--json", str(out))
    rows = table_lines(printed)
    pairs = [[layout, dtype] for layout in layouts for dtype in ("float64", "float32")]
    assert [row[:2] for row in rows] == pairs and [row[-2:] for row in rows] == [[str(count), "pass"]] * 6
    assert f"\n3 layouts, {6 * count} cases: " in printed and printed.count("\n") < 20

    found = json.loads(out.read_text(encoding="utf-8"))
    assert found["passed"] is True and found["megatron_core"]
    asked = {(c["layout"], c["dtype"], c["loss"]) for c in found["cases"]}
    assert len(asked) == len(found["cases"]) == 6 * count
    assert {loss for _, _, loss in asked} == {*LOSSES, "all-clipped", "distil"}
    assert {c["split"] for c in found["cases"]} == set(SPLITS)
    for layout in layouts:
        assert {c["tied"] for c in found["cases"] if c["layout"] == layout} == {True, False}
    for case in found["cases"]:
        limit = {"float32": 1e-5, "float64": 1e-10}[case["dtype"]]
        errors = [value for key, value in case.items() if key.endswith("_error")]
        assert len(errors) == 5 and max(errors) <= limit, case
        assert (case["grad_norm"] > 0) == (case["loss"] != "all-clipped")
        assert case["problems"] == []
        assert case["tp_collectives"] <= (4 if case["layout"] == "tp2.sp" else 0)
        most = 3 if case["loss"] == "cppo" else 2
        assert case["cp_collectives"] <= (most if case["layout"] == "cp2" else 0)
    assert any(case["tp_collectives"] == 4 for case in found["cases"])
    assert any(case["cp_collectives"] == 2 for case in found["cases"])
    assert any(case["gradient_error"] > 0 for case in found["cases"]), "all exactly 0: what was compared?"


@pytest.mark.slow
def test_a_layout_that_fails(tmp_path: Path) -> None:
    """Exit status 1; the worst parameter and what is wrong are printed; the JSON has it too."""
    out = tmp_path / "verify.json"
    program = (str(Path(__file__).with_name("faulty_command.py")), "loss_times_cp")
    words = ("--layouts", "cp2", "--dtype", "float64", "--json", str(out))
    printed = verify(*words, program=program, status=1)
    (row,) = table_lines(printed)
    failed, of = len(LOSSES) + 1, len(LOSSES) + 2
    assert row[-4:] == [f"{failed}", "of", f"{of}", "FAIL"], "all but the one whose gradient is 0"
    assert "cp2, float64, fspo, 1 micro-batch:\n  factor: " in printed and "(2 x the ref" in printed
    worst = re.match(rf"{failed} of {of} cases FAILED; worst parameter (\S+) ", printed.splitlines()[-1])
    found = json.loads(out.read_text(encoding="utf-8"))
    assert found["passed"] is False
    assert worst and worst[1] in {case["parameter"] for case in found["cases"] if case["problems"]}


def test_a_precision_that_a_layout_does_not_have(capsys: pytest.CaptureFixture[str]) -> None:
    """Only it would leave nothing to check: refused by name, left out of --all."""
    assert main(["verify", "--nproc", "2", "--layouts", "dp2.do", "--dtype", "float64"]) == 2
    assert "the distributed optimizer of dp2.do has no float64" in capsys.readouterr().err
    planned = plan(None, None, ["float64"], use_all=True, world_size=2)
    assert planned.layouts and not any(one.parallel.distributed_optimizer for one in planned.layouts)
