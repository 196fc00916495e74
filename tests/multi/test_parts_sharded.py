"""Projectors and SigLIP 2 NaFlex under ZeRO-3, where the weight of a module that is not called is empty."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lavis_ds.batch import Batch
from lavis_ds.config.decode import decode
from lavis_ds.data.tokenizer import train_tokenizer
from lavis_ds.models.configs import VlmConfig
from lavis_ds.models.vlm import Vlm
from tests.multi.launch import run_ranks
from tests.parity import gradient_error, gradients
from tests.unit.models.conftest import QWEN3, VIT, make_batch
from tests.unit.models.test_projectors import C_ABSTRACTOR, PERCEIVER
from tests.unit.models.test_siglip2_naflex import VISION, batch_of

PARTS: dict[str, dict[str, Any]] = {
    "siglip2_naflex": {"vision": VISION, "projector": {"name": "mlp", "merge_size": 2, "layer_norm": True}},
    "average_pool": {"vision": VIT, "projector": {"name": "average_pool", "grid_size": 3}},
    "perceiver": {"vision": VIT, "projector": {"name": "perceiver", **PERCEIVER}},
    "c_abstractor": {"vision": VIT, "projector": {"name": "c_abstractor", **C_ABSTRACTOR, "num_positions": 16}},
}


def make(parts: str, tokenizer: str) -> Vlm:
    torch.manual_seed(0)
    language = {"name": "hf_causal_lm", "config": QWEN3, "tokenizer": tokenizer}
    return Vlm.from_config(decode(VlmConfig, {"arch": "vlm", "language": language, **PARTS[parts]}))


def batches(model: Vlm) -> list[Batch]:
    """Rank 0 has pictures, rank 1 has none."""
    if model.merge_size is not None:
        return [batch_of(model, [[1, 3]]), batch_of(model, [[0]])]
    tokens = int(model.tokens_per_image)
    return [make_batch(tokens, lengths=(24, 20)), make_batch(tokens, lengths=(20,), images=0)]


def sharded(parts: str, tokenizer: str) -> tuple[float, dict[str, torch.Tensor]]:
    import deepspeed
    from deepspeed.utils import safe_get_full_grad

    torch.set_num_threads(1)
    model = make(parts, tokenizer)
    batch = batches(model)[torch.distributed.get_rank()]
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    settings = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero, "zero_force_ds_cpu_optimizer": False}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    assert all(p.numel() == 0 for p in engine.module.parameters())
    loss = engine(batch)[0]
    engine.backward(loss)
    return loss.item(), {name: safe_get_full_grad(p) for name, p in engine.module.named_parameters()}


@pytest.mark.parametrize("parts", list(PARTS))
def test_ranks_with_and_without_pictures_have_the_gradients_of_one_process(parts: str, tmp_path: Path) -> None:
    tokenizer: Any = train_tokenizer(["a red circle and a blue square"], vocab_size=300)
    tokenizer.save_pretrained(tmp_path)
    model = make(parts, str(tmp_path))
    ranks = run_ranks(sharded, 2, parts, str(tmp_path))
    for rank, batch in zip(ranks, batches(model), strict=True):
        loss = model(batch)[0]
        (loss / 2).backward()
        assert rank[0] == pytest.approx(loss.item(), rel=1e-6)  # measured 0
    for _, found in ranks:  # every rank has the mean of both
        assert gradient_error(found, gradients(model)) < 1e-5  # measured 4e-7 to 1e-6
