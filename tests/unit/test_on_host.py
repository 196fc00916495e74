from __future__ import annotations

import torch

from lavis_ds.on_host import OnHost


def test_the_value_is_that_of_the_moment() -> None:
    value = torch.tensor(2.5, requires_grad=True)
    held = OnHost(value)
    with torch.no_grad():
        value.add_(1)
    assert float(held) == 2.5
    assert OnHost(torch.tensor([1.0, 2.0])).tensor().tolist() == [1.0, 2.0]
