"""The configurations on the page about one's own weights are accepted, and mean what the page says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from lavis_ds import registry
from lavis_ds.config.decode import decode
from lavis_ds.config.load import model_tree

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "real-weights.md"
BLOCKS = [yaml.safe_load(text)["model"] for text in re.findall(r"```yaml\n(model:.*?)```", PAGE.read_text(), re.DOTALL)]


def sources(config: Any) -> dict[str, Any]:
    return {
        "pretrained": config.pretrained,
        "finetuned": config.finetuned,
        "vision": getattr(config.vision, "weights", None) or getattr(config.vision, "path", None),
        "language": config.language.path,
    }


@pytest.mark.parametrize("tree", BLOCKS, ids=lambda tree: f"{tree.get('model_type', tree['arch'])}")
def test_every_source_named_is_used(tree: dict[str, Any]) -> None:
    config = decode(registry.models.config_class(tree["arch"]), model_tree(tree))
    found = sources(config)
    for key in ("pretrained", "finetuned"):
        assert (found[key] or "").endswith(tree.get(key, ""))
        assert (found[key] is None) == (key not in tree)
    for part in ("vision", "language"):
        for key in {"path", "weights"} & tree.get(part, {}).keys():
            assert found[part].endswith(tree[part][key])


def test_there_is_one_for_each_source() -> None:
    assert len(BLOCKS) >= 5
