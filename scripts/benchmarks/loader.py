"""How fast batches come from two data-loading processes: ours, bare decoding, and a loader as common trainers write it.

    python scripts/benchmarks/loader.py --output docs/benchmarks/results/loader.json

All three read the same 640 x 480 JPEG files, each with a question and an answer, and give 224 x 224 pixels. `bare`
decodes and resizes in two processes by the fastest library path and does nothing else: no text, no batch, no hand-over.
`plain` is a dataset in the style of LLaVA's train.py for transformers' Trainer: Pillow, CLIPImageProcessor, a
conversation template tokenised twice to find the answer, a padding collator. Rounds alternate; medians of images/s.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import torch
import transformers
from decode import write_files  # type: ignore[import-not-found]  # the script beside this one
from torch.utils.data import DataLoader, Dataset

from lavis_ds.data.collate import Collator
from lavis_ds.data.configs import ChatConfig, ImageTrainConfig
from lavis_ds.data.conversation import Conversation, Image, Text, Turn
from lavis_ds.data.dataset import EncodedDataset, Source
from lavis_ds.data.loader import BatchLoader
from lavis_ds.data.order import SampleOrder
from lavis_ds.data.plan import PlainRows, StepPlan
from lavis_ds.data.processors.base import TextContext
from lavis_ds.data.processors.chat import Chat
from lavis_ds.data.processors.image import ImageTrain
from lavis_ds.data.tokenizer import train_tokenizer

SIZE, BATCH, WORKERS = 224, 16, 2
QUESTION, ANSWER = (
    "What is in the picture? Answer in one sentence.",
    "A few coloured shapes in front of a soft background.",
)


def processor() -> ImageTrain:
    return ImageTrain(ImageTrainConfig(image_size=SIZE, min_scale=1.0))


def ours(paths: list[str], tokenizer: Any, seconds: float) -> float:
    turns = [(Turn("user", (Image(path), Text(QUESTION))), Turn("assistant", (Text(ANSWER),))) for path in paths]
    conversations = [Conversation(str(number), turn) for number, turn in enumerate(turns)]
    chat = Chat(ChatConfig(), TextContext(tokenizer, 64, 512))
    data = EncodedDataset([Source("pictures", conversations, processor(), chat)], seed=0)
    plan = StepPlan(PlainRows(SampleOrder(data.sizes, seed=0), BATCH, 10**9), BATCH, 1, 0)
    collator = Collator(0, (3, SIZE, SIZE), tokens_per_image=64, datasets=["pictures"])
    batches = BatchLoader(data, plan, collator, range(10**6), WORKERS, False, 60)
    try:
        return rate((batch.num_samples for batch in batches), seconds)
    finally:
        batches.close()


def bare(paths: list[str], seconds: float) -> float:
    context = get_context("fork")
    counts: Any = context.Array("d", WORKERS)
    processes = [context.Process(target=_decode, args=(paths, seconds, counts, w)) for w in range(WORKERS)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return float(sum(counts))


def _decode(paths: list[str], seconds: float, counts: Any, worker: int) -> None:
    torch.set_num_threads(1)
    process, rng = processor(), np.random.default_rng(worker)

    def endless() -> Iterator[int]:
        while True:
            for number in rng.permutation(len(paths)):
                process(process.open(Image(paths[number])), rng)
                yield 1

    counts[worker] = rate(endless(), seconds)


class PlainDataset(Dataset[dict[str, Any]]):
    """As a newcomer would write it after LLaVA's train.py."""

    def __init__(self, paths: list[str], tokenizer: Any) -> None:
        self.items = [{"image": path, "conversations": [QUESTION, ANSWER]} for path in paths] * 1000
        self.tokenizer = tokenizer
        self.processor = transformers.CLIPImageProcessor(
            size={"shortest_edge": SIZE}, crop_size={"height": SIZE, "width": SIZE}
        )

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> dict[str, Any]:
        item = self.items[index]
        image = PIL.Image.open(str(item["image"])).convert("RGB")
        pixels = self.processor(images=image, return_tensors="pt")["pixel_values"][0]
        question, answer = item["conversations"]
        messages = [{"role": "user", "content": "<image>\n" + question}, {"role": "assistant", "content": answer}]
        text = self.tokenizer.apply_chat_template(messages, tokenize=False)
        ids = torch.tensor(self.tokenizer(text).input_ids)
        prompt = self.tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
        labels = ids.clone()
        labels[: len(self.tokenizer(prompt).input_ids)] = -100
        return {"input_ids": ids, "labels": labels, "image": pixels}


def collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
    def pad(name: str, value: int) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence([s[name] for s in samples], batch_first=True, padding_value=value)

    ids = pad("input_ids", 0)
    return {"input_ids": ids, "labels": pad("labels", -100), "images": torch.stack([s["image"] for s in samples])}


def plain(paths: list[str], tokenizer: Any, seconds: float) -> float:
    loader = DataLoader(
        PlainDataset(paths, tokenizer), batch_size=BATCH, shuffle=True, num_workers=WORKERS, collate_fn=collate
    )
    return rate((len(batch["input_ids"]) for batch in loader), seconds)


def rate(numbers: Iterator[int], seconds: float) -> float:
    """Items a second, after a warm-up of a fifth of the time."""
    started, counted_from, count = time.perf_counter(), 0.0, 0
    for number in numbers:
        now = time.perf_counter()
        if now - started < seconds / 5:
            continue
        if not counted_from:
            counted_from = now
            continue
        count += number
        if now - started > seconds:
            break
    return count / (time.perf_counter() - counted_from)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = train_tokenizer([QUESTION, ANSWER], 400)
    with tempfile.TemporaryDirectory() as folder:
        paths = write_files(Path(folder), 200, 640, 480)
        ways: dict[str, Callable[[], float]] = {
            "ours": lambda: ours(paths, tokenizer, arguments.seconds),
            "bare": lambda: bare(paths, arguments.seconds),
            "plain": lambda: plain(paths, tokenizer, arguments.seconds),
        }
        rounds: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(arguments.rounds):
            for name, measure in ways.items():
                rounds[name].append(measure())
    medians = {name: statistics.median(values) for name, values in rounds.items()}
    result = {
        "images_per_s": medians,
        "rounds": rounds,
        "ours_of_bare": medians["ours"] / medians["bare"],
        "ours_over_plain": medians["ours"] / medians["plain"],
        "workers": WORKERS,
        "machine": {"cpus": os.cpu_count(), "processor": platform.processor() or platform.machine()},
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__, "pillow": PIL.__version__},
    }
    text = json.dumps(result, indent=2)
    print(text)
    if arguments.output:
        arguments.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
