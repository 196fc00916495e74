"""How many samples each dataset gives to an epoch of the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from lavis_ds.config.schema import DataConfig, DatasetConfig
from lavis_ds.errors import ConfigError


def quotas(datasets: Mapping[str, DatasetConfig], sizes: Mapping[str, int], data: DataConfig) -> Sequence[int]:
    """Samples that each dataset gives to an epoch, in the order of `sizes`; at least one of each that has any.

    Without `weight` and `data.temperature`, size times `repeat`. With either, the same total is shared out: in
    proportion to the weights, or to (size * repeat) ** (1 / temperature).

    Raises:
        ConfigError: only some datasets have a weight, or there are weights and a temperature.
    """
    weights = [datasets[name].weight for name in sizes]
    own = np.array([size * datasets[name].repeat for name, size in sizes.items()])
    if any(weight is not None for weight in weights):
        shares = np.array(_checked(list(sizes), weights, data))
    elif data.temperature is not None:
        shares = np.where(own > 0, own ** (1 / data.temperature), 0.0)
    else:
        shares = own
    counts = shares * (own.sum() / shares.sum()) if shares.sum() else shares
    return [max(1, round(count)) if size else 0 for count, size in zip(counts, sizes.values(), strict=True)]


def _checked(names: Sequence[str], weights: Sequence[float | None], data: DataConfig) -> list[float]:
    missing = [name for name, weight in zip(names, weights, strict=True) if weight is None]
    if missing:
        raise ConfigError(
            "some datasets have a `weight`, others have none.",
            where="datasets",
            given=f"no weight: {', '.join(missing)}",
            expected="a weight for every dataset, or for none",
        )
    if data.temperature is not None:
        raise ConfigError("`weight` and `data.temperature` both set the mixture; keep one.", where="data.temperature")
    return [float(weight) for weight in weights if weight is not None]
