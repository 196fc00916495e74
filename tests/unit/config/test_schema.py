"""Combinations of keys of `run:`."""

from __future__ import annotations

import pytest

from lavis_ds.config.decode import decode
from lavis_ds.config.schema import RunConfig
from lavis_ds.errors import ConfigError


def test_a_stall_ends_the_run_before_the_collective_does() -> None:
    keys = {"max_steps": 1, "batch_size_train": 4, "dist_timeout_s": 600}
    assert decode(RunConfig, {**keys, "stall_timeout_s": 599}).stall_timeout_s == 599
    with pytest.raises(ConfigError, match=r"stall_timeout_s \(600\) must be less than dist_timeout_s \(600\)"):
        decode(RunConfig, {**keys, "stall_timeout_s": 600})
