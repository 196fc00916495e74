"""Videos, pictures and text through the data side into Qwen-VL: all as transformers' processor and class have it.

Samples are encoded from files here, and by `Qwen2_5_VLProcessor` and `Qwen3VLProcessor` there; the reference is the
class of transformers with the same weights, which computes its positions itself.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from transformers import Qwen2_5_VLProcessor, Qwen2VLImageProcessor, Qwen2VLVideoProcessor
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

from lavis_ds import registry
from lavis_ds.batch import Batch, Sample
from lavis_ds.config.decode import decode
from lavis_ds.config.schema import VideoConfig
from lavis_ds.data.collate import Collator
from lavis_ds.data.configs import ChatConfig, ImageNativeConfig
from lavis_ds.data.conversation import Content, Conversation, Image, Text, Turn, Video
from lavis_ds.data.dataset import EncodedDataset, Source
from lavis_ds.data.order import SampleKey
from lavis_ds.data.processors.chat import Chat
from lavis_ds.data.processors.native import ImageNative
from lavis_ds.data.tokenizer import train_tokenizer
from lavis_ds.models.qwen_vl import QwenVL
from lavis_ds.runners.build import text_context
from tests.parity import Parity, gradient_error
from tests.unit.models.test_qwen_vl import SHAPES, STATISTICS, error, gradients

ARCHS = ["qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"]
RATE = 8.0
"""Frames a second that the reference's processor is told; frames of a folder are one a second here."""
LENGTHS = {"long": 10, "odd": 5, "short": 2}
"""Videos: number of their frames in the folder, of which each fourth part or all are used."""
SAID: dict[str, tuple[str | tuple[str], ...]] = {
    "video": (("long",), "What happens?"),
    "odd": (("odd",), "And here?"),
    "picture": ("picture", "What is this?"),
    "text": ("Capital of Peru?",),
    "all": ("picture", "Is this", ("odd",), "or", "picture", "or", ("short",), "?"),
}
"""What users say: text, pictures, and videos in brackets."""
ANSWER = "Lima."


class House:
    """One family: the model here and there, and files."""

    def __init__(self, arch: str, folder: Path) -> None:
        self.arch, self.folder = arch, folder
        tokenizer: Any = train_tokenizer(["what happens in the picture", "0123456789 seconds"], vocab_size=320)
        marks = ["vision_start", "vision_end", "image_pad", "video_pad"]
        tokenizer.add_special_tokens({"extra_special_tokens": [f"<|{mark}|>" for mark in marks]})
        tokenizer.save_pretrained(folder / "tokenizer")
        self.patch = int(SHAPES[arch]["vision_config"]["patch_size"])
        shape = copy.deepcopy(SHAPES[arch])
        if arch == "qwen2_5_vl":
            shape["vision_config"]["tokens_per_second"] = 3
        options = {"arch": arch, "config": shape, "language": {"tokenizer": str(folder / "tokenizer")}}
        torch.manual_seed(1)
        self.ours: QwenVL = registry.models.get(arch).from_config(decode(registry.models.config_class(arch), options))
        with torch.no_grad():  # biases and norms are made as zeros and ones, under which mistakes could hide
            for parameter in self.ours.parameters():
                if parameter.dim() == 1:
                    parameter.add_(0.1 * torch.randn_like(parameter))
        whole: Any = self.ours.language.lm
        self.theirs = copy.deepcopy(whole)
        self.tokenizer = self.ours.tokenizer
        self._draw()

    def _draw(self) -> None:
        """Sizes that need no resizing: what interpolation rounds differently is another test's matter."""
        rng, side = np.random.default_rng(0), 2 * self.patch
        self.picture = self.folder / "picture.png"
        PIL.Image.fromarray(rng.integers(0, 256, (side, 3 * side, 3), dtype=np.uint8)).save(self.picture)
        for name, count in LENGTHS.items():
            (self.folder / name).mkdir()
            for number in range(count):
                frame = rng.integers(0, 256, (2 * side, side if name == "odd" else 2 * side, 3), dtype=np.uint8)
                PIL.Image.fromarray(frame).save(self.folder / name / f"{number}.png")

    def data(self, names: Sequence[str]) -> EncodedDataset:
        native = ImageNativeConfig(patch_size=self.patch, min_pixels=1, video_min_pixels=1, video_max_pixels=10**7)
        talks = [self.talk(name) for name in names]
        text = Chat(ChatConfig(), text_context(self.ours))
        video = VideoConfig(num_frames=5, max_frames=5)
        source = Source("d", talks, ImageNative(native), text, video)
        return EncodedDataset([source], seed=0)

    def talk(self, name: str) -> Conversation:
        def part(said: str | tuple[str]) -> Content:
            if isinstance(said, tuple):
                return Video(str(self.folder / said[0]))
            return Image(str(self.picture)) if said == "picture" else Text(said)

        return Conversation(name, (Turn("user", tuple(map(part, SAID[name]))), Turn("assistant", (Text(ANSWER),))))

    def samples(self, names: Sequence[str]) -> list[Sample]:
        data = self.data(names)
        return [data[SampleKey(0, index, 0, index)] for index in range(len(names))]

    def batch(self, rows: Sequence[Sequence[Sample]]) -> Batch:
        collate = Collator(
            self.tokenizer.pad_token_id, self.ours.image_shape, tokens_per_image=self.ours.tokens_per_image,
            datasets=["d"], merge_size=self.ours.merge_size, pad_to_multiple_of=1,
        )  # fmt: skip
        return collate([[collate.checked(sample) for sample in row] for row in rows])

    def processor(self) -> Any:
        options = {"patch_size": self.patch, **STATISTICS[self.arch]}
        size = {"shortest_edge": 1, "longest_edge": 10**7}
        pictures = Qwen2VLImageProcessor(size=size, **options)
        if self.arch != "qwen2_5_vl":
            videos = Qwen3VLVideoProcessor(size=size, do_sample_frames=False, cap_pixels_per_frame=False, **options)
            return Qwen3VLProcessor(pictures, self.tokenizer, videos)
        videos = Qwen2VLVideoProcessor(size=size, do_sample_frames=False, cap_pixels_per_frame=False, **options)
        return Qwen2_5_VLProcessor(pictures, self.tokenizer, videos)

    def reference(self, names: Sequence[str]) -> dict[str, Any]:
        """Inputs of the reference model, from the same files."""
        texts, pictures, videos, metadata = [], [], [], []
        for name in names:
            text = ""
            for said in SAID[name]:
                kind = "video" if isinstance(said, tuple) else "image" if said == "picture" else ""
                text += f"<|vision_start|><|{kind}_pad|><|vision_end|>" if kind else str(said)
                if said == "picture":
                    pictures.append(PIL.Image.open(self.picture))
                elif isinstance(said, tuple):
                    frames, about = self._video(said[0])
                    videos.append(frames)
                    metadata.append(about)
            talk = [{"role": "user", "content": text}, {"role": "assistant", "content": ANSWER}]
            texts.append(self.tokenizer.apply_chat_template(talk, tokenize=False).removesuffix("\n"))
        seen = {"images": pictures or None, "videos": videos or None}
        if videos:
            seen["video_metadata"] = metadata
        return dict(self.processor()(text=texts, **seen, padding=True, return_tensors="pt", padding_side="right"))

    def _video(self, name: str) -> tuple[Any, dict[str, Any]]:
        count = LENGTHS[name]
        used = min(count, 5)
        times = [(index + 0.5) * count / used for index in range(used)]
        files = [self.folder / name / f"{int(time)}.png" for time in times]
        frames = np.stack([np.asarray(PIL.Image.open(file)) for file in files])
        places = [int(time * RATE) for time in times]
        assert [place / RATE for place in places] == times
        return frames, {"total_num_frames": int(count * RATE), "fps": RATE, "frames_indices": places}


