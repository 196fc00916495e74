"""Whether a result can be written, found out before the work that makes it. Needs no torch."""

from __future__ import annotations

import tempfile
from pathlib import Path

from lavis_ds.errors import ConfigError


def require_file(path: Path, where: str) -> None:
    """Prove that the file can be written, and make its folder. What is in it stays.

    Args:
        path: the file.
        where: what the user named it by.

    Raises:
        ConfigError: it can't.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        existed = path.exists()
        path.open("ab").close()
        if not existed:
            path.unlink()
    except OSError as error:
        raise ConfigError(f"the result can't be written ({error}).", where=where, given=str(path)) from error


def require_folder(path: Path, where: str) -> None:
    """Prove that files can be written into the folder, and make it.

    Raises:
        ConfigError: they can't.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        raise ConfigError(f"the result can't be written ({error}).", where=where, given=str(path)) from error
