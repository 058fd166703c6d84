"""The harness of the distributed tests."""

from __future__ import annotations

from pathlib import Path

from launch import forked
from rank_client import server


def test_a_rank_with_the_process_id_of_an_earlier_one_is_waited_for(tmp_path: Path) -> None:
    """Ids come round: one run of the whole suite uses up the 32,768 that Linux has by default."""
    program = tmp_path / "program.py"
    program.write_text("import time; time.sleep(0.2); print('done')")
    earlier = server(False, frozenset()).ended
    earlier.update(dict.fromkeys(range(2**15), 0))
    result = forked([str(program)], nproc=0)
    earlier.clear()
    assert (result.returncode, result.stdout) == (0, "done\n")
