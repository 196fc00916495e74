from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lavis_ds.data.configs import ImageEvalConfig, ImageTrainConfig
from lavis_ds.data.conversation import Conversation, Image, Text, Turn
from lavis_ds.data.dataset import EncodedDataset, Source
from lavis_ds.data.order import SampleKey
from lavis_ds.data.processors.chat import Chat
from lavis_ds.data.processors.image import ImageEval, ImageTrain
from lavis_ds.errors import SampleError

MakeChat = Callable[..., Chat]


def about(path: Path, number: int = 0) -> Conversation:
    turns = (Turn("user", (Image(str(path)), Text("what?"))), Turn("assistant", (Text("noise"),)))
    return Conversation(f"train/{number}", turns, {"answer": "noise"})


def pictures(folder: Path) -> list[Conversation]:
    return [about(folder / f"{number}.png", number) for number in range(10)]


def train_source(folder: Path, chat: Chat, name: str = "noise") -> Source:
    return Source(name, pictures(folder), ImageTrain(ImageTrainConfig(image_size=4, min_scale=0.2)), chat)


def test_samples_of_several_datasets_carry_their_names(picture_folder: Path, chat: MakeChat) -> None:
    text = Conversation("x", (Turn("user", (Text("hi"),)), Turn("assistant", (Text("hello"),))))
    dataset = EncodedDataset([train_source(picture_folder, chat()), Source("text", [text], None, chat())], seed=1)
    assert dataset.sizes == (10, 1)
    assert len(dataset) == 11
    first, second = dataset[SampleKey(0, 3, 0, 7)], dataset[SampleKey(1, 0, 0, 8)]
    assert [(s.dataset, s.position) for s in (first, second)] == [(0, 7), (1, 8)]
    assert (first.id, second.id) == ("noise/train/3", "text/x")
    assert first.images.shape == (1, 3, 4, 4)
    assert len(second.images) == 0


def test_augmentation_follows_seed_epoch_and_sample_only(picture_folder: Path, chat: MakeChat) -> None:
    def image(seed: int, *key: int, position: int = 0) -> list[Any]:
        dataset = EncodedDataset([train_source(picture_folder, chat())] * 2, seed=seed)
        dataset[SampleKey(0, 9, 9, 1)]  # what was drawn before does not matter
        return dataset[SampleKey(*key, position)].images.tolist()

    reference = image(1, 0, 3, 5)
    assert image(1, 0, 3, 5) == image(1, 0, 3, 5, position=99) == reference
    assert all(other != reference for other in (image(2, 0, 3, 5), image(1, 1, 3, 5), image(1, 0, 3, 6)))


def test_prompts_end_before_the_answer_and_say_what_was_asked(picture_folder: Path, chat: MakeChat) -> None:
    source = Source("noise", pictures(picture_folder), ImageEval(ImageEvalConfig(image_size=4)), chat())
    prompt = EncodedDataset([source], seed=1, as_prompts=True)[SampleKey(0, 2, 0, 0)]
    labelled = EncodedDataset([source], seed=1)[SampleKey(0, 2, 0, 0)]
    assert prompt.input_ids.tolist() == labelled.input_ids[: len(prompt.input_ids)].tolist()
    assert torch.equal(prompt.images, labelled.images)
    assert prompt.references == {"answer": "noise", "question": "what?", "images": [str(picture_folder / "2.png")]}


def test_counts_are_those_of_the_samples_without_reading_pixels(
    picture_folder: Path, chat: MakeChat, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = Conversation("x", (Turn("user", (Text("hi"),)), Turn("assistant", (Text("hello"),))))
    two = Conversation("y", (Turn("user", about(picture_folder / "1.png").images * 2), *text.turns[1:]))
    source = Source("d", [*pictures(picture_folder), text, two], ImageEval(ImageEvalConfig(image_size=4)), chat())
    dataset = EncodedDataset([source], seed=1)
    samples = [dataset[SampleKey(0, index, 0, 0)] for index in range(12)]
    monkeypatch.setattr("PIL.Image.Image.load", None)
    assert [dataset.count(0, index) for index in range(12)] == [(len(s.input_ids), len(s.images)) for s in samples]


class TestErrors:
    def failure(self, source: Source) -> SampleError:
        with pytest.raises(SampleError) as caught:
            EncodedDataset([source], seed=1)[SampleKey(0, 0, 0, 0)]
        return caught.value

    def test_a_missing_picture_names_sample_and_file(self, tmp_path: Path, chat: MakeChat) -> None:
        source = Source("d", [about(tmp_path / "gone.png")], ImageEval(ImageEvalConfig(image_size=4)), chat())
        text = str(self.failure(source))
        assert text.startswith(f"d/train/0 ({tmp_path / 'gone.png'}): there is no such image file.")
        assert "Check `image_root`" in text

    def test_a_broken_picture_names_sample_and_file(self, tmp_path: Path, chat: MakeChat) -> None:
        (tmp_path / "a.png").write_bytes(b"\x89PNG\r\n\x1a\nnothing")
        source = Source("d", [about(tmp_path / "a.png")], ImageEval(ImageEvalConfig(image_size=4)), chat())
        failure = self.failure(source)
        assert str(failure).startswith(f"d/train/0 ({tmp_path / 'a.png'}): the image can't be read")
        assert (failure.sample_id, failure.source) == ("d/train/0", str(tmp_path / "a.png"))

    def test_text_errors_name_the_sample_once(self, picture_folder: Path, chat: MakeChat) -> None:
        source = train_source(picture_folder, chat(max_length=8))
        text = str(self.failure(source))
        assert text.startswith("noise/train/0: the first question with its answer is too long.")
        assert text.count("train/0") == 1

    def test_pictures_without_processor(self, picture_folder: Path, chat: MakeChat) -> None:
        source = Source("d", pictures(picture_folder), None, chat())
        assert "no `vis_processor`" in str(self.failure(source))

    def test_any_other_failure_is_wrapped_and_survives_pickling_with_its_traceback(self, chat: MakeChat) -> None:
        class Broken(list[Conversation]):
            def __getitem__(self, index: Any) -> Any:
                raise KeyError("surprise")

        failure: SampleError = pickle.loads(
            pickle.dumps(self.failure(Source("d", Broken([about(Path("a"))]), None, chat())))
        )
        assert str(failure) == "d[0]: the sample can't be encoded: KeyError: 'surprise'."
        assert (failure.where, failure.sample_id, failure.source) == ("d[0]", "d[0]", None)
        assert 'raise KeyError("surprise")' in failure.__notes__[0]
