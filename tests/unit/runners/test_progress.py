"""Where a rank says it is, and at which places it may stall."""

from __future__ import annotations

import torch

from lavis_ds.batch import Batch
from lavis_ds.runners.progress import Progress


def batch(*names: str, pictures: bool = True) -> Batch:
    rows = torch.zeros(len(names), 7, dtype=torch.long)
    nothing = torch.zeros(0, dtype=torch.long)
    return Batch(
        input_ids=rows,
        labels=rows,
        position_ids=rows,
        attention_mask=rows.bool(),
        segment_ids=None,
        images=torch.zeros(3, 3, 8, 8, dtype=torch.uint8) if pictures else None,
        image_index=nothing,
        target_index=nothing,
        num_targets=0,
        target_weight=0.0,
        num_tokens=0,
        sample_ids=list(names),
        positions=list(range(len(names))),
        by_dataset=(),
    )


def one_step(progress: Progress, step: int) -> None:
    progress.await_data(step)
    group = [batch("a", "b"), batch("c", pictures=False)]
    progress.begin_step(step, group)
    progress.micro_batch(0, group)
    progress.micro_batch(1, group)


def test_a_place_names_step_samples_and_shape() -> None:
    progress = Progress("starting")
    one_step(progress, 5)
    place = progress.place
    assert (place.doing, place.step, place.samples) == ("micro-batch 2 of 2", 5, ("a", "b", "c"))
    assert place.shape == "1 rows x 7 tokens"
    progress.micro_batch(0, [batch("a", "b"), batch("c")])
    assert progress.place.shape == "2 rows x 7 tokens, images 3 x 3 x 8 x 8"
    before = progress.place
    progress.update_weights()
    assert progress.place.moves == before.moves + 1
    assert progress.place.since_s >= before.since_s
    assert progress.place.samples == ("a", "b", "c")


def test_the_first_step_evaluation_and_saving_take_as_long_as_they_take() -> None:
    progress = Progress("starting")
    assert not progress.place.may_stall
    progress.aside("evaluating val", 4)
    one_step(progress, 5)
    assert progress.place.is_first_step
    assert not progress.place.may_stall
    progress.update_weights()
    assert not progress.place.may_stall
    progress.await_data(6)
    assert progress.place.may_stall
    assert not progress.place.is_first_step
    progress.aside("saving a checkpoint", 6)
    assert (progress.place.doing, progress.place.may_stall) == ("saving a checkpoint", False)
    one_step(progress, 7)
    assert progress.place.may_stall
