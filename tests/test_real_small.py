"""The project with real weights: what prepare.py makes, both stages, and equality with plain transformers.

The tests marked `realweights` need the folder that prepare.py has written: LAVIS_DS_REAL_SMALL=output/real_small.
"""

from __future__ import annotations

import functools
import importlib.util
import io
import json
import math
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoImageProcessor, AutoModel, AutoModelForCausalLM

from lavis_ds.config.load import load
from lavis_ds.data.builders.emoji import Emoji
from lavis_ds.data.configs import EmojiConfig
from lavis_ds.data.conversation import Image as Picture
from lavis_ds.data.processors.open_image import open_image, to_tensor
from lavis_ds.models.configs import HFCausalLMConfig, HFVisionConfig
from lavis_ds.models.language.hf_causal_lm import HFCausalLM
from lavis_ds.models.loss import token_losses
from lavis_ds.models.vision.hf_vision import HFVision
from lavis_ds.models.weights import read_keys
from lavis_ds.runners.launch import train
from tests.multi.launch import run_ranks
from tests.tiny_project import metrics

PROJECT = Path(__file__).parents[1] / "projects" / "real_small"
ENV = "LAVIS_DS_REAL_SMALL"
WEIGHTS = Path(os.environ.get(ENV, "missing")).absolute()  # before a test changes the working directory


def needs_weights(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test that reads the weights."""
    reason = f"{ENV} names no folder that projects/real_small/prepare.py has written"
    for mark in (pytest.mark.realweights, pytest.mark.skipif(not WEIGHTS.is_dir(), reason=reason)):
        test = mark(test)
    timed: Callable[..., None] = pytest.mark.timeout(900)(test)
    return timed


# --- prepare.py -------------------------------------------------------------------------------------------------------


def prepare(*options: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(PROJECT / "prepare.py"), "--output", "made", "--only", "emoji", *options]
    return subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, timeout=60, check=False)


def load_prepare(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(PROJECT))
    spec = importlib.util.spec_from_file_location("real_small_prepare", PROJECT / "prepare.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def npm_package(path: Path, style: str, emoji: list[dict[str, Any]]) -> Path:
    """Laid out like npm's emoji-datasource-*, with sheets and skin tones that nobody asks for."""
    picture = io.BytesIO()
    Image.new("RGBA", (64, 64)).save(picture, "png")
    names = [item["image"] for item in emoji if item[f"has_img_{style}"]]
    files = {f"img/{style}/64/{name}": picture.getvalue() for name in [*names, "1f44b-1f3fb.png"]}
    files |= {"emoji.json": json.dumps(emoji).encode(), f"img/{style}/sheets/32.png": b"large"}
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(f"package/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def test_emoji_are_laid_out_as_the_builder_reads_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    emoji = [
        {"name": name, "short_name": name, "image": f"{name}.png", "category": "Food", "has_img_google": True, **has}
        for name, has in (("APPLE", {"has_img_twitter": True}), ("PEAR", {"has_img_twitter": False}))
    ]
    files = [npm_package(tmp_path / f"{style}.tgz", style, emoji) for style in ("google", "twitter")]
    folder = tmp_path / "emoji"
    folder.mkdir()
    load_prepare(monkeypatch).make_emoji(files, folder, tmp_path)

    made = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert made == {"emoji.json", "google/APPLE.png", "google/PEAR.png", "twitter/APPLE.png"}
    options = EmojiConfig(root=str(folder), styles={"train": ["google"], "unseen_style": ["twitter"]})
    (sample,) = Emoji("emoji", options).build("unseen_style")
    assert sample.turns[1].text == "apple"
    assert sample.images[0].path == str(folder / "twitter" / "APPLE.png")


def test_prepare_says_what_is_missing_or_damaged_and_leaves_nothing_behind(tmp_path: Path) -> None:
    downloaded = tmp_path / "downloaded"
    downloaded.mkdir()
    missing = prepare("--from", str(downloaded))
    assert missing.returncode == 2
    assert "emoji-datasource-google-16.0.0.tgz is missing" in missing.stderr
    assert "npm pack emoji-datasource-google@16.0.0" in missing.stderr
    (downloaded / "emoji-datasource-google-16.0.0.tgz").write_bytes(b"half of it")
    damaged = prepare("--from", str(downloaded))
    assert damaged.returncode == 2
    assert "not the published file of npm emoji-datasource-google@16.0.0" in damaged.stderr
    without_npm = prepare(PATH=str(tmp_path))
    assert without_npm.returncode == 2
    assert "npm, which fetches npm emoji-datasource-google@16.0.0, is not installed" in without_npm.stderr
    assert list((tmp_path / "made").iterdir()) == []


def test_prepare_leaves_alone_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "made" / "emoji").mkdir(parents=True)
    done = prepare("--from", str(tmp_path))
    assert (done.returncode, done.stdout) == (0, "made/emoji: is there already\n")


# --- the two configurations -------------------------------------------------------------------------------------------


