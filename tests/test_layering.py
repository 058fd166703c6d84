"""The rooms: an import goes down or stays in its room, there are no circles, and files stay small.

Read from the syntax trees, so an import inside a function or under TYPE_CHECKING counts like any other.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from launch import REPO, environment

PACKAGE = "megatron_fspo"

# A room is a package, or the modules named together. Rooms on one floor do not know of each other.
FLOORS = {
    "base": 0,
    "objective": 1,
    "losses": 2,
    "adapters": 2,
    "config": 3,
    "data": 4,
    "evaluation": 4,
    "packing": 4,
    "parallel": 5,
    "weights": 6,
    "job": 6,
    "mcore": 7,
    "rewards": 7,
    "rollout": 7,
    "record": 7,
    "environments": 8,
    "trainer": 9,
    "plugin": 9,
    "verify": 10,
    "lab": 11,
    "command line": 12,
}
SINGLE_MODULES = {
    **dict.fromkeys(["__init__", "types", "errors", "section"], "base"),
    "plugin": "plugin",
    **dict.fromkeys(["cli", "__main__"], "command line"),
}
MCORE = ["normalise", "machine", "__init__", "model", "state", "passes"]
"""Modules and folders of mcore/, lowest first."""
THIRD_PARTY = {
    "base": {"pydantic"},
    "objective": {"torch"},
    "losses": {"torch", "pydantic"},
    "adapters": {"torch", "trl", "verl", "skyrl", "prime_rl", "slime", "megatron"},
    "config": {"pydantic", "tomli_w"},
    "data": {"transformers", "pyarrow", "huggingface_hub"},
    "evaluation": {"numpy", "torch"},
    "rewards": {"math_verify", "reasoning_gym", "sympy"},
    "environments": set(),
    "packing": {"torch"},
    "parallel": {"torch", "triton"},
    "weights": {"torch", "safetensors"},
    "job": {"torch", "anyio", "httpx"},
    "mcore": {"torch", "megatron", "transformer_engine", "fla", "psutil"},
    "rollout": {"torch", "safetensors", "httpx", "msgspec", "vllm"},
    "record": {"pyarrow", "torch", "tqdm", "wandb", "mlflow"},
    "trainer": {"torch", "pydantic", "tqdm"},
    "plugin": set(),
    "verify": {"torch", "transformers"},
    "lab": {
        "torch",
        "megatron",
        "transformer_engine",
        "numpy",
        "pydantic",
        "vl_convert",
        "jinja2",
        "markupsafe",
        "msgspec",
        "tomli_w",
        "huggingface_hub",
    },
    "command line": {"argcomplete", "torch", "tqdm", "psutil", "safetensors", "transformers"},
}
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60  # from `def` to the end, without the docstring
MAX_LOOP_LINES = 150
# 2026-11-28: + 2, the __init__.py of two folders of mcore/.
MAX_PLUGIN_MODULES = 24
MAX_TRAINING_SIGNATURES = 10
"""Functions of the trainer that take all of a run; the others take what they use."""


@cache
def read_package(root: Path) -> dict[str, ast.Module]:
    """Dotted name → syntax tree of every module below ``root/megatron_fspo``."""
    modules = {}
    for path in sorted((root / PACKAGE).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        modules[".".join(parts)] = ast.parse(path.read_text(encoding="utf-8"), str(path))
    return modules


def room(module: str) -> str | None:
    """Room of a dotted module name; None for one that nobody gave a floor."""
    name = module.split(".")[1]
    name = SINGLE_MODULES.get(name, name)
    return name if name in FLOORS else None


def imports(tree: ast.Module, modules: dict[str, ast.Module]) -> Iterator[str]:
    """What a module imports, by full name; for our own, the file that is meant."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield _file(alias.name, modules) or alias.name
        elif isinstance(node, ast.ImportFrom):
            source = "." * node.level + (node.module or "")
            for alias in node.names:
                name = f"{source}.{alias.name}"
                yield _file(name, modules) or _file(source, modules) or name


def _file(name: str, modules: dict[str, ast.Module]) -> str | None:
    return next((module for module in (name, f"{name}.__init__") if module in modules), None)


def wrong_imports(modules: dict[str, ast.Module]) -> Iterator[str]:
    """One line per import that breaks a rule."""
    graph = {module: set(imports(tree, modules)) for module, tree in modules.items()}
    for module, targets in graph.items():
        mine = room(module)
        if mine is None:
            yield f"{module} is in no room: give it a floor"
            continue
        for target in sorted(targets):
            top = target.partition(".")[0]
            if target.startswith("."):
                yield f"{module} imports {target}: relative imports hide the room"
            elif target in modules:
                theirs = room(target)
                if theirs is not None and theirs != mine and FLOORS[theirs] >= FLOORS[mine]:
                    yield f"{module} imports {target}: {mine} stands below or beside {theirs}"
            elif top == PACKAGE:
                yield f"{module} imports {target}, which is not there"
            elif top not in sys.stdlib_module_names and top not in THIRD_PARTY[mine]:
                yield f"{module} imports {target}: {mine} has no business with {top}"
    try:
        TopologicalSorter({m: targets & modules.keys() for m, targets in graph.items()}).prepare()
    except CycleError as error:
        yield f"import cycle: {' -> '.join(error.args[1])}"


def long_functions(modules: dict[str, ast.Module]) -> Iterator[str]:
    for module, tree in modules.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = _lines(node) - (_lines(node.body[0]) if ast.get_docstring(node) is not None else 0)
                if lines > MAX_FUNCTION_LINES:
                    yield f"{module}.{node.name} has {lines} lines"


