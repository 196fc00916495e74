"""What the commands `train` and `evaluate` do: check first, then build, then run."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from lavis_ds import registry
from lavis_ds.config.load import LoadedConfig, load
from lavis_ds.config.schema import RootConfig
from lavis_ds.errors import ConfigError
from lavis_ds.host_memory import keep_freed_memory
from lavis_ds.runners import checkpoint_files, job, launcher_env, output, preflight, process
from lavis_ds.runners.state import TrainState


def train(cfg: str, options: Sequence[str], *, job_id: str | None, resume: str | None) -> int:
    """Train. Everything that can be refused without torch is refused before torch is imported.

    Returns:
        The exit code: 0 done, 75 stopped on request and resumable.
    """
    launcher_env.adopt(os.environ)
    resume = _after_restart(job_id, resume)
    loaded = load(cfg, options)
    config = loaded.config
    checked = preflight.check(config, world_size=int(os.environ.get("WORLD_SIZE", "1")))
    chosen = job.resolve(config, job_id=job_id, resume=resume)
    if os.environ.get("RANK", "0") == "0":  # whose choice counts: time stamps may differ between ranks
        job.make_folder(chosen)

    distributed = _join(config)
    chosen = distributed.broadcast_object(chosen)
    from lavis_ds.runners import checkpoint

    while chosen.resume_from is not None and (damaged := checkpoint.damaged(chosen.resume_from)):
        chosen = chosen.without_damaged(damaged)
    chosen = chosen.with_notices([*loaded.notices, *checked.notices])
    from lavis_ds.runners import out_of_memory
    from lavis_ds.runners.progress import Progress

    with out_of_memory.explained(config, checked.plan, Progress("building the model and its engine")):
        runner = registry.get_runner_class(config.run.runner.name)(config, chosen, checked)
    code: int = runner.run()
    distributed.barrier()  # launchers end all ranks soon after the first one has left, and rank 0 writes the report
    distributed.shutdown()
    return code


def evaluate(checkpoint: str, cfg: str | None, options: Sequence[str], *, split: str | None) -> int:
    """Score a checkpoint's weights and write the result into its run folder."""
    launcher_env.adopt(os.environ)
    folder, passed_over = job.checkpoint(Path(checkpoint))
    loaded = load(cfg or folder / "config.yaml", options)
    config = _for_evaluation(loaded, folder, split)
    if os.environ.get("RANK", "0") == "0":  # which writes the results
        _require_results(config, folder)
    splits = preflight.read(config, _splits_read(config))

    distributed = _join(config)
    from lavis_ds.runners import out_of_memory
    from lavis_ds.runners.evaluate import evaluate_checkpoint
    from lavis_ds.runners.progress import Progress

    with out_of_memory.explained(config, None, Progress("evaluating a checkpoint")):
        results = evaluate_checkpoint(config, splits, folder)
    if distributed.is_main():
        print("".join(f"{line}\n" for line in passed_over), end="", file=sys.stderr)
        for result in results:
            print("".join(f"{line}\n" for line in result.notices()), end="", file=sys.stderr)
            print(f"{result.split}: " + ", ".join(f"{name} {value:.4f}" for name, value in result.metrics.items()))
    distributed.shutdown()
    return 0


def _after_restart(job_id: str | None, resume: str | None) -> str | None:
    """`--resume` of a command that its launcher has started again: what came before must not be lost.

    Raises:
        ConfigError: without `--job-id`, nobody knows which run it was.
    """
    number = launcher_env.restarts(os.environ)
    if not number or resume is not None:
        return resume
    if job_id is None:
        raise ConfigError(
            "the launcher has started this command again, and it does not say which run to go on with.",
            where="lavis-ds train",
            given=f"restart {number}, without --job-id and --resume",
            hint="Add --job-id NAME --resume auto to the command.",
        )
    return "auto"


def _for_evaluation(loaded: LoadedConfig, folder: Path, split: str | None) -> RootConfig:
    config = loaded.config
    splits = [split] if split else config.run.test_splits
    if not splits:
        raise ConfigError("no split to evaluate is named.", where="run.test_splits", hint="Pass --split NAME.")
    checkpoint_files.verify(folder)
    return config.model_copy(
        update={
            "run": config.run.model_copy(update={"test_splits": splits}),
            "model": config.model.model_copy(update={"pretrained": str(folder), "finetuned": None}),
        }
    )


def _require_results(config: RootConfig, checkpoint: Path) -> None:
    """Raises:
    ConfigError: the scores of a split could not be written.
    """
    step = TrainState.step_of(checkpoint / "train_state.json")
    for split in config.run.test_splits:
        scores = job.result_file(checkpoint.parent.parent / "eval", split, step)
        for path in (scores, scores.with_suffix(".jsonl")):
            output.require_file(path, "the run folder of --checkpoint")


def _splits_read(config: RootConfig) -> list[str]:
    """The splits evaluated, and the training splits where the task sets its score against them."""
    task = registry.get_task_class(config.run.task.name)(config.run.task)
    return [*config.run.test_splits, *(config.run.train_splits if task.compares_with_training else [])]


def _join(config: RootConfig) -> ModuleType:
    """Import torch, join the process group, and return `lavis_ds.distributed`."""
    process.prepare(config.run.log_level)
    from lavis_ds import distributed

    distributed.initialize(config.run.dist_timeout_s)
    if distributed.device().type == "cpu":
        keep_freed_memory()
    return distributed
