"""The command line: spellings, exit codes, what goes to which stream, and how long `--help` takes."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import lavis_ds
from lavis_ds import cli, registry
from lavis_ds.config.load import load
from lavis_ds.errors import ConfigError, NonFiniteError

SCRIPTS = Path(__file__).parents[2] / "scripts"
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def cfg(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    tree = {
        "model": {"arch": "llava_qwen", "model_type": "tiny", "language": {"tokenizer": "some/tokenizer"}},
        "datasets": {"talk": {"builder": "llava_json", "annotations": {"train": "talk.json"}}},
        "run": {"max_steps": 10, "batch_size_train": 2, "log_freq": 3},
    }
    path.write_text(yaml.safe_dump(tree))
    return path


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What `train` was called with; nothing is trained."""
    calls: list[dict[str, Any]] = []

    def train(cfg: str, options: list[str], **rest: Any) -> int:
        calls.append({"cfg": cfg, "options": options, **rest})
        return 75

    monkeypatch.setattr("lavis_ds.runners.launch.train", train)
    return calls


@pytest.mark.parametrize("rank", [["--local_rank", "1"], ["--local-rank", "1"], ["--local_rank=1"], []])
@pytest.mark.parametrize("path", ["--cfg", "--cfg-path"])
@pytest.mark.parametrize("options", ["--options", "--cfg-options"])
def test_spellings_of_train(rank: list[str], path: str, options: str, command: list[dict[str, Any]]) -> None:
    code = cli.main(["train", *rank, path, "a.yaml", options, "a=1", "b.c=2", "--job-id", "x", "--resume", "auto"])
    assert code == 75  # the command's own
    assert command == [{"cfg": "a.yaml", "options": ["a=1", "b.c=2"], "job_id": "x", "resume": "auto"}]


def test_options_may_be_given_several_times(command: list[dict[str, Any]]) -> None:
    cli.main(["train", "--cfg", "a.yaml", "--options", "a=1", "--cfg-options", "b=2", "c=3"])
    assert command[0]["options"] == ["a=1", "b=2", "c=3"]
    cli.main(["train", "--cfg", "a.yaml"])
    assert command[1]["options"] == []  # no memory of the call before


