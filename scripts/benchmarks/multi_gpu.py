"""Tokens a second and memory of one and two GPUs at the same stages: whole runs of `scripts/train.py`, packed to 8k.

    python -m scripts.benchmarks.multi_gpu --output docs/benchmarks/results/multi_gpu.json
    python -m scripts.benchmarks.multi_gpu --tiny --steps 12         # tries it on a CPU, over gloo
    python -m scripts.benchmarks.multi_gpu --tables docs/benchmarks/results/multi_gpu.json

Data as in `training.py`, one packed row a GPU and step (so two GPUs see twice the tokens), random weights, everything
trained in bf16. Runs of one GPU go two at a time, one on each, so that all share the host alike.

| model | shape | parameters |
|---|---|---|
| 2B | Qwen3-VL-2B | 2.13 G |
| 8B/2 | Qwen3-VL-8B with 16 of its 36 layers; whole, at 16 bytes a parameter, it fills a GPU by itself | 4.9 G |
| 8B | Qwen3-VL-8B, activations recomputed; two GPUs only | 8.8 G |
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import math
import os
import shutil
import socket
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
import yaml

from scripts.benchmarks import training

ROOT = Path(__file__).parents[2]
STAGES = ("ZeRO-1", "ZeRO-2", "ZeRO-3")
WORTH_STARTING_S = 25
PROFILED = 2
NOT_MEASURED = PROFILED + 1
"""Steps at the end: those profiled, and the one that starts it."""

WIDE = {"hidden_size": 4096, "intermediate_size": 12_288, "num_attention_heads": 32, "num_key_value_heads": 8}
WIDE_VISION = {
    "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "out_hidden_size": 4096,
    "deepstack_visual_indexes": [8, 16, 24],
}  # fmt: skip
RECOMPUTED = ["model.language.gradient_checkpointing=true", "model.vision.gradient_checkpointing=true"]


@dataclass(frozen=True)
class Shape:
    """A model: what differs from Qwen3-VL-2B, and which numbers of GPUs have room for it."""

    text: dict[str, Any]
    vision: dict[str, Any]
    tied: bool
    gpus: tuple[int, ...] = (1, 2)
    options: tuple[str, ...] = ()


SHAPES = {
    "2B": Shape({}, {}, tied=True),
    "8B/2": Shape({**WIDE, "num_hidden_layers": 16}, WIDE_VISION, tied=False),
    "8B": Shape({**WIDE, "num_hidden_layers": 36}, WIDE_VISION, tied=False, gpus=(2,), options=tuple(RECOMPUTED)),
}


@dataclass(frozen=True)
class Run:
    model: str
    stage: str
    gpus: int

    @property
    def job(self) -> str:
        return f"{self.model}_{self.stage}_x{self.gpus}".replace("/", "_of_").replace("-", "").lower()


def write_config(folder: Path, model: str, arguments: argparse.Namespace) -> Path:
    """The YAML of `training.py` with this model's shape, and without a checkpoint of 30 GB at the end."""
    tree = yaml.safe_load(training.write_config(folder, arguments).read_text())
    shape, config = SHAPES[model], tree["model"]["config"]
    if not arguments.tiny:
        config["text_config"] |= shape.text
        config["vision_config"] |= shape.vision
        config["tie_word_embeddings"] = shape.tied
    tree["plugins"] = [str(Path(__file__).with_name(f"{name}.py")) for name in ("measured_run", "quick_weights")]
    tree["run"] |= {"save_last": False, "runner": {"name": "measured", "profiled_steps": PROFILED}}
    path = folder / f"{model.replace('/', '_of_')}.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def measure(run: Run, gpu: int | None, cfg: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """One run, on all GPUs or on the one named."""
    options = [*training.WAYS[run.stage], *SHAPES[run.model].options, f"run.global_batch_size={run.gpus}"]
    script = ["scripts/train.py", "--cfg", str(cfg), "--job-id", run.job, "--options", *options, *arguments.options]
    ranks = ["--nproc_per_node", str(run.gpus), "--master_addr", "127.0.0.1", "--master_port", str(_free_port())]
    command = [sys.executable, *(["-m", "torch.distributed.run", *ranks] if run.gpus > 1 else []), *script]
    environment = os.environ | ({} if gpu is None else {"CUDA_VISIBLE_DEVICES": str(gpu)})
    folder = cfg.parent / "output" / run.job
    shutil.rmtree(folder, ignore_errors=True)
    log = (arguments.logs or cfg.parent) / f"{run.job}.log"
    with log.open("w") as file:
        process = psutil.Popen(command, stdout=file, stderr=file, env=environment, cwd=ROOT)
        try:
            code = process.wait(min(arguments.timeout_s, arguments.deadline_s - time.monotonic()))
        except psutil.TimeoutExpired:  # SIGTERM would have the ranks save a checkpoint
            for rank in [*process.children(recursive=True), process]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    rank.kill()
            code = process.wait()
    return {"model": run.model, "stage": run.stage, "gpus": run.gpus, **_found(folder, code, log)}


def side_by_side(together: list[Run], cfgs: dict[str, Path], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    gpus: list[int | None] = [None] if together[0].gpus > 1 else list(range(len(together)))
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda run, gpu: measure(run, gpu, cfgs[run.model], arguments), together, gpus))


def _found(folder: Path, code: int, log: Path) -> dict[str, Any]:
    path, measured = folder / "metrics.jsonl", folder / "measured.json"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    lines = lines[training.WARM_UP : -NOT_MEASURED]
    if not lines:
        return {"exit_code": code, "error": log.read_text(errors="replace")[-1500:]}
    return {
        **training.summary(lines),
        **(json.loads(measured.read_text()) if measured.exists() else {}),
        "exit_code": code,
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def runs(arguments: argparse.Namespace) -> list[list[Run]]:
    """What runs at the same time: two runs of one GPU, or one of two."""
    chosen = [
        Run(model, stage, n)
        for model in arguments.models
        for n in SHAPES[model].gpus
        for stage in arguments.stages
        if n in arguments.gpus
    ]
    single = [run for run in chosen if run.gpus == 1]
    pairs = [single[i : i + arguments.at_once] for i in range(0, len(single), arguments.at_once)]
    return [*pairs, *([run] for run in chosen if run.gpus > 1)]


# ---- tables ----------------------------------------------------------------------------------------------------------


def formula(stage: int, gpus: int, parameters: int) -> dict[str, float]:
    """GiB a rank: weights and gradients in bf16, master weights and two moments in float32.

    Source: https://arxiv.org/abs/1910.02054, figure 1.
    """
    gib = parameters / 2**30
    return {
        "weights": 2 * gib / (gpus if stage >= 3 else 1),
        "gradients": 2 * gib / (gpus if stage >= 2 else 1),
        "optimizer": 12 * gib / (gpus if stage >= 1 else 1),
    }


def speed_table(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| model | stage | one GPU, tokens/s | two, tokens/s | weak scaling | step on two | NCCL alone | GPU idle |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for (model, stage), found in _by_stage(rows).items():
        one, two = found.get(1, {}), found.get(2, {})
        speeds = [row.get("tokens_per_s", 0) for row in (one, two)]
        ratio = f"{speeds[1] / speeds[0] / 2:.1%}" if all(speeds) else ""
        only = f"{two['only_talking_s']:.3f} s" if "only_talking_s" in two else ""
        idle = f"{max(0.0, two['step_s'] - two['busy_s']):.3f} s" if "busy_s" in two else ""
        cells = [f"{speed:,}" if speed else "" for speed in speeds]
        step = f"{two['step_s']:.3f} s" if "step_s" in two else ""
        lines.append(f"| {model} | {stage} | {cells[0]} | {cells[1]} | {ratio} | {step} | {only} | {idle} |")
    return lines


def memory_table(rows: list[dict[str, Any]]) -> list[str]:
    """GiB a rank beside the formula; what a stage saves is of the one GPU's sum."""
    lines = [
        "| model | stage | GPUs | weights | gradients | optimizer | sum | saved "
        "| held between steps (formula) | peak | peak - sum |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for (model, stage), found in _by_stage(rows).items():
        for gpus, row in sorted(found.items()):
            if "parameters" not in row or "peak_gib" not in row:
                continue
            parts = formula(int(stage[-1]), gpus, row["parameters"])
            total, alone = sum(parts.values()), sum(formula(0, 1, row["parameters"]).values())
            kept = parts["weights"] + parts["optimizer"]
            held = f"{row['held_bytes'] / 2**30:.1f} ({kept:.1f})" if "held_bytes" in row else f"({kept:.1f})"
            cells = [
                model,
                stage,
                str(gpus),
                *(f"{gib:.1f}" for gib in (*parts.values(), total)),
                f"{1 - total / alone:.0%}",
            ]
            lines.append(f"| {' | '.join(cells)} | {held} | {row['peak_gib']} | {row['peak_gib'] - total:.1f} |")
    return lines


def _by_stage(rows: list[dict[str, Any]]) -> dict[tuple[str, str], dict[int, dict[str, Any]]]:
    found: dict[tuple[str, str], dict[int, dict[str, Any]]] = {}
    for row in rows:
        found.setdefault((row["model"], row["stage"]), {})[row["gpus"]] = row
    return dict(sorted(found.items(), key=lambda item: (list(SHAPES).index(item[0][0]), item[0][1])))


def tables(result: dict[str, Any]) -> str:
    return "\n".join([*speed_table(result["rows"]), "", *memory_table(result["rows"])])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=["2B", "8B/2"])
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES))
    parser.add_argument("--gpus", type=int, nargs="+", choices=(1, 2), default=[1, 2])
    parser.add_argument("--steps", type=int, default=19, help="of which the first 6 and the last 3 do not count")
    parser.add_argument("--pack-length", type=int, default=8192)
    parser.add_argument("--samples", type=int, default=800)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--at-once", type=int, choices=(1, 2), default=2, help="runs of one GPU at a time")
    parser.add_argument("--timeout-s", type=float, default=120, help="of one run")
    parser.add_argument("--limit-s", type=float, default=math.inf, help="of all runs together")
    parser.add_argument("--options", nargs="+", default=[], help="settings of all runs, such as run.kernels=compiled")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--work", type=Path, help="folder for data and runs, whose data are used again; else a new one")
    parser.add_argument("--logs", type=Path, help="folder for the runs' output")
    parser.add_argument("--output", type=Path, help="JSON; rows of other models and stages that are in it stay")
    parser.add_argument("--tables", type=Path, help="only write the tables of this file")
    arguments = parser.parse_args()
    if arguments.tables:
        print(tables(json.loads(arguments.tables.read_text())))
        return
    arguments.deadline_s = time.monotonic() + arguments.limit_s
    result = _before(arguments.output)
    with tempfile.TemporaryDirectory() as name:
        folder: Path = arguments.work or Path(name)
        if not (folder / "train.json").exists():
            folder.mkdir(parents=True, exist_ok=True)
            training.make_data(folder, arguments.samples)
        cfgs = {model: write_config(folder, model, arguments) for model in arguments.models}
        for together in runs(arguments):
            if arguments.deadline_s - time.monotonic() < WORTH_STARTING_S:
                break
            found = side_by_side(together, cfgs, arguments)
            for row in found:
                print(json.dumps({key: value for key, value in row.items() if key != "kernels_ms"}), flush=True)
            result["rows"] = [old for old in result["rows"] if _key(old) not in map(_key, found)] + found
            if arguments.output:
                arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    print(tables(result))


def _key(row: dict[str, Any]) -> tuple[str, str, int]:
    return row["model"], row["stage"], row["gpus"]


def _before(output: Path | None) -> dict[str, Any]:
    if output is not None and output.exists():
        before: dict[str, Any] = json.loads(output.read_text())
        return before
    return {
        "rows": [],
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "transformers", "deepspeed")},
        "nccl": list(torch.cuda.nccl.version()) if torch.cuda.is_available() else None,  # type: ignore[no-untyped-call]
        "cpus": os.cpu_count(),
    }


if __name__ == "__main__":
    main()
