"""What processors are: pictures to pixels, conversations to samples."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar

import numpy as np
import PIL.Image
from torch import Tensor

from lavis_ds.batch import Sample
from lavis_ds.config.schema import ProcessorConfig
from lavis_ds.data.configs import ImageProcessorConfig
from lavis_ds.data.conversation import Conversation, Image
from lavis_ds.data.processors.open_image import image_size, open_pixels
from lavis_ds.data.processors.views import Views


@dataclass(frozen=True)
class TextContext:
    """What encoding text needs to know of the model.

    Attributes:
        tokenizer: the language model's Hugging Face tokenizer.
        tokens_per_image: Q, the tokens of a view; a fraction where views are patches; 0 without a vision part.
        max_length: longest sample in tokens.
        merge_size: patches a side of a token, where the model has multimodal rotary positions.
        image_marks: tokens that stand before and after each picture.
        placeholders: tokens on the places of pictures and on those of videos, where the model was trained with such.
        tokens_per_second: positions a second of video, in models of native resolution that place its frames in time;
            None in those that read their times as text.
    """

    tokenizer: Any
    tokens_per_image: int | Fraction
    max_length: int
    merge_size: int | None = None
    image_marks: tuple[str, str] | None = None
    placeholders: tuple[str, str] | None = None
    tokens_per_second: float | None = None


class ImageProcessor(ABC):
    """Picture -> pixels (3, H, W) or, in several views, (V, 3, H, W), uint8, H = W = `image_size` of the options.

    At native resolution `Views` of patches.
    """

    Config: ClassVar[type[ImageProcessorConfig]] = ImageProcessorConfig
    config: ImageProcessorConfig

    def __init__(self, config: ImageProcessorConfig) -> None:
        self.config = config

    def open(self, image: Image) -> PIL.Image.Image | Tensor:
        """What `__call__` takes: here (3, H, W) uint8, RGB, upright, decoded as this processor needs it.

        Raises:
            DataError: it can't be read, or has too many pixels.
        """
        return open_pixels(image, max_pixels=self.config.max_file_pixels, min_size=self.min_size)

    def count_views(self, image: Image) -> int:
        """V of the picture, from its header alone, if need be.

        Raises:
            DataError: it can't be read, or has too many pixels.
        """
        if type(self).num_views is ImageProcessor.num_views:
            return 1
        return self.num_views(*image_size(image, max_pixels=self.config.max_file_pixels))

    @abstractmethod
    def __call__(self, image: PIL.Image.Image | Tensor, rng: np.random.Generator) -> Tensor | Views:
        """Args:
        image: what `open` gives, or an RGB picture of Pillow's; `to_tensor` makes one of the two of them.
        rng: the only source of randomness; seeded by (seed, epoch, sample).
        """

    def num_views(self, width: int, height: int) -> int:
        """V of a picture of this size (upright); each view takes the model's `tokens_per_image` tokens."""
        return 1

    def min_size(self, width: int, height: int) -> tuple[int, int] | None:
        """Smallest (width, height) that a picture of this size (upright) may be decoded at; None: only in full.

        JPEGs are read faster at a half, a quarter or an eighth of their size.
        """
        return None


class TextProcessor(ABC):
    """Conversation and the pixels of its pictures -> `Sample`."""

    Config: ClassVar[type[ProcessorConfig]] = ProcessorConfig

    def __init__(self, config: ProcessorConfig, context: TextContext) -> None:
        self.config = config
        self.context = context

    @abstractmethod
    def __call__(
        self, conversation: Conversation, images: Sequence[Tensor | Views], rng: np.random.Generator
    ) -> Sample:
        """Encode for training or for the loss in evaluation.

        Args:
            conversation: without videos, or with such as the model takes whole.
            images: (V, 3, H, W) uint8 of each picture, or (3, H, W); only V matters where tokens are counted. Of whole
                videos their patches and times.
            rng: the only source of randomness.

        Raises:
            DataError: nothing of the sample can be a target, it does not fit, or pictures and places differ in number.
        """

    @abstractmethod
    def prompt(self, conversation: Conversation, images: Sequence[Tensor | Views]) -> Sample:
        """Encode all turns up to the last assistant turn, ready to be continued; labels are all `IGNORE_INDEX`."""

    @property
    @abstractmethod
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end a generated answer."""

    @abstractmethod
    def decode(self, ids: list[int]) -> str:
        """Generated ids -> the answer's text, cut at the end of the turn."""
