"""Checkpoints without frozen weights, of several ranks: gone on with elsewhere, and refused by all ranks alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file, save_file

from tests.multi import faults
from tests.multi.launch import run_ranks
from tests.multi.test_elastic_resume import ENGINES, run
from tests.tiny_project import make_project, read_language_from_folder

STEPS, STOP = 6, 3


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Adapters in a language model that is read from a folder; a frozen vision part with random weights."""
    path = make_project(tmp_path_factory.mktemp("project"), max_steps=STEPS, save_every=None, save_in_background=True)
    read_language_from_folder(path)
    tree = yaml.safe_load(path.read_text())
    tree["model"]["language"]["lora"], tree["model"]["freeze"] = {"r": 4}, ["vision"]
    path.write_text(yaml.safe_dump(tree))
    return path


@pytest.fixture(scope="module")
def uninterrupted(project: Path) -> list[dict[str, Any]]:
    return run(project, "whole", 1, ["run.engine=torch"])


CASES = [
    (2, "zero3", 1, "zero1"),
    pytest.param(1, "zero2", 2, "zero3", marks=pytest.mark.slow),
    pytest.param(2, "torch", 2, "zero0", marks=pytest.mark.slow),
    pytest.param(4, "zero3", 2, "torch", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("ranks", "engine", "new_ranks", "new_engine"), CASES)
def test_it_goes_on_at_another_layout(
    ranks: int, engine: str, new_ranks: int, new_engine: str, project: Path, uninterrupted: list[dict[str, Any]]
) -> None:
    """Largest difference of losses seen: 4e-7."""
    job, less = f"{engine}_{ranks}_{new_engine}_{new_ranks}", "run.save_trainable_only=true"
    run(project, job, ranks, [*ENGINES[engine], f"run.stop_at_step={STOP}", less])
    lines = run(project, job, new_ranks, [*ENGINES[new_engine], less], "auto")
    differences = [abs(a["train/loss"] - b["train/loss"]) for a, b in zip(lines, uninterrupted, strict=True)]
    print("largest difference", max(differences))
    assert max(differences) < 1e-5
    output, last = project.parent / "output", f"checkpoints/step_{STEPS:08d}/weights"
    whole, saved = (load_file(output / name / last / "model.safetensors") for name in ("whole", job))
    record = json.loads((output / job / last / "frozen.json").read_text())["tensors"]
    assert saved.keys() | record.keys() == whole.keys()
    assert {name.split(".")[0] for name in record} == {"language"}
    assert all(saved[name].equal(whole[name]) for name in saved if name.startswith("vision."))


@pytest.mark.slow
def test_a_source_that_changed_is_refused_by_all_ranks_with_one_error(project: Path) -> None:
    options = [*ENGINES["zero3"], "run.save_trainable_only=true", "run.batch_size_train=2", f"run.stop_at_step={STOP}"]
    run(project, "refused", 2, options[:-2] + options[-1:])
    file = project.parent / "language" / "model.safetensors"
    before = file.read_bytes()
    tensors = load_file(file)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] += 1e-3
    save_file(tensors, file, metadata={"format": "pt"})
    arguments = (str(project), "refused", options[:-1], "auto", faults.none)
    (code_0, said_0), (code_1, said_1) = run_ranks(faults.command, 2, *arguments, timeout_s=90, join_group=False)
    file.write_bytes(before)
    assert (code_0, code_1, said_1) == (2, 2, ""), "one rank tells it"
    assert said_0.count("error: ") == 1
    assert "1 of the " in said_0
    assert "language.lm.model.layers.1.mlp.up_proj.base_layer.weight. Expected: those of model.language.path" in said_0
