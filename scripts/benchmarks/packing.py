"""How long a plan of a million packed rows takes, how full they are, and what finding a step costs.

    python scripts/benchmarks/packing.py --output docs/benchmarks/results/packing.json

Lengths are log-normal (median 403 tokens, mean about 660), cut at the row's length. `plan` is the whole of
`PackedRows`: the stream of samples, the packing of all windows, and nothing from the cache. `seek` is a fresh plan with
the numbers of rows cached, and the rows of one step in the middle: what resuming costs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from lavis_ds.data.lengths import TokenCounts
from lavis_ds.data.order import SampleOrder
from lavis_ds.data.plan import PackedRows

SAMPLES, WINDOW, ROWS_A_STEP = 1_000_000, 8192, 64


def measure(capacity: int, rounds: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    tokens = np.clip(rng.lognormal(6, 1, SAMPLES), 1, capacity).astype(np.int32)
    counts = TokenCounts([np.stack([tokens, np.zeros_like(tokens)], 1)])
    plans, seeks = [], []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            os.environ["LAVIS_DS_CACHE"] = folder
            started = time.perf_counter()
            plan = PackedRows(SampleOrder([SAMPLES], 42), ROWS_A_STEP, counts, capacity, WINDOW, total=SAMPLES)
            plans.append(time.perf_counter() - started)
            started = time.perf_counter()
            again = PackedRows(SampleOrder([SAMPLES], 42), ROWS_A_STEP, counts, capacity, WINDOW, total=SAMPLES)
            again.rows(plan.num_steps // 2)
            seeks.append(time.perf_counter() - started)
    rows = sum(len(plan.rows(step)) for step in range(plan.num_steps))
    return {
        "capacity": capacity,
        "mean_tokens": float(tokens.mean()),
        "rows": rows,
        "filled": float(tokens.sum() / (rows * capacity)),
        "plan_s": statistics.median(plans),
        "seek_s": statistics.median(seeks),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    result = {
        "samples": SAMPLES,
        "window": WINDOW,
        "results": [measure(capacity, arguments.rounds) for capacity in (4096, 8192)],
        "machine": {"cpus": os.cpu_count(), "processor": platform.processor() or platform.machine()},
        "versions": {"python": platform.python_version(), "numpy": np.__version__},
    }
    text = json.dumps(result, indent=2)
    print(text)
    if arguments.output:
        arguments.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
