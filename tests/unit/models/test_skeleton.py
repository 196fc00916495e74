"""A skeleton is the model in all but its weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import save_file
from transformers import AutoModel, AutoModelForCausalLM, Qwen3Config, SiglipVisionConfig

from lavis_ds import registry
from lavis_ds.config.decode import decode
from lavis_ds.config.schema import ModelConfig
from lavis_ds.errors import CheckpointError, ConfigError
from lavis_ds.models.skeleton import reads_weights, skeleton, without_weights
from lavis_ds.models.vlm import Vlm

Tree = Callable[..., dict[str, Any]]

CLIP = {
    "model_type": "clip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}
QFORMER = {"name": "qformer", "num_query_tokens": 5, "num_hidden_layers": 2, "hidden_size": 32}
QFORMER |= {"num_attention_heads": 4, "intermediate_size": 64}


def config_of(tree: dict[str, Any]) -> ModelConfig:
    return decode(registry.models.config_class(tree["arch"]), tree)


def save(shape: dict[str, Any], auto_class: Any, folder: Path) -> str:
    """A Hugging Face folder with random weights."""
    from transformers import AutoConfig

    options = dict(shape)
    auto_class.from_config(AutoConfig.for_model(options.pop("model_type"), **options)).save_pretrained(folder)
    return str(folder)


def facts(model: Any) -> dict[str, Any]:
    """All that data and plans ask a model."""
    return {
        "parameters": {name: (tuple(p.shape), p.dtype, p.requires_grad) for name, p in model.named_parameters()},
        "state": {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()},
        "tokens_per_image": model.tokens_per_image,
        "image_size": model.image_size,
        "work": model.work(),
        "vocabulary": model.tokenizer.get_vocab(),
        "sourced": [part.sourced for part in model.parts().values()],
    }


@pytest.mark.parametrize(
    "blocks",
    [
        {},
        {"freeze": ["vision", "language.*.layers.0.*"]},
        {"projector": QFORMER},
        {"vision": {"name": "hf_vision", "config": CLIP, "select_layer": -2, "final_norm": True}},
        {"vision": {"name": "hf_vision", "config": CLIP, "image_size": 48}},
    ],
    ids=["timm", "frozen", "qformer", "clip", "clip_resized"],
)
def test_it_equals_a_model_of_random_weights(blocks: dict[str, Any], vlm_tree: Tree) -> None:
    config = config_of(vlm_tree(**blocks))
    made = skeleton(config)
    assert facts(made) == facts(Vlm.from_config(config))
    assert {p.device.type for p in made.parameters()} == {"meta"}


def test_it_equals_a_model_whose_weights_are_read_and_needs_none_of_the_files(
    vlm_tree: Tree, tokenizer_dir: str, qwen3: dict[str, Any], tmp_path: Path
) -> None:
    language = save({**qwen3, "vocab_size": 512, "tie_word_embeddings": True}, AutoModelForCausalLM, tmp_path / "lm")
    tower = save(CLIP, AutoModel, tmp_path / "tower")
    config = config_of(
        vlm_tree(
            vision={"name": "hf_vision", "path": tower, "image_size": 48, "select_layer": -2},
            language={"name": "hf_causal_lm", "path": language, "tokenizer": tokenizer_dir},
        )
    )
    whole = facts(Vlm.from_config(config))
    for file in tmp_path.rglob("*.safetensors"):
        file.unlink()
    with pytest.raises(CheckpointError):
        Vlm.from_config(config)
    assert facts(skeleton(config)) == whole


def test_timm_weights_and_those_of_an_earlier_run_are_not_opened(vlm_tree: Tree, tmp_path: Path) -> None:
    vit = dict(vlm_tree()["vision"])
    save_file({"no": torch.zeros(1)}, tmp_path / "vit.safetensors")
    for change in (
        {"vision": {**vit, "weights": str(tmp_path / "vit.safetensors")}},
        {"vision": {**vit, "pretrained": True}},
        {"pretrained": str(tmp_path / "absent")},
    ):
        config = config_of(vlm_tree(**change))
        with pytest.raises((CheckpointError, ConfigError)):
            Vlm.from_config(config)
        assert skeleton(config).tokens_per_image == 4


def test_mistakes_are_found_as_in_the_model(vlm_tree: Tree) -> None:
    with pytest.raises(ConfigError, match=r"model\.freeze"):
        skeleton(config_of(vlm_tree(freeze=["visoin"])))
    with pytest.raises(CheckpointError, match="no such folder"):
        skeleton(config_of(vlm_tree(language={"name": "hf_causal_lm", "path": "/no/such/folder"})))


def test_a_kernel_that_is_not_installed_is_not_missed(vlm_tree: Tree) -> None:
    language = {**vlm_tree()["language"], "attention": "flash_attention_2"}
    with pytest.raises(ConfigError, match=r"no NVIDIA GPU|not installed"):
        Vlm.from_config(config_of(vlm_tree(language=language)))
    assert skeleton(config_of(vlm_tree(language=language))).describe() == {"attention": "flash_attention_2"}


def test_weights_are_read_again_afterwards() -> None:
    with without_weights():
        assert not reads_weights()
        assert torch.zeros(1).device.type == "meta"
    with pytest.raises(ValueError, match="inside"), without_weights():
        raise ValueError("inside")
    assert reads_weights()
    assert torch.zeros(1).device.type == "cpu"


@pytest.mark.parametrize(
    ("name", "tokens", "size", "parameters"),
    [
        # ViT-g without its last block 0.99 G, Q-Former 0.11 G, Qwen3-8B 8.19 G
        ("minigpt4qwen/qwen3_8b", 32, 224, 9.28e9),
        # SigLIP so400m without its last block and head 0.41 G, two layers 0.02 G, Qwen3-8B 8.19 G
        ("llava_qwen/qwen3_8b", 729, 384, 8.61e9),
    ],
)
def test_models_of_real_size(
    name: str, tokens: int, size: int, parameters: float, tokenizer_dir: str, configs_root: Path, tmp_path: Path
) -> None:
    """The shipped types, hub ids replaced by folders with a config.json. On the CPU they would take 37 GB."""
    shape = Qwen3Config(
        vocab_size=151_936, hidden_size=4096, intermediate_size=12_288, num_hidden_layers=36, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, tie_word_embeddings=False,
    )  # fmt: skip
    shape.save_pretrained(tmp_path / "lm")
    tower = SiglipVisionConfig(
        hidden_size=1152, intermediate_size=4304, num_hidden_layers=27, num_attention_heads=16, image_size=384,
        patch_size=14,
    )  # fmt: skip
    tower.save_pretrained(tmp_path / "tower")
    tree: Any = OmegaConf.to_container(OmegaConf.load(configs_root / f"{name}.yaml"))
    tree["language"] |= {"path": str(tmp_path / "lm"), "tokenizer": tokenizer_dir}
    if "path" in tree["vision"]:
        tree["vision"]["path"] = str(tmp_path / "tower")
    pretrained = str(tmp_path / "blip2") if name.startswith("minigpt4qwen") else None
    made = skeleton(config_of({**tree, "arch": name.split("/")[0], "pretrained": pretrained}))
    assert (made.tokens_per_image, made.image_size) == (tokens, size)
    assert sum(p.numel() for p in made.parameters()) == pytest.approx(parameters, rel=1e-3)
