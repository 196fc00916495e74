"""Which Hugging Face model a model becomes: by what it is made of, whatever its name is here."""

from __future__ import annotations

from lavis_ds.errors import ConfigError
from lavis_ds.models.base import Model
from lavis_ds.models.projectors.qformer import QFormerProjector
from lavis_ds.models.qwen_vl import QwenVL
from lavis_ds.models.vlm import Vlm
from lavis_ds.runners.export import blip2, llava, qwen_vl
from lavis_ds.runners.export.target import Target


def target_of(model: Model) -> Target:
    """What `model` becomes.

    Raises:
        ConfigError: no class of transformers has a place for it; the message says which part has none.
    """
    if isinstance(model, QwenVL):
        return qwen_vl.target(model)
    if isinstance(model, Vlm) and isinstance(model.projector, QFormerProjector):
        return blip2.target(model)
    if isinstance(model, Vlm):
        return llava.target(model)
    raise ConfigError(
        "this kind of model can't be exported.",
        where="model.arch",
        given=model.config.arch,
        expected="vision encoder, projector and language model (vlm, llava_qwen, minigpt4qwen, ...), or a Qwen-VL",
    )
