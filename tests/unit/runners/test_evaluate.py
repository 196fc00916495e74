"""Evaluation: what is written, and that a checkpoint scores as the run itself did."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lavis_ds import registry
from lavis_ds.cli import main
from lavis_ds.runners.evaluate import Evaluation, evaluation_mode
from lavis_ds.tasks.base import EvalOutput
from lavis_ds.tasks.instruct import InstructTask
from tests.unit.runners.conftest import TinyRun

Capture = pytest.CaptureFixture[str]


def test_scores_and_predictions_are_written(tmp_path: Path) -> None:
    predictions = [{"id": "a", "prediction": "été"}, {"id": "b", "prediction": "no\nline"}]
    path = Evaluation("val", 12, 2, {"accuracy": 0.5}, predictions).write(tmp_path / "eval")
    assert path == tmp_path / "eval" / "val_step_00000012.json"
    assert json.loads(path.read_text()) == {
        "split": "val", "step": 12, "num_samples": 2, "metrics": {"accuracy": 0.5},
    }  # fmt: skip
    lines = path.with_suffix(".jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == predictions
    assert "été" in lines[0]


def test_without_predictions_there_is_no_file_of_them(tmp_path: Path) -> None:
    path = Evaluation("val", 12, 5, {"loss": 0.5}, []).write(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    assert json.loads(path.read_text())["num_samples"] == 5


@pytest.mark.parametrize("training", [True, False])
def test_evaluation_mode_comes_and_goes(training: bool) -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Dropout()).train(training)
    with contextlib.suppress(ValueError), evaluation_mode(module):
        assert not module[1].training
        assert not module(torch.ones(1, 2)).requires_grad
        raise ValueError
    assert module[1].training is training
    assert torch.is_grad_enabled()


@pytest.fixture
def copied(tiny_run: TinyRun, tmp_path: Path) -> Path:
    """The run folder, to be changed."""
    return Path(shutil.copytree(tiny_run.folder, tmp_path / "copied"))


def scores(run: Path, step: int = 6) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((run / "eval" / f"val_step_{step:08d}.json").read_text())
    return content


@pytest.mark.usefixtures("process")
def test_a_checkpoint_scores_as_the_run_did(copied: Path, capsys: Capture) -> None:
    before = scores(copied)
    assert before["num_samples"] == 5
    shutil.rmtree(copied / "eval")
    assert main(["evaluate", "--checkpoint", str(copied)]) == 0
    assert scores(copied) == before  # to the last bit: the same operations on the same numbers
    loss = before["metrics"]["loss"]
    assert f"val: loss {loss:.4f}, token_accuracy" in capsys.readouterr().out


@pytest.mark.usefixtures("process")
def test_another_checkpoint_scores_otherwise(copied: Path) -> None:
    assert main(["evaluate", "--checkpoint", str(copied / "checkpoints" / "step_00000003")]) == 0
    assert scores(copied, step=3)["metrics"] != scores(copied)["metrics"]


@pytest.mark.usefixtures("process")
def test_options_and_splits(copied: Path) -> None:
    """Another batch size gives the same means; training data are scored without augmentation."""
    before = scores(copied)["metrics"]
    assert main(["evaluate", "--checkpoint", str(copied), "--options", "run.batch_size_eval=1"]) == 0
    assert scores(copied)["metrics"] == pytest.approx(before, rel=1e-6)  # measured 5e-9: other padding
    assert main(["evaluate", "--checkpoint", str(copied), "--split", "train"]) == 0
    assert json.loads((copied / "eval" / "train_step_00000006.json").read_text())["num_samples"] == 22


@pytest.mark.usefixtures("process")
def test_batch_sizes_of_training_do_not_matter(copied: Path) -> None:
    """A run of 8 ranks is evaluated on one."""
    before = scores(copied)
    options = ["run.global_batch_size=8", "run.batch_size_train=3"]
    assert main(["evaluate", "--checkpoint", str(copied), "--options", *options]) == 0
    assert scores(copied) == before


@pytest.mark.usefixtures("process")
def test_a_damaged_newest_checkpoint_is_passed_over_and_named(copied: Path, capsys: Capture) -> None:
    os.truncate(copied / "checkpoints" / "step_00000006" / "weights" / "model.safetensors", 100)
    assert main(["evaluate", "--checkpoint", str(copied)]) == 0
    assert (copied / "eval" / "val_step_00000003.json").is_file()
    assert "passed over: " in (error := capsys.readouterr().err)
    assert "step_00000006/weights/model.safetensors: a file has changed" in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--split", "vla"], "no dataset has a split 'vla'"),
        (["--options", "run.test_splits=[]"], "no split to evaluate is named"),
    ],
)
def test_refusals(arguments: list[str], message: str, copied: Path, capsys: Capture) -> None:
    assert main(["evaluate", "--checkpoint", str(copied), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_no_checkpoint(tmp_path: Path, capsys: Capture) -> None:
    assert main(["evaluate", "--checkpoint", str(tmp_path / "absent")]) == 2
    assert "no such checkpoint folder" in capsys.readouterr().err


@pytest.mark.usefixtures("process")
def test_predictions_and_baselines_reach_the_file(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Talkative(InstructTask):
        compares_with_training = True  # type: ignore[assignment]

        def eval_step(self, model: Any, batch: Any, context: Any) -> EvalOutput:
            assert not torch.is_grad_enabled()
            records = tuple({"id": sample_id} for sample_id in batch.sample_ids)
            return EvalOutput({"seen": (float(batch.num_samples), 1)}, records)

        def baselines(self, training: Any, evaluated: Any) -> dict[str, float]:
            return {"baseline/sizes": len(list(training)) + len(list(evaluated)) / 100}

    monkeypatch.setitem(registry.tasks._classes, "instruct", Talkative)
    assert main(["evaluate", "--checkpoint", str(copied), "--options", "run.batch_size_eval=2"]) == 0
    # 5 samples in 3 batches; a filler completes the last one
    assert scores(copied)["metrics"] == {"seen": pytest.approx(5 / 3), "baseline/sizes": 22.05}
    lines = (copied / "eval" / "val_step_00000006.jsonl").read_text().splitlines()
    assert [json.loads(line)["id"] for line in lines] == [f"tiny/val/{k}:s{k}" for k in range(5)]
