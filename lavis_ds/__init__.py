"""Train vision-language models with DeepSpeed: registries, YAML, and one runner from one GPU to hundreds.

`import lavis_ds` loads neither torch nor transformers; parts are imported when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lavis_ds import builtin as _builtin  # declares the built-in parts
from lavis_ds import registry

if TYPE_CHECKING:
    from lavis_ds.api import (
        dataset_zoo,
        load_dataset,
        load_model,
        load_model_and_preprocess,
        load_preprocess,
        model_zoo,
    )

__version__ = "0.1.0"

__all__ = [
    "__version__",
    "dataset_zoo",
    "load_dataset",
    "load_model",
    "load_model_and_preprocess",
    "load_preprocess",
    "model_zoo",
    "registry",
]

_builtin.declare()


def __getattr__(name: str) -> Any:
    if name in __all__:
        from lavis_ds import api

        return getattr(api, name)
    raise AttributeError(f"module 'lavis_ds' has no attribute {name!r}")
