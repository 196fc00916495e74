"""LoRA and its kin inside parts, through PEFT: the part's own weights stay, small matrices beside them train."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import peft
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers.pytorch_utils import Conv1D

from lavis_ds.errors import ConfigError, did_you_mean
from lavis_ds.models.configs import LoraConfig
from lavis_ds.models.parts import Part
from lavis_ds.models.patterns import is_adapter, parameters_of
from lavis_ds.models.quantised import is_quantised

ADAPTER = "default"
"""PEFT's name of the only adapter."""


def add_adapters(part: Part, options: LoraConfig, where: str) -> None:
    """Put adapters into `part`. Of its parameters only they, and those of `also_train`, train from now on.

    At first they change nothing: one of the two matrices is zero.

    Args:
        part: with the weights that adapters shall go beside; DoRA starts from their norms.
        options: of the adapters.
        where: of `options` in the configuration.

    Raises:
        ConfigError: a target names nothing, or nothing that PEFT can adapt; or adapters do not suit the part.
    """
    targets = _targets(part, options, where)
    _check_parameters(part, options.target_parameters, f"{where}.target_parameters")
    config = peft.LoraConfig(
        r=options.r,
        lora_alpha=options.lora_alpha,
        lora_dropout=options.lora_dropout,
        target_modules=targets,
        target_parameters=options.target_parameters or None,
        use_dora=options.use_dora,
        use_rslora=options.use_rslora,
        init_lora_weights=options.init_lora_weights,
    )
    trained = {name for pattern in options.also_train for name in parameters_of(part, pattern, f"{where}.also_train")}
    try:
        peft.inject_adapter_in_model(config, part, ADAPTER)
    except (ValueError, NotImplementedError, TypeError) as error:
        text = " ".join(str(error).split())[:300]
        raise ConfigError(f"PEFT can't add these adapters: {text}.", where=where) from error
    for name, parameter in part.named_parameters():
        if is_adapter(name):
            parameter.data = parameter.data.float()  # PEFT gives them the format of the weights beside them
        if name.replace(".base_layer.", ".") in trained:
            parameter.requires_grad_(True)
    part.adapters_added()


def merge_adapters(model: nn.Module) -> None:
    """Add what adapters have learned to the weights they stand beside, and take them out of the model.

    Raises:
        ConfigError: the weights are quantised, so that they can't be changed without loss.
    """
    for name, layer in reversed(list(adapted_layers(model))):  # one may carry another (two parameters of one module)
        if is_quantised(layer.get_base_layer()):
            raise ConfigError(
                "adapters can't be merged into 4-bit weights.",
                where=name,
                hint="Build the model with `quantize: null` first; adapters go beside any weights.",
            )
        layer.merge(safe_merge=True)
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, layer.get_base_layer())
    for part in model.modules():
        if isinstance(part, Part):
            part.adapters_added()


def adapted_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Name and module of what carries an adapter."""
    for name, module in model.named_modules():
        if isinstance(module, BaseTunerLayer):
            yield name, module


def _targets(part: Part, options: LoraConfig, where: str) -> list[str]:
    """Full names of the modules that get adapters.

    PEFT itself passes silently over a name in a list that is nowhere in the model.
    """
    found = (_named(part, pattern, f"{where}.exclude_modules") for pattern in options.exclude_modules)
    excluded = {name for names in found for name in names}
    if options.target_modules == "all-linear":
        left_out = part.output_layers()
        chosen = [n for n in _linears(part) if n not in excluded and part.get_submodule(n) not in left_out]
        if not chosen and not options.target_parameters:
            raise ConfigError("the part has no linear layer to adapt.", where=where)
        return chosen
    named = (_named(part, pattern, f"{where}.target_modules") for pattern in options.target_modules)
    return [name for name in dict.fromkeys(name for names in named for name in names) if name not in excluded]


def _check_parameters(part: Part, ends: list[str], where: str) -> None:
    names = [name for name, _ in part.named_parameters()]
    for end in ends:
        if not any(f".{name}".endswith(f".{end}") for name in names):
            raise ConfigError(
                "this ends no parameter's name in the part.",
                where=where,
                given=end,
                expected=f"the end of a name such as {names[-1]}",
                hint=did_you_mean(end, names),
            )


def _linears(part: Part) -> list[str]:
    return [name for name, module in part.named_modules() if isinstance(module, (nn.Linear, Conv1D))]


def _named(part: Part, pattern: str, where: str) -> list[str]:
    """Linear layers that `pattern` means: the end of a name, or a regular expression for whole names."""
    linears = _linears(part)
    found = [name for name in linears if f".{name}".endswith(f".{pattern}") or _matches(pattern, name)]
    if not found:
        ends = sorted({name.rpartition(".")[2] for name in linears})
        raise ConfigError(
            "this names no linear layer of the part.",
            where=where,
            given=pattern,
            expected=f"the end of a name ({', '.join(ends[:12])}) or a regular expression for whole names",
            hint=did_you_mean(pattern, ends),
        )
    return found


def _matches(pattern: str, name: str) -> bool:
    try:
        return re.fullmatch(pattern, name) is not None
    except re.error:
        return False
