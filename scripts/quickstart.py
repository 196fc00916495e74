"""Train a small vision-language model on this machine, evaluate it, and show what it says about a few pictures.

`make quickstart` calls this. Every step is a command that can be typed by hand; each is printed before it runs.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROJECT = ROOT / "projects" / "quickstart"
JOB = "demo"
# Nothing has to be sharded on one GPU, where the plain PyTorch engine leaves less to do between kernels.
ONE_GPU = [
    "run.engine=torch",
    "run.precision=bf16",
    "run.global_batch_size=32",
    "run.init_lr=5.0e-4",
    "run.num_workers=6",
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-gpus", type=int, help="processes; without it one for each GPU, or two on a CPU")
    parser.add_argument(
        "--options", nargs="*", default=[], metavar="KEY=VALUE", help="overrides, such as run.max_epoch=1"
    )
    arguments = parser.parse_args()
    os.chdir(ROOT)

    run([sys.executable, "projects/quickstart/prepare.py"])
    folder = ROOT / "output" / "quickstart" / JOB
    options = ["--cfg", "projects/quickstart/train.yaml", "--job-id", JOB, "--resume", "auto"]
    gpus = available_gpus()
    processes = arguments.num_gpus or gpus
    overrides = [*(ONE_GPU if gpus and processes == 1 else []), *arguments.options]
    if overrides:
        options += ["--options", *overrides]
    run([*launcher(processes), "scripts/train.py", *options])
    show(folder)
    return 0


def launcher(num_gpus: int) -> list[str]:
    """A process for each GPU. Without a GPU two processes: on two cores they are faster than one with two threads."""
    processes = num_gpus or min(2, os.cpu_count() or 1)
    if processes <= 1:
        return [sys.executable]
    return [str(Path(sys.executable).with_name("deepspeed")), "--num_gpus", str(processes)]


def available_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def run(command: list[str]) -> None:
    """Run a step; leave with its exit code where it fails."""
    print(
        "\n$", shlex.join(str(Path(part).relative_to(ROOT)) if part.startswith(str(ROOT)) else part for part in command)
    )
    sys.stdout.flush()
    code = subprocess.run(command, check=False).returncode
    if code:
        sys.exit(code)


def show(folder: Path) -> None:
    """Print the scores beside their baselines, a few answers, and where the report is."""
    path = max((folder / "eval").glob("test_step_*.json"))
    metrics = json.loads(path.read_text())["metrics"]
    print(f"\n{'held-out test questions':<26}{'model':>10}{'language only':>16}{'majority':>12}")
    for key in sorted(k for k in metrics if k.split("/")[0] == "accuracy"):
        baselines = [metrics[f"baseline/{name}/{key}"] for name in ("language_only", "majority")]
        label = key.partition("/")[2] or "all"
        print(f"{label:<26}{metrics[key]:>10.1%}{baselines[0]:>16.1%}{baselines[1]:>12.1%}")
    predictions = [json.loads(line) for line in path.with_suffix(".jsonl").read_text().splitlines()]
    print("\nWhat the model says about a few pictures:")
    for record in predictions[:: max(1, len(predictions) // 8)][:8]:
        mark = "right" if record["correct"] else f"wrong, it is {record['answer']}"
        print(f"  {Path(record['images'][0]).name:>9}  {record['question']:<40} {record['prediction']} ({mark})")
    print(f"\nReport: {folder / 'report.html'}")


if __name__ == "__main__":
    sys.exit(main())
