"""Image processors of transformers that make of a picture what ours do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from PIL.Image import Resampling
from transformers import CLIPImageProcessor, JanusImageProcessor, Qwen2VLImageProcessor

from lavis_ds.config.schema import ProcessorConfig
from lavis_ds.data.configs import ImageAnyResConfig, ImageEvalConfig, ImageNativeConfig
from lavis_ds.errors import ConfigError

_WHERE = "vis_processor.eval"


def image_processor(options: ProcessorConfig, mean: Sequence[float], std: Sequence[float]) -> Any:
    """Resizes as the processor of these options does, and normalises as the vision encoder does.

    Args:
        options: of the processor used in evaluation.
        mean: of each channel, for pixels in 0..1.
        std: of each channel.

    Raises:
        ConfigError: transformers has none like it; the message says why.
    """
    statistics = {"image_mean": list(mean), "image_std": list(std), "resample": Resampling.BICUBIC}
    if isinstance(options, ImageNativeConfig):
        return _native(options, statistics)
    if isinstance(options, ImageAnyResConfig):
        raise ConfigError(
            "pictures in tiles can't be exported: LLaVA-NeXT and LLaVA-OneVision of transformers join the tiles' "
            "features to one large grid, cut off its padding and add a token to each row; here tile follows tile.",
            where=_WHERE,
            given=options.name,
            expected="image_eval",
            hint="Name a dataset with image_eval by --dataset, if the model should see whole pictures only.",
        )
    if isinstance(options, ImageEvalConfig):
        return _fixed(options, statistics)
    raise ConfigError(
        "transformers has no image processor like this one.",
        where=_WHERE,
        given=options.name,
        expected="image_eval or image_native",
        hint="Give the dataset a vis_processor with `eval: {name: image_eval, ...}`.",
    )


def _fixed(options: ImageEvalConfig, statistics: dict[str, Any]) -> Any:
    square = {"height": options.image_size, "width": options.image_size}
    if options.resize == "squash":
        return CLIPImageProcessor(size=square, crop_size=square, do_center_crop=False, **statistics)
    if options.resize == "crop":
        return CLIPImageProcessor(size={"shortest_edge": options.image_size}, crop_size=square, **statistics)
    if [int(mean * 255) for mean in statistics["image_mean"]] != [127] * 3:
        raise ConfigError(
            "pictures padded with grey can't be exported: transformers pads with the vision encoder's mean colour.",
            where=f"{_WHERE}.resize",
            given=f"pad, where the mean is {statistics['image_mean']}",
            expected="squash or crop, or a vision encoder with mean 0.5",
        )
    return JanusImageProcessor(size=square, min_size=1, **statistics)


def _native(options: ImageNativeConfig, statistics: dict[str, Any]) -> Any:
    return Qwen2VLImageProcessor(
        size={"shortest_edge": options.min_pixels, "longest_edge": options.max_pixels},
        patch_size=options.patch_size,
        merge_size=options.merge_size,
        temporal_patch_size=2,
        **statistics,
    )
