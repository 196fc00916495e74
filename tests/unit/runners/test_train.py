"""The loop in one process with the plain engine: what it writes, when it stops, and what it refuses to learn from."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from lavis_ds import registry
from lavis_ds.cli import main
from lavis_ds.config.load import load
from lavis_ds.errors import ConfigError, NonFiniteError
from lavis_ds.models.vlm import Vlm
from lavis_ds.optim.schedules import cosine
from lavis_ds.runners import build
from lavis_ds.runners import train as train_module
from lavis_ds.runners.checkpoint_files import complete_ones, verify
from lavis_ds.runners.state import TrainState
from lavis_ds.runners.train import TrainRunner, _is_due
from tests.tiny_project import NUM_SAMPLES, metrics
from tests.unit.runners.conftest import TinyRun

MakeRunner = Callable[..., TrainRunner]
NOT_REPEATED = ("time/", "throughput/", "memory/")


def learned(run: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without what differs from run to run."""
    return [{k: v for k, v in line.items() if not k.startswith(NOT_REPEATED)} for line in metrics(run)]


@pytest.mark.parametrize(
    ("interval", "due"),
    [(3, [3, 6, 9]), (1, list(range(1, 10))), ("epoch", [4, 7]), (None, []), (10, [])],
)
def test_is_due(interval: Any, due: list[int]) -> None:
    crossed = {4, 7}
    assert [step for step in range(1, 10) if _is_due(interval, step, step in crossed)] == due


def test_a_whole_run(tiny_run: TinyRun) -> None:
    assert tiny_run.code == 0
    lines = metrics(tiny_run.folder)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert lines[-1]["train/loss"] < lines[0]["train/loss"]
    run = load(tiny_run.cfg).config.run
    assert [line["epoch"] for line in lines] == [step * 8 / NUM_SAMPLES for step in range(1, 7)]
    peak = run.init_lr
    assert [line["train/lr"] for line in lines[:2]] == [peak / 2, peak]  # warm-up of 2 steps
    assert 0 < lines[-1]["train/lr"] < lines[3]["train/lr"] < peak
    expected = {
        "step", "epoch", "train/loss", "train/lr", "train/grad_norm", "train/num_targets", "train/token_accuracy",
        "time/step_s", "time/data_s", "throughput/tokens_per_s", "throughput/samples_per_s", "memory/peak_bytes",
        "data/padding_fraction", "data/sample_ids",
    }  # fmt: skip
    assert expected <= set(lines[0])


def test_every_epoch_sees_every_sample_once(tiny_run: TinyRun) -> None:
    ids = [sample_id for line in metrics(tiny_run.folder) for sample_id in line["data/sample_ids"]]
    everything = {f"tiny/train/{k}:s{k}" for k in range(NUM_SAMPLES)}
    assert len(ids) == 48
    assert set(ids[:NUM_SAMPLES]) == set(ids[NUM_SAMPLES : 2 * NUM_SAMPLES]) == everything
    assert ids[:NUM_SAMPLES] != ids[NUM_SAMPLES : 2 * NUM_SAMPLES]


def test_loss_and_gradient_are_means_over_the_targets_of_the_step(make_runner: MakeRunner, tiny_run: TinyRun) -> None:
    """The first step's numbers, from the model's sums and the batches, without the loop and without the engine."""
    runner = make_runner()
    collator = build.collator(runner.model, runner.train_data)
    loader = build.train_loader(runner.config, runner.train_data, collator, runner.steps, 0, {})
    group = next(loader)
    targets = [batch.num_targets for batch in group]
    assert len(set(targets)) == 2, "a mean of means would be another number"
    first = metrics(tiny_run.folder)[0]
    assert first["train/num_targets"] == sum(targets)
    loss = sum(runner.model(batch)[0] for batch in group) / sum(targets)
    assert first["train/loss"] == pytest.approx(loss.item(), rel=1e-6)  # measured 1e-9
    loss.backward()
    norm = sum((p.grad**2).sum() for p in runner.model.parameters() if p.grad is not None) ** 0.5
    assert first["train/grad_norm"] == pytest.approx(norm.item(), rel=1e-5)  # measured 1.1e-7: sums in another order


