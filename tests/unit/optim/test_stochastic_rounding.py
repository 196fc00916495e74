from __future__ import annotations

import pytest
import torch

from lavis_ds.optim.stochastic_rounding import StochasticAdamW, round_stochastically


def rounded(value: float, numel: int, seed: int = 0) -> torch.Tensor:
    target = torch.empty(numel, dtype=torch.bfloat16)
    round_stochastically(torch.full((numel,), value), target, torch.Generator().manual_seed(seed))
    return target.double()


@pytest.mark.parametrize("value", [1.001, -1.001, 3e-30, 1 + 2**-9, -7e20])
def test_the_mean_is_the_value_and_both_neighbours_occur(value: float) -> None:
    """Relative spacing of bf16 is 2**-7 to 2**-8; of the mean of 65,536, three deviations are 4.6e-5 at most."""
    found = rounded(value, 1 << 16)
    assert len(set(found.tolist())) == 2
    assert abs(found.mean().item() / value - 1) < 5e-5


@pytest.mark.parametrize("value", [0.0, 1.0, -0.375, float("inf"), float("-inf")])
def test_values_of_bf16_stay(value: float) -> None:
    assert set(rounded(value, 1000).tolist()) == {value}


def test_not_a_number_stays_one() -> None:
    assert rounded(float("nan"), 1000).isnan().all()


def optimizer(weight: torch.Tensor, lr: float = 1e-3, weight_decay: float = 0.1) -> StochasticAdamW:
    return StochasticAdamW([{"params": [weight], "weight_decay": weight_decay}], lr=lr, betas=(0.9, 0.999), eps=1e-8)


def test_weights_follow_float32_adamw_where_nearest_rounding_stands_still() -> None:
    """Steps of 1e-4 on weights of 1: nearest bf16 never moves; ours, in the mean of 4,096, to 2e-4 (0.03 was moved)."""
    ours = torch.nn.Parameter(torch.ones(4096, dtype=torch.bfloat16))
    exact = torch.nn.Parameter(torch.ones(4096))
    stochastic, reference = optimizer(ours, 1e-4), torch.optim.AdamW([exact], lr=1e-4, weight_decay=0.1)
    for step in range(300):
        gradient = torch.randn(4096, generator=torch.Generator().manual_seed(step)).abs() + 0.5
        ours.grad, exact.grad = gradient.bfloat16(), gradient.bfloat16().float()
        stochastic.step()
        reference.step()
    assert (torch.tensor(1.0).bfloat16() - 1e-4).bfloat16() == 1
    moved = 1 - exact.mean().item()
    assert moved > 0.02
    assert abs(ours.float().mean().item() - exact.mean().item()) < 2e-4
    square = stochastic.state[ours]["exp_avg_sq"].float().mean()
    torch.testing.assert_close(square, reference.state[exact]["exp_avg_sq"].mean(), rtol=1e-2, atol=0)


def test_chunks_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    def trained() -> torch.Tensor:
        weight = torch.nn.Parameter(torch.linspace(-1, 1, 1000).bfloat16().view(20, 50))
        made = optimizer(weight)
        for _ in range(3):
            weight.grad = torch.ones_like(weight)
            made.step()
        return torch.stack([weight.detach().view(-1), made.state[weight]["exp_avg_sq"].view(-1)]).double()

    whole = trained()
    monkeypatch.setattr("lavis_ds.optim.stochastic_rounding._CHUNK", 333)
    torch.testing.assert_close(trained().mean(1), whole.mean(1), atol=2e-4, rtol=1e-3)


def test_the_random_bits_depend_on_the_step_alone() -> None:
    """So that a resumed run goes on exactly."""
    whole, resumed = (torch.nn.Parameter(torch.linspace(-1, 1, 500).bfloat16()) for _ in range(2))
    first = optimizer(whole)
    for _ in range(4):
        whole.grad = torch.ones_like(whole)
        first.step()
    made = optimizer(resumed)
    for _ in range(2):
        resumed.grad = torch.ones_like(resumed)
        made.step()
    torch.rand(7)
    again = optimizer(resumed)
    again.state[resumed] = {key: value for key, value in made.state[resumed].items()}  # noqa: C416
    for _ in range(2):
        resumed.grad = torch.ones_like(resumed)
        again.step()
    assert torch.equal(whole, resumed)
