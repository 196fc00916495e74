"""Tokens a second of whole training runs: Qwen3-VL-2B's shape, random weights, everything trained, by the runner.

    python scripts/benchmarks/training.py --output docs/benchmarks/results/training.json
    python scripts/benchmarks/training.py --tiny            # tries it on a CPU

The data are made here: a 448 x 448 JPEG (196 tokens) and text of log-normal length (median 180 words, at most 1,800)
each. A row is one run of `scripts/train.py` in a process of its own, packed to 8,192 tokens. Only real tokens count.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from PIL import Image

from lavis_ds.data.tokenizer import train_tokenizer

WARM_UP = 16
TEXT = {
    "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936, "max_position_embeddings": 262_144,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20]},
}  # fmt: skip
VISION = {
    "depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16, "patch_size": 16,
    "out_hidden_size": 2048, "deepstack_visual_indexes": [5, 11, 17], "num_position_embeddings": 2304,
}  # fmt: skip
TINY_TEXT = {
    **TEXT, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 2048,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [4, 2, 2]},
}  # fmt: skip
TINY_VISION = {
    **VISION, "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64,
    "deepstack_visual_indexes": [0],
}  # fmt: skip
WAYS = {
    "default": [],
    "torch": ["run.engine=torch"],
    "ZeRO-0": ["run.deepspeed_config=zero0"],
    "ZeRO-1": ["run.deepspeed_config=zero1"],
    "ZeRO-2": ["run.deepspeed_config=zero2"],
    "ZeRO-3": ["run.deepspeed_config=zero3"],
    "default, not compiled": ["run.compile=false"],
    "default, recomputed": [
        "model.language.gradient_checkpointing=full",
        "model.vision.gradient_checkpointing=full",
    ],
    "ZeRO-2, recomputed": [
        "run.deepspeed_config=zero2",
        "model.language.gradient_checkpointing=full",
        "model.vision.gradient_checkpointing=full",
    ],
}


def make_data(folder: Path, samples: int) -> None:
    """A tokenizer with Qwen-VL's marks, pictures, and conversations."""
    words = [f"{a}{b}{c}" for a in "bdfgklmnprst" for b in "aeiou" for c in ("n", "r", "st", "lo", "ki")]
    marks = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    tokenizer = train_tokenizer([" ".join(words)], 1500)
    tokenizer.add_special_tokens({"extra_special_tokens": [*tokenizer.extra_special_tokens, *marks]})
    tokenizer.save_pretrained(folder / "tokenizer")
    rng = np.random.default_rng(0)
    (folder / "images").mkdir()
    items = []
    for number in range(samples):
        noise = rng.integers(0, 256, (14, 14, 3), dtype=np.uint8)
        picture = Image.fromarray(noise).resize((448, 448), Image.Resampling.BICUBIC)
        picture.save(folder / "images" / f"{number}.jpg", quality=90)
        length = int(np.clip(rng.lognormal(np.log(180), 0.8), 16, 1800))
        answer = " ".join(rng.choice(words, length))
        turns = [{"from": "human", "value": "<image>\\nWhat is it?"}, {"from": "gpt", "value": answer}]
        items.append({"id": str(number), "image": f"{number}.jpg", "conversations": turns})
    (folder / "train.json").write_text(json.dumps(items))


def write_config(folder: Path, arguments: argparse.Namespace) -> Path:
    text, vision = (TINY_TEXT, TINY_VISION) if arguments.tiny else (TEXT, VISION)
    config = {
        "model": {
            "arch": "qwen3_vl",
            "max_txt_len": arguments.pack_length // 2,
            "config": {"tie_word_embeddings": True, "text_config": text, "vision_config": vision},
            "language": {"tokenizer": str(folder / "tokenizer")},
        },
        "datasets": {
            "made": {
                "builder": "llava_json",
                "annotations": {"train": str(folder / "train.json")},
                "image_root": str(folder / "images"),
                "vis_processor": {"name": "image_native", "patch_size": 16, "max_pixels": 448 * 448},
            }
        },
        "data": {"batching": "packed", "pack_length": arguments.pack_length},
        "run": {
            "output_dir": str(folder / "output"),
            "precision": "bf16",
            "max_steps": arguments.steps,
            "global_batch_size": 1,
            "batch_size_train": 1,
            "init_lr": 1e-5,
            "num_workers": arguments.workers,
            "save_every": None,
            "save_last": False,
            "observers": ["jsonl", "console"],
        },
    }
    path = folder / "train.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def measure(name: str, cfg: Path, timeout_s: float, logs: Path | None) -> dict[str, Any]:
    job = "".join(c if c.isalnum() else "_" for c in name)
    command = [sys.executable, "scripts/train.py", "--cfg", str(cfg), "--job-id", job, "--options", *WAYS[name]]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
        log, code = done.stdout + done.stderr, done.returncode
    except subprocess.TimeoutExpired as error:
        log, code = str(error), -1
    if logs is not None:
        (logs / f"{job}.log").write_text(log)
    path = cfg.parent / "output" / job / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()][WARM_UP:] if path.exists() else []
    if not lines:
        return {"way": name, "exit_code": code, "error": log[-500:]}

    return {"way": name, **summary(lines), "exit_code": code}


def summary(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """What the lines of metrics.jsonl after the warm-up say."""

    def median(key: str) -> float:
        return float(statistics.median(line[key] for line in lines))

    mfu = {"mfu": round(median("throughput/mfu"), 4)} if "throughput/mfu" in lines[0] else {}
    return {
        "tokens_per_s": round(median("throughput/tokens_per_s")),
        **mfu,
        "step_s": round(median("time/step_s"), 4),
        "data_s": round(median("time/data_s"), 4),
        "padding": round(statistics.mean(line["data/padding_fraction"] for line in lines), 4),
        "peak_gib": round(max(line["memory/peak_bytes"] for line in lines) / 2**30, 1),
        "loss": lines[-1]["train/loss"],
        "steps": len(lines),
    }


def parser_of(text: str | None, ways: Iterable[str]) -> argparse.ArgumentParser:
    """What the benchmarks of whole runs ask for."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="+", choices=ways, default=list(ways))
    parser.add_argument("--steps", type=int, default=46)
    parser.add_argument("--pack-length", type=int, default=8192)
    parser.add_argument("--samples", type=int, default=1600)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--timeout-s", type=float, default=180)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--logs", type=Path, help="folder for the runs' output")
    parser.add_argument("--output", type=Path)
    return parser


def machine() -> dict[str, Any]:
    """What a result was measured on."""
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "CPU",
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "transformers", "deepspeed")},
        "cpus": os.cpu_count(),
    }


def main() -> None:
    arguments = parser_of(__doc__, WAYS).parse_args()
    result: dict[str, Any] = {"rows": [], **machine(), "pack_length": arguments.pack_length}
    with tempfile.TemporaryDirectory() as name:
        make_data(Path(name), arguments.samples)
        cfg = write_config(Path(name), arguments)
        for way in arguments.ways:
            result["rows"].append(measure(way, cfg, arguments.timeout_s, arguments.logs))
            print(json.dumps(result["rows"][-1]), flush=True)
            if arguments.output:
                arguments.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
