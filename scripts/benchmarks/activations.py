"""What recomputation and 8-bit products cost and save: tokens a second and peak memory of whole training runs.

    python -m scripts.benchmarks.activations --output docs/benchmarks/results/activations_h200.json
    python -m scripts.benchmarks.activations --tiny            # tries it on a CPU

Model, data and rows are those of `training.py` (Qwen3-VL-2B's shape, everything trained, packed to 8,192 tokens).
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import tempfile
from pathlib import Path
from typing import Any

import torch

from scripts.benchmarks import training

WAYS: dict[str, dict[str, str]] = {
    "kept": {},
    "every_2": {"gradient_checkpointing": "every_2"},
    "selective": {"gradient_checkpointing": "selective"},
    "full": {"gradient_checkpointing": "full"},
    "full, offloaded": {"gradient_checkpointing": "full", "offload_activations": "true"},
    "fp8 tensorwise": {"fp8": "tensorwise"},
    "fp8 rowwise": {"fp8": "rowwise"},
    "fp8 tensorwise, full": {"gradient_checkpointing": "full", "fp8": "tensorwise"},
}


def main() -> None:
    parser = training.parser_of(__doc__, WAYS)
    parser.add_argument("--parts", nargs="+", choices=["vision", "language"], default=["vision", "language"])
    arguments = parser.parse_args()
    if not torch.cuda.is_available() or importlib.util.find_spec("torchao") is None:
        arguments.ways = [way for way in arguments.ways if "fp8" not in way]
    shared = {"parts": arguments.parts, "pack_length": arguments.pack_length}
    result: dict[str, Any] = {"rows": [], **training.machine(), **shared}
    with tempfile.TemporaryDirectory() as name:
        training.make_data(Path(name), arguments.samples)
        cfg = training.write_config(Path(name), arguments)
        for way in arguments.ways:
            options = [f"model.{part}.{key}={value}" for part in arguments.parts for key, value in WAYS[way].items()]
            training.WAYS[way] = options
            result["rows"].append(training.measure(way, cfg, arguments.timeout_s, arguments.logs))
            print(json.dumps(result["rows"][-1]), flush=True)
            if arguments.output:
                arguments.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
