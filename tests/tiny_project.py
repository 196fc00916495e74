"""A whole project in a folder: samples with no, one and two pictures, of unequal length; a tokenizer; a YAML."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from PIL import Image

from lavis_ds.data.tokenizer import train_tokenizer

NUM_SAMPLES = 22
"""Not a multiple of any global batch used, so that epochs end inside a step and the last step is short."""

WORDS = (
    "red", "green", "blue", "square", "circle", "the", "a", "what", "is", "shape", "color", "of", "picture",
    "yes", "no", "there", "left", "right", "under", "over",
)  # fmt: skip


def make_project(folder: Path, *, data: dict[str, Any] | None = None, num_datasets: int = 1, **run: Any) -> Path:
    """Write the project and return its YAML.

    Args:
        folder: where it goes.
        data: the block `data:`.
        num_datasets: 2 adds a second entry, `words`, of 9 samples without pictures.
        run: goes into `run:`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    train_tokenizer([" ".join(WORDS)], vocab_size=320).save_pretrained(folder / "tokenizer")
    rng = np.random.default_rng(0)
    (folder / "images").mkdir(exist_ok=True)
    items = [_item(folder, number, rng) for number in range(NUM_SAMPLES)]
    (folder / "train.json").write_text(json.dumps(items))
    (folder / "val.json").write_text(json.dumps(items[:5]))
    path = folder / "train.yaml"
    config = _config(folder, run)
    if data is not None:
        config["data"] = data
    if num_datasets == 2:
        words = [{**_item(folder, 4 * number + 1, rng), "id": f"w{number}"} for number in range(9)]
        (folder / "words.json").write_text(json.dumps(words))
        config["datasets"]["words"] = {"builder": "llava_json", "annotations": {"train": str(folder / "words.json")}}
    path.write_text(yaml.safe_dump(config))
    return path


def _item(folder: Path, number: int, rng: np.random.Generator) -> dict[str, Any]:
    num_images = (1, 0, 1, 2)[number % 4]
    names = []
    for k in range(num_images):
        name = f"{number}_{k}.png"
        Image.fromarray(rng.integers(0, 255, (40, 40, 3), dtype=np.uint8)).save(folder / "images" / name)
        names.append(name)
    turns = []
    for turn in range(1 + number % 3):
        question = " ".join(rng.choice(list(WORDS), 2 + int(rng.integers(8))))
        markers = "<image>\n" * num_images if turn == 0 else ""
        turns += [
            {"from": "human", "value": markers + question},
            {"from": "gpt", "value": " ".join(rng.choice(list(WORDS), 1 + int(rng.integers(9))))},
        ]
    item: dict[str, Any] = {"id": f"s{number}", "conversations": turns}
    return {**item, "image": names} if names else item


def _config(folder: Path, run: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": {
            "arch": "vlm",
            "max_txt_len": 256,
            "vision": {
                "name": "timm_vit",
                "model_name": "vit_tiny_patch16_224",
                "image_size": 32,
                "model_args": {"patch_size": 16, "embed_dim": 16, "depth": 2, "num_heads": 2},
            },
            "projector": {"name": "mlp"},
            "language": {
                "name": "hf_causal_lm",
                "tokenizer": str(folder / "tokenizer"),
                "config": {
                    "model_type": "qwen3",
                    "hidden_size": 32,
                    "intermediate_size": 64,
                    "num_hidden_layers": 2,
                    "num_attention_heads": 2,
                    "num_key_value_heads": 1,
                    "head_dim": 16,
                },
            },
        },
        "datasets": {
            "tiny": {
                "builder": "llava_json",
                "annotations": {"train": [str(folder / "train.json")], "val": [str(folder / "val.json")]},
                "image_root": str(folder / "images"),
                "vis_processor": {"train": {"name": "image_train", "image_size": 32, "min_scale": 0.5}},
            }
        },
        "run": {
            "output_dir": str(folder / "output"),
            "precision": "fp32",
            "max_steps": 10,
            "global_batch_size": 8,
            "batch_size_train": 4,
            "init_lr": 3e-3,
            "warmup_steps": 2,
            "num_workers": 0,
            "log_sample_ids": True,
            "save_every": 4,
            "observers": ["jsonl"],
            **run,
        },
    }


def metrics(run_folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl."""
    return [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]


def read_language_from_folder(path: Path) -> Path:
    """Write a project's language model, of random weights, into a folder that its YAML names then; returns it."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    tree = yaml.safe_load(path.read_text())
    language, folder = tree["model"]["language"], path.parent / "language"
    tokenizer = AutoTokenizer.from_pretrained(language.pop("tokenizer"))
    shape = AutoConfig.for_model(**language.pop("config"), vocab_size=len(tokenizer))
    torch.manual_seed(7)
    AutoModelForCausalLM.from_config(shape).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    language["path"] = str(folder)
    path.write_text(yaml.safe_dump(tree))
    return folder
