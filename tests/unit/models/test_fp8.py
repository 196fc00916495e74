"""Products in 8 bits, emulated on the CPU: what is converted, how exact it is, and what is refused."""

from __future__ import annotations

import builtins
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn

from lavis_ds.config.load import load
from lavis_ds.errors import ConfigError
from lavis_ds.models import fp8
from lavis_ds.models.configs import HFCausalLMConfig
from lavis_ds.models.parts import Part
from lavis_ds.models.vlm import Vlm
from lavis_ds.models.weights import save_weights
from lavis_ds.runners import preflight
from tests.tiny_project import make_project

RECIPES = ["tensorwise", "rowwise"]


class Three(Part):
    """Two layers that are large enough, one that is not wide enough, and one that gives logits."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(1024, 2048), nn.Linear(2048, 1024, bias=False)
        self.narrow, self.head = nn.Linear(1024, 1000), nn.Linear(1024, 1024)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.narrow(self.head(self.down(nn.functional.silu(self.up(hidden)))))  # type: ignore[no-any-return]

    def output_layers(self) -> tuple[nn.Module, ...]:
        return (self.head,)


def error(found: Tensor | None, expected: Tensor | None) -> float:
    assert found is not None
    assert expected is not None
    return float((found - expected).detach().norm() / expected.detach().norm())


def test_without_torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def refuse(name: str, *rest: Any, **named: Any) -> Any:
        if name.startswith("torchao"):
            raise ModuleNotFoundError("No module named 'torchao'")
        return original(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ConfigError, match=r"model.language.fp8.*need torchao.*lavis_ds\[fp8\]"):
        fp8.use_fp8(Three(), "rowwise", "model.language.fp8", emulate=True)


@pytest.mark.parametrize(
    ("recipe", "capability", "says"),
    [
        ("rowwise", (8, 9), "9.0 or newer.*8.9"),
        ("tensorwise", (8, 0), "8.9 or newer.*8.0"),
        ("rowwise", None, "no such"),
    ],
)
def test_gpus_that_can_not(recipe: Any, capability: Any, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    with pytest.raises(ConfigError, match=says):
        fp8.use_fp8(Three(), recipe, "model.language.fp8")


@pytest.mark.parametrize("recipe", RECIPES)
def test_large_layers_alone_and_gradients(recipe: Any) -> None:
    """Measured: 5 % of the output, 8 % (tensorwise) and 6 % of gradients. Tokens are no multiple of 16."""
    pytest.importorskip("torchao")
    plain, part = Three(), Three()
    kept = dict(part.named_parameters())
    said = fp8.use_fp8(part, recipe, "model.language.fp8", emulate=True)
    assert said == f"{recipe} in 2 linear layers; 1 others are too small, or no multiple of 16 wide"
    assert type(part.narrow) is nn.Linear
    assert type(part.head) is nn.Linear
    assert list(part.state_dict()) == list(plain.state_dict())
    assert all(parameter is kept[name] for name, parameter in part.named_parameters())
    hidden = [torch.randn(2, 37, 1024, generator=torch.Generator().manual_seed(1)).requires_grad_() for _ in "ab"]
    outs = [module(one) for module, one in zip((part, plain), hidden, strict=True)]
    weights = torch.randn(2, 37, 1000)
    for out in outs:
        (out * weights).sum().backward()
    assert 1e-3 < error(*outs) < 0.08
    assert 1e-3 < error(hidden[0].grad, hidden[1].grad) < 0.1
    for name, parameter in plain.named_parameters():
        assert error(part.get_parameter(name).grad, parameter.grad) < 0.1


def test_parts_without_such_layers(make_vlm: Callable[..., Vlm], monkeypatch: pytest.MonkeyPatch) -> None:
    part = make_vlm().language
    with pytest.raises(ConfigError, match=r"model.language.fp8.*32 x 64.*widths from 1024"):
        fp8.use_fp8(part, "rowwise", "model.language.fp8", emulate=True)


def test_a_model_says_what_is_in_fp8_and_saves_plain_weights(
    make_vlm: Callable[..., Vlm],
    vlm_tree: Callable[..., dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    pytest.importorskip("torchao")
    monkeypatch.setattr(fp8, "_SMALLEST", 32)
    original = fp8.use_fp8
    monkeypatch.setattr("lavis_ds.models.base.use_fp8", lambda *given: original(*given, emulate=True))
    language = vlm_tree()["language"]
    torch.manual_seed(0)
    plain = make_vlm()
    torch.manual_seed(0)
    model = make_vlm(language=language | {"fp8": "rowwise"})
    said = model.describe()["language in fp8"]
    assert said.startswith("rowwise in 10 linear layers; 4 others")  # keys and values are 16 wide
    save_weights(model.named_parameters(), tmp_path / "weights")
    again = make_vlm(pretrained=str(tmp_path / "weights"))
    for name, parameter in again.named_parameters():
        assert torch.equal(parameter, plain.get_parameter(name))


def test_zero3_is_refused(tmp_path: Path) -> None:
    cfg = make_project(tmp_path)
    options = ["model.language.fp8=rowwise", "run.engine=deepspeed"]
    config = load(cfg, [*options, "run.deepspeed_config=zero3"]).config
    with pytest.raises(ConfigError, match=r"model.language.fp8.*ZeRO-3"):
        preflight.check(config, world_size=2)
    preflight.check(load(cfg, [*options, "run.deepspeed_config=zero2"]).config, world_size=2)


@pytest.mark.parametrize("other", [{"quantize": "nf4"}, {"lora": {}}])
def test_frozen_weights_are_refused(other: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="fp8 is for weights that train"):
        HFCausalLMConfig(path="x", fp8="rowwise", **other)
