"""How far a run has come: a position, independent of ranks, workers and prefetch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lavis_ds.errors import CheckpointError


@dataclass
class TrainState:
    """Counters over the whole run, equal on all ranks.

    Attributes:
        step: optimizer steps done; also the position in the data order, in global batches.
        samples_seen: samples consumed, each epoch's visit counted, unusable ones too.
        tokens_seen: real tokens (no padding), image tokens included.
        targets_seen: tokens with a loss.
        steps_skipped: optimizer steps whose gradient was not finite.
        rewinds: pairs of a step that failed, and the step whose weights were taken back then.
        dataset_sizes: samples of each dataset; a resumed run must find the same.
        global_batch_size: samples an optimizer step; a resumed run must have the same.
        seed: seed of the data order; a resumed run must have the same.
        samples_an_epoch: samples of one pass over the training data.
        best_value: best value so far of the metric `run.keep_best`.
        best_step: optimizer steps done when it was found.
        order: what else the order of samples depends on (batching, mixture, ...); a resumed run must have the same.
    """

    step: int = 0
    samples_seen: int = 0
    tokens_seen: int = 0
    targets_seen: int = 0
    steps_skipped: int = 0
    rewinds: list[list[int]] = field(default_factory=list)
    dataset_sizes: dict[str, int] = field(default_factory=dict)
    global_batch_size: int = 0
    seed: int = 0
    samples_an_epoch: int = 0
    best_value: float | None = None
    best_step: int | None = None
    order: dict[str, Any] = field(default_factory=dict)

    @property
    def epoch(self) -> float:
        """Passes over the training data done."""
        return self.samples_seen / self.samples_an_epoch if self.samples_an_epoch else 0.0

    def advance(self, *, samples: int, tokens: int, targets: int) -> None:
        """Count one optimizer step; numbers are of the global batch."""
        self.step += 1
        self.samples_seen += samples
        self.tokens_seen += tokens
        self.targets_seen += targets

    def is_best(self, value: float, *, lower_is_better: bool) -> bool:
        """Whether this is the best value so far; remembers it if so."""
        before = self.best_value
        if before is not None and (value >= before if lower_is_better else value <= before):
            return False
        self.best_value, self.best_step = value, self.step
        return True

    def to_json(self) -> str:
        """What `restore` reads."""
        return json.dumps(asdict(self), indent=2) + "\n"

    @staticmethod
    def step_of(path: Path) -> int:
        """Optimizer steps that a saved state stands for."""
        return TrainState._read(path).step

    @staticmethod
    def _read(path: Path) -> TrainState:
        try:
            return TrainState(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise CheckpointError(f"the training state can't be read ({error}).", where=str(path)) from error

    def restore(self, path: Path) -> None:
        """Take over the counters of a saved state.

        Raises:
            CheckpointError: the file is damaged, or data or global batch differ, so that the order could not go on.
        """
        saved = self._read(path)
        if saved.seed != self.seed:
            raise CheckpointError(
                "the order of samples could not go on with another seed.",
                where=str(path),
                given=f"run.seed={self.seed}",
                expected=str(saved.seed),
                hint="Set run.seed to it, or start anew with model.pretrained set to this checkpoint.",
            )
        if list(saved.dataset_sizes.items()) != list(self.dataset_sizes.items()):  # their order counts, too
            raise CheckpointError(
                "the training data is not what this checkpoint was made with, so the order of samples could not go on.",
                where=str(path),
                given=f"{self.dataset_sizes} samples",
                expected=f"{saved.dataset_sizes}",
                hint="Restore the data, or start anew with model.pretrained set to this checkpoint.",
            )
        if saved.global_batch_size != self.global_batch_size:
            raise CheckpointError(
                "the global batch size must stay as it was when the checkpoint was made.",
                where=str(path),
                given=str(self.global_batch_size),
                expected=str(saved.global_batch_size),
                hint="Set run.global_batch_size to it; micro-batch or accumulation follow.",
            )
        different = [key for key in {**saved.order, **self.order} if saved.order.get(key) != self.order.get(key)]
        if different:
            raise CheckpointError(
                "the order of samples could not go on with other settings of the data.",
                where=str(path),
                given=", ".join(f"{key}={self.order.get(key)}" for key in different),
                expected=", ".join(f"{key}={saved.order.get(key)}" for key in different),
                hint="Set them back, or start anew with model.pretrained set to this checkpoint.",
            )
        self.__dict__.update(saved.__dict__)
