"""Qwen-VL's language model: rotary positions along time, height and width, and picture features for its first layers.

Shape suffixes: B rows, T tokens a row, F = B * T, Q picture tokens, K copies of a row, Dl width.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lavis_ds.errors import DataError
from lavis_ds.models.attention import Attention
from lavis_ds.models.configs import QwenVLLanguageConfig
from lavis_ds.models.language.hf_causal_lm import HFCausalLM
from lavis_ds.models.language.output_layer import OutputLayer
from lavis_ds.models.language.tiled_mlp import tile_mlps
from lavis_ds.models.layers import repeated_layers
from lavis_ds.models.moe.configs import MoEConfig
from lavis_ds.models.moe.experts import own_coefficient
from lavis_ds.models.parts import LanguageModel
from lavis_ds.models.recomputation import recompute


class DeepStack(NamedTuple):
    """What is added to hidden states behind the decoder's first layers (https://arxiv.org/abs/2406.04334).

    Attributes:
        places: where: Q flat positions of (B * T).
        features: for each of the layers (Q, Dl).
    """

    places: Tensor
    features: tuple[Tensor, ...]

    @classmethod
    def at(cls, image_index_M: Tensor, features: tuple[Tensor, ...]) -> DeepStack | None:
        """Features of picture tokens at their places; None where the tower gives none.

        With M = 0 (the blank picture of a batch without pictures) they enter with weight zero at the first position, so
        that the graph and every collective are the same on all ranks.
        """
        if not features:
            return None
        if image_index_M.numel() == 0:
            return cls(image_index_M.new_zeros(1), tuple((feature * 0).sum(0, keepdim=True) for feature in features))
        return cls(image_index_M, features)

    def repeated(self, times: int, length: int) -> DeepStack:
        """For rows of `length` tokens of which each stands `times` times in a row, as beam search makes them."""
        row_Q, place_Q = self.places // length, self.places % length
        copies_K = torch.arange(times, device=self.places.device)
        index_KQ = (row_Q * times + copies_K[:, None]) * length + place_Q
        return DeepStack(index_KQ.flatten(), tuple(feature.repeat(times, 1) for feature in self.features))

    def options(self) -> dict[str, Any]:
        """As the decoder of transformers takes it; see `_add_features`."""
        return {"visual_pos_masks": self.places, "deepstack_visual_embeds": list(self.features)}


def _add_features(hidden_BTDl: Tensor, places: Tensor, features_QDl: Tensor) -> Tensor:
    """In place of the decoder's own way, which takes a mask and waits for the device to count it, in every layer.

    A mask, as transformers itself brings one, is taken too.
    """
    places_Q = places.flatten().nonzero()[:, 0] if places.dtype == torch.bool else places
    flat_FDl = hidden_BTDl.flatten(0, 1).index_add(0, places_Q, features_QDl.to(hidden_BTDl.dtype))
    return flat_FDl.view_as(hidden_BTDl)


class QwenVLDecoder(HFCausalLM):
    """Decoder and output layer of a Qwen-VL of transformers, and its tokenizer.

    Args:
        whole: the Hugging Face model; its vision tower is no part of this.
        config: options of this part.
        tokenizer: the model's.
        kernel: of attention.
    """

    def __init__(self, whole: Any, config: QwenVLLanguageConfig, tokenizer: Any, kernel: Attention) -> None:
        LanguageModel.__init__(self)  # not HFCausalLM's, which builds a model of its own
        object.__setattr__(self, "lm", whole)  # `generate` needs all of it; its modules are registered once, here:
        self.decoder: Any = whole.model.language_model
        if hasattr(self.decoder, "_deepstack_process"):
            self.decoder._deepstack_process = _add_features
        self.lm_head: Any = whole.lm_head
        text = self.decoder.config
        self.tokenizer = tokenizer
        self.kernel = kernel.fitted(self.decoder)
        self.attention = str(self.kernel)
        self.hidden_size, self.vocab_size = int(text.hidden_size), int(text.vocab_size)
        self.num_layers = int(text.num_hidden_layers)
        self._check()
        self._config: Any = config
        self.balance_coefficient = own_coefficient(text)
        OutputLayer.of(self.lm_head, int(config.loss_chunk_gib * 2**30))
        tile_mlps(repeated_layers(self.decoder), config.mlp_tiles, "model.language")
        recompute(repeated_layers(self.decoder), config, "model.language")

    def upcycle(self, options: MoEConfig) -> None:
        """Raises:
        ConfigError: always; Qwen3-VL has a sparse sibling of its own, `qwen3_vl_moe`.
        """
        LanguageModel.upcycle(self, options)

    def forward(
        self,
        embeds_BTDl: Tensor,
        position_ids_BT: Tensor,
        segment_ids_BT: Tensor | None = None,
        deepstack: DeepStack | None = None,
    ) -> Tensor:
        """See `LanguageModel.forward`; positions are (3, B, T).

        Raises:
            DataError: positions are (B, T), as models with fixed-size pictures have them.
        """
        if position_ids_BT.dim() != 3:
            raise DataError(
                "these positions do not suit the model.",
                given=f"shape {tuple(position_ids_BT.shape)}",
                expected="(3, B, T), for time, height and width",
            )
        output = self.decoder(
            inputs_embeds=embeds_BTDl,
            position_ids=position_ids_BT,
            use_cache=False,
            **self.kernel.options(embeds_BTDl, segment_ids_BT),
            **(deepstack.options() if deepstack else {}),
        )
        hidden_BTDl: Tensor = output.last_hidden_state
        return hidden_BTDl

    def adapters_added(self) -> None:
        self.lm.lm_head = self.lm_head  # the only module that both hold by name

    @torch.no_grad()
    def continue_prompts(
        self,
        embeds_BTDl: Tensor,
        attention_mask_BT: Tensor,
        position_ids_3BT: Tensor,
        deepstack: DeepStack | None,
        **options: Any,
    ) -> Tensor:
        """As `generate`, with positions of the prompts, and features for the first layers."""
        # A token after a picture comes after its largest position; transformers counts on from the last one's.
        # Positions along time don't count: steps of a video that lie far apart run ahead of the text behind it.
        lag_3B1 = position_ids_3BT[1:].amax((0, 2))[None, :, None] - position_ids_3BT[..., -1:]

        def complete(_: Any, args: tuple[Any, ...], given: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            times = len(given["inputs_embeds"]) // len(embeds_BTDl)
            if given["past_key_values"].get_seq_length() == 0:  # the prompts; later calls bring the new tokens alone
                stack = deepstack.repeated(times, embeds_BTDl.shape[1]) if deepstack and times > 1 else deepstack
                return args, {**given, **(stack.options() if stack else {})}
            return args, {**given, "position_ids": given["position_ids"] + lag_3B1.repeat_interleave(times, 1)}

        handle = self.decoder.register_forward_pre_hook(complete, with_kwargs=True)
        try:
            return self.generate(embeds_BTDl, attention_mask_BT, position_ids=position_ids_3BT, **options)
        finally:
            handle.remove()
