from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from lavis_ds.batch import IGNORE_INDEX
from lavis_ds.data.configs import PlainConfig
from lavis_ds.data.conversation import Conversation, Text, Turn
from lavis_ds.data.processors.base import TextContext
from lavis_ds.data.processors.plain import Plain
from lavis_ds.errors import DataError

MakePlain = Callable[..., Plain]
RNG = np.random.default_rng(0)
PICTURE = torch.zeros((1, 3, 4, 4), dtype=torch.uint8)


@pytest.fixture
def plain(tokenizer: PreTrainedTokenizerFast) -> MakePlain:
    def make(max_length: int = 100, **options: Any) -> Plain:
        return Plain(PlainConfig(**options), TextContext(tokenizer, 3, max_length))

    return make


def test_pictures_then_text_then_the_end(plain: MakePlain, talk: Any, tokenizer: PreTrainedTokenizerFast) -> None:
    sample = plain()(talk("user", [1, "Describe it."], "assistant", "the <|im_end|>"), [PICTURE], RNG)
    text = tokenizer.encode("the <|im_end|>", add_special_tokens=False, split_special_tokens=True)
    end = tokenizer.eos_token_id
    assert sample.input_ids.tolist()[3:] == [*text, end]
    assert sample.image_index.tolist() == [0, 1, 2]
    assert sample.labels.tolist() == [IGNORE_INDEX] * 3 + [*text, end]
    assert text.count(end) == 0, "what spells a special token is text"


def test_text_alone_learns_all_but_its_first_token(plain: MakePlain, talk: Any) -> None:
    sample = plain()(talk("assistant", "all of this"), [], RNG)
    assert sample.labels[0] == IGNORE_INDEX
    assert torch.equal(sample.labels[1:], sample.input_ids[1:])


def test_a_beginning_of_text_token_comes_first(tokenizer: PreTrainedTokenizerFast, talk: Any) -> None:
    import copy

    with_bos = copy.deepcopy(tokenizer)
    with_bos.bos_token = "<|im_start|>"
    made = Plain(PlainConfig(), TextContext(with_bos, 3, 100))(talk("assistant", "a"), [], RNG)
    assert made.input_ids[0] == with_bos.bos_token_id
    assert made.labels.tolist()[1:] == made.input_ids.tolist()[1:]


def test_what_does_not_fit_is_cut_or_left_out_but_never_a_picture(plain: MakePlain, talk: Any) -> None:
    conversation = talk("user", [1], "assistant", "x" * 50)
    cut = plain(max_length=20)(conversation, [PICTURE], RNG)
    assert (len(cut.input_ids), cut.num_dropped_turns) == (20, 1)
    with pytest.raises(DataError, match=r"54 tokens, 1 picture"):
        plain(max_length=20, too_long="sample")(conversation, [PICTURE], RNG)
    with pytest.raises(DataError, match="too long"):
        plain(max_length=8)(talk("user", [1, 2, 3], "assistant", "x"), [PICTURE] * 3, RNG)


def test_a_prompt_is_what_stands_before_the_text(plain: MakePlain, talk: Any) -> None:
    conversation = talk("user", [1], "assistant", "a cat")
    prompt, sample = plain().prompt(conversation, [PICTURE]), plain()(conversation, [PICTURE], RNG)
    assert prompt.input_ids.tolist() == sample.input_ids[:3].tolist()
    assert plain().decode([*sample.input_ids[3:].tolist(), 5]) == "a cat"
    with pytest.raises(DataError, match="nothing to continue"):
        plain().prompt(replace(conversation, turns=(Turn("assistant", (Text("a"),)),)), [])


def test_weights_of_turns(plain: MakePlain) -> None:
    turns = (Turn("assistant", (Text("ab"),), weight=0.5),)
    sample = plain()(Conversation("x", turns), [], RNG)
    assert sample.target_weights is not None
    assert sample.target_weights.tolist() == [0, 0.5, 1]
