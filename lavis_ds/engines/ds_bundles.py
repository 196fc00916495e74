"""Bundles: the parameters of a layer that train alike are one parameter to ZeRO.

DeepSpeed does some work on the host for each parameter, several times a step: gathering it, letting go of it, reducing
its gradient. For the dozen parameters of a layer that takes longer than a fast GPU takes for the layer. A bundle holds
them end to end, as the flat parameters of FSDP do (https://arxiv.org/abs/2304.11277). Its members stay the parameters
that modules compute with, and autograd keeps, but DeepSpeed doesn't see them: while the bundle is gathered (with ZeRO-1
and 2, always) they are views of it, and otherwise empty.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lavis_ds import shares

_Owned = tuple[nn.Module, str, nn.Parameter]
"""A module, and what it calls a parameter of its own."""

_NAME = "bundle_{}"
"""Of the parameter that a layer gets; names in checkpoints are those of the members."""


@dataclass
class Member:
    """A parameter inside a bundle.

    Attributes:
        name: its name in the model, which checkpoints know.
        parameter: what modules compute with.
        shape: while it is whole.
        start: its first element in the bundle.
    """

    name: str
    parameter: nn.Parameter
    shape: torch.Size
    start: int

    @property
    def stop(self) -> int:
        return self.start + self.shape.numel()

    def of(self, bundle: Tensor) -> Tensor:
        """Its elements, in its shape: a view of a bundle that is whole, or of itself."""
        return bundle if bundle.shape == self.shape else bundle[self.start : self.stop].view(self.shape)


@dataclass
class Bundle:
    """Parameters of one layer, end to end.

    Attributes:
        flat: the parameter that DeepSpeed knows, 1-D.
        members: in the order in which they lie in it.
    """

    flat: nn.Parameter
    members: list[Member]
    sizes: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.sizes = [member.shape.numel() for member in self.members]

    def is_in_shares(self) -> bool:
        """Whether members still stand in for tensors that each rank has a share of."""
        return any(shares.is_stand_in(member.parameter) for member in self.members)

    def filled(self, device: torch.device) -> Tensor:
        """Its elements, gathered on `device`; the members are empty from now on. Called on all ranks."""
        whole = torch.cat([shares.whole(member.parameter, device).flatten() for member in self.members])
        self.hide()
        return whole

    def show(self) -> None:
        """Make the members views of the bundle, which is whole."""
        flat = self.flat.data
        if self.members[0].parameter.data_ptr() != flat.data_ptr():
            for member, piece in zip(self.members, torch.split(flat, self.sizes), strict=True):
                member.parameter.data = piece.view(member.shape)

    def hide(self) -> None:
        """Make the members empty, so that they don't keep what the bundle lets go of."""
        nothing = self.flat.new_empty(0)
        for member in self.members:
            member.parameter.data = nothing

    def collect_gradient(self) -> None:
        """Give the members' gradients to the bundle, on top of what it has from earlier micro-batches."""
        gradients = [member.parameter.grad for member in self.members]
        if any(gradient is not None for gradient in gradients):
            found = zip(self.members, gradients, strict=True)
            parts = [self.flat.new_zeros(m.shape.numel()) if g is None else g.flatten() for m, g in found]
            new = torch.cat(parts)
            self.flat.grad = new if self.flat.grad is None else self.flat.grad.add_(new)
        for member in self.members:
            member.parameter.grad = None


