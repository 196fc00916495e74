"""How fast experts train: looped, grouped, by Liger's kernels, and beside a dense model of the same active parameters.

    python scripts/benchmarks/moe.py --output docs/benchmarks/results/moe_h200.json
    python scripts/benchmarks/moe.py --tiny            # tries it on a CPU

Layers of Qwen3-VL-30B-A3B's language model (128 experts of which a token visits 8) with random weights in bf16, packed
rows, forward and backward; attention is compiled in every way, and in the dense model and in `whole layers` all of a
layer. Medians after warm-up, timed by events on the GPU. `transformers` is the grouped product that transformers has;
the losses of all ways are compared.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from lavis_ds.batch import SEGMENT_STRIDE
from lavis_ds.models.attention import choose
from lavis_ds.models.layers import compile_layers
from lavis_ds.models.moe.grouped import NAME

SHAPE: dict[str, Any] = {
    "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 128,
    "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "pad_token_id": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20]},
}  # fmt: skip
TINY = {
    **SHAPE, "hidden_size": 64, "num_attention_heads": 4, "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "rope_parameters": {**SHAPE["rope_parameters"], "mrope_section": [4, 2, 2]},
}  # fmt: skip
AUTO: Any = AutoModel  # untyped
WAYS = {
    "dense": None, "looped": "eager", "transformers": "grouped_mm", "grouped": NAME, "grouped, whole layers": NAME,
    "liger": "liger",
}  # fmt: skip


def add_liger() -> None:
    from liger_kernel.ops import LigerFusedMoEFunction

    def experts(self: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        args = (hidden, self.gate_up_proj, self.down_proj, index.int(), weights)
        made: Tensor = LigerFusedMoEFunction.apply(*args)
        return made

    ALL_EXPERTS_FUNCTIONS.register("liger", experts)


def build(way: str, layers: int, shape: dict[str, Any], device: str) -> tuple[Any, Any]:
    torch.manual_seed(0)
    kernel = choose("auto", "attention")
    if way == "dense":
        active = shape["num_experts_per_tok"] * shape["moe_intermediate_size"]
        config = AutoConfig.for_model("qwen3_vl_text", **shape, intermediate_size=active, num_hidden_layers=layers)
    else:
        config = AutoConfig.for_model("qwen3_vl_moe_text", **shape, num_hidden_layers=layers)
    config._attn_implementation = kernel.build_with
    with torch.device(device):
        model: Any = AUTO.from_config(config, dtype=torch.bfloat16 if device == "cuda" else torch.float32)
    kernel = kernel.fitted(model)
    if way != "dense":
        model.set_experts_implementation(WAYS[way])
    if device == "cuda":
        compile_layers(model)
    if way == "grouped, whole layers":
        for layer in model.layers:
            layer.compile()
    return model.train(), kernel


def measure(way: str, arguments: argparse.Namespace, device: str) -> dict[str, Any]:
    torch._dynamo.reset()
    shape = TINY if arguments.tiny else SHAPE
    model, kernel = build(way, arguments.layers, shape, device)
    tokens = arguments.tokens
    segments = (torch.arange(tokens, device=device) // 512 * SEGMENT_STRIDE)[None]
    places = (torch.arange(tokens, device=device) % 512).expand(3, 1, -1)
    generator = torch.Generator().manual_seed(1)
    embeds = torch.randn(1, tokens, shape["hidden_size"], generator=generator).to(device, model.dtype)
    weights = torch.randn(1, tokens, shape["hidden_size"], generator=generator).to(device)
    embeds.requires_grad_()
    options = kernel.options(embeds, segments)

    def step() -> Tensor:
        hidden = model(inputs_embeds=embeds, position_ids=places, use_cache=False, **options).last_hidden_state
        loss = (hidden.float() * weights).mean()
        loss.backward()
        found: Tensor = loss.detach()
        return found

    for _ in range(3):
        loss = step()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = statistics.median(timed(step, device) for _ in range(arguments.repeats))
    return {
        "way": way,
        "step_ms": round(1e3 * seconds, 2),
        "tokens_per_s": round(tokens / seconds),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if device == "cuda" else None,
        "parameters": sum(p.numel() for p in model.parameters()),
        "loss": float(loss),
    }


def timed(step: Any, device: str) -> float:
    if device != "cuda":
        start_s = time.perf_counter()
        step()
        return time.perf_counter() - start_s
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    step()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and importlib.util.find_spec("liger_kernel") is not None:
        add_liger()
    else:
        arguments.ways = [way for way in arguments.ways if way != "liger"]
    if device != "cuda":
        arguments.ways = [way for way in arguments.ways if "whole" not in way]
    result: dict[str, Any] = {
        "rows": [],
        "device": torch.cuda.get_device_name() if device == "cuda" else "CPU",
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "transformers")},
        "layers": arguments.layers,
        "tokens": arguments.tokens,
    }
    for way in arguments.ways:
        result["rows"].append(measure(way, arguments, device))
        print(json.dumps(result["rows"][-1]), flush=True)
        save(result, arguments.output)
        if device == "cuda":
            torch.cuda.empty_cache()
    print(json.dumps(result["ratios"]))
    losses = [row["loss"] for row in result["rows"] if row["way"] != "dense"]
    if max(losses) - min(losses) > 0.02 * max(map(abs, losses)) + 1e-4:
        raise SystemExit(f"the ways do not agree: losses {losses}")


def save(result: dict[str, Any], path: Path | None) -> None:
    ms = {row["way"]: row["step_ms"] for row in result["rows"]}
    pairs = [*((way, "grouped") for way in ("looped", "transformers", "liger")), *((way, "dense") for way in ms)]
    result["ratios"] = {f"{a} / {b}": round(ms[a] / ms[b], 2) for a, b in pairs if a in ms and b in ms and a != b}
    if path:
        path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
