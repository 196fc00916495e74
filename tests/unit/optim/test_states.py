"""A state made before the first step, to be filled from a checkpoint, is the one that the first step would make."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lavis_ds.config.schema import RunConfig
from lavis_ds.optim import optimizers
from lavis_ds.optim.states import moments, scales, state_of

OPTIONS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "adamw_8bit": {"name": "adamw_8bit"},
    "muon": {"name": "muon"},
    "rounded": {"stochastic_rounding": True},
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("shape", [(80, 64), (8, 4)])
def test_a_made_state_is_what_the_first_step_makes(name: str, shape: tuple[int, int]) -> None:
    if name == "adamw_8bit":
        pytest.importorskip("bitsandbytes")
    dtype = torch.bfloat16 if name == "rounded" else torch.float32
    made, stepped = (torch.nn.Parameter(torch.ones(shape, dtype=dtype)) for _ in range(2))
    group = {"params": [made, stepped], "weight_decay": 0.0, "uses_muon": name == "muon"}
    run = RunConfig.model_validate({"max_steps": 1, "batch_size_train": 1, "optimizer": OPTIONS[name]})
    optimizer = optimizers.build([group], run)
    state = state_of(optimizer, made)
    assert state_of(optimizer, made) is state
    stepped.grad = torch.zeros(shape, dtype=dtype)
    optimizer.step()
    assert kinds(state) == kinds(optimizer.state[stepped])
    for kept in (moments, scales):
        assert kept(state).keys() == kept(optimizer.state[stepped]).keys()
        assert all(torch.count_nonzero(value) == 0 for value in kept(state).values())
    assert all(value.shape == shape for value in moments(state).values())
    assert all(value.shape == (20,) for value in scales(state).values())


def kinds(state: dict[str, Any]) -> dict[str, Any]:
    describe: Callable[[Any], Any] = lambda v: (v.dtype, v.shape, v.device) if isinstance(v, Tensor) else type(v)  # noqa: E731
    return {name: describe(value) for name, value in state.items()}
