"""On one GPU: compiled layers and the fused update give what PyTorch gives, without graph breaks or many graphs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.test_training import losses, options_of, train_all
from tests.multi.launch import run_ranks
from tests.tiny_project import make_project, metrics

pytestmark = pytest.mark.gpu

RUNS = {
    "fp32_torch": [*options_of("torch", "fp32"), "run.compile=false"],
    "fp32_zero0": [*options_of("zero0", "fp32"), "run.compile=true"],
    "fp32_zero3": [*options_of("zero3", "fp32"), "run.compile=true"],
    "bf16_zero2": [*options_of("zero2", "bf16"), "run.compile=true"],
    "bf16_zero3": [*options_of("zero3", "bf16"), "run.compile=true"],
}
MAX_GRAPHS = 12
"""Two kinds of layers (tower and decoder), each static and then of any length, in training and in evaluation."""


def train_and_count(cfg: str, runs: list[tuple[str, list[str], str | None]], folder: str) -> None:
    from torch._dynamo.utils import counters

    found: dict[str, Any] = {}
    for job, options, resume in runs:
        torch.compiler.reset()
        counters.clear()
        train_all(cfg, [(job, options, resume)])
        found[job] = {"graphs": counters["stats"]["unique_graphs"], "breaks": dict(counters["graph_break"])}
        (Path(folder) / "counts.json").write_text(json.dumps(found))


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `counts.json`, and the metrics of packed runs."""
    project = make_project(tmp_path_factory.mktemp("project"), save_every=None, num_workers=0)
    runs = [(job, ["data.batching=packed", "run.save_last=false", *options], None) for job, options in RUNS.items()]
    run_ranks(
        train_and_count, 1, str(project), runs, str(project.parent), timeout_s=400, join_group=False, cpu_only=False
    )
    return project.parent


@pytest.mark.parametrize("job", ["fp32_zero0", "fp32_zero3"])
def test_float32_losses_are_the_same(job: str, project: Path) -> None:
    expected = losses(metrics(project / "output" / "fp32_torch"))
    assert losses(metrics(project / "output" / job)) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("job", ["bf16_zero2", "bf16_zero3"])
def test_bf16_losses_follow(job: str, project: Path) -> None:
    expected = losses(metrics(project / "output" / "fp32_torch"))
    assert losses(metrics(project / "output" / job)) == pytest.approx(expected, abs=0.02)


@pytest.mark.parametrize("job", [job for job in RUNS if job != "fp32_torch"])
def test_one_graph_serves_all_layers_of_a_kind(job: str, project: Path) -> None:
    found = json.loads((project / "counts.json").read_text())[job]
    assert found["breaks"] == {}
    assert 0 < found["graphs"] <= MAX_GRAPHS


def test_one_kernel_updates_as_pytorch_does() -> None:
    from lavis_ds.optim.master_adamw_kernel import FusedUpdate

    torch.manual_seed(0)
    shapes = [(5,), (100, 130), (4096,), (3, 7, 11)]
    masters = [torch.randn(shape, device="cuda") for shape in shapes]
    weights = [master.bfloat16() for master in masters]
    means, squares = ([torch.zeros_like(master) for master in masters] for _ in range(2))
    expected = [torch.nn.Parameter(master.clone()) for master in masters]
    reference = torch.optim.AdamW(expected, lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1)
    steps, update = torch.zeros(len(shapes), device="cuda"), FusedUpdate(masters)
    for skip in (0.0, 0.0, 1.0, 0.0):
        gradients = [torch.randn(shape, device="cuda").bfloat16() for shape in shapes]
        if not skip:
            steps += 1
            for parameter, gradient in zip(expected, gradients, strict=True):
                parameter.grad = gradient.float() / 2
            reference.step()
        update(
            weights, gradients, masters, means, squares, steps,
            divisor=torch.tensor(2.0, device="cuda"), skip=torch.tensor(skip, device="cuda"),
            lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1,
        )  # fmt: skip
        for weight, master, right in zip(weights, masters, expected, strict=True):
            torch.testing.assert_close(master, right.detach(), atol=1e-6, rtol=1e-6)  # interpreted on a CPU: 1e-7
            assert torch.equal(weight, master.bfloat16())


def test_a_number_is_read_before_later_work_is_done() -> None:
    from lavis_ds.on_host import OnHost

    matrix = torch.randn(8192, 8192, device="cuda")
    value = matrix[0, 0] * 2
    torch.cuda.synchronize()
    held, later = OnHost(value), torch.cuda.Event()
    for _ in range(200):
        matrix = (matrix @ matrix).clamp(-1, 1)
    later.record()
    assert float(held) == float(held)  # not NaN
    assert not later.query()
    assert float(held) == float(value)
