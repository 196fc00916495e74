"""Adapters of a checkpoint: added to the weights they stand beside, or kept as a PEFT adapter in a folder."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import torch
from peft.tuners.lora.layer import ParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import save_file
from torch import Tensor, nn

from lavis_ds.config.schema import ModelConfig
from lavis_ds.errors import CheckpointError, ConfigError
from lavis_ds.models.adapters import ADAPTER, adapted_layers
from lavis_ds.models.base import Model
from lavis_ds.models.configs import AdaptedConfig
from lavis_ds.runners.export.stored import Stored
from lavis_ds.runners.export.target import Target

FOLDER = "adapter"
"""Where a kept adapter lies in the exported folder."""


def with_parts(config: ModelConfig, **changed: None) -> ModelConfig:
    """The same model, with options such as `lora` or `quantize` of all parts set anew."""
    parts = {name: value for name, value in config if isinstance(value, AdaptedConfig)}
    return config.model_copy(update={name: value.model_copy(update=changed) for name, value in parts.items()})


def is_quantised(config: ModelConfig) -> bool:
    """Whether a part was trained beside weights of 4 bits, which checkpoints do not hold."""
    return any(isinstance(value, AdaptedConfig) and value.quantize is not None for _, value in config)


def merged_tensors(model: Model, tensors: Mapping[str, Stored]) -> dict[str, Stored]:
    """The tensors of the model without adapters: what each has learned is added to its weight when that is read.

    Args:
        model: with its adapters; shapes are enough.
        tensors: the checkpoint's.

    Raises:
        CheckpointError: the checkpoint lacks a tensor of an adapter.
    """
    return _replaced(model, tensors, _merged)


def base_tensors(model: Model, tensors: Mapping[str, Stored]) -> dict[str, Stored]:
    """As `merged_tensors`, but the weights are left as they are beside their adapters."""
    return _replaced(model, tensors, _base)


def save_adapter(model: Model, tensors: Mapping[str, Stored], target: Target, folder: Path, dtype: torch.dtype) -> None:
    """Write the adapters as PEFT does, for the modules of the exported model.

    Args:
        model: with its adapters; shapes are enough.
        tensors: the checkpoint's.
        target: what the model becomes.
        folder: made here.
        dtype: of the tensors.

    Raises:
        ConfigError: they can't be one PEFT adapter.
    """
    names, layers = _names_in(target), dict(_outermost(model))
    if any(isinstance(layer, ParamWrapper) for layer in layers.values()):
        raise _no_single_adapter("adapters of experts (`target_parameters`)")
    config, skeleton = _peft_config({names[name]: layer for name, layer in layers.items()}), target.skeleton()
    peft.inject_adapter_in_model(config, skeleton, ADAPTER)
    state = {
        f"{names[name]}.{key.removeprefix(f'{name}.')}": tensors[key].read().to(dtype).contiguous()
        for name in layers
        for key in tensors
        if key.startswith(f"{name}.") and ".base_layer." not in key.removeprefix(name)
    }
    saved = peft.get_peft_model_state_dict(skeleton, state_dict=state, adapter_name=ADAPTER)
    folder.mkdir()
    named = {f"base_model.model.{key}": tensor for key, tensor in saved.items()}
    save_file(named, folder / "adapter_model.safetensors")
    config.inference_mode = True
    config.save_pretrained(str(folder))


@dataclass(frozen=True)
class _Layer:
    """A layer with its adapters, and where its tensors lie."""

    name: str
    module: Any
    tensors: Mapping[str, Stored]

    def source(self, key: str) -> Stored:
        """The tensor `key` of the layer beside which the adapters stand."""
        module, name = self.module, self.name
        while isinstance(module, BaseTunerLayer):
            module, name = module.base_layer, f"{name}.base_layer"
        return self.tensors[f"{name}.{key}"]


def _replaced(
    model: Model, tensors: Mapping[str, Stored], read: Callable[[_Layer, str], Callable[[], Tensor]]
) -> dict[str, Stored]:
    layers = [_Layer(name, module, tensors) for name, module in _outermost(model)]
    prefixes = tuple(f"{layer.name}." for layer in layers)
    result = {name: tensor for name, tensor in tensors.items() if not name.startswith(prefixes or ("\0",))}
    for layer in layers:
        for key in layer.module.get_base_layer().state_dict():
            try:
                source = layer.source(key)
            except KeyError as error:
                raise CheckpointError(f"the checkpoint has no {error}.", where="weights") from error
            result[f"{layer.name}.{key}"] = Stored(source.shape, source.dtype, read(layer, key))
    return result


def _base(layer: _Layer, key: str) -> Callable[[], Tensor]:
    return layer.source(key).read


def _merged(layer: _Layer, key: str) -> Callable[[], Tensor]:
    def read() -> Tensor:
        """PEFT's own merge, in float32, of this layer alone."""
        module, prefix = copy.deepcopy(layer.module), f"{layer.name}."
        own = {name.removeprefix(prefix): t for name, t in layer.tensors.items() if name.startswith(prefix)}
        module.load_state_dict({name: t.read().float() for name, t in own.items()}, assign=True)
        while isinstance(module, BaseTunerLayer):
            module.merge(safe_merge=True)
            module = module.base_layer
        tensor: Tensor = module.state_dict()[key].detach()
        return tensor

    return read


def _outermost(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Layers with adapters, but none inside another: PEFT wraps a layer again for each of several parameters."""
    last = "\0"
    for name, layer in adapted_layers(model):
        if not name.startswith(f"{last}."):
            last = name
            yield name, layer


def _names_in(target: Target) -> dict[str, str]:
    """Name of a linear layer of ours -> its name in the exported model."""
    return {
        piece.sources[0].removesuffix(".weight"): name.removesuffix(".weight")
        for name, piece in target.pieces.items()
        if len(piece.sources) == 1 and name.endswith(".weight")
    }


def _peft_config(layers: Mapping[str, Any]) -> Any:
    """One configuration of all layers, each with its rank and scale."""
    kinds = {(layer.use_dora[ADAPTER], layer.use_rslora[ADAPTER]) for layer in layers.values()}
    if len(kinds) > 1:
        raise _no_single_adapter("parts with different use_dora or use_rslora")
    ranks = {name: layer.r[ADAPTER] for name, layer in layers.items()}
    alphas = {name: layer.lora_alpha[ADAPTER] for name, layer in layers.items()}
    use_dora, use_rslora = kinds.pop()
    return peft.LoraConfig(
        r=next(iter(ranks.values())),
        lora_alpha=next(iter(alphas.values())),
        rank_pattern=ranks if len(set(ranks.values())) > 1 else {},
        alpha_pattern=alphas if len(set(alphas.values())) > 1 else {},
        target_modules=list(ranks),
        use_dora=use_dora,
        use_rslora=use_rslora,
    )


def _no_single_adapter(given: str) -> ConfigError:
    return ConfigError(
        "these adapters can't be kept as one PEFT adapter.", where="--adapter", given=given, expected="--adapter merge"
    )
