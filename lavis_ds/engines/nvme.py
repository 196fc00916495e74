"""Whether this machine can keep what `offload_optimizer` and `offload_param` put on NVMe. No torch, no deepspeed."""

from __future__ import annotations

import ctypes.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lavis_ds.engines.ds_lint import WHERE
from lavis_ds.errors import ConfigError


def check(settings: Mapping[str, Any]) -> None:
    """Raises:
    ConfigError: a folder for it is not there, or the library that DeepSpeed writes through is not installed.
    """
    zero = settings.get("zero_optimization", {})
    blocks = {name: zero.get(name) or {} for name in ("offload_optimizer", "offload_param")}
    on_nvme = {name: block["nvme_path"] for name, block in blocks.items() if block.get("device") == "nvme"}
    for name, path in on_nvme.items():
        if not Path(path).is_dir():
            where = f"{WHERE}.zero_optimization.{name}.nvme_path"
            raise ConfigError("there is no such folder on this machine.", where=where, given=str(path))
    if on_nvme and ctypes.util.find_library("aio") is None:
        raise ConfigError(
            "DeepSpeed reads and writes NVMe through libaio, which is not installed.",
            where=f"{WHERE}.zero_optimization.{next(iter(on_nvme))}.device",
            given="nvme",
            hint="Run `apt-get install libaio-dev`, or use device: cpu.",
        )
