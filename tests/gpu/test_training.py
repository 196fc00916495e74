"""On one GPU: bf16 training with every ZeRO stage and the reference, resume, and the attention kernel that runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.multi.launch import run_ranks
from tests.tiny_project import make_project, metrics

pytestmark = pytest.mark.gpu

ENGINES = [*(f"zero{stage}" for stage in range(4)), "torch"]
SECONDS = 280


def train(cfg: str, options: list[str], job_id: str, resume: str | None) -> int:
    from lavis_ds.runners.launch import train as run

    return run(cfg, options, job_id=job_id, resume=resume)


def options_of(engine: str, precision: str) -> list[str]:
    chosen = ["run.engine=torch"] if engine == "torch" else [f"run.deepspeed_config.zero_optimization.stage={engine[-1]}"]
    return [*chosen, f"run.precision={precision}"]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_project(tmp_path_factory.mktemp("project"), save_every=5, num_workers=2)


def run(project: Path, options: list[str], job: str, resume: str | None = None) -> list[dict[str, Any]]:
    code = run_ranks(train, 1, str(project), options, job, resume, timeout_s=SECONDS, join_group=False, cpu_only=False)
    assert code[0] in (0, 75)
    return metrics(project.parent / "output" / job)


@pytest.fixture(scope="module")
def reference(project: Path) -> list[float]:
    return [line["train/loss"] for line in run(project, options_of("torch", "fp32"), "reference")]


@pytest.mark.parametrize("engine", ENGINES)
def test_bf16_losses_follow_float32(engine: str, project: Path, reference: list[float]) -> None:
    losses = [line["train/loss"] for line in run(project, options_of(engine, "bf16"), f"bf16_{engine}")]
    assert losses == pytest.approx(reference, abs=0.02)


@pytest.mark.parametrize("engine", ENGINES)
def test_float32_losses_equal_the_reference(engine: str, project: Path, reference: list[float]) -> None:
    losses = [line["train/loss"] for line in run(project, options_of(engine, "fp32"), f"fp32_{engine}")]
    assert losses == pytest.approx(reference, abs=1e-4)


@pytest.mark.parametrize("engine", ENGINES)
def test_stopped_and_resumed_goes_on_the_same_way(engine: str, project: Path) -> None:
    options = options_of(engine, "bf16")
    whole = run(project, options, f"whole_{engine}")
    run(project, [*options, "run.stop_at_step=5"], f"stopped_{engine}")
    resumed = run(project, options, f"stopped_{engine}", "auto")
    assert [line["data/sample_ids"] for line in resumed] == [line["data/sample_ids"] for line in whole]
    ours, theirs = ([line["train/loss"] for line in lines] for lines in (resumed, whole))
    assert ours == pytest.approx(theirs, abs=1e-3)


def kernels_of_a_step(cfg: str) -> set[str]:
    """Names of the GPU kernels of one bf16 forward and backward pass."""
    import torch

    from lavis_ds import distributed
    from lavis_ds.config.load import load
    from lavis_ds.runners import build, preflight

    config = load(cfg).config
    distributed.initialize(60)
    datasets = preflight.check(config, world_size=1).splits["train"]
    model = build.build_model(config).to("cuda", torch.bfloat16)
    data = build.encoded(config, dict(datasets), build.text_context(config, model), training=True)
    batch = next(iter(build.eval_loader(config, data, build.collator(model)))).to(torch.device("cuda"))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        model(batch)[0].backward()
        torch.cuda.synchronize()
    assert model.describe()["attention"] == "sdpa"
    return {event.key for event in profile.key_averages()}


def test_padded_batches_run_flash_attention(project: Path) -> None:
    """Right-padded rows need no mask, so PyTorch's SDPA can take its flash kernel."""
    kernels = run_ranks(kernels_of_a_step, 1, str(project), timeout_s=SECONDS, join_group=False, cpu_only=False)[0]
    assert any("flash" in name for name in kernels), sorted(kernels)
