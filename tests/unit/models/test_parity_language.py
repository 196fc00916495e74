"""Language models have the logits, losses and gradients of transformers' own forward pass with the same weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from lavis_ds.batch import IGNORE_INDEX, PADDING_SEGMENT, SEGMENT_STRIDE
from lavis_ds.models.configs import HFCausalLMConfig
from lavis_ds.models.language.hf_causal_lm import HFCausalLM
from lavis_ds.models.loss import token_losses
from tests.parity import Parity, gradient_error, gradients, relative_error

DENSE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,  # at 0.02 neither positions nor other tokens would matter much
}
SPARSE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LANGUAGES: dict[str, dict[str, Any]] = {
    "Llama": {"model_type": "llama", **DENSE},
    "Mistral": {"model_type": "mistral", **DENSE, "sliding_window": None},
    "SmolLM3": {"model_type": "smollm3", **DENSE, "no_rope_layers": [1, 0]},
    "Qwen2": {"model_type": "qwen2", **DENSE, "tie_word_embeddings": True},
    "Qwen2.5": {"model_type": "qwen2", **DENSE, "rope_theta": 1_000_000.0},
    "Qwen3": {"model_type": "qwen3", **DENSE, "head_dim": 8},
    "Qwen2-MoE": {"model_type": "qwen2_moe", **DENSE, **SPARSE, "shared_expert_intermediate_size": 40},
    "Qwen3-MoE": {"model_type": "qwen3_moe", **DENSE, **SPARSE, "head_dim": 8, "norm_topk_prob": True},
}
LENGTHS = (9, 14, 6)


def samples() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(5, 250, (length,), generator=generator) for length in LENGTHS]


def rows_of(layout: str) -> list[list[Tensor]]:
    first, second, third = samples()
    return {"padded": [[first], [second], [third]], "packed": [[first, second, third]]}[layout]


def encoded(rows: list[list[Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, positions that restart with each sample, and segments; padded on the right."""
    ids = [torch.cat(row) for row in rows]
    positions = [torch.cat([torch.arange(len(s)) for s in row]) for row in rows]
    segments = [torch.cat([torch.full_like(s, n * SEGMENT_STRIDE) for n, s in enumerate(row)]) for row in rows]
    padded = [pad_sequence(x, batch_first=True, padding_value=v) for x, v in ((ids, 0), (positions, 0))]
    return padded[0], padded[1], pad_sequence(segments, batch_first=True, padding_value=PADDING_SEGMENT)


def reference_loss(reference: Any) -> tuple[list[Tensor], Tensor]:
    """Logits of each sample and the mean loss of all targets, from a padded batch."""
    ids = pad_sequence(samples(), batch_first=True)
    mask = torch.arange(max(LENGTHS))[None] < torch.tensor(LENGTHS)[:, None]
    labels = ids.masked_fill(~mask, IGNORE_INDEX)
    output = reference(input_ids=ids, attention_mask=mask.long(), labels=labels)
    return [logits[:length] for logits, length in zip(output.logits, LENGTHS, strict=True)], output.loss


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", list(LANGUAGES))
def test_language_models(parity: Parity, tokenizer_dir: str, name: str, attention: str, layout: str) -> None:
    options = {"config": LANGUAGES[name], "tokenizer": tokenizer_dir, "attention": attention}
    model = HFCausalLM(HFCausalLMConfig.model_validate(options)).eval()
    model.choose_experts()
    reference: Any = AutoModelForCausalLM.from_config(model.lm.config, attn_implementation=attention).eval()
    reference.load_state_dict(model.lm.state_dict())
    expected, expected_loss = reference_loss(reference)

    ids, positions, segments = encoded(rows_of(layout))
    hidden = model(model.embed(ids), positions, segments if layout == "packed" else None)
    is_real = segments != PADDING_SEGMENT
    logits = model.logits(hidden[is_real])
    ends = torch.tensor(LENGTHS).cumsum(0)
    labels = ids[is_real].roll(-1)
    labels[ends - 1] = IGNORE_INDEX  # a sample's last token has no next
    loss = token_losses(logits, labels).sum() / (len(labels) - len(ends))

    loss.backward()
    expected_loss.backward()
    parity(
        name,
        f"`{type(reference).__name__}`",
        forward=relative_error(logits, torch.cat(expected)),
        loss=relative_error(loss, expected_loss),
        gradient=gradient_error(gradients(model.lm), gradients(reference)),
    )
