"""How fast a decoder trains on packed rows through each attention kernel that is there, and that they agree.

    python scripts/benchmarks/attention.py --output docs/benchmarks/results/attention_h200.json

Layers of Qwen3-1.7B's shape with random weights in bf16, one row, forward and backward. `packed` is a row of samples
of log-normal length (median 376 tokens, at most 2,048); `independent` has a prefix of 200 tokens and five questions in
each sample; `one sample` is a plainly causal row. `batch` is what a batch costs once (boundaries or mask), `layer` a
whole decoder layer, `attention` the kernel alone. Medians after warm-up, timed by events on the GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lavis_ds.batch import PADDING_SEGMENT, SEGMENT_STRIDE
from lavis_ds.models.attention import Attention, choose
from lavis_ds.models.attention_kernels import missing

KERNELS = ["sdpa", "flex", "varlen", "flash_attention_2", "flash_attention_3", "flash_attention_4"]
SHAPE: dict[str, Any] = {
    "hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 16, "num_key_value_heads": 8,
    "head_dim": 128, "vocab_size": 32, "pad_token_id": None, "max_position_embeddings": 40960,
}  # fmt: skip


def packed(length: int, rng: np.random.Generator) -> list[tuple[int, int]]:
    lengths = np.clip(rng.lognormal(np.log(376), 0.8, length), 16, 2048).astype(int)
    return [(number * SEGMENT_STRIDE, int(count)) for number, count in enumerate(lengths)]


def independent(length: int, rng: np.random.Generator) -> list[tuple[int, int]]:
    stretches = []
    for sample in range(length // 200):
        stretches.append((sample * SEGMENT_STRIDE, 200))
        stretches += [(sample * SEGMENT_STRIDE + n, int(rng.integers(20, 80))) for n in range(1, 6)]
    return stretches


def segment_ids(stretches: list[tuple[int, int]], length: int) -> Tensor:
    """(1, length); samples that do not fit whole are left out, the rest is padding."""
    ids: list[int] = []
    for segment, count in stretches:
        if len(ids) + count > length:
            break
        ids += [segment] * count
    return torch.tensor([ids + [PADDING_SEGMENT] * (length - len(ids))], device="cuda")


def positions(ids_1T: Tensor) -> Tensor:
    place_1T = torch.arange(ids_1T.shape[1], device=ids_1T.device)[None]
    starts_1T = nn.functional.pad(ids_1T[:, 1:] != ids_1T[:, :-1], (1, 0), value=True)
    return place_1T - (place_1T * starts_1T).cummax(1).values


def median_ms(step: Callable[[], Any], warm_up: int, repeats: int) -> float:
    for _ in range(warm_up):
        step()
    times: list[float] = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        step()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def decoder(kernel: str, layers: int) -> tuple[Any, Attention]:
    torch.manual_seed(0)
    chosen = choose(kernel, "--kernels")
    config = AutoConfig.for_model("qwen3", **SHAPE, num_hidden_layers=layers)
    with torch.device("cuda"):
        model: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, attn_implementation=chosen.build_with, dtype=torch.bfloat16
        )
    return model.train(), chosen.fitted(model)


def measure(kernel: str, ids_1T: Tensor | None, length: int, args: argparse.Namespace) -> dict[str, Any]:
    """Times, memory, and what came out, to compare with other kernels."""
    model, chosen = decoder(kernel, args.layers)
    embeds = torch.randn(1, length, SHAPE["hidden_size"], device="cuda", dtype=torch.bfloat16)
    embeds.requires_grad_()
    place = torch.arange(length, device="cuda")[None] if ids_1T is None else positions(ids_1T)

    options = chosen.options(embeds, ids_1T)

    def step() -> Tensor:
        hidden: Tensor = model.model(inputs_embeds=embeds, position_ids=place, use_cache=False, **options)[0]
        hidden.sin().sum().backward()  # type: ignore[no-untyped-call]
        return hidden

    total = median_ms(step, args.warm_up, args.repeats)
    alone = median_ms(attention_alone(model, options, length), args.warm_up, args.repeats)
    batch = median_ms(lambda: chosen.options(embeds, ids_1T), args.warm_up, args.repeats)
    embeds.grad = None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    hidden = step()
    peak = torch.cuda.max_memory_allocated() - before
    real = slice(None) if ids_1T is None else ids_1T[0] != PADDING_SEGMENT
    gradient: Any = embeds.grad
    return {
        "batch_ms": batch, "layer_ms": total / args.layers, "attention_ms": alone, "peak_gib": peak / 2**30,
        "out": hidden[0, real].detach().float(), "gradient": gradient[0, real].float(),
    }  # fmt: skip


def attention_alone(model: Any, options: dict[str, Any], length: int) -> Callable[[], Any]:
    """Forward and backward pass of one layer's attention without its linear layers."""
    heads, key_heads, size = (SHAPE[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    tensors = [
        torch.randn(1, n, length, size, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for n in (heads, key_heads, key_heads)
    ]
    function = ALL_ATTENTION_FUNCTIONS[model.config._attn_implementation]
    gradient = torch.randn(1, length, heads, size, device="cuda", dtype=torch.bfloat16)

    def step() -> Any:
        out = function(model.model.layers[0].self_attn, *tensors, **options)[0]
        return torch.autograd.grad(out, tensors, gradient)

    return step


def compare(rows: dict[str, dict[str, Any]]) -> None:
    """Differences from sdpa in place of the tensors, and speed against it."""
    reference = {name: rows["sdpa"][name] for name in ("out", "gradient", "layer_ms", "attention_ms")}
    for row in rows.values():
        for name in ("out", "gradient"):
            row[f"{name}_error"] = float((row.pop(name) - reference[name]).norm() / reference[name].norm())
        for name in ("layer", "attention"):
            row[f"{name}_speed"] = reference[f"{name}_ms"] / row[f"{name}_ms"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", nargs="+", default=KERNELS, choices=KERNELS)
    parser.add_argument("--length", type=int, default=8192, help="tokens of the row")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    kinds = {
        "packed": segment_ids(packed(args.length, np.random.default_rng(0)), args.length),
        "independent": segment_ids(independent(args.length, np.random.default_rng(0)), args.length),
        "one sample": None,
    }
    reasons = {kernel: missing(kernel) for kernel in args.kernels}
    result: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "transformers": transformers.__version__,
        "length": args.length, "layers": args.layers, "repeats": args.repeats, "shape": SHAPE,
        "missing": {kernel: reason for kernel, reason in reasons.items() if reason}, "rows": {},
    }  # fmt: skip
    for kind, ids_1T in kinds.items():
        rows: dict[str, dict[str, Any]] = {}
        for kernel in (kernel for kernel, reason in reasons.items() if reason is None):
            torch.cuda.empty_cache()
            rows[kernel] = measure(kernel, ids_1T, args.length, args)
        compare(rows)
        segments = 1 if ids_1T is None else len(set(ids_1T[0].tolist()) - {PADDING_SEGMENT})
        result["rows"][kind] = {"segments": segments, "kernels": rows}
        for kernel, row in rows.items():
            print(f"{kind:12} {kernel:18}", *(f"{name} {value:.4g}" for name, value in row.items()))
    if args.output:
        args.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
