"""What the documentation shows is right: configurations are accepted, links lead somewhere, commands are understood."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from lavis_ds import cli, registry
from lavis_ds.config import load
from lavis_ds.config.schema import RootConfig
from lavis_ds.data.conversation import Image
from lavis_ds.engines import ds_config
from lavis_ds.errors import LavisError

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("projects/*/README.md")])
PROJECT_FILES = sorted(ROOT.glob("projects/*/**/*.yaml"))

FENCE = re.compile(
    r'^ *```(?P<language>\w*)(?: title="(?P<title>[^"]+)")?\n(?P<text>.*?)^ *```$', re.DOTALL | re.MULTILINE
)
LINK = re.compile(r"!?\[[^\]]*\]\((?P<target>[^)\s]+)\)")
SOURCE_FILE = re.compile(r"`((?:[\w.-]+/)+[\w.-]+\.(?:py|yaml|json|html))`")
SCRIPT = re.compile(r"(?:.*/)?scripts/(\w+)\.py")
RANKS = (1, 2, 8)


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def without_comments(page: Path) -> str:
    return re.sub(r"<!--.*?-->", "", page.read_text(), flags=re.DOTALL)


def prose(page: Path) -> str:
    return re.sub(r"`[^`\n]+`", "``", FENCE.sub("", without_comments(page)))


def blocks(page: Path, *languages: str) -> Iterator[re.Match[str]]:
    return (match for match in FENCE.finditer(without_comments(page)) if match["language"] in languages)


@pytest.fixture(autouse=True)
def _own_plugins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Plugins of the documentation are imported, and register their parts, for one test only."""
    for parts in registry.KINDS.values():
        monkeypatch.setattr(parts, "_entries", dict(parts._entries))
        monkeypatch.setattr(parts, "_classes", dict(parts._classes))
    before = _take_plugins()
    yield
    _take_plugins()
    sys.modules.update(before)


def _take_plugins() -> dict[str, ModuleType]:
    return {name: sys.modules.pop(name) for name in list(sys.modules) if name.startswith("lavis_ds_plugin_")}


# Configurations


def accept(path: Path, options: list[str] | None = None) -> RootConfig:
    """The configuration, if nothing but files and weights could keep it from running."""
    config = load.load(path, options or []).config
    plans = [_plan(config, ranks) for ranks in RANKS]
    assert any(plans), f"{path} fits none of {RANKS} ranks"
    return config


def _plan(config: RootConfig, ranks: int) -> bool:
    """Whether batch sizes fit so many ranks; wrong DeepSpeed settings are an error."""
    try:
        plan = ds_config.batch_plan(config.run, ranks)
    except LavisError:
        return False
    ds_config.derive(config.run, plan, data_parallel_size=ranks)
    return True


