"""The parts shown in docs/how-to/write-your-own-parts.md are built, run and trained."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml

from lavis_ds import registry
from lavis_ds.batch import Batch
from lavis_ds.errors import ConfigError
from lavis_ds.models.vlm import Vlm

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "write-your-own-parts.md"
TINY_CNN = {"name": "timm_cnn", "model_name": "test_convnext", "image_size": 64}


def shown(title: str) -> str:
    found = re.search(rf'```\w+ title="{title}"\n(.*?)```', PAGE.read_text(), re.DOTALL)
    assert found is not None
    return found[1]


@pytest.fixture(autouse=True)
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The page's module; what it registers is forgotten afterwards."""
    for kind in (registry.projectors, registry.vision_encoders):
        monkeypatch.setattr(kind, "_entries", dict(kind._entries))
        monkeypatch.setattr(kind, "_classes", dict(kind._classes))
    file = tmp_path / "my_parts.py"
    file.write_text(shown("my_parts.py"))
    spec = importlib.util.spec_from_file_location("my_parts_of_the_page", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("vision", [None, TINY_CNN], ids=["projector", "both"])
def test_a_model_of_these_parts_trains(
    make_vlm: Callable[..., Vlm], make_batch: Callable[..., Batch], vision: dict[str, Any] | None
) -> None:
    projector = yaml.safe_load(shown("my_parts.yaml"))["model"]["projector"]
    blocks = {"vision": vision | {"image_size": 128}} if vision else {}
    model = make_vlm(projector=projector, **blocks)
    assert model.tokens_per_image == 4
    batch = make_batch(4)
    if vision:
        batch = Batch(**{**batch.__dict__, "images": torch.randint(0, 256, (2, 3, 128, 128), dtype=torch.uint8)})
    model(batch)[0].backward()
    assert [n for n, p in model.named_parameters() if p.grad is None] == []


def test_the_projector_goes_behind_an_encoder_of_native_resolution(make_vlm: Callable[..., Vlm]) -> None:
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = {"model_type": "siglip2_vision_model", **shape, "patch_size": 8, "num_patches": 16}
    model = make_vlm(vision={"name": "siglip2_naflex", "config": config}, projector={"name": "mean_max"})
    patches = torch.randint(0, 256, (24, 2 * 3 * 64), dtype=torch.uint8)
    assert model.encode_patches(patches, torch.tensor([[1, 4, 6]])).shape == (6, 1, 32)


def test_its_errors(make_vlm: Callable[..., Vlm]) -> None:
    with pytest.raises(ConfigError, match=r"projector\.sise"):
        make_vlm(projector={"name": "mean_max", "sise": 2})
    with pytest.raises(ConfigError, match=r"projector\.size: the side"):
        make_vlm(projector={"name": "mean_max", "size": 3})
