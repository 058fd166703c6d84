import doctest
import subprocess
import sys

import megatron_fspo.objective

IMPORT = """
import sys, time

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"megatron", "transformer_engine", "transformers", "vllm"}:
            raise ModuleNotFoundError(f"{name} is blocked")

sys.meta_path.insert(0, Refuse())
import torch
before = set(sys.modules)
start = time.perf_counter()
import megatron_fspo.objective
seconds = time.perf_counter() - start
roots = {name.partition(".")[0] for name in set(sys.modules) - before}
print(seconds, sorted(roots - set(sys.stdlib_module_names)))
"""


def test_it_imports_quickly_with_nothing_but_torch() -> None:
    """What a newcomer's machine has: no Megatron, no transformers, no vLLM."""
    run = subprocess.run(
        [sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True, timeout=120
    )
    seconds, roots = run.stdout.split(maxsplit=1)
    assert roots.strip() == "['megatron_fspo']"
    assert float(seconds) < 1.0


def test_the_example_of_the_package_runs() -> None:
    result = doctest.testmod(megatron_fspo.objective)
    assert result.attempted >= 10 and result.failed == 0
