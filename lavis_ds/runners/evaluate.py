"""The evaluation loop, used during training and on its own."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lavis_ds import distributed
from lavis_ds.batch import Unusable
from lavis_ds.config.schema import RootConfig
from lavis_ds.models.base import Model
from lavis_ds.runners import build, job
from lavis_ds.runners.quarantine import check
from lavis_ds.runners.state import TrainState
from lavis_ds.tasks.base import Task

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Evaluation:
    """Scores of one split.

    Attributes:
        split: its name.
        step: optimizer steps the weights have had.
        num_samples: samples of the split.
        metrics: means over the whole split, the same on every rank.
        predictions: one record a sample, sorted by id, where the task makes any; on rank 0 only, elsewhere empty.
        unusable: samples that could not be used, and so are in no score.
    """

    split: str
    step: int
    num_samples: int
    metrics: Mapping[str, float]
    predictions: Sequence[Mapping[str, Any]]
    unusable: Sequence[Unusable] = ()

    def notices(self) -> list[str]:
        """What the user should know besides the scores."""
        if not self.unusable:
            return []
        first = self.unusable[0].reason
        return [f"{self.split}: {len(self.unusable)} of {self.num_samples} samples could not be used, such as {first}"]

    def write(self, folder: Path) -> Path:
        """Write `<split>_step_00001000.json` (scores) and `.jsonl` (predictions) into `folder`; returns the first."""
        folder.mkdir(parents=True, exist_ok=True)
        path = job.result_file(folder, self.split, self.step)
        if self.predictions:
            path.with_suffix(".jsonl").write_text(
                "".join(json.dumps(p, ensure_ascii=False) + "\n" for p in self.predictions)
            )
        content = {
            "split": self.split,
            "step": self.step,
            "num_samples": self.num_samples,
            "metrics": dict(self.metrics),
            **({"unusable": [asdict(sample) for sample in self.unusable]} if self.unusable else {}),
        }
        path.write_text(json.dumps(content, indent=2) + "\n")
        return path


def evaluate(
    config: RootConfig,
    model: Model,
    task: Task,
    datasets: build.Datasets,
    *,
    split: str,
    step: int,
    device: torch.device,
    synced: bool,
    training: build.Datasets,
) -> Evaluation:
    """Run a split through the model; called on all ranks, which share the samples out.

    Args:
        config: the run.
        model: the bare model, on `device`.
        task: what is measured.
        datasets: entry name -> the split's conversations.
        split: its name.
        step: optimizer steps the weights have had.
        device: where batches belong.
        synced: every rank must run the model the same number of times (ZeRO-3).
        training: the training split's conversations, for the task's baselines.
    """
    prompts = task.eval_batches == "prompts"
    data = build.encoded(config, datasets, build.text_context(model), training=False, prompts=prompts)
    loader = build.eval_loader(config, data, build.collator(model, data, padding_side="left" if prompts else "right"))
    context = build.eval_context(data, synced=synced)
    sums: dict[str, tuple[float, float]] = {}
    predictions: list[Mapping[str, Any]] = []
    unusable: list[Unusable] = []
    with evaluation_mode(model):
        for batch in loader:
            output = task.eval_step(model, batch.to(device), context)
            predictions.extend(output.predictions)
            sums = _add(sums, output.sums)
            unusable.extend(batch.unusable)
    left_out = [sample for own in distributed.gather_objects(unusable) for sample in own]
    check(left_out, len(data), config.data.max_bad_fraction, f"split {split}")
    baselines = (
        task.baselines(chain(*training.values()), chain(*datasets.values())) if task.compares_with_training else {}
    )
    return _gather(split, step, len(data), task, sums, predictions, baselines, left_out)


def evaluate_checkpoint(
    config: RootConfig, datasets: Mapping[str, build.Datasets], checkpoint: Path
) -> list[Evaluation]:
    """Score the weights of a checkpoint on `run.test_splits`; the results are written into its run folder."""
    device = distributed.device()
    model = build.build_model(config).to(device, _DTYPES[config.run.precision])
    task, step = build.build_task(config), TrainState.step_of(checkpoint / "train_state.json")
    training = build.train_datasets(config, datasets) if task.compares_with_training else {}
    results = []
    for split in config.run.test_splits:
        result = evaluate(
            config, model, task, datasets[split], split=split, step=step, device=device, synced=False, training=training
        )
        if distributed.is_main():
            result.write(checkpoint.parent.parent / "eval")
        results.append(result)
    return results


def _gather(
    split: str,
    step: int,
    num_samples: int,
    task: Task,
    sums: Mapping[str, tuple[float, float]],
    predictions: Sequence[Mapping[str, Any]],
    baselines: Mapping[str, float],
    unusable: Sequence[Unusable],
) -> Evaluation:
    totals: dict[str, tuple[float, float]] = {}
    records: list[Mapping[str, Any]] = []
    for rank_sums, rank_predictions in distributed.gather_objects((sums, predictions)):
        totals = _add(totals, rank_sums)
        records.extend(rank_predictions)
    ordered = sorted(records, key=lambda record: str(record["id"]))
    metrics = {**task.summarize(totals), **baselines}
    return Evaluation(split, step, num_samples, metrics, ordered if distributed.is_main() else [], unusable)


@contextmanager
def evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Without gradients and without dropout; the mode it was in comes back afterwards."""
    was_training = module.training
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        module.train(was_training)


def _add(
    left: Mapping[str, tuple[float, float]], right: Mapping[str, tuple[float, float]]
) -> dict[str, tuple[float, float]]:
    """Sums and counts of both."""
    nothing = (0.0, 0.0)
    pairs = {name: (left.get(name, nothing), right.get(name, nothing)) for name in {**left, **right}}
    return {name: (a[0] + b[0], a[1] + b[1]) for name, (a, b) in pairs.items()}
