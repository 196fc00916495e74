"""Time and memory of an optimizer's step over the parameters of a language model, by default 1.7 billion.

    python scripts/benchmarks/optimizers.py --output docs/benchmarks/results/optimizers.json

Shapes are those of Qwen3-1.7B, gradients are random, nothing else runs. `parameters` is the step below ZeRO, over each
parameter; `flat` is that of ZeRO-1 and 2, over flat partitions. Medians of the steps after a warm-up. Needs a GPU for
numbers that mean something; `--layers 1 --width 64 --vocabulary 100` tries it on a CPU.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import importlib.util
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lavis_ds.config.schema import RunConfig
from lavis_ds.optim import optimizers
from lavis_ds.optim.master_adamw import MasterAdamW
from lavis_ds.optim.muon import Muon, Piece
from lavis_ds.optim.states import moments, scales

OPTIONS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "adamw, bf16 with masters": {},
    "adamw_8bit": {"name": "adamw_8bit"},
    "muon": {"name": "muon"},
    "stochastic rounding": {"stochastic_rounding": True},
}
MASTERS = "adamw, bf16 with masters"
GIB = 2**30


def shapes(layers: int, width: int, vocabulary: int) -> dict[str, list[tuple[int, ...]]]:
    """Matrices of hidden layers, and the rest."""
    inner = 3 * width
    layer: list[tuple[int, ...]] = [(width, width), (width // 2, width), (width // 2, width), (width, width)]
    layer += [(inner, width), (inner, width), (width, inner)]
    vectors: list[tuple[int, ...]] = [(width,)] * (2 * layers + 1)
    return {"hidden": layer * layers, "rest": [(vocabulary, width), *vectors]}


def tensor(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> nn.Parameter:
    parameter = nn.Parameter(torch.randn(shape, device=device).mul_(0.02).to(dtype))
    parameter.grad = torch.randn(shape, device=device).mul_(1e-3).to(dtype)
    return parameter


def build(
    name: str, layout: str, arguments: argparse.Namespace, device: str
) -> tuple[torch.optim.Optimizer, list[nn.Parameter]]:
    """The optimizer, and what it updates."""
    dtype = torch.bfloat16 if name == "stochastic rounding" else torch.float32
    run = RunConfig.model_validate({"max_steps": 1, "batch_size_train": 1, "optimizer": OPTIONS[name]})
    groups, flats = list[dict[str, Any]](), dict[Tensor, list[Piece]]()
    for kind, found in shapes(arguments.layers, arguments.width, arguments.vocabulary).items():
        uses_muon = kind == "hidden" and name == "muon"
        if layout == "flat":
            sizes = [torch.Size(shape) for shape in found]
            params = [tensor((sum(size.numel() for size in sizes),), dtype, device)]
            offsets = [sum(size.numel() for size in sizes[:index]) for index in range(len(sizes))]
            if uses_muon:
                pieces = zip(sizes, offsets, strict=True)
                flats[params[0]] = [Piece(size, 0, offset, size.numel(), is_shared=False) for size, offset in pieces]
        else:
            params = [tensor(shape, dtype, device) for shape in found]
        groups.append({"params": params, "weight_decay": 0.1, "uses_muon": uses_muon})
    updated = [p for group in groups for p in group["params"]]
    if name == MASTERS:
        masters = MasterAdamW(groups, run)
        masters.keep_masters(torch.bfloat16)
        for p in updated:
            p.grad = None
            p.grad = torch.randn(p.shape, device=device).mul_(1e-3).bfloat16()
        return masters, updated
    optimizer = optimizers.build(groups, run)
    if isinstance(optimizer, Muon):
        optimizer.flats = flats
    return optimizer, updated


def held_bytes(optimizer: torch.optim.Optimizer, updated: list[nn.Parameter]) -> int:
    """Of weights, masters and moments."""
    masters = [master for group in optimizer.param_groups for master in group["params"]]
    states = [
        value for state in optimizer.state.values() for value in (*moments(state).values(), *scales(state).values())
    ]
    return sum({value.data_ptr(): value.nbytes for value in [*updated, *masters, *states]}.values())


def measure(name: str, layout: str, arguments: argparse.Namespace, device: str) -> dict[str, Any]:
    is_cuda = device == "cuda"
    optimizer, updated = build(name, layout, arguments, device)
    numel = sum(p.numel() for p in updated)
    times, peak = [], 0
    for _ in range(arguments.steps + 2):
        if is_cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() if is_cuda else 0
        started = time.perf_counter()
        optimizer.step()
        if is_cuda:
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - started))
        peak = torch.cuda.max_memory_allocated() - before if is_cuda else 0
    held = held_bytes(optimizer, updated)
    return {
        "optimizer": name,
        "layout": layout,
        "parameters": numel,
        "ms": round(statistics.median(times[2:]), 2),
        "held_gib": round(held / GIB, 2),
        "held_bytes_a_parameter": round(held / numel, 2),
        "gradients_gib": round(sum(p.grad.nbytes for p in updated if p.grad is not None) / GIB, 2),
        "peak_of_a_step_gib": round(peak / GIB, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    names = [name for name in OPTIONS if name != "adamw_8bit" or importlib.util.find_spec("bitsandbytes")]
    rows = []
    for name in names:
        for layout in ("parameters", "flat") if name != MASTERS else ("parameters",):
            rows.append(measure(name, layout, arguments, device))
            print(json.dumps(rows[-1]), flush=True)
            gc.collect()
            if device == "cuda":
                torch.cuda.empty_cache()
    packages = ("torch", "bitsandbytes")
    result = {
        "rows": rows,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "versions": {name: importlib.metadata.version(name) for name in packages if importlib.util.find_spec(name)},
    }
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")
        print(f"written to {arguments.output}")


if __name__ == "__main__":
    main()
