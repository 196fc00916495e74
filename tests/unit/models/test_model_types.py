from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from lavis_ds import registry
from lavis_ds.batch import Batch
from lavis_ds.config.decode import decode
from lavis_ds.config.schema import ModelConfig

ROOT = Path(__file__).parents[3] / "configs" / "models"
FILES = sorted(ROOT.glob("*/*.yaml"))


def config_of(file: Path, tokenizer: str) -> ModelConfig:
    tree: Any = OmegaConf.to_container(OmegaConf.load(file))
    arch = file.parent.name
    if file.stem == "tiny":
        tree["language"]["tokenizer"] = tokenizer
    return decode(registry.models.config_class(arch), {**tree, "arch": arch, "model_type": file.stem})


def test_all_promised_types_are_there() -> None:
    assert {f"{f.parent.name}/{f.stem}" for f in FILES} >= {
        *(f"minigpt4qwen/{t}" for t in ("qwen3_0_6b", "qwen3_1_7b", "qwen3_4b", "qwen3_8b", "qwen3_14b")),
        *(f"minigpt4qwen/{t}" for t in ("qwen2_5_7b", "tiny")),
        *(f"llava_qwen/{t}" for t in ("qwen3_0_6b", "qwen3_1_7b", "qwen3_8b", "qwen3_14b", "tiny")),
    }


@pytest.mark.parametrize("file", FILES, ids=lambda f: f"{f.parent.name}/{f.stem}")
def test_every_type_decodes(file: Path, tokenizer_dir: str) -> None:
    assert config_of(file, tokenizer_dir).model_type == file.stem


@pytest.mark.parametrize(("arch", "tokens"), [("minigpt4qwen", 4), ("llava_qwen", 4)])
def test_tiny_types_train(arch: str, tokens: int, tokenizer_dir: str, make_batch: Callable[..., Batch]) -> None:
    config = config_of(ROOT / arch / "tiny.yaml", tokenizer_dir)
    model = registry.models.get(arch).from_config(config)
    assert model.tokens_per_image == tokens
    model(make_batch(tokens))[0].backward()
    assert [n for n, p in model.named_parameters() if p.grad is None] == []
