"""Which attention kernel a part of a model runs, chosen by what is there, and how transformers' decoders get to it.

Packed rows need a kernel of variable length (FlashAttention's packages, or PyTorch's own), FlexAttention, or a mask.
Nothing of a decoder is changed: kernels are registered under a name of their own, and what they need of a batch
travels as keyword arguments (https://huggingface.co/docs/transformers/attention_interface).
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from lavis_ds.batch import SEGMENT_STRIDE
from lavis_ds.errors import ConfigError
from lavis_ds.models.attention_kernels import attention_function, cannot_run, load, missing
from lavis_ds.models.language.segments import attention_mask, boundaries, rows_as_boundaries
from lavis_ds.models.skeleton import reads_weights

_AUTO = ("flash_attention_3", "flash_attention_4", "flash_attention_2", "varlen")
"""In this order; what none of them can do, SDPA does."""

_OF_TRANSFORMERS = {"sdpa": "sdpa", "eager": "eager", "flex": "flex_attention"}

_FLEX_OPTIONS = {"kernel_options": {"FORCE_USE_FLEX_ATTENTION": True}}
"""Rows below 128 tokens would get its kernel for decoding, for which there is no size of blocks (NoValidChoicesError)
where queries times the query heads of a key head exceed 128.

Source: https://github.com/pytorch/pytorch/blob/v2.11.0/torch/_inductor/kernel/flex/flex_decoding.py
"""

_NO_MASK = torch.empty(0, 0, 0, 0, device="cpu")
"""A mask of four axes is passed on as it is; for None, decoders would look at positions (waiting for the device) and,
where these start again, build a mask."""


def _name(kernel: str, use: str) -> str:
    """In transformers; `use` is rows or flash, and no other part of it may be flash."""
    return f"lavis_ds_{use}_{kernel.removeprefix('flash_')}"


for _kernel, _use in product(_AUTO, ("rows", "flash")):
    AttentionInterface.register(_name(_kernel, _use), attention_function(_kernel))
    AttentionMaskInterface.register(_name(_kernel, _use), sdpa_mask)  # for generation; training brings its own


@dataclass(frozen=True)
class Attention:
    """The kernel of a part.

    Attributes:
        kernel: of `_AUTO`, or sdpa, eager or flex.
        where: the key that chooses it.
        explicit: the configuration names it, so that nothing else may run in its place.
        reason: why `auto` is none of `_AUTO`, or why packed rows can't run.
        packs: packed rows and independent questions can run.
    """

    kernel: str
    where: str
    explicit: bool
    reason: str = ""
    packs: bool = True

    @property
    def is_varlen(self) -> bool:
        return self.kernel in _AUTO

    @property
    def build_with(self) -> str:
        """In transformers, the name of a kernel that the model can be built with."""
        return _OF_TRANSFORMERS.get(self.kernel, "sdpa")

    def __str__(self) -> str:
        return self.kernel if self.explicit or not self.reason else f"{self.kernel} ({self.reason})"

    def fitted(self, model: Any) -> Attention:
        """The kernel for this model of transformers, and the model set to it.

        FlashAttention's packages run what is left to transformers (sliding windows) in rows that are not packed.

        Raises:
            ConfigError: it is explicit, and can't do what the model needs.
        """
        kinds, reason = _kinds(model.config), _unfit(model, self.kernel)
        if not reason:
            made = replace(self, reason=kinds or self.reason, packs=not kinds)
        elif not self.explicit:
            made = replace(self, kernel="sdpa", reason=reason, packs=not kinds)
        elif self.kernel.startswith("flash"):
            made = replace(self, reason=reason, packs=False)
        else:
            raise ConfigError(
                f"{self.kernel} can't run this model: {reason}.", where=self.where, hint="Set it to sdpa."
            )
        return made._set(model.config, "rows")

    def fitted_tower(self, tower: Any) -> Attention:
        """The same for a vision tower of transformers that tells kernels where pictures end.

        It does so where the kernel's name has `flash` in it.
        """
        reason = _size_reason(tower.config.hidden_size // tower.config.num_heads) if self.is_varlen else ""
        if reason and self.explicit:
            raise ConfigError(
                f"{self.kernel} can't run this model: {reason}.", where=self.where, hint="Set it to sdpa."
            )
        made = replace(self, kernel="sdpa", reason=reason) if reason else self
        return made._set(tower.config, "flash")

    def options(self, embeds_BTD: Tensor, segment_ids_BT: Tensor | None) -> dict[str, Any]:
        """Arguments of a decoder for rows of these segments, or of one causal sequence each.

        Raises:
            ConfigError: the kernel can't run these rows.
        """
        if segment_ids_BT is None:
            return self._causal(embeds_BTD)
        if not self.packs:
            raise ConfigError(
                f"independent questions and packed rows need full attention in every layer: {self.reason}.",
                where=self.where,
                given=self.kernel,
                hint="Set data.batching to padded or grouped, and text_processor.turns to conversation.",
            )
        if self.runs(embeds_BTD):
            return {"attention_mask": _NO_MASK, **boundaries(segment_ids_BT, embeds_BTD.device).options()}
        segment_ids_BT = segment_ids_BT.to(embeds_BTD.device, non_blocking=True)
        if self.kernel == "flex":
            return {"attention_mask": _block_mask(segment_ids_BT), **_FLEX_OPTIONS}
        additive = embeds_BTD.dtype if self.kernel == "eager" else None
        return {"attention_mask": attention_mask(segment_ids_BT, additive)}

    def runs(self, tensor: Tensor) -> bool:
        """Whether a kernel of variable length runs tensors like this one.

        Raises:
            ConfigError: the kernel is explicit, and can't.
        """
        if not self.is_varlen:
            return False
        reason = cannot_run(tensor)
        if reason and self.explicit:
            raise ConfigError(f"{self.kernel} can't run here: {reason}.", where=self.where, hint="Set it to auto.")
        if reason:
            warnings.warn(f"{self.where}: {self.kernel} can't run here ({reason}); sdpa runs instead.", stacklevel=2)
        return reason is None

    def _causal(self, embeds_BTD: Tensor) -> dict[str, Any]:
        rows, length, _ = embeds_BTD.shape
        if self.kernel == "flex":
            return {"attention_mask": None, **_FLEX_OPTIONS}
        if not self.is_varlen or not self.packs:
            return {"attention_mask": None}
        if self.kernel == "varlen" or not self.runs(embeds_BTD):  # PyTorch's causal kernel is as good
            return {"attention_mask": _NO_MASK}
        return {"attention_mask": _NO_MASK, **rows_as_boundaries((rows, length), embeds_BTD.device).options()}

    def _set(self, config: Any, use: str) -> Attention:
        if not self.is_varlen:
            config._attn_implementation = _OF_TRANSFORMERS[self.kernel]
            return self
        config._attn_implementation = _name(self.kernel, use) if self.packs else self.kernel
        if reads_weights() and self.packs:
            load(self.kernel)
        return self


def choose(option: str, where: str) -> Attention:
    """The kernel that the configuration names, or for `auto` the best that is there.

    Where no weights are read nothing runs, and every kernel is as good as there.

    Raises:
        ConfigError: the named kernel can't run on this machine.
    """
    if option == "auto":
        there = next((kernel for kernel in _AUTO if missing(kernel) is None), None)
        return Attention(there or "sdpa", where, explicit=False, reason="" if there else str(missing("varlen")))
    reason = missing(option) if reads_weights() else None
    if reason:
        raise ConfigError(
            f"the attention kernel {option} can't run here: {reason}.", where=where, hint="Set it to auto."
        )
    return Attention(option, where, explicit=True)


def _unfit(model: Any, kernel: str) -> str:
    """Why `kernel` can't run this language model; empty where it can."""
    if kernel in ("sdpa", "eager"):
        return ""
    config = model.config.get_text_config()
    if not getattr(model, "_supports_attention_backend", False):
        return f"transformers' {config.model_type} takes no kernels from outside"
    if kinds := _kinds(model.config):
        return kinds
    if getattr(config, "attention_dropout", 0.0):
        return "the model has dropout in attention"
    if kernel == "flex":
        return ""
    if getattr(config, "attn_logit_softcapping", None):
        return "the model caps attention scores"
    return _size_reason(head_size(config))


