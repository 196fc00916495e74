"""Runs over packed, grouped and mixed data: what they see, what they write, and how they go on."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from lavis_ds.cli import main
from tests.tiny_project import NUM_SAMPLES, make_project, metrics
from tests.unit.runners.conftest import alone

MODES = ["padded", "grouped", "packed"]
TIMES = ("time/", "throughput/", "memory/")


def train(cfg: Path, job: str, *options: str, resume: str = "none") -> int:
    with alone():
        common = ["train", "--cfg", str(cfg), "--job-id", job, "--resume", resume, "--options", "run.engine=torch"]
        return main([*common, *options])


def lines(cfg: Path, job: str) -> list[dict[str, Any]]:
    return metrics(cfg.parent / "output" / job)


def lasting(cfg: Path, job: str) -> list[dict[str, Any]]:
    return [{k: v for k, v in line.items() if not k.startswith(TIMES)} for line in lines(cfg, job)]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixed")
    data = {"plan_window": 12, "max_bad_fraction": 0}
    return make_project(
        folder,
        num_datasets=2,
        data=data,
        max_epoch=2,
        max_steps=None,
        global_batch_size=4,
        batch_size_train=2,
        save_every=3,
    )


@pytest.mark.parametrize("mode", MODES)
class TestModes:
    def test_every_epoch_sees_every_sample_once(self, project: Path, mode: str) -> None:
        assert train(project, mode, f"data.batching={mode}") == 0
        seen = Counter(i for line in lines(project, mode) for i in line["data/sample_ids"])
        everything = {f"tiny/train/{k}:s{k}" for k in range(NUM_SAMPLES)} | {f"words/train/{k}:w{k}" for k in range(9)}
        assert seen == dict.fromkeys(everything, 2)
        assert lines(project, mode)[-1]["epoch"] == 2.0

    def test_stopped_and_resumed_it_is_the_same_run(self, project: Path, mode: str) -> None:
        if not (project.parent / "output" / mode).exists():
            train(project, mode, f"data.batching={mode}")
        assert train(project, f"{mode}_2", f"data.batching={mode}", "run.stop_at_step=5", "run.num_workers=2") == 75
        assert train(project, f"{mode}_2", f"data.batching={mode}", "run.num_workers=1", resume="auto") == 0
        assert lasting(project, f"{mode}_2") == lasting(project, mode)


def test_each_dataset_has_its_loss_and_counts(project: Path) -> None:
    assert train(project, "losses", "run.stop_at_step=4") == 75
    for line in lines(project, "losses"):
        samples = {name: line[f"data/samples/{name}"] for name in ("tiny", "words")}
        assert samples == {n: sum(i.startswith(n) for i in line["data/sample_ids"]) for n in samples}
        losses = [line[f"train/loss/{name}"] for name in samples if samples[name]]
        assert min(losses) * (1 - 1e-6) <= line["train/loss"] <= max(losses) * (1 + 1e-6)


def test_packing_leaves_less_padding(project: Path) -> None:
    assert train(project, "full", "data.batching=packed", "data.plan_window=100", "run.stop_at_step=1") == 75
    assert lines(project, "full")[0]["data/padding_fraction"] < 0.1
    assert lines(project, "full")[0]["throughput/samples_per_s"] > 0


def test_a_mixture_draws_in_proportion_to_the_weights(project: Path) -> None:
    weights = ["datasets.tiny.weight=1", "datasets.words.weight=3"]
    assert train(project, "weighted", *weights) == 0
    seen = Counter(i.split("/")[0] for line in lines(project, "weighted") for i in line["data/sample_ids"])
    assert seen == {"tiny": 2 * 8, "words": 2 * 23}


def test_only_the_first_samples_of_a_dataset(project: Path) -> None:
    assert train(project, "few", "datasets.tiny.max_samples=3") == 0
    seen = {i for line in lines(project, "few") for i in line["data/sample_ids"] if i.startswith("tiny")}
    assert seen == {f"tiny/train/{k}:s{k}" for k in range(3)}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("data.batching=packed", "batching=packed"),
        ("datasets.tiny.repeat=2", "quotas=[44, 9]"),
    ],
)
def test_another_order_of_samples_is_refused_on_resume(project: Path, change: str, named: str, capsys: Any) -> None:
    job = change.replace("=", "_")
    assert train(project, job, "run.stop_at_step=2") == 75
    assert train(project, job, change, resume="auto") == 2
    error = capsys.readouterr().err
    assert "the order of samples could not go on with other settings of the data" in error
    assert named in error


def test_packed_rows_must_hold_any_sample(project: Path, capsys: Any) -> None:
    assert train(project, "short", "data.batching=packed", "data.pack_length=100") == 2
    assert "data.pack_length (100) is less than model.max_txt_len (256)" in capsys.readouterr().err


def test_a_budget_of_views_is_for_packed_rows(project: Path, capsys: Any) -> None:
    assert train(project, "views", "data.pack_views=4") == 2
    assert "pack_views is for batching: packed, and batching is padded" in capsys.readouterr().err


def test_lengths_that_change_every_epoch_cannot_be_planned(project: Path, capsys: Any) -> None:
    processor = "datasets.words.text_processor={name: chat, turns: independent, shuffle_turns: true}"
    assert train(project, "drawn", "data.batching=packed", processor) == 2
    error = capsys.readouterr().err
    assert "datasets.words.text_processor" in error
    assert "anew every epoch" in error


class TestUnusableSamples:
    @pytest.fixture
    def broken(self, tmp_path: Path) -> Path:
        """The tiny project with two pictures gone bad."""
        cfg = make_project(tmp_path / "p", max_epoch=2, max_steps=None, num_workers=2, save_every=2)
        (tmp_path / "p/images/0_0.png").write_bytes(b"nothing")
        (tmp_path / "p/images/6_0.png").unlink()
        return cfg

    @pytest.mark.parametrize("mode", MODES)
    def test_they_are_left_out_written_down_once_and_everything_else_is_seen(self, broken: Path, mode: str) -> None:
        assert train(broken, "a", "data.max_bad_fraction=0.1", f"data.batching={mode}") == 0
        seen = Counter(i for line in lines(broken, "a") for i in line["data/sample_ids"])
        good = {f"tiny/train/{k}:s{k}" for k in range(NUM_SAMPLES) if k not in (0, 6)}
        assert seen == dict.fromkeys(good, 2)
        assert lines(broken, "a")[-1]["epoch"] == 2.0
        assert sum(line["data/unusable_samples"] for line in lines(broken, "a")) == 4
        records = [json.loads(x) for x in (broken.parent / "output/a/quarantine.jsonl").read_text().splitlines()]
        assert {record["id"] for record in records} == {"tiny/train/0:s0", "tiny/train/6:s6"}
        assert len(records) == 2
        sources = {Path(record["source"]).name: record["reason"] for record in records}
        assert "can't be read" in sources["0_0.png"]
        assert "no such image file" in sources["6_0.png"]

    def test_more_than_allowed_end_the_run_with_the_list(self, broken: Path, capsys: Any) -> None:
        assert train(broken, "b", "data.max_bad_fraction=0.05") == 2
        error = capsys.readouterr().err
        assert "2 of 22 samples can't be used, which is more than data.max_bad_fraction (0.05) allows" in error
        assert "0_0.png" in error
        assert "6_0.png" in error
        assert "Traceback" not in error

    def test_wrong_items_of_the_annotations_are_left_out_like_broken_pictures(self, tmp_path: Path) -> None:
        cfg = make_project(tmp_path / "p", max_steps=6, observers=["jsonl", "console"])
        items = json.loads((tmp_path / "p/train.json").read_text())
        items[5]["conversations"][0]["from"] = "nobody"
        (tmp_path / "p/train.json").write_text(json.dumps(items))
        assert train(cfg, "few") == 2
        assert train(cfg, "few", "data.max_bad_fraction=0.1") == 0
        (line,) = (cfg.parent / "output/few/quarantine.jsonl").read_text().splitlines()
        record = json.loads(line)
        assert record["id"] == "tiny[5]"
        assert "train.json: item 5" in record["source"]

    def test_a_resumed_run_knows_those_it_had_found(self, broken: Path) -> None:
        allowed = "data.max_bad_fraction=0.1"
        assert train(broken, "whole", allowed) == 0
        assert train(broken, "resumed", allowed, "run.stop_at_step=4") == 75
        assert train(broken, "resumed", allowed, resume="auto") == 0
        output = broken.parent / "output"
        assert lasting(broken, "resumed") == lasting(broken, "whole")
        assert (output / "resumed/quarantine.jsonl").read_text() == (output / "whole/quarantine.jsonl").read_text()

    def test_evaluation_says_what_it_left_out(self, broken: Path, capsys: Any) -> None:
        options = ["data.max_bad_fraction=0.25", "run.test_splits=val", "run.stop_at_step=1000"]
        assert train(broken, "c", *options) == 0
        (path,) = (broken.parent / "output/c/eval").glob("val_*.json")
        result = json.loads(path.read_text())
        assert [sample["id"] for sample in result["unusable"]] == ["tiny/val/0:s0"]
        assert result["num_samples"] == 5
