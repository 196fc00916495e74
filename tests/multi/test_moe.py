"""Experts on several ranks: the same losses and loads whatever computes them, and a bias that resumes exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from tests.multi.launch import run_ranks
from tests.multi.runs import train
from tests.tiny_project import make_project, metrics

STEPS = 4
EXPERTS = {
    "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "initializer_range": 0.2,
}  # fmt: skip
MOE = {
    "balance_loss": 0.1, "z_loss": 0.01, "balance_scope": "global", "aux_free_rate": 0.01, "gate_lr": 2.0e-3,
    "gate_lr_rule": {"above": 1.5, "factor": 0.5}, "load_every": 1,
}  # fmt: skip
ENGINES = {
    "torch": ["run.engine=torch"],
    "zero2": ["run.deepspeed_config.zero_optimization.stage=2"],
    "zero3": ["run.deepspeed_config.zero_optimization.stage=3"],
}
TIMES = ("time/", "throughput/", "memory/")


def write(folder: Path, language: dict[str, Any], moe: dict[str, Any]) -> Path:
    """The tiny project with experts, recomputed in the backward pass."""
    path = make_project(folder, max_steps=STEPS, save_every=STEPS // 2)
    config = yaml.safe_load(path.read_text())
    config["model"]["language"]["config"] |= language
    config["model"]["language"]["gradient_checkpointing"] = True
    config["model"]["moe"] = moe
    path.write_text(yaml.safe_dump(config))
    return path


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("moe"), EXPERTS, MOE)


def run(cfg: Path, ranks: int, options: list[str], name: str, resume: str | None = None) -> list[dict[str, Any]]:
    assert run_ranks(train, ranks, str(cfg), options, name, resume, timeout_s=100, join_group=False) == [0] * ranks
    return metrics(cfg.parent / "output" / name)


@pytest.fixture(scope="module")
def reference(project: Path) -> list[dict[str, Any]]:
    """Plain PyTorch, one process, the whole batch at once."""
    return run(project, 1, ["run.engine=torch", "run.batch_size_train=8"], "reference")


@pytest.mark.parametrize("engine", ENGINES)
def test_two_ranks_equal_one_process_and_resume_exactly(
    engine: str, project: Path, reference: list[dict[str, Any]]
) -> None:
    lines = run(project, 2, ENGINES[engine], f"{engine}_whole")
    assert_same(lines, reference)
    assert {line["moe/gate_lr_factor"] for line in lines} == {0.5, 1.0}

    if engine == "zero2":  # saved and read by the same code as zero3
        return
    output = project.parent / "output"
    half = output / f"{engine}_whole" / "checkpoints" / f"step_{STEPS // 2:08d}"
    resumed = run(project, 2, ENGINES[engine], f"{engine}_resumed", str(half))
    assert what_matters(resumed) == what_matters(lines[STEPS // 2 :])
    whole, resumed_weights = weights(output / f"{engine}_whole"), weights(output / f"{engine}_resumed")
    assert whole.keys() == resumed_weights.keys()
    assert all(torch.equal(whole[name], resumed_weights[name]) for name in whole)
    bias = whole["language.balancer.selection_bias"]
    assert bias.shape == (2, 4)
    torch.testing.assert_close(bias / 0.01, (bias / 0.01).round(), atol=1e-5, rtol=0)  # measured 0
    assert len(set(bias.flatten().tolist())) > 2


def assert_same(lines: list[dict[str, Any]], reference: list[dict[str, Any]], layers: tuple[int, ...] = (0, 1)) -> None:
    """With one micro-batch a rank, scope `global` does not depend on the number of ranks."""
    assert len(lines) == len(reference) == STEPS
    for ours, theirs in zip(lines, reference, strict=True):
        assert ours["train/loss"] == pytest.approx(theirs["train/loss"], abs=1e-5)  # measured 7e-7
        assert ours["train/grad_norm"] == pytest.approx(theirs["train/grad_norm"], rel=1e-4)  # measured 5e-7
        assert ours["moe/balance_loss"] == pytest.approx(theirs["moe/balance_loss"], abs=1e-5)  # measured 2e-7
        assert ours["moe/z_loss"] == pytest.approx(theirs["moe/z_loss"], abs=1e-5)  # measured 5e-7
        for layer in layers:
            name = f"moe/layer_{layer:02d}/tokens_by_expert"
            assert ours[name] == theirs[name]


def what_matters(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in line.items() if not k.startswith(TIMES)} for line in lines]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "checkpoints" / f"step_{STEPS:08d}" / "weights" / "model.safetensors")


def test_a_dense_model_made_sparse_accumulates_alike_in_every_engine(tmp_path: Path) -> None:
    """Loads of scope `global` grow from micro-batch to micro-batch, on all ranks alike.

    A qwen2_moe's shared expert, which a dense model has nothing for, starts and stays zero.
    """
    language = {"model_type": "qwen2", "initializer_range": 0.2}
    project = write(tmp_path, language, {**MOE, "num_experts": 3, "top_k": 2, "every": 2})
    config = yaml.safe_load(project.read_text())
    config["model"]["language"]["config"].pop("head_dim")
    project.write_text(yaml.safe_dump(config))
    lines = [run(project, 2, [*ENGINES[name], "run.batch_size_train=2"], name) for name in ("torch", "zero3")]
    assert_same(lines[1], lines[0], layers=(1,))
    saved = weights(tmp_path / "output" / "zero3")
    shared = [tensor for name, tensor in saved.items() if ".shared_expert" in name]
    assert len(shared) == 4
    assert not any(tensor.any() for tensor in shared)
    experts = saved["language.lm.model.layers.1.mlp.experts.down_proj"]
    assert (experts[0] - experts[1]).abs().max() > 1e-3
