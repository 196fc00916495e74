"""The language model inside a Hugging Face vision-language model, and the token that stands for pictures."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from lavis_ds.models.language.hf_causal_lm import HFCausalLM
from lavis_ds.models.vlm import Vlm
from lavis_ds.runners.export.target import Piece, cannot_express, moved

IMAGE_TOKEN = "<image>"


def language_of(model: Vlm, model_class: str) -> HFCausalLM:
    """The language model.

    Raises:
        ConfigError: it is none of transformers'.
    """
    if not isinstance(model.language, HFCausalLM):
        raise cannot_express(
            model_class,
            "its language model is one of transformers",
            where="model.language.name",
            given=type(model.language).__name__,
            expected="hf_causal_lm",
        )
    return model.language


def with_image_token(tokenizer: Any) -> tuple[Any, int]:
    """A copy of the tokenizer that has `<image>` as a special token, and that token's id."""
    from tokenizers import AddedToken

    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.add_tokens([AddedToken(IMAGE_TOKEN, special=True, normalized=False)], special_tokens=True)
    return tokenizer, int(tokenizer.convert_tokens_to_ids(IMAGE_TOKEN))


def text_config(language: HFCausalLM, image_token_id: int) -> Any:
    """The language model's own configuration, with as many rows as the tokenizer needs."""
    config = copy.deepcopy(language.lm.config)
    config.vocab_size = max(language.vocab_size, image_token_id + 1)
    return config


def language_pieces(
    model: Vlm, language: HFCausalLM, rows: int, *, decoder: str | None = None, head: str | None = None
) -> dict[str, Piece]:
    """Pieces of decoder and output layer.

    Rows that `<image>` needs and the model lacks are zero: what stands there is replaced before it is used, and the
    generation settings keep the token from being generated.

    Args:
        model: whose `language` it is.
        language: the part itself.
        rows: of embedding and output layer.
        decoder: name of the decoder in the other model; where None, the whole language model is its `language_model`.
        head: name of the output layer there.
    """
    lm = language.lm
    names = {module: name for name, module in lm.named_modules()}
    own_decoder, own_head = names[lm.get_decoder()], names[lm.get_output_embeddings()]
    embedding = names[lm.get_input_embeddings()].removeprefix(f"{own_decoder}.")
    decoder, head = decoder or f"language_model.{own_decoder}", head or f"language_model.{own_head}"
    pieces = moved(model, {f"language.lm.{own_decoder}.": f"{decoder}.", f"language.lm.{own_head}.": f"{head}."})
    for name in (f"{decoder}.{embedding}.weight", f"{head}.weight", f"{head}.bias"):
        if name in pieces:
            pieces[name] = pieces[name].then(lambda tensor: _with_rows(tensor, rows))
    return pieces


def _with_rows(tensor: Tensor, rows: int) -> Tensor:
    missing = rows - tensor.shape[0]
    return F.pad(tensor, (0, 0) * (tensor.dim() - 1) + (0, missing)) if missing > 0 else tensor
