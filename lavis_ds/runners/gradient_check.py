"""In the first step: does gradient reach what is to train? A part that got none would stay as it is for days."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from lavis_ds import distributed
from lavis_ds.errors import ConfigError
from lavis_ds.models.patterns import is_adapter


class GradientCheck:
    """Watches the gradients of parameters from now until `finish`.

    Args:
        trained: all that train, by name.
    """

    def __init__(self, trained: Mapping[str, nn.Parameter]) -> None:
        self._reached = dict.fromkeys(trained, 0)
        self._changed = dict(self._reached)
        self._hooks: list[Any] = [p.register_hook(partial(self._see, name)) for name, p in trained.items()]  # type: ignore[no-untyped-call]

    def finish(self, *, has_pictures: bool) -> list[str]:
        """Call on all ranks after the last backward pass of a step.

        Args:
            has_pictures: whether there is a picture in what this rank has of the step.

        Returns:
            What the user should know, a line each.

        Raises:
            ConfigError: no gradient reaches anything of a part of which something is to train, or an adapter.
        """
        for hook in self._hooks:
            hook.remove()
        counts = [*self._reached.values(), *self._changed.values(), has_pictures]
        *sums, pictures = distributed.sum_over_ranks([float(count) for count in counts])
        names = list(self._reached)
        unreached = {name for name, count in zip(names, sums, strict=False) if not count}
        unchanged = {name for name, count in zip(names, sums[len(names) :], strict=True) if not count}
        _refuse(names, unreached)
        lines = []
        for part, members in _by_part(names).items():
            if missed := [name for name in members if name in unreached]:
                lines.append(
                    f"No gradient reaches {len(missed)} of {len(members)} trainable parameters of {part}, so they stay "
                    f"as they are: {_some(missed)}."
                )
            if pictures and unchanged.issuperset(members):
                lines.append(f"All gradients of {part} are zero in the first step, though it has pictures.")
        return lines

    def _see(self, name: str, gradient: Tensor) -> None:
        self._reached[name] = 1
        self._changed[name] |= int(gradient.any())


def _refuse(names: Iterable[str], unreached: set[str]) -> None:
    for part, members in _by_part(names).items():
        if unreached.issuperset(members):
            raise ConfigError(
                f"no gradient reaches the part {part}, which is to train.",
                where="model",
                given=f"{len(members)} parameters that are not frozen",
                hint="Put it into model.freeze, or see that the model's forward pass uses it and does not detach it.",
            )
    if adapters := [name for name in unreached if is_adapter(name)]:
        raise ConfigError(
            "no gradient reaches some of the adapters: the layers they are in are never called as such.",
            where="model",
            given=_some(sorted(adapters)),
            hint="Name these layers in `exclude_modules` of the part's `lora`.",
        )


def _by_part(names: Iterable[str]) -> dict[str, list[str]]:
    parts: dict[str, list[str]] = {}
    for name in names:
        parts.setdefault(name.split(".")[0], []).append(name)
    return parts


def _some(names: list[str]) -> str:
    return f"{', '.join(names[:3])}{', ...' if names[3:] else ''}"
