"""Shipped projects at the sizes that their files name, with random weights: some steps of the command line itself."""

from __future__ import annotations

import math
import os
import statistics
from pathlib import Path

import pytest

from tests.multi.launch import DEVICE, launch
from tests.tiny_project import metrics

pytestmark = [pytest.mark.gpu2, pytest.mark.slow, pytest.mark.timeout(1200)]

ROOT = Path(__file__).parents[2]
STEPS = 8
QWEN3_8B = (
    "{model_type: qwen3, vocab_size: 151936, hidden_size: 4096, intermediate_size: 12288, num_hidden_layers: 36, "
    "num_attention_heads: 32, num_key_value_heads: 8, head_dim: 128, tie_word_embeddings: false, "
    "max_position_embeddings: 40960}"
)
"""https://huggingface.co/Qwen/Qwen3-8B/blob/main/config.json; the other parts are ViT-g and a Q-Former."""

FULL = ["model.model_type=qwen3_8b", f"model.language.config={QWEN3_8B}", "model.language.path=null"]
FULL += ["model.vision.pretrained=false", f"plugins=[{ROOT / 'scripts/benchmarks/quick_weights.py'}]"]
TINY = ["model.model_type=tiny", "run.precision=fp32", "run.num_workers=0"]
TINY += [f"datasets.{name}.vis_processor.train.image_size=32" for name in ("llava_instruct", "minigpt4_instruct")]


def test_minigpt4qwen_stage_2_with_qwen3_8b(tmp_path: Path) -> None:
    data = tmp_path / "data"
    made = launch([str(ROOT / "projects/minigpt4qwen/tiny_data.py"), "--output", str(data)], launcher="python")
    assert made.returncode == 0, made.stderr
    options = [
        *(TINY if os.environ.get(DEVICE) == "cpu" else FULL),
        f"model.language.tokenizer={data / 'tokenizer'}",
        f"datasets.llava_instruct.annotations.train={data / 'conversations.json'}",
        f"datasets.llava_instruct.image_root={data / 'images'}",
        f"datasets.minigpt4_instruct.annotations.train={data / 'instructions.json'}",
        f"datasets.minigpt4_instruct.image_root={data / 'images'}",
        "run.max_epoch=null",
        f"run.max_steps={STEPS}",
        "run.warmup_ratio=null",
        "run.global_batch_size=16",
        "run.save_every=null",
        "run.save_last=false",
        f"run.output_dir={tmp_path / 'output'}",
    ]
    command = [str(ROOT / "scripts/train.py"), "--cfg", str(ROOT / "projects/minigpt4qwen/stage2.yaml")]
    command += ["--job-id", "stage2", "--options", *options]
    threads = str(max(1, (os.cpu_count() or 2) // 2))  # making the weights
    env = {"OMP_NUM_THREADS": threads}
    done = launch(
        command,
        num_ranks=2,
        launcher="deepspeed",
        timeout_s=900 if os.environ.get(DEVICE) == "cpu" else 240,
        env=env,
        device="gpu",
    )
    print(done.stdout[-6000:])
    assert done.returncode == 0, done.stderr[-6000:]
    lines = metrics(tmp_path / "output" / "stage2")
    assert len(lines) == STEPS
    assert all(math.isfinite(line["train/loss"]) for line in lines)
    assert lines[-1]["train/loss"] < lines[0]["train/loss"]
    speed = statistics.median(line["throughput/tokens_per_s"] for line in lines[3:])
    peak = max(line["memory/peak_bytes"] for line in lines) / 2**30
    print(
        f"measured: {speed:,.0f} tokens/s, peak {peak:.1f} GiB a rank, losses", [line["train/loss"] for line in lines]
    )
