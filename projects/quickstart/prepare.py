"""Makes the quickstart's tokenizer from the training questions: byte-level BPE, so any text a user types has ids.

python projects/quickstart/prepare.py            # writes output/quickstart/tokenizer
"""

from __future__ import annotations

import argparse
from pathlib import Path

from lavis_ds import load_dataset

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make_tokenizer(folder: Path, vocab_size: int) -> int:
    """Train the tokenizer on easy-VQA's training split and save it. Returns its number of entries."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    texts = ["system\nuser\nassistant\n"]
    for conversation in load_dataset("easy_vqa", ["train"])["train"]:
        texts += [turn.text for turn in conversation.turns]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=["<|im_start|>", "<|im_end|>"],
    )
    wrapped.chat_template = CHAT_TEMPLATE
    wrapped.save_pretrained(folder)
    return len(wrapped)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("output/quickstart/tokenizer"), help="folder to write")
    parser.add_argument("--vocab-size", type=int, default=512, help="most entries the tokenizer may have")
    arguments = parser.parse_args()
    entries = make_tokenizer(arguments.output, arguments.vocab_size)
    print(f"{arguments.output}: tokenizer with {entries} entries")


if __name__ == "__main__":
    main()
