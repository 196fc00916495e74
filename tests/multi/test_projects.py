"""The shipped projects, by the command lines their files name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.multi.launch import launch
from tests.tiny_project import make_project, metrics

ROOT = Path(__file__).parents[2]
TRAIN = str(ROOT / "scripts" / "train.py")
MINIGPT4QWEN = ROOT / "projects" / "minigpt4qwen"


@pytest.fixture(scope="module")
def tiny_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("minigpt4qwen")
    data = folder / "output" / "minigpt4qwen" / "tiny_data"
    script = str(MINIGPT4QWEN / "tiny_data.py")
    done = launch([script, "--output", str(data)], num_ranks=1, launcher="python", timeout_s=120)
    assert done.returncode == 0, done.stderr
    return folder


def test_minigpt4qwen_stage_1_then_stage_2(tiny_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stage 2 is the mission's own command line and YAML, with options for size and data only."""
    monkeypatch.chdir(tiny_data)
    data = tiny_data / "output" / "minigpt4qwen" / "tiny_data"
    first = [TRAIN, "--cfg", str(MINIGPT4QWEN / "tiny_stage1.yaml"), "--job-id", "tiny_stage1"]
    done = launch(first, num_ranks=2, launcher="deepspeed", timeout_s=240)
    assert done.returncode == 0, done.stderr

    options = [
        "model.model_type=tiny",
        f"model.language.tokenizer={data / 'tokenizer'}",
        f"model.pretrained={tiny_data / 'output/minigpt4qwen/tiny_stage1/checkpoints/step_00000008'}",
        f"datasets.llava_instruct.annotations.train={data / 'conversations.json'}",
        f"datasets.llava_instruct.image_root={data / 'images'}",
        "datasets.llava_instruct.vis_processor.train.image_size=32",
        f"datasets.minigpt4_instruct.annotations.train={data / 'instructions.json'}",
        f"datasets.minigpt4_instruct.image_root={data / 'images'}",
        "datasets.minigpt4_instruct.vis_processor.train.image_size=32",
        "run.precision=fp32",
        "run.global_batch_size=16",
        "run.num_workers=0",
        "run.deepspeed_config=zero3",
    ]
    second = [TRAIN, "--cfg", str(MINIGPT4QWEN / "stage2.yaml"), "--job-id", "stage2", "--options", *options]
    done = launch(second, num_ranks=2, launcher="deepspeed", timeout_s=240)
    assert done.returncode == 0, done.stderr
    lines = metrics(tiny_data / "output" / "minigpt4qwen" / "stage2")
    assert len(lines) == -(-(68 + 64) // 16)  # one epoch of both data sets
    assert (tiny_data / "output/minigpt4qwen/stage2/report.html").is_file()


def test_subclass_example_outside_the_checkout(tmp_path: Path) -> None:
    """A copy of the example trains a model and a task that the package does not know, under ZeRO-3 on two ranks."""
    example = tmp_path / "my_project"
    shutil.copytree(ROOT / "projects" / "example_subclass", example)
    assert len((example / "gated.py").read_text().splitlines()) < 60
    project = make_project(tmp_path / "data")
    options = [
        f"model.language.tokenizer={project.parent / 'tokenizer'}",
        "model.projector.merge_size=1",
        "datasets={}",
        "datasets.llava_json.annotations.train=" + str(project.parent / "train.json"),
        f"datasets.llava_json.image_root={project.parent / 'images'}",
        "datasets.llava_json.vis_processor.train={name: image_train, image_size: 64}",
        f"run.output_dir={tmp_path / 'output'}",
        "run.max_steps=4",
        "run.global_batch_size=8",
        "run.batch_size_train=4",
        "run.deepspeed_config=zero3",
        "run.num_workers=0",
    ]
    command = [TRAIN, "--cfg", str(example / "train.yaml"), "--job-id", "mine", "--options", *options]
    done = launch(command, num_ranks=2, launcher="torchrun", timeout_s=240)
    assert done.returncode == 0, done.stderr
    lines = metrics(tmp_path / "output" / "mine")
    assert lines[0]["train/gate"] == 0.5
    assert lines[-1]["train/gate"] != 0.5
    assert lines[0]["train/gate_penalty"] == 0.25


def test_sigterm_saves_and_exits_75(tmp_path: Path) -> None:
    """A single process, as a scheduler stops it."""
    import os
    import signal
    import subprocess
    import sys
    import time

    project = make_project(tmp_path / "data", max_steps=100000, save_every=None)
    command = [sys.executable, TRAIN, "--cfg", str(project), "--job-id", "job", "--options", "run.engine=torch"]
    process = subprocess.Popen(command, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    try:
        folder = project.parent / "output" / "job"
        deadline = time.monotonic() + 120
        while not (folder / "metrics.jsonl").is_file() or len(metrics(folder)) < 3:
            assert time.monotonic() < deadline
            time.sleep(0.2)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 75
    finally:
        process.kill()
    latest = (folder / "checkpoints" / "latest").read_text().strip()
    state = json.loads((folder / "checkpoints" / latest / "train_state.json").read_text())
    assert state["step"] == len(metrics(folder))
