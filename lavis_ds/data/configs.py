"""Options of the built-in builders and processors. No torch here, so that a configuration is checked in no time."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, PositiveInt, model_validator

from lavis_ds.config.base import LocalPath
from lavis_ds.config.schema import DatasetConfig, Names, ProcessorConfig
from lavis_ds.data.shards.urls import absolute


def _shards(value: Any) -> Any:
    patterns = [value] if isinstance(value, str) else value
    return [absolute(p) if isinstance(p, str) else p for p in patterns] if isinstance(patterns, list) else patterns


Shards = Annotated[list[str], BeforeValidator(_shards)]
"""Shards of a split: paths, patterns and URLs; a single one may be written without brackets."""


class ImageProcessorConfig(ProcessorConfig):
    """Options that every image processor has. Pixels stay uint8; the vision encoder normalises them."""

    image_size: int = Field(224, ge=1, description="height and width of the result, in pixels")
    max_file_pixels: int = Field(
        89_478_485,
        ge=1,
        le=178_956_970,  # beyond it Pillow refuses by itself
        description="refuse pictures with more pixels than this (decompression bombs); the default is Pillow's",
    )


class ImageTrainConfig(ImageProcessorConfig):
    """Random crop and flips for training."""

    augments: ClassVar[bool] = True
    name: str = "image_train"
    scaled_decode: bool = Field(
        True, description="read JPEGs at 1/2, 1/4 or 1/8 of their size where even the smallest crop has pixels enough"
    )
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
    scaled_decode: bool = Field(
        False, description="read JPEGs at 1/2, 1/4 or 1/8 of their size where that has pixels enough"
    )


class ImageAnyResConfig(ImageProcessorConfig):
    """Tiles of the vision encoder's size, as in LLaVA-1.6 and InternVL, with the whole picture small before them."""

    name: str = "image_anyres"
    max_tiles: int | None = Field(
        None, ge=1, le=64, description="all grids of up to so many tiles may be used; this or grids"
    )
    grids: list[tuple[PositiveInt, PositiveInt]] | None = Field(
        None, min_length=1, description="grids that may be used, [columns, rows] each, such as [[2, 1], [1, 2], [2, 2]]"
    )
    thumbnail: bool = Field(True, description="the whole picture as a view of its own before the tiles")
    resize: Literal["pad", "squash"] = Field("pad", description="how the picture fills its grid; pad keeps its shape")

    @model_validator(mode="after")
    def _one_list_of_grids(self) -> ImageAnyResConfig:
        if (self.max_tiles is None) == (self.grids is None):
            raise ValueError("give either max_tiles or grids")
        return self


class ChatConfig(ProcessorConfig):
    """Turns with roles become ids in a chat template, with labels made while they are put together."""

    name: str = "chat"
    template: Literal["auto", "chatml", "tokenizer"] = Field(
        "auto",
        description="what is written around turns; auto: the tokenizer's own template where it has one, else ChatML",
    )
    system: str | None = Field(
        None, description="system message of conversations that bring none; null leaves that to the template"
    )
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
    too_long: Literal["turns", "sample", "cut"] = Field(
        "turns",
        description="what a sample that is too long loses: question-and-answer pairs from its end with their pictures; "
        "all of it; or, with `cut`, the end of the first answer that does not fit and all after it",
    )

    @property
    def has_fixed_lengths(self) -> bool:
        """Which questions are drawn, and which fit, changes from epoch to epoch where they are shuffled."""
        return not self.shuffle_turns

    @model_validator(mode="after")
    def _check_combinations(self) -> ChatConfig:
        if self.turns == "independent" and self.train_on != "assistant":
            raise ValueError(f"turns: independent learns every answer; train_on must be assistant, not {self.train_on}")
        if self.shuffle_turns and self.turns != "independent":
            raise ValueError("shuffle_turns needs turns: independent; the turns of a conversation build on each other")
        if self.max_turns is not None and not self.shuffle_turns:
            raise ValueError("max_turns needs shuffle_turns, else the same questions would be left out for ever")
        return self


class ImageNativeConfig(ImageProcessorConfig):
    """Each picture at its own size, in patches, within bounds (Qwen-VL); `image_size` has no meaning here."""

    name: str = "image_native"
    patch_size: int = Field(16, ge=1, description="side of a patch in pixels: 16 for Qwen3-VL, 14 for Qwen2.5-VL")
    merge_size: int = Field(2, ge=1, description="patches a side that become one token")
    min_pixels: int = Field(65_536, ge=1, description="smaller pictures are enlarged to this many pixels")
    max_pixels: int = Field(
        1_003_520, ge=1, description="larger pictures are shrunk to this many pixels; a token is a square of patches"
    )
    video_min_pixels: int = Field(131_072, ge=1, description="smaller videos are enlarged to this many pixels")
    video_max_pixels: int = Field(
        3_145_728, ge=1, description="larger videos are shrunk to this many pixels; a token is two frames deep"
    )
    video_limits: Literal["total", "frame"] = Field(
        "total", description="the two before are of all frames together (as Qwen3-VL has it) or of each (Qwen2.5-VL)"
    )

    @model_validator(mode="after")
    def _bounds_in_order(self) -> ImageNativeConfig:
        for prefix in ("", "video_"):
            least, most = getattr(self, f"{prefix}min_pixels"), getattr(self, f"{prefix}max_pixels")
            if least > most:
                raise ValueError(f"{prefix}min_pixels ({least}) is larger than {prefix}max_pixels ({most})")
        return self