def test_stage_2_continues_stage_1() -> None:
    first, second = (load(PROJECT / f"stage{stage}.yaml").config for stage in (1, 2))
    assert second.model.pretrained is not None
    run = Path(first.run.output_dir) / "stage1"
    assert Path(second.model.pretrained) == run / "checkpoints" / f"step_{first.run.max_steps:08d}"
    differing = {"pretrained", "freeze"}
    assert first.model.model_dump(exclude=differing) == second.model.model_dump(exclude=differing)
    assert first.datasets == second.datasets
    assert (first.model.freeze, second.model.freeze) == (["vision", "language"], ["vision"])


# --- with the weights -------------------------------------------------------------------------------------------------


@pytest.fixture
def output(tmp_path: Path) -> Iterator[Path]:
    """Removed afterwards: stage 2's checkpoint takes 2 GB."""
    yield tmp_path / "output"
    shutil.rmtree(tmp_path / "output")


def run_stage(stage: int, output: Path, *options: str) -> Path:
    """Train on the CPU with tiny batches; returns the run folder."""
    small = [
        f"model.vision.path={WEIGHTS}/dinov2_small",
        f"model.language.path={WEIGHTS}/smollm2_135m",
        f"datasets.emoji.root={WEIGHTS}/emoji",
        f"run.output_dir={output}",
        "run.precision=fp32",
        "run.global_batch_size=2",
        "run.num_workers=0",
        "run.test_splits=[]",
        "run.observers=[jsonl]",
    ]
    name = f"stage{stage}"
    start = functools.partial(train, str(PROJECT / f"{name}.yaml"), [*small, *options], job_id=name, resume=None)
    assert run_ranks(start, 1, timeout_s=400, join_group=False) == [0]
    return output / name


@needs_weights
def test_both_stages_train(output: Path) -> None:
    first = run_stage(1, output, "run.max_steps=2") / "checkpoints" / "step_00000002"
    second = run_stage(2, output, "run.max_steps=1", f"model.pretrained={first}") / "checkpoints" / "step_00000001"
    for stage, steps in (("stage1", 2), ("stage2", 1)):
        losses = [line["train/loss"] for line in metrics(output / stage)]
        assert len(losses) == steps
        assert all(math.isfinite(loss) and loss > 0 for loss in losses), losses
    published = {
        f"language.lm.{k}": v.float() for k, v in load_file(WEIGHTS / "smollm2_135m/model.safetensors").items()
    }
    before, after = tensors(first), tensors(second)
    assert largest_change(before, published, "language.") == 0, "frozen in stage 1"
    assert largest_change(before, after, "vision.") == 0, "frozen in both"
    # AdamW's first step moves a weight by lr = 2e-4 at most, and weight decay by 5 % of lr * |w| with |w| < 10.
    # Without stage 1's weights the projector is 1.3e-3 away: what stage 1 has changed.
    assert 1e-4 < largest_change(before, after, "projector.") < 4e-4  # measured 2.0e-4
    assert 1e-4 < largest_change(before, after, "language.") < 4e-4  # measured 2.9e-4


def largest_change(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor], prefix: str) -> float:
    """Over the tensors of `left` whose names start with `prefix`."""
    return max(float((left[name] - right[name]).abs().max()) for name in left if name.startswith(prefix))


def tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    found = {}
    for name, path in read_keys(checkpoint).items():
        with safe_open(path, framework="pt") as file:
            found[name] = file.get_tensor(name)
    return found


@needs_weights
def test_language_model_has_the_loss_of_plain_transformers() -> None:
    folder = str(WEIGHTS / "smollm2_135m")
    ours = HFCausalLM(HFCausalLMConfig(path=folder)).eval()
    factory: Any = AutoModelForCausalLM
    plain = factory.from_pretrained(folder, dtype=torch.float32).eval()
    text = "The Eiffel Tower is a wrought-iron lattice tower in Paris, France."
    ids = ours.tokenizer(text, return_tensors="pt").input_ids
    with torch.no_grad():
        hidden = ours(ours.embed(ids), torch.arange(ids.shape[1])[None])
        loss = token_losses(ours.logits(hidden[0, :-1]), ids[0, 1:]).sum() / (ids.shape[1] - 1)
        expected = plain(input_ids=ids, labels=ids).loss
    assert expected < 3, "a pretrained model expects such a sentence; random weights give ln(49152) = 10.8"
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-5)  # measured 0: the same operations


@needs_weights
def test_vision_tower_gives_the_eighth_hidden_state_of_plain_transformers() -> None:
    folder = str(WEIGHTS / "dinov2_small")
    ours = HFVision(HFVisionConfig(path=folder, image_size=112, select_layer=8)).eval()
    plain: Any = AutoModel.from_pretrained(folder).eval()
    path = sorted((WEIGHTS / "emoji" / "google").iterdir())[0]
    image = to_tensor(open_image(Picture(str(path))).resize((112, 112)))
    factory: Any = AutoImageProcessor
    pixels = factory.from_pretrained(folder, do_resize=False, do_center_crop=False)(image, return_tensors="pt")
    with torch.no_grad():
        features = ours(image[None])
        expected = plain(**pixels, output_hidden_states=True).hidden_states[8][:, 1:]
    assert features.shape == (1, 64, 384)
    torch.testing.assert_close(features, expected, rtol=0, atol=1e-4)  # measured 4e-6, of 0.1 on average
