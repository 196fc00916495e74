"""A model opens the files of its weights once, however often it asks for them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lavis_ds.models.conversion import source
from lavis_ds.models.vlm import Vlm
from lavis_ds.models.weights import save_weights


def test_pretrained_is_opened_once_a_model(
    make_vlm: Callable[..., Vlm], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_weights(make_vlm().state_dict().items(), tmp_path / "run")
    opened: list[Path] = []
    open_file = source._open_file

    def counting(path: Path) -> Any:
        opened.append(path)
        return open_file(path)

    monkeypatch.setattr(source, "_open_file", counting)
    options = {"pretrained": str(tmp_path / "run"), "moe": {"num_experts": 2}}  # asked for adapters, experts, weights
    make_vlm(**options)
    assert len(opened) == 1
    make_vlm(**options)
    assert len(opened) == 2  # it may have been written anew
