"""What several processes share."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.multi.launch import CPU_ONLY


@pytest.fixture(scope="session", autouse=True)
def cpu_adam(request: pytest.FixtureRequest) -> None:
    """DeepSpeed's AdamW for offloaded states, compiled before ranks wait for each other: minutes, once a machine."""
    if any("offload" in item.nodeid for item in request.session.items):
        build = "from deepspeed.ops.op_builder import CPUAdamBuilder; CPUAdamBuilder().load()"
        subprocess.run([sys.executable, "-c", build], check=True, timeout=900, env={**os.environ, **CPU_ONLY})
