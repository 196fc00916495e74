"""The training run: set-up, the loop, and what happens around a step. What changes the result is a line of the loop."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from lavis_ds import distributed
from lavis_ds.batch import Batch
from lavis_ds.config.load import to_yaml
from lavis_ds.config.schema import Interval, RootConfig
from lavis_ds.errors import ConfigError
from lavis_ds.optim.groups import PartRow, param_groups, parameter_table
from lavis_ds.runners import build, checkpoint, checkpoint_files, environment, observers, out_of_memory, step_plan
from lavis_ds.runners.checkpoint_files import Keep
from lavis_ds.runners.checkpoint_writer import CheckpointWriter
from lavis_ds.runners.configs import TrainRunnerConfig
from lavis_ds.runners.evaluate import evaluate
from lavis_ds.runners.gradient_check import GradientCheck
from lavis_ds.runners.job import Job, writing
from lavis_ds.runners.left_out import FrozenWeights
from lavis_ds.runners.meter import GroupCounts, GroupSums, OutputSums, StepTimer, peak_memory_bytes
from lavis_ds.runners.non_finite import NonFinite
from lavis_ds.runners.observers.base import Observer, RunInfo
from lavis_ds.runners.preflight import Preflight
from lavis_ds.runners.progress import Progress
from lavis_ds.runners.quarantine import Quarantine
from lavis_ds.runners.speed import Speed
from lavis_ds.runners.state import TrainState
from lavis_ds.runners.stop import StopRequest
from lavis_ds.runners.watchdog import Watchdog
from lavis_ds.tasks.base import StepOutput

EXIT_DONE, EXIT_STOPPED = 0, 75


class TrainRunner:
    """One run from configuration to exit code. Subclass it and register the class to change the loop.

    Args:
        config: the checked configuration.
        job: run folder and checkpoint to resume from.
        preflight: batch plan and annotations.
    """

    Config = TrainRunnerConfig

    def __init__(self, config: RootConfig, job: Job, preflight: Preflight) -> None:
        self.config, self.run_config, self.job, self.preflight = config, config.run, job, preflight
        self.plan = preflight.plan
        self.progress = Progress("starting")
        self.task = build.build_task(config)
        self.model = build.build_model(config, in_shares=build.trains_in_shares(config))
        self.text_context = build.text_context(self.model)
        self.work = self.model.work()
        self.layers = build.compile_layers(config, self.model)
        groups = param_groups(self.model, self.run_config)
        self.parts = parameter_table(self.model, groups)
        self.engine = build.build_engine(config, self.model, groups, self.plan)
        self._build_data()
        self.state = TrainState(
            dataset_sizes=dict(zip(self.datasets, self.train_data.sizes, strict=True)),
            samples_an_epoch=self.steps.samples_an_epoch,
            global_batch_size=self.plan.global_batch_size,
            seed=self.run_config.seed,
            order=self.steps.describe(),
        )
        self.schedule, self.schedule_shape = build.schedule(self.run_config, self.total_steps)
        frozen = FrozenWeights(self.engine, self.model.origins)
        if self.run_config.save_trainable_only:
            frozen.look()
        resumed = checkpoint.load(job.resume_from, self.engine, self.state, frozen) if job.resume_from else None
        left_out = (
            frozen.left_out(look_again=resumed is not None and resumed.is_whole)
            if self.run_config.save_trainable_only
            else {}
        )
        self.data_state = resumed.data_state if resumed else {}  # what batches need to go on, besides the step
        self.notices = [*job.notices, *(resumed.notices if resumed else self.model.notices)]
        self.observers: list[Observer] = (
            observers.build(self.run_config.observers, self.run_config.log_every) if distributed.is_main() else []
        )
        self.quarantine = Quarantine(
            job.folder, self.state.step, sum(self.train_data.sizes), config.data.max_bad_fraction
        )
        in_background = self.run_config.save_in_background
        size = _checkpoint_bytes(self.parts, self.run_config.precision) - frozen.num_bytes(left_out)
        self.writer = CheckpointWriter(
            job.checkpoints, self.engine, in_background=in_background, size_bytes=size, left_out=left_out
        )
        self.non_finite = NonFinite(self.run_config, job, self.engine, self.state, self._say, self._join_save)
        self.saved_step, self.saved_s = self.state.step if job.resume_from is not None else -1, time.monotonic()

    def _build_data(self) -> None:
        config, plan, engine = self.config, self.plan, self.engine
        self.datasets = build.train_datasets(config, self.preflight.splits)
        self.train_data = build.encoded(config, self.datasets, self.text_context, training=True)
        self.steps = step_plan.build(config, self.train_data, plan, engine, self.work)
        self.total_steps = self.steps.num_steps

    # --- the run ---------------------------------------------------------------------------------------------------

    def run(self) -> int:
        """Train, evaluate, save. Returns the exit code: 0 done, 75 stopped on request and resumable."""
        try:
            with out_of_memory.explained(self.config, self.plan, self.progress):
                self._start()
                stopped = False if self.run_config.evaluate else self._train()
                self.engine.finish()
                if not stopped:
                    self._evaluate(self.run_config.test_splits)
            self._watch(lambda observer: observer.on_end("stopped on request" if stopped else "finished"))
            return EXIT_STOPPED if stopped else EXIT_DONE
        finally:
            self._watch(lambda observer: observer.close())

    def _train(self) -> bool:
        """The loop. Returns whether it stopped on request before the end."""
        state, run, engine = self.state, self.run_config, self.engine
        collator = build.collator(self.model, self.train_data)
        groups = build.train_loader(self.config, self.train_data, collator, self.steps, state.step, self.data_state)
        engine.module.train()
        stall_s = run.stall_timeout_s or 0.75 * run.dist_timeout_s
        watchdog = Watchdog(self.job.folder / "stalls", stall_s, self.progress)
        with StopRequest() as stop, contextlib.closing(groups), watchdog:
            timer = StepTimer(Speed(self.work, run.precision))
            self.progress.await_data(state.step + 1)
            gradients: GradientCheck | None = GradientCheck(self.engine.trained)
            for group in groups:
                timer.data_arrived()
                self.progress.begin_step(state.step + 1, group)
                epoch = int(state.epoch)
                sums = GroupSums(
                    group, stop=stop.requested, save=self._is_time_to_save(), is_writing=self.writer.is_busy()
                )
                outputs: list[StepOutput] = []
                for index, batch in enumerate(group):
                    self.progress.micro_batch(index, group)
                    with engine.micro_batch(is_last=index == len(group) - 1):
                        output = self.task.train_step(engine, batch.to(engine.device))
                        outputs.append(output.detached())
                        if index == len(group) - 1:
                            totals = OutputSums(outputs)
                        engine.backward(output.loss_sum * sums.loss_factor(engine.data_parallel_size))
                self.progress.add_up()
                counts = sums.read()
                if counts.unusable:
                    unusable = [sample for batch in group for sample in batch.unusable]
                    self.quarantine.add(state.step + 1, unusable, samples_seen=state.samples_seen)
                if gradients is not None:
                    self._say(gradients.finish(has_pictures=any(batch.image_index.numel() for batch in group)))
                    gradients = None
                loss_sum, metrics = totals.read()
                loss = loss_sum / counts.divisor
                self.progress.update_weights()
                self.non_finite.before_update(loss, group, outputs)
                lr = self.schedule(state.step, self.schedule_shape)
                settings = self.model.before_step(state.step + 1)
                metrics.update(settings.metrics)
                result = engine.step(lr, settings.lr_factors)
                metrics.update(self.non_finite.after_update(loss, result, group, outputs))
                consumed = counts.samples + counts.unusable
                state.advance(samples=consumed, tokens=counts.tokens, targets=counts.targets)
                self.data_state = groups.state()
                self._report_step(loss, lr, result.grad_norm, counts, metrics, timer.finish(counts), group)
                crossed_epoch, is_best = int(state.epoch) > epoch, False
                if _is_due(run.eval_every, state.step, crossed_epoch):
                    is_best = self._evaluate(run.valid_splits)
                wants_stop = counts.stop or state.step == run.stop_at_step
                if self.writer.is_pending and not counts.is_writing:
                    self._finish_save()
                if wants_stop or is_best or counts.save or _is_due(run.save_every, state.step, crossed_epoch):
                    self._save()
                if wants_stop and state.step < self.total_steps:
                    break
                timer.restart()
                self.progress.await_data(state.step + 1)
        if run.save_last or state.step < self.total_steps:
            self._save()
        self._join_save()
        return state.step < self.total_steps

    # --- what a step calls -----------------------------------------------------------------------------------------

    def _report_step(
        self,
        loss: float,
        lr: float,
        grad_norm: float,
        counts: GroupCounts,
        metrics: Mapping[str, float],
        times: Mapping[str, float],
        group: Sequence[Batch],
    ) -> None:
        record: dict[str, Any] = {
            "epoch": self.state.epoch,
            "train/loss": loss,
            "train/lr": lr,
            "train/grad_norm": grad_norm,
            "train/num_targets": counts.targets,
            **metrics,
            **times,
            "memory/peak_bytes": peak_memory_bytes(),
            **counts.metrics(),
        }
        if self.run_config.log_sample_ids:
            own = [pair for batch in group for pair in zip(batch.positions, batch.sample_ids, strict=True)]
            pairs = sorted(pair for rank in distributed.gather_objects(own) for pair in rank)
            record["data/sample_ids"] = [sample_id for _, sample_id in pairs]  # in the order of the stream
        self._watch(lambda observer: observer.on_step(self.state.step, record))

    def _save(self) -> None:
        if self.saved_step == self.state.step:
            return
        self.progress.aside("saving a checkpoint", self.state.step)
        self._join_save()
        run, state = self.run_config, self.state
        keep = Keep(run.keep_last, run.keep_every, state.best_step)
        self.writer.begin(state, to_yaml(self.config), keep, self.data_state)
        self.saved_step, self.saved_s = state.step, time.monotonic()
        if not run.save_in_background:
            self._finish_save()

    def _join_save(self) -> None:
        if self.writer.is_pending:
            self._finish_save()

    def _finish_save(self) -> None:
        self.progress.aside("saving a checkpoint", self.state.step)
        path = self.writer.finish()
        self._watch(lambda observer: observer.on_checkpoint(checkpoint_files.step_of(path), path))

    def _is_time_to_save(self) -> bool:
        """Asked of every rank; rank 0's clock counts."""
        minutes = self.run_config.save_every_minutes
        return minutes is not None and distributed.is_main() and time.monotonic() - self.saved_s >= 60 * minutes

    def _evaluate(self, splits: Sequence[str]) -> bool:
        """Returns whether the metric `keep_best` is the best so far."""
        is_best = False
        for split in splits:
            self.progress.aside(f"evaluating {split}", self.state.step)
            result = evaluate(
                self.config,
                self.model,
                self.task,
                self.preflight.splits[split],
                split=split,
                step=self.state.step,
                device=self.engine.device,
                synced=self.engine.is_sharded,
                training=self.datasets,
            )
            if distributed.is_main():
                with writing(self.job.folder):
                    result.write(self.job.folder / "eval")
                self._say(result.notices())
            self._watch(lambda observer, r=result: observer.on_evaluate(r.split, r.step, r.metrics, r.predictions))  # type: ignore[misc]
            is_best |= self._is_best(split, result.metrics)
        return is_best

    def _is_best(self, split: str, metrics: Mapping[str, float]) -> bool:
        """Raises:
        ConfigError: the metric that `keep_best` names is none of this split's.
        """
        chosen, _, name = (self.run_config.keep_best or "").partition("/")
        if chosen != split:
            return False
        if name not in metrics:
            raise ConfigError(
                "the evaluation gives no such metric.",
                where="run.keep_best",
                given=f"{split}/{name}",
                expected=", ".join(f"{split}/{known}" for known in metrics),
            )
        return self.state.is_best(metrics[name], lower_is_better=name == "loss")

    # --- around the run --------------------------------------------------------------------------------------------

    def _start(self) -> None:
        if distributed.is_main():
            layout, sizes = self.engine.describe(), self.state.dataset_sizes
            with writing(self.job.folder):
                (self.job.folder / "config.yaml").write_text(to_yaml(self.config))
                environment.write(self.job.folder / "environment.json", layout, sizes)
        info = RunInfo(
            self.job.folder, self.total_steps, self.config.model_dump(mode="json"), self._summary(), self.state.step
        )
        self._watch(lambda observer: observer.on_start(info, self.state))
        self._say(self.notices)

    def _summary(self) -> dict[str, str]:
        total, trainable = sum(row.parameters for row in self.parts), sum(row.trainable for row in self.parts)
        layout = self.engine.describe()
        plan, ranks = self.plan, self.engine.data_parallel_size
        factors = f"{plan.micro_batch_size} (micro-batch) x {plan.accumulation} (accumulation) x {ranks} (ranks)"
        return {
            "run folder": str(self.job.folder),
            "model": self.config.model.arch,
            "parameters": f"{total:,} of which {trainable:,} train",
            **{f"  {row.part}": row.text() for row in self.parts},
            **self.model.describe(),
            "layers": self.layers,
            "engine": ", ".join(f"{key} {value}" for key, value in layout.items()),
            "global batch": f"{plan.global_batch_size} = {factors}",
            "data": ", ".join(
                f"{name}: {f'{size:,}' if size else 'a stream'}" for name, size in self.state.dataset_sizes.items()
            ),
            "steps": f"{self.state.step:,} of {self.total_steps:,} done",
            "device": str(self.engine.device),
        }

    def _say(self, lines: Iterable[str]) -> None:
        for line in lines:
            self._watch(lambda observer, text=line: observer.on_message(text))  # type: ignore[misc]

    def _watch(self, call: Callable[[Observer], object]) -> None:
        for observer in self.observers:
            with writing(self.job.folder):
                call(observer)


def _is_due(interval: Interval | None, step: int, crossed_epoch: bool) -> bool:
    return crossed_epoch if interval == "epoch" else interval is not None and step % interval == 0


def _checkpoint_bytes(parts: Sequence[PartRow], precision: str) -> int:
    """Weights in the run's precision, two moments in float32, and a float32 master where the weights are none."""
    a_weight, a_master = (4, 0) if precision == "fp32" else (2, 4)
    return sum(row.parameters * a_weight + row.trainable * (8 + a_master) for row in parts)
