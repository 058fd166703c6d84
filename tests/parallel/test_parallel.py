from pathlib import Path
from unittest.mock import Mock

import pytest

from launch import run_worker
from megatron_fspo.parallel.groups import ParallelGroups


@pytest.mark.parametrize("nproc", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_reductions_match_float64_oracles(nproc: int) -> None:
    """Log-probs, entropy, sequence sums and metrics on real ranks; see worker.py for each check."""
    assert f"all held on {nproc} ranks" in run_worker(Path(__file__).with_name("worker.py"), nproc=nproc)


@pytest.mark.parametrize("context", [1, 2])
def test_groups_of_the_same_ranks_are_one(context: int) -> None:
    """Each would be a communicator of NCCL, which takes a GiB of the GPU."""
    made = Mock()
    made.get_context_parallel_group.return_value.size.return_value = context
    made.get_data_parallel_group.side_effect = lambda with_context_parallel=False: str(with_context_parallel)
    groups = ParallelGroups.of(made)
    assert (groups.dp, groups.dp_cp) == (str(context == 1), "True")
