"""What an exported model is compared on: a question about a picture, and one without."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import torch
from torch import Tensor

from lavis_ds.batch import Batch
from lavis_ds.config.schema import RootConfig
from lavis_ds.data.conversation import Content, Conversation, Image, Text, Turn
from lavis_ds.data.order import SampleKey
from lavis_ds.data.processors.chat import Chat
from lavis_ds.models.base import Model
from lavis_ds.runners import build
from lavis_ds.runners.export.target import Target

_QUESTION = "What is in the picture, and what is on its left?"
_ANSWER = "A blue square."


@dataclass(frozen=True)
class Question:
    """One sample, as this package's model takes it and as a user of transformers would ask it.

    Attributes:
        name: for messages.
        batch: of one row.
        picture: file, or None.
        messages: of the chat template; None where the model was trained without one.
        text: what the processor is given where there are no messages.
    """

    name: str
    batch: Batch
    picture: Path | None
    messages: list[dict[str, Any]] | None
    text: str

    @property
    def length(self) -> int:
        """Tokens without padding, which stands on the right."""
        return self.batch.num_tokens

    def tensors(self, model: Any, target: Target) -> dict[str, Tensor]:
        """What the exported model's forward pass takes, without its processor."""
        batch = self.batch
        ids = batch.input_ids.clone()
        ids.view(-1)[batch.image_index] = target.image_token_id
        ids = ids[:, : self.length]
        tensors = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if self.picture is not None or target.needs_picture:
            tensors["pixel_values"] = model.vision.pixels(batch.images)
        if self.picture is not None and batch.image_grids is not None:
            tensors["image_grid_thw"] = batch.image_grids
            tensors["mm_token_type_ids"] = (ids == target.image_token_id).long()
        return tensors


def questions(config: RootConfig, entry: str, model: Model, target: Target, folder: Path) -> Iterator[Question]:
    """Both samples, processed as those of the dataset `entry` are in evaluation.

    Args:
        config: the run.
        entry: of `datasets:`.
        model: it has the tokenizer.
        target: what is compared with.
        folder: where the picture is written.
    """
    context = build.text_context(model)
    picture = folder / "picture.png"
    _draw().save(picture)
    for name, shown in (("picture and text", picture), ("text", None)):
        content: tuple[Content, ...] = ((Image(str(shown)),) if shown else ()) + (Text(_QUESTION),)
        conversation = Conversation(name, (Turn("user", content), Turn("assistant", (Text(_ANSWER),))))
        data = build.encoded(config, {entry: [conversation]}, context, training=False)
        is_chat = isinstance(data.sources[0].text_processor, Chat)
        if is_chat:  # up to where the answer begins, as a user would ask
            data = build.encoded(config, {entry: [conversation]}, context, training=False, prompts=True)
        batch = build.collator(model, data)([[data[SampleKey(0, 0, epoch=0, position=0)]]])
        text = f"{target.image_text if shown else ''}{_ANSWER}{target.tokenizer.eos_token}"
        yield Question(name, batch, shown, _messages(shown) if is_chat else None, text)


def _messages(picture: Path | None) -> list[dict[str, Any]]:
    content: list[dict[str, Any]] = [{"type": "image", "image": str(picture)}] if picture else []
    return [{"role": "user", "content": [*content, {"type": "text", "text": _QUESTION}]}]


def _draw(width: int = 500, height: int = 375) -> PIL.Image.Image:
    """A picture with smooth and sharp places, wider than high."""
    x, y = np.meshgrid(np.linspace(0, 1, width), np.linspace(0, 1, height))
    pixels = np.stack([255 * x, 255 * y, 127 + 120 * np.sin(12 * x + 7 * y)], axis=-1).astype(np.uint8)
    pixels[60:160, 80:180] = (30, 60, 220)
    pixels[200:330, 300:420:4] = (250, 250, 240)
    return PIL.Image.fromarray(pixels)
