"""On one GPU: bf16 training with every ZeRO stage and the reference, resume, and the attention kernel that runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.multi.launch import run_ranks
from tests.tiny_project import make_project, metrics

pytestmark = pytest.mark.gpu

ENGINES = [*(f"zero{stage}" for stage in range(4)), "torch"]
FP16 = ["zero0", "zero2", "zero3"]
CHANGED = [("zero2", "zero3"), ("zero3", "zero1"), ("zero1", "zero0"), ("zero0", "zero2")]
PACKED = ["torch", "zero3"]
SECONDS = 400


def options_of(engine: str, precision: str) -> list[str]:
    chosen = (
        ["run.engine=torch"] if engine == "torch" else [f"run.deepspeed_config.zero_optimization.stage={engine[-1]}"]
    )
    return [*chosen, f"run.precision={precision}"]


def train_all(cfg: str, runs: list[tuple[str, list[str], str | None]]) -> list[int]:
    """Several runs in one process, which has to load the libraries only once."""
    from lavis_ds import distributed
    from lavis_ds.runners.launch import train

    distributed.shutdown = lambda: None  # type: ignore[assignment]  # one process group for all
    return [train(cfg, options, job_id=job, resume=resume) for job, options, resume in runs]


def run(project: Path, runs: list[tuple[str, list[str], str | None]]) -> dict[str, list[dict[str, Any]]]:
    """Job -> its metrics."""
    run_ranks(train_all, 1, str(project), runs, timeout_s=SECONDS, join_group=False, cpu_only=False)
    return {job: metrics(project.parent / "output" / job) for job, _, _ in runs}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_project(tmp_path_factory.mktemp("project"), save_every=None, num_workers=0)


@pytest.fixture(scope="module")
def lines(project: Path) -> dict[str, list[dict[str, Any]]]:
    """Metrics of every engine in float32, in bf16, and in bf16 stopped after 5 steps and resumed."""
    runs: list[tuple[str, list[str], str | None]] = []
    for engine in ENGINES:
        bf16 = options_of(engine, "bf16")
        runs += [
            (f"fp32_{engine}", options_of(engine, "fp32"), None),
            (f"bf16_{engine}", bf16, None),
            (f"resumed_{engine}", [*bf16, "run.stop_at_step=5"], None),
            (f"resumed_{engine}", bf16, "auto"),
        ]
    for engine in FP16:
        fp16 = options_of(engine, "fp16")
        runs += [
            (f"fp16_{engine}", fp16, None),
            (f"fp16_resumed_{engine}", [*fp16, "run.stop_at_step=5"], None),
            (f"fp16_resumed_{engine}", fp16, "auto"),
        ]
    for before, after in CHANGED:
        job = f"{before}_to_{after}"
        runs.append((job, [*options_of(before, "bf16"), "run.stop_at_step=5", "run.save_in_background=true"], None))
        runs.append((job, options_of(after, "bf16"), "auto"))
    packed = "data.batching=packed"
    for engine in PACKED:
        runs += [
            (f"packed_fp32_{engine}", [packed, *options_of(engine, "fp32")], None),
            (f"packed_bf16_{engine}", [packed, *options_of(engine, "bf16")], None),
        ]
    return run(project, runs)


def losses(lines: list[dict[str, Any]]) -> list[float]:
    return [line["train/loss"] for line in lines]


@pytest.mark.parametrize("engine", ENGINES)
def test_float32_losses_equal_the_reference(engine: str, lines: dict[str, list[dict[str, Any]]]) -> None:
    assert losses(lines[f"fp32_{engine}"]) == pytest.approx(losses(lines["fp32_torch"]), abs=1e-4)


@pytest.mark.parametrize("engine", ENGINES)
def test_bf16_losses_follow_float32(engine: str, lines: dict[str, list[dict[str, Any]]]) -> None:
    assert losses(lines[f"bf16_{engine}"]) == pytest.approx(losses(lines["fp32_torch"]), abs=0.02)


@pytest.mark.parametrize("engine", ENGINES)
def test_stopped_and_resumed_goes_on_the_same_way(engine: str, lines: dict[str, list[dict[str, Any]]]) -> None:
    resumed, whole = lines[f"resumed_{engine}"], lines[f"bf16_{engine}"]
    assert [line["data/sample_ids"] for line in resumed] == [line["data/sample_ids"] for line in whole]
    assert losses(resumed) == pytest.approx(losses(whole), abs=1e-3)


@pytest.mark.parametrize("engine", FP16)
def test_fp16_goes_on_with_its_loss_scale(engine: str, lines: dict[str, list[dict[str, Any]]]) -> None:
    whole = losses(lines[f"fp16_{engine}"])
    assert whole == pytest.approx(losses(lines["fp32_torch"]), abs=0.5)  # first steps are skipped until the scale fits
    assert losses(lines[f"fp16_resumed_{engine}"]) == pytest.approx(whole, abs=1e-3)


@pytest.mark.parametrize(("before", "after"), CHANGED)
def test_another_stage_goes_on(before: str, after: str, lines: dict[str, list[dict[str, Any]]]) -> None:
    whole, changed = lines[f"bf16_{before}"], lines[f"{before}_to_{after}"]
    assert [line["data/sample_ids"] for line in changed] == [line["data/sample_ids"] for line in whole]
    assert losses(changed) == pytest.approx(losses(whole), abs=5e-3)


@pytest.mark.parametrize("engine", PACKED)
def test_packed_rows_give_the_losses_of_the_reference(engine: str, lines: dict[str, list[dict[str, Any]]]) -> None:
    reference = lines["packed_fp32_torch"]
    assert losses(lines[f"packed_fp32_{engine}"]) == pytest.approx(losses(reference), abs=1e-4)
    assert losses(lines[f"packed_bf16_{engine}"]) == pytest.approx(losses(reference), abs=0.02)
    assert max(line["data/padding_fraction"] for line in reference) < 0.5


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
    data = build.encoded(config, dict(datasets), build.text_context(model), training=True)
    batch = next(iter(build.eval_loader(config, data, build.collator(model, data)))).to(torch.device("cuda"))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        model(batch)[0].backward()
        torch.cuda.synchronize()
    assert model.describe()["attention"] in ("varlen", "flash_attention_2", "flash_attention_3", "flash_attention_4")
    return {event.key for event in profile.key_averages()}


def test_padded_batches_run_flash_attention(project: Path) -> None:
    """Right-padded rows need no mask, so PyTorch's SDPA can take its flash kernel."""
    kernels = run_ranks(kernels_of_a_step, 1, str(project), timeout_s=SECONDS, join_group=False, cpu_only=False)[0]
    assert any("flash" in name for name in kernels), sorted(kernels)


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Metrics of runs with adapters: beside float32 weights, and beside 4-bit ones, also stopped and resumed."""
    pytest.importorskip("bitsandbytes")
    project = make_project(tmp_path_factory.mktemp("adapted"), save_every=None, num_workers=0)
    lora = ["model.language.lora.r=4", "model.vision.lora.use_dora=true"]
    small = [*lora, "model.language.quantize=nf4"]
    runs: list[tuple[str, list[str], str | None]] = []
    for engine in ("torch", "zero2", "zero3"):
        bf16 = [*small, *options_of(engine, "bf16")]
        runs += [
            (f"lora_{engine}", [*lora, *options_of(engine, "fp32")], None),
            (f"qlora_{engine}", bf16, None),
            (f"resumed_{engine}", [*bf16, "run.stop_at_step=5"], None),
            (f"resumed_{engine}", bf16, "auto"),
        ]
    return run(project, runs)


@pytest.mark.parametrize("engine", ["torch", "zero2", "zero3"])
def test_adapters_learn_the_same_on_every_engine(engine: str, adapted: dict[str, list[dict[str, Any]]]) -> None:
    reference = losses(adapted["lora_torch"])
    assert losses(adapted[f"lora_{engine}"]) == pytest.approx(reference, abs=1e-4)
    small = losses(adapted[f"qlora_{engine}"])
    assert small == pytest.approx(reference, abs=0.2)
    assert small[-1] < small[0]
    assert losses(adapted[f"resumed_{engine}"]) == pytest.approx(small, abs=1e-3)