def _size_reason(head_size: int) -> str:
    return "" if head_size <= 256 and head_size % 8 == 0 else f"its heads have size {head_size}"


def _kinds(config: Any) -> str:
    """Kinds of attention other than full; empty where there are none."""
    kinds = set(getattr(config.get_text_config(), "layer_types", None) or []) - {"full_attention"}
    return f"the model has layers of {' and '.join(sorted(kinds))}" if kinds else ""


def head_size(config: Any) -> int:
    """Width of a head's queries and keys, by a language model's configuration."""
    if nope := getattr(config, "qk_nope_head_dim", None):
        return int(nope + config.qk_rope_head_dim)
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _block_mask(segment_ids_BT: Tensor) -> BlockMask:
    """`attention_mask` as FlexAttention takes it: blocks of tokens that all, partly or not at all attend."""
    rows, length = segment_ids_BT.shape
    prefixes_BT = segment_ids_BT // SEGMENT_STRIDE * SEGMENT_STRIDE

    def attends(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        other = segment_ids_BT[row, key]
        return (query >= key) & ((segment_ids_BT[row, query] == other) | (prefixes_BT[row, query] == other))

    on_gpu = segment_ids_BT.is_cuda
    return create_block_mask(attends, rows, None, length, length, device=segment_ids_BT.device, _compile=on_gpu)
