"""A dense language model of transformers becomes a sparse one, in a class of transformers that has experts.

Every expert starts as a copy of the layer's feed-forward part. The weights of the chosen experts add up to 1, so the
model's outputs are those of the dense one, whatever the routers, which are new, choose.

Sources: Sparse Upcycling (https://arxiv.org/abs/2212.05055), MoE-LLaVA (https://arxiv.org/abs/2401.15947).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from lavis_ds.errors import ConfigError
from lavis_ds.models import hub
from lavis_ds.models.moe.configs import MoEConfig

SPARSE = {"qwen2": "qwen2_moe", "qwen3": "qwen3_moe", "llama": "mixtral", "mistral": "mixtral"}
"""model_type of a dense model -> that of the sparse one whose attention, norms and feed-forward layers are the same."""

_UNUSED_WIDTH = 16
"""Of the expert that every token of a qwen2_moe visits. It is made of zeros, so it adds nothing, and its gradients are
exactly zero, so it stays that way. A width of 0 would do, but ZeRO-3 can't shard tensors without elements."""

_WHERE = "model.moe.num_experts"


def upcycle(dense: Any, options: MoEConfig) -> Any:
    """The sparse model of `options`, float32. It takes the dense one's tensors; `dense` is of no use afterwards.

    Raises:
        ConfigError: there is no sparse class for this model, or it can't express this one.
    """
    config = sparse_config(dense.config, options)
    if any(not parameter.is_floating_point() for parameter in dense.parameters()):
        raise ConfigError("quantised weights can't be copied into experts.", where=_WHERE)
    with torch.device("meta"):
        sparse: Any = hub.make_model(
            AutoModelForCausalLM, config, attn_implementation=dense.config._attn_implementation
        )
    tensors, wanted = dense.state_dict(), sparse.state_dict()
    left = [name for name in tensors if name not in wanted and ".mlp." not in name]
    if left:
        raise ConfigError(f"a {config.model_type} has no place for {left[0]}.", where=_WHERE)
    for name, tensor in wanted.items():  # one after the other, so that only one is whole where models are in shares
        _put(sparse, name, nn.Parameter(_tensor(name, tensor, tensors, config)))
    sparse.tie_weights()
    for name, buffer in dense.named_buffers():  # rotary frequencies and the like, which are never saved
        _put(sparse, name, buffer)
    sparse.generation_config = dense.generation_config
    return sparse.requires_grad_(True)


def sparse_config(dense: Any, options: MoEConfig) -> Any:
    """The sparse model's configuration: the dense one's values, and the experts.

    Raises:
        ConfigError: the model's family has no sparse class here, or that has no such layers.
    """
    target = SPARSE.get(dense.model_type)
    if target is None:
        raise ConfigError(
            f"a {dense.model_type} can't be made sparse.", where=_WHERE, expected=f"one of {', '.join(SPARSE)}"
        )
    biased = [key for key in ("attention_bias", "mlp_bias") if getattr(dense, key, False)]
    if target == "mixtral" and (options.every > 1 or biased):
        raise ConfigError(
            f"a {target}, which a {dense.model_type} becomes, has experts in every layer and no biases.",
            where="model.moe.every" if options.every > 1 else _WHERE,
            given=options.every if options.every > 1 else f"{biased[0]}: true",
        )
    config_class = CONFIG_MAPPING[target]
    known = {field.name for field in dataclasses.fields(config_class)}
    known |= {"head_dim"}  # read by every one of them, declared by some
    kept = {k: v for k, v in dense.to_dict().items() if k in known - {"model_type", "architectures", "dtype"}}
    return config_class(**{**kept, **_experts(target, dense, options)})


def _experts(target: str, dense: Any, options: MoEConfig) -> dict[str, Any]:
    if target == "mixtral":
        window = getattr(dense, "sliding_window", None)
        return {
            "num_local_experts": options.num_experts,
            "num_experts_per_tok": options.top_k,
            "sliding_window": window,
        }
    common = {
        "num_experts": options.num_experts,
        "num_experts_per_tok": options.top_k,
        "moe_intermediate_size": dense.intermediate_size,
        "norm_topk_prob": True,  # else the copies' outputs would be scaled by less than 1
        "decoder_sparse_step": options.every,
        "mlp_only_layers": [],
    }
    return common | ({"shared_expert_intermediate_size": _UNUSED_WIDTH} if target == "qwen2_moe" else {})


def _tensor(name: str, wanted: Tensor, dense: Mapping[str, Tensor], config: Any) -> Tensor:
    """The tensor of the sparse model that is called `name`, shaped like `wanted`."""
    if name in dense:
        return dense[name]
    layer = name.partition(".mlp.")[0] + ".mlp"
    device = dense[f"{layer}.down_proj.weight"].device
    if name == f"{layer}.experts.gate_up_proj":
        one = torch.cat([dense[f"{layer}.gate_proj.weight"], dense[f"{layer}.up_proj.weight"]])
        return one.expand(wanted.shape).clone()
    if name == f"{layer}.experts.down_proj":
        return dense[f"{layer}.down_proj.weight"].expand(wanted.shape).clone()
    if name == f"{layer}.gate.weight":
        return torch.empty(wanted.shape, device=device).normal_(std=config.initializer_range)
    if ".shared_expert" in name:
        return torch.zeros(wanted.shape, device=device)
    raise ConfigError(f"a {config.model_type} has {name}, for which a dense model has nothing.", where=_WHERE)


def _put(model: nn.Module, name: str, tensor: Tensor) -> None:
    owner, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(owner), leaf, tensor)
