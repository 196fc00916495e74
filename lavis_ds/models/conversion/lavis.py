"""Names of LAVIS and MiniGPT4Qwen (MPP-LLaVA) in ours: BLIP-2's tower and Q-Former, the linear layer, Qwen.

Source: https://github.com/salesforce/LAVIS (`lavis/models/blip2_models`, `lavis/models/eva_vit.py`) and
https://github.com/Coobiw/MPP-LLaVA (`lavis/models/minigpt4qwen_models`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from lavis_ds.models.conversion import qwen
from lavis_ds.models.conversion.names import rename
from lavis_ds.models.conversion.stored import Stored

_BEGINNINGS = ("Qformer.", "query_tokens", "ln_vision.", "visual_encoder.", "llm_proj.", "llm_model.")

_QFORMER = "projector.qformer."
_RENAMES = (
    (r"visual_encoder\.", "vision.vit."),
    (r"ln_vision\.", "vision.layer_norm."),
    (r"query_tokens$", "projector.query_tokens"),
    (r"Qformer\.bert\.embeddings\.LayerNorm\.", f"{_QFORMER}layernorm."),
    (r"Qformer\.bert\.(encoder\.layer\.\d+\.(?:cross)?attention)\.self\.", rf"{_QFORMER}\1.attention."),
    (r"Qformer\.bert\.(encoder\.layer\.\d+\.(?:cross)?attention\.output\.)", rf"{_QFORMER}\1"),
    (r"Qformer\.bert\.(encoder\.layer\.\d+\.(?:intermediate|output)_query\.)", rf"{_QFORMER}\1"),
    (r"llm_proj\.", "projector.linear."),
    (r"llm_model\.", "language.lm."),
)
_TEXT_HALF = "the Q-Former's text half"
_OTHER_PROJECTION = "the projection to another language model"
_LEFT_OUT = (
    (r"(t5|opt)_proj\.", _OTHER_PROJECTION),
    (r"(t5|opt)_model\.", "another language model"),
    (r"Qformer\.cls\.", _TEXT_HALF),
    (r"Qformer\.bert\.embeddings\.(word_embeddings|position_embeddings|position_ids)\b", _TEXT_HALF),
    (r"Qformer\.bert\.encoder\.layer\.\d+\.(intermediate|output)\.", _TEXT_HALF),
    (r"(vision_proj|text_proj|itm_head)\.|temp$", "heads of pretraining"),
    (r"occupy\.", "a filler of the pipeline"),
    (r"rotary_emb\.inv_freq$", "a constant of the pipeline"),
)


@dataclass(frozen=True)
class Converted:
    """Tensors under our names.

    Attributes:
        tensors: name -> tensor.
        left_out: why -> names in the file that have no place here.
        may_lack: beginnings of our names that such a file has nothing for, and that may stay random.
    """

    tensors: dict[str, Stored]
    left_out: dict[str, list[str]] = field(default_factory=dict)
    may_lack: tuple[str, ...] = ()


def is_lavis(names: Iterable[str]) -> bool:
    """Whether these are names of LAVIS or MiniGPT4Qwen."""
    return any(name.startswith(_BEGINNINGS) for name in names)


def convert(tensors: Mapping[str, Stored]) -> Converted:
    """LAVIS's tensors under our names. What has none keeps its own, so that it can be refused by it."""
    renamed: dict[str, Stored] = {}
    left_out: dict[str, list[str]] = {}
    reads_text = "Qformer.bert.embeddings.word_embeddings.weight" in tensors  # so its llm_proj is InstructBLIP's
    for name, tensor in tensors.items():
        why = _OTHER_PROJECTION if reads_text and name.startswith("llm_proj.") else _why_left_out(name)
        if why is None:
            renamed[rename(name, _RENAMES)] = tensor
        else:
            left_out.setdefault(why, []).append(name)
    may_lack = ("projector.linear.",) if _OTHER_PROJECTION in left_out else ()
    return Converted(qwen.convert(renamed, "language.lm."), left_out, may_lack)


def _why_left_out(name: str) -> str | None:
    return next((why for pattern, why in _LEFT_OUT if re.match(pattern, name)), None)
