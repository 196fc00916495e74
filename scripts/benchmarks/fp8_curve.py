"""Whether products in 8 bits learn as bf16 does: the quickstart's task with a wide language model, on one GPU.

    python projects/quickstart/prepare.py
    python -m scripts.benchmarks.fp8_curve --output docs/benchmarks/results/fp8_curve_h200.json

Two runs in bf16 differ by their seed alone; the runs in 8 bits have the first one's. The mean loss of the last fifth of
their steps must not be further from that of the first run than three times what the seed does, or 5 %.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

WIDE = [
    "run.engine=torch", "run.precision=bf16", "run.global_batch_size=32", "run.init_lr=2.0e-4", "run.num_workers=6",
    "run.save_every=null", "run.observers=[jsonl]", "run.max_epoch=null", "run.task.baselines=false",
    "model.language.config.hidden_size=1024", "model.language.config.intermediate_size=4096",
    "model.language.config.num_hidden_layers=4", "model.language.config.num_attention_heads=8",
    "model.language.config.num_key_value_heads=8", "model.language.config.head_dim=128",
    "model.language.config.initializer_range=0.03",
]  # fmt: skip
WAYS = {
    "bf16": ["run.seed=1"],
    "bf16, another seed": ["run.seed=2"],
    "tensorwise": ["run.seed=1", "model.language.fp8=tensorwise"],
    "rowwise": ["run.seed=1", "model.language.fp8=rowwise"],
}


def run(way: str, arguments: argparse.Namespace) -> dict[str, Any]:
    job = "fp8_" + "".join(c if c.isalnum() else "_" for c in way)
    options = [*WIDE, f"run.max_steps={arguments.steps}", f"run.output_dir={arguments.folder}", *WAYS[way]]
    cfg = "projects/quickstart/train.yaml"
    command = [sys.executable, "scripts/train.py", "--cfg", cfg, "--job-id", job, "--options", *options]
    subprocess.run(command, check=True, timeout=arguments.timeout_s)
    folder = arguments.folder / job
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = [line["train/loss"] for line in lines if "train/loss" in line]
    scores = json.loads(max((folder / "eval").glob("test_step_*.json")).read_text())["metrics"]
    return {
        "way": way,
        "end_loss": statistics.mean(losses[-len(losses) // 5 :]),
        "accuracy": scores["accuracy"],
        "losses": [round(loss, 5) for loss in losses],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--timeout-s", type=float, default=280)
    parser.add_argument("--folder", type=Path, default=Path("output/fp8_curve"), help="for the runs")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for way in arguments.ways:
        rows.append(run(way, arguments))
        print(json.dumps({key: value for key, value in rows[-1].items() if key != "losses"}), flush=True)
    ends = {row["way"]: row["end_loss"] for row in rows}
    allowed = max(3 * abs(ends["bf16"] - ends["bf16, another seed"]), 0.05 * ends["bf16"])
    agree = {way: abs(ends[way] - ends["bf16"]) <= allowed for way in ("tensorwise", "rowwise") if way in ends}
    result = {
        "rows": rows,
        "allowed": allowed,
        "agree": agree,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "torchao", "transformers")},
    }
    print(json.dumps({"allowed": allowed, "agree": agree}))
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if all(agree.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
