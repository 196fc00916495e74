"""`on_non_finite: rewind` in one process: what comes back, what is left out, and when the run ends all the same."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from lavis_ds.errors import NonFiniteError
from lavis_ds.runners.checkpoint_files import complete_ones
from lavis_ds.runners.train import TrainRunner
from lavis_ds.tasks.base import StepOutput
from tests.tiny_project import metrics
from tests.unit.runners.conftest import TinyRun

MakeRunner = Callable[..., TrainRunner]
OPTIONS = ("run.on_non_finite=rewind", "run.save_every=2", "run.keep_last=9", "run.max_steps=8", "run.eval_every=null")


def poison(runner: TrainRunner, kinds: dict[int, str]) -> None:
    """The `loss` of these steps is NaN, or infinite with a finite gradient (`shift`), or the `gradient` is NaN."""
    train_step = runner.task.train_step

    def poisoned(forward: Any, batch: Any) -> StepOutput:
        output = train_step(forward, batch)
        kind = kinds.get(runner.state.step + 1)
        loss = output.loss_sum
        if kind == "loss":
            loss = loss * float("nan")
        elif kind == "shift":
            loss = loss + float("inf")
        elif kind == "gradient":
            loss = loss + (loss * 0).sqrt()
        return StepOutput(loss, output.metrics)

    runner.task.train_step = poisoned  # type: ignore[method-assign]


def saved(runner: TrainRunner, step: int, name: str = "weights/model.safetensors") -> bytes:
    return (runner.job.checkpoints / f"step_{step:08d}" / name).read_bytes()


@pytest.mark.parametrize("kind", ["loss", "gradient", "shift"])
@pytest.mark.parametrize("background", [False, True])
def test_weights_and_optimizer_go_back_and_data_go_on(
    kind: str, background: bool, make_runner: MakeRunner, tiny_run: TinyRun, capsys: Any
) -> None:
    runner = make_runner(*OPTIONS, f"run.save_in_background={background}", "run.observers=[console,jsonl]")
    poison(runner, {6: kind})
    assert runner.run() == 0
    optimizer = "optimizer/rank_00000_00000.safetensors"
    assert saved(runner, 6) == saved(runner, 4), "step 5 and 6 are left out"
    assert saved(runner, 6, optimizer) == saved(runner, 4, optimizer)
    assert saved(runner, 8) != saved(runner, 6)
    state = json.loads(saved(runner, 6, "train_state.json"))
    assert (state["step"], state["rewinds"], state["steps_skipped"]) == (6, [[6, 4]], kind != "shift")
    lines = metrics(runner.job.folder)
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert [line.get("train/rewound_to") for line in lines] == [None] * 5 + [4, None, None]
    ids = [line["data/sample_ids"] for line in lines]
    assert ids[:6] == [line["data/sample_ids"] for line in metrics(tiny_run.folder)]
    assert len({sample for step in ids for sample in step}) == 22, "the next data come"
    shown = capsys.readouterr().out
    assert "Step 6: the " in shown
    assert "weights and optimizer are those of step 4 again, and what was learned since is left out" in shown
    assert f"Samples {', '.join(ids[5])}." in shown


def test_a_run_resumed_from_before_goes_back_again(make_runner: MakeRunner, tmp_path: Path) -> None:
    """It is the same run, bit for bit, with what happened in it."""
    whole = make_runner(*OPTIONS)
    poison(whole, {5: "loss", 7: "gradient"})
    assert whole.run() == 0
    expected = [saved(whole, 8), saved(whole, 8, "train_state.json")]
    losses = [line["train/loss"] for line in metrics(whole.job.folder)][5:]
    folder = whole.job.checkpoints / "step_00000004"
    shutil.copytree(folder, tmp_path / "elsewhere" / "step_00000004")
    shutil.rmtree(whole.job.folder)
    again = make_runner(*OPTIONS, resume=str(tmp_path / "elsewhere" / "step_00000004"))
    poison(again, {5: "loss", 7: "gradient"})
    assert again.run() == 0
    assert [saved(again, 8), saved(again, 8, "train_state.json")] == expected
    assert [line["train/loss"] for line in metrics(again.job.folder)][1:] == losses
    assert json.loads(expected[1])["rewinds"] == [[5, 4], [7, 6]]


def test_a_damaged_checkpoint_is_not_gone_back_to(make_runner: MakeRunner) -> None:
    runner = make_runner(*OPTIONS)
    poison(runner, {5: "loss"})
    train_step, path = runner.task.train_step, runner.job.checkpoints / "step_00000004" / "weights/model.safetensors"

    def damage_first(forward: Any, batch: Any) -> StepOutput:
        if runner.state.step == 4 and path.read_bytes()[-1:] != b"x":
            path.write_bytes(path.read_bytes()[:-1] + b"x")
        return train_step(forward, batch)

    runner.task.train_step = damage_first  # type: ignore[method-assign]
    assert runner.run() == 0
    assert runner.state.rewinds == [[5, 2]]


def test_too_often_ends_the_run(make_runner: MakeRunner) -> None:
    runner = make_runner(*OPTIONS, "run.max_rewinds=2")
    poison(runner, {3: "loss", 4: "gradient", 5: "loss"})
    with pytest.raises(NonFiniteError, match=r"step 5, rank 0: the loss is nan; the run has gone back 2 times already"):
        runner.run()
    assert runner.state.rewinds == [[3, 2], [4, 2]]
    assert [path.name for path in complete_ones(runner.job.checkpoints)] == ["step_00000002", "step_00000004"]
    weights = load_file(runner.job.checkpoints / "step_00000004" / "weights" / "model.safetensors")
    assert all(tensor.isfinite().all() for tensor in weights.values())


def test_without_a_checkpoint_it_ends_the_run(make_runner: MakeRunner) -> None:
    runner = make_runner(*OPTIONS)
    poison(runner, {2: "loss"})
    with pytest.raises(NonFiniteError, match=r"step 2, rank 0: .* no whole checkpoint to go back to yet \(run.save"):
        runner.run()


def test_checkpoints_without_frozen_weights_will_do(make_runner: MakeRunner, tiny_run: TinyRun) -> None:
    start = tiny_run.folder / "checkpoints" / "step_00000003"
    options = (f"model.pretrained={start}", "model.freeze=[language]", "run.save_trainable_only=true")
    runner = make_runner(*OPTIONS, *options)
    poison(runner, {5: "loss"})
    assert runner.run() == 0
    assert runner.state.rewinds == [[5, 4]]
    assert (runner.job.checkpoints / "step_00000004" / "weights" / "frozen.json").exists()
    before = load_file(start / "weights" / "model.safetensors")
    name = "language.lm.model.norm.weight"
    assert runner.model.state_dict()[name].equal(before[name])
