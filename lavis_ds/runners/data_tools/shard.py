"""`lavis-ds data shard`: a split of any dataset as webdataset shards."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from lavis_ds.config.schema import DatasetConfig, RootConfig
from lavis_ds.data.shards.write import WriteSummary, write_shards
from lavis_ds.errors import ConfigError
from lavis_ds.runners import output
from lavis_ds.runners.data_tools import reading
from lavis_ds.runners.observers.numbers import size_bytes

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_OWN = {"builder", "annotations", "image_root"}
"""Options that say where a dataset lies; all others of `DatasetConfig` hold for its shards as well."""


def shard(
    cfg: str,
    options: Sequence[str],
    *,
    split: str,
    dataset: str | None,
    folder: str,
    max_samples: int,
    max_bytes: str,
    num_processes: int | None,
) -> int:
    """Write the shards, going on where an earlier call was stopped, and print the YAML that uses them.

    Args:
        cfg: the project's YAML file.
        options: overrides of it.
        split: which split.
        dataset: which entry; all that have the split where left out, each in a folder of its own if they are several.
        folder: where the shards go.
        max_samples: most samples of a shard.
        max_bytes: longest shard, such as `500MiB`.
        num_processes: shards written at the same time; one for each CPU where left out.

    Returns:
        The exit code, 0.

    Raises:
        LavisError: the configuration or a sample is wrong, or the folder holds shards of other options or data.
    """
    limit = parse_size(max_bytes, "--max-bytes")
    config = reading.load_config(cfg, options)
    output.require_folder(Path(folder), "--to")
    found = reading.read(config, split, dataset).require_indexed()
    wanted = {name: samples for name, samples in found.splits[split].items() if dataset in (None, name)}
    entries = {}
    for name, samples in wanted.items():
        own = os.path.join(folder, name) if len(wanted) > 1 else folder
        summary = write_shards(
            samples,
            own,
            max_samples=max_samples,
            max_bytes=limit,
            num_processes=num_processes or len(os.sched_getaffinity(0)),
            resume=True,
            progress=True,
        )
        print(f"# {name}: {_describe(summary)}")
        entries[name] = entry(config, name, split, own)
    print(yaml.safe_dump({"datasets": entries}, sort_keys=False, default_flow_style=None), end="")
    return 0


def parse_size(text: str, where: str) -> int:
    """Bytes of `500MiB`, `1GB` or a plain number.

    Raises:
        ConfigError: it is no size.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]?I?B)?", text.strip().upper())
    size = int(float(match[1]) * _UNITS[match[2] or ""]) if match and (match[2] or "") in _UNITS else 0
    if size < 1:
        raise ConfigError("this is no size.", where=where, given=repr(text), expected="such as 500MiB, 1GiB or 1000000")
    return size


def entry(config: RootConfig, name: str, split: str, folder: str) -> dict[str, Any]:
    """The entry of `datasets:` that reads the shards as the dataset itself was read."""
    shards = str(Path(folder).absolute() / "*.tar")
    kept = set(DatasetConfig.model_fields) - _OWN
    options = config.datasets[name].model_dump(mode="json", include=kept, exclude_defaults=True)
    return {"builder": "webdataset", "format": "messages", "annotations": {split: shards}, **options}


def _describe(summary: WriteSummary) -> str:
    kept = f", {summary.num_kept:,} of which were there" if summary.num_kept else ""
    size = size_bytes(summary.num_bytes)
    return f"{summary.num_samples:,} samples, {size}, shards: {len(summary.shards):,}{kept}"
