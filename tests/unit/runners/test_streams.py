"""Runs over shards without an index."""

from __future__ import annotations

import io
import tarfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image

from tests.tiny_project import make_project, metrics
from tests.unit.runners.test_data_modes import lasting, train

NUM_SAMPLES = 23


def write_shards(folder: Path) -> None:
    """Three shards of 11, 8 and 4 captioned pictures, the 5th of which is no picture."""
    rng = np.random.default_rng(0)
    number = 0
    for shard, size in enumerate((11, 8, 4)):
        with tarfile.open(folder / f"{shard}.tar", "w") as tar:
            for _ in range(size):
                picture = io.BytesIO()
                Image.fromarray(rng.integers(0, 255, (40, 40, 3), dtype=np.uint8)).save(picture, "PNG")
                content = {"png": picture.getvalue() if number != 4 else b"nothing", "txt": f"a {number}".encode()}
                for ext, data in content.items():
                    info = tarfile.TarInfo(f"{number:03d}.{ext}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
                number += 1


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stream")
    cfg = make_project(folder, global_batch_size=4, batch_size_train=2, max_steps=12, save_every=3)
    write_shards(folder)
    tree = yaml.safe_load(cfg.read_text())
    tree["datasets"] = {
        "pictures": {
            "builder": "webdataset",
            "annotations": {"train": str(folder / "{0..1}.tar") + ""},
            "stream": True,
            "shuffle_buffer": 5,
            "vis_processor": {"train": {"name": "image_train", "image_size": 32}},
        }
    }
    tree["datasets"]["pictures"]["annotations"]["train"] = [str(folder / "{0..1}.tar"), f"pipe:cat {folder / '2.tar'}"]
    cfg.write_text(yaml.safe_dump(tree))
    return cfg


@pytest.mark.parametrize("num_workers", [0, 2])
def test_every_epoch_sees_every_sample_once_and_a_resumed_run_those_that_were_left(
    project: Path, num_workers: int
) -> None:
    workers, job = f"run.num_workers={num_workers}", f"w{num_workers}"
    assert train(project, job, workers) == 0
    ids = [i for line in metrics(project.parent / "output" / job) for i in line["data/sample_ids"]]
    assert set(Counter(ids).values()) <= ({2, 3} if num_workers == 0 else {1, 2, 3})  # 48 places for 23 samples
    assert len(set(ids)) == NUM_SAMPLES - 1
    if num_workers == 0:
        assert len(set(ids[: NUM_SAMPLES - 1])) == NUM_SAMPLES - 1
        assert ids[: NUM_SAMPLES - 1] != ids[NUM_SAMPLES - 1 : 2 * NUM_SAMPLES - 2]
    for stop in (4, 7):  # once between checkpoints, and in the second epoch
        assert train(project, f"{job}_again", workers, f"run.stop_at_step={stop}", resume="auto") == 75
    assert train(project, f"{job}_again", workers, resume="auto") == 0
    assert lasting(project, f"{job}_again") == lasting(project, job)


def test_what_can_not_be_used_is_left_out(project: Path) -> None:
    assert train(project, "bad") == 0
    text = (project.parent / "output/bad/quarantine.jsonl").read_text()
    assert text.count("\n") == 1
    assert "004" in text


def test_another_number_of_workers_is_refused(project: Path, capsys: Any) -> None:
    assert train(project, "workers", "run.stop_at_step=2") == 75
    assert train(project, "workers", "run.num_workers=2", resume="auto") == 2
    assert "num_workers=2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "named"),
    [
        ("run.valid_splits=train", None),
        ("run.save_every=epoch", "`epoch` in run.save_every"),
        ("data.batching=packed", "data.batching: packed"),
        ("datasets.pictures.repeat=2", "repeat"),
    ],
)
def test_what_needs_a_length_or_an_index_is_refused(project: Path, option: str, named: str | None, capsys: Any) -> None:
    assert train(project, "refused", option) == 2
    error = capsys.readouterr().err
    assert "neither length nor index" in error
    assert named is None or named in error


def test_more_workers_than_samples_is_a_clear_error(project: Path, capsys: Any) -> None:
    one = f"datasets.pictures.annotations.train={project.parent / '2.tar'}"
    assert train(project, "many", one, "run.num_workers=5") == 2
    assert "gets no samples" in capsys.readouterr().err
