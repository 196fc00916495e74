"""What a loss or gradient that is not finite does to a run (`run.on_non_finite`): end it, skip the step, or go back.

All ranks see the same numbers, so all decide alike, as a rule before the weights are touched.

Going back makes weights and optimizer those of the newest whole checkpoint, in the same process. Step and data go on:
what was learned since, and the samples it was learned from, are left out, since the same steps would end in the same
place. PaLM's training did so (https://arxiv.org/abs/2204.02311, section 5.1).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from lavis_ds import distributed
from lavis_ds.batch import Batch
from lavis_ds.config.schema import RunConfig
from lavis_ds.engines.base import Engine, StepResult
from lavis_ds.errors import CheckpointError, NonFiniteError
from lavis_ds.runners import checkpoint, checkpoint_files
from lavis_ds.runners.job import Job
from lavis_ds.runners.meter import suspects
from lavis_ds.runners.state import TrainState
from lavis_ds.tasks.base import StepOutput

_UNTOUCHED = "the weights were not changed by this step"


class NonFinite:
    """Asked twice in every step, on all ranks.

    Args:
        run: the `run:` block.
        job: whose checkpoints there are.
        engine: what goes back.
        state: of the run.
        say: tells the user.
        join: finishes the checkpoint that is being written, if there is one.
    """

    def __init__(
        self,
        run: RunConfig,
        job: Job,
        engine: Engine,
        state: TrainState,
        say: Callable[[list[str]], object],
        join: Callable[[], object],
    ) -> None:
        self._run, self._job, self._engine, self._state = run, job, engine, state
        self._say, self._join = say, join
        self._skipped_in_a_row = 0

    def before_update(self, loss: float, group: Sequence[Batch], outputs: Sequence[StepOutput]) -> None:
        """Raises:
        NonFiniteError: the loss is not finite, and that ends the run.
        """
        if self._run.on_non_finite == "stop" and not math.isfinite(loss):
            raise self._failure("loss", loss, *suspects(group, outputs))

    def after_update(
        self, loss: float, result: StepResult, group: Sequence[Batch], outputs: Sequence[StepOutput]
    ) -> Mapping[str, float]:
        """What the step's metrics say of it; nothing, as a rule.

        fp16 leaves out a step now and then to find its loss scale, which is as it should be.

        Raises:
            NonFiniteError: something is not finite, and that ends the run.
        """
        is_loss_bad, scales = not math.isfinite(loss), self._run.precision == "fp16"
        self._state.steps_skipped += not result.applied
        if self._run.on_non_finite == "rewind" and (is_loss_bad or not (result.applied or scales)):
            what, value = ("loss", loss) if is_loss_bad else ("gradient norm", result.grad_norm)
            return self._rewind(what, value, *suspects(group, outputs))
        if result.applied:
            self._skipped_in_a_row = 0
            if is_loss_bad:
                outcome = "its gradient is finite and was applied"
                raise self._failure("loss", loss, *suspects(group, outputs), outcome=outcome)
        elif not scales:
            self._skip(result.grad_norm, *suspects(group, outputs))
        return {}

    def _skip(self, grad_norm: float, ranks: list[int], ids: list[str]) -> None:
        self._skipped_in_a_row += 1
        if self._run.on_non_finite == "stop" or self._skipped_in_a_row > self._run.max_skipped_steps:
            raise self._failure("gradient norm", grad_norm, ranks, ids)
        self._say([f"Step {self._state.step + 1} was skipped: its gradient is not finite. Samples {', '.join(ids)}."])

    def _rewind(self, what: str, value: float, ranks: list[int], ids: list[str]) -> Mapping[str, float]:
        state, failed = self._state, self._state.step + 1
        self._join()
        path = self._newest_whole()
        if len(state.rewinds) >= self._run.max_rewinds:
            reason = f"the run has gone back {len(state.rewinds)} times already (run.max_rewinds)"
        elif path is None:
            reason = "there is no whole checkpoint to go back to yet (run.save_every)"
        elif checkpoint.fill(path, self._engine):
            reason = f"other parameters train than did in {path}"
        else:
            step = checkpoint_files.step_of(path)
            state.rewinds.append([failed, step])
            outcome = f"weights and optimizer are those of step {step} again, and what was learned since is left out"
            self._say([f"Step {failed}: the {what} is {value}; {outcome}. Samples {', '.join(ids)}."])
            return {"train/rewound_to": step}
        raise self._failure(what, value, ranks, ids, outcome=reason)

    def _newest_whole(self) -> Path | None:
        folder, start = self._job.checkpoints, self._job.resume_from
        path, _ = distributed.broadcast_object(checkpoint_files.find(folder))
        while path is not None and _is_damaged(path):
            path, _ = distributed.broadcast_object(checkpoint_files.find(folder, before=path))
        if path is None and start is not None and not _is_damaged(start):
            return start  # of another run folder
        return path

    def _failure(
        self, what: str, value: float, ranks: list[int], ids: list[str], *, outcome: str = _UNTOUCHED
    ) -> NonFiniteError:
        return NonFiniteError(
            f"the {what} is {value}; {outcome}.",
            where=f"step {self._state.step + 1}, rank {', '.join(map(str, ranks))}",
            given=f"samples {', '.join(ids)}",
            hint="Look at these samples, lower run.init_lr, or resume from "
            f"{self._job.checkpoints} with --resume auto.",
        ).of_all_ranks()


def _is_damaged(path: Path) -> bool:
    try:
        return bool(checkpoint.damaged(path))
    except CheckpointError:  # a file is gone
        return True
