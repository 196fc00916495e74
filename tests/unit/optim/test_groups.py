from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lavis_ds.config.schema import RunConfig
from lavis_ds.errors import ConfigError
from lavis_ds.optim.groups import param_groups, parameter_table


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.vision = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3))
        self.projector = nn.Linear(3, 4)
        self.language = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5, bias=False))


def run(**options: Any) -> RunConfig:
    return RunConfig.model_validate(
        {"max_steps": 1, "batch_size_train": 1, "init_lr": 1e-3, "weight_decay": 0.1, **options}
    )


def summary(model: nn.Module, config: RunConfig) -> dict[str, tuple[list[str], float, float]]:
    names = {id(p): n for n, p in model.named_parameters()}
    return {
        g["name"]: ([names[id(p)] for p in g["params"]], g["lr_scale"], g["weight_decay"])
        for g in param_groups(model, config)
    }


def test_vectors_have_no_decay_and_order_is_the_models() -> None:
    assert summary(Model(), run()) == {
        "default": (["vision.0.weight", "projector.weight", "language.0.weight", "language.1.weight"], 1.0, 0.1),
        "default/no_decay": (["vision.0.bias", "vision.1.weight", "vision.1.bias", "projector.bias"], 1.0, 0.0),
    }


def test_first_match_counts_and_the_rest_is_default() -> None:
    groups = {
        "vision.1": {"lr": 5e-4},
        "vision": {"lr": 1e-4, "weight_decay": 0.0},
        "language.0.*": {"weight_decay": 0.3},
    }
    result = summary(Model(), run(param_groups=groups))
    assert result["vision.1/no_decay"] == (["vision.1.weight", "vision.1.bias"], 0.5, 0.0)
    assert result["vision"] == (["vision.0.weight"], pytest.approx(0.1), 0.0)
    assert result["language.0.*"] == (["language.0.weight"], 1.0, 0.3)
    assert result["default"][0] == ["projector.weight", "language.1.weight"]


def test_frozen_parameters_are_left_out() -> None:
    model = Model()
    model.vision.requires_grad_(False)
    groups = param_groups(model, run())
    assert {id(p) for g in groups for p in g["params"]} == {id(p) for p in model.parameters() if p.requires_grad}
    torch.optim.AdamW(groups, lr=1e-3).step()


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (["visoin"], "vision"),
        (["language.0"], "are frozen"),
        (["vision", "vision.0"], "earlier patterns"),
    ],
)
def test_patterns_without_effect(patterns: list[str], message: str) -> None:
    model = Model()
    model.language[0].requires_grad_(False)
    with pytest.raises(ConfigError, match=message):
        param_groups(model, run(param_groups={pattern: {"lr": 1e-5} for pattern in patterns}))


def test_nothing_trains() -> None:
    with pytest.raises(ConfigError, match="every parameter is frozen"):
        param_groups(Model().requires_grad_(False), run())


def test_table() -> None:
    model = Model()
    model.language.requires_grad_(False)
    groups = param_groups(model, run(param_groups={"vision.1": {"lr": 5e-4}}))
    rows = [tuple(row) for row in parameter_table(model, groups)]
    assert rows == [("vision", 15, 15, (1e-3, 5e-4)), ("projector", 16, 16, (1e-3,)), ("language", 40, 0, ())]


class Tower(nn.Module):
    """Embeddings, three blocks, a norm; beside it a list of two that is not the stack."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(3)])
        self.norm = nn.LayerNorm(4)
        self.head = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.vision, self.projector = Tower(), nn.Linear(2, 2)


def test_layer_decay_shrinks_the_rate_towards_the_input() -> None:
    groups = {"vision": {"lr": 5e-4, "layer_decay": 0.5, "weight_decay": 0.2}}
    result = summary(Towers(), run(param_groups=groups))
    rates = {name: (rate, decay) for names, rate, decay in result.values() for name in names}
    assert rates["vision.embed.weight"] == (pytest.approx(0.5 * 0.5**4), 0.2)
    assert [rates[f"vision.blocks.{layer}.1.weight"][0] for layer in range(3)] == pytest.approx(
        [0.5 * 0.5**3, 0.5 * 0.5**2, 0.5 * 0.5]
    )
    assert rates["vision.blocks.0.0.bias"] == (pytest.approx(0.5 * 0.5**3), 0.0)
    assert rates["vision.norm.weight"] == rates["vision.head.1.bias"] == (pytest.approx(0.5), 0.0)
    assert rates["projector.weight"] == (1.0, 0.1)
    assert {"vision/depth_0", "vision/depth_1/no_decay"} <= result.keys()


def test_layer_decay_counts_frozen_layers_too() -> None:
    model = Towers()
    model.vision.blocks[2].requires_grad_(False)
    result = summary(model, run(param_groups={"vision": {"layer_decay": 0.5}}))
    assert result["vision/depth_2"][1] == pytest.approx(0.25)
    assert "vision/depth_1" not in result


@pytest.mark.parametrize("pattern", ["projector", "vision.norm", "vision.blocks.0"])
def test_layer_decay_needs_a_stack_of_layers(pattern: str) -> None:
    with pytest.raises(ConfigError, match="no stack of layers") as caught:
        param_groups(Towers(), run(param_groups={pattern: {"layer_decay": 0.5}}))
    assert f"run.param_groups.{pattern}.layer_decay" in str(caught.value)


def test_rows_of_the_table_as_text() -> None:
    model = Towers()
    model.vision.embed.requires_grad_(False)
    groups = param_groups(model, run(param_groups={"vision": {"layer_decay": 0.5}}))
    assert [(row.part, row.text()) for row in parameter_table(model, groups)] == [
        ("vision", "178, 158 train, lr 0.000125 to 0.001"),
        ("projector", "6, all train, lr 0.001"),
    ]
    model.vision.requires_grad_(False)
    assert parameter_table(model, param_groups(model, run()))[0].text() == "178, frozen"