@pytest.fixture(scope="module", params=ARCHS)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> House:
    return House(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture
def house(loaded: House) -> House:
    made = copy.copy(loaded)
    made.ours, made.theirs = copy.deepcopy(loaded.ours), copy.deepcopy(loaded.theirs)
    return made


@pytest.mark.parametrize("name", list(SAID))
def test_a_sample_is_what_the_processor_of_transformers_makes(loaded: House, name: str) -> None:
    (sample,), reference = loaded.samples([name]), loaded.reference([name])
    assert sample.input_ids.tolist() == reference["input_ids"][0].tolist()
    kinds = reference["mm_token_type_ids"]
    assert sample.image_index.tolist() == kinds[0].nonzero().flatten().tolist()
    given = {key: reference.get(key) for key in ("image_grid_thw", "video_grid_thw", "second_per_grid_ts")}
    expected, _ = loaded.theirs.model.get_rope_index(reference["input_ids"], kinds, **given)
    assert sample.position_ids.tolist() == expected[:, 0].tolist()
    if name == "video" and loaded.arch == "qwen2_5_vl":  # 3 steps of 4 s, 3 positions a second
        assert (sample.position_ids[0] - sample.position_ids[1])[sample.image_index].max() == 24


def test_grids_and_pixels_are_those_of_transformers(loaded: House) -> None:
    (sample,), reference = loaded.samples(["all"]), loaded.reference(["all"])
    assert sample.image_grids is not None
    grids = sample.image_grids.tolist()
    assert [grids[0], grids[2]] == reference["image_grid_thw"].tolist()
    assert [grids[1], grids[3]] == reference["video_grid_thw"].tolist()
    ours = loaded.ours.vision.pixels(sample.images).split([int(np.prod(grid)) for grid in grids])
    assert error(torch.cat([ours[0], ours[2]]), reference["pixel_values"]) < 1e-6  # measured 9e-8
    assert error(torch.cat([ours[1], ours[3]]), reference["pixel_values_videos"]) < 1e-6  # measured 9e-8


BATCHES = {"video": ["video"], "video, text, picture": ["odd", "text", "picture"], "mixed": ["all", "video"]}


@pytest.mark.parametrize("names", BATCHES.values(), ids=list(BATCHES))
def test_loss_and_gradients_are_those_of_transformers(parity: Parity, house: House, names: list[str]) -> None:
    batch = house.batch([[sample] for sample in house.samples(names)])
    reference = house.reference(names)
    assert batch.input_ids.tolist() == reference["input_ids"].tolist()
    expected = house.theirs(**reference, labels=batch.labels).loss
    expected.backward()
    loss, *_ = house.ours(batch)
    (loss / batch.num_targets).backward()
    assert error(loss.detach() / batch.num_targets, expected.detach()) < 1e-6  # measured 8e-8
    theirs = dict(house.theirs.named_parameters())
    ours = gradients(house.ours)
    assert len(ours) == len(theirs)
    for (name, gradient), (their_name, parameter) in zip(_named(ours), _named(theirs), strict=True):
        assert name == their_name
        assert error(gradient, parameter.grad) < 1e-5, name  # measured 2e-6
    parity(
        f"{house.arch}, videos, padded",
        f"`{type(house.theirs).__name__}`",
        loss=error(loss.detach() / batch.num_targets, expected.detach()),
        gradient=gradient_error(dict(_named(ours)), {name: p.grad for name, p in theirs.items()}),
    )


def _named(tensors: dict[str, Any]) -> list[tuple[str, Any]]:
    """By the name in the reference."""
    renamed = {
        name.replace("vision.tower.", "model.visual.")
        .replace("language.decoder.", "model.language_model.")
        .replace("language.lm_head.", "lm_head."): tensor
        for name, tensor in tensors.items()
    }
    return sorted(renamed.items())


def test_packed_rows_are_the_samples_of_transformers(parity: Parity, house: House) -> None:
    names = ["video", "picture", "text", "all", "odd"]
    samples = house.samples(names)
    total = torch.zeros(())
    for name, sample in zip(names, samples, strict=True):
        alone = house.batch([[sample]])
        loss = house.theirs(**house.reference([name]), labels=alone.labels).loss * alone.num_targets
        loss.backward()
        total += loss.detach()
    theirs = {name: p.grad for name, p in house.theirs.named_parameters()}
    for rows in ([samples[:2], samples[2:]], [samples]):
        house.ours.zero_grad()
        packed = house.batch(rows)
        loss, *_ = house.ours(packed)
        loss.backward()
        assert error(loss.detach(), total) < 1e-6  # measured 0
        for (name, gradient), (their_name, expected) in zip(_named(gradients(house.ours)), _named(theirs), strict=True):
            assert name == their_name
            assert error(gradient, expected) < 1e-5, name  # measured 2e-6
        parity(
            f"{house.arch}, videos, packed",
            f"`{type(house.theirs).__name__}`",
            loss=error(loss.detach(), total),
            gradient=gradient_error(dict(_named(gradients(house.ours))), theirs),
        )


@pytest.mark.parametrize("changed", ["images", "position_ids"])
def test_frames_and_times_count(house: House, changed: str) -> None:
    batch = house.batch([house.samples(["video"])])
    assert batch.images is not None
    frozen = batch.position_ids.clone()
    frozen[0, 0, batch.image_index] = int(frozen[0, 0, batch.image_index[0]])
    other = {"images": torch.cat([batch.images[:-16], 255 - batch.images[-16:]]), "position_ids": frozen}
    house.ours.eval().requires_grad_(False)
    last = house.ours.hidden_states(batch)[0, -1]
    now = house.ours.hidden_states(dataclasses.replace(batch, **{changed: other[changed]}))[0, -1]
    assert error(now, last) > 1e-3  # measured 0.06 to 0.23


@pytest.mark.parametrize("names", [["video", "text"], ["odd", "all"]])
def test_answers_are_those_of_transformers(house: House, names: list[str]) -> None:
    data = house.data(names)
    data.as_prompts = True
    collate = Collator(
        house.tokenizer.pad_token_id, house.ours.image_shape, tokens_per_image=house.ours.tokens_per_image,
        datasets=["d"], merge_size=2, padding_side="left", pad_to_multiple_of=1,
    )  # fmt: skip
    batch = collate([[data[SampleKey(0, index, 0, index)]] for index in range(len(names))])
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": [399], "pad_token_id": 0}
    for number, name in enumerate(names):
        alone = house.reference([name])
        end = int(batch.attention_mask[number].sum())
        prompt = {key: alone[key][:, :end] for key in ("input_ids", "attention_mask", "mm_token_type_ids")}
        theirs = house.theirs.eval().generate(**{**alone, **prompt}, **options)[0, end:]
        ours = house.ours.eval().generate(batch, **options)[number]
        assert ours.tolist() == theirs.tolist()


@pytest.mark.parametrize("name", list(SAID))
def test_counting_agrees_with_encoding(loaded: House, name: str) -> None:
    data = loaded.data([name])
    sample = data[SampleKey(0, 0, 0, 0)]
    assert data.count(0, 0) == (len(sample.input_ids), len(sample.images))
