"""Where DeepSpeed's optimizers keep a rank's stretch of each parameter, by ZeRO stage.

Read from the sources of deepspeed 0.19.8: runtime/zero/stage_1_and_2.py, stage3.py, runtime/bf16_optimizer.py,
runtime/fp16/unfused_optimizer.py and utils/tensor_fragment.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lavis_ds import distributed
from lavis_ds.engines.ds_bundles import Bundles, Member
from lavis_ds.engines.fragments import Fragment, held_stretch, whole
from lavis_ds.optim.master_adamw import MasterAdamW
from lavis_ds.optim.muon import Piece

Named = list[tuple[str, Any]]


def fragments(
    module: nn.Module, optimizer: Any, base: torch.optim.Optimizer, bundles: Bundles, rank: int, size: int
) -> Iterator[Fragment]:
    """All that this rank holds of the trainable parameters.

    Args:
        module: the model.
        optimizer: what DeepSpeed made of `base`.
        base: the optimizer that updates weights.
        bundles: of the model's parameters.
        rank: of this process among those that see different data.
        size: their number.
    """
    named = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    if isinstance(base, MasterAdamW):
        yield from whole(named, base, rank=rank, world_size=size, copies=base.masters)
    elif _is_flat(optimizer):
        yield from _flat(named, optimizer, base, bundles)
    elif hasattr(optimizer, "fp32_groups"):
        yield from _copied(named, optimizer, base, rank, size)
    else:
        yield from whole(named, base, rank=rank, world_size=size)


class _Place(NamedTuple):
    """A stretch of a parameter in a flat partition, by the partition's number."""

    name: str
    shape: torch.Size
    start: int
    group: int
    offset: int
    numel: int


def _is_flat(optimizer: Any) -> bool:
    return hasattr(optimizer, "fp32_partitioned_groups_flat") or hasattr(optimizer, "_link_all_hp_params")


def _flats(optimizer: Any) -> list[Tensor]:
    """This rank's partition of each group: ZeRO-3; ZeRO-1 and 2; bf16 with float32 gradients below."""
    names = ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups", "fp32_groups_flat_partition")
    return list(getattr(optimizer, next(name for name in names if hasattr(optimizer, name))))


def _places(named: Named, optimizer: Any, bundles: Bundles) -> Iterator[_Place]:
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        return _partitioned(named, optimizer, bundles)
    return _flattened(named, bundles)


def _partitioned(named: Named, optimizer: Any, bundles: Bundles) -> Iterator[_Place]:
    """ZeRO-3: each parameter, or bundle, is cut into as many stretches as there are ranks, the last ones padded."""
    for name, parameter in named:
        group, offset, _ = optimizer.grad_position[optimizer.get_param_id(parameter)]
        numel = parameter.partition_numel()
        yield from _held(bundles.members(name, parameter), distributed.global_rank() * numel, numel, group, offset)


def _flattened(named: Named, bundles: Bundles) -> Iterator[_Place]:
    """Below ZeRO-3: a group's parameters and bundles end to end, cut at any place."""
    for name, parameter in named:
        mapping = parameter._hp_mapping
        if mapping is None:  # none of it is on this rank
            continue
        first, held = mapping.lp_fragment_address.start, mapping.hp_fragment_address
        yield from _held(bundles.members(name, parameter), first, held.numel, mapping.param_group_index, held.start)


def _held(members: Iterable[Member], first: int, numel: int, group: int, offset: int) -> Iterator[_Place]:
    """Of members, what lies in a stretch of their bundle, which stands at `offset` of a partition."""
    for member in members:
        start, stop = max(first, member.start), min(first + numel, member.stop)
        if start < stop:
            yield _Place(member.name, member.shape, start - member.start, group, offset + start - first, stop - start)


def _flat(named: Named, optimizer: Any, base: torch.optim.Optimizer, bundles: Bundles) -> Iterator[Fragment]:
    flats = _flats(optimizer)
    for name, shape, start, group, offset, numel in _places(named, optimizer, bundles):
        yield held_stretch(name, start, shape, flats[group], offset, numel, base)


def pieces(module: nn.Module, names: Iterable[str], optimizer: Any, bundles: Bundles) -> dict[Tensor, list[Piece]]:
    """Where these parameters lie in this rank's flat partitions; none without ZeRO. Called on all ranks."""
    if not _is_flat(optimizer):
        return {}
    chosen = set(names)
    named = [(name, parameter) for name, parameter in module.named_parameters() if name in chosen]
    places = {place.name: place for place in _places(named, optimizer, bundles)}
    held_by_ranks = distributed.gather_objects({place.name: (place.group, place.shape) for place in places.values()})
    flats, found = _flats(optimizer), dict[Tensor, list[Piece]]()
    for name in (name for name, _ in module.named_parameters() if name in chosen):
        held = [places_of_rank[name] for places_of_rank in held_by_ranks if name in places_of_rank]
        (group, shape), is_shared = held[0], len(held) > 1
        if is_shared or name in places:
            place = places.get(name) or _Place(name, shape, 0, group, 0, 0)
            found.setdefault(flats[group], []).append(Piece(shape, place.start, place.offset, place.numel, is_shared))
    return found


def _copied(named: Named, optimizer: Any, base: torch.optim.Optimizer, rank: int, size: int) -> Iterator[Fragment]:
    """Stage 0 in 16 bits: a whole float32 copy of each parameter on every rank."""
    pairs = zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True)
    copies = {id(low): high for lows, highs in pairs for low, high in zip(lows, highs, strict=True)}
    yield from whole(named, base, rank=rank, world_size=size, copies=copies)
