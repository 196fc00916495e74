"""Checkpoints without frozen weights: what is in them, that they do what whole ones do, and when they are refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from lavis_ds import registry
from lavis_ds.cli import main
from lavis_ds.config.load import load
from lavis_ds.errors import CheckpointError
from lavis_ds.runners.checkpoint_files import complete_ones, verify
from lavis_ds.runners.export.export import export
from lavis_ds.runners.generate import generate
from tests.tiny_project import make_project, metrics, read_language_from_folder
from tests.unit.runners.conftest import alone

Tree = dict[str, Any]
Capture = pytest.CaptureFixture[str]
STEPS = 4


class Project:
    """Runs of a project whose language model is read from a folder."""

    def __init__(self, folder: Path, change: Callable[[Tree, Path], object]) -> None:
        self.cfg = make_project(folder, max_steps=STEPS, save_every=2, engine="torch", save_trainable_only=True)
        self.language = read_language_from_folder(self.cfg)
        tree: Tree = yaml.safe_load(self.cfg.read_text())
        tree["run"]["test_splits"] = ["val"]
        change(tree, folder)
        self.cfg.write_text(yaml.safe_dump(tree))
        self.output = folder / "output"

    def train(self, job: str, *options: str, resume: str | None = None) -> int:
        chosen = ["--resume", resume] if resume else []
        with alone():
            return main(["train", "--cfg", str(self.cfg), "--job-id", job, *chosen, "--options", *options])

    def weights(self, job: str, step: int = STEPS) -> Path:
        return self.output / job / "checkpoints" / f"step_{step:08d}" / "weights"

    def losses(self, job: str) -> list[float]:
        return [line["train/loss"] for line in metrics(self.output / job)]


def frozen_language(tree: Tree, _: Path) -> None:
    """The vision part is frozen too, with random weights."""
    tree["model"]["freeze"] = ["language", "vision"]


def whole_model_sources(tree: Tree, folder: Path) -> None:
    """All but the language model comes from `pretrained`, then some of the frozen vision part from `finetuned`."""
    config = load(folder / "train.yaml").config
    tree["model"]["language"]["lora"] = {"r": 2}
    for name, kept, seed in (("a", ("vision.", "projector."), 8), ("b", ("vision.vit.norm.", "projector."), 9)):
        torch.manual_seed(seed)
        model = registry.get_model_class("vlm").from_config(config.model)
        state = {key: tensor + 0.01 * seed for key, tensor in model.state_dict().items() if key.startswith(kept)}
        save_file(state, folder / f"{name}.safetensors")
    tree["model"] |= {
        "pretrained": str(folder / "a.safetensors"), "finetuned": str(folder / "b.safetensors"), "freeze": ["vision"],
    }  # fmt: skip


CASES = {"frozen": frozen_language, "sources": whole_model_sources}


@pytest.fixture(scope="module", params=CASES)
def project(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Project:
    """With a run `less`, and a run `whole` that saved everything."""
    made = Project(tmp_path_factory.mktemp(request.param), CASES[request.param])
    assert made.train("whole", "run.save_trainable_only=false") == 0
    assert made.train("less") == 0
    return made


def test_only_what_nothing_else_holds_is_written(project: Project) -> None:
    whole = load_file(project.weights("whole") / "model.safetensors")
    saved = load_file(project.weights("less") / "model.safetensors")
    record = json.loads((project.weights("less") / "frozen.json").read_text())
    assert saved.keys() | record["tensors"].keys() == whole.keys()
    assert not saved.keys() & record["tensors"].keys()
    assert all(torch.equal(tensor, whole[name]) for name, tensor in saved.items())
    expected = {"model.language.path": str(project.language)}
    if "sources" in str(project.cfg):
        expected |= {f"model.{key}": str(project.cfg.parent / f"{name}.safetensors") for key, name in
                     (("pretrained", "a"), ("finetuned", "b"))}  # fmt: skip
    assert {source["key"]: source["path"] for source in record["sources"]} == expected
    random = [name for name in saved if name.startswith("vision.")]
    assert bool(random) == ("model.pretrained" not in expected), "random weights come from nowhere, so they are saved"
    assert not any(name.startswith("language.") and "lora" not in name for name in saved)
    assert "weights/frozen.json" in verify(project.weights("less").parent)["files"]


def test_it_scores_answers_and_exports_as_a_whole_one(project: Project, tmp_path: Path, capsys: Capture) -> None:
    said = {}
    for job in ("whole", "less"):
        with alone():
            assert main(["evaluate", "--checkpoint", str(project.output / job)]) == 0
        said[job] = capsys.readouterr().out
        said[job] += generate(str(project.output / job), "what color", [], max_new_tokens=4, temperature=0.0)
    assert said["less"] == said["whole"]


def test_it_goes_on_as_a_whole_one(project: Project) -> None:
    assert project.train("resumed", "run.stop_at_step=2") == 75
    assert project.train("resumed", resume="auto") == 0
    assert project.losses("resumed") == project.losses("whole")
    for name in ("model.safetensors", "frozen.json"):
        assert (project.weights("resumed") / name).read_bytes() == (project.weights("less") / name).read_bytes()


def test_a_whole_one_goes_on_without_them_and_back(project: Project) -> None:
    assert project.train("mixed", "run.stop_at_step=2", "run.save_trainable_only=false") == 75
    assert project.train("mixed", "run.stop_at_step=3", resume="auto") == 75
    assert (project.weights("mixed", 3) / "frozen.json").exists()
    assert project.train("mixed", "run.save_trainable_only=false", resume="auto") == 0
    assert project.losses("mixed") == project.losses("whole")
    saved = [load_file(project.weights(job) / "model.safetensors") for job in ("mixed", "whole")]
    assert saved[0].keys() == saved[1].keys()
    assert all(torch.equal(saved[0][name], saved[1][name]) for name in saved[0])


def test_the_next_stage_starts_from_it(project: Project) -> None:
    losses = []
    for job in ("whole", "less"):
        start = [f"model.pretrained={project.weights(job).parent}", "model.finetuned=null", "run.max_steps=2"]
        assert project.train(f"next_{job}", *start) == 0
        losses.append(project.losses(f"next_{job}"))
        with alone():
            assert main(["evaluate", "--checkpoint", str(project.output / f"next_{job}")]) == 0
    assert losses[0] == losses[1]


def test_a_damaged_one_is_passed_over(project: Project) -> None:
    shutil.copytree(project.output / "less", project.output / "damaged")
    path = project.weights("damaged") / "frozen.json"
    path.write_text(path.read_text().replace("crc32", "crc23", 1))
    assert project.train("damaged", resume="auto") == 0
    assert project.losses("damaged") == project.losses("whole")


def change_a_weight(project: Project) -> Path:
    """Of the frozen language model; returns what it was."""
    before = project.language.with_name("before")
    shutil.copytree(project.language, before)
    file = project.language / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"][0] += 1e-4
    save_file(tensors, file, metadata={"format": "pt"})
    return before


@pytest.fixture
def changed(project: Project) -> Any:
    before = change_a_weight(project)
    yield
    shutil.rmtree(project.language)
    before.rename(project.language)


@pytest.mark.usefixtures("changed")
def test_frozen_weights_that_changed_are_refused(project: Project, capsys: Capture) -> None:
    commands = [
        ["train", "--cfg", str(project.cfg), "--job-id", "less", "--resume", "auto", "--options", "run.max_steps=6"],
        ["evaluate", "--checkpoint", str(project.output / "less")],
    ]
    for command in commands:
        with alone():
            assert main(command) == 2
        said = capsys.readouterr().err
        assert "1 of the " in said
        assert "frozen tensors that this checkpoint leaves out are not what they were when it was written" in said
        assert f"norm.weight. Expected: those of model.language.path {project.language} as they were then." in said
    with pytest.raises(CheckpointError, match="are not what they were"):
        generate(str(project.output / "less"), "what", [], max_new_tokens=1, temperature=0.0)
    assert len(complete_ones(project.output / "less" / "checkpoints")) == 2


def test_frozen_weights_that_are_gone_are_refused(project: Project, capsys: Capture) -> None:
    hidden = project.cfg.parent / "elsewhere"
    sources = [project.language, project.cfg.parent / "a.safetensors"]
    for source in sources if sources[1].exists() else sources[:1]:
        source.rename(hidden)
        train = ["train", "--cfg", str(project.cfg), "--job-id", "less", "--resume", "auto"]
        for command in (train, ["evaluate", "--checkpoint", str(project.output / "less")]):
            with alone():
                assert main(command) == 2
            said = capsys.readouterr().err
            assert str(source) in said
            assert "there is no such" in said
            assert said.count("error:") == 1
        moved = f"model.language.path={hidden}" if source == project.language else f"model.pretrained={hidden}"
        job = f"less_{source.name}"
        shutil.copytree(project.output / "less", project.output / job)
        assert project.train(job, moved, "run.max_steps=5", resume="auto") == 0, "it has a new name"
        hidden.rename(source)


def test_exported_as_a_whole_one(tmp_path: Path) -> None:
    from tests.unit.runners.export.conftest import CLIP

    def exportable(tree: Tree, _: Path) -> None:
        tree["model"] |= {"arch": "llava_qwen", "vision": dict(CLIP), "freeze": ["vision"]}
        tree["model"]["language"] |= {"lora": {"r": 2}, "dtype": "bfloat16"}

    made = Project(tmp_path, exportable)
    for job, options in (("whole", ["run.save_trainable_only=false"]), ("less", [])):
        assert made.train(job, "run.max_steps=1", *options) == 0
        export(str(made.output / job), str(tmp_path / f"exported_{job}"), verify=False)
    files = [load_file(tmp_path / f"exported_{job}" / "model.safetensors") for job in ("whole", "less")]
    assert files[0].keys() == files[1].keys()
    for name, tensor in files[0].items():
        assert tensor.dtype == torch.bfloat16, "as most of the model is"
        assert torch.equal(files[1][name], tensor), name
