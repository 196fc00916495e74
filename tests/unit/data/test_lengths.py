from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lavis_ds.data import cache, lengths
from lavis_ds.data.configs import ImageEvalConfig
from lavis_ds.data.conversation import Conversation, Image, Text, Turn
from lavis_ds.data.dataset import EncodedDataset, Source
from lavis_ds.data.order import SampleKey, SampleOrder
from lavis_ds.data.processors.chat import Chat
from lavis_ds.data.processors.image import ImageEval
from lavis_ds.errors import ConfigError


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAVIS_DS_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def data(picture_folder: Path, chat: Callable[..., Chat], monkeypatch: pytest.MonkeyPatch) -> EncodedDataset:
    """Two datasets, more samples than are counted at a time; sample 3 of the first is without an answer."""
    monkeypatch.setattr(lengths, "_CHUNK", 4)
    conversations = []
    for number in range(10):
        question = Turn("user", (Image(str(picture_folder / f"{number}.png")), Text("what? " * number)))
        answer = (Turn("assistant", (Text("noise"),)),) if number != 3 else ()
        conversations.append(Conversation(str(number), (question, *answer)))
    processor = ImageEval(ImageEvalConfig(image_size=4))
    return EncodedDataset(
        [Source("a", conversations, processor, chat()), Source("b", conversations[:2], processor, chat())], seed=3
    )


@pytest.mark.parametrize("num_processes", [1, 2])
def test_counts_are_those_of_the_samples(data: EncodedDataset, num_processes: int) -> None:
    counts = lengths.count(data, [None, None], num_processes=num_processes)
    for dataset, size in enumerate(data.sizes):
        for index in range(size):
            sample = data[SampleKey(dataset, index, 0, 0)] if (dataset, index) != (0, 3) else None
            expected = (len(sample.input_ids), len(sample.images)) if sample else (0, 0)
            assert counts.at(SampleKey(dataset, index, 0, 0)) == expected
    keys = SampleOrder(data.sizes, seed=1).keys(0, 12)
    assert counts.tokens(keys).tolist() == [counts.at(keys[i])[0] for i in range(12)]


def test_known_counts_are_read_and_unknown_ones_made(data: EncodedDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int]] = []
    count = EncodedDataset.count
    monkeypatch.setattr(EncodedDataset, "count", lambda self, *at: (calls.append(at), count(self, *at))[1])
    first = lengths.count(data, ["a1", None], num_processes=1)
    assert len(calls) == 12
    second = lengths.count(data, ["a1", None], num_processes=1)
    assert len(calls) == 14, "the first dataset is known, the second has no key"
    assert first.digest == second.digest
    lengths.count(data, ["a2", None], num_processes=1)
    assert len(calls) == 26, "another key is another entry"


def test_progress_is_told(data: EncodedDataset) -> None:
    told: list[tuple[int, int]] = []
    lengths.count(data, [None, None], num_processes=1, progress=lambda done, total: told.append((done, total)))
    assert told == [(4, 10), (8, 10), (10, 10), (2, 2)]


class TestCache:
    def test_an_entry_is_all_or_nothing(self) -> None:
        def fails() -> Any:
            raise RuntimeError("half way")

        with pytest.raises(RuntimeError, match="half way"):
            cache.arrays("kind", "key", fails)
        made = cache.arrays("kind", "key", lambda: {"x": np.arange(3), "y": np.ones(2)})
        assert {name: array.tolist() for name, array in made.items()} == {"x": [0, 1, 2], "y": [1, 1]}
        again = cache.arrays("kind", "key", fails)
        assert again["x"].tolist() == [0, 1, 2]
        assert isinstance(again["x"], np.memmap)

    def test_processes_that_ask_at_once_make_it_once(self, tmp_path: Path) -> None:
        import multiprocessing

        log = tmp_path / "log"

        def make() -> dict[str, Any]:
            with log.open("a") as file:
                file.write(f"{os.getpid()}\n")
            import time

            time.sleep(0.5)
            return {"x": np.arange(5)}

        processes = [
            multiprocessing.get_context("fork").Process(target=cache.arrays, args=("kind", "key", make))
            for _ in range(4)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(60)
        assert [process.exitcode for process in processes] == [0] * 4
        assert len(log.read_text().splitlines()) == 1

    def test_stamps_tell_changed_files(self, tmp_path: Path) -> None:
        path = tmp_path / "a.json"
        path.write_text("[1]")
        before = cache.fingerprint(cache.stamp([str(path)]))
        assert cache.fingerprint(cache.stamp([str(path)])) == before
        path.write_text("[1, 2]")
        assert cache.fingerprint(cache.stamp([str(path)])) != before

    def test_a_folder_that_cannot_be_written_is_named(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("LAVIS_DS_CACHE", str(tmp_path / "file"))
        with pytest.raises(ConfigError, match="LAVIS_DS_CACHE"):
            cache.arrays("kind", "key", dict)
