from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lavis_ds.errors import CheckpointError
from lavis_ds.models.conversion.source import open_weights

WEIGHTS = {"a.weight": torch.arange(6.0).view(2, 3), "a.scale": torch.tensor(2.0)}


class Runner:
    """What no file of weights needs."""


@pytest.mark.parametrize("key", ["model", "module", "state_dict", None])
@pytest.mark.parametrize("zipped", [True, False])
def test_tensors_by_name(tmp_path: Path, key: str | None, zipped: bool) -> None:
    content: dict[str, Any] = dict(WEIGHTS) if key is None else {key: WEIGHTS, "epoch": 3, "optimizer": {"lr": 0.1}}
    torch.save(content, tmp_path / "x.pth", _use_new_zipfile_serialization=zipped)
    stored = open_weights(tmp_path / "x.pth")
    assert {name: tensor.shape for name, tensor in stored.items()} == {"a.weight": (2, 3), "a.scale": ()}
    assert all(torch.equal(stored[name].read(), tensor) for name, tensor in WEIGHTS.items())
    assert [part.read().tolist() for part in stored["a.weight"].split(2)] == [[[0, 1, 2]], [[3, 4, 5]]]


def test_a_file_is_mapped_not_read(tmp_path: Path) -> None:
    sevens = torch.full((1000,), 7.0)
    torch.save({"model": {"big": sevens}}, tmp_path / "x.pth")
    stored = open_weights(tmp_path / "x.pth")
    data = (tmp_path / "x.pth").read_bytes()
    with (tmp_path / "x.pth").open("r+b") as file:
        file.seek(data.index(sevens.numpy().tobytes()))
        file.write(torch.ones(1).numpy().tobytes())
    assert stored["big"].read()[0] == 1


@pytest.mark.parametrize("zipped", [True, False])
def test_more_than_tensors_is_refused_and_nothing_runs(tmp_path: Path, zipped: bool) -> None:
    torch.save({"model": WEIGHTS, "runner": Runner()}, tmp_path / "x.pth", _use_new_zipfile_serialization=zipped)
    with pytest.raises(CheckpointError, match=r"more than tensors .*Runner\).*any code.*torch\.save\(torch\.load"):
        open_weights(tmp_path / "x.pth")


@pytest.mark.parametrize("keep", [0, 10, 0.5, 0.99])
@pytest.mark.parametrize("zipped", [True, False])
def test_truncated(tmp_path: Path, keep: float, zipped: bool) -> None:
    path = tmp_path / "x.pth"
    torch.save({"model": {"big": torch.rand(3000)}}, path, _use_new_zipfile_serialization=zipped)
    data = path.read_bytes()
    path.write_bytes(data[: int(keep if keep > 1 else keep * len(data))])
    with pytest.raises(CheckpointError, match=r"x\.pth: this file is damaged, or no file of weights"):
        open_weights(path)


def test_files_of_something_else(tmp_path: Path) -> None:
    (tmp_path / "x.pth").write_text("a model, honestly")
    with pytest.raises(CheckpointError, match="damaged, or no file of weights"):
        open_weights(tmp_path / "x.pth")
    torch.save([torch.zeros(1)], tmp_path / "x.pth")
    with pytest.raises(CheckpointError, match=r"holds no tensors by name\. Given: a list"):
        open_weights(tmp_path / "x.pth")
    torch.save({"epoch": 3}, tmp_path / "x.pth")
    with pytest.raises(CheckpointError, match="holds no tensors by name"):
        open_weights(tmp_path / "x.pth")
