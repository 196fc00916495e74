"""Long rows on one GPU: tokens a second, peak memory, and the longest row that fits. Qwen3-VL-2B's shape, all trained.

    python -m scripts.benchmarks.long_context --output docs/benchmarks/results/long_context_h200.json
    python -m scripts.benchmarks.long_context --tiny           # tries it on a CPU

A row is one sample, a 448 x 448 picture and a text that fills it, so attention reaches over all of it. Each line is a
run of `scripts/train.py` in a process of its own. Lengths of `--lengths` are tried in every way; then the way that
saves most is given rows twice as long, as long as they fit.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from scripts.benchmarks import training

FULL = ["model.language.gradient_checkpointing=full"]
WAYS = {
    "kept": [],
    "selective": ["model.language.gradient_checkpointing=selective"],
    "recomputed": FULL,
    "recomputed, offloaded": [*FULL, "model.language.offload_activations=true"],
    "recomputed, offloaded, tiled": [*FULL, "model.language.offload_activations=true", "model.language.mlp_tiles=8"],
}
MOST = "recomputed, offloaded, tiled"


def make_documents(folder: Path, length: int, samples: int) -> None:
    """`training.make_data`, with texts that fill a row of `length` tokens."""
    if not (folder / "tokenizer").exists():
        training.make_data(folder, samples)
    items = json.loads((folder / "train.json").read_text())
    words = " ".join(item["conversations"][1]["value"] for item in items).split()[:2000]
    tokenizer: Any = AutoTokenizer.from_pretrained(folder / "tokenizer")
    a_word = len(tokenizer(" ".join(words))["input_ids"]) / len(words)
    for item in items:
        number = int((length - 400) / a_word * 0.97)  # the picture, marks and question; and words differ
        item["conversations"][1]["value"] = " ".join((words * (number // len(words) + 1))[:number])
    (folder / "train.json").write_text(json.dumps(items))


def run(folder: Path, way: str, length: int, arguments: argparse.Namespace) -> dict[str, Any]:
    job = f"{way} {length}"
    training.WAYS[job] = [f"model.max_txt_len={length}", *WAYS[way]]
    row = training.measure(job, training.write_config(folder, arguments), arguments.timeout_s, arguments.logs)
    return {"way": way, "length": length, **{key: value for key, value in row.items() if key != "way"}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--lengths", nargs="+", type=int, default=[32_768, 131_072])
    parser.add_argument("--longest", type=int, default=524_288, help="no longer row is tried; 0: no search")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--timeout-s", type=float, default=280)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--logs", type=Path, help="folder for the runs' output")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    training.WARM_UP = 2
    result: dict[str, Any] = {"rows": [], **training.machine()}

    def measure(folder: Path, way: str, length: int) -> bool:
        arguments.pack_length = length
        make_documents(folder, length, samples=2 * arguments.steps)
        result["rows"].append(run(folder, way, length, arguments))
        print(json.dumps(result["rows"][-1]), flush=True)
        fits: bool = result["rows"][-1]["exit_code"] == 0
        if fits:
            result["longest"] = max(length, result.get("longest", 0))
        if arguments.output:
            arguments.output.write_text(json.dumps(result, indent=1) + "\n")
        return fits

    with tempfile.TemporaryDirectory() as name:
        for length in arguments.lengths:
            for way in arguments.ways:
                measure(Path(name), way, length)
        length = 2 * max(arguments.lengths)
        while length <= arguments.longest and measure(Path(name), MOST, length):
            length *= 2


if __name__ == "__main__":
    main()
