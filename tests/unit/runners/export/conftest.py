"""Checkpoints of tiny models, and their export with the check in this process (one test starts the program itself)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lavis_ds.config.load import load, to_yaml
from lavis_ds.data.tokenizer import train_tokenizer
from lavis_ds.engines.base import persistent_buffers, saved_parameters
from lavis_ds.models.base import Model
from lavis_ds.models.skeleton import skeleton
from lavis_ds.models.weights import save_weights
from lavis_ds.runners import build, checkpoint_files, checksums
from lavis_ds.runners.export import check, reload
from lavis_ds.runners.export.export import export
from tests.tiny_project import WORDS, make_project

torch.set_num_threads(1)

Tree = dict[str, Any]

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}
CLIP: Tree = {
    "name": "hf_vision",
    "select_layer": -2,
    "config": {"model_type": "clip_vision_model", "image_size": 32, "patch_size": 8, **SIZES},
}
SIGLIP: Tree = {**CLIP, "config": {**CLIP["config"], "model_type": "siglip_vision_model"}}
EVA: Tree = {
    "name": "timm_vit",
    "model_name": "eva_giant_patch14_clip_224",
    "image_size": 32,
    "model_args": {"patch_size": 8, "embed_dim": 32, "depth": 3, "num_heads": 2},
    "select_layer": -2,
    "final_norm": False,
    "layer_norm": True,
    "select_tokens": "all",
}
QFORMER: Tree = {
    "name": "qformer",
    "num_query_tokens": 4,
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "intermediate_size": 48,
}
MARKS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")


@pytest.fixture(scope="session")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny project's YAML, whose tokenizer has Qwen-VL's tokens too."""
    folder = tmp_path_factory.mktemp("export")
    cfg = make_project(folder)
    tokenizer = train_tokenizer([" ".join(WORDS)], vocab_size=320)
    tokenizer.add_special_tokens({"extra_special_tokens": ["<|im_start|>", "<|im_end|>", *MARKS]})
    tokenizer.save_pretrained(folder / "tokenizer")
    return cfg


@pytest.fixture
def tree(project: Path) -> Tree:
    """The project, to be changed: CLIP, two linear layers, Qwen3."""
    tree: Tree = yaml.safe_load(project.read_text())
    tree["model"] |= {"arch": "llava_qwen", "vision": dict(CLIP), "projector": {"name": "mlp", "depth": 2}}
    return tree


@pytest.fixture
def qwen_vl(tree: Tree) -> Callable[[str], Tree]:
    """The project with a tiny Qwen-VL."""

    def make(arch: str) -> Tree:
        tokenizer = tree["model"]["language"]["tokenizer"]
        tree["model"] = {"arch": arch, "model_type": "tiny", "max_txt_len": 1024, "language": {"tokenizer": tokenizer}}
        native = {"name": "image_native", "patch_size": 14 if arch == "qwen2_5_vl" else 16, "min_pixels": 1024}
        tree["datasets"]["tiny"]["vis_processor"] = {**native, "max_pixels": 65536}
        return tree

    return make


@pytest.fixture
def make_checkpoint(tmp_path: Path) -> Callable[..., Path]:
    """Build the model of a tree, shake its weights, and write them as a run does. Returns the run folder.

    With `blank` they are whatever the memory holds, which is quick.
    """

    def make(
        tree: Tree,
        dtype: torch.dtype = torch.float32,
        edit: Callable[[Model], None] | None = None,
        *,
        blank: bool = False,
    ) -> Path:
        cfg = tmp_path / "project.yaml"
        cfg.write_text(yaml.safe_dump(tree))
        config = load(cfg).config
        model = skeleton(config.model).to_empty(device="cpu") if blank else _shaken(build.build_model(config), edit)
        final = checkpoint_files.step_folder(tmp_path / "run" / "checkpoints", 1)
        partial = checkpoint_files.begin(final)
        tensors = [*saved_parameters(model), *persistent_buffers(model)]
        save_weights(((name, tensor.to(dtype)) for name, tensor in tensors), partial / "weights")
        (partial / "config.yaml").write_text(to_yaml(config))
        files = checksums.contents(partial, checkpoint_files.written(partial))
        checkpoint_files.finish(partial, final, {}, {}, checkpoint_files.Keep(1), files)
        return tmp_path / "run"

    return make


@torch.no_grad()
def _shaken(model: Model, edit: Callable[[Model], None] | None) -> Model:
    torch.manual_seed(0)
    for parameter in model.parameters():  # adapters, norms and biases included, which start neutral
        parameter.add_(torch.randn_like(parameter) * 0.05)
    if edit is not None:
        edit(model)
    return model


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load the folder in this process, which saves seconds of imports."""

    def run(folder: Path, work: Path) -> Any:
        try:
            reload.main(str(folder), work)
        finally:
            torch.set_grad_enabled(True)
        return yaml.safe_load((work / "report.json").read_text())

    monkeypatch.setattr(check, "_reload", run)


@pytest.fixture
def exported(
    make_checkpoint: Callable[..., Path], in_process: None, tmp_path: Path
) -> Callable[..., tuple[Path, list[check.Agreement]]]:
    """Export the model of a tree. Returns the folder, and how far it is from our model, with a picture and without."""

    def make(tree: Tree, *, dtype: torch.dtype = torch.float32, edit: Any = None, **options: Any) -> Any:
        found: list[check.Agreement] = []
        compare = check.compare

        def remember(*arguments: Any) -> list[check.Agreement]:
            found.extend(compare(*arguments))
            return found

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(check, "compare", remember)
            assert export(str(make_checkpoint(tree, dtype, edit)), str(tmp_path / "out"), **options) == 0
        return tmp_path / "out", found

    return make
