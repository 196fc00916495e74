"""The numbers of `lavis-ds data stats` are those of the batches that training makes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lavis_ds.batch import IGNORE_INDEX
from lavis_ds.data.loader import BatchLoader
from lavis_ds.data.order import SampleKey
from lavis_ds.data.plan import StepPlan
from lavis_ds.runners import step_plan
from lavis_ds.runners.data_tools.dataset_stats import histogram
from lavis_ds.runners.data_tools.encoded import Encoded
from tests.unit.runners.data_tools.conftest import Command


def numbers(command: Command, cfg: Path, *arguments: object) -> dict[str, Any]:
    tree: dict[str, Any] = json.loads(command("stats", "--cfg", cfg, "--json", *arguments))
    return tree


def real_padding(made: Encoded, num_ranks: int) -> tuple[float, int]:
    """Share of padding in the batches of one epoch, and number of steps, as the loader makes them."""
    plan, counts = step_plan.row_plan(made.config, made.data, 4)
    work = made.model.work()

    def cost(row: Any) -> float:
        assert counts is not None
        return sum(work.of(*counts.at(key)) for key in row)

    tokens = places = 0
    for rank in range(num_ranks):
        packed = made.config.data.batching == "packed"
        steps = StepPlan(plan, 4 // (2 * num_ranks), num_ranks, rank, cost if packed else None)
        for batch in BatchLoader(made.data, steps, made.collator, range(steps.num_steps), 0, False, 10):
            tokens += batch.num_tokens
            places += batch.input_ids.numel()
    return 1 - tokens / places, plan.num_steps


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize(
    ("batching", "pack_length"), [("padded", None), ("grouped", None), ("packed", 256), ("packed", 300)]
)
def test_padding_is_that_of_the_loader(
    project: Path, batching: str, pack_length: int | None, num_ranks: int, command: Command, encoded: Any
) -> None:
    size = f"run.batch_size_train={2 // num_ranks}"
    options = ["--num-gpus", num_ranks, "--pack-lengths", 256, 300, "--options", size]
    layouts = {(x["batching"], x["pack_length"]): x for x in numbers(command, project, *options)["layouts"]}
    assert list(layouts) == [("padded", None), ("grouped", None), ("packed", 256), ("packed", 300)]
    found = layouts[batching, pack_length]
    made = encoded(project, f"data.batching={batching}", *([f"data.pack_length={pack_length}"] if pack_length else []))
    padding, steps = real_padding(made, num_ranks)
    assert found["padding"] == pytest.approx(padding, abs=1e-12)
    assert found["num_steps"] == found["num_steps_seen"] == steps


def test_views_have_a_budget_of_their_own(project: Path, command: Command, encoded: Any) -> None:
    """Two pictures a row, of samples with none, one and two."""
    options = ["data.batching=packed", "data.pack_length=300", "data.pack_views=2", "run.batch_size_train=2"]
    made, free = encoded(project, *options), encoded(project, *options, "data.pack_views=null")
    rows, most = [], []
    for found in (made, free):
        plan, _ = step_plan.row_plan(found.config, found.data, 4)
        steps = StepPlan(plan, 1, 1, 0)
        batches = list(BatchLoader(found.data, steps, found.collator, range(steps.num_steps), 0, False, 10))
        rows.append(sum(batch.num_samples > 0 for batch in batches))
        most.append(max(len(batch.images) for batch in batches if batch.images is not None))
    assert most[0] == 2 < most[1]
    assert rows[0] > rows[1]
    layouts = numbers(command, project, "--pack-lengths", 300, "--options", *options)["layouts"]
    packed = next(layout for layout in layouts if layout["batching"] == "packed")
    assert packed["padding"] == pytest.approx(real_padding(made, 1)[0], abs=1e-12)


def test_tokens_pictures_and_targets(project: Path, command: Command, encoded: Any) -> None:
    data = encoded(project).data
    tiny, words = numbers(command, project)["datasets"]
    for number, found in enumerate((tiny, words)):
        samples = [data[SampleKey(number, i, 0, 0)] for i in range(data.sizes[number])]
        lengths = sorted(len(sample.input_ids) for sample in samples)
        targets = sum(int((sample.labels != IGNORE_INDEX).sum()) for sample in samples)
        assert (found["num_samples"], found["num_unusable"]) == (len(samples), 0)
        assert found["tokens"] == sum(lengths)
        assert found["percentiles"]["0"] == lengths[0]
        assert found["percentiles"]["50"] == lengths[(len(lengths) - 1) // 2]
        assert found["percentiles"]["100"] == lengths[-1]
        assert found["mean_views"] == pytest.approx(np.mean([len(sample.images) for sample in samples]))
        assert found["probe"]["target_fraction"] == pytest.approx(targets / sum(lengths))
        assert sum(found["histogram"]["counts"]) == len(samples)
    assert tiny["max_views"] == 2
    assert tiny["without_views_fraction"] == pytest.approx(6 / 22)


def test_shares_of_the_mixture(project: Path, command: Command) -> None:
    weights = ["datasets.tiny.weight=1", "datasets.words.weight=3"]
    tiny, words = numbers(command, project, "--options", *weights)["datasets"]
    assert (tiny["samples_an_epoch"], words["samples_an_epoch"]) == (8, 23)
    assert words["sample_share"] == pytest.approx(23 / 31)
    expected = 23 * words["mean_tokens"] / (23 * words["mean_tokens"] + 8 * tiny["mean_tokens"])
    assert words["token_share"] == pytest.approx(expected)
    assert tiny["token_share"] + words["token_share"] == pytest.approx(1)


def test_what_cannot_be_used_is_counted_and_explained(talk: Path, command: Command) -> None:
    (found,) = numbers(command, talk, "--options", "run.batch_size_train=2", "run.global_batch_size=2")["datasets"]
    assert (found["num_samples"], found["num_unusable"]) == (4, 2)
    assert "no such image file" in found["reasons"][0]  # tiles are counted by the picture's size
    assert "is too long" in found["reasons"][1]
    printed = command("stats", "--cfg", talk)
    assert "2 of 4 samples can't be used:" in printed
    assert "absent.png" in printed


def test_turns_left_out_are_told(project: Path, command: Command) -> None:
    printed = command("stats", "--cfg", project, "--options", "model.max_txt_len=80")
    assert "lose turns that are too much for model.max_txt_len" in printed


def test_tables(project: Path, command: Command) -> None:
    printed = command("stats", "--cfg", project, "--split", "val", "--pack-lengths", 512)
    assert "5 samples: 100.0 % of the samples" in printed
    assert "█" in printed
    rows = [line.split() for line in printed.splitlines()[-5:-2]]
    assert [row[0] for row in rows] == ["padded", "grouped", "packed,"]


def test_lengths_that_are_drawn_anew_are_not_packed(project: Path, command: Command) -> None:
    processor = "datasets.words.text_processor={name: chat, turns: independent, shuffle_turns: true}"
    found = numbers(command, project, "--options", processor)
    assert not found["lengths_are_fixed"]
    assert [layout["batching"] for layout in found["layouts"]] == ["padded"]
    assert "draws lengths anew" in command("stats", "--cfg", project, "--options", processor)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--pack-lengths", "64"], "rows must hold any sample"),
        (["--num-gpus", "3"], "run.global_batch_size"),
        (["--pack-lengths", "many"], "invalid int value"),
    ],
)
def test_wrong_arguments(project: Path, arguments: list[str], message: str, command: Command) -> None:
    assert message in command("stats", "--cfg", project, *arguments, code=2)


@pytest.mark.parametrize("values", [[7], [30, 118], [5, 5_000_000], list(range(1, 2000))])
def test_histogram_has_few_round_bins_that_hold_everything(values: list[int]) -> None:
    found = histogram(np.array(values, np.int32))
    expected, _ = np.histogram(values, found.edges)
    assert found.counts == expected.tolist()
    assert sum(found.counts) == len(values)
    assert 1 <= len(found.counts) <= 16
    width = found.edges[1] - found.edges[0]
    assert str(width).rstrip("0") in {"1", "2", "5"}
