"""Makes the quickstart's tokenizer from the training questions: byte-level BPE, so any text a user types has ids.

python projects/quickstart/prepare.py            # writes output/quickstart/tokenizer
"""

from __future__ import annotations

import argparse
from pathlib import Path

from lavis_ds import load_dataset
from lavis_ds.data.tokenizer import train_tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("output/quickstart/tokenizer"), help="folder to write")
    parser.add_argument("--vocab-size", type=int, default=512, help="most entries the tokenizer may have")
    arguments = parser.parse_args()
    conversations = load_dataset("easy_vqa", ["train"])["train"]
    texts = ["user\nassistant\n", *(turn.text for conversation in conversations for turn in conversation.turns)]
    tokenizer = train_tokenizer(texts, arguments.vocab_size)
    tokenizer.save_pretrained(arguments.output)
    print(f"{arguments.output}: tokenizer with {len(tokenizer)} entries")


if __name__ == "__main__":
    main()