def test_evaluate_takes_local_rank_too(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr("lavis_ds.runners.launch.evaluate", lambda *a, **k: calls.append((a, k)) or 0)
    assert cli.main(["evaluate", "--local_rank=0", "--checkpoint", "c", "--split", "val"]) == 0
    assert calls == [(("c", None, []), {"split": "val"})]


@pytest.mark.parametrize(
    "arguments",
    [[], ["train"], ["trian"], ["train", "--cfg"], ["train", "--cfg", "a", "--nope"], ["train", "--local_rank", "x"]],
)
def test_wrong_arguments_end_like_other_errors(arguments: list[str], capsys: Capture) -> None:
    assert cli.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("\nerror: lavis-ds")
    assert "--help" in error


@pytest.mark.parametrize(("error", "code"), [(ConfigError("it is wrong."), 2), (NonFiniteError("it is NaN."), 1)])
def test_our_errors_are_one_paragraph(
    error: Exception, code: int, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    def train(*_: Any, **__: Any) -> int:
        raise error

    monkeypatch.setattr("lavis_ds.runners.launch.train", train)
    assert cli.main(["train", "--cfg", "a.yaml"]) == code
    assert capsys.readouterr() == ("", f"\nerror: {error}\n\n")


def test_debug_prints_the_traceback(capsys: Capture) -> None:
    assert cli.main(["train", "--cfg", "absent.yaml", "--debug"]) == 2
    error = capsys.readouterr().err
    assert "Traceback" in error
    assert "in read_yaml" in error
    assert "ConfigError: absent.yaml: there is no such file." in error


def test_what_nobody_foresaw_is_1_with_a_traceback(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    def train(*_: Any, **__: Any) -> int:
        raise KeyError("oops")

    monkeypatch.setattr("lavis_ds.runners.launch.train", train)
    monkeypatch.setattr(sys, "argv", ["train.py", "--cfg", "a.yaml"])
    with pytest.raises(SystemExit) as caught:
        cli.script("train")
    assert caught.value.code == 1
    assert "KeyError: 'oops'" in capsys.readouterr().err


def test_script_passes_the_arguments_and_the_exit_code(
    command: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "--local_rank=0", "--cfg", "a.yaml"])
    with pytest.raises(SystemExit) as caught:
        cli.script("train")
    assert caught.value.code == 75
    assert command[0]["cfg"] == "a.yaml"


def test_a_failure_in_a_process_group_does_not_wait_for_other_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[int] = []
    monkeypatch.setattr(cli, "_in_process_group", lambda: True)
    monkeypatch.setattr(os, "_exit", left.append)
    for code in (0, 75, 1, 2):
        with pytest.raises(SystemExit):  # after os._exit, which ends a process
            cli._exit(code)
    assert left == [1, 2]


def test_version(capsys: Capture) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out.strip() == lavis_ds.__version__


def test_list_one_kind(capsys: Capture) -> None:
    assert cli.main(["list", "tasks"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["vqa", "lavis_ds.tasks.vqa:VQATask"] in lines
    assert {name for name, _ in lines} == set(registry.list_tasks())


def test_list_all_kinds(capsys: Capture) -> None:
    assert cli.main(["list"]) == 0
    out = capsys.readouterr().out
    headings = [line.rstrip(":") for line in out.splitlines() if line and not line.startswith(" ")]
    assert headings == list(registry.KINDS)
    for parts in registry.KINDS.values():
        assert all(f"  {name} " in out for name in parts.names())


def test_list_a_plugins_parts(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry.tasks, "_entries", dict(registry.tasks._entries))
    code = "from lavis_ds import registry\n@registry.register_task('of_the_plugin')\nclass Part: pass\n"
    (tmp_path / "parts.py").write_text(code)
    assert cli.main(["list", "tasks", "--plugin", "parts.py"]) == 0
    assert "of_the_plugin" in capsys.readouterr().out


def test_list_a_kind_there_is_not(capsys: Capture) -> None:
    assert cli.main(["list", "modles"]) == 2
    assert "Did you mean 'models'?" in capsys.readouterr().err


def test_show_config_prints_yaml_that_gives_the_same_run(cfg: Path, tmp_path: Path, capsys: Capture) -> None:
    assert cli.main(["show-config", "--cfg", str(cfg), "--options", "run.seed=7"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("# run.log_freq: ")  # the notice is a comment
    again = tmp_path / "again.yaml"
    again.write_text(out)
    assert load(again).config == load(cfg, ["run.seed=7"]).config
    assert yaml.safe_load(out)["run"]["seed"] == 7


def test_show_config_help_keys(capsys: Capture) -> None:
    assert cli.main(["show-config", "--help-keys"]) == 0
    assert "| `init_lr` | float | `0.0001` | peak learning rate |" in capsys.readouterr().out


def test_show_config_needs_one_of_both(capsys: Capture) -> None:
    assert cli.main(["show-config"]) == 2
    assert "--help-keys" in capsys.readouterr().err


HELP = "import sys; sys.argv = ['lavis-ds', *{arguments}]; from lavis_ds.cli import entry_point; entry_point()"


def test_help_is_instant() -> None:
    """CPU seconds, since the machine may be busy. Measured: 0.08 with Python's own start."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", HELP.format(arguments=["--help"])], capture_output=True, text=True, check=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.3
    for name in ("train", "evaluate", "generate", "data", "show-config", "list", "report"):
        assert f"\n    {name}" in done.stdout


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["--version"], ["list"]])
def test_torch_is_not_imported_for(arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", HELP.format(arguments=arguments)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    imported = {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines()}
    assert "lavis_ds.cli" in imported
    assert not imported & {"torch", "numpy", "transformers", "pydantic"}


@pytest.mark.parametrize("name", ["train", "evaluate", "generate", "report"])
def test_scripts_are_the_same_commands(name: str) -> None:
    def run(*command: str) -> str:
        return subprocess.run(
            [sys.executable, *command, "--help"], capture_output=True, text=True, check=True, env={**os.environ}
        ).stdout

    assert run(str(SCRIPTS / f"{name}.py")) == run("-c", HELP.format(arguments=[name, "--help"]))
