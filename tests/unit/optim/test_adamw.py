from __future__ import annotations

from typing import Any

import torch

from lavis_ds.optim.adamw import scale_learning_rates


def test_a_groups_lr_is_the_schedules_times_its_scale_and_its_factor_in_this_step() -> None:
    groups: list[dict[str, Any]] = [
        {"params": [torch.nn.Parameter(torch.ones(2))], "name": "gates", "lr_scale": 0.5},
        {"params": [torch.nn.Parameter(torch.ones(2))], "name": "default"},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1.0)
    scale_learning_rates(optimizer, 1e-2, {"gates": 0.1})
    assert [group["lr"] for group in optimizer.param_groups] == [1e-2 * 0.5 * 0.1, 1e-2]
    optimizer.load_state_dict(optimizer.state_dict())  # as after a resume
    scale_learning_rates(optimizer, 1e-2)
    assert [group["lr"] for group in optimizer.param_groups] == [1e-2 * 0.5, 1e-2]
