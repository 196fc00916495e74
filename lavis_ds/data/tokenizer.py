"""A small ChatML tokenizer trained on one's own texts, for models that start from random weights."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Any:
    """A Hugging Face tokenizer: byte-level BPE, so that any text has ids, with the tokens and template of ChatML.

    Args:
        texts: what it learns its merges from.
        vocab_size: most entries it may have; 256 bytes and the special tokens are always there.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    end_of_text, *turn_marks = SPECIAL_TOKENS
    tokenizer_class: Any = PreTrainedTokenizerFast  # untyped
    wrapped = tokenizer_class(
        tokenizer_object=tokenizer, eos_token=turn_marks[-1], pad_token=end_of_text, extra_special_tokens=turn_marks
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped
