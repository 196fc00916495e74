"""Which parameters a name in the configuration means: a part, a module, or a pattern over parameter names."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

from torch import nn

from lavis_ds.errors import ConfigError, did_you_mean


def matching(pattern: str, names: Iterable[str]) -> list[str]:
    """Those of `names` that `pattern` means: `vision` all below that module, `language.*.layers.0.*` as in a shell."""
    return [name for name in names if fnmatchcase(name, pattern) or name.startswith(f"{pattern}.")]


def parameters_of(model: nn.Module, pattern: str, where: str) -> list[str]:
    """Names of the parameters that `pattern` means, in the model's order.

    Raises:
        ConfigError: there are none; the closest names are given.
    """
    names = [name for name, _ in model.named_parameters()]
    found = matching(pattern, names)
    if not found:
        modules = [name for name, module in model.named_modules() if name and any(True for _ in module.parameters())]
        raise ConfigError(
            "this matches no part, module or parameter of the model.",
            where=where,
            given=pattern,
            expected=f"one of {', '.join(dict.fromkeys(n.split('.')[0] for n in names))}, or a pattern like {names[0]}",
            hint=did_you_mean(pattern, [*modules, *names]),
        )
    return found


def is_adapter(name: str) -> bool:
    """Whether a parameter, by its name, is a low-rank adapter's (PEFT's names)."""
    return ".lora_" in name
