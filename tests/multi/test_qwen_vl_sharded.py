"""Qwen-VL under ZeRO-3, where a rank that calls other modules than the rest would hang or read empty weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lavis_ds.data.tokenizer import train_tokenizer
from tests.multi.launch import run_ranks
from tests.unit.models.test_qwen_vl import FAMILIES, SHAPES, Pair, Row, gradients, save

ROWS: list[list[Row]] = [[[3, "wide", 6], [2, "small", 1, "tall", 7]], [[9], [12]]]
"""Rank 0 has pictures, rank 1 has none."""

GENERATE = {"max_new_tokens": 5, "eos_token_id": [299], "synced_gpus": True}


def sharded(arch: str, folder: str) -> tuple[float, dict[str, torch.Tensor], list[list[int]]]:
    import deepspeed
    from deepspeed.utils import safe_get_full_grad

    torch.set_num_threads(1)
    rank = torch.distributed.get_rank()
    both = Pair(arch, folder)
    batches = [both.batch([[both.encode(row, seed)] for seed, row in enumerate(rows)]) for rows in ROWS]
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    settings = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero, "zero_force_ds_cpu_optimizer": False}
    optimizer = torch.optim.AdamW(both.ours.parameters(), lr=0.0)
    engine, *_ = deepspeed.initialize(model=both.ours, optimizer=optimizer, config=settings)
    loss = engine(batches[rank])[0]
    engine.backward(loss)
    full = {name: safe_get_full_grad(p) for name, p in engine.module.named_parameters()}
    assert all(p.numel() == 0 for p in engine.module.parameters())  # weights are elsewhere between calls
    engine.module.eval()
    prompts = both.batch([[both.encode(row, seed)] for seed, row in enumerate(ROWS[rank])], left=True, targets=False)
    return loss.item(), full, engine.module.generate(prompts, **GENERATE).tolist()


@pytest.mark.parametrize("arch", FAMILIES)
def test_ranks_with_and_without_pictures_have_the_gradients_of_one_process(arch: str, tmp_path: Path) -> None:
    tokenizer: Any = train_tokenizer(["a red circle and a blue square"], vocab_size=300)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    folder = save(arch, SHAPES[arch], str(tmp_path / "tokenizer"), tmp_path / "model")
    both = Pair(arch, folder)
    ranks = run_ranks(sharded, 2, arch, folder)
    for rank, rows in enumerate(ROWS):
        loss = both.ours(both.batch([[both.encode(row, seed)] for seed, row in enumerate(rows)]))[0]
        (loss / 2).backward()
        assert ranks[rank][0] == pytest.approx(loss.item(), rel=1e-6)  # measured 0
        prompts = both.batch([[both.encode(row, seed)] for seed, row in enumerate(rows)], left=True, targets=False)
        alone = both.ours.eval().generate(prompts, **{**GENERATE, "synced_gpus": False})
        both.ours.train()
        assert ranks[rank][2] == alone.tolist()
    for name, gradient in gradients(both.ours).items():
        for rank in ranks:  # every rank has the mean of both
            error = (rank[1][name] - gradient).norm() / gradient.norm().clamp(min=1e-3)
            assert error < 1e-5, name  # measured 7e-7
