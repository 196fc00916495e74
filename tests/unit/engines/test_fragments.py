from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lavis_ds.engines import fragments
from lavis_ds.engines.fragments import Fragment, StoredFragments, held_stretch, restore, write
from lavis_ds.errors import CheckpointError

SHAPE = torch.Size([4, 5])
WHOLE = torch.arange(20.0)


def stretch(first: int, last: int, *, empty: bool = False, **options: Any) -> Fragment:
    """Elements `first` to `last` of a matrix, its moments ten and a hundred times as large; zeros where `empty`."""
    part = WHOLE[first:last] * (0 if empty else 1)
    moments = {"exp_avg": part * 10, "exp_avg_sq": part * 100}
    return Fragment(
        "a.weight", first, SHAPE, part.clone(), moments, {"step": torch.tensor(0.0 if empty else 7.0)}, **options
    )


def save(folder: Path, cuts: list[int], **options: Any) -> None:
    for rank, (first, last) in enumerate(itertools.pairwise(cuts)):
        write([stretch(first, last, **options)], folder, rank)


@pytest.mark.parametrize("cuts", [[0, 20], [0, 7, 14, 20], [0, 1, 19, 20]])
@pytest.mark.parametrize("new_cuts", [[0, 20], [0, 10, 20], [0, 3, 4, 18, 20]])
def test_stretches_are_put_together_from_any_others(cuts: list[int], new_cuts: list[int], tmp_path: Path) -> None:
    save(tmp_path, cuts)
    for first, last in itertools.pairwise(new_cuts):
        found = stretch(first, last, empty=True)
        assert restore([found], StoredFragments(tmp_path), {}) == []
        assert torch.equal(found.master, WHOLE[first:last])
        assert torch.equal(found.moments["exp_avg"], WHOLE[first:last] * 10)
        assert torch.equal(found.moments["exp_avg_sq"], WHOLE[first:last] * 100)
        assert float(found.clock["step"]) == 7


def test_only_owners_write(tmp_path: Path) -> None:
    write([stretch(0, 20, is_owner=False)], tmp_path, 1)
    assert list(tmp_path.iterdir()) == []


def test_masters_come_from_the_weights_where_these_are_they(tmp_path: Path) -> None:
    save(tmp_path, [0, 9, 20], has_own_master=False)
    found = stretch(5, 12, empty=True)
    restore([found], StoredFragments(tmp_path), {"a.weight": (WHOLE + 1).view(SHAPE)})
    assert torch.equal(found.master, WHOLE[5:12] + 1)
    assert torch.equal(found.moments["exp_avg"], WHOLE[5:12] * 10)


def test_files_have_a_largest_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fragments, "_MAX_FILE_BYTES", 200)
    parts = [stretch(0, 20), stretch(0, 20)]
    write([Fragment(name, *list(vars(part).values())[1:]) for name, part in zip("ab", parts, strict=True)], tmp_path, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"rank_00003_0000{k}.safetensors" for k in (0, 1)]
    assert set(StoredFragments(tmp_path).shapes) == {"a", "b"}


def test_a_stretch_in_no_file_is_an_error(tmp_path: Path) -> None:
    save(tmp_path, [0, 7, 14])
    with pytest.raises(CheckpointError, match=r"2 elements of master of a\.weight are in no file"):
        restore([stretch(10, 16, empty=True)], StoredFragments(tmp_path), {})


def test_another_shape_and_another_optimizer_are_errors(tmp_path: Path) -> None:
    save(tmp_path, [0, 20])
    other = Fragment("a.weight", 0, torch.Size([5, 4]), torch.zeros(20), {}, {})
    with pytest.raises(CheckpointError, match=r"another shape.*\(5, 4\).*\(4, 5\)"):
        restore([other], StoredFragments(tmp_path), {})
    muon = Fragment("a.weight", 0, SHAPE, torch.zeros(20), {"momentum_buffer": torch.zeros(20)}, {})
    with pytest.raises(CheckpointError, match="no momentum_buffer"):
        restore([muon], StoredFragments(tmp_path), {})


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    save(tmp_path, [0, 20])
    path = tmp_path / "rank_00000_00000.safetensors"
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(CheckpointError, match=r"rank_00000_00000\.safetensors: this file is damaged"):
        StoredFragments(tmp_path)


def test_state_that_can_not_be_cut_is_refused() -> None:
    weight = torch.nn.Parameter(torch.ones(3, 4))
    optimizer = torch.optim.Adafactor([weight])
    weight.grad = torch.ones(3, 4)
    optimizer.step()
    with pytest.raises(CheckpointError, match=r"Adafactor keeps row_var"):
        held_stretch("a.weight", 0, weight.shape, weight, 0, 12, optimizer)


NUMEL = 8192
"""Of a flat partition whose moments bitsandbytes keeps in 8 bits."""


def eight_bit(steps: int) -> tuple[torch.nn.Parameter, torch.optim.Optimizer]:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    flat = torch.nn.Parameter(torch.linspace(-1, 1, NUMEL))
    optimizer: torch.optim.Optimizer = bitsandbytes.optim.AdamW8bit([flat], lr=1e-2)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        flat.grad = torch.randn(NUMEL, generator=generator)
        optimizer.step()
    return flat, optimizer


def stretches(flat: Tensor, optimizer: torch.optim.Optimizer, cuts: list[int]) -> list[Fragment]:
    """The partition as parameters end to end, whose cuts lie inside blocks."""
    shape = torch.Size([NUMEL])
    return [
        held_stretch(f"p{first}", 0, shape, flat, first, last - first, optimizer)
        for first, last in itertools.pairwise(cuts)
    ]


def test_8_bit_moments_go_on_exactly_where_they_were_cut(tmp_path: Path) -> None:
    cuts = [0, 300, 301, 5000, NUMEL]
    old, old_optimizer = eight_bit(steps=3)
    write(stretches(old, old_optimizer, cuts), tmp_path, 0)
    new, new_optimizer = eight_bit(steps=0)
    assert restore(stretches(new, new_optimizer, cuts), StoredFragments(tmp_path), {}) == []
    for flat, optimizer in ((old, old_optimizer), (new, new_optimizer)):
        flat.grad = torch.ones(NUMEL)
        optimizer.step()
    assert torch.equal(old, new)
    assert new_optimizer.state[new]["step"] == 4
    for kind in ("state1", "state2", "absmax1", "absmax2"):
        assert torch.equal(old_optimizer.state[old][kind], new_optimizer.state[new][kind])


@pytest.mark.parametrize("changed", ["length", "place in its block"])
def test_8_bit_moments_that_would_be_cut_anew_are_refused(changed: str, tmp_path: Path) -> None:
    write(stretches(*eight_bit(steps=1), [0, 300, 5000, NUMEL]), tmp_path, 0)
    fragment = stretches(*eight_bit(steps=0), [0, 300, 4999 if changed == "length" else 5000, NUMEL])[1]
    if changed == "place in its block":
        fragment = replace(fragment, phase=45)
    with pytest.raises(CheckpointError, match=r"8-bit moments of p300 were cut in other places"):
        restore([fragment], StoredFragments(tmp_path), {})


def test_8_bit_moments_do_not_become_others(tmp_path: Path) -> None:
    flat, optimizer = eight_bit(steps=1)
    write(stretches(flat, optimizer, [0, NUMEL]), tmp_path, 0)
    whole = Fragment("p0", 0, torch.Size([NUMEL]), torch.zeros(NUMEL), {"state1": torch.zeros(NUMEL)}, {})
    with pytest.raises(CheckpointError, match="or are in other bits"):
        restore([whole], StoredFragments(tmp_path), {})
