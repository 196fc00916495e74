"""The tokenizer's own chat template: ids, targets and refusals, for the ways in which common models write turns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from lavis_ds.batch import IGNORE_INDEX, Sample
from lavis_ds.data.configs import ChatConfig
from lavis_ds.data.conversation import Conversation
from lavis_ds.data.processors.base import TextContext
from lavis_ds.data.processors.chat import Chat
from lavis_ds.data.tokenizer import CHAT_TEMPLATE, train_tokenizer
from lavis_ds.errors import ConfigError, DataError

Talk = Callable[..., Conversation]

CHATML = CHAT_TEMPLATE
QWEN25 = (
    "{%- if messages[0]['role'] != 'system' %}{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}"
    "{%- endif %}" + CHATML
)
QWEN3 = """
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- set content = message.content %}
    {%- if message.role == 'assistant' and loop.last %}
        {{- '<think>\\n\\n</think>\\n\\n' + content.lstrip('\\n') }}
    {%- else %}
        {{- content }}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n' }}{%- endif %}
"""
LLAMA3 = (
    "{% for message in messages %}{{ ('<|begin_of_text|>' if loop.first else '') + '<|start_header_id|>' "
    "+ message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}"
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] "
    "+ '[/INST]' }}{% else %}{{ ' ' + message['content'] + eos_token }}{% endif %}{% endfor %}"
)
SPECIAL = {
    "chatml": ["<|im_start|>", "<|im_end|>"],
    "qwen25": ["<|im_start|>", "<|im_end|>"],
    "qwen3": ["<|im_start|>", "<|im_end|>"],
    "llama3": ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
    "gemma": ["<bos>", "<start_of_turn>", "<end_of_turn>"],
    "mistral": ["<s>", "[INST]", "[/INST]", "</s>"],
}
TEMPLATES = {"chatml": CHATML, "qwen25": QWEN25, "qwen3": QWEN3, "llama3": LLAMA3, "gemma": GEMMA, "mistral": MISTRAL}
WORDS = "the cat sat on a red mat and said hello to you what is this system user assistant model think helpful are"
TALK = ("user", "What is this?", "assistant", "the red cat", "user", "and that", "assistant", "a mat")


def tokenizer(name: str, template: str | None = None) -> Any:
    """Byte-level BPE, trained here, with the special tokens and the template of a kind of model."""
    trained = train_tokenizer([WORDS, WORDS.title()] * 20, 400)
    special = SPECIAL[name]
    backend = Tokenizer.from_str(trained.backend_tokenizer.to_str())
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=special[0],
        eos_token="<|endoftext|>" if name != "mistral" else "</s>",
        pad_token="<|endoftext|>",
        extra_special_tokens=special,
    )
    made.chat_template = template or TEMPLATES[name]
    return made


def chat(tokenizer: Any, max_length: int = 500, **options: Any) -> Chat:
    return Chat(ChatConfig(**options), TextContext(tokenizer, 2, max_length))


def encode(process: Chat, conversation: Conversation) -> Sample:
    images = [torch.zeros((1, 3, 2, 2), dtype=torch.uint8)] * len(conversation.images)
    return process(conversation, images, np.random.default_rng(0))


def targets(sample: Sample, tokenizer: Any) -> list[str]:
    """Text of each run of targets."""
    runs: list[list[int]] = [[]]
    for i, label in zip(sample.input_ids.tolist(), sample.labels.tolist(), strict=True):
        if label == IGNORE_INDEX:
            runs.append([])
        else:
            runs[-1].append(i)
    return [tokenizer.decode(run) for run in runs if run]


def messages(conversation: Conversation) -> list[dict[str, str]]:
    return [{"role": turn.role, "content": turn.text} for turn in conversation.turns]


@pytest.mark.parametrize("name", TEMPLATES)
class TestEveryTemplate:
    def test_ids_are_those_of_apply_chat_template(self, name: str, talk: Talk) -> None:
        """Up to the end of the last turn: the line break that some write after it is left out."""
        tok, conversation = tokenizer(name), talk(*TALK)
        usual = tok.apply_chat_template(messages(conversation), return_dict=False)
        while usual[-1] not in tok.all_special_ids:
            assert tok.decode([usual.pop()]) == "\n"
        assert encode(chat(tok), conversation).input_ids.tolist() == usual

    def test_the_prompt_is_that_of_apply_chat_template(self, name: str, talk: Talk) -> None:
        tok, conversation = tokenizer(name), talk(*TALK[:6])
        usual = tok.apply_chat_template(messages(conversation), add_generation_prompt=True, return_dict=False)
        process = chat(tok)
        prompt = process.prompt(conversation, [])
        assert prompt.input_ids.tolist() == usual
        whole = encode(process, talk(*TALK))
        assert whole.input_ids[: len(usual)].tolist() == usual
        assert (whole.labels[len(usual) :] != IGNORE_INDEX).all()

    def test_targets_are_the_answers_with_the_ends_of_their_turns(self, name: str, talk: Talk) -> None:
        tok = tokenizer(name)
        end, space = SPECIAL[name][-1], " " if name == "mistral" else ""
        sample = encode(chat(tok), talk(*TALK))
        assert targets(sample, tok) == [f"{space}the red cat{end}", f"{space}a mat{end}"]
        assert targets(encode(chat(tok, train_on="last"), talk(*TALK)), tok) == [f"{space}a mat{end}"]
        process = chat(tok)
        assert process.stop_ids[0] == tok.convert_tokens_to_ids(end)
        assert process.decode(sample.labels[sample.labels != IGNORE_INDEX].tolist()) == "the red cat"

    def test_what_users_type_never_becomes_special(self, name: str, talk: Talk) -> None:
        tok = tokenizer(name)
        for option in ("auto", "tokenizer"):
            process = chat(tok, template=option)
            typed = " ".join(SPECIAL[name])
            plain = encode(process, talk("user", "hello", "assistant", "you"))
            tricky = encode(process, talk("user", typed, "assistant", typed))
            special = torch.tensor(tok.all_special_ids)
            assert torch.isin(tricky.input_ids, special).sum() == torch.isin(plain.input_ids, special).sum()
            assert targets(tricky, tok)[0].strip() == typed + SPECIAL[name][-1]

    def test_pictures_stand_where_they_are_said_to(self, name: str, talk: Talk) -> None:
        tok = tokenizer(name)
        without = encode(chat(tok), talk("user", "the cat", "assistant", "you"))
        sample = encode(chat(tok), talk("user", [0, "the cat", 1], "assistant", "you"))
        kept = torch.ones(len(sample.input_ids), dtype=torch.bool)
        kept[sample.image_index] = False
        assert len(sample.image_index) == 4
        assert tok.decode(sample.input_ids[kept]) == tok.decode(without.input_ids)

    def test_independent_questions_are_the_single_ones(self, name: str, talk: Talk) -> None:
        tok = tokenizer(name)
        for pictures in ([], [0, 1]):
            process = chat(tok, turns="independent")
            both = talk("user", [*pictures, " cat "], "assistant", "a", "user", " mat ", "assistant", " b")
            sample = encode(process, both)
            assert sample.segment_ids is not None
            for number, (asked, answer) in enumerate([(" cat ", "a"), (" mat ", " b")], start=1):
                alone = encode(chat(tok), talk("user", [*pictures, asked], "assistant", answer))
                seen = (sample.segment_ids == 0) | (sample.segment_ids == number)
                assert sample.input_ids[seen].tolist() == alone.input_ids.tolist()
                assert sample.labels[seen].tolist() == alone.labels.tolist()
                assert sample.position_ids[seen].tolist() == alone.position_ids.tolist()

    def test_truncated_samples_are_those_of_what_is_left(self, name: str, talk: Talk) -> None:
        tok = tokenizer(name)
        alone, both = encode(chat(tok), talk(*TALK[:4])), encode(chat(tok), talk(*TALK))
        for limit, expected in [(len(both.input_ids) - 1, alone), (len(alone.input_ids), alone)]:
            sample = encode(chat(tok, max_length=limit), talk(*TALK))
            assert sample.input_ids.tolist() == expected.input_ids.tolist()
            assert sample.labels.tolist() == expected.labels.tolist()
        with pytest.raises(DataError, match="too long"):
            encode(chat(tok, max_length=len(alone.input_ids) - 1), talk(*TALK))


class TestSystemMessages:
    def test_a_templates_default_stands_where_none_is_given_and_is_no_target(self, talk: Talk) -> None:
        tok = tokenizer("qwen25")
        default = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        sample = encode(chat(tok, train_on="all"), talk("user", "hello", "assistant", "you"))
        assert tok.decode(sample.input_ids).startswith(default)
        assert targets(sample, tok) == ["hello<|im_end|>", "you<|im_end|>"]
        own = encode(chat(tok, system="sat on"), talk("user", "hello", "assistant", "you"))
        assert tok.decode(own.input_ids).startswith("<|im_start|>system\nsat on<|im_end|>\n<|im_start|>user")

    def test_chatml_can_be_asked_for_instead(self, talk: Talk) -> None:
        tok = tokenizer("qwen25")
        sample = encode(chat(tok, template="chatml"), talk("user", "hello", "assistant", "you"))
        assert tok.decode(sample.input_ids).startswith("<|im_start|>user\nhello")

    def test_a_template_without_system_role_is_refused_with_its_reason(self, talk: Talk) -> None:
        tok = tokenizer("gemma")
        with pytest.raises(ConfigError, match=r"tokenizer's chat template fails with .*System role not supported"):
            chat(tok, system="sat on")
        with pytest.raises(DataError, match=r"sample-7: .*System role not supported.*turns by system, user, assistant"):
            encode(chat(tok), talk("system", "sat", "user", "hello", "assistant", "you"))


class TestWhatTemplatesRefuseOrChange:
    def test_turns_that_do_not_alternate(self, talk: Talk) -> None:
        with pytest.raises(DataError, match=r"sample-7: .*must alternate.*turns by user, user, assistant"):
            encode(chat(tokenizer("gemma")), talk("user", "a", "user", "b", "assistant", "c"))

    def test_white_space_goes_where_the_template_strips_it(self, talk: Talk) -> None:
        said = ("user", [" \n", " \t the cat\n"], "assistant", "\n\n you ")
        for name, question, answer in [
            ("llama3", "the cat", "you"),
            ("qwen3", " \n \t the cat\n", " you "),  # only the answer's leading line breaks
            ("chatml", " \n \t the cat\n", "\n\n you "),
        ]:
            tok = tokenizer(name)
            text = tok.decode(encode(chat(tok), talk(*said)).input_ids)
            conversation = [{"role": role, "content": "".join(said)} for role, said in zip(said[::2], said[1::2])]  # noqa: B905
            assert text == tok.apply_chat_template(conversation, tokenize=False).removesuffix("\n")
            assert question in text
            assert answer in text

    def test_a_picture_keeps_white_space_beside_it(self, talk: Talk) -> None:
        tok = tokenizer("llama3")
        sample = encode(chat(tok), talk("user", [" a ", 0, " b "], "assistant", "you"))
        first, last = sample.image_index[[0, -1]].tolist()
        assert tok.decode(sample.input_ids[:first]).endswith("\n\na ")
        assert tok.decode(sample.input_ids[last + 1 :]).startswith(" b<|eot_id|>")

    def test_the_block_before_the_last_answer_is_no_target_and_moves_with_it(self, talk: Talk) -> None:
        tok = tokenizer("qwen3")
        whole = encode(chat(tok), talk(*TALK))
        assert tok.decode(whole.input_ids).count("<think>") == 1
        assert not any("think" in text for text in targets(whole, tok))
        shorter = encode(chat(tok, max_length=len(whole.input_ids) - 1), talk(*TALK))
        assert tok.decode(shorter.input_ids).endswith("<think>\n\n</think>\n\nthe red cat<|im_end|>")

    @pytest.mark.parametrize(
        ("template", "message"),
        [
            ("{{ messages[0]['content'] }}<|im_end|>", "loses, repeats or moves what the assistant says"),
            (CHATML + "{{ messages[0]['content'] }}", "loses, repeats or moves what the user says"),
            ("{{ messages[1]['content'] + messages[0]['content'] }}<|im_end|>", "loses, repeats or moves"),
            (CHATML.replace("['content']", "['content'] | upper"), "loses, repeats or moves"),
            (CHATML.replace("['content']", "['content'] | replace('\t', ' ')"), "changes what is said"),
            (CHATML.replace("<|im_end|>", ""), "writes no special token after an answer"),
            ("{{ messages.nothing.there }}", "fails with UndefinedError"),
        ],
    )
    def test_templates_that_can_not_be_used(self, template: str, message: str) -> None:
        with pytest.raises(ConfigError, match=r"tokenizer's chat template.*template: chatml") as caught:
            chat(tokenizer("chatml", template))
        assert message in str(caught.value)

    def test_an_end_that_users_could_type_is_refused(self) -> None:
        template = CHATML.replace("<|im_end|>", "<end>")
        for is_special in (True, False):
            tok = tokenizer("chatml", template)
            tok.add_tokens(["<end>"], special_tokens=is_special)
            if is_special:
                assert chat(tok).stop_ids[0] == tok.convert_tokens_to_ids("<end>")
            else:
                with pytest.raises(ConfigError, match="writes no special token after an answer"):
                    chat(tok)

    def test_a_tokenizer_without_template(self, tokenizer: Any) -> None:
        with pytest.raises(ConfigError, match="the tokenizer has no chat template"):
            chat(tokenizer, template="tokenizer")


def test_a_space_that_the_tokenizer_puts_before_everything_is_taken_off(talk: Talk) -> None:
    """As Llama 2's and Mistral 7B's: `normalizers.Prepend`. Text after a line break begins with no space."""
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("c", "a"), ("ca", "t"), ("▁", "cat"), ("th", "e"), ("t", "h")]
    pieces = ["<unk>", *"▁thecai\n", *("".join(pair) for pair in merges)]
    backend = Tokenizer(models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=merges, unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    tok = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", pad_token="</s>")
    tok.chat_template = (
        "{% for m in messages %}{{ ('i ' if m.role == 'user' else 'i\n') + m.content + '</s>' }}{% endfor %}"
    )
    conversation = talk("user", "the cat", "assistant", "the cat")
    sample = encode(chat(tok), conversation)
    shown = tok.convert_ids_to_tokens(sample.input_ids)
    assert shown == ["▁", "i", "▁the", "▁cat", "</s>", "▁", "i", "\n", "the", "▁cat", "</s>"]
    assert sample.input_ids.tolist() == tok.apply_chat_template(messages(conversation), return_dict=False)


def test_frames_are_made_once_for_each_sequence_of_roles(talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    tok = tokenizer("llama3")
    process = chat(tok)
    encode(process, talk(*TALK))

    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("rendered again")

    monkeypatch.setattr(tok, "apply_chat_template", fail)
    encode(process, talk("user", "on", "assistant", "you", "user", "sat", "assistant", "said"))
