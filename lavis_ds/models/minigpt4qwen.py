"""MiniGPT4Qwen (https://github.com/Coobiw/MPP-LLaVA): BLIP-2's ViT-g and Q-Former before Qwen."""

from __future__ import annotations

from lavis_ds import registry
from lavis_ds.errors import ConfigError
from lavis_ds.models.base import is_frozen
from lavis_ds.models.configs import MiniGPT4QwenConfig
from lavis_ds.models.vlm import Vlm


@registry.register_model("minigpt4qwen")
class MiniGPT4Qwen(Vlm):
    """The parts are chosen by `configs/models/minigpt4qwen/`; in the first stage only `projector.linear` trains."""

    Config = MiniGPT4QwenConfig

    def freeze(self, patterns: list[str]) -> None:
        """As in `Model`, but a Q-Former with random weights is not frozen: nothing behind it could learn from pictures.

        Raises:
            ConfigError: `pretrained` is missing, or a pattern matches nothing.
        """
        super().freeze(patterns)
        qformer = getattr(self.projector, "qformer", None)
        if qformer is not None and is_frozen(qformer) and not (self.config.pretrained or self.config.finetuned):
            raise ConfigError(
                "the Q-Former is frozen and its weights are random.",
                where="model.pretrained",
                expected="weights that hold the Q-Former's, such as BLIP-2's blip2_pretrained_flant5xxl.pth",
                hint="Set it, or take the Q-Former out of model.freeze.",
            )