def _lines(node: ast.stmt) -> int:
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def test_imports_go_down() -> None:
    modules = read_package(REPO)
    assert len(modules) > 40
    assert list(wrong_imports(modules)) == []


def test_folders_of_mcore_import_down() -> None:
    modules = read_package(REPO)
    floors = {name: MCORE.index(name.split(".")[2]) for name in modules if room(name) == "mcore"}
    assert [
        f"{module} imports {target}"
        for module, floor in floors.items()
        for target in imports(modules[module], modules)
        if floors.get(target, 0) > floor
    ] == []


def test_no_list_of_third_parties_is_longer_than_needed() -> None:
    modules = read_package(REPO)
    used: dict[str, set[str]] = {name: set() for name in FLOORS}
    for module, tree in modules.items():
        used[room(module) or ""] |= {name.partition(".")[0] for name in imports(tree, modules)}
    assert {name: used[name] & packages for name, packages in THIRD_PARTY.items()} == THIRD_PARTY


def test_files_and_functions_stay_small() -> None:
    lines = {
        path.relative_to(REPO): len(path.read_text(encoding="utf-8").splitlines())
        for path in (REPO / PACKAGE).rglob("*.py")
    }
    assert {path: count for path, count in lines.items() if count > MAX_FILE_LINES} == {}
    assert lines[Path(PACKAGE, "trainer/loop.py")] <= MAX_LOOP_LINES
    assert list(long_functions(read_package(REPO))) == []


def test_wings_stay_below_their_ceilings() -> None:
    """CONTRIBUTING.md has the table, and why a ceiling rose."""
    text = (REPO / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = re.findall(r"^\| (\w+) \| (.+?) \| ([\d,]+) \| [\d,]+ \|$", text, re.M)
    ceilings = {wing: int(ceiling.replace(",", "")) for wing, _, ceiling in table}
    wing_of = {name: wing for wing, rooms, _ in table for name in re.findall(r"`([\w.]+)/?`", rooms)}
    lines: dict[str, int] = dict.fromkeys(ceilings, 0)
    for path in (REPO / PACKAGE).rglob("*.py"):
        count = len(path.read_text(encoding="utf-8").splitlines())
        for wing in ("whole", wing_of[path.relative_to(REPO / PACKAGE).parts[0]]):
            lines[wing] += count
    assert {wing: count for wing, count in lines.items() if count > ceilings[wing]} == {}
    assert ceilings["whole"] <= sum(ceilings.values()) / 2


def test_few_functions_take_the_whole_run() -> None:
    takers = [
        f"{module}.{node.name}"
        for module, tree in read_package(REPO).items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        for argument in (*node.args.args, *node.args.kwonlyargs)
        if isinstance(argument.annotation, ast.Name) and argument.annotation.id == "Training"
    ]
    assert 5 < len(takers) <= MAX_TRAINING_SIGNATURES, takers


SOUND = {
    "__init__.py": "",
    "config/__init__.py": "import pydantic",
    "objective/__init__.py": "from megatron_fspo.objective.band import Band",
    "objective/band.py": "import math, torch\nBand = object",
    "data/__init__.py": "",
    "mcore/__init__.py": "",
    "mcore/step.py": "from megatron.core import parallel_state\nfrom megatron_fspo.objective import Band",
    "rollout/__init__.py": "",
    "trainer/__init__.py": "",
    "cli.py": "def main():\n    from megatron_fspo.mcore.step import Band",
}


@pytest.mark.parametrize(
    ("planted", "found"),
    [
        ({}, ""),
        (
            {"objective/band.py": "def lazy():\n    from megatron_fspo import mcore"},
            "objective stands below or beside mcore",
        ),
        (
            {"data/__init__.py": "if TYPE_CHECKING:\n    import megatron_fspo.cli"},
            "data stands below or beside command line",
        ),
        ({"rollout/__init__.py": "import megatron_fspo.mcore"}, "rollout stands below or beside mcore"),
        ({"objective/band.py": "try:\n    import numpy\nexcept ImportError: ..."}, "business with numpy"),
        ({"objective/band.py": "from . import other"}, "relative imports hide the room"),
        ({"objective/band.py": "import megatron_fspo.gone"}, "megatron_fspo.gone, which is not there"),
        ({"attic.py": ""}, "megatron_fspo.attic is in no room"),
        ({"objective/band.py": "from megatron_fspo.objective import Band"}, "import cycle: "),
    ],
)
def test_the_checker_finds_what_is_planted(planted: dict[str, str], found: str, tmp_path: Path) -> None:
    for name, text in (SOUND | planted).items():
        path = tmp_path / PACKAGE / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    wrong = list(wrong_imports(read_package(tmp_path)))
    assert any(found in line for line in wrong) if found else wrong == []


def test_the_plugin_is_thin() -> None:
    """It loads no configuration and nothing of the trainer."""
    program = "import sys, megatron_fspo.plugin; print(*sys.modules)"
    words = [sys.executable, "-c", program]
    done = subprocess.run(words, cwd=REPO, env=environment(), capture_output=True, text=True, check=True)
    loaded = [name for name in done.stdout.split() if name.partition(".")[0] == PACKAGE]
    rooms = {name.split(".")[1] for name in loaded if "." in name}
    assert len(loaded) <= MAX_PLUGIN_MODULES
    assert rooms == {"errors", "mcore", "objective", "packing", "parallel", "plugin"}