@pytest.mark.parametrize("path", PROJECT_FILES, ids=name_of)
def test_project_file_is_accepted(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    accept(path)


PAGES_WITH_FILES = [page for page in PAGES if any(match["title"] for match in blocks(page, "yaml"))]


def write_files(page: Path, folder: Path) -> list[Path]:
    """Every block of the page that has a title is a whole file."""
    files = [(folder / match["title"], match["text"]) for match in blocks(page, "yaml", "python") if match["title"]]
    for path, text in files:
        path.write_text(text)
    return [path for path, _ in files]


@pytest.mark.parametrize("page", PAGES_WITH_FILES, ids=name_of)
def test_whole_file_shown_on_a_page_is_accepted(page: Path, tmp_path: Path) -> None:
    for path in write_files(page, tmp_path):
        if path.suffix == ".yaml":
            accept(path)


def test_pages_show_whole_files() -> None:
    assert {"README.md", "docs/how-to/your-data.md"} <= {name_of(page) for page in PAGES_WITH_FILES}


def test_the_builder_shown_in_your_data_reads_a_file(tmp_path: Path) -> None:
    write_files(ROOT / "docs" / "how-to" / "your-data.md", tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "captions.csv").write_text('picture,caption\ncat.jpg,"A cat, asleep."\n')
    entry = accept(tmp_path / "captions.yaml").datasets["captions"]
    builder = registry.get_builder_class("captions_csv")("captions", entry)

    (conversation,) = builder.build("train")

    assert conversation.images == (Image(str(tmp_path / "data" / "images" / "cat.jpg")),)
    assert [turn.text for turn in conversation.turns] == ["What do you see?", "A cat, asleep."]


READERS: dict[str, Callable[[str], object]] = {
    "yaml": yaml.safe_load,
    "json": json.loads,
    "python": lambda text: compile(text, "a page", "exec"),
}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_block_can_be_read(page: Path) -> None:
    for block in blocks(page, *READERS):
        READERS[block["language"]](block["text"])


# Links and paths


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_relative_links_lead_somewhere(page: Path) -> None:
    targets = [match["target"].partition("#")[0] for match in LINK.finditer(prose(page))]
    relative = [target for target in targets if target and "://" not in target]
    assert [target for target in relative if not (page.parent / target).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_of_the_repository_that_are_named_exist(page: Path) -> None:
    """A path in backticks that starts at a folder of the repository or of the package."""
    folders = {
        "configs",
        "docs",
        "lavis_ds",
        "projects",
        "scripts",
        "tests",
        *(p.name for p in ROOT.glob("lavis_ds/*")),
    }
    named = SOURCE_FILE.findall(FENCE.sub("", without_comments(page)))
    known = [path for path in named if path.split("/")[0] in folders and not Path(path).stem.isupper()]
    assert [path for path in known if not any((root / path).exists() for root in (ROOT, ROOT / "lavis_ds"))] == []


# Commands


def commands(page: Path) -> Iterator[list[str]]:
    """Arguments of `lavis-ds` for every command in the page's bash blocks, whatever launcher starts it."""
    for block in blocks(page, "bash"):
        for line in block["text"].replace("\\\n", " ").splitlines():
            words = shlex.split(re.sub(r"\$\(.*\)", "VALUE", line), comments=True)
            for index, word in enumerate(words):
                script = SCRIPT.fullmatch(word)
                if word.endswith("lavis-ds"):
                    yield _until_the_end(words[index + 1 :])
                elif script and script[1] != "quickstart":
                    yield [script[1], *_until_the_end(words[index + 1 :])]


def _until_the_end(words: list[str]) -> list[str]:
    end = next((i for i, word in enumerate(words) if word in {">", ">>", "|", "&&", "||", ";", "&"}), len(words))
    return words[:end]


COMMANDS = [(page, command) for page in PAGES for command in commands(page)]


@pytest.mark.parametrize(("page", "command"), COMMANDS, ids=[f"{name_of(p)}: {shlex.join(c)}" for p, c in COMMANDS])
def test_command_is_understood(page: Path, command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    arguments = cli.parser().parse_args(command)
    cfg = getattr(arguments, "cfg", None)
    if cfg is not None and cfg.startswith("projects/"):
        accept(ROOT / cfg, arguments.options)
    elif getattr(arguments, "options", []):
        accept(ROOT / "projects" / "quickstart" / "train.yaml", _options_of_any_run(arguments.options))


def _options_of_any_run(options: list[str]) -> list[str]:
    """A file that only the reader has can't be looked into."""
    return [option for option in options if not option.endswith(".json")]


def test_there_are_commands() -> None:
    assert {command[0] for _, command in COMMANDS} >= {"train", "evaluate", "generate", "show-config", "list", "report"}


MAKE = [
    (page, match[1])
    for page in PAGES
    for b in blocks(page, "bash")
    for match in re.finditer(r"^make (\w+)", b["text"], re.M)
]


@pytest.mark.parametrize(("page", "target"), MAKE, ids=[f"{name_of(page)}: {target}" for page, target in MAKE])
def test_make_target_exists(page: Path, target: str) -> None:
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.M)
