"""Where ranks part ways, from records of their calls; and the record of a process of its own."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist

from lavis_ds.runners.collectives import Collective, Parting, parting, recorded, waiting


def calls(*names: str, group: str = "0", first: int = 1) -> list[Collective]:
    """`all_reduce 4` is a call of that name and size; each name has a place of its own in the code."""
    made = []
    for number, text in enumerate(names, first):
        name, _, size = text.partition(" ")
        made.append(Collective(group, number, name, size and f"{size} Float", f"in {name} (a.py:1)", True, number))
    return made


STEP = ["all_reduce 4", "barrier", "all_reduce 9"]


def of(*ranks: Sequence[str]) -> Parting | None:
    return parting({rank: calls(*names) for rank, names in enumerate(ranks)})


def test_the_same_calls_part_nowhere() -> None:
    assert of(STEP, STEP) is None
    assert parting({0: calls(*STEP)}) is None
    assert parting({0: [], 1: []}) is None
    assert of(["all_gather 4"], ["all_gather 5"]) is None, "of these, sizes may differ"


def test_the_rank_with_fewer_calls_is_behind() -> None:
    found = of(STEP, STEP[:2], STEP)
    assert found == Parting(
        (1,), "the other ranks wait for it in call 3, all_reduce of 9 Float, called in all_reduce (a.py:1)", is_lag=True
    )


@pytest.mark.parametrize(("ahead", "odd"), [([*STEP, *STEP, *STEP], 1), ([*STEP, *STEP, "all_reduce 4", "barrier"], 1)])
def test_of_two_ranks_it_is_the_one_that_does_what_it_has_not_done_before(ahead: list[str], odd: int) -> None:
    """Rank 1 leaves out its third barrier."""
    found = of(ahead, [*STEP, *STEP, "all_reduce 4", "all_reduce 9"])
    assert found is not None
    assert found.ranks == (odd,)
    assert (
        "as call 8, rank 0 is in barrier, called in barrier (a.py:1); rank 1 is in all_reduce of 9 Float" in found.text
    )
    extra = of([*STEP, *STEP, "barrier"], [*STEP, *STEP, "all_reduce 4"])
    assert extra is not None
    assert extra.ranks == (0,)


def test_of_many_ranks_it_is_the_minority() -> None:
    found = of(STEP, [STEP[0], "all_reduce 9"], STEP)
    assert found is not None
    assert found.ranks == (1,)


def test_where_nobody_can_tell_it_is_all_that_differ() -> None:
    found = of(["all_reduce 4"], ["all_reduce 5"])
    assert found is not None
    assert found.ranks == (0, 1)


def test_other_sizes_and_groups_of_some_ranks() -> None:
    alone = calls("barrier", group="1")
    assert parting({0: [*calls(*STEP), *alone], 1: calls(*STEP)}) is None
    shared = parting({rank: [*calls(*STEP), *calls("all_reduce 4", group="2", first=9 + rank)] for rank in range(2)})
    assert shared is not None
    assert "call 10" in shared.text


def test_of_ranks_that_wait_in_different_groups_the_one_that_left_out_the_first_call_is_behind() -> None:
    found = parting(
        {0: [*calls(*STEP), *calls("barrier", first=4)], 1: [*calls(*STEP), *calls("all_reduce 7", group="1", first=5)]}
    )
    assert found is not None
    assert (found.ranks, found.is_lag) == ((1,), True)


def test_what_has_not_come_back_is_waited_in() -> None:
    done, other = calls("all_reduce 4", "barrier")
    stuck = Collective(**{**other.__dict__, "is_done": False})
    assert waiting([done, stuck]) == stuck
    assert waiting([done, other]) is None


def test_calls_are_recorded_with_the_line_that_made_them(tmp_path) -> None:  # type: ignore[no-untyped-def]
    dist.init_process_group("gloo", f"file://{tmp_path / 'store'}", world_size=1, rank=0)
    try:
        dist.all_reduce(torch.ones(3, 5))
        dist.barrier()
        first, second = recorded()[-2:]
    finally:
        dist.destroy_process_group()
    assert (first.name, first.sizes) == ("all_reduce", "3 x 5 Float")
    assert first.caller.startswith("in test_calls_are_recorded_with_the_line_that_made_them (")
    assert "test_collectives.py:" in first.caller
    assert (second.name, second.sizes, second.number) == ("barrier", "", first.number + 1)
