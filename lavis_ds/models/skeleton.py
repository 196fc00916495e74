"""A model without its weights: names, shapes, tokens an image and tokenizer of one of any size, in a second or two."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

import torch

from lavis_ds import registry
from lavis_ds.config.schema import ModelConfig

if TYPE_CHECKING:
    from lavis_ds.models.base import Model

_active = ContextVar("without_weights", default=False)


def skeleton(config: ModelConfig) -> Model:
    """The model of these options on the meta device. No file of weights is opened, and none need be there.

    Raises:
        ConfigError: as for the model itself.
        CheckpointError: a config.json or tokenizer is missing.
    """
    with without_weights():
        model: Model = registry.get_model_class(config.arch).from_config(config)
    return model


@contextmanager
def without_weights() -> Iterator[None]:
    """Tensors made inside have shapes only, and parts read no weights."""
    token = _active.set(True)
    try:
        with torch.device("meta"):
            yield
    finally:
        _active.reset(token)


def reads_weights() -> bool:
    """Whether parts built now shall read the weights that their options name. A part that has any asks this first."""
    return not _active.get()