def test_the_run_folder(tiny_run: TinyRun) -> None:
    folder = tiny_run.folder
    assert [p.name for p in complete_ones(folder / "checkpoints")] == ["step_00000003", "step_00000006"]
    assert (folder / "checkpoints" / "latest").read_text() == "step_00000006\n"
    evaluations = sorted(p.name for p in (folder / "eval").iterdir())
    assert evaluations == ["val_step_00000004.json", "val_step_00000006.json"]
    environment = json.loads((folder / "environment.json").read_text())
    assert (environment["samples"], environment["layout"]["engine"]) == ({"tiny": 22}, "torch")


def test_the_saved_configuration_is_the_runs(tiny_run: TinyRun) -> None:
    assert load(tiny_run.folder / "config.yaml").config == load(tiny_run.cfg).config
    checkpoint = tiny_run.folder / "checkpoints" / "step_00000006"
    assert load(checkpoint / "config.yaml").config == load(tiny_run.cfg).config


def test_a_checkpoint_holds_what_it_should(tiny_run: TinyRun) -> None:
    path = tiny_run.folder / "checkpoints" / "step_00000006"
    manifest = verify(path)
    assert {
        "optimizer/rank_00000_00000.safetensors",
        "weights/model.safetensors",
        "rng/rank_00000.pt",
        "train_state.json",
    } <= set(manifest["files"])
    assert manifest["layout"] == {"engine": "torch", "data_parallel_size": 1, "precision": "fp32"}
    state = TrainState()
    state.__dict__.update(json.loads((path / "train_state.json").read_text()))
    assert (state.step, state.samples_seen, state.dataset_sizes) == (6, 48, {"tiny": 22})
    assert state.targets_seen == sum(line["train/num_targets"] for line in metrics(tiny_run.folder))


@pytest.mark.usefixtures("process")
def test_stopped_and_resumed_it_is_the_same_run(tiny_run: TinyRun, tmp_path: Path) -> None:
    """Stopped inside an epoch, continued from a checkpoint that holds all: equal to the last bit."""
    common = ["--cfg", str(tiny_run.cfg), "--job-id", "a", "--options", f"run.output_dir={tmp_path}"]
    assert main(["train", *common, "run.stop_at_step=4"]) == 75
    run = tmp_path / "a"
    assert [p.name for p in complete_ones(run / "checkpoints")] == ["step_00000003", "step_00000004"]
    assert not (run / "eval" / "val_step_00000006.json").exists()
    assert learned(run) == learned(tiny_run.folder)[:4]
    assert main(["train", *common, "--resume", "auto"]) == 0
    assert learned(run) == learned(tiny_run.folder)
    name = "val_step_00000006.json"
    assert (run / "eval" / name).read_text() == (tiny_run.folder / "eval" / name).read_text()


def test_resuming_with_another_precision_is_told(tiny_run: TinyRun, tmp_path: Path, process: None, capsys: Any) -> None:
    arguments = ["train", "--cfg", str(tiny_run.cfg), "--job-id", "a", "--resume"]
    checkpoint = str(tiny_run.folder / "checkpoints" / "step_00000003")
    options = [f"run.output_dir={tmp_path}", "run.precision=bf16", "run.observers=[console]"]
    assert main([*arguments, checkpoint, "--options", *options]) == 0
    assert "another layout and goes on in this one: precision fp32 -> bf16" in capsys.readouterr().out


