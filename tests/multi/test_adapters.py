"""Adapters in a part, a full projector and a frozen part give the same losses whatever computes them, and resume."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.multi.launch import run_ranks
from tests.multi.runs import train
from tests.multi.test_same_loss import ZERO, assert_same, losses
from tests.tiny_project import make_project, metrics

LORA = {"r": 4, "lora_alpha": 8}


def project(folder: Path, **language: object) -> Path:
    cfg = make_project(folder, save_every=5)
    tree = yaml.safe_load(cfg.read_text())
    tree["model"]["language"] |= {"lora": LORA, "gradient_checkpointing": True, **language}
    tree["model"]["vision"]["lora"] = {"r": 2, "use_dora": True}
    cfg.write_text(yaml.safe_dump(tree))
    return cfg


@pytest.fixture(scope="module")
def lora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return project(tmp_path_factory.mktemp("lora"))


@pytest.fixture(scope="module")
def qlora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return project(tmp_path_factory.mktemp("qlora"), quantize="nf4")


@pytest.fixture(scope="module")
def reference(lora: Path) -> list[dict[str, float]]:
    return losses(lora, 1, ["run.engine=torch", "run.batch_size_train=8"], "reference")


@pytest.mark.parametrize("stage", [0, 3])
def test_losses_equal_the_reference(stage: int, lora: Path, reference: list[dict[str, float]]) -> None:
    """Largest difference of losses seen: 2e-7."""
    assert_same(losses(lora, 2, [ZERO[stage]], f"zero{stage}"), reference)


@pytest.mark.parametrize(
    "options",
    [pytest.param(["run.engine=torch"], id="torch", marks=pytest.mark.slow), pytest.param([ZERO[3]], id="zero3")],
)
def test_4_bit_weights_resume_exactly(options: list[str], qlora: Path) -> None:
    job = "_".join(options).rpartition("=")[2]
    whole = losses(qlora, 2, options, f"whole_{job}")
    stopped = [*options, "run.stop_at_step=5"]
    assert run_ranks(train, 2, str(qlora), stopped, job, timeout_s=150, join_group=False) == [75, 75]
    assert run_ranks(train, 2, str(qlora), options, job, "auto", timeout_s=150, join_group=False) == [0, 0]
    assert [line["train/loss"] for line in metrics(qlora.parent / "output" / job)] == [
        line["train/loss"] for line in whole
    ]
