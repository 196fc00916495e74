"""What every multi-process test needs to have been done once."""

from __future__ import annotations

import pytest

from tests.multi.launch import run_ranks


def _build_shared_memory_op() -> bool:
    from deepspeed.comm.torch import build_shm_op

    return build_shm_op() is not None


@pytest.fixture(scope="session", autouse=True)
def _compiled_once() -> None:
    """What DeepSpeed compiles when it first runs on a CPU is there before any rank is under a short time-out.

    Ranks that are killed while they compile leave a lock behind, on which every later run would wait.
    """
    run_ranks(_build_shared_memory_op, 1, timeout_s=580, join_group=False)
