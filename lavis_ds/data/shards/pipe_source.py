"""Shards that a command writes to its standard output: `pipe:aws s3 cp s3://bucket/000.tar -`. Front to back only."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
from typing import BinaryIO, cast

from lavis_ds.data.shards.retry import ReadOptions, ResumingReader, TransientError

_CHUNK_BYTES = 1 << 20
_SHOWN_BYTES = 500


class PipeSource:
    """Runs the command with bash; where it fails it runs again, and what was read before is passed over."""

    def __init__(self, options: ReadOptions) -> None:
        self.options = options

    def open(self, url: str, size: int | None = None, start: int = 0) -> BinaryIO:
        """What the command writes, from `start` on."""
        reader = ResumingReader(lambda position: _output(url, position), url, self.options.retries, size, start)
        return reader.buffered()


def _output(url: str, position: int) -> BinaryIO:
    output = _Output(url.removeprefix("pipe:"))
    while position > 0:
        chunk = output.read(min(_CHUNK_BYTES, position))
        if not chunk:
            output.close()
            raise TransientError(f"the command now writes {position} bytes less than before")
        position -= len(chunk)
    return cast(BinaryIO, output)


class _Output:
    """Output of a running command. Its end is an end only where the command succeeded."""

    def __init__(self, command: str) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed in close)
        self._process = subprocess.Popen(
            ["bash", "-o", "pipefail", "-c", command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,  # so that all of a pipeline can be ended
        )

    def read(self, length: int) -> bytes:
        assert self._process.stdout is not None
        data = self._process.stdout.read(length)
        if len(data) < length and self._process.wait() != 0 and not data:
            raise TransientError(f"the command ended with code {self._process.returncode}: {self._said()}")
        return data

    def _said(self) -> str:
        self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, self._errors.tell() - _SHOWN_BYTES))
        return " ".join(self._errors.read().decode(errors="replace").split())

    def close(self) -> None:
        assert self._process.stdout is not None
        self._process.stdout.close()
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._errors.close()
