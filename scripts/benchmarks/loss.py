"""Time and memory of the loss: whole logits, the output layer's chunks, and Liger's fused loss where it is installed.

    python scripts/benchmarks/loss.py --output docs/benchmarks/results/loss.json

One forward and backward pass from hidden states in bf16 to their gradient and the output layer's. Ways alternate;
medians after a warm-up. Needs a GPU for numbers that mean something; `--targets 64 --vocabulary 1000` tries it on a
CPU.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from lavis_ds.models.language.output_layer import OutputLayer
from lavis_ds.models.loss import target_losses

Way = Callable[[nn.Linear, Tensor, Tensor], Tensor]


def whole(head: nn.Linear, hidden: Tensor, labels: Tensor) -> Tensor:
    return target_losses(nn.functional.linear(hidden, head.weight), labels, None).total


def chunked(head: nn.Linear, hidden: Tensor, labels: Tensor) -> Tensor:
    total: Tensor = head(hidden, labels=labels)[0]
    return total


def liger(head: nn.Linear, hidden: Tensor, labels: Tensor) -> Tensor:
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    found = LigerFusedLinearCrossEntropyFunction.apply(hidden, head.weight, labels, None, None, -100, 0.0, 0.0, "sum")
    total: Tensor = found[0] if isinstance(found, tuple) else found
    return total


def measure(way: Way, head: nn.Linear, hidden: Tensor, labels: Tensor) -> tuple[float, float, float]:
    """Milliseconds, GiB above what was there, loss."""
    head.zero_grad(set_to_none=True)
    hidden.grad = None
    if is_cuda := hidden.is_cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if is_cuda else 0
    started = time.perf_counter()
    loss = way(head, hidden, labels)
    torch.autograd.backward(loss)
    if is_cuda:
        torch.cuda.synchronize()
    took = 1e3 * (time.perf_counter() - started)
    return took, (torch.cuda.max_memory_allocated() - before) / 2**30 if is_cuda else 0.0, float(loss.detach())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--chunk-gib", type=float, nargs="+", default=[1.0, 4.0, 16.0])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    head = nn.Linear(arguments.width, arguments.vocabulary, bias=False, device=device, dtype=torch.bfloat16)
    OutputLayer.of(head, 1)
    rows = []
    for targets in arguments.targets:
        hidden = torch.randn(targets, arguments.width, device=device, dtype=torch.bfloat16, requires_grad=True)
        labels = torch.randint(0, arguments.vocabulary, (targets,), device=device)
        ways: dict[str, tuple[Way, float]] = {"whole logits": (whole, 0.0)}
        ways |= {f"chunks of {gib:g} GiB": (chunked, gib) for gib in arguments.chunk_gib}
        if importlib.util.find_spec("liger_kernel") and device == "cuda":
            ways["Liger"] = (liger, 0.0)
        found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in ways}
        for _ in range(arguments.rounds):
            for name, (way, gib) in ways.items():
                head.chunk_bytes = int(gib * 2**30)  # type: ignore[assignment]
                found[name].append(measure(way, head, hidden, labels))
        for name, results in found.items():
            times, peaks, losses = zip(*results[2:], strict=True)
            rows.append(
                {
                    "targets": targets,
                    "way": name,
                    "ms": round(statistics.median(times), 2),
                    "peak_gib": round(max(peaks), 2),
                    "mean_loss": round(losses[-1] / targets, 5),
                }
            )
    packages = ("torch", "liger_kernel")
    result = {
        "rows": rows,
        "width": arguments.width,
        "vocabulary": arguments.vocabulary,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "versions": {name: importlib.metadata.version(name) for name in packages if importlib.util.find_spec(name)},
    }
    print(json.dumps(result, indent=1))
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
