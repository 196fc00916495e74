"""Memory that runs out anywhere in a run ends in one sentence about where, how much, and what to change next."""

from __future__ import annotations

import errno
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lavis_ds.cli import main
from lavis_ds.config.load import load
from lavis_ds.config.schema import RootConfig
from lavis_ds.engines.ds_config import BatchPlan
from lavis_ds.errors import ConfigError, MemoryExhaustedError
from lavis_ds.runners import build
from lavis_ds.runners.out_of_memory import advice, explained, kind_of
from lavis_ds.runners.progress import Place, Progress
from lavis_ds.runners.train import TrainRunner
from tests.unit.runners.conftest import TinyRun

MakeRunner = Callable[..., TrainRunner]
GPU_ERROR = torch.OutOfMemoryError(
    "CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has a total capacity of 80 GiB."
)
STEP = Place("micro-batch 1 of 1", step=9, is_first_step=False)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (GPU_ERROR, "GPU"),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be ..."), "GPU"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), "GPU"),
        (RuntimeError("NCCL error ... Cuda failure 2 'out of memory'"), "GPU"),
        (RuntimeError("Error out of memory at line 380 in file csrc/pythonInterface.cpp"), "GPU"),
        (MemoryError(), "host"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "host"),
        (RuntimeError("[alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory: tried 4 GB"), "host"),
        (RuntimeError("shape mismatch"), None),
        (OSError(errno.ENOSPC, "No space left on device"), None),
        (ValueError("out of memory"), None),
    ],
)  # fmt: skip
def test_kinds(error: Exception, kind: str | None) -> None:
    assert kind_of(error) == kind
    wrapped = RuntimeError("the engine could not be made")
    wrapped.__cause__ = error
    assert kind_of(wrapped) == kind


