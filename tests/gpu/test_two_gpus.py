"""On two GPUs, through NCCL: the losses of one, whatever is sharded and whatever samples a rank has; and resume.

    pytest -m gpu2 tests/gpu
    LAVIS_DS_TEST_DEVICE=cpu pytest -m gpu2 tests/gpu/test_two_gpus.py      # tries the tests over gloo

Runs share a start of their ranks, which takes longer than they do.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.multi import test_adapters, test_moe
from tests.multi.launch import DEVICE, RanksFailed, run_ranks
from tests.multi.runs import Job, train, train_all
from tests.multi.test_same_loss import OFFLOADED, ZERO
from tests.multi.test_stall import STALL_S, assert_named, leave_out_on_rank_1, seconds_of_stall, stall_on_rank_1
from tests.tiny_project import make_project, metrics
from tests.unit.runners.test_qwen_vl_runs import add_videos, make_qwen_vl

pytestmark = [pytest.mark.gpu2, pytest.mark.timeout(600)]

ON_CPU = os.environ.get(DEVICE) == "cpu"
SECONDS = 400
ENGINES = {
    "torch": "run.engine=torch",
    **{f"zero{stage}": ZERO[stage] for stage in range(4)},
    **{f"{name} offloaded": option for name, option in OFFLOADED.items()},
}
NO_SAVE = ("run.save_last=false", "run.save_every=null")
Lines = list[dict[str, Any]]


def start(jobs: Sequence[Job], ranks: int) -> dict[str, Lines]:
    """Runs jobs one after the other, and returns their metrics."""
    codes = run_ranks(train_all, ranks, list(jobs), timeout_s=SECONDS, join_group=False, cpu_only=False)
    expected = [75 if any("stop_at_step" in option for option in job.options) else 0 for job in jobs]
    assert codes == [expected] * ranks
    return {job.job_id: metrics(run_folder(job.cfg, job.job_id)) for job in jobs}


def run_folder(cfg: str, job_id: str) -> Path:
    return Path(cfg).parent / "output" / job_id


def losses(lines: Lines) -> list[float]:
    return [line["train/loss"] for line in lines]


def assert_close(lines: Lines, reference: Lines, tolerance: float) -> None:
    assert [line["data/sample_ids"] for line in lines] == [line["data/sample_ids"] for line in reference]
    differences = [abs(a - b) for a, b in zip(losses(lines), losses(reference), strict=True)]
    print(f"largest difference of losses: {max(differences):.1e}")
    assert max(differences) < tolerance


# ---- sums ------------------------------------------------------------------------------------------------------------


def sums_before_later_work() -> tuple[list[float], float, bool]:
    """Sums over ranks, one of them on the device, and whether they came before what was queued after them."""
    import torch

    from lavis_ds import distributed

    distributed.initialize(SECONDS)
    device = distributed.device()
    matrix, value = torch.randn(4096, 4096, device=device), torch.tensor(0.5, device=device)
    distributed.RankSums([1.0]).tolist()  # NCCL makes its connections
    sums = distributed.RankSums([distributed.global_rank() + 1.0, value, 2**40 + 1])
    for _ in range(0 if ON_CPU else 200):
        matrix = (matrix @ matrix).clamp(-1, 1)
    later = torch.cuda.Event() if torch.cuda.is_available() else None
    if later is not None:
        later.record()
    return sums.tolist(), float(sums.on_device(1)), later is None or not later.query()


def test_the_host_reads_sums_before_later_work_is_done() -> None:
    found = run_ranks(sums_before_later_work, 2, timeout_s=120, join_group=False, cpu_only=False)
    assert found == [([3.0, 1.0, 2**41 + 2], 1.0, True)] * 2


# ---- every stage, float32 and bf16 -----------------------------------------------------------------------------------


def job_of(engine: str, precision: str) -> str:
    return f"{precision}_{engine}".replace(" ", "_")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_project(tmp_path_factory.mktemp("project"), save_every=4, num_workers=0))


@pytest.fixture(scope="module")
def reference(project: str) -> Lines:
    """Plain PyTorch in float32 on one GPU, whole batch at once."""
    options = (ENGINES["torch"], "run.batch_size_train=8")
    return start([Job(project, "reference", options)], 1)["reference"]


@pytest.fixture(scope="module")
def lines(project: str) -> dict[str, Lines]:
    jobs = [
        Job(project, job_of(engine, precision), (option, f"run.precision={precision}", *NO_SAVE))
        for precision in ("fp32", "bf16")
        for engine, option in ENGINES.items()
    ]
    return start(jobs, 2)


@pytest.mark.parametrize("engine", ENGINES)
def test_float32_losses_equal_those_of_one_gpu(engine: str, lines: dict[str, Lines], reference: Lines) -> None:
    assert_close(lines[job_of(engine, "fp32")], reference, 1e-4)


@pytest.mark.parametrize("engine", ENGINES)
def test_bf16_losses_follow_float32(engine: str, lines: dict[str, Lines], reference: Lines) -> None:
    assert_close(lines[job_of(engine, "bf16")], reference, 0.02)


# ---- ranks that differ in what they have -----------------------------------------------------------------------------

KINDS = ("one image", "text", "one image", "two images")
"""Of a sample of the tiny project, by its number."""


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Qwen3-VL with one sample a rank and step: none, one and two pictures of many sizes, and videos."""
    folder = tmp_path_factory.mktemp("mixed")
    run = {"max_steps": 20, "global_batch_size": 2, "batch_size_train": 1, "save_every": None}
    cfg = add_videos(make_qwen_vl(folder, "qwen3_vl", **run))
    tree = yaml.safe_load(cfg.read_text())
    tree["datasets"]["clips"]["repeat"] = 2
    cfg.write_text(yaml.safe_dump(tree))
    return str(cfg)


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> str:
    """128 experts of which a token takes one, and few tokens."""
    experts = {**test_moe.EXPERTS, "num_experts": 128, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
    options = {"balance_loss": 0.1, "balance_scope": "global", "load_every": 1}
    return str(test_moe.write(tmp_path_factory.mktemp("sparse"), experts, options))


def alone_and_sharded(cfgs: dict[str, tuple[str, int]]) -> tuple[dict[str, Lines], dict[str, Lines]]:
    """Metrics of plain PyTorch on one GPU, and of ZeRO-3 on two, of projects with so many rows in a step."""
    alone, sharded = [], []
    for name, (cfg, rows) in cfgs.items():
        size = f"run.global_batch_size={rows}"
        alone.append(Job(cfg, name + "_alone", (ENGINES["torch"], size, f"run.batch_size_train={rows}")))
        sharded.append(Job(cfg, name, (ENGINES["zero3"], size, f"run.batch_size_train={rows // 2}")))
    return start(alone, 1), start(sharded, 2)


@pytest.fixture(scope="module")
def unlike(mixed: str, sparse: str) -> tuple[dict[str, Lines], dict[str, Lines]]:
    return alone_and_sharded({"mixed": (mixed, 2), "sparse": (sparse, 2)})


def kinds(line: dict[str, Any]) -> tuple[str, ...]:
    """Of the two ranks' samples."""
    return tuple(
        "video" if name.startswith("clips") else KINDS[int(name.rpartition("s")[2]) % 4]
        for name in line["data/sample_ids"]
    )


def test_ranks_with_text_images_and_videos_train_together(unlike: tuple[dict[str, Lines], dict[str, Lines]]) -> None:
    alone, sharded = unlike
    assert_close(sharded["mixed"], alone["mixed_alone"], 1e-4)
    met = {frozenset(kinds(line)) for line in sharded["mixed"]}
    assert {frozenset(pair) for pair in (("text", "one image"), ("video", "one image"), ("video", "text"))} <= met
    assert any("two images" in pair and len(pair) == 2 for pair in met)


def test_experts_that_a_rank_does_not_use_hang_nothing(unlike: tuple[dict[str, Lines], dict[str, Lines]]) -> None:
    alone, sharded = unlike
    assert_close(sharded["sparse"], alone["sparse_alone"], 1e-4)
    for line in sharded["sparse"]:
        loads = line["moe/layer_00/tokens_by_expert"]
        assert sum(load == 0 for load in loads) > len(loads) / 8


def test_adapters_and_a_projector_learn_as_on_one_gpu(tmp_path: Path) -> None:
    """LoRA in the language model, DoRA in the vision tower, and a projector that trains as a whole."""
    alone, sharded = alone_and_sharded({"adapted": (str(test_adapters.project(tmp_path)), 8)})
    assert_close(sharded["adapted"], alone["adapted_alone"], 1e-4)


def test_export_of_what_was_sharded(
    mixed: str, unlike: tuple[dict[str, Lines], dict[str, Lines]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command compares what it has written with the model itself."""
    from lavis_ds.cli import main

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert main(["export", "--run", str(run_folder(mixed, "mixed")), "--to", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "config.json").is_file()


# ---- killed, and on another number of ranks --------------------------------------------------------------------------


def killed(project: str, job_id: str, options: list[str], kill_at: int, rank: int | None) -> str:
    """What the ranks say of a run, gone on with, of which `rank` or all die after a step."""
    arguments = (project, [*options, f"run.stall_timeout_s={STALL_S}"], job_id, "auto", kill_at, rank)
    with pytest.raises(RanksFailed) as caught:
        run_ranks(train, 2, *arguments, timeout_s=120, join_group=False, cpu_only=False)
    return str(caught.value)


def test_killed_runs_and_other_numbers_of_ranks_go_on(project: str, reference: Lines) -> None:
    """Both ranks die at step 5, rank 1 at step 7; another run goes from 2 ranks to 1 and back, and to other stages."""
    options = [ENGINES["zero3"], "run.save_every=2"]
    assert "died with exit code -9" in killed(project, "killed", options, 5, None)
    assert len(metrics(run_folder(project, "killed"))) == 5
    assert "rank 1 died with exit code -9" in killed(project, "killed", options, 7, 1)
    assert len(metrics(run_folder(project, "killed"))) == 7

    start([Job(project, "moved", (ENGINES["zero3"], "run.stop_at_step=3"))], 2)
    start([Job(project, "moved", (ENGINES["zero1"], "run.stop_at_step=7"), "auto")], 1)
    jobs = [Job(project, "moved", (ENGINES["zero2"],), "auto"), Job(project, "killed", tuple(options), "auto")]
    for found in start(jobs, 2).values():
        assert_close(found, reference, 1e-4)


# ---- hangs -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("watched")
    return str(make_project(folder, max_steps=4, save_every=None, batch_size_train=4, stall_timeout_s=STALL_S))


@pytest.mark.parametrize("engine", ["zero2", "torch"])
def test_a_collective_that_a_rank_leaves_out_ends_the_run(engine: str, watched: str) -> None:
    """Of NCCL's, where the CPU does not wait: within the limit, with the rank, the operation and the samples."""
    options = [ENGINES[engine]]
    with pytest.raises(RanksFailed) as caught:
        run_ranks(leave_out_on_rank_1, 2, watched, options, engine, timeout_s=90, join_group=False, cpu_only=False)
    said = str(caught.value)
    print(said)
    assert seconds_of_stall(Path(watched), engine) < STALL_S + 10
    assert_named(said, "barrier" if ON_CPU else "all_?reduce of 67108864 Float")


def test_a_rank_that_sleeps_is_named_with_the_operation_that_waits_for_it(watched: str) -> None:
    with pytest.raises(RanksFailed) as caught:
        run_ranks(stall_on_rank_1, 2, watched, [], "step", timeout_s=90, join_group=False, cpu_only=False)
    said = str(caught.value)
    print(said)
    assert said.count("error: step 3, rank 1 on ") == 1
    assert f"nothing moved for {STALL_S} s (micro-batch 1 of 1); the other ranks wait for it in call " in said
    assert "in sleep_in_step" in said
