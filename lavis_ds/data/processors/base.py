"""What processors are: pictures to pixels, conversations to samples."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import PIL.Image
from torch import Tensor

from lavis_ds.batch import Sample
from lavis_ds.config.schema import ProcessorConfig
from lavis_ds.data.conversation import Conversation


@dataclass(frozen=True)
class TextContext:
    """What encoding text needs to know of the model.

    Attributes:
        tokenizer: the language model's Hugging Face tokenizer.
        tokens_per_image: Q; 0 where the model has no vision part.
        max_length: longest sample in tokens.
    """

    tokenizer: Any
    tokens_per_image: int
    max_length: int


class ImageProcessor(ABC):
    """Picture -> pixels (3, H, W) uint8, H = W = `image_size` of the options."""

    Config: ClassVar[type[ProcessorConfig]] = ProcessorConfig

    def __init__(self, config: ProcessorConfig) -> None:
        self.config = config

    @abstractmethod
    def __call__(self, image: PIL.Image.Image, rng: np.random.Generator) -> Tensor:
        """Args:
        image: RGB picture.
        rng: the only source of randomness; seeded by (seed, epoch, sample).
        """


class TextProcessor(ABC):
    """Conversation and the pixels of its pictures -> `Sample`."""

    Config: ClassVar[type[ProcessorConfig]] = ProcessorConfig

    def __init__(self, config: ProcessorConfig, context: TextContext) -> None:
        self.config = config
        self.context = context

    @abstractmethod
    def __call__(self, conversation: Conversation, images: Tensor, rng: np.random.Generator) -> Sample:
        """Encode for training or for the loss in evaluation. `images` is (n, 3, H, W) uint8.

        Raises:
            DataError: nothing of the sample can be a target, it does not fit, or pictures and places differ in number.
        """

    @abstractmethod
    def prompt(self, conversation: Conversation, images: Tensor) -> Sample:
        """Encode all turns up to the last assistant turn, ready to be continued; labels are all `IGNORE_INDEX`."""

    @property
    @abstractmethod
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end a generated answer."""

    @abstractmethod
    def decode(self, ids: list[int]) -> str:
        """Generated ids -> the answer's text, cut at the end of the turn."""
