"""Qwen-VL through the whole house: pictures at their own sizes, positions in three directions, padded and packed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image

from lavis_ds.data.tokenizer import train_tokenizer
from tests.tiny_project import WORDS, make_project
from tests.unit.runners.test_data_modes import lasting, lines, train

SIZES = [(40, 40), (90, 30), (33, 130), (64, 64), (200, 150)]


@pytest.fixture(scope="module", params=["qwen3_vl", "qwen2_5_vl"])
def project(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny project with pictures of many sizes and a tiny Qwen-VL."""
    folder = tmp_path_factory.mktemp(request.param)
    cfg = make_project(folder, max_steps=6, save_every=3, global_batch_size=4, batch_size_train=2, test_splits=["val"])
    tokenizer: Any = train_tokenizer([" ".join(WORDS)], vocab_size=320)
    tokenizer.add_special_tokens({"extra_special_tokens": [f"<|{n}|>" for n in MARKS]})
    tokenizer.save_pretrained(folder / "tokenizer")
    rng = np.random.default_rng(0)
    for number, path in enumerate(sorted((folder / "images").glob("*.png"))):
        width, height = SIZES[number % len(SIZES)]
        Image.fromarray(rng.integers(0, 255, (height, width, 3), dtype=np.uint8)).save(path)
    tree = yaml.safe_load(cfg.read_text())
    patch = 16 if request.param == "qwen3_vl" else 14
    tree["model"] = {"arch": request.param, "model_type": "tiny", "max_txt_len": 256}
    tree["model"]["language"] = {"tokenizer": str(folder / "tokenizer")}
    native = {"name": "image_native", "patch_size": patch, "min_pixels": 1024, "max_pixels": 16384}
    tree["datasets"]["tiny"]["vis_processor"] = native
    cfg.write_text(yaml.safe_dump(tree))
    return cfg


MARKS = ["vision_start", "vision_end", "image_pad", "video_pad"]


@pytest.mark.parametrize("mode", ["padded", "packed"])
def test_it_trains_stops_and_goes_on(project: Path, mode: str) -> None:
    options = [f"data.batching={mode}"]
    assert train(project, mode, *options) == 0
    whole = lines(project, mode)
    assert whole[-1]["train/loss"] < whole[0]["train/loss"]
    assert train(project, f"{mode}_2", *options, "run.stop_at_step=3", "run.num_workers=2") == 75
    assert train(project, f"{mode}_2", *options, resume="auto") == 0
    assert lasting(project, f"{mode}_2") == lasting(project, mode)


def test_a_processor_of_fixed_size_is_refused(project: Path, capsys: Any) -> None:
    tree = yaml.safe_load(project.read_text())
    tree["datasets"]["tiny"]["vis_processor"] = {"name": "image_eval", "image_size": 32}
    wrong = project.with_name("fixed.yaml")
    wrong.write_text(yaml.safe_dump(tree))
    assert train(wrong, "fixed") == 2
    assert "image_native" in capsys.readouterr().err
