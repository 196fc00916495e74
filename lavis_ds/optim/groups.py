"""Which parameters train, with which learning rate and weight decay."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

from torch import nn

from lavis_ds.config.schema import RunConfig
from lavis_ds.errors import ConfigError
from lavis_ds.models.base import Model
from lavis_ds.models.patterns import matching, parameters_of
from lavis_ds.optim.layer_decay import depths
from lavis_ds.optim.muon import hidden_matrices

Parameters = dict[str, nn.Parameter]


def param_groups(model: nn.Module, run: RunConfig) -> list[dict[str, Any]]:
    """Groups for a PyTorch optimizer, of trainable parameters only, in an order that depends on the options alone.

    Keys: `params`; `name`; `lr`, the group's peak learning rate; `lr_scale`, that divided by `run.init_lr`, which the
    schedule's value is multiplied with; `weight_decay`; `uses_muon`, where it is so. Vectors (biases, norms) have no
    weight decay, whatever is set.

    Raises:
        ConfigError: a pattern of `run.param_groups` selects no trainable parameter, nothing trains at all, or Muon
            has nothing to do.
    """
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not trainable:
        raise ConfigError("every parameter is frozen; there is nothing to train.", where="model.freeze")
    rest, groups = dict(trainable), []
    own = model.own_groups() if isinstance(model, Model) else {}
    for pattern, options in {**own, **run.param_groups}.items():
        where = "model" if pattern in own else f"run.param_groups.{pattern}"
        selected = matching(pattern, parameters_of(model, pattern, where))
        chosen = {name: rest.pop(name) for name in selected if name in rest}
        if not chosen:
            frozen = not any(name in trainable for name in selected)
            reason = "are frozen" if frozen else "belong to earlier patterns already"
            raise ConfigError(f"this has no effect: all {len(selected)} matching parameters {reason}.", where=where)
        lr = run.init_lr if options.lr is None else options.lr
        weight_decay = run.weight_decay if options.weight_decay is None else options.weight_decay
        if options.layer_decay is None:
            groups += _split(pattern, chosen, lr, weight_decay, run)
            continue
        for label, layer, factor in _layers(pattern, selected, chosen, options.layer_decay, where):
            groups += _split(label, layer, lr * factor, weight_decay, run)
    groups += _split("default", rest, run.init_lr, run.weight_decay, run)
    return _with_muon(groups, model, own) if run.optimizer.name == "muon" else groups


def _layers(
    pattern: str, names: list[str], chosen: Parameters, decay: float, where: str
) -> Iterator[tuple[str, Parameters, float]]:
    """The chosen parameters by distance from the output: label, parameters, factor of the learning rate."""
    found = depths(names)
    if found is None:
        raise ConfigError("there is no stack of layers here.", where=f"{where}.layer_decay", given=pattern)
    for depth in sorted({found[name] for name in chosen}):
        layer = {name: parameter for name, parameter in chosen.items() if found[name] == depth}
        yield f"{pattern}/depth_{depth}", layer, decay**depth


def _split(name: str, parameters: Parameters, lr: float, weight_decay: float, run: RunConfig) -> list[dict[str, Any]]:
    """Matrices with weight decay, vectors without; empty groups are left out."""
    matrices = [p for p in parameters.values() if p.ndim > 1]
    vectors = [p for p in parameters.values() if p.ndim <= 1]
    return [
        {"params": params, "name": label, "lr": lr, "lr_scale": lr / run.init_lr, "weight_decay": decay}
        for label, params, decay in ((name, matrices, weight_decay), (f"{name}/no_decay", vectors, 0.0))
        if params
    ]


def _with_muon(groups: list[dict[str, Any]], model: nn.Module, own: Collection[str]) -> list[dict[str, Any]]:
    """The groups, with the hidden layers' matrices in groups of their own; the model's `own` groups stay as they are.

    Raises:
        ConfigError: there are no such matrices.
    """
    names = hidden_matrices(model)
    hidden = {id(p) for name, p in model.named_parameters() if name in names}
    halves = []
    for group in groups:
        by_muon = hidden if group["name"] not in own else set[int]()
        chosen = [p for p in group["params"] if id(p) in by_muon]
        rest = [p for p in group["params"] if id(p) not in by_muon]
        halves += [{**group, "params": rest}] if rest else []
        halves += [{**group, "params": chosen, "name": f"{group['name']}/muon", "uses_muon": True}] if chosen else []
    if not any(group.get("uses_muon") for group in halves):
        raise ConfigError(
            "no matrix of a hidden layer trains, so Muon would update nothing.",
            where="run.optimizer.name",
            given="muon",
            hint="Use adamw.",
        )
    return halves


class PartRow(NamedTuple):
    """One line of the table of parameters.

    Attributes:
        part: name of the part.
        parameters: number of its scalars.
        trainable: how many of them train.
        lr: peak learning rates in use, largest first; empty where all is frozen.
    """

    part: str
    parameters: int
    trainable: int
    lr: tuple[float, ...]

    def text(self) -> str:
        """The row without the part's name."""
        if not self.trainable:
            return f"{self.parameters:,}, frozen"
        share = "all train" if self.trainable == self.parameters else f"{self.trainable:,} train"
        highest, lowest = f"{self.lr[0]:.3g}", f"{self.lr[-1]:.3g}"
        return f"{self.parameters:,}, {share}, lr {highest if highest == lowest else f'{lowest} to {highest}'}"


def parameter_table(model: nn.Module, groups: list[dict[str, Any]]) -> list[PartRow]:
    """One row a part, in the model's order; a parameter that two parts share counts in the first."""
    rates = {id(p): float(group["lr"]) for group in groups for p in group["params"]}
    by_part: dict[str, list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        by_part.setdefault(name.split(".")[0], []).append(parameter)
    return [
        PartRow(
            part,
            sum(p.numel() for p in parameters),
            sum(p.numel() for p in parameters if id(p) in rates),
            tuple(sorted({rates[id(p)] for p in parameters if id(p) in rates}, reverse=True)),
        )
        for part, parameters in by_part.items()
    ]
