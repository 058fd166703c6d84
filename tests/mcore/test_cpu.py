"""``cuda`` means ``cpu`` to all that Megatron calls; the rest of torch is as it was."""

from __future__ import annotations

import ast
import os
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import megatron.core
import pytest

from launch import python
from megatron_fspo.mcore.machine.backend import _FACTORIES, choose_backend

# A process of its own: what is installed stays.
IN_A_PROCESS = """
import torch
before = torch.empty
from megatron_fspo.mcore.machine.backend import install_cpu
install_cpu()
install_cpu()
assert torch.empty.__wrapped__ is before
on_cpu = [
    torch.zeros(2, device="cuda"), torch.tensor([1.0], device=torch.device("cuda", 1), pin_memory=True),
    torch.empty_like(torch.ones(1), device="cuda:0"), torch.ones(1).cuda(), torch.ones(1).pin_memory(),
    torch.ones(1).to("cuda"), torch.ones(1).to(device="cuda"), torch.nn.Linear(2, 2).cuda().weight,
    torch.ones(1, device=torch.cuda.current_device()),
]
assert all(tensor.device.type == "cpu" and not tensor.is_pinned() for tensor in on_cpu)
assert torch.ones(1).to("cuda", torch.float64).dtype == torch.ones(1).to(torch.float64).dtype == torch.float64
assert torch.ones(1).type() == "torch.cuda.FloatTensor"
assert torch.ones(1).type(torch.int32).dtype == torch.ones(1).type("torch.IntTensor").dtype == torch.int32
with torch.device("meta"):
    assert torch.empty(3).is_meta and torch.nn.Linear(2, 2).weight.is_meta
    assert not torch.zeros(3, device="cuda").is_meta
assert torch.optim.AdamW([torch.nn.Parameter(on_cpu[0])]).defaults["fused"]
assert torch.ones(1, device="meta").is_meta and torch.ones(1).to("meta").is_meta
print("held")
"""
# Never called here: other ways to train and to serve.
ELSEWHERE = {"inference", "export", "fsdp", "datasets", "resharding", "ssm", "fusions"}


@pytest.mark.slow
def test_it_means_cpu() -> None:
    done = python("-W", "ignore", "-c", IN_A_PROCESS)
    assert done.stdout.strip() == "held", done.stderr


def test_all_factories_that_megatron_calls() -> None:
    root = Path(megatron.core.__file__).parent
    called = set()
    for path in root.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if ELSEWHERE & set(path.relative_to(root).parts) or "cuda" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("torch."):
                devices = [word.value for word in node.keywords if word.arg == "device"]
                if any(isinstance(d, ast.Constant) and str(d.value).startswith("cuda") for d in devices):
                    called.add(ast.unparse(node.func).removeprefix("torch."))
    assert {"zeros", "tensor"} <= called
    assert called - {"cuda.Stream"} <= {*_FACTORIES}


def found_in_a_new_process(program: str) -> list[str]:
    """What it prints in the end: is there a GPU, did Megatron take torch's compiler, was that loaded."""
    begin = "import sys, torch; compiling = torch.compile; "
    end = (
        "; import megatron.core.jit; assert torch.compile is compiling; print(torch.cuda.is_available(), "
        "megatron.core.jit.jit_fuser is compiling, 'torch._inductor' in sys.modules)"
    )
    done = python("-W", "ignore", "-c", begin + program + end)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1].split()


@pytest.mark.slow
def test_the_plugin_leaves_the_compiler_alone() -> None:
    """Whether Megatron's functions are compiled is for the program that imports us."""
    _, compiles, loaded = found_in_a_new_process("import megatron_fspo.plugin")
    assert (compiles, loaded) == ("True", "True")


@pytest.mark.slow
def test_our_command_line_does_without_the_compiler_on_a_cpu() -> None:
    """It takes as long as all the rest, and nothing on a CPU uses it."""
    verify = "from megatron_fspo.cli import main; assert main('verify --layouts tp3 --nproc 2'.split()) == 2"
    gpu, compiles, loaded = found_in_a_new_process(verify)
    assert (compiles, loaded) == (gpu, gpu)


