"""A ChatML tokenizer made offline, and small ways to write conversations and pictures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from lavis_ds.data.configs import ChatConfig
from lavis_ds.data.conversation import Conversation, Image, Role, Text, Turn
from lavis_ds.data.processors.base import TextContext
from lavis_ds.data.processors.chat import Chat

TOKENS_PER_IMAGE = 3


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """Bytes and a few merges; that of two newlines tells tokenising by pieces from tokenising at once."""
    merges = [("Ċ", "Ċ"), ("t", "h"), ("th", "e"), ("Ġ", "the")]
    symbols = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in merges)]
    backend = Tokenizer(BPE(vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=["<|im_start|>", "<|image_pad|>"],
    )


@pytest.fixture
def chat(tokenizer: PreTrainedTokenizerFast) -> Callable[..., Chat]:
    """`chat(max_length=..., **options of the processor)`."""

    def make(max_length: int = 512, tokens_per_image: int = TOKENS_PER_IMAGE, **options: Any) -> Chat:
        return Chat(ChatConfig(**options), TextContext(tokenizer, tokens_per_image, max_length))

    return make


@pytest.fixture
def talk() -> Callable[..., Conversation]:
    """`talk("user", [1, "question"], "assistant", "answer")`: a number is picture number so-and-so."""

    def make(*said: Any, id: str = "sample-7", references: dict[str, Any] | None = None) -> Conversation:
        turns = [_turn(role, content) for role, content in zip(said[::2], said[1::2], strict=True)]
        return Conversation(id, tuple(turns), references)

    return make


def _turn(role: Role, content: str | Sequence[int | str]) -> Turn:
    parts = [content] if isinstance(content, str) else content
    return Turn(role, tuple(Image(f"/{p}.png") if isinstance(p, int) else Text(p) for p in parts))


@pytest.fixture
def pixels() -> Callable[..., list[torch.Tensor]]:
    """`pixels(2, views=[1, 4])`: pictures as (V, 3, 4, 4) uint8, each of another colour; one view where left out."""

    def make(count: int, views: Sequence[int] | None = None) -> list[torch.Tensor]:
        return [torch.full((v, 3, 4, 4), i, dtype=torch.uint8) for i, v in enumerate(views or [1] * count)]

    return make


@pytest.fixture
def picture_folder(tmp_path: Path) -> Path:
    """Folder `pictures` with 0.png to 9.png of random pixels."""
    folder = tmp_path / "pictures"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for number in range(10):
        PIL.Image.fromarray(rng.integers(0, 256, (9, 7, 3), np.uint8)).save(folder / f"{number}.png")
    return folder
