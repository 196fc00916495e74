"""Makes a small data set of coloured squares in both JSON formats, and a tokenizer, to try the project on a CPU.

python projects/minigpt4qwen/tiny_data.py --output output/minigpt4qwen/tiny_data
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from PIL import Image, ImageDraw

from lavis_ds.data.tokenizer import train_tokenizer

COLORS = {"red": (220, 40, 40), "green": (40, 160, 60), "blue": (40, 70, 210), "yellow": (235, 210, 50)}
SIZES = {"small": 8, "large": 20}
CAPITALS = {"France": "Paris", "Japan": "Tokyo", "Kenya": "Nairobi", "Peru": "Lima"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("output/minigpt4qwen/tiny_data"), help="folder to write")
    parser.add_argument("--num-pictures", type=int, default=64, help="pictures to draw")
    arguments = parser.parse_args()
    folder: Path = arguments.output
    (folder / "images").mkdir(parents=True, exist_ok=True)
    pictures = [draw(folder / "images", number) for number in range(arguments.num_pictures)]
    captions, conversations, instructions = (
        make_captions(pictures),
        make_conversations(pictures),
        make_instructions(pictures),
    )
    for name, items in (("captions", captions), ("conversations", conversations), ("instructions", instructions)):
        (folder / f"{name}.json").write_text(json.dumps(items, indent=1))
    texts = [json.dumps(items) for items in (captions, conversations, instructions)]
    train_tokenizer(texts, vocab_size=400).save_pretrained(folder / "tokenizer")
    print(f"{folder}: {len(pictures)} pictures, {len(conversations)} conversations, a tokenizer")


Picture = tuple[str, str, str]
"""File name, colour, size."""


def draw(folder: Path, number: int) -> Picture:
    rng = random.Random(number)
    color, size = rng.choice(list(COLORS)), rng.choice(list(SIZES))
    side = SIZES[size]
    x, y = rng.randrange(32 - side), rng.randrange(32 - side)
    image = Image.new("RGB", (32, 32), "white")
    ImageDraw.Draw(image).rectangle((x, y, x + side, y + side), fill=COLORS[color])
    name = f"{number:04d}.png"
    image.save(folder / name)
    return name, color, size


def make_captions(pictures: list[Picture]) -> list[dict[str, object]]:
    """LLaVA format, one turn."""
    return [
        {
            "id": f"caption{n}",
            "image": name,
            "conversations": turns(("<image>\nDescribe the picture.", f"A {size} {color} square.")),
        }
        for n, (name, color, size) in enumerate(pictures)
    ]


def make_conversations(pictures: list[Picture]) -> list[dict[str, object]]:
    """LLaVA format, two turns, and text-only conversations among them."""
    items: list[dict[str, object]] = [
        {
            "id": f"chat{n}",
            "image": name,
            "conversations": turns(("<image>\nWhat color is the square?", color), ("Is it small or large?", size)),
        }
        for n, (name, color, size) in enumerate(pictures)
    ]
    texts = [
        {"id": f"text-{land}", "conversations": turns((f"What is the capital of {land}?", city))}
        for land, city in CAPITALS.items()
    ]
    return [*items, *texts]


def turns(*exchanges: tuple[str, str]) -> list[dict[str, str]]:
    return [
        {"from": speaker, "value": text}
        for exchange in exchanges
        for speaker, text in zip(("human", "gpt"), exchange, strict=True)
    ]


def make_instructions(pictures: list[Picture]) -> list[dict[str, object]]:
    """MiniGPT4Qwen format."""
    return [
        {
            "image": name,
            "instruction": ["<Img><ImageHere></Img> What is this?", "Which color?"],
            "output": [f"a {size} square", color],
        }
        for name, color, size in pictures
    ]


if __name__ == "__main__":
    main()
