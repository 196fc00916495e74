"""The original Qwen's tokenizer, a file of byte sequences in tiktoken's format, as a fast tokenizer.

Source: https://huggingface.co/Qwen/Qwen-7B-Chat (`tokenization_qwen.py`); the merges are derived by transformers.
"""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, normalizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import TikTokenConverter

from lavis_ds.errors import CheckpointError

FILE = "qwen.tiktoken"

_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{number}|>" for number in range(205)))
"""Their ids follow those of the file, in this order."""

_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}"
    "{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""What `make_context` of Qwen-7B-Chat writes."""


def qwen_tokenizer(folder: Path) -> Any:
    """The tokenizer of `qwen.tiktoken`, with the original's special tokens and ids. Answers end in `<|im_end|>`.

    Raises:
        CheckpointError: the file is missing or damaged.
    """
    converter: Any = _Converter  # untyped
    tokenizer: Tokenizer = converter(str(folder / FILE), pattern=_PATTERN, extra_special_tokens=_SPECIAL).converted()
    tokenizer.normalizer = normalizers.NFC()
    end_of_text, *others = _SPECIAL
    wrapper: Any = PreTrainedTokenizerFast  # untyped
    made: Any = wrapper(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token=end_of_text, extra_special_tokens=list(others)
    )
    made.chat_template = _CHAT_TEMPLATE
    return made


class _Converter(TikTokenConverter):
    """transformers' own, but for the reading of the file, which there needs the package tiktoken."""

    @staticmethod
    def load_tiktoken_bpe(tiktoken_url: str) -> dict[bytes, int]:
        try:
            lines = [line.split() for line in Path(tiktoken_url).read_bytes().splitlines() if line]
            ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
        except FileNotFoundError as error:
            raise CheckpointError("there is no such file.", where=tiktoken_url) from error
        except ValueError as error:
            raise CheckpointError(f"this tokenizer file is damaged ({error}).", where=tiktoken_url) from error
        if sorted(ranks.values()) != list(range(len(ranks))):
            raise CheckpointError("this tokenizer file is damaged: ids are missing or twice there.", where=tiktoken_url)
        return ranks