class Bundles:
    """All bundles of a model.

    Args:
        module: the model, before DeepSpeed sees it. Members are no longer among its `named_parameters`.
        layers: those whose parameters go into bundles, none inside another.
        groups: parameter groups of the optimizer.

    Attributes:
        groups: the same groups, with bundles in the place of their members.
    """

    def __init__(self, module: nn.Module, layers: Iterable[nn.Module], groups: list[dict[str, Any]]) -> None:
        self._of_layer: dict[nn.Module, list[Bundle]] = {}
        self._of_flat: dict[int, Bundle] = {}
        named = list(module.named_parameters(remove_duplicate=False))
        names, num_owners = {id(p): name for name, p in named}, Counter(id(p) for _, p in named)
        group_of = {id(p): number for number, group in enumerate(groups) for p in group["params"]}
        for layer in layers:
            for owned in _alike(layer, num_owners, group_of):
                self._add(layer, owned, names)
        self.groups = [{**group, "params": list(self._with_bundles(group["params"]))} for group in groups]

    def of(self, parameter: nn.Parameter) -> Bundle | None:
        """The bundle that this parameter of the model is."""
        return self._of_flat.get(id(parameter))

    def members(self, name: str, parameter: nn.Parameter) -> list[Member]:
        """What a parameter of the model consists of: the members of a bundle, or the parameter itself."""
        bundle = self.of(parameter)
        whole = Member(name, parameter, getattr(parameter, "ds_shape", parameter.shape), 0)
        return [whole] if bundle is None else bundle.members

    def stretches(
        self, name: str, parameter: nn.Parameter, first: int, values: Tensor
    ) -> Iterator[tuple[str, tuple[int, Tensor]]]:
        """Of a stretch of a parameter, the stretches of its members: name, number of the first element, elements."""
        for member in self.members(name, parameter):
            start, stop = max(first, member.start), min(first + len(values), member.stop)
            if start < stop:
                yield member.name, (start - member.start, values[start - first : stop - first])

    def collect_by_layer(self) -> None:
        """With ZeRO-3: let bundles have their gradient before DeepSpeed, which hooks onto layers later, reduces it."""
        for layer, bundles in self._of_layer.items():
            trained = [bundle for bundle in bundles if bundle.flat.requires_grad]
            if trained:
                layer.register_full_backward_hook(partial(_collect, trained))

    def stay(self, optimizer: Any) -> None:
        """With ZeRO-1 and 2: members are views from now on. DeepSpeed learns of a bundle's gradient when all have one.

        Where some were not used, that is the end of the backward pass.

        Args:
            optimizer: DeepSpeed's.
        """
        if not self._of_flat:
            return
        state, arrived = optimizer._backward_hook_state, dict[int, int]()
        at_the_end = state.run_grad_acc_post_hooks

        def arrive(bundle: Bundle, _: Tensor) -> None:
            state.queue_post_backward_callback()  # DeepSpeed does so for the first parameter that it sees
            arrived[id(bundle.flat)] = arrived.get(id(bundle.flat), 0) + 1
            if arrived[id(bundle.flat)] == len(bundle.members):
                give(bundle)

        def give(bundle: Bundle) -> None:
            del arrived[id(bundle.flat)]
            bundle.collect_gradient()
            for hook in tuple(bundle.flat._post_accumulate_grad_hooks.values()):
                hook(bundle.flat)

        def give_the_rest() -> None:
            for key in tuple(arrived):
                give(self._of_flat[key])
            at_the_end()

        state.run_grad_acc_post_hooks = give_the_rest
        for bundle in self._of_flat.values():
            bundle.show()
            for member in bundle.members if bundle.flat.requires_grad else ():
                member.parameter.register_post_accumulate_grad_hook(partial(arrive, bundle))  # type: ignore[no-untyped-call]

    def follow(self, coordinator: Any) -> None:
        """With ZeRO-3: show members whenever DeepSpeed has gathered their layer, and hide them when it lets go of it.

        Args:
            coordinator: its `PartitionedParameterCoordinator`.
        """
        fetch, release = coordinator.fetch_sub_module, coordinator.release_sub_module
        release_all = coordinator.release_and_reset_all

        def fetch_sub_module(layer: nn.Module, *args: Any, **options: Any) -> None:
            fetch(layer, *args, **options)
            for bundle in self._of_layer.get(layer, ()):
                bundle.show()

        def release_sub_module(layer: nn.Module, *args: Any, **options: Any) -> None:
            release(layer, *args, **options)
            _hide(self._of_layer.get(layer, ()))

        def release_and_reset_all(module: nn.Module) -> None:
            release_all(module)
            _hide(self._of_flat.values())

        coordinator.fetch_sub_module = fetch_sub_module
        coordinator.release_sub_module = release_sub_module
        coordinator.release_and_reset_all = release_and_reset_all
        _hide(self._of_flat.values())  # in the format and on the device that they have by now

    def _add(self, layer: nn.Module, owned: list[_Owned], names: Mapping[int, str]) -> None:
        members, size = list[Member](), 0
        for owner, key, parameter in owned:
            members.append(Member(names[id(parameter)], parameter, parameter.shape, size))
            size = members[-1].stop
            del owner._parameters[key]
            object.__setattr__(owner, key, parameter)  # not as one of the module's parameters
        first = owned[0][-1]
        flat = nn.Parameter(torch.zeros(1, dtype=first.dtype).expand(size), requires_grad=first.requires_grad)
        bundle = Bundle(flat, members)
        if not bundle.is_in_shares():
            flat.data = bundle.filled(torch.device("cpu"))
        bundles = self._of_layer.setdefault(layer, [])
        layer.register_parameter(_NAME.format(len(bundles)), flat)
        bundles.append(bundle)
        self._of_flat[id(flat)] = bundle

    def _with_bundles(self, parameters: Iterable[nn.Parameter]) -> Iterator[nn.Parameter]:
        bundle_of = {id(m.parameter): bundle.flat for bundle in self._of_flat.values() for m in bundle.members}
        return iter({id(p): p for p in (bundle_of.get(id(p), p) for p in parameters)}.values())


def _alike(layer: nn.Module, num_owners: Mapping[int, int], group_of: Mapping[int, int]) -> Iterable[list[_Owned]]:
    """Parameters of the layer alone that have one format and one group, where there are several."""
    found: dict[tuple[Any, ...], list[_Owned]] = {}
    for owner in layer.modules():
        for key, parameter in owner._parameters.items():
            if type(parameter) is nn.Parameter and parameter.is_floating_point() and num_owners[id(parameter)] == 1:
                kind = parameter.dtype, parameter.requires_grad, group_of.get(id(parameter))
                found.setdefault(kind, []).append((owner, key, parameter))
    return [owned for owned in found.values() if len(owned) > 1]


def _collect(bundles: Iterable[Bundle], *_: Any) -> None:
    for bundle in bundles:
        bundle.collect_gradient()


def _hide(bundles: Iterable[Bundle]) -> None:
    """Small bundles stay gathered, and those that are needed again soon."""
    for bundle in bundles:
        if not bundle.flat.numel():
            bundle.hide()
