"""`--help-keys` prints every key that can be written, each with a meaning."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from lavis_ds import registry
from lavis_ds.config import reference
from lavis_ds.config.base import Config
from lavis_ds.config.schema import RootConfig, RunConfig

KINDS = {
    "model": registry.models,
    "vision encoder": registry.vision_encoders,
    "projector": registry.projectors,
    "language model": registry.language_models,
    "dataset": registry.builders,
    "processor": registry.processors,
    "task": registry.tasks,
    "runner": registry.runners,
}


@pytest.fixture(scope="module")
def sections() -> dict[str, str]:
    """Heading -> what stands under it."""
    parts = re.split(r"^## (.+)$", reference.text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def every_class() -> Iterator[tuple[str, type[Config]]]:
    yield "the file", RootConfig
    yield "`run:`", RunConfig
    for title, parts in KINDS.items():
        for entry in parts:
            yield f"{title} `{entry.name}`", parts.config_class(entry.name)


@pytest.mark.parametrize(("title", "options"), [pytest.param(*case, id=case[0]) for case in every_class()])
def test_every_key_is_listed_with_its_meaning(title: str, options: type[Config], sections: dict[str, str]) -> None:
    rows = {row.split("|")[1].strip(" `"): row for row in sections[title].splitlines() if row.startswith("| `")}
    assert [name for name in rows if "." not in name] == list(options.model_fields)
    for name, field in options.model_fields.items():
        assert (field.description or "registered name").replace("|", "\\|") in rows[name]


@pytest.mark.parametrize(
    ("title", "keys"),
    [
        ("`run:`", ["optimizer.betas", "optimizer.eps", "param_groups.<name>.lr", "param_groups.<name>.weight_decay"]),
        ("dataset `llava_json`", ["vis_processor.train", "vis_processor.eval", "text_processor.eval"]),
    ],
)
def test_keys_inside_blocks_are_listed_too(title: str, keys: list[str], sections: dict[str, str]) -> None:
    assert all(f"| `{key}` |" in sections[title] for key in keys)


@pytest.mark.parametrize(
    ("title", "name", "fragments"),
    [
        ("`run:`", "init_lr", ["| float |", "`0.0001`"]),
        ("`run:`", "max_steps", ["int or null", "`null`"]),
        ("`run:`", "evaluate", ["| bool |", "`false`"]),
        ("`run:`", "task", ["task by name", "`instruct`"]),
        ("`run:`", "output_dir", ["`output`"]),
        ("`run:`", "save_every", ["| epoch or int or null |", "`epoch`"]),
        ("`run:`", "deepspeed_config", ["| dict[str, any] or str |"]),
        ("`run:`", "optimizer", ["| mapping | see below |"]),
        ("model `vlm`", "vision", ["vision encoder by name", "required"]),
        ("dataset `llava_json`", "annotations", ["| dict[str, list[str]] |"]),
        ("the file", "datasets", ["| dict[str, dataset builder by name] |"]),
    ],
)
def test_type_and_default(title: str, name: str, fragments: list[str], sections: dict[str, str]) -> None:
    row = next(line for line in sections[title].splitlines() if line.startswith(f"| `{name}`"))
    assert all(fragment in row for fragment in fragments), row


def test_tables_are_tables(sections: dict[str, str]) -> None:
    for title, text in sections.items():
        for row in text.splitlines():
            if row.startswith("|"):
                assert len(re.findall(r"(?<!\\)\|", row)) == 5, f"{title}: {row}"
