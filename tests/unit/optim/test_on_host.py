from __future__ import annotations

import torch

from lavis_ds.optim.on_host import OnHost


def test_the_value_is_that_of_the_moment() -> None:
    value = torch.tensor(2.5, requires_grad=True)
    held = OnHost(value)
    with torch.no_grad():
        value.add_(1)
    assert float(held) == 2.5
