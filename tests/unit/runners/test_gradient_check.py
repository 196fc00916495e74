from __future__ import annotations

import pytest
import torch
from torch import nn

from lavis_ds.errors import ConfigError
from lavis_ds.runners.gradient_check import GradientCheck


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.vision = nn.ModuleDict({"used": nn.Linear(2, 2), "unused": nn.Linear(2, 2)})
        self.language = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.language(self.vision["used"](x) * scale).sum()


def test_all_is_well() -> None:
    model = Parts()
    model.vision["unused"].requires_grad_(False)
    check = GradientCheck({name: p for name, p in model.named_parameters() if p.requires_grad})
    model(torch.ones(1, 2)).backward()
    assert check.finish(has_pictures=True) == []
    hooks = [parameter._backward_hooks for parameter in model.parameters()]
    assert not any(hooks)


def test_what_no_gradient_reaches_is_named() -> None:
    model = Parts()
    check = GradientCheck({name: p for name, p in model.named_parameters() if p.requires_grad})
    model(torch.ones(1, 2)).backward()
    (line,) = check.finish(has_pictures=True)
    assert "2 of 4 trainable parameters of vision" in line
    assert "vision.unused.weight, vision.unused.bias" in line


def test_a_part_without_any_gradient_is_refused() -> None:
    model = Parts()
    check = GradientCheck({name: p for name, p in model.named_parameters() if p.requires_grad})
    model.language(torch.ones(1, 2)).sum().backward()
    with pytest.raises(ConfigError, match="no gradient reaches the part vision"):
        check.finish(has_pictures=True)


def test_an_adapter_without_gradient_is_refused() -> None:
    model = Parts()
    model.vision["lora_A"] = nn.Linear(2, 2)
    check = GradientCheck({name: p for name, p in model.named_parameters() if p.requires_grad})
    model(torch.ones(1, 2)).backward()
    with pytest.raises(ConfigError, match="adapters") as caught:
        check.finish(has_pictures=True)
    assert "vision.lora_A.bias" in str(caught.value)


def test_zero_gradients_are_told_where_there_are_pictures() -> None:
    for has_pictures, expected in ((True, ["All gradients of vision are zero"]), (False, [])):
        model = Parts()
        model.vision["unused"].requires_grad_(False)
        check = GradientCheck({name: p for name, p in model.named_parameters() if p.requires_grad})
        model(torch.ones(1, 2), scale=0.0).backward()
        lines = check.finish(has_pictures=has_pictures)
        assert [line[:32] for line in lines] == [text[:32] for text in expected]
