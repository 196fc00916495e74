"""Optimizers, places for their states, and ZeRO++: what is refused before anything is built, and why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lavis_ds.config.decode import decode
from lavis_ds.config.schema import RunConfig
from lavis_ds.engines import nvme
from lavis_ds.engines.ds_config import BatchPlan, derive
from lavis_ds.errors import ConfigError

OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
MUON, EIGHT_BIT, ROUNDED = {"name": "muon"}, {"name": "adamw_8bit"}, {"stochastic_rounding": True}


def derived(
    zero: dict[str, Any] | None = None, optimizer: dict[str, Any] | None = None, ranks: int = 4, **settings: Any
) -> dict[str, Any]:
    config = {"zero_optimization": zero, **settings} if zero is not None else settings
    keys = {"max_steps": 1, "batch_size_train": 2, "optimizer": optimizer or {}, "deepspeed_config": config}
    return derive(decode(RunConfig, keys), BatchPlan(2 * ranks, 2, 1), data_parallel_size=ranks)


@pytest.mark.parametrize(
    ("zero", "key", "text"),
    [
        ({"stage": 2, "zenflow": {"topk_ratio": 0.1}, **OFFLOAD}, "zenflow", "some steps late"),
        (
            {"stage": 3, "offload_optimizer": {"device": "cpu", "super_offload": True}},
            "super_offload",
            "another process",
        ),
        ({"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}, "ratio", "a second optimizer"),
        ({"stage": 3, "zero_quantized_nontrainable_weights": True}, "nontrainable", "quantize: nf4"),
        ({"stage": 2, "zero_hpz_partition_size": 2}, "zero_hpz_partition_size", "needs stage 3; the stage is 2"),
        ({"stage": 2, "zero_quantized_weights": True}, "zero_quantized_weights", "needs stage 3"),
        ({"zero_quantized_gradients": True}, "zero_quantized_gradients", "needs stage 3"),
        ({"stage": 3, "zero_hpz_partition_size": 3}, "zero_hpz_partition_size", "3 with 4 ranks"),
        ({"stage": 3, "zero_hpz_partition_size": 8}, "zero_hpz_partition_size", "8 with 4 ranks"),
        ({"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": "/x"}}, "device", "nvme needs stage 3"),
        (
            {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/x"}},
            "offload_optimizer.device",
            "with wrong gradients",
        ),
    ],
)
def test_what_a_run_could_not_go_on_with_is_refused(zero: dict[str, Any], key: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        derived(zero)
    assert key in str(caught.value).split(": ")[0]
    assert text in str(caught.value)


@pytest.mark.parametrize(
    "zero",
    [
        {"stage": 3, "zero_hpz_partition_size": 2, "zero_quantized_weights": True, "zero_quantized_gradients": True},
        {"stage": 3, "zero_hpz_partition_size": 1},
        {"stage": 2, "zero_hpz_partition_size": 1, "zero_quantized_weights": False},
        {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/x"}},
        {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 1.0}},
    ],
)
def test_what_it_can_go_on_with_is_passed_on(zero: dict[str, Any]) -> None:
    assert derived(zero)["zero_optimization"] == zero


@pytest.mark.parametrize(("optimizer", "name"), [(MUON, "muon"), (EIGHT_BIT, "adamw_8bit"), (ROUNDED, "stochastic")])
def test_states_on_the_host_have_one_optimizer(optimizer: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigError, match=rf"^run\.optimizer: .*CPU AdamW, which has no {name}"):
        derived({"stage": 2, **OFFLOAD}, optimizer)
    derived({"stage": 2, "offload_optimizer": {"device": "none"}}, optimizer)
    derived({"stage": 2, **OFFLOAD})


def test_stochastic_rounding_takes_masters_and_moments_in_bf16() -> None:
    both = {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    assert derived({"stage": 1}, ROUNDED)["bf16"] == {"enabled": True, **both}
    assert derived({"stage": 0}, ROUNDED)["bf16"] == {"enabled": True}
    assert derived({"stage": 1})["bf16"] == {"enabled": True}
    with pytest.raises(ConfigError, match=r"run\.deepspeed_config\.bf16: .*Remove them"):
        derived({"stage": 1}, ROUNDED, bf16={"bf16_optimizer_states": False})


@pytest.mark.parametrize("optimizer", [MUON, ROUNDED])
def test_gradients_in_a_type_of_their_own(optimizer: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"grad_accum_dtype: .*in the type of the weights"):
        derived({"stage": 1}, optimizer, data_types={"grad_accum_dtype": "fp32"})


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"precision": "fp32"}, "precision fp32 instead of bf16"),
        ({"engine": "torch"}, "engine torch instead of deepspeed"),
        ({"optimizer": {"stochastic_rounding": True, "name": "muon"}}, "optimizer.name muon instead of adamw"),
    ],
)
def test_stochastic_rounding_is_for_adamw_in_bf16(keys: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=f"stochastic_rounding does not go with {text}"):
        decode(RunConfig, {"max_steps": 1, "batch_size_train": 1, "optimizer": ROUNDED, **keys})


@pytest.mark.parametrize("block", ["offload_optimizer", "offload_param"])
def test_nvme_needs_a_folder_and_libaio(block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def settings(path: Path) -> dict[str, Any]:
        return {"zero_optimization": {"stage": 3, block: {"device": "nvme", "nvme_path": str(path)}}}

    monkeypatch.setattr("ctypes.util.find_library", {"aio": "libaio.so.1"}.get)
    nvme.check(settings(tmp_path))
    with pytest.raises(ConfigError, match=rf"{block}\.nvme_path: there is no such folder .*not_there"):
        nvme.check(settings(tmp_path / "not_there"))
    monkeypatch.setattr("ctypes.util.find_library", lambda name: None)
    with pytest.raises(ConfigError, match=rf"{block}\.device: .*libaio, which is not installed.*apt-get"):
        nvme.check(settings(tmp_path))
    nvme.check({"zero_optimization": {"stage": 3, block: {"device": "cpu"}}})
