from __future__ import annotations

import multiprocessing
import time
from pathlib import Path

import pytest

from lavis_ds.data.shards import retry
from lavis_ds.data.shards.index import index_shards
from lavis_ds.data.shards.retry import ReadOptions, TransientError, retrying
from lavis_ds.data.shards.source import open_stream, source_of
from lavis_ds.errors import ConfigError, DataError

MEMBERS = {f"{number:02d}.bin": bytes([number]) * 3000 for number in range(20)}


@pytest.fixture
def shard(write_tar) -> Path:
    return Path(write_tar("a.tar", MEMBERS))


def check(url: str, options: ReadOptions | None = None) -> None:
    index = index_shards(url, options=options)
    assert [index.read(index[i], ["bin"])["bin"] for i in range(20)] == list(MEMBERS.values())


def test_a_web_server_with_ranges_gives_members_one_by_one(server, shard) -> None:
    check(f"{server.url}/a.tar")
    assert not (Path(shard.parent) / "cache/shards").exists()
    assert all(wanted for _, wanted in server.requests)
    server.requests.clear()
    check(f"{server.url}/a.tar")  # indexed before: asked for the version, then 20 members of 3,000 bytes
    assert len(server.requests) == 21


def test_the_index_beside_a_remote_shard_is_used(server, shard) -> None:
    index_shards(str(shard), sidecars=True)
    check(f"{server.url}/a.tar")
    assert ("/a.tar", "bytes=0-") not in server.requests


def test_failures_are_tried_again(server, shard) -> None:
    server.fail_next = 3
    check(f"{server.url}/a.tar", ReadOptions(retries=3))
    server.fail_next = 4
    with pytest.raises(DataError, match=r"http://.*/a\.tar: the shard can't be read, after 4 tries: HTTP 503"):
        source_of(server.url, ReadOptions(retries=3)).stat(f"{server.url}/a.tar")


def test_a_dropped_connection_goes_on_where_it_broke(server, shard) -> None:
    server.drop_after = 1000
    check(f"{server.url}/a.tar", ReadOptions(retries=1))
    starts = [wanted for _, wanted in server.requests if wanted.startswith("bytes=1000-")]
    assert starts
    with open_stream(f"{server.url}/a.tar", ReadOptions(retries=1)) as stream:
        assert stream.read() == shard.read_bytes()


def test_a_connection_that_gives_nothing_ends(server, shard) -> None:
    index = index_shards(f"{server.url}/a.tar", options=ReadOptions(retries=2))
    server.drop_after = 0
    server.requests.clear()
    with pytest.raises(DataError, match="after 3 tries"):
        index.read(index[0], ["bin"])
    assert len(server.requests) == 3


def test_a_server_that_does_not_answer_is_left(server, shard) -> None:
    server.stall_s = 0.3
    with pytest.raises(DataError, match=r"after 2 tries: .*timed out"):
        index_shards(f"{server.url}/a.tar", options=ReadOptions(retries=1, timeout_s=0.05))


def test_what_is_refused_is_not_tried_again(server) -> None:
    with pytest.raises(DataError, match=r"/b\.tar: the server refuses: HTTP 404"):
        index_shards(f"{server.url}/b.tar")
    assert len(server.requests) == 1


def test_a_server_without_ranges_sends_a_shard_once(server, shard) -> None:
    server.ranges = False
    check(f"{server.url}/a.tar")
    server.requests.clear()
    check(f"{server.url}/a.tar")
    assert len(server.requests) == 1  # the version only


def test_several_processes_fetch_a_shard_once(server, shard) -> None:
    server.ranges = False
    url = f"{server.url}/a.tar"
    stat = source_of(url, ReadOptions()).stat(url)
    server.requests.clear()
    with multiprocessing.get_context("fork").Pool(4) as pool:
        parts = pool.starmap(_read, [(url, stat, start) for start in range(0, 8000, 1000)], chunksize=1)
    assert b"".join(parts) == shard.read_bytes()[:8000]
    assert len(server.requests) == 1


def _read(url, stat, start) -> bytes:
    return source_of(url, ReadOptions()).read(stat, start, 1000)


def test_a_shard_that_is_fetched_whole_survives_drops(server, shard) -> None:
    server.ranges = False
    url = f"{server.url}/a.tar"
    source = source_of(url, ReadOptions(retries=2))
    stat = source.stat(url)
    server.drop_after = 5000  # each try gets no further, since it must start at the front
    with pytest.raises(DataError, match="after 3 tries"):
        source.read(stat, 0, 10)
    cache = shard.parent / "cache/shards"
    assert not list(cache.glob("*.tar"))
    assert not list(cache.glob("*unfinished*"))
    server.drop_after = None
    assert source.read(stat, 0, 10) == shard.read_bytes()[:10]