def fail_at_call(number: int, original: Any, error: Exception) -> Any:
    calls: list[None] = []

    def function(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        if len(calls) == number:
            raise error
        return original(*args, **kwargs)

    return function


@pytest.mark.parametrize(
    ("call", "where", "also"),
    [
        (
            1,
            "micro-batch 1 of 2, step 1 (the first since the start): ",
            r"a batch of 4 rows x \d+ tokens, images \d x 3 x 32 x 32; ",
        ),
        (4, "micro-batch 2 of 2, step 2: ", "a batch of 4 rows x "),
    ],
)
def test_in_a_step(call: int, where: str, also: str, make_runner: MakeRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner()
    monkeypatch.setattr(runner.task, "train_step", fail_at_call(call, runner.task.train_step, GPU_ERROR))
    with pytest.raises(MemoryExhaustedError) as caught:
        runner.run()
    text = str(caught.value)
    assert text.startswith(f"{where}the memory of the GPU ran out (peak ")
    assert re.search(also, text)
    assert "OutOfMemoryError: CUDA out of memory" in text
    assert "1. model.language.gradient_checkpointing=full model.vision.gradient_checkpointing=full" in text
    assert "2. run.batch_size_train=2 run.accum_grad_iters=4 (the same global batch)" in text
    assert caught.value.__cause__ is GPU_ERROR


def test_in_evaluation_and_while_saving(make_runner: MakeRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner("run.evaluate=true", "run.test_splits=[val]")
    monkeypatch.setattr(runner.task, "eval_step", fail_at_call(1, None, MemoryError("no")))
    with pytest.raises(
        MemoryExhaustedError, match=r"(?s)evaluating val: the memory of this machine.*run.batch_size_eval=4"
    ):
        runner.run()
    runner = make_runner("run.max_steps=1", "run.output_dir=other")
    monkeypatch.setattr(runner.engine, "full_tensors", fail_at_call(1, None, MemoryError("no")))
    with pytest.raises(MemoryExhaustedError, match=r"saving a checkpoint, step 1: the memory of this machine"):
        runner.run()


@pytest.mark.parametrize("function", ["build_model", "build_engine"])
def test_while_building(
    function: str,
    tiny_run: TinyRun,
    process: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(build, function, fail_at_call(1, None, GPU_ERROR))
    arguments = ["train", "--cfg", str(tiny_run.cfg), "--job-id", "a", "--options", f"run.output_dir={tmp_path}"]
    assert main(arguments) == 1
    said = capsys.readouterr().err
    assert "error: building the model and its engine: the memory of the GPU ran out" in said
    assert "1. run.precision=bf16" in said
    assert "run.batch_size_train" not in said, "no batch has been seen yet"
    assert "Traceback" not in said


def test_other_errors_pass(make_runner: MakeRunner) -> None:
    config = make_runner().config
    for error in (ConfigError("wrong."), RuntimeError("shape mismatch")):
        with pytest.raises(type(error)) as caught, explained(config, None, Progress("starting")):
            raise error
        assert caught.value is error


# ---- what to try -----------------------------------------------------------------------------------------------------


def config_with(tiny_run: TinyRun, *options: str) -> RootConfig:
    return load(tiny_run.cfg, ["run.engine=deepspeed", *options]).config


def keys(lines: list[str]) -> list[str]:
    return [line.split(" (")[0] for line in lines]


PLAN = BatchPlan(global_batch_size=16, micro_batch_size=4, accumulation=2)  # 2 ranks


def test_the_whole_ladder_on_the_gpu_and_nothing_that_is_in_use(tiny_run: TinyRun) -> None:
    assert keys(advice(config_with(tiny_run), PLAN, "GPU", STEP)) == [
        "model.language.gradient_checkpointing=full model.vision.gradient_checkpointing=full",
        "run.batch_size_train=2 run.accum_grad_iters=4",
        "run.precision=bf16",
        "run.deepspeed_config.zero_optimization.stage=3",
        "run.optimizer.name=adamw_8bit",
        "run.deepspeed_config=zero2_offload",
        "model.language.lora={r: 16}",
    ]
    used = ["model.language.gradient_checkpointing=true", "model.freeze=[vision]", "run.precision=bf16",
            "run.deepspeed_config=zero3_offload", "model.language.lora={r: 4}", "model.max_txt_len=1024",
            "data={batching: packed, pack_length: 4096}"]  # fmt: skip
    assert keys(advice(config_with(tiny_run, *used), BatchPlan(2, 1, 1), "GPU", STEP)) == [
        "model.language.quantize=nf4",
        "data.pack_length=2048",
    ]


@pytest.mark.parametrize(
    ("options", "plan", "expected"),
    [
        (["run.deepspeed_config=zero0"], PLAN, "run.deepspeed_config.zero_optimization.stage=1"),
        (["run.deepspeed_config=zero3"], PLAN, "run.deepspeed_config=zero3_offload"),
        (["run.deepspeed_config=zero2_offload"], PLAN, "run.deepspeed_config=zero3_offload"),
        (["run.engine=torch"], PLAN, "run.engine=deepspeed run.deepspeed_config=zero2"),
        (
            ["run.optimizer.name=muon"],
            PLAN,
            "run.optimizer={name: adamw}, which can go to host memory: run.deepspeed_config=zero2_offload",
        ),
        ([], BatchPlan(6, 3, 1), "run.batch_size_train=1 run.accum_grad_iters=3"),
        (["model.max_txt_len=2048"], PLAN, "model.max_txt_len=1024"),
    ],
)
def test_next_settings(options: list[str], plan: BatchPlan, expected: str, tiny_run: TinyRun) -> None:
    assert expected in keys(advice(config_with(tiny_run, *options), plan, "GPU", STEP))


def test_a_single_rank_has_nothing_to_split(tiny_run: TinyRun) -> None:
    found = " ".join(advice(config_with(tiny_run), BatchPlan(8, 4, 2), "GPU", STEP))
    assert "zero_optimization.stage" not in found
    assert "zero2_offload" in found


def test_what_each_setting_names_is_a_setting(tiny_run: TinyRun) -> None:
    """Every line can be pasted behind --options."""
    for number in range(2):
        config = config_with(tiny_run, *(["model.max_txt_len=1024"] if number else []))
        for line in keys(advice(config, PLAN, "GPU", STEP)):
            pairs = [line] if "{" in line else line.split()
            load(tiny_run.cfg, ["run.engine=deepspeed", "run.global_batch_size=16", *pairs])


def test_host_memory(tiny_run: TinyRun) -> None:
    config = config_with(tiny_run, "run.num_workers=4", "run.deepspeed_config=zero2_offload")
    lines = advice(config, PLAN, "host", STEP)
    assert lines[0].startswith("run.num_workers=2 ")
    assert lines[1].startswith("leave offload_optimizer of run.deepspeed_config out")
    assert advice(config, PLAN, "host", Place("building the model and its engine"))[0].startswith("start fewer ranks")
