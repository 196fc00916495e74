"""Ids and the text of each of them."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lavis_ds.data.tokenizer import train_tokenizer
from lavis_ds.runners.data_tools.token_text import pieces, visible

TEXT = "what is 红色 é 😀 the <|im_end|> shape\n"


@pytest.fixture(scope="module")
def byte_level() -> Any:
    return train_tokenizer(["what is the shape"], 300)


@pytest.fixture(scope="module")
def with_space() -> Any:
    """Puts a space before whatever it is given, and takes it off the first word it decodes, as Llama 2 does."""
    vocabulary = {"<unk>": 0, "▁what": 1, "▁is": 2, "▁the": 3, "▁": 4}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def test_pieces_are_the_ids_and_the_text(byte_level: Any) -> None:
    ids = byte_level.encode(TEXT)
    found = list(pieces(byte_level, ids))
    assert [i for piece in found for i in piece.ids] == ids
    assert "".join(piece.text for piece in found) == TEXT
    assert {"红", "色", "é", "😀"} <= {piece.text.strip() for piece in found}  # several ids each
    assert next(piece for piece in found if piece.text == "<|im_end|>").ids == (byte_level.eos_token_id,)


def test_words_keep_their_space(with_space: Any) -> None:
    ids = with_space.encode("what is the what")
    assert len(ids) == 4
    assert [piece.text for piece in pieces(with_space, ids)] == ["what", " is", " the", " what"]


def test_a_cut_character_does_not_swallow_what_follows(byte_level: Any) -> None:
    cut = byte_level.encode("😀")[:2]
    after = byte_level.encode("a shape")
    found = list(pieces(byte_level, [*cut, *after]))
    assert [i for piece in found for i in piece.ids] == [*cut, *after]
    assert "".join(piece.text for piece in found).endswith("shape")


def test_control_characters_are_shown_and_not_obeyed() -> None:
    assert visible("a\x1b[31m\x07\n\tb\x7f") == "a␛[31m␇\n\tb␡"
