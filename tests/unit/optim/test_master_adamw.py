"""AdamW over bf16 weights with float32 masters: PyTorch's AdamW of the masters, with clipping and refusal inside."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lavis_ds.config.schema import RunConfig
from lavis_ds.optim import master_adamw
from lavis_ds.optim.master_adamw import MasterAdamW

SHAPES = [(3, 5), (7,), (2, 2, 2)]


def run_config(**options: Any) -> RunConfig:
    return RunConfig(max_steps=1, batch_size_train=1, init_lr=1e-2, **options)


def pair(clip: float | None) -> tuple[list[nn.Parameter], MasterAdamW, list[nn.Parameter], torch.optim.AdamW]:
    """bf16 parameters with their optimizer, and the float32 reference with its."""
    torch.manual_seed(0)
    ours = [nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    theirs = [nn.Parameter(parameter.detach().clone()) for parameter in ours]
    decays = (0.1, 0.0)

    def groups(parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
        split = zip((parameters[:2], parameters[2:]), decays, strict=True)
        return [{"params": params, "weight_decay": decay, "lr_scale": 1.0} for params, decay in split]

    run = run_config(grad_clip=clip)
    optimizer = MasterAdamW(groups(ours), run)
    optimizer.keep_masters(torch.bfloat16)
    reference = torch.optim.AdamW(groups(theirs), lr=run.init_lr, betas=run.optimizer.betas, eps=run.optimizer.eps)
    return ours, optimizer, theirs, reference


def set_gradients(ours: list[nn.Parameter], theirs: list[nn.Parameter]) -> None:
    for mine, right in zip(ours, theirs, strict=True):
        mine.grad = torch.randn_like(mine)
        right.grad = mine.grad.float()


@pytest.mark.parametrize("clip", [None, 0.5, 100.0], ids=str)
@pytest.mark.parametrize("chunk", [2**28, 8], ids=["at_once", "in_chunks"])
def test_masters_go_as_float32_weights_do(clip: float | None, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(master_adamw, "_CHUNK_ELEMENTS", chunk)
    ours, optimizer, theirs, reference = pair(clip)
    for _ in range(4):
        set_gradients(ours, theirs)
        expected = float(nn.utils.get_total_norm([p.grad for p in theirs if p.grad is not None]))
        if clip is not None:
            nn.utils.clip_grad_norm_(theirs, clip)
        reference.step()
        optimizer.step()
        assert optimizer.last_norm() == pytest.approx(expected, rel=1e-5)
    masters = optimizer.masters
    for mine, right in zip(ours, theirs, strict=True):
        assert mine.dtype == torch.bfloat16
        torch.testing.assert_close(masters[id(mine)], right.detach(), atol=1e-6, rtol=1e-6)  # measured 1.2e-7
        assert torch.equal(mine.detach(), masters[id(mine)].bfloat16())


def test_a_gradient_that_is_not_finite_leaves_everything_alone() -> None:
    ours, optimizer, theirs, _ = pair(1.0)
    set_gradients(ours, theirs)
    optimizer.step()
    before = [(m.clone(), *(v.clone() for v in optimizer.state[m].values())) for m in optimizer.masters.values()]
    set_gradients(ours, theirs)
    assert ours[1].grad is not None
    ours[1].grad[3] = float("nan")
    optimizer.step()
    assert not torch.tensor(optimizer.last_norm()).isfinite()
    after = [(m, *optimizer.state[m].values()) for m in optimizer.masters.values()]
    assert all(torch.equal(a, b) for old, new in zip(before, after, strict=True) for a, b in zip(old, new, strict=True))


def test_a_parameter_without_gradient_takes_part_with_zeros() -> None:
    """As it does in ZeRO, where gradients are cut out of one long tensor."""
    ours, optimizer, theirs, reference = pair(None)
    set_gradients(ours, theirs)
    ours[0].grad, theirs[0].grad = None, torch.zeros_like(theirs[0])
    reference.step()
    optimizer.step()
    torch.testing.assert_close(optimizer.masters[id(ours[0])], theirs[0].detach())
