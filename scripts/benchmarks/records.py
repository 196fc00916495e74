"""What a large JSON-lines annotation file costs: time to open, private memory of a worker, growth while reading.

Writes a file of LLaVA items into a temporary folder, measures in fresh processes, prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lavis_ds import __version__, load_dataset
from lavis_ds.data.conversation import Conversation

MIB = 2**20
WARM_UP = 1_000
"""Samples read before the first measurement, so that code and buffers in use from the start count as such."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=1_000_000, help="lines of the file")
    parser.add_argument("--reads", type=int, default=20_000, help="random samples that each worker reads")
    parser.add_argument("--workers", type=int, default=2, help="forked processes that read at the same time")
    parser.add_argument("--measure", choices=["open", "read"], help=argparse.SUPPRESS)
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure == "open":
        print(json.dumps({"seconds": _open(options.file)[1]}))
    elif options.measure == "read":
        print(json.dumps(_workers(options.file, options.workers, options.reads)))
    else:
        print(json.dumps(_all(options), indent=1))


def _all(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LAVIS_DS_CACHE"] = os.path.join(folder, "cache")
        path = Path(folder) / "annotations.jsonl"
        _write(path, options.records)
        return {
            "records": options.records,
            "file_mib": round(path.stat().st_size / MIB, 1),
            "first_open_s": _in_fresh_process("open", path, options)["seconds"],
            "open_s": [_in_fresh_process("open", path, options)["seconds"] for _ in range(3)],
            "reads": options.reads,
            "workers": _in_fresh_process("read", path, options)["workers"],
            "python": platform.python_version(),
            "lavis_ds": __version__,
            "cpus": os.cpu_count(),
        }


def _write(path: Path, count: int) -> None:
    rng = random.Random(0)
    with path.open("w") as file:
        for number in range(count):
            answer = " ".join(
                rng.choices(("a", "grey", "cat", "sits", "beside", "the", "window"), k=rng.randint(20, 120))
            )
            turns = [{"from": "human", "value": "<image>\nWhat is this?"}, {"from": "gpt", "value": answer}]
            file.write(
                json.dumps({"id": f"{number:07d}", "image": f"{number:012d}.jpg", "conversations": turns}) + "\n"
            )


def _in_fresh_process(measure: str, path: Path, options: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, __file__, "--measure", measure, "--file", str(path)]
    command += ["--workers", str(options.workers), "--reads", str(options.reads)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def _open(path: Path) -> tuple[Sequence[Conversation], float]:
    import torch  # noqa: F401 (a training process has it in memory when it starts its workers)

    start = time.perf_counter()
    splits = load_dataset("llava_json", annotations={"train": str(path)}, image_root=str(path.parent))
    samples: Sequence[Conversation] = splits["train"]
    return samples, round(time.perf_counter() - start, 3)


def _workers(path: Path, count: int, reads: int) -> dict[str, Any]:
    samples, _ = _open(path)
    context = multiprocessing.get_context("fork")
    with context.Pool(count, initializer=_hold, initargs=(samples,)) as pool:
        return {"workers": pool.map(_read, [(seed, reads) for seed in range(count)], chunksize=1)}


_held: list[Sequence[Conversation]] = []


def _hold(samples: Sequence[Conversation]) -> None:
    _held.append(samples)


def _read(given: tuple[int, int]) -> dict[str, float]:
    """Reads random samples, and says what this process has for itself before and after."""
    seed, reads = given
    samples, rng = _held[0], random.Random(seed)
    before = _memory_mib()
    for _ in range(WARM_UP):
        samples[rng.randrange(len(samples))]
    warm, start = _memory_mib(), time.perf_counter()
    for _ in range(reads):
        samples[rng.randrange(len(samples))]
    seconds, after = time.perf_counter() - start, _memory_mib()
    return {
        "private_before_mib": before["private"],
        "private_after_mib": after["private"],
        "rss_warm_mib": warm["rss"],
        "rss_after_mib": after["rss"],
        "rss_growth_percent": round(100 * (after["rss"] / warm["rss"] - 1), 2),
        "samples_per_s": round(reads / seconds),
    }


def _memory_mib() -> dict[str, float]:
    fields = {}
    with open("/proc/self/smaps_rollup") as file:
        for line in file:
            name, _, value = line.partition(":")
            if value.strip().endswith("kB"):
                fields[name] = int(value.split()[0]) / 1024
    private = fields["Private_Dirty"] + fields["Private_Clean"]
    return {"private": round(private, 1), "rss": round(fields["Rss"], 1)}


if __name__ == "__main__":
    main()
