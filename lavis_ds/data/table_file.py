"""Parquet and Arrow files whose rows are read from disk one at a time."""

from __future__ import annotations

from typing import Any

from lavis_ds.data import cache
from lavis_ds.errors import ConfigError, DataError


class TableFile:
    """The rows of a Parquet or Arrow file, memory-mapped; pictures stay the bytes that they are stored as.

    Args:
        path: a Parquet file is converted once, by `datasets`, to an Arrow file in the cache folder.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._rows = _load_table(path).with_format("arrow")

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        index = range(len(self))[index]
        row: dict[str, Any] = self._rows[index : index + 1].to_pylist()[0]
        return row

    def where(self, index: int) -> str:
        return f"{self.path}: row {index}"


def _load_table(path: str) -> Any:
    try:
        import datasets
        import pyarrow
    except ImportError:
        raise ConfigError(
            "Parquet and Arrow files need the package datasets.",
            where=path,
            hint="Run `pip install 'lavis-ds[parquet]'`, or store the annotations as .jsonl.",
        ) from None
    try:
        if path.lower().endswith(".parquet"):
            return datasets.Dataset.from_parquet(path, cache_dir=str(cache.folder() / "parquet"))
        with open(path, "rb") as file:
            is_random_access = file.read(6) == b"ARROW1"
        if not is_random_access:
            return datasets.Dataset.from_file(path)  # the stream format, which `datasets` itself writes
        table = pyarrow.ipc.open_file(pyarrow.memory_map(path)).read_all()
        return datasets.Dataset(datasets.table.InMemoryTable(table))
    except Exception as error:  # both packages raise whatever they like on damaged files
        raise DataError(f"the file can't be read: {type(error).__name__}: {error}.", where=path) from error
