"""Small tar files, and a web server that fails on demand."""

from __future__ import annotations

import io
import re
import tarfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from lavis_ds.data.shards import retry

WriteTar = Callable[[str, Mapping[str, bytes]], str]


@pytest.fixture(autouse=True)
def _own_cache_and_short_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAVIS_DS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(retry, "FIRST_WAIT_S", 0.001)


@pytest.fixture
def write_tar(tmp_path: Path) -> WriteTar:
    """Writes members to a tar below the test's folder and returns its path."""

    def write(name: str, members: Mapping[str, bytes]) -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(path, "w") as archive:
            for member, data in members.items():
                info = tarfile.TarInfo(member)
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
        return str(path)

    return write


class Server:
    """Serves files of a folder.

    Attributes:
        ranges: whether parts of files can be asked for.
        fail_next: answers that will be 503 instead.
        stall_s: seconds before every answer.
        drop_after: bytes of a body after which the connection is dropped; all of it where None.
        requests: path and range of every request.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ranges, self.fail_next, self.stall_s = True, 0, 0.0
        self.drop_after: int | None = None
        self.requests: list[tuple[str, str]] = []
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, self))
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def close(self) -> None:
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()


class _Handler(BaseHTTPRequestHandler):
    def __init__(self, server: Server, *args: object) -> None:
        self.state = server
        super().__init__(*args)  # type: ignore[arg-type]

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        state, wanted = self.state, self.headers.get("Range", "")
        state.requests.append((self.path, wanted))
        time.sleep(state.stall_s)
        path = state.folder / self.path.lstrip("/")
        if state.fail_next:
            state.fail_next -= 1
            return self.send_error(503)
        if not path.is_file():
            return self.send_error(404)
        data = path.read_bytes()
        matched = re.fullmatch(r"bytes=(\d+)-(\d*)", wanted)
        start, end = 0, len(data)
        if state.ranges and matched:
            start, end = int(matched[1]), min(len(data), int(matched[2] or len(data) - 1) + 1)
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(data)}")
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(end - start))
        self.send_header("ETag", f'"{path.stat().st_mtime_ns}"')
        self.end_headers()
        body = data[start:end]
        self.wfile.write(body if state.drop_after is None else body[: state.drop_after])
        self.close_connection = True


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path)
    yield server
    server.close()
