"""The built-in rewards, and how a run finds one by name."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from megatron_fspo.errors import InputError
from megatron_fspo.rewards import get_reward, register
from megatron_fspo.rewards.registry import find_module
from megatron_fspo.types import Completion, Prompt

STOPPED = Completion(token_ids=(12,), log_probs=(-0.1,), finish_reason="stop", weight_version=0)
CUT_OFF = Completion(token_ids=(9,), log_probs=(-0.1,), finish_reason="length", weight_version=0)


def reward_of(name: str, answer: str, response: str, completion: Completion = STOPPED) -> float:
    prompt = Prompt(index=0, token_ids=(10,), text="^", answer=answer)
    return get_reward(name)(prompt, completion, response)


SUMS = {
    # as taught; in any order; 9 + 8, as the remainders are notes, not judged
    ("17", "908503300|503300908|999899"): True,
    ("297", "999" * 33): True,
    # 16; half a group; a digit too many; 0 is no digit to take off; a special token; a sign
    ("17", "908503200|90850330|9085033000|908503300000|| 908503300|908503300\n|908^03300|+08503300"): False,
    ("0", ""): False,
    # what int() would read, what isdigit() lets pass, and a full-width 9
    ("9", "٩٠٠|9²0|９00"): False,
}


@pytest.mark.parametrize(("given", "right"), SUMS.items())
def test_make_sum(given: tuple[str, str], right: bool) -> None:
    for response in given[1].split("|"):
        assert reward_of("make_sum", given[0], response) == float(right), response


def test_make_sum_wants_the_policy_to_stop_by_itself() -> None:
    assert reward_of("make_sum", "17", "908503300", CUT_OFF) == 0.0


def test_exact_match() -> None:
    for answer, response in (("4/3", "4/3"), ("4/3", "\n 4/3\t"), (" 4/3", "4/3")):
        assert reward_of("exact_match", answer, response) == 1.0
    for answer, response in (("4/3", "4 /3"), ("4/3", "14/3"), ("4", "4.0"), ("٣", "3"), ("x", "X")):
        assert reward_of("exact_match", answer, response) == 0.0


@pytest.mark.parametrize("name", ["make_sum", "exact_match"])
@given(response=st.text() | st.text(alphabet="0123456789٣²９\n ^$_"), answer=st.text())
@example(response="\ud800", answer="9" * 5000)
def test_rewards_take_any_text(name: str, response: str, answer: str) -> None:
    expected = name == "exact_match" and response.strip() == answer.strip()
    found = reward_of(name, answer, response)
    if name == "make_sum" and found:
        assert answer == str(sum(int(digit) for digit in response[::3]))
    else:
        assert found == float(expected)


@pytest.mark.parametrize("name", ["make_sum", "exact_match"])
@pytest.mark.parametrize("character", ["9", "(", "٣", " "])
def test_rewards_are_quick_on_giant_text(name: str, character: str) -> None:
    started = time.monotonic()
    assert reward_of(name, "57", character * 3_000_000) == 0.0
    assert time.monotonic() - started < 5


def test_unknown_reward_names_the_nearest() -> None:
    for name, told in (
        ("make_sun", "did you mean 'make_sum'"),
        ("zzz", "unknown reward 'zzz': use one of"),
    ):
        with pytest.raises(InputError, match=told):
            get_reward(name)


def test_register(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_fspo.rewards.registry._REWARDS", {})
    for name in ("", "a:b"):
        with pytest.raises(InputError, match="module:function"):
            register(name)

    @register("half")
    def half(prompt: Prompt, completion: Completion, response: str) -> float:
        return 0.5

    with pytest.raises(InputError, match="'half' is registered twice, first by test_rewards"):
        register("half")(lambda prompt, completion, response: 1.0)
    assert get_reward("half") is half
    assert reward_of("half", "", "") == 0.5
    assert find_module("half") == __name__
    for module in ("__main__", "made_for_test"):
        monkeypatch.setitem(sys.modules, "made_for_test", ModuleType("made_for_test"))
        half.__module__ = module
        with pytest.raises(InputError, match=rf"cannot import '{module}': .* reward\.in_process"):
            find_module("half")


@pytest.fixture
def user_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module ``mine_for_test`` in the working directory, as a user would have it, and a broken one."""
    (tmp_path / "mine_for_test.py").write_text(
        "LIMIT = 3\ndef short(prompt, completion, response):\n    return float(len(response) < LIMIT)\n"
        "def one(prompt): ...\n"
    )
    (tmp_path / "broken_for_test.py").write_text("import no_such_package_for_test\n")
    (tmp_path / "raises_for_test.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", dict[str, ModuleType](sys.modules))


@pytest.mark.usefixtures("user_modules")
def test_a_users_own_reward() -> None:
    assert reward_of("mine_for_test:short", "57", "ab") == 1.0
    assert reward_of("mine_for_test:short", "57", "abc") == 0.0


@pytest.mark.usefixtures("user_modules")
@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such_module_for_test:f", "cannot import 'no_such_module_for_test': .* or among installed"),
        ("broken_for_test:f", "cannot import 'broken_for_test': .* 'no_such_package_for_test'$"),
        ("mine_for_test:shrt", "has nothing named 'shrt'"),
        ("mine_for_test:LIMIT", "has a value of type int named 'LIMIT'"),
        ("mine_for_test:one", "3 positional arguments"),
        *((path, "must have") for path in ("mine_for_test:", ":short", ".mine_for_test:short", "a:b:c")),
    ],
)
def test_a_users_reward_that_is_not_there(path: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        get_reward(path)


@pytest.mark.usefixtures("user_modules")
def test_a_users_module_that_fails_keeps_its_own_error() -> None:
    with pytest.raises(ZeroDivisionError):
        get_reward("raises_for_test:f")