def test_copies_are_bounded(server, write_tar, tmp_path) -> None:
    server.ranges = False
    sizes = [Path(write_tar(f"{number}.tar", {"a.bin": bytes(20_000)})).stat().st_size for number in range(3)]
    options = ReadOptions(cache_bytes=2 * sizes[0] + 100)
    for number in range(3):
        url = f"{server.url}/{number}.tar"
        source = source_of(url, options)
        source.read(source.stat(url), 0, 10)
        time.sleep(0.01)
    assert len(list((tmp_path / "cache/shards").glob("*.tar"))) == 2
    with pytest.raises(ConfigError, match=r"do not fit into the cache.*cache_gib"):
        index_shards(f"{server.url}/{{0..2}}.tar", options=options)


def test_a_shard_that_changed_meanwhile_is_named(server, shard, write_tar) -> None:
    index = index_shards(f"{server.url}/a.tar")
    write_tar("a.tar", {"0.bin": bytes(100_000)})
    with pytest.raises(DataError, match=r"a\.tar: the shard changed while it was in use"):
        index.read(index[0], ["bin"])


def test_fsspec(shard) -> None:
    import fsspec

    fsspec.filesystem("memory").pipe("/store/a.tar", shard.read_bytes())
    check("memory://store/a.tar")
    with pytest.raises(DataError, match=r"memory://store/b\.tar: the shard can't be opened \(FileNotFoundError\)"):
        index_shards("memory://store/b.tar")
    with pytest.raises(ConfigError, match="nosuch"):
        index_shards("nosuch://a.tar")


def test_fsspec_failures_are_tried_again(shard, monkeypatch) -> None:
    from fsspec.implementations.memory import MemoryFileSystem

    MemoryFileSystem().pipe("/store/c.tar", shard.read_bytes())
    url = "memory://store/c.tar"
    index = index_shards(url, options=ReadOptions(retries=2))
    calls: list[int] = []
    cat = MemoryFileSystem.cat_file

    def failing(self, path, start=None, end=None, **kwargs):
        calls.append(1)
        if len(calls) % 3:
            raise TimeoutError("slow")
        return cat(self, path, start, end, **kwargs)

    monkeypatch.setattr(MemoryFileSystem, "cat_file", failing)
    assert index.read(index[1], ["bin"]) == {"bin": MEMBERS["01.bin"]}
    with pytest.raises(DataError, match="after 2 tries: TimeoutError: slow"):
        source_of(url, ReadOptions(retries=1)).read(index.shards[0], 0, 10)


def test_pipes(shard, tmp_path) -> None:
    with open_stream(f"pipe:cat {shard}", ReadOptions()) as stream:
        assert stream.read() == shard.read_bytes()
    counter = tmp_path / "runs"
    command = f"echo x >> {counter}; head -c 5000 {shard} && test $(wc -l < {counter}) -ge 3 && tail -c +5001 {shard}"
    with open_stream(f"pipe:{command}", ReadOptions(retries=2)) as stream:
        assert stream.read() == shard.read_bytes()
    assert counter.read_text() == "x\n" * 3
    with (
        open_stream("pipe:echo no access >&2; false | cat", ReadOptions(retries=1)) as stream,
        pytest.raises(DataError, match=r"pipe:.* after 2 tries: the command ended with code 1: no access"),
    ):
        stream.read()


def test_a_pipe_that_is_left_early_ends_its_command(tmp_path) -> None:
    stream = open_stream("pipe:yes", ReadOptions())
    assert stream.read(2) == b"y\n"
    started = time.monotonic()
    stream.close()
    assert time.monotonic() - started < 5


def test_waits_grow_and_are_random(monkeypatch) -> None:
    monkeypatch.setattr(retry, "FIRST_WAIT_S", 1.0)
    waits: list[float] = []
    monkeypatch.setattr(retry.time, "sleep", waits.append)

    def fail(wait_s: float | None = None) -> None:
        raise TransientError("no", wait_s)

    for _ in range(2):
        with pytest.raises(DataError, match="after 4 tries: no"):
            retrying(fail, "url", 3)
    assert all(0.5 * 2**n <= wait <= 2**n for n, wait in enumerate(waits[:3]))
    assert waits[:3] != waits[3:]
    waits.clear()
    with pytest.raises(DataError):
        retrying(lambda: fail(17.0), "url", 1)
    assert waits == [17.0]
