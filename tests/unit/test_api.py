"""The functions that LAVIS users know, on a tiny model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch

import lavis_ds
from lavis_ds.batch import IGNORE_INDEX
from lavis_ds.config.load import load
from lavis_ds.data.conversation import Conversation, Image, Text, Turn
from lavis_ds.errors import ConfigError, DataError
from tests.tiny_project import make_project


@pytest.fixture(scope="module")
def cfg(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_project(tmp_path_factory.mktemp("project"))


@pytest.fixture(scope="module")
def tokenizer(cfg: Path) -> dict[str, Any]:
    """An option of the tiny types, which name no tokenizer."""
    return {"language": {"tokenizer": str(cfg.parent / "tokenizer")}}


def test_they_are_importable_from_the_package() -> None:
    for name in lavis_ds.__all__:
        assert getattr(lavis_ds, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'load_modle'"):
        lavis_ds.load_modle  # noqa: B018


def test_load_model(tokenizer: dict[str, Any]) -> None:
    model = lavis_ds.load_model("llava_qwen", "tiny", max_txt_len=99, **tokenizer)
    assert type(model).__name__ == "LlavaQwen"
    assert model.training
    assert (model.config.max_txt_len, model.config.projector.merge_size) == (99, 2)  # the option, the type's default
    assert model.image_size == 32


def test_load_model_for_evaluation_on_a_device(tokenizer: dict[str, Any]) -> None:
    model = lavis_ds.load_model("llava_qwen", "tiny", is_eval=True, device="meta", **tokenizer)
    assert not any(module.training for module in model.modules())
    assert {p.device.type for p in model.parameters()} == {"meta"}


def test_load_model_without_a_type(cfg: Path) -> None:
    options = load(cfg).config.model.model_dump(exclude={"arch", "model_type"})
    assert type(lavis_ds.load_model("vlm", **options)).__name__ == "Vlm"


@pytest.mark.parametrize(
    ("name", "model_type", "options", "message"),
    [
        ("llava_qwn", None, {}, "no model named 'llava_qwn'.*'llava_qwen'"),
        ("llava_qwen", "tinyy", {}, r"model\.model_type: .*no type 'tinyy'.*'tiny'"),
        ("llava_qwen", "tiny", {"max_text_len": 3}, r"model\.max_text_len: there is no such key.*'max_txt_len'"),
    ],
)
def test_wrong_names(name: str, model_type: str | None, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        lavis_ds.load_model(name, model_type, **options)


def test_load_model_and_preprocess(tokenizer: dict[str, Any], tmp_path: Path) -> None:
    model, images, texts = lavis_ds.load_model_and_preprocess("llava_qwen", "tiny", is_eval=True, **tokenizer)
    rng = np.random.default_rng(0)
    picture = PIL.Image.fromarray(np.arange(48 * 40 * 3, dtype=np.uint8).reshape(48, 40, 3))
    pixels = images["eval"](picture, rng)
    assert (pixels.shape, pixels.dtype) == ((3, 32, 32), torch.uint8)
    assert images["train"](picture, rng).shape == (3, 32, 32)
    question = Conversation("a", (Turn("user", (Image("p.png"), Text("what?"))), Turn("assistant", (Text("red"),))))
    sample = texts["eval"](question, pixels[None], rng)
    assert len(sample.image_index) == model.tokens_per_image
    targets = sample.labels[sample.labels != IGNORE_INDEX]
    assert model.tokenizer.decode(targets) == "red<|im_end|>"


def test_a_model_of_native_resolution_comes_with_its_processor(cfg: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    words: Any = AutoTokenizer.from_pretrained(cfg.parent / "tokenizer")
    marks = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    words.add_special_tokens({"extra_special_tokens": marks})
    words.save_pretrained(tmp_path / "words")
    model, images, texts = lavis_ds.load_model_and_preprocess(
        "qwen3_vl", "tiny", is_eval=True, language={"tokenizer": str(tmp_path / "words")}
    )
    rng = np.random.default_rng(0)
    views = images["eval"](PIL.Image.new("RGB", (300, 200), "red"), rng)
    assert views.pixels.shape[1:] == model.image_shape
    question = Conversation("a", (Turn("user", (Image("p.png"), Text("what?"))), Turn("assistant", (Text("red"),))))
    sample = texts["eval"](question, [views], rng)
    assert len(sample.image_index) == len(views) / 4
    assert sample.position_ids.shape == (3, len(sample.input_ids))
    before = sample.input_ids[sample.image_index[0] - 1]
    assert model.tokenizer.decode(before) == "<|vision_start|>"


def test_too_long_a_text_is_refused_by_the_models_length(tokenizer: dict[str, Any]) -> None:
    _, _, texts = lavis_ds.load_model_and_preprocess("llava_qwen", "tiny", max_txt_len=8, **tokenizer)
    turns = (Turn("user", (Text("what " * 20),)), Turn("assistant", (Text("red"),)))
    images = torch.empty(0, 3, 32, 32, dtype=torch.uint8)
    with pytest.raises(DataError, match=r"a: .*8"):
        texts["train"](Conversation("a", turns), images, np.random.default_rng(0))


def test_load_preprocess(cfg: Path) -> None:
    images, texts = lavis_ds.load_preprocess(load(cfg).config.datasets["tiny"])
    assert {name: type(processor).__name__ for name, processor in images.items()} == {
        "train": "ImageTrain",
        "eval": "ImageEval",
    }
    assert images["train"].config.min_scale == 0.5
    assert {name: options.name for name, options in texts.items()} == {"train": "chat", "eval": "chat"}


def test_load_preprocess_of_text_alone(cfg: Path) -> None:
    entry = load(cfg, ["datasets.tiny.vis_processor=null"]).config.datasets["tiny"]
    assert lavis_ds.load_preprocess(entry)[0] == {}


def test_load_dataset(cfg: Path) -> None:
    files = {"train": str(cfg.parent / "train.json"), "val": str(cfg.parent / "val.json")}
    options = {"annotations": files, "image_root": str(cfg.parent / "images")}
    splits = lavis_ds.load_dataset("llava_json", **options)
    assert {name: len(samples) for name, samples in splits.items()} == {"train": 22, "val": 5}
    assert len(splits["train"][0].images) == 1
    assert list(lavis_ds.load_dataset("llava_json", ["val"], **options)) == ["val"]
    with pytest.raises(ConfigError, match="no split 'vla'"):
        lavis_ds.load_dataset("llava_json", ["vla"], **options)


def test_load_dataset_refuses_wrong_options() -> None:
    with pytest.raises(ConfigError, match=r"datasets\.llava_json\.image_rot: .*'image_root'"):
        lavis_ds.load_dataset("llava_json", image_rot="x")
    with pytest.raises(ConfigError, match="no dataset builder named 'lava_json'"):
        lavis_ds.load_dataset("lava_json")


def test_model_zoo(capsys: pytest.CaptureFixture[str]) -> None:
    print(lavis_ds.model_zoo)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["arch", "types"]
    rows = {line.split()[0]: line.split(maxsplit=1)[1:] for line in lines[2:]}
    assert "tiny" in rows["llava_qwen"][0].split(", ")
    assert rows["vlm"] == []
    assert ("llava_qwen", "tiny") in list(lavis_ds.model_zoo)
    assert ("vlm", "") in list(lavis_ds.model_zoo)
    assert len(lavis_ds.model_zoo) == len(list(lavis_ds.model_zoo))


def test_dataset_zoo(capsys: pytest.CaptureFixture[str]) -> None:
    print(lavis_ds.dataset_zoo)
    assert {"llava_json", "easy_vqa"} <= set(capsys.readouterr().out.splitlines())
    assert lavis_ds.dataset_zoo.get_names() == lavis_ds.registry.list_datasets()
