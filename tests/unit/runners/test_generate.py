"""`lavis-ds generate` on a trained run."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lavis_ds.cli import main
from lavis_ds.models.vlm import Vlm
from lavis_ds.runners.generate import generate
from tests.unit.runners.conftest import TinyRun

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Vlm, Any, dict[str, Any], torch.Tensor]]:
    """Model, batch, options and result of every call of the model's `generate`."""
    calls: list[tuple[Vlm, Any, dict[str, Any], torch.Tensor]] = []
    original = Vlm.generate

    def spy(self: Vlm, batch: Any, **options: Any) -> torch.Tensor:
        assert not self.training
        ids = original(self, batch, **options)
        calls.append((self, batch, options, ids))
        return ids

    monkeypatch.setattr(Vlm, "generate", spy)
    return calls


def ask(run: Path, *images: Path, prompt: str = "what color", temperature: float = 0.0) -> str:
    return generate(str(run), prompt, [str(p) for p in images], max_new_tokens=5, temperature=temperature)


def test_it_is_the_checkpoints_model_that_answers(tiny_run: TinyRun, seen: list[Any]) -> None:
    picture = tiny_run.cfg.parent / "images" / "0_0.png"
    answer = ask(tiny_run.folder, picture)
    model, batch, options, ids = seen[0]
    saved = load_file(tiny_run.folder / "checkpoints" / "step_00000006" / "weights" / "model.safetensors")
    assert saved.keys() == dict(model.named_parameters()).keys()
    assert all(torch.equal(saved[name], value) for name, value in model.named_parameters())
    assert (options["max_new_tokens"], options["do_sample"]) == (5, False)
    assert ids.shape[1] <= 5
    tokenizer = model.tokenizer
    assert answer == tokenizer.decode(ids[0], skip_special_tokens=True).strip()
    text = tokenizer.decode(batch.input_ids[0])
    assert "what color<|im_end|>\n<|im_start|>assistant\n" in text
    assert text.endswith("assistant\n"), "the answer goes on right after the prompt"
    assert batch.input_ids.shape[0] == 1, "one question, whatever run.batch_size_eval is"
    assert len(batch.image_index) == model.tokens_per_image
    assert batch.images.shape == (1, 3, 32, 32)


def test_pictures_reach_the_model_in_order(tiny_run: TinyRun, seen: list[Any]) -> None:
    images = tiny_run.cfg.parent / "images"
    ask(tiny_run.folder, images / "0_0.png", images / "2_0.png")
    ask(tiny_run.folder, images / "2_0.png", images / "0_0.png")
    first, second = seen[0][1].images, seen[1][1].images
    assert torch.equal(first, second.flip(0))
    assert not torch.equal(first, second)


def test_text_alone(tiny_run: TinyRun, seen: list[Any]) -> None:
    ask(tiny_run.folder)
    assert len(seen[0][1].image_index) == 0


def test_temperature_samples(tiny_run: TinyRun, seen: list[Any]) -> None:
    ask(tiny_run.folder, temperature=0.7)
    assert (seen[0][2]["do_sample"], seen[0][2]["temperature"]) == (True, 0.7)


def test_the_command_prints_the_answer(tiny_run: TinyRun, capsys: Capture) -> None:
    answer = ask(tiny_run.folder)
    arguments = ["generate", "--checkpoint", str(tiny_run.folder), "--prompt", "what color", "--max-new-tokens", "5"]
    assert main(arguments) == 0
    assert capsys.readouterr().out == f"{answer}\n"


def test_a_folder_with_odd_characters_and_a_damaged_newest_checkpoint(
    tiny_run: TinyRun, tmp_path: Path, seen: list[Any], capsys: Capture
) -> None:
    run = Path(shutil.copytree(tiny_run.folder, tmp_path / "a: b #1, {x}=${y}"))
    os.truncate(run / "checkpoints" / "step_00000006" / "weights" / "model.safetensors", 100)
    ask(run)
    assert seen[0][0].config.pretrained == str(run / "checkpoints" / "step_00000003")
    assert "step_00000006/weights/model.safetensors" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--image", "absent.png"], "no such picture. Given: absent.png"),
        (["--checkpoint", "absent"], "no such checkpoint"),
    ],
)
def test_refusals(arguments: list[str], message: str, tiny_run: TinyRun, capsys: Capture) -> None:
    assert main(["generate", "--checkpoint", str(tiny_run.folder), "--prompt", "x", *arguments]) == 2
    assert message in capsys.readouterr().err
