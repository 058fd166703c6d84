"""Servers that are not there when a run starts."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from fake_server import FakeServer

from launch import REPO
from megatron_fspo.config import VLLM
from megatron_fspo.config.loading import load_config
from megatron_fspo.rollout.client.connect import Needs, absent_servers
from megatron_fspo.trainer.prepare import make_needs


def test_one_that_still_loads_is_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    async def main() -> tuple[list[str], list[str]]:
        async with FakeServer() as fake:
            options = VLLM(urls=(fake.url,))
            fake.kill()
            late = asyncio.create_task(absent_servers(options, Needs(), seconds=60.0))
            await asyncio.sleep(0.5)
            absent = await absent_servers(options, Needs())
            await fake.start()
            return absent, await late

    absent, late = asyncio.run(main())
    assert late == [] and len(absent) == 1 and absent[0].startswith("vllm.urls: no server answers at ")
    assert capsys.readouterr().out.startswith("waiting for http://127.0.0.1:")


def test_one_of_those_that_are_announced_is_enough(tmp_path: Path) -> None:
    """The file of a server stays after a power cut."""
    (tmp_path / "dead.url").write_text("http://127.0.0.1:9")
    options = VLLM(discovery=tmp_path)

    async def main() -> list[list[str]]:
        alone = await absent_servers(options, Needs())
        async with FakeServer() as fake:
            (tmp_path / "living.url").write_text(fake.url)
            return [alone, await absent_servers(options, Needs())]

    alone, both = asyncio.run(main())
    assert [line.partition(":")[0] for line in alone] == ["vllm.discovery"] and both == []


@pytest.mark.parametrize(
    ("said", "lines"),
    [([{"max_model_len": length}, {}], lines) for length, lines in ((104, 0), (103, 1), (None, 0), ("1", 0))]
    + [(5, 0), ([5], 0), (None, 0)],
)
def test_one_that_takes_shorter_sequences_is_refused(said: object, lines: int) -> None:
    async def main() -> list[str]:
        async with FakeServer() as fake:
            fake.answers["/v1/models"] = {"data": said}
            return await absent_servers(VLLM(urls=(fake.url,)), make_needs(config))

    # A prompt of 4 tokens, and 100 of a response.
    config = load_config(REPO / "examples/make_sum/run_vllm.toml", [])
    got = asyncio.run(main())
    assert len(got) == lines and all("--max-model-len 104" in line for line in got)


@pytest.mark.parametrize(("context", "length"), [(60, 60), (500, 104)])
def test_a_shorter_context_is_all_that_a_server_must_take(context: int, length: int) -> None:
    files = [REPO / "examples/make_sum" / name for name in ("run_vllm.toml", "tools.toml")]
    config = load_config(files, [f"--environment.context-tokens={context}"])
    assert make_needs(config).length == length
