from __future__ import annotations

from typing import Any

import pytest

from lavis_ds.config.schema import DataConfig, DatasetConfig
from lavis_ds.data.mixture import quotas
from lavis_ds.errors import ConfigError

SIZES = {"a": 900, "b": 100}


def of(a: dict[str, Any], b: dict[str, Any], sizes: dict[str, int] = SIZES, **data: Any) -> list[int]:
    datasets = {name: DatasetConfig(builder="x", **options) for name, options in (("a", a), ("b", b))}
    return list(quotas(datasets, sizes, DataConfig(**data)))


def test_sizes_unless_something_is_said() -> None:
    assert of({}, {}) == [900, 100]


def test_passes_an_epoch() -> None:
    assert of({"repeat": 0.5}, {"repeat": 3}) == [450, 300]


def test_weights_share_out_the_same_total() -> None:
    assert of({"weight": 1}, {"weight": 3}) == [250, 750]


def test_temperature_moves_towards_equal_shares() -> None:
    assert of({}, {}, temperature=1) == [900, 100]
    assert of({}, {}, temperature=2) == [750, 250]  # 30 to 10
    assert of({}, {}, temperature=1e9) == [500, 500]


def test_a_dataset_that_has_samples_is_never_left_out_and_an_empty_one_always() -> None:
    assert of({"weight": 1e9}, {"weight": 1}) == [1000, 1]
    assert of({}, {}, {"a": 900, "b": 0}, temperature=4) == [900, 0]


def test_a_weight_for_some_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"some datasets have a `weight`.*no weight: b"):
        of({"weight": 1}, {})


def test_weights_and_temperature_are_refused() -> None:
    with pytest.raises(ConfigError, match="keep one"):
        of({"weight": 1}, {"weight": 2}, temperature=2)
