"""Qwen2.5-VL and Qwen3-VL: the classes that they are made of."""

from __future__ import annotations

import copy
import os
from typing import Any

from transformers import AutoVideoProcessor, Qwen2VLVideoProcessor, Qwen3VLVideoProcessor
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

from lavis_ds.config.schema import ProcessorConfig
from lavis_ds.data.configs import ImageNativeConfig
from lavis_ds.models import hub
from lavis_ds.models.qwen_vl import QwenVL
from lavis_ds.runners.export.target import Target, moved

_PREFIXES = {
    "vision.tower.": "model.visual.",
    "language.decoder.": "model.language_model.",
    "language.lm_head.": "lm_head.",
}


def target(model: QwenVL) -> Target:
    """What `model` becomes: the same class, with its vision tower and language model in their places again."""
    whole = model.language.lm
    before, after = model.image_marks
    tokenizer = model.tokenizer

    def make_processor(options: ProcessorConfig, image_processor: Any, chat_template: str | None) -> Any:
        processor_class: Any = PROCESSOR_MAPPING[type(whole.config)]
        return processor_class(
            image_processor,
            tokenizer,
            video_processor=_video_processor(model, options, image_processor),
            chat_template=chat_template,
        )

    return Target(
        type(whole),
        copy.deepcopy(whole.config),
        moved(model, _PREFIXES),
        tokenizer,
        int(whole.config.image_token_id),
        f"{before}<|image_pad|>{after}",
        make_processor,
        model.mean,
        model.std,
        video_text=f"{before}<|video_pad|>{after}",
    )


def _video_processor(model: QwenVL, options: ProcessorConfig, image_processor: Any) -> Any:
    """That of the model's own folder, else its family's with the sizes of this one; within the run's limits."""
    made = _usual_video_processor(model, image_processor)
    if isinstance(options, ImageNativeConfig):
        made.size = {"shortest_edge": options.video_min_pixels, "longest_edge": options.video_max_pixels}
    return made


def _usual_video_processor(model: QwenVL, image_processor: Any) -> Any:
    options: Any = model.config
    if options.path is not None:
        auto_class: Any = AutoVideoProcessor  # untyped
        with hub.explained(options.path, "model.path"), hub.quiet():
            return auto_class.from_pretrained(os.path.expanduser(options.path))
    names = ("patch_size", "temporal_patch_size", "merge_size", "image_mean", "image_std")
    made: Any = Qwen2VLVideoProcessor if model.model_type == "qwen2_5_vl" else Qwen3VLVideoProcessor
    return made(**{name: getattr(image_processor, name) for name in names})