class PlainConfig(ProcessorConfig):
    """Pictures and text without a chat template, for pre-training: all of the text is learned."""

    name: str = "plain"
    too_long: Literal["cut", "sample"] = Field(
        "cut", description="what does not fit into model.max_txt_len: cut the text, or leave the whole sample out"
    )


class MiniGPT4QwenJsonConfig(DatasetConfig):
    """MiniGPT4Qwen / MPP-LLaVA: image or video, instruction, output (each a string or a list of turns)."""

    builder: str = "minigpt4qwen_json"


class LlavaJsonConfig(DatasetConfig):
    """LLaVA: conversations of human and gpt, `<image>` where a picture stands; text-only items have none."""

    builder: str = "llava_json"


class MessagesConfig(DatasetConfig):
    """Chat messages of OpenAI and Qwen: role and content, a string or parts (text, image_url, image, video)."""

    builder: str = "messages"


class ShareGPTConfig(DatasetConfig):
    """ShareGPT as LLaMA-Factory reads it: conversations of human and gpt, lists of images and videos."""

    builder: str = "sharegpt"


class TextConfig(DatasetConfig):
    """Rows without pictures: text for pre-training, or instruction, input and output."""

    builder: str = "text"


class CaptionsConfig(DatasetConfig):
    """Rows with a picture and its caption: image, and caption or text."""

    builder: str = "captions"
    prompt: str = Field("Describe the picture.", description="what the user says with the picture; may be empty")


class CocoCaptionsConfig(DatasetConfig):
    """COCO captions: files with images and annotations."""

    builder: str = "coco_captions"
    prompt: str = Field("Describe the picture.", description="what the user says with the picture; may be empty")
    samples: dict[str, Literal["caption", "picture", "turns"]] = Field(
        {"train": "caption"},
        description="split name -> caption: one sample for each caption; picture: one for each picture, its first "
        "caption the target; turns: one for each picture, a turn for each caption (with `turns: independent` of the "
        "text processor). Splits that are left out: picture. All captions of a picture are references",
    )


class VQAFilesConfig(DatasetConfig):
    """VQA v2 (a file of questions and one of annotations a split), or rows with image, question and answer(s)."""

    builder: str = "vqa"
    prompt: str = Field(
        "{question}", pattern=r"\{question\}", description="what the user says, with {question} in the question's place"
    )
    image_file: str | dict[str, str] | None = Field(
        None,
        description="for VQA v2: the picture's file below image_root, such as COCO_val2014_{image_id:012d}.jpg; or "
        "split name -> such a pattern",
    )

    @model_validator(mode="after")
    def _patterns_can_be_filled(self) -> VQAFilesConfig:
        patterns = self.image_file.values() if isinstance(self.image_file, dict) else [self.image_file or "{image_id}"]
        for pattern in patterns:
            try:
                names = {pattern.format(image_id=number) for number in (1, 2)}
            except (LookupError, ValueError, AttributeError) as error:
                raise ValueError(f"image_file {pattern!r} can't be filled in: {error}; use {{image_id}}") from None
            if len(names) == 1:
                raise ValueError(f"image_file {pattern!r} is the same for all pictures; use {{image_id}}")
        return self


class WebDatasetConfig(DatasetConfig):
    """WebDataset shards: tar files whose members KEY.EXT with the same key make up a sample."""

    builder: str = "webdataset"
    annotations: dict[str, Shards] = Field(
        default_factory=dict,
        description="split name -> shards: paths, globs, braces ({000..012}), http(s)://, s3://, gs://, hf://",
    )
    format: Literal["captions", "llava", "messages", "minigpt4qwen", "sharegpt"] = Field(
        "captions", description="captions: a text for the picture; others: the format of the JSON member"
    )
    prompt: str = Field(
        "Describe the picture.", description="captions: what the user says with the picture; may be empty"
    )
    text_ext: str = Field("txt", min_length=1, description="captions: extension of the member with the caption")
    json_ext: str = Field(
        "json", min_length=1, description="extension of the member with the item, or with `caption` where no text is"
    )
    skip_incomplete: bool = Field(
        False, description="leave out, with a warning, samples that lack a picture, text or item; else an error"
    )
    stream: bool = Field(
        False, description="read shards from front to back, without an index: for pipes, and for a first look"
    )
    shuffle_buffer: int = Field(
        1000, ge=0, description="stream: samples held in memory to be shuffled; 1 only shuffles shards, 0 nothing"
    )
    retries: int = Field(5, ge=0, description="further tries where a shard that lies elsewhere can't be read")
    timeout_s: float = Field(30, gt=0, description="longest wait for a connection and for its next bytes, seconds")
    cache_gib: float = Field(
        50, gt=0, description="room for shards of web servers that can only send whole files, GiB in the cache folder"
    )

    @model_validator(mode="after")
    def _pictures_are_in_shards(self) -> WebDatasetConfig:
        if self.image_root is not None:
            raise ValueError("image_root has no use here: pictures are members of the shards; leave it out")
        return self


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
