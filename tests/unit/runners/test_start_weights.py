"""`model.pretrained` and `model.finetuned` of a run: what it says of them; its checkpoints need them no more."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lavis_ds.cli import main
from lavis_ds.runners.generate import generate
from tests.unit.runners.conftest import TinyRun, alone

Capture = pytest.CaptureFixture[str]


def train(run: TinyRun, output: Path, *options: str) -> Path:
    """One step of the tiny project; returns the run folder."""
    fixed = [f"run.output_dir={output}", "run.max_steps=1", "run.observers=[console]", "run.log_every=1"]
    skipped = ["run.valid_splits=[]", "run.test_splits=[]", "run.save_every=null", "run.eval_every=null"]
    with alone():
        assert main(["train", "--cfg", str(run.cfg), "--job-id", "next", "--options", *fixed, *skipped, *options]) == 0
    return output / "next"


def test_random_weights_are_said_at_the_start(tiny_run: TinyRun, tmp_path: Path, capsys: Capture) -> None:
    train(tiny_run, tmp_path)
    text = " ".join(capsys.readouterr().out.split())
    assert "RANDOM WEIGHTS: language, projector, vision" in text


def test_both_sources_and_a_checkpoint_that_needs_neither(tiny_run: TinyRun, tmp_path: Path, capsys: Capture) -> None:
    first = tiny_run.folder / "checkpoints" / "step_00000006"
    file = tmp_path / "projector.safetensors"
    bias = {"projector.layers.0.bias": torch.full((32,), 7.0)}
    save_file(bias, file)
    folder = train(tiny_run, tmp_path, f"model.pretrained={first}", f"model.finetuned={file}", "run.init_lr=1e-9")
    text = " ".join(capsys.readouterr().out.split())
    assert "RANDOM WEIGHTS" not in text
    assert "model.finetuned: 1 tensors of" in text
    before, after = (
        load_file(step / "weights" / "model.safetensors") for step in (first, folder / "checkpoints" / "step_00000001")
    )
    for name, tensor in after.items():
        torch.testing.assert_close(tensor, bias.get(name, before[name]), atol=1e-6, rtol=1e-6)
    file.unlink()
    generate(str(folder), "what color", [], max_new_tokens=2, temperature=0.0)
    with alone():
        assert main(["evaluate", "--checkpoint", str(folder), "--split", "val"]) == 0


@pytest.mark.parametrize("key", ["pretrained", "finetuned"])
def test_a_path_that_is_not_there(tiny_run: TinyRun, tmp_path: Path, key: str, capsys: Capture) -> None:
    path = tmp_path / "absent.pth"
    assert main(["train", "--cfg", str(tiny_run.cfg), "--options", f"model.{key}={path}"]) == 2
    assert f"model.{key}: there is no such file or folder. Given: {path}" in capsys.readouterr().err
