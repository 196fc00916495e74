"""Qwen-VL through the whole house: pictures at their own sizes, positions in three directions, padded and packed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image

from lavis_ds.data.order import SampleKey
from lavis_ds.data.tokenizer import train_tokenizer
from lavis_ds.runners.data_tools import reading
from lavis_ds.runners.data_tools.encoded import encode
from lavis_ds.runners.data_tools.samples import look
from tests.tiny_project import WORDS, make_project
from tests.unit.runners.test_data_modes import lasting, lines, train

SIZES = [(40, 40), (90, 30), (33, 130), (64, 64), (200, 150)]


@pytest.fixture(scope="module", params=["qwen3_vl", "qwen2_5_vl"])
def project(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = {"max_steps": 6, "save_every": 3, "global_batch_size": 4, "batch_size_train": 2, "test_splits": ["val"]}
    return make_qwen_vl(tmp_path_factory.mktemp(request.param), request.param, **run)


def make_qwen_vl(folder: Path, arch: str, **run: Any) -> Path:
    """The tiny project with pictures of many sizes and a tiny Qwen-VL."""
    cfg = make_project(folder, **run)
    tokenizer: Any = train_tokenizer([" ".join(WORDS)], vocab_size=320)
    tokenizer.add_special_tokens({"extra_special_tokens": [f"<|{n}|>" for n in MARKS]})
    tokenizer.save_pretrained(folder / "tokenizer")
    rng = np.random.default_rng(0)
    for number, path in enumerate(sorted((folder / "images").glob("*.png"))):
        width, height = SIZES[number % len(SIZES)]
        Image.fromarray(rng.integers(0, 255, (height, width, 3), dtype=np.uint8)).save(path)
    tree = yaml.safe_load(cfg.read_text())
    patch = 16 if arch == "qwen3_vl" else 14
    tree["model"] = {"arch": arch, "model_type": "tiny", "max_txt_len": 256}
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


@pytest.fixture(scope="module")
def with_videos(project: Path) -> Path:
    return add_videos(project)


def add_videos(project: Path) -> Path:
    """The project, and a dataset of folders of three to five frames."""
    folder, rng = project.parent, np.random.default_rng(1)
    items = []
    for number in range(6):
        (folder / f"clip{number}").mkdir()
        for frame in range(3 + number % 3):
            pixels = rng.integers(0, 255, (56 + 20 * number, 70, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / f"clip{number}" / f"{frame}.png")
        talk = [{"from": "human", "value": "<video> what is there"}, {"from": "gpt", "value": "red square"}]
        items.append({"id": f"v{number}", "video": f"clip{number}", "conversations": talk})
    (folder / "clips.json").write_text(json.dumps(items))
    tree = yaml.safe_load(project.read_text())
    tree["datasets"]["clips"] = {
        "builder": "llava_json",
        "annotations": {"train": str(folder / "clips.json")},
        "image_root": str(folder),
        "video": {"fps": 1},
        "vis_processor": {
            **tree["datasets"]["tiny"]["vis_processor"],
            "video_min_pixels": 1,
            "video_max_pixels": 40_000,
        },
    }
    cfg = folder / "videos.yaml"
    cfg.write_text(yaml.safe_dump(tree))
    return cfg


@pytest.mark.parametrize("mode", ["padded", "packed"])
def test_videos_train_beside_pictures_and_text(with_videos: Path, mode: str) -> None:
    options = [f"data.batching={mode}", "data.max_bad_fraction=0"]
    assert train(with_videos, f"videos_{mode}", *options) == 0
    whole = lines(with_videos, f"videos_{mode}")
    assert sum(line["data/samples/clips"] for line in whole) >= 2
    assert sum(line["data/samples/tiny"] for line in whole) >= 2
    assert whole[-1]["train/loss"] < whole[0]["train/loss"]


def test_a_video_is_looked_at_frame_by_frame(with_videos: Path) -> None:
    found = reading.read(reading.load_config(str(with_videos), []), None, "clips")
    encoded = encode(found, as_training=found.is_training)
    number = [source.name for source in encoded.data.sources].index("clips")
    seen = look(encoded, SampleKey(number, 2, 0, 0))  # five frames: three steps of two
    assert seen.error is None
    (picture,) = seen.pictures
    assert picture.image.path.endswith("0.png")
    assert picture.size == (70, 96)
    assert picture.views.shape[:2] == (6, 3)
    assert seen.sample is not None
    places = sum(stretch.num_tokens for stretch in seen.stretches if stretch.picture == 0)
    assert places == picture.num_tokens == len(seen.sample.image_index)
