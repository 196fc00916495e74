"""Bad input ends in exit code 2 and one clear paragraph: where, what was given, what was expected, what to do next."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from lavis_ds.cli import main
from tests.tiny_project import make_project

ROOT = Path(__file__).parents[1]

Edit = Callable[[dict[str, Any], Path], list[str] | None]
"""Spoils the configuration or files; may return further arguments."""


def put(path: str, value: Any) -> Edit:
    def edit(tree: dict[str, Any], folder: Path) -> None:
        *parents, leaf = path.split(".")
        for name in parents:
            tree = tree[name]
        tree[leaf] = value

    return edit


def arguments(*extra: str) -> Edit:
    return lambda tree, folder: [argument.replace("FOLDER", str(folder)) for argument in extra]


def annotations(content: Any) -> Edit:
    def edit(tree: dict[str, Any], folder: Path) -> None:
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / "train.json").write_text(text)

    return edit


def without(path: str) -> Edit:
    def edit(tree: dict[str, Any], folder: Path) -> None:
        *parents, leaf = path.split(".")
        for name in parents:
            tree = tree[name]
        del tree[leaf]

    return edit


def unfinished_checkpoint(tree: dict[str, Any], folder: Path) -> list[str]:
    (folder / "output" / "x" / "checkpoints" / "step_00000004").mkdir(parents=True)
    return ["--resume", str(folder / "output" / "x" / "checkpoints" / "step_00000004")]


def occupied_run_folder(tree: dict[str, Any], folder: Path) -> list[str]:
    checkpoint = folder / "output" / "taken" / "checkpoints" / "step_00000004"
    checkpoint.mkdir(parents=True)
    (checkpoint / "COMPLETE").touch()
    return ["--job-id", "taken"]


def output_is_a_file(tree: dict[str, Any], folder: Path) -> None:
    (folder / "output").write_text("")


def broken_plugin(tree: dict[str, Any], folder: Path) -> None:
    (folder / "parts.py").write_text("1 / 0\n")
    tree["plugins"] = "parts.py"


def packs_of_drawn_turns(tree: dict[str, Any], folder: Path) -> None:
    tree["data"] = {"batching": "packed"}
    tree["datasets"]["tiny"]["text_processor"] = {"name": "chat", "turns": "independent", "shuffle_turns": True}


CASES: dict[str, tuple[Edit, list[str]]] = {
    "arch": (put("model.arch", "vml"), ["model", "no model named 'vml'", "Did you mean 'vlm'?"]),
    "no arch": (without("model.arch"), ["model", "`arch` must name a model"]),
    "model type": (put("model.model_type", "small"), ["model.model_type", "no type 'small'"]),
    "part": (put("model.projector.name", "mpl"), ["model.projector", "no projector named 'mpl'", "'mlp'"]),
    "key of a part": (put("model.projector.depht", 2), ["model.projector.depht", "no such key", "'depth'"]),
    "key of the model": (put("model.max_text_len", 2), ["model.max_text_len", "'max_txt_len'"]),
    "key of run": (put("run.inti_lr", 1), ["run.inti_lr", "'init_lr'"]),
    "block": (put("runn", {}), ["runn", "no such key", "'run'"]),
    "missing block": (without("datasets"), ["datasets", "required"]),
    "type": (put("run.max_steps", "many"), ["run.max_steps", "integer", "'many'"]),
    "type of a number": (put("run.init_lr", [1]), ["run.init_lr", "number"]),
    "negative": (put("run.init_lr", -1.0), ["run.init_lr", "greater than 0"]),
    "choice": (put("run.precision", "fp8"), ["run.precision", "'bf16'", "'fp8'"]),
    "engine": (put("run.engine", "deepsped"), ["run.engine", "'deepspeed'"]),
    "task": (put("run.task", "vqq"), ["run.task", "no task named 'vqq'", "'vqa'"]),
    "key of a task": (put("run.task", {"name": "vqa", "max_tokens": 1}), ["run.task.max_tokens", "'max_new_tokens'"]),
    "runner": (put("run.runner", "trian"), ["run.runner", "no runner named 'trian'", "'train'"]),
    "schedule": (put("run.lr_sched", "cosin"), ["lr_sched", "no lr scheduler named 'cosin'", "'cosine'"]),
    "observer": (put("run.observers", ["jsonk"]), ["run.observers", "'jsonk'", "'jsonl'"]),
    "two lengths": (put("run.max_epoch", 1), ["max_epoch", "max_steps", "keep one"]),
    "no length": (without("run.max_steps"), ["neither max_epoch nor max_steps"]),
    "no batch size": (
        lambda tree, folder: [tree["run"].pop(k) for k in ("batch_size_train", "global_batch_size")] and None,
        ["neither batch_size_train nor global_batch_size"],
    ),
    "batch does not divide": (put("run.batch_size_train", 3), ["8", "3"]),
    "batch triple": (put("run.accum_grad_iters", 3), ["4", "3", "8"]),
    "two warm-ups": (put("run.warmup_ratio", 0.1), ["warmup_steps", "warmup_ratio"]),
    "split": (put("run.train_splits", "trian"), ["no dataset has a split 'trian'", "'train'"]),
    "builder": (put("datasets.tiny.builder", "lava_json"), ["datasets.tiny", "'lava_json'", "'llava_json'"]),
    "processor": (put("datasets.tiny.vis_processor.train.name", "image_trian"), ["vis_processor", "'image_train'"]),
    "key of a processor": (
        put("datasets.tiny.vis_processor.train.size", 3),
        ["vis_processor.train.size", "no such key"],
    ),
    "annotation file": (
        put("datasets.tiny.annotations.train", "/no/such.json"),
        ["/no/such.json", "no such annotation file"],
    ),
    "weights for some": (
        lambda tree, folder: tree["datasets"].update(
            more={**tree["datasets"]["tiny"], "weight": 2.0},
        ),
        ["datasets", "some datasets have a `weight`", "tiny"],
    ),
    "temperature": (put("data", {"temperature": 0.5}), ["data.temperature", "greater than or equal to 1"]),
    "batching": (put("data", {"batching": "pack"}), ["data.batching", "'packed'"]),
    "short packs": (put("data", {"batching": "packed", "pack_length": 16}), ["data.pack_length (16)", "max_txt_len"]),
    "packs of drawn turns": (
        packs_of_drawn_turns,
        ["datasets.tiny.text_processor", "anew every epoch", "shuffle_turns"],
    ),
    "two frame rates": (
        put("datasets.tiny.video", {"fps": 1, "num_frames": 4}),
        ["datasets.tiny.video", "num_frames (4) and fps"],
    ),
    "shards": (
        put("datasets.tiny", {"builder": "webdataset", "annotations": {"train": "none/{0..3}.tar"}}),
        ["none/0.tar"],
    ),
    "bounds of pictures": (
        put("datasets.tiny.vis_processor.train", {"name": "image_native", "min_pixels": 10, "max_pixels": 5}),
        ["vis_processor.train", "min_pixels (10)"],
    ),
    "annotations not JSON": (annotations("[{"), ["train.json", "JSON"]),
    "annotations empty": (annotations([]), ["train.json"]),
    "annotations of another format": (annotations([{"image": "a.png"}]), ["train.json", "conversations"]),
    "markers without pictures": (
        annotations(
            [{"id": "a", "image": ["0_0.png", "0_0.png"], "conversations": [{"from": "human", "value": "<image>"}]}]
        ),
        ["train.json"],
    ),
    "DeepSpeed key": (
        put("run.deepspeed_config", {"fp8_training": {}}),
        ["run.deepspeed_config.fp8_training", "never"],
    ),
    "DeepSpeed nested key": (
        put("run.deepspeed_config", {"zero_optimization": {"stagee": 2}}),
        ["run.deepspeed_config.zero_optimization.stagee", "'stage'"],
    ),
    "DeepSpeed stage": (put("run.deepspeed_config", {"zero_optimization": {"stage": 4}}), ["stage", "4"]),
    "DeepSpeed preset": (put("run.deepspeed_config", "zero5"), ["zero5", "zero3"]),
    "DeepSpeed disagrees": (
        arguments("--options", "run.grad_clip=1.0", "run.deepspeed_config.gradient_clipping=5.0"),
        ["gradient_clipping", "run.grad_clip"],
    ),
    "DeepSpeed auto": (put("run.deepspeed_config", {"train_batch_size": "auto"}), ["train_batch_size", "auto"]),
    "tokenizer folder": (
        put("model.language.tokenizer", "/no/such/folder"),
        ["model.language.tokenizer", "/no/such/folder"],
    ),
    "pretrained folder": (put("model.pretrained", "/no/such"), ["model.pretrained", "/no/such"]),
    "finetuned file": (put("model.finetuned", "/no/such.pth"), ["model.finetuned", "/no/such.pth"]),
    "plugin": (put("plugins", "no_such.py"), ["plugins", "no_such.py"]),
    "plugin raises": (broken_plugin, ["parts.py", "ZeroDivisionError"]),
    "plugin module": (put("plugins", "no_such_module_xyz"), ["no_such_module_xyz", "not installed"]),
    "option without value": (arguments("--options", "run.init_lr"), ["--options", "key=value"]),
    "option key": (arguments("--options", "run.max_step=3"), ["run.max_step", "'max_steps'"]),
    "option type": (arguments("--options", "run.max_steps=x"), ["run.max_steps", "integer"]),
    "argument": (arguments("--no-such-flag"), ["--no-such-flag"]),
    "checkpoint missing": (arguments("--resume", "FOLDER/nothing"), ["nothing", "no such checkpoint"]),
    "checkpoint unfinished": (unfinished_checkpoint, ["step_00000004", "not finished"]),
    "run folder taken": (occupied_run_folder, ["already holds checkpoints", "--resume auto"]),
    "output not writable": (output_is_a_file, ["run.output_dir", "can't be written"]),
}


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_project(tmp_path_factory.mktemp("template"))


@pytest.fixture
def project(template: Path, tmp_path: Path) -> Path:
    """A copy that a case may spoil; pictures and tokenizer stay where they are."""
    folder = tmp_path / "project"
    folder.mkdir()
    tree = yaml.safe_load(template.read_text())
    (folder / "train.json").write_text((template.parent / "train.json").read_text())
    tree["datasets"]["tiny"]["annotations"]["train"] = [str(folder / "train.json")]
    tree["run"]["output_dir"] = str(folder / "output")
    (folder / "train.yaml").write_text(yaml.safe_dump(tree))
    return folder / "train.yaml"


@pytest.mark.parametrize("case", CASES)
def test_one_paragraph_and_exit_code_2(case: str, project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit, fragments = CASES[case]
    tree = yaml.safe_load(project.read_text())
    extra = edit(tree, project.parent) or []
    project.write_text(yaml.safe_dump(tree))

    code = main(["train", "--cfg", str(project), *extra])

    text = capsys.readouterr().err
    assert code == 2
    assert "Traceback" not in text
    assert len(text.strip().split("\n\n")) == 1
    for fragment in fragments:
        assert fragment in text


def test_every_finding_is_listed_at_once(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["run.inti_lr=1", "model.projector.depht=2", "run.max_steps=x"]
    assert main(["train", "--cfg", str(project), "--options", *options]) == 2
    text = capsys.readouterr().err
    assert all(key in text for key in ("run.inti_lr", "model.projector.depht", "run.max_steps"))


@pytest.mark.parametrize(
    ("content", "fragment"),
    [
        ("a: [1,", "not valid YAML"),
        ("- 1\n", "must hold a mapping"),
        ("a: ${nope}\nmodel: {}", "nope"),
        ("", "required"),
    ],
)
def test_yaml_that_is_none(content: str, fragment: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(content)
    assert main(["train", "--cfg", str(path)]) == 2
    assert fragment in capsys.readouterr().err


def test_missing_yaml_names_its_neighbour(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--cfg", str(project.with_name("trian.yaml"))]) == 2
    assert "'train.yaml'" in capsys.readouterr().err


LAUNCHED = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
SLOW_TO_FIND_ELSEWHERE = ["key of run", "annotation file", "DeepSpeed nested key", "checkpoint missing"]


@pytest.mark.parametrize("case", SLOW_TO_FIND_ELSEWHERE)
def test_a_real_process_says_so_before_torch_is_imported(case: str, project: Path) -> None:
    edit, fragments = CASES[case]
    tree = yaml.safe_load(project.read_text())
    extra = edit(tree, project.parent) or []
    project.write_text(yaml.safe_dump(tree))
    command = [sys.executable, "-X", "importtime", str(ROOT / "scripts" / "train.py"), "--cfg", str(project), *extra]

    begin = time.process_time()
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ, **LAUNCHED})

    assert time.process_time() - begin < 5
    assert done.returncode == 2
    assert all(fragment in done.stderr for fragment in fragments)
    assert not any(line.endswith("| torch") for line in done.stderr.splitlines())


def test_only_rank_0_tells_what_all_ranks_found(project: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("RANK", "1")
    assert main(["train", "--cfg", str(project), "--options", "run.inti_lr=1"]) == 2
    assert capsys.readouterr().err == ""
