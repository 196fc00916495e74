"""SigLIP 2 with NaFlex through the whole house: pictures and frames of many sizes, positions that simply count."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image

from tests.tiny_project import make_project
from tests.unit.runners.test_data_modes import lasting, lines, train

SIZES = [(40, 40), (90, 30), (33, 130), (64, 64), (200, 150)]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny project with pictures of many sizes, and a dataset of folders of frames."""
    folder = tmp_path_factory.mktemp("naflex")
    cfg = make_project(folder, max_steps=6, save_every=3, global_batch_size=4, batch_size_train=2, test_splits=["val"])
    rng = np.random.default_rng(0)
    for number, path in enumerate(sorted((folder / "images").glob("*.png"))):
        width, height = SIZES[number % len(SIZES)]
        Image.fromarray(rng.integers(0, 255, (height, width, 3), dtype=np.uint8)).save(path)
    items = []
    for number in range(4):
        (folder / f"clip{number}").mkdir()
        for frame in range(3):
            pixels = rng.integers(0, 255, (40 + 20 * number, 70, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / f"clip{number}" / f"{frame}.png")
        talk = [{"from": "human", "value": "<video> what is there"}, {"from": "gpt", "value": "red square"}]
        items.append({"id": str(number), "video": f"clip{number}", "conversations": talk})
    (folder / "clips.json").write_text(json.dumps(items))
    tree: dict[str, Any] = yaml.safe_load(cfg.read_text())
    tree["model"] |= {"arch": "llava_qwen", "max_txt_len": 512, "projector": {"name": "mlp", "merge_size": 2}}
    tree["model"]["vision"] = {
        "name": "siglip2_naflex",
        "config": {
            "model_type": "siglip2_vision_model",
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "patch_size": 16,
            "num_patches": 16,
        },
    }
    native = {"name": "image_native", "patch_size": 16, "min_pixels": 1024, "max_pixels": 16384}
    clips = {"builder": "llava_json", "annotations": {"train": str(folder / "clips.json")}, "image_root": str(folder)}
    tree["datasets"]["tiny"]["vis_processor"] = native
    tree["datasets"]["clips"] = {**clips, "vis_processor": native, "text_processor": {"name": "chat"}}
    cfg.write_text(yaml.safe_dump(tree))
    return cfg


@pytest.mark.parametrize("mode", ["padded", "packed"])
def test_it_trains_stops_and_goes_on(project: Path, mode: str) -> None:
    options = [f"data.batching={mode}"]
    assert train(project, mode, *options) == 0
    whole = lines(project, mode)
    assert whole[-1]["train/loss"] < whole[0]["train/loss"]
    assert train(project, f"{mode}_2", *options, "run.stop_at_step=3", "run.num_workers=2") == 75
    assert train(project, f"{mode}_2", *options, resume="auto") == 0
    assert lasting(project, f"{mode}_2") == lasting(project, mode)


def test_independent_questions_share_a_picture(project: Path) -> None:
    """Which models with positions in time, height and width can't."""
    tree = yaml.safe_load(project.read_text())
    tree["datasets"]["tiny"]["text_processor"] = {"name": "chat", "turns": "independent"}
    cfg = project.with_name("independent.yaml")
    cfg.write_text(yaml.safe_dump(tree))
    assert train(cfg, "independent", "run.max_steps=1", "data.max_bad_fraction=0.5") == 0


def test_another_merge_size_is_refused(project: Path, capsys: Any) -> None:
    tree = yaml.safe_load(project.read_text())
    tree["datasets"]["tiny"]["vis_processor"]["merge_size"] = 1
    cfg = project.with_name("merge.yaml")
    cfg.write_text(yaml.safe_dump(tree))
    assert train(cfg, "merge") == 2
    assert "vis_processor.merge_size: the image processor" in capsys.readouterr().err
