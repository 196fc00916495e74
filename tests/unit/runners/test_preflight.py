"""What is refused before torch is imported, and what an evaluation does not ask for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from lavis_ds.config.load import load
from lavis_ds.config.schema import RootConfig
from lavis_ds.errors import ConfigError, LavisError
from lavis_ds.runners import preflight
from tests.unit.runners.conftest import TinyRun


def config(tiny_run: TinyRun, *options: str) -> RootConfig:
    return load(tiny_run.cfg, options).config


def test_plan_and_samples(tiny_run: TinyRun) -> None:
    checked = preflight.check(config(tiny_run, "run.batch_size_train=2"), world_size=2)
    plan = checked.plan
    assert (plan.global_batch_size, plan.micro_batch_size, plan.accumulation) == (8, 2, 2)
    assert {split: {name: len(s) for name, s in entries.items()} for split, entries in checked.splits.items()} == {
        "train": {"tiny": 22},
        "val": {"tiny": 5},
    }


def test_a_dataset_without_the_split_is_left_out(tiny_run: TinyRun, tmp_path: Path) -> None:
    tree = yaml.safe_load(tiny_run.cfg.read_text())
    more = {**tree["datasets"]["tiny"], "annotations": {"train": tree["datasets"]["tiny"]["annotations"]["val"]}}
    tree["datasets"]["more"] = more
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree))
    splits = preflight.read(load(tmp_path / "run.yaml").config, ["train", "val"])
    assert {split: set(entries) for split, entries in splits.items()} == {"train": {"tiny", "more"}, "val": {"tiny"}}


@pytest.mark.parametrize(
    ("options", "world_size", "message"),
    [
        (["run.batch_size_train=3"], 1, "8 = 3"),
        ([], 3, "8 = 4"),
        (["run.observers=[jsonk]"], 1, "'jsonk'"),
        (["run.engine=deepspeed", "run.deepspeed_config.zero_optimization.stagee=1"], 1, "stagee"),
        (["run.train_splits=[trian]"], 1, "no dataset has a split 'trian'.*'train'"),
        (["run.test_splits=[tset]"], 1, "no dataset has a split 'tset'"),
        (["model.language.tokenizer=/no/such"], 1, "model.language.tokenizer: there is no such file or folder"),
        (["model.language.tokenizer=a/b/c"], 1, "model.language.tokenizer: .*no hub id"),
        (["model.pretrained=absent"], 1, "model.pretrained: .*absent"),
    ],
)
def test_refused(options: list[str], world_size: int, message: str, tiny_run: TinyRun) -> None:
    with pytest.raises(ConfigError, match=message):
        preflight.check(config(tiny_run, *options), world_size=world_size)


def test_hub_ids_and_relative_folders_pass(tiny_run: TinyRun, tmp_path: Path) -> None:
    (tmp_path / "a" / "b" / "c").mkdir(parents=True)
    for tokenizer in ("owner/name", "a/b/c", "./a"):
        preflight.check(config(tiny_run, f"model.language.tokenizer={tokenizer}"), world_size=1)


@pytest.mark.parametrize("option", ["run.batch_size_train=3", "run.observers=[jsonk]"])
def test_reading_asks_for_nothing_that_only_training_needs(option: str, tiny_run: TinyRun) -> None:
    assert list(preflight.read(config(tiny_run, option), ["val", "val"])) == ["val"]


def test_reading_checks_the_models_files(tiny_run: TinyRun) -> None:
    with pytest.raises(LavisError, match="tokenizer"):
        preflight.read(config(tiny_run, "model.language.tokenizer=/no/such"), ["val"])


def test_deepspeed_settings_are_none_of_the_plain_engines_business(tiny_run: TinyRun) -> None:
    options: list[Any] = ["run.engine=torch", "run.deepspeed_config.zero_optimization.stagee=1"]
    preflight.check(config(tiny_run, *options), world_size=1)