def test_the_head_falls_back_in_words_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from megatron_fspo.errors import InputError
    from megatron_fspo.mcore.machine.backend import Backend, HeadKind, check_head, choose_backend

    assert check_head(choose_backend("cpu"), torch.bfloat16) is None

    def on_gpu(head: HeadKind) -> Backend:
        return Backend(device=torch.device("cuda"), collectives="nccl", layers="local", head=head)

    def machine(capability: tuple[int, int], *installed: str) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
        monkeypatch.setattr("importlib.util.find_spec", lambda name: name if name in installed else None)

    sizes: list[tuple[int, ...]] = []
    monkeypatch.setattr("megatron_fspo.mcore.machine.backend.tried", lambda _, *given: sizes.append(given))
    machine((9, 0), "triton")
    assert [check_head(on_gpu(head), torch.bfloat16) for head in ("auto", "torch", "triton")] == [None] * 3
    assert check_head(on_gpu("torch"), torch.float32) is None
    assert check_head(on_gpu("auto"), torch.bfloat16, 4096, 18992) is None and sizes[-1] == (4096, 18992)
    for dtype, capability, installed in (
        (torch.float32, (9, 0), ["triton"]),
        (torch.bfloat16, (7, 5), ["triton"]),
        (torch.bfloat16, (9, 0), []),
    ):
        machine(capability, *installed)
        assert "model.head = auto" in (check_head(on_gpu("auto"), dtype) or "")
        with pytest.raises(InputError, match=r"model\.head = triton"):
            check_head(on_gpu("triton"), dtype)
    machine((9, 0), "triton")
    monkeypatch.setattr("megatron_fspo.mcore.machine.backend.tried", lambda _: "give other numbers")
    assert check_head(on_gpu("torch"), torch.bfloat16) is None
    assert "give other numbers" in (check_head(on_gpu("auto"), torch.bfloat16) or "")
    with pytest.raises(InputError, match="give other numbers"):
        check_head(on_gpu("triton"), torch.bfloat16)


CONNECTIONS, ALLOCATOR, OLDER = "CUDA_DEVICE_MAX_CONNECTIONS", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"


@pytest.mark.parametrize(
    ("given", "name", "found"),
    [
        ({CONNECTIONS: "32"}, CONNECTIONS, "32"),
        ({}, "TRITON_CACHE_DIR", f"{tempfile.gettempdir()}/triton-{os.getuid()}-job"),
        ({"TRITON_CACHE_DIR": "/scratch"}, "TRITON_CACHE_DIR", "/scratch"),
        ({}, ALLOCATOR, "expandable_segments:True"),
        ({ALLOCATOR: "max_split_size_mb:64"}, ALLOCATOR, "max_split_size_mb:64"),
        ({OLDER: "max_split_size_mb:64"}, ALLOCATOR, "max_split_size_mb:64"),
    ],
)
def test_what_cuda_has_to_find_is_there_unless_the_user_has_set_it(
    given: dict[str, str], name: str, found: str
) -> None:
    with patch.dict(os.environ, given, clear=True):
        choose_backend("cpu")
        assert os.environ.get(name) == given.get(name)
        choose_backend("auto", "local", tensor=2)
        assert os.environ[name] == found


@pytest.mark.parametrize(
    ("tensor", "capability", "found"), [(2, 9, "1"), (2, 8, "1"), (2, 10, None), (2, None, "1"), (1, 9, None)]
)
def test_one_queue_for_tensor_parallel_layers_up_to_hopper(
    tensor: int, capability: int | None, found: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nvml(name: str) -> object:
        if capability is None:
            raise OSError("no driver")

        def get(handle: Any, major: Any, minor: Any) -> None:
            major._obj.value = capability

        return Mock(nvmlDeviceGetCudaComputeCapability=get)

    monkeypatch.setattr("ctypes.CDLL", nvml)
    with patch.dict(os.environ, clear=True):
        choose_backend("auto", "local", tensor=tensor)
        assert os.environ.get(CONNECTIONS) == found
