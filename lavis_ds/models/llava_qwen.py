"""LLaVA-1.5 (https://arxiv.org/abs/2310.03744) with Qwen: CLIP or SigLIP, two linear layers, Qwen."""

from __future__ import annotations

from lavis_ds import registry
from lavis_ds.models.configs import LlavaQwenConfig
from lavis_ds.models.vlm import Vlm


@registry.register_model("llava_qwen")
class LlavaQwen(Vlm):
    """The parts are chosen by `configs/models/llava_qwen/`."""

    Config = LlavaQwenConfig
