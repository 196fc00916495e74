from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path

import pytest

from lavis_ds.data.shards.retry import ReadOptions
from lavis_ds.data.shards.stream import ShardStream
from lavis_ds.errors import CheckpointError, DataError

SIZES = [5, 1, 12, 7, 3, 9, 2]


@pytest.fixture
def urls(write_tar) -> list[str]:
    """Shards of uneven length; samples are named by shard and number."""
    return [
        write_tar(f"{shard}.tar", {f"{shard}-{n}.txt": str(n).encode() for n in range(size)})
        for shard, size in enumerate(SIZES)
    ]


EVERYTHING = Counter(f"{shard}-{n}" for shard, size in enumerate(SIZES) for n in range(size))


def keys(stream: ShardStream) -> list[str]:
    return [sample.key for sample in stream]


@pytest.mark.parametrize("num_shards", [1, 4, 7])
@pytest.mark.parametrize(("world_size", "num_workers"), [(1, 1), (3, 2), (4, 4)])
@pytest.mark.parametrize("shuffle_buffer", [0, 4, 1000])
def test_every_sample_comes_once_an_epoch(urls, num_shards, world_size, num_workers, shuffle_buffer) -> None:
    streams = [
        ShardStream(
            urls[:num_shards],
            seed=1,
            rank=r,
            world_size=world_size,
            worker=w,
            num_workers=num_workers,
            shuffle_buffer=shuffle_buffer,
        )
        for r in range(world_size)
        for w in range(num_workers)
    ]
    expected = Counter({key: 1 for key in EVERYTHING if int(key[0]) < num_shards})
    for _ in range(2):
        assert Counter(key for stream in streams for key in keys(stream)) == expected


def test_fewer_shards_than_lanes_are_shared_evenly(urls) -> None:
    lengths = [len(keys(ShardStream(urls[2:3], seed=0, rank=r, world_size=4))) for r in range(4)]
    assert lengths == [3, 3, 3, 3]


def test_epochs_and_seeds_differ_and_no_shuffle_keeps_the_order(urls) -> None:
    stream = ShardStream(urls, seed=1, shuffle_buffer=5)
    first, second = keys(stream), keys(stream)
    assert stream.epoch == 2
    assert first != second
    assert keys(ShardStream(urls, seed=1, shuffle_buffer=5)) == first
    assert keys(ShardStream(urls, seed=2, shuffle_buffer=5)) != first
    assert keys(ShardStream(urls, seed=1, shuffle_buffer=0)) == list(EVERYTHING)


@pytest.mark.parametrize(("rank", "world_size"), [(0, 1), (2, 3), (9, 10)])
@pytest.mark.parametrize("shuffle_buffer", [0, 4, 1000])
def test_going_on_from_any_place_gives_exactly_what_was_left(urls, rank, world_size, shuffle_buffer) -> None:
    def start() -> ShardStream:
        return ShardStream(urls, seed=3, rank=rank, world_size=world_size, shuffle_buffer=shuffle_buffer)

    stream = start()
    epochs = [keys(stream), keys(stream)]
    total = [*epochs[0], *epochs[1]]
    for seen in range(len(total) + 1):
        stream = start()
        for _ in range(seen):
            while next(stream, None) is None:
                pass
        resumed = start()
        resumed.load_state_dict(json.loads(json.dumps(stream.state_dict())))
        left = keys(resumed)
        if seen < len(epochs[0]) or (seen == len(epochs[0]) and not left):
            left += keys(resumed)
        assert left == total[seen:]
        assert resumed.epoch == 2


def test_a_state_of_another_deal_is_refused(urls) -> None:
    state = ShardStream(urls, seed=3).state_dict()
    for other in (
        ShardStream(urls, seed=4),
        ShardStream(urls[1:], seed=3),
        ShardStream(urls, seed=3, world_size=2),
        ShardStream(urls, seed=3, num_workers=2),
        ShardStream(urls, seed=3, shuffle_buffer=7),
    ):
        with pytest.raises(CheckpointError, match="data index"):
            other.load_state_dict(state)


def test_going_on_reads_no_shard_before_the_place(urls) -> None:
    stream = ShardStream(urls, seed=3, shuffle_buffer=4)
    for _ in range(30):
        next(stream)
    shards = [sample.shard for sample in ShardStream(urls, seed=3, shuffle_buffer=1)]
    done = shards[0]
    Path(urls[done]).unlink()
    resumed = ShardStream(urls, seed=3, shuffle_buffer=4)
    resumed.load_state_dict(stream.state_dict())
    assert len(keys(resumed)) == sum(SIZES) - 30


def _take_all(stream: ShardStream, got: list[str]) -> None:
    for sample in stream:
        got.append(sample.key)


def test_an_error_neither_loses_samples_nor_ends_the_epoch(urls, write_tar) -> None:
    stream = ShardStream(urls, seed=3, shuffle_buffer=4)
    expected = keys(ShardStream(urls, seed=3, shuffle_buffer=4))
    last = int(expected[-1][0])
    whole = Path(urls[last]).read_bytes()
    Path(urls[last]).write_bytes(whole[:1000])
    got: list[str] = []
    with pytest.raises(DataError, match=rf"{last}\.tar: the shard is no readable tar"):
        _take_all(stream, got)
    with pytest.raises(DataError):
        next(stream)
    Path(urls[last]).write_bytes(whole)
    assert got + keys(stream) == expected


def test_commands_and_compressed_tars(urls, tmp_path) -> None:
    (tmp_path / "c.tar.gz").write_bytes(gzip.compress(Path(urls[2]).read_bytes()))
    stream = ShardStream([f"pipe:cat {urls[0]}", str(tmp_path / "c.tar.gz")], seed=0, shuffle_buffer=0)
    samples = list(stream)
    assert [sample.key for sample in samples] == [f"0-{n}" for n in range(5)] + [f"2-{n}" for n in range(12)]
    assert samples[7].members == {"txt": b"2"}
    (tmp_path / "c.tar.gz").write_bytes(gzip.compress(Path(urls[2]).read_bytes())[:150])
    with pytest.raises(DataError, match=r"c\.tar\.gz"):
        list(ShardStream([str(tmp_path / "c.tar.gz")], seed=0))
    with pytest.raises(DataError, match="code 3"):
        list(ShardStream(["pipe:exit 3"], seed=0, options=ReadOptions(retries=0)))


def test_shards_on_a_web_server_that_drops_connections(server, urls) -> None:
    server.drop_after = 1500
    remote = [f"{server.url}/{n}.tar" for n in range(len(SIZES))]
    assert Counter(keys(ShardStream(remote, seed=1))) == EVERYTHING


def test_wrong_places_are_refused(urls) -> None:
    with pytest.raises(ValueError, match="rank 2 of 2"):
        ShardStream(urls, seed=0, rank=2, world_size=2)
