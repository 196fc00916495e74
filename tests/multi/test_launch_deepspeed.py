"""DeepSpeed trains inside `run_ranks`, and the shared memory it takes is given back."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist

from tests.multi.launch import run_ranks


def _one_step() -> list[float]:
    import deepspeed

    torch.manual_seed(0)
    module = torch.nn.Linear(4, 1)
    engine, *_ = deepspeed.initialize(
        model=module,
        model_parameters=list(module.parameters()),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": 2},
            "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "torch_adam": True}},
        },
    )
    before = module.weight.detach().clone()
    loss = engine(torch.ones(1, 4) * (1 + dist.get_rank())).sum()
    engine.backward(loss)
    engine.step()
    return (module.weight - before).flatten().tolist()


def _buffers() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob("deepspeed_allreduce_buffer*")}


def _with_shared_memory() -> set[str]:
    import deepspeed

    os.environ["LOCAL_SIZE"] = os.environ["WORLD_SIZE"]
    deepspeed.init_distributed("gloo")
    dist.barrier()
    return {name for name in _buffers() if f"_{os.environ['MASTER_PORT']}_" in name}


def test_zero2_step_is_the_same_on_both_ranks() -> None:
    first, second = run_ranks(_one_step, 2)
    assert first == second
    # Adam's first step is lr * sign(gradient), here -0.1; weight decay adds 0.1 * 0.01 * |w| <= 0.0005.
    assert all(abs(change + 0.1) < 1e-3 for change in first), first


def test_shared_memory_buffers_are_removed() -> None:
    during = set.union(*run_ranks(_with_shared_memory, 2))
    assert len(during) == 2, "this machine's DeepSpeed makes one buffer a rank"
    assert not during & _buffers()
