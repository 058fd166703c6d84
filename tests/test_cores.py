from __future__ import annotations

from cores import summed_up


def test_cpu_time_and_the_share_in_which_all_cores_worked() -> None:
    """Of four seconds both work in one, one alone in two, and none in the last."""
    work = {"cpu0": [0, 100, 200, 200, 200], "cpu1": [0, 100, 100, 200, 200]}
    lines = [
        f"{name} {busy[second]} 0 0 {100 * second - busy[second]} 0 0 0 0 0 0"
        for second in range(5)
        for name, busy in work.items()
    ]
    found = summed_up("\n".join([*lines, "cpu0 12 "]))
    assert found.startswith("0.1 CPU-minutes") and "2 cores" in found and "25%" in found
