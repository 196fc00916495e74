"""What stands beside the weights: configuration, generation settings, tokenizer, processor, chat template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from lavis_ds.config.schema import RootConfig
from lavis_ds.data.processors.base import TextProcessor
from lavis_ds.errors import ConfigError, did_you_mean
from lavis_ds.models import hub
from lavis_ds.models.base import Model
from lavis_ds.runners import build
from lavis_ds.runners.export.chat_template import chat_template
from lavis_ds.runners.export.image_processor import image_processor
from lavis_ds.runners.export.target import Target


def entry_of(config: RootConfig, dataset: str | None) -> str:
    """The entry of `datasets:` whose processors are exported: the one named, or the first with pictures.

    Raises:
        ConfigError: there is none of that name.
    """
    if dataset is not None and dataset not in config.datasets:
        raise ConfigError(
            "the run has no such dataset.",
            where="--dataset",
            given=dataset,
            expected=f"one of {', '.join(config.datasets)}",
            hint=did_you_mean(dataset, config.datasets),
        )
    with_pictures = [name for name, options in config.datasets.items() if options.vis_processor is not None]
    return dataset or next(iter([*with_pictures, *config.datasets]))


class Settings:
    """The files beside the weights, made of a dataset's processors as they are in evaluation.

    Args:
        config: the run.
        entry: of `datasets:`.
        model: shapes are enough.
        target: what it becomes.

    Raises:
        ConfigError: transformers has no processor that does the same.
    """

    def __init__(self, config: RootConfig, entry: str, model: Model, target: Target) -> None:
        self._target = target
        images = config.datasets[entry].vis_processor
        if images is None:
            raise ConfigError("this dataset has no vis_processor: how are pictures resized?", where=f"datasets.{entry}")
        context = build.text_context(model)
        source = build.encoded(config, {entry: []}, context, training=False).sources[0]
        self._text: TextProcessor = source.text_processor
        template = chat_template(self._text, target.tokenizer, target.image_text, target.video_text)
        with hub.quiet():
            pixels = image_processor(images.eval, target.mean, target.std)
            self._processor = target.make_processor(images.eval, pixels, template)

    def write(self, folder: Path, dtype: torch.dtype) -> None:
        """Write all of them; `dtype` is the weights'."""
        config, processor = self._target.config, self._processor
        config.architectures = [self._target.model_class.__name__]
        for part in (config, *(getattr(config, name) for name in config.sub_configs)):
            part.dtype = dtype
        with hub.quiet():
            config.save_pretrained(folder)
            self._generation_config().save_pretrained(folder)
            processor.tokenizer.chat_template = processor.chat_template
            processor.save_pretrained(folder)
            processor.image_processor.save_pretrained(folder)  # also alone, for programs that look for it there
            if getattr(processor, "video_processor", None) is not None:
                processor.video_processor.save_pretrained(folder)

    def _generation_config(self) -> Any:
        """Greedy; answers end where the dataset's do, and pictures' places are never generated."""
        tokenizer = self._target.tokenizer
        pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        config_class: Any = GenerationConfig  # untyped
        return config_class(
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=list(self._text.stop_ids),
            pad_token_id=pad,
            suppress_tokens=[self._target.image_token_id],
        )
