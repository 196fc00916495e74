"""Projects to look at, and the commands in this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image

from lavis_ds.cli import main
from lavis_ds.runners.data_tools import reading
from lavis_ds.runners.data_tools.encoded import Encoded, encode
from tests.tiny_project import make_project
from tests.unit.runners.conftest import alone

Command = Callable[..., str]


@pytest.fixture(scope="package")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny project with two datasets, one epoch of steps of 4 rows."""
    settings: dict[str, Any] = {"max_epoch": 1, "max_steps": None, "global_batch_size": 4, "batch_size_train": 2}
    return make_project(
        tmp_path_factory.mktemp("looked_at"), num_datasets=2, data={"plan_window": 12}, valid_splits=["val"], **settings
    )


@pytest.fixture
def talk(tmp_path: Path) -> Path:
    """A project of one dataset of chat messages: weights, tiles, frames, a missing picture, one too long."""
    cfg = make_project(tmp_path / "talk")
    folder = cfg.parent
    (folder / "clip").mkdir()
    for number in range(4):
        Image.new("RGB", (32, 24), (60 * number, 0, 0)).save(folder / "clip" / f"{number}.png")
    Image.new("RGB", (80, 40), "red").save(folder / "wide.png")
    items = [
        [("user", [picture("wide.png"), said("what\x1b[31m <b>is</b> <|im_end|> [this]")]),
         ("assistant", "red 红", 0.5),
         ("user", "<script>alert(1)</script>"), ("assistant", "a é 😀")],
        [("user", [{"type": "video", "video": "clip"}, said("what")]), ("assistant", "over")],
        [("user", [picture("absent.png"), said("what")]), ("assistant", "no")],
        [("user", "what " * 300), ("assistant", "no")],
    ]  # fmt: skip
    lines = [json.dumps({"messages": [message(*turn) for turn in turns]}) for turns in items]
    (folder / "talk.jsonl").write_text("\n".join(lines))
    tree = yaml.safe_load(cfg.read_text())
    tree["datasets"] = {
        "talk": {
            "builder": "messages",
            "annotations": {"train": str(folder / "talk.jsonl")},
            "image_root": str(folder),
            "video": {"num_frames": 2},
            "vis_processor": {"name": "image_anyres", "image_size": 32, "grids": [[1, 1], [2, 1]]},
        }
    }
    cfg.write_text(yaml.safe_dump(tree))
    return cfg


def picture(name: str) -> dict[str, str]:
    return {"type": "image", "image": name}


def said(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def message(role: str, content: Any, weight: float | None = None) -> dict[str, Any]:
    return {"role": role, "content": content} | ({} if weight is None else {"weight": weight})


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """`lavis-ds data ...`: what it prints; on standard error where it fails, with exit code 2."""

    def run(*arguments: object, code: int = 0) -> str:
        with alone():
            assert main(["data", *map(str, arguments)]) == code
        printed = capsys.readouterr()
        if code:
            assert printed.out == ""
            assert printed.err.startswith("\nerror: ")
        return printed.err if code else printed.out

    return run


@pytest.fixture
def encoded() -> Callable[..., Encoded]:
    def make(cfg: Path, *options: str, split: str | None = None, dataset: str | None = None) -> Encoded:
        found = reading.read(reading.load_config(str(cfg), list(options)), split, dataset)
        return encode(found, as_training=found.is_training)

    return make
