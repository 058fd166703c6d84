"""Programs that ask an OpenAI-compatible endpoint: what they add is inserted, what goes wrong is counted."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from launch import REPO, environment
from megatron_fspo.config.environment import Environment
from megatron_fspo.environments.agent import AgentEnvironment
from megatron_fspo.errors import InputError
from megatron_fspo.types import Prompt, Reply
from test_text import CHATML, END, FORGETFUL, TOKENIZER, ids, tokenizer_of

PROGRAM = str(Path(__file__).with_name("agent_program.py"))
QUESTION = "2 + 2?"


class Talk:
    """Stands for a trajectory."""

    def __init__(
        self,
        what: str,
        *,
        tokenizer: Any = TOKENIZER,
        seconds: float = 60.0,
        command: tuple[str, ...] | None = None,
        variables: tuple[str, ...] = (),
    ) -> None:
        command = command or (sys.executable, PROGRAM, what)
        config = Environment(
            name="agent", command=command, seconds=seconds, inserted_tokens=60, variables=variables
        )
        self.environment = AgentEnvironment(config, tokenizer, [END])
        self.turns: list[list[int]] = []
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": QUESTION}], add_generation_prompt=True, tokenize=False
        )
        self.prompt = Prompt(
            index=3, token_ids=tuple(ids(text)), text=text, answer="0.5", fields={"question": QUESTION}
        )

    def say(self, text: str, *, ended: bool = True, trajectory: object = None) -> Reply:
        self.turns.append([*ids(text), *([END] if ended else [])])
        return self.environment.answer(self.prompt, self.turns, trajectory or self).result(120)


def running(word: str) -> list[psutil.Process]:
    """The processes with this word on their command line."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # it ends meanwhile
            if word in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def text_of(reply: Reply) -> str:
    assert reply.token_ids is not None and not reply.failed
    return str(TOKENIZER.decode(reply.token_ids))


@pytest.mark.parametrize("ended", [True, False])
def test_what_a_program_adds_follows_what_the_policy_wrote(ended: bool) -> None:
    talk = Talk("plain")
    mark = "" if ended else "<|im_end|>"
    for turn, said in enumerate(["four", "five"]):
        reply = talk.say(said, ended=ended)
        words = f"{turn} <|im_end|> {said}"
        assert text_of(reply) == f"{mark}\n<|im_start|>user\n{words}<|im_end|>\n<|im_start|>assistant\n"
        assert not reply.restarts and reply.seconds > 0
        # The end of the message is a special token, the same text within it is not.
        assert [*(reply.token_ids or ())].count(END) == (1 if ended else 2)
    assert talk.say("six") == Reply(reward=0.5)


def test_a_conversation_that_a_program_writes_anew_is_a_row() -> None:
    talk = Talk("summary")
    assert not talk.say("four").restarts
    reply = talk.say("five")
    assert reply.restarts and text_of(reply) == chat_of("so far: five")
    assert talk.say("six") == Reply(reward=0.5)


def chat_of(text: str) -> str:
    return str(
        TOKENIZER.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False
        )
    )


def test_a_template_that_drops_thoughts_begins_rows() -> None:
    talk = Talk("plain", tokenizer=tokenizer_of(FORGETFUL))
    reply = talk.say("<think>hm</think>four")
    assert reply.restarts and "<think>" not in text_of(reply).split("user\n0")[0]
    assert text_of(reply).startswith(f"{chat_of(QUESTION)}four<|im_end|>")


def test_what_the_template_refuses_ends_the_trajectory_too() -> None:
    talk = Talk("plain", tokenizer=tokenizer_of("{{ 1 // (messages | length - 3) }}" + CHATML))
    assert talk.say("four") == Reply(failed=True)


def test_a_program_that_is_not_there_is_refused() -> None:
    with pytest.raises(InputError, match="no program '/no/such'"):
        Talk("", command=("/no/such",))


