"""Where this rank is in the run, for whoever must say so when something goes wrong."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from lavis_ds.batch import Batch


@dataclass(frozen=True)
class Place:
    """A moment of the run.

    Attributes:
        doing: such as `micro-batch 1 of 4`.
        moves: moves so far; among ranks that wait for each other, the one with the fewest is behind.
        since_s: when this place was reached, on the clock of `time.monotonic`.
        step: optimizer step that is under way; 0 before the first.
        samples: ids of this rank's samples in that step, once they are known.
        shape: shape of the batch, once there is one.
        is_first_step: no step has been finished since the start.
        may_stall: False where any time may pass: the first step (kernels are compiled), evaluation, saving.
    """

    doing: str
    moves: int = 0
    since_s: float = 0.0
    step: int = 0
    samples: tuple[str, ...] = ()
    shape: str = ""
    is_first_step: bool = True
    may_stall: bool = False


class Progress:
    """Kept by the loop, read by others; a `Place` is replaced as a whole, so that another thread may read it.

    Args:
        doing: what the run begins with.
    """

    def __init__(self, doing: str) -> None:
        self.place = Place(doing)
        self._first_step: int | None = None

    def await_data(self, step: int) -> None:
        """The step before this one is finished, with whatever followed it, and the data of this one must come."""
        self._first_step = step if self._first_step is None else self._first_step
        self._move("waiting for data", step)

    def begin_step(self, step: int, group: Sequence[Batch]) -> None:
        """The step's data is here."""
        self._move(
            "adding up the counts of all ranks", step, tuple(name for batch in group for name in batch.sample_ids)
        )

    def micro_batch(self, index: int, group: Sequence[Batch]) -> None:
        batch = group[index]
        pictures = "" if batch.images is None else f", images {' x '.join(map(str, batch.images.shape))}"
        shape = f"{batch.shape[0]} rows x {batch.shape[1]} tokens{pictures}"
        self._move(f"micro-batch {index + 1} of {len(group)}", self.place.step, self.place.samples, shape)

    def add_up(self) -> None:
        """The last backward pass has been told to the device; counts and losses of other ranks are waited for."""
        self._move("adding up the losses of all ranks", self.place.step, self.place.samples, self.place.shape)

    def update_weights(self) -> None:
        self._move("updating the weights", self.place.step, self.place.samples, self.place.shape)

    def aside(self, doing: str, step: int) -> None:
        """Something other than a step, after `step` of them, which takes as long as it takes."""
        self._move(doing, step, may_stall=False)

    def _move(
        self, doing: str, step: int, samples: tuple[str, ...] = (), shape: str = "", may_stall: bool = True
    ) -> None:
        is_first = self._first_step is None or step <= self._first_step
        self.place = Place(
            doing, self.place.moves + 1, time.monotonic(), step, samples, shape, is_first, may_stall and not is_first
        )
