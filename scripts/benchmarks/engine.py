"""What the runner costs over a bare DeepSpeed loop, and how near checkpoints come to the disk's own speed.

    python -m scripts.benchmarks.engine --output docs/benchmarks/results/engine.json
    python -m scripts.benchmarks.engine --small              # a model for a CPU

Steps: the same model, batches and DeepSpeed settings, in a loop of five lines written by hand and in
`scripts/train.py`; each in a process of its own, in turn, several times. Layers are not compiled in either. The loop
has its batches ready in memory; the runner loads, counts, logs and checks.

Checkpoints: `CheckpointWriter` against a plain write of as many bytes to the same disk, flushed both; and what a resume
does, comparing checksums and filling the engine, against only reading the same files, each after the system has
forgotten them. They take turns, and the first place too. Medians and fastest of nine.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
import yaml

from scripts.benchmarks import training

WARM_UP = 5
TURNS = 9
"""Of checkpoints."""
PIECE = 16 * 2**20
TEXT = {**training.TEXT, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 4096,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [12, 10, 10]}}  # fmt: skip
VISION = {**training.VISION, "depth": 2, "hidden_size": 128, "intermediate_size": 512, "num_heads": 2,
          "out_hidden_size": 256, "deepstack_visual_indexes": [0]}  # fmt: skip


WIDE_TEXT = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 6, "num_attention_heads": 16,
             "num_key_value_heads": 8}  # fmt: skip
"""For checkpoints, of which those of the small model are too small to time."""


def write_config(folder: Path, arguments: argparse.Namespace) -> Path:
    arguments.tiny = False
    path = training.write_config(folder, arguments)
    config = yaml.safe_load(path.read_text())
    if arguments.small:
        config["model"]["config"] |= {"text_config": TEXT, "vision_config": VISION}
        config["run"]["precision"] = "fp32"
    config["run"] |= {"compile": False, "deepspeed_config": f"zero{arguments.stage}", "num_workers": 2}
    path.write_text(yaml.safe_dump(config))
    return path


def bare_loop(cfg: str, steps: int) -> list[float]:
    """Seconds of each step of a loop written by hand."""
    import deepspeed

    from lavis_ds import distributed
    from lavis_ds.config.load import load
    from lavis_ds.engines.deepspeed import DeepSpeedEngine  # noqa: F401  (marks operations that would be built)
    from lavis_ds.runners import build, preflight, step_plan
    from lavis_ds.runners.process import prepare

    config = load(cfg).config
    prepare(config.run.log_level)
    distributed.initialize(600)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    checked = preflight.check(config, world_size=1)
    model = build.build_model(config)
    data = build.encoded(config, build.train_datasets(config, checked.splits), build.text_context(model), training=True)
    alone = type("Alone", (), {"data_parallel_size": 1, "data_parallel_rank": 0, "is_sharded": False})()
    plan = step_plan.build(config, data, checked.plan, alone, model.work())
    loader = build.train_loader(config, data, build.collator(model, data), plan, 0, {})
    batches = [group[0] for _, group in zip(range(steps), loader, strict=False)]
    loader.close()
    run = config.run
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": run.grad_clip,
        "bf16": {"enabled": run.precision == "bf16"},
        **json.loads((Path("configs/deepspeed") / f"{run.deepspeed_config}.json").read_text()),
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=run.init_lr, fused=True)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    engine.module.train()
    times = []
    for batch in batches:
        start = time.perf_counter()
        loss = engine(batch.to(engine.device))[0] / batch.target_index.numel()
        engine.backward(loss)
        engine.step()
        float(loss)
        times.append(time.perf_counter() - start)
    return times


def runner_steps(cfg: Path, job: str) -> list[float]:
    command = [sys.executable, "scripts/train.py", "--cfg", str(cfg), "--job-id", job]
    output_of([*command, "--options", "run.save_last=false"])
    lines = (cfg.parent / "output" / job / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["time/step_s"] for line in lines]


def bare_steps(cfg: Path, steps: int) -> list[float]:
    command = [sys.executable, "-m", "scripts.benchmarks.engine", "--bare", str(cfg), "--steps", str(steps)]
    times: list[float] = json.loads(output_of(command).splitlines()[-1])
    return times


def output_of(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return done.stdout


def compare_steps(cfg: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    bare: list[float] = []
    runner: list[float] = []
    for turn in range(arguments.turns):
        bare += bare_steps(cfg, arguments.steps)[WARM_UP:]
        runner += runner_steps(cfg, f"turn_{turn}")[WARM_UP:]
    found = {"bare_s": statistics.median(bare), "runner_s": statistics.median(runner), "steps": len(runner)}
    return {**found, "overhead": found["runner_s"] / found["bare_s"] - 1}


def compare_checkpoints(cfg: Path) -> dict[str, Any]:
    """A run of one step saves, and the same run goes on from it."""
    config = yaml.safe_load(cfg.read_text())
    shape = config["model"]["config"]
    if shape["text_config"] == TEXT:
        shape["text_config"] |= WIDE_TEXT
        shape["vision_config"]["out_hidden_size"] = WIDE_TEXT["hidden_size"]
    cfg.write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "scripts.benchmarks.engine", "--saving", str(cfg)]
    found: dict[str, Any] = json.loads(output_of(command).splitlines()[-1])
    for end in ("", "_fastest"):
        for what in ("write", "read"):
            found[f"{what}_ratio{end}"] = found[f"plain_{what}_s{end}"] / found[f"{what}_s{end}"]
    return found


def saving(cfg: str) -> dict[str, Any]:
    """Seconds to write a checkpoint after one step and to go on from it, and those of plain writes and reads."""
    from lavis_ds.runners import checkpoint, checkpoint_files
    from lavis_ds.runners import train as module

    times: dict[str, list[float]] = defaultdict(list)
    found: dict[str, Any] = {}

    class Timed(module.TrainRunner):
        def _save(self) -> None:
            self.path = checkpoint_files.step_folder(self.job.checkpoints, self.state.step)
            self._write()
            found["bytes"] = sum(file.stat().st_size for file in self._files())
            for turn in range(TURNS):
                for actions in ([self._write, self._write_plainly], [self._read, self._read_plainly]):
                    for action in actions[:: -1 if turn % 2 else 1]:
                        action()
            for name, of_all in times.items():
                found[name] = statistics.median(of_all[-TURNS:])
                found[f"{name}_fastest"] = min(of_all[-TURNS:])

        def _files(self) -> list[Path]:
            return [file for file in self.path.rglob("*") if file.is_file()]

        def _write(self) -> None:
            shutil.rmtree(self.path, ignore_errors=True)
            self.saved_step = -1
            times["write_s"].append(timed(super()._save))

        def _write_plainly(self) -> None:
            folder, piece = self.path.parent / "plain", os.urandom(PIECE)
            shutil.rmtree(folder, ignore_errors=True)  # as `_write` does: a disk treats blocks it knows another way
            folder.mkdir()
            times["plain_write_s"].append(timed(lambda: write_plainly(folder / "file", found["bytes"], piece)))

        def _read(self) -> None:
            forget(self._files())
            verify, load = timed(self._verify), timed(lambda: checkpoint.fill(self.path, self.engine))
            times["verify_s"].append(verify)
            times["load_s"].append(load)
            times["read_s"].append(verify + load)

        def _verify(self) -> None:
            if damaged := checkpoint.damaged(self.path):
                raise SystemExit(f"{damaged} changed since they were written")

        def _read_plainly(self) -> None:
            files = self._files()
            forget(files)
            times["plain_read_s"].append(timed(lambda: read_plainly(*files)))

    from lavis_ds import registry
    from lavis_ds.runners.launch import train

    registry.register_runner("timed")(Timed)
    options = ["run.runner=timed", "run.max_steps=1", "run.save_last=true", "run.observers=[]"]
    train(cfg, options, job_id="saving", resume=None)
    return found


def timed(action: Any) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def write_plainly(path: Path, size: int, piece: bytes) -> None:
    with path.open("wb", buffering=0) as file:
        for start in range(0, size, PIECE):
            file.write(piece[: size - start])
        os.fsync(file.fileno())


def read_plainly(*paths: Path) -> None:
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.read(PIECE):
                continue


def forget(paths: list[Path]) -> None:
    """Let the system drop what it keeps of these files in memory."""
    for path in paths:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="6 M parameters in float32, for a CPU")
    parser.add_argument("--only-checkpoints", action="store_true")
    parser.add_argument("--stage", type=int, default=2, choices=range(4))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--samples", type=int, default=400)
    parser.add_argument("--pack-length", type=int)
    parser.add_argument("--work", type=Path, help="folder on the disk that checkpoints are measured on")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--bare", help=argparse.SUPPRESS)
    parser.add_argument("--saving", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.bare or arguments.saving:
        print(json.dumps(bare_loop(arguments.bare, arguments.steps) if arguments.bare else saving(arguments.saving)))
        return
    arguments.workers = 2
    arguments.pack_length = arguments.pack_length or (2048 if arguments.small else 8192)
    with tempfile.TemporaryDirectory(dir=arguments.work) as name:
        training.make_data(Path(name), arguments.samples)
        cfg = write_config(Path(name), arguments)
        result = {
            **training.machine(),
            "stage": arguments.stage,
            "small": arguments.small,
            **({} if arguments.only_checkpoints else {"steps": compare_steps(cfg, arguments)}),
            "checkpoints": compare_checkpoints(cfg),
        }
    print(json.dumps(result, indent=1))
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