@pytest.mark.parametrize(("what", "turns"), [("silent", 0), ("other", 0), ("hang", 1), ("crash", 1)])
def test_what_goes_wrong_ends_the_trajectory_and_counts(what: str, turns: int) -> None:
    talk = Talk(what, seconds=4.0)
    for _ in range(turns):
        assert not talk.say("four").failed
    assert talk.say("five") == Reply(failed=True)


def test_other_requests_are_refused() -> None:
    talk = Talk("refused")
    assert not talk.say("four").failed


def test_a_reply_that_nobody_waits_for_ends_no_thread_with_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    talk, raised = Talk("plain"), []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    assert talk.environment.answer(talk.prompt, [[*ids("four"), END]], talk).cancel()
    for thread in [thread for thread in threading.enumerate() if thread.name == "agent answer"]:
        thread.join(20)
    assert not raised


def test_trajectories_of_one_prompt_have_programs_of_their_own_that_end_with_them() -> None:
    talk = Talk("plain")
    first, second = Talk("plain"), Talk("plain")
    for said, trajectory in (("four", first), ("five", second)):
        talk.turns.clear()
        assert said in text_of(talk.say(said, trajectory=trajectory))
    programs = running(PROGRAM)
    assert len(programs) >= 2
    del first, second, trajectory
    gc.collect()
    gone, alive = psutil.wait_procs(programs, timeout=10)
    assert len(gone) >= 2 and not alive, time.monotonic()


def test_a_model_without_a_chat_template_is_refused() -> None:
    tokenizer = tokenizer_of(CHATML)
    tokenizer.chat_template = None
    with pytest.raises(InputError, match="chat template"):
        AgentEnvironment(Environment(name="agent", command=("true",)), tokenizer, [END])


@pytest.mark.parametrize("how", ["child in the group", "daemon"])
def test_an_agents_children_end_with_it_and_do_not_make_it_fail(how: str) -> None:
    assert Talk(how).say("four") == Reply(reward=1.0)
    child = f"861.{os.getpid()}"
    psutil.wait_procs(running(child), timeout=5)
    assert not running(child)


@pytest.mark.parametrize("end", ["kill -9", "exit"])
def test_no_agent_outlives_the_trainer(end: str) -> None:
    code = "from test_agent import Talk; talk = Talk('child'); talk.say('four'); print('busy', flush=True)"
    paths = os.pathsep.join([str(REPO), *map(str, (REPO / "tests", Path(PROGRAM).parent))])
    with subprocess.Popen(
        [sys.executable, "-c", code + "; input()"],
        cwd=REPO,
        env=environment(PYTHONPATH=paths),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as trainer:
        assert trainer.stdout is not None and trainer.stdout.readline() == b"busy\n"
        ending = psutil.Process(trainer.pid).children(recursive=True)
        assert len(ending) == 3, "the agent, its child, and the guard"
        if end == "kill -9":
            trainer.kill()
        trainer.communicate(b"\n", timeout=60)
    _, alive = psutil.wait_procs(ending, timeout=20)
    assert not alive


def test_an_agent_has_no_keys_but_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VLLM_API_KEY", "HF_TOKEN", "WANDB_API_KEY", "ANOTHER"):
        monkeypatch.setenv(name, "secret")
    assert Talk("keys").say("four") == Reply(reward=1.0)
    talk = Talk("keys", variables=("ANOTHER",))
    assert talk.say("four") == Reply(reward=2.0)


@pytest.mark.parametrize(
    ("how", "reward"),
    [("flood", 0.5), ("infinite", None), ("large", None), ("binary", 0.25), ("closed", None)],
)
def test_what_an_agent_prints_is_read_and_not_kept(how: str, reward: float | None) -> None:
    before = psutil.Process().memory_info().rss
    assert Talk(how).say("four") == Reply(reward=reward)
    assert psutil.Process().memory_info().rss - before < 2**26


def test_requests_that_are_too_large_or_too_many_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    talk = Talk("lengths")
    assert talk.say("four").restarts
    end = time.monotonic() + 20
    while not (tmp_path / "asked").exists() and time.monotonic() < end:
        time.sleep(0.05)
    assert talk.say("five") == Reply(reward=1.0)
