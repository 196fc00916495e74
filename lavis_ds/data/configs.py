"""Options of the built-in builders and processors. No torch here, so that a configuration is checked in no time."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from lavis_ds.config.base import LocalPath
from lavis_ds.config.schema import DatasetConfig, Names, ProcessorConfig


class ImageProcessorConfig(ProcessorConfig):
    """Options that every image processor has. Pixels stay uint8; the vision encoder normalises them."""

    image_size: int = Field(224, ge=1, description="height and width of the result, in pixels")


class ImageTrainConfig(ImageProcessorConfig):
    """Random crop and flips for training."""

    name: str = "image_train"
    min_scale: float = Field(
        0.5, gt=0, le=1, description="smallest share of the area that a random crop keeps; 1 keeps all of it"
    )
    max_scale: float = Field(1.0, gt=0, le=1, description="largest share of the area that a random crop keeps")
    horizontal_flip: bool = Field(
        False, description="mirror left-right half of the time; wrong where answers say left or right"
    )
    max_shift: int = Field(0, ge=0, description="move the picture by up to this many pixels each way")
    vertical_flip: bool = Field(False, description="mirror up-down half of the time")

    @model_validator(mode="after")
    def _scales_in_order(self) -> ImageTrainConfig:
        if self.min_scale > self.max_scale:
            raise ValueError(f"min_scale ({self.min_scale}) is larger than max_scale ({self.max_scale})")
        return self


class ImageEvalConfig(ImageProcessorConfig):
    """Resize without randomness."""

    name: str = "image_eval"
    resize: Literal["squash", "crop", "pad"] = Field("squash", description="how another aspect ratio becomes a square")


class ChatConfig(ProcessorConfig):
    """Turns with roles become ids in ChatML, with labels made while they are put together."""

    name: str = "chat"
    system: str | None = Field(None, description="system message of conversations that bring none; null writes none")
    train_on: Literal["assistant", "last", "all"] = Field(
        "assistant", description="targets: every assistant turn, only the last one, or all turns"
    )
    turns: Literal["conversation", "independent"] = Field(
        "conversation",
        description="independent: every question with its answer sees the pictures but not the other questions",
    )
    shuffle_turns: bool = Field(False, description="with independent turns: draw their order anew every epoch")
    max_turns: int | None = Field(
        None,
        ge=1,
        description="with shuffle_turns: learn this many of a sample's questions at a time, drawn every epoch",
    )

    @model_validator(mode="after")
    def _check_combinations(self) -> ChatConfig:
        if self.turns == "independent" and self.train_on != "assistant":
            raise ValueError(f"turns: independent learns every answer; train_on must be assistant, not {self.train_on}")
        if self.shuffle_turns and self.turns != "independent":
            raise ValueError("shuffle_turns needs turns: independent; the turns of a conversation build on each other")
        if self.max_turns is not None and not self.shuffle_turns:
            raise ValueError("max_turns needs shuffle_turns, else the same questions would be left out for ever")
        return self


class MiniGPT4QwenJsonConfig(DatasetConfig):
    """MiniGPT4Qwen / MPP-LLaVA JSON: image, instruction, output (each a string or a list of turns)."""

    builder: str = "minigpt4qwen_json"


class LlavaJsonConfig(DatasetConfig):
    """LLaVA JSON: conversations of human and gpt, `<image>` where a picture stands; text-only items have none."""

    builder: str = "llava_json"


class EasyVQAConfig(DatasetConfig):
    """easy-VQA (https://github.com/vzhou842/easy-VQA): coloured shapes, 13 answers; splits train, val and test."""

    builder: str = "easy_vqa"
    root: LocalPath | None = Field(
        None, description="folder that holds train/ and test/; the installed package's where left out"
    )
    num_val_images: int = Field(0, ge=0, description="pictures taken from the end of train to make the split `val`")


class EmojiConfig(DatasetConfig):
    """Emoji pictures with their names, from npm's emoji-datasource packages."""

    builder: str = "emoji"
    root: LocalPath = Field(description="folder with emoji.json and, for each style, <style>/ or img/<style>/64/")
    styles: dict[str, Names] = Field(min_length=1, description="split name -> styles, such as train: [google, twitter]")
    question: str = Field("What is this emoji?", min_length=1, description="what the user asks about every picture")
    max_emoji: int | None = Field(None, ge=1, description="use only the first so many emoji; all where left out")