def test_sigterm_saves_and_stops_at_the_step_boundary(make_runner: MakeRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner("run.save_every=null")
    original = runner.task.train_step

    def train_step(forward: Any, batch: Any) -> Any:
        if runner.state.step == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(forward, batch)

    monkeypatch.setattr(runner.task, "train_step", train_step)
    assert runner.run() == 75
    # asked in the middle of step 2; the ranks agree on it at the beginning of step 3
    assert [p.name for p in complete_ones(runner.job.checkpoints)] == ["step_00000003"]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_the_end_is_not_saved_where_nobody_wants_it(make_runner: MakeRunner) -> None:
    runner = make_runner("run.save_last=false", "run.save_every=4")
    assert runner.run() == 0
    assert [p.name for p in complete_ones(runner.job.checkpoints)] == ["step_00000004"]


def test_a_stop_is_saved_in_any_case(make_runner: MakeRunner) -> None:
    runner = make_runner("run.save_last=false", "run.save_every=null", "run.stop_at_step=2")
    assert runner.run() == 75
    assert [p.name for p in complete_ones(runner.job.checkpoints)] == ["step_00000002"]


def test_evaluate_only(make_runner: MakeRunner) -> None:
    runner = make_runner("run.evaluate=true", "run.test_splits=[val]")
    before = {name: p.clone() for name, p in runner.model.named_parameters()}
    assert runner.run() == 0
    assert all(torch.equal(p, before[name]) for name, p in runner.model.named_parameters())
    assert (runner.job.folder / "eval" / "val_step_00000000.json").is_file()
    assert complete_ones(runner.job.checkpoints) == []


def test_every_epoch(make_runner: MakeRunner) -> None:
    """22 samples, 8 a step: epochs end in steps 3 and 6; `max_epoch: 2` is 44 samples, the last step is short."""
    options = ["run.max_steps=null", "run.max_epoch=2", "run.save_every=epoch", "run.keep_last=9"]
    runner = make_runner(*options, "run.eval_every=epoch", "run.valid_splits=[val]")
    assert runner.run() == 0
    assert [p.name for p in complete_ones(runner.job.checkpoints)] == ["step_00000003", "step_00000006"]
    steps = sorted(p.name for p in (runner.job.folder / "eval").iterdir())
    assert steps == ["val_step_00000003.json", "val_step_00000006.json"]
    lines = metrics(runner.job.folder)
    assert [len(line["data/sample_ids"]) for line in lines] == [8, 8, 8, 8, 8, 4]
    assert lines[-1]["epoch"] == 2.0
    shape = runner.schedule_shape
    assert [line["train/lr"] for line in lines] == [cosine(step, shape) for step in range(6)]
    assert shape.total_steps == 6


# What it refuses to learn from


BAD = "tiny/train/19:s19"
"""A sample that comes first in step 3, and again later."""


class NanLoss(Vlm):
    """The loss of one sample is NaN."""

    def forward(self, batch: Any) -> tuple[torch.Tensor, ...]:
        loss, *rest = super().forward(batch)
        return loss * float("nan") if BAD in batch.sample_ids else loss, *rest


class NanGradient(Vlm):
    """The loss is finite and its gradient, for one sample, is not: the square root's at 0 is infinite, times 0."""

    def forward(self, batch: Any) -> tuple[torch.Tensor, ...]:
        loss, *rest = super().forward(batch)
        zero = (next(self.language.parameters()).sum() * 0).abs()
        return loss + zero.sqrt() if BAD in batch.sample_ids else loss, *rest


@pytest.mark.parametrize(("model", "what"), [(NanLoss, "loss is nan"), (NanGradient, "gradient norm is inf")])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_numbers_that_are_not_finite_end_the_run_before_they_reach_the_weights(
    precision: str, model: type[Vlm], what: str, make_runner: MakeRunner, tiny_run: TinyRun, monkeypatch: Any
) -> None:
    monkeypatch.setitem(registry.models._classes, "vlm", model)
    runner = make_runner(f"run.precision={precision}")
    bad_step = next(k for k, line in enumerate(metrics(tiny_run.folder)) if BAD in line["data/sample_ids"])
    assert bad_step == 2, "the steps before it must train"
    initial = {name: p.clone() for name, p in runner.model.named_parameters()}
    weights: list[dict[str, torch.Tensor]] = []
    take = runner.schedule

    def schedule(step: int, shape: Any) -> float:
        weights.append({name: p.detach().clone() for name, p in runner.model.named_parameters()})
        return take(step, shape)

    runner.schedule = schedule
    with pytest.raises(NonFiniteError) as caught:
        runner.run()
    text = str(caught.value)
    assert f"step {bad_step + 1}, rank 0: the {what}; the weights were not changed by this step." in text
    ids = metrics(tiny_run.folder)[bad_step]["data/sample_ids"]
    assert f"Given: samples {', '.join(ids)}." in text
    assert runner.state.step == bad_step
    assert [line["step"] for line in metrics(runner.job.folder)] == list(range(1, bad_step + 1))
    final = dict(runner.model.named_parameters())
    assert any(not torch.equal(p, initial[name]) for name, p in final.items())
    assert all(p.isfinite().all() for p in final.values())
    if model is NanGradient:
        assert all(torch.equal(p, weights[bad_step][name]) for name, p in final.items())
    assert len(weights) == bad_step + (model is NanGradient)  # with a NaN loss no update is even tried


@pytest.mark.parametrize("model", [NanLoss, NanGradient])
def test_a_step_that_is_not_finite_can_be_skipped(
    model: type[Vlm], make_runner: MakeRunner, tiny_run: TinyRun, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setitem(registry.models._classes, "vlm", model)
    runner = make_runner("run.on_non_finite=skip", "run.observers=[console,jsonl]")
    assert runner.run() == 0
    bad = [k for k, line in enumerate(metrics(tiny_run.folder)) if BAD in line["data/sample_ids"]]
    assert len(bad) >= 2
    assert runner.state.steps_skipped == len(bad)
    assert all(p.isfinite().all() for p in runner.model.parameters())
    shown = capsys.readouterr().out
    ids = metrics(tiny_run.folder)[bad[0]]["data/sample_ids"]
    assert f"Step {bad[0] + 1} was skipped: its gradient is not finite. Samples {', '.join(ids)}." in shown
    lines = metrics(runner.job.folder)
    assert [k for k, line in enumerate(lines) if line["train/grad_norm"] == float("inf")] == bad
    assert [line["data/sample_ids"] for line in lines] == [line["data/sample_ids"] for line in metrics(tiny_run.folder)]


def test_a_loss_that_is_not_finite_with_a_finite_gradient_ends_the_run(
    make_runner: MakeRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    class InfiniteLoss(Vlm):
        def forward(self, batch: Any) -> tuple[torch.Tensor, ...]:
            loss, *rest = super().forward(batch)
            return loss + float("inf"), *rest

    monkeypatch.setitem(registry.models._classes, "vlm", InfiniteLoss)
    with pytest.raises(NonFiniteError, match="the loss is inf; its gradient is finite and was applied"):
        make_runner("run.on_non_finite=skip").run()


def test_too_many_skipped_steps_end_the_run(make_runner: MakeRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    class AlwaysNan(Vlm):
        def forward(self, batch: Any) -> tuple[torch.Tensor, ...]:
            loss, *rest = super().forward(batch)
            return loss * float("nan"), *rest

    monkeypatch.setitem(registry.models._classes, "vlm", AlwaysNan)
    runner = make_runner("run.on_non_finite=skip", "run.max_skipped_steps=2")
    with pytest.raises(NonFiniteError, match="step 3, rank 0: the gradient norm is inf"):
        runner.run()
    assert (runner.state.step, runner.state.steps_skipped) == (2, 3)


def test_the_command_ends_with_exit_code_1(
    tiny_run: TinyRun, tmp_path: Path, process: None, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setitem(registry.models._classes, "vlm", NanLoss)
    tree = yaml.safe_load(tiny_run.cfg.read_text())
    tree["run"] |= {"output_dir": str(tmp_path), "valid_splits": [], "test_splits": []}
    (tmp_path / "train.yaml").write_text(yaml.safe_dump(tree))
    assert main(["train", "--cfg", str(tmp_path / "train.yaml")]) == 1
    error = capsys.readouterr().err
    assert "error: step" in error
    assert BAD in error
    assert "Traceback" not in error


@pytest.fixture
def copied(tiny_run: TinyRun, tmp_path: Path) -> Path:
    """A run folder as `tiny_run` left it, with checkpoints of steps 3 and 6."""
    shutil.copytree(tiny_run.folder, tmp_path / "a")
    return tmp_path / "a"


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.usefixtures("process")
def test_a_checkpoint_with_a_flipped_bit_is_passed_over(tiny_run: TinyRun, copied: Path, capsys: Any) -> None:
    flip_a_bit(copied / "checkpoints" / "step_00000006" / "optimizer" / "rank_00000_00000.safetensors")
    options = [f"run.output_dir={copied.parent}", "run.observers=[console,jsonl]"]
    common = ["train", "--cfg", str(tiny_run.cfg), "--job-id", "a", "--resume", "auto", "--options"]
    assert main([*common, *options]) == 0
    shown = capsys.readouterr().out
    assert "passed over: " in shown
    assert "step_00000006/optimizer/rank_00000_00000.safetensors: this file no longer holds what was written" in shown
    assert "Resumed after step 3 of 6." in shown
    assert learned(copied) == learned(tiny_run.folder)
    verify(copied / "checkpoints" / "step_00000006")


@pytest.mark.usefixtures("process")
def test_a_damaged_checkpoint_that_was_named_is_refused(tiny_run: TinyRun, copied: Path, capsys: Any) -> None:
    path = copied / "checkpoints" / "step_00000006"
    flip_a_bit(path / "weights" / "model.safetensors")
    arguments = ["train", "--cfg", str(tiny_run.cfg), "--job-id", "a", "--resume", str(path)]
    assert main([*arguments, "--options", f"run.output_dir={copied.parent}"]) == 2
    shown = capsys.readouterr().err
    assert "weights/model.safetensors: a file no longer holds what was written" in shown
    assert "Resume from step_00000003." in shown


def test_the_best_step_is_saved_and_kept(make_runner: MakeRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner(
        "run.valid_splits=[val]", "run.eval_every=1", "run.save_every=null", "run.keep_last=1", "run.keep_best=val/loss"
    )
    scores = iter([3.0, 1.0, 2.0, 1.0, 4.0, 5.0])
    evaluate = train_module.evaluate
    monkeypatch.setattr(
        train_module, "evaluate", lambda *a, **k: replace(evaluate(*a, **k), metrics={"loss": next(scores)})
    )
    assert runner.run() == 0
    assert [p.name for p in complete_ones(runner.job.checkpoints)] == ["step_00000002", "step_00000006"]
    state = TrainState(**json.loads((runner.job.checkpoints / "step_00000006" / "train_state.json").read_text()))
    assert (state.best_step, state.best_value) == (2, 1.0)


def test_an_unknown_metric_for_the_best_is_named(make_runner: MakeRunner) -> None:
    runner = make_runner("run.valid_splits=[val]", "run.eval_every=1", "run.keep_best=val/acuracy")
    with pytest.raises(ConfigError, match=r"no such metric.*val/acuracy.*val/loss, val/token_accuracy"):
        runner.run()


def test_saving_by_the_clock(make_runner: MakeRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner("run.save_every=null", "run.save_every_minutes=1", "run.keep_last=9")
    now = [0.0]
    monkeypatch.setattr(train_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    report_step = runner._report_step

    def half_a_minute_later(*arguments: Any) -> None:
        now[0] += 30
        report_step(*arguments)

    monkeypatch.setattr(runner, "_report_step", half_a_minute_later)
    runner.saved_s = 0.0
    assert runner.run() == 0
    steps = [int(p.name[-2:]) for p in complete_ones(runner.job.checkpoints)]
    assert steps == [3, 6]  # at the beginning of step 3 a minute is over, at that of step 6 as well


def test_the_size_of_a_checkpoint_is_known_beforehand(tiny_run: TinyRun, make_runner: MakeRunner) -> None:
    runner = make_runner()
    files = verify(tiny_run.folder / "checkpoints" / "step_00000006")["files"]
    actual = sum(content["bytes"] for content in files.values())
    assert runner.writer._size_bytes == pytest.approx(actual, rel=0.1)
