from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lavis_ds.data.builders.emoji import Emoji
from lavis_ds.data.configs import EmojiConfig
from lavis_ds.data.conversation import Image, Text, Turn
from lavis_ds.errors import ConfigError, DataError


def entry(name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "short_name": name.lower(), "image": f"{name}.png", "category": "Animals", **more}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    emoji = [entry("CAT FACE"), entry("APPLE", has_img_google=True, has_img_twitter=False), entry("DOG")]
    (tmp_path / "emoji.json").write_text(json.dumps(emoji))
    (tmp_path / "google").mkdir()
    (tmp_path / "img/twitter/64").mkdir(parents=True)
    return tmp_path


def make(root: Path, **options: Any) -> Emoji:
    return Emoji("emoji", EmojiConfig(root=str(root), **{"styles": {"train": "google"}, **options}))


def test_every_style_of_a_split_asks_for_every_name(root: Path) -> None:
    samples = make(root, styles={"train": ["google", "twitter"]}).build("train")
    assert [s.id for s in samples] == [
        "train/google/cat face",
        "train/google/dog",
        "train/twitter/cat face",
        "train/twitter/dog",
    ]
    assert samples[0].turns == (
        Turn("user", (Image(str(root / "google/CAT FACE.png")), Text("What is this emoji?"))),
        Turn("assistant", (Text("cat face"),)),
    )
    assert samples[2].images[0].path == str(root / "img/twitter/64/CAT FACE.png")
    assert samples[0].references == {"answer": "cat face", "question_type": "Animals"}


def test_only_emoji_that_every_split_draws_are_used(root: Path) -> None:
    assert len(make(root).build("train")) == 3
    held_out = make(root, styles={"train": "google", "test": "twitter"})
    assert [s.turns[1].text for s in held_out.build("train")] == ["cat face", "dog"]
    assert [s.turns[1].text for s in held_out.build("test")] == ["cat face", "dog"]


def test_options_limit_and_ask(root: Path) -> None:
    (sample,) = make(root, max_emoji=1, question="Name it.").build("train")
    assert sample.turns[0].text == "Name it."


def test_errors_say_what_to_do(root: Path) -> None:
    with pytest.raises(ConfigError, match=r"no pictures of the style 'apple'.*emoji-datasource-apple"):
        make(root, styles={"train": "apple"}).build("train")
    with pytest.raises(ConfigError, match="no split 'test'"):
        make(root).build("test")
    (root / "emoji.json").write_text(json.dumps([{"name": "X", "short_name": "x"}]))
    with pytest.raises(DataError, match=r"emoji\.json: item 0: `image` is not text"):
        make(root).build("train")
    (root / "emoji.json").write_text(json.dumps([entry("X", has_img_google=False)]))
    with pytest.raises(DataError, match="no emoji is drawn in all of the styles google"):
        make(root).build("train")
