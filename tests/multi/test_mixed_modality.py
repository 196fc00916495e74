"""Any samples on any rank, in several micro-batches, recomputed, frozen or adapted: the gradients of one process.

Under ZeRO-3 a rank that calls other modules than the rest would hang; every run has a time limit.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lavis_ds import registry
from lavis_ds.batch import Batch
from lavis_ds.config.decode import decode
from lavis_ds.config.schema import RunConfig
from lavis_ds.data.tokenizer import train_tokenizer
from lavis_ds.engines.ds_config import BatchPlan
from lavis_ds.models.base import Model
from lavis_ds.optim.groups import param_groups
from tests.multi.launch import run_ranks
from tests.parity import gradient_error, gradients
from tests.unit.models.conftest import QWEN3, VIT, make_batch
from tests.unit.models.test_qwen_vl import SHAPES
from tests.unit.models.test_qwen_vl_video import House

Assignment = list[list[list[str]]]
"""Of samples to ranks and their micro-batches."""

NATIVE: dict[str, Assignment] = {
    "a rank without pictures": [[["text"], ["text"], ["text"]], [["video"], ["picture"], ["all"]]],
    "in turn": [[["text"], ["all"], ["picture", "text"]], [["odd"], ["text"], ["text"]]],
    "no pictures at all": [[["text"], ["text"], ["text", "text"]]] * 2,
    "each its own": [[["video"], ["odd"], ["all"]], [["all", "picture"], ["picture"], ["video"]]],
}
"""Of qwen3_vl: text, a picture, videos, and a sample of several pictures and videos."""

PLAIN: dict[str, Assignment] = {
    "a rank without pictures": [[["0"], ["00"], ["0"]], [["1"], ["2"], ["11"]]],
    "in turn": [[["0"], ["2"], ["10"]], [["1"], ["0"], ["0"]]],
    "no pictures at all": [[["0"], ["00"], ["0"]]] * 2,
}
"""Of a vlm: rows of a micro-batch, each with so many pictures."""

LORA = {"r": 2, "init_lora_weights": False}
CASES: dict[str, dict[str, Any]] = {
    "all train": {},
    "frozen tower": {"freeze": ["vision"]},
    "frozen language": {"freeze": ["language"]},
    "adapters beside a frozen tower": {"freeze": ["vision"], "language": {"lora": LORA}},
    "adapters in both": {"language": {"lora": LORA}, "vision": {"lora": LORA}},
}
RUN = {
    "precision": "fp32",
    "max_steps": 1,
    "batch_size_train": 2,
    "accum_grad_iters": 3,
    "grad_clip": None,
    "lr_sched": "constant",
}


def make(arch: str, case: str, tokenizer: str) -> Model:
    """The model, with activations recomputed in both parts; the same on every rank."""
    options, changes = {"gradient_checkpointing": True}, CASES[case]
    if arch == "vlm":
        tree: dict[str, Any] = {
            "vision": VIT, "projector": {"name": "mlp", "merge_size": 2},
            "language": {"name": "hf_causal_lm", "config": QWEN3, "tokenizer": tokenizer},
        }  # fmt: skip
    else:
        tree = {"config": SHAPES[arch], "vision": {}, "language": {"tokenizer": tokenizer}}
    for part in ("vision", "language"):
        tree[part] = {**tree[part], **options, **changes.get(part, {})}
    torch.manual_seed(3)
    config = decode(registry.models.config_class(arch), {"arch": arch, "freeze": changes.get("freeze", []), **tree})
    model: Model = registry.models.get(arch).from_config(config)
    return model


def assignments(arch: str) -> dict[str, Assignment]:
    return PLAIN if arch == "vlm" else NATIVE


class Data:
    """Micro-batches by what is in them."""

    def __init__(self, arch: str, model: Model, folder: Path) -> None:
        folder.mkdir()
        self._house = None if arch == "vlm" else House(arch, folder)
        self._tokens = int(model.tokens_per_image)

    def __call__(self, names: list[str]) -> Batch:
        if self._house is not None:
            return self._house.batch([self._house.samples([name]) for name in names])
        return pictured(names, self._tokens)


def pictured(names: list[str], tokens: int) -> Batch:
    """Rows with as many pictures as their names say."""
    batch = make_batch(tokens, tuple(60 + 2 * row for row in range(len(names))), images=0, seed=len(names))
    width, generator = batch.shape[1], torch.Generator().manual_seed(5)
    starts = [row * width + 1 + picture * tokens for row, name in enumerate(names) for picture in range(int(name))]
    if not starts:
        return batch
    pixels = torch.randint(0, 256, (len(starts), 3, 32, 32), generator=generator, dtype=torch.uint8)
    return replace(batch, images=pixels, image_index=torch.cat([torch.arange(s, s + tokens) for s in starts]))


def sharded(arch: str, case: str, folder: str, stage: int) -> list[dict[str, torch.Tensor]]:
    """Gradients of the steps of all assignments."""
    from deepspeed.utils import safe_get_full_grad

    from lavis_ds.engines.deepspeed import DeepSpeedEngine

    torch.set_num_threads(1)
    rank = torch.distributed.get_rank()
    model = make(arch, case, f"{folder}/tokenizer")
    data = Data(arch, model, Path(folder) / str(rank))
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0} if stage == 3 else {"stage": stage}
    run = RunConfig.model_validate({**RUN, "deepspeed_config": {"zero_optimization": zero}})
    engine = DeepSpeedEngine(model, param_groups(model, run), run, BatchPlan(12, 2, 3))
    found = []
    for assignment in assignments(arch).values():
        group = [data(names) for names in assignment[rank]]
        for index, batch in enumerate(group):
            with engine.micro_batch(is_last=index == len(group) - 1):
                engine.backward(engine(batch)[0] * (2 / targets(assignment, data)))
        named = [(name, p, safe_get_full_grad(p)) for name, p in engine.module.named_parameters() if p.requires_grad]
        found.append({m.name: m.of(full).clone() for name, p, full in named for m in engine.bundles.members(name, p)})
        engine.step(0.0)
    return found


def targets(assignment: Assignment, data: Data) -> float:
    """Of the whole step."""
    return sum(data(names).target_weight for rank in assignment for names in rank)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a tokenizer that has Qwen-VL's tokens."""
    path = tmp_path_factory.mktemp("mixed")
    tokenizer: Any = train_tokenizer(["what happens in the picture", "0123456789 seconds"], vocab_size=320)
    marks = ["vision_start", "vision_end", "image_pad", "video_pad"]
    tokenizer.add_special_tokens({"extra_special_tokens": [f"<|{mark}|>" for mark in marks]})
    tokenizer.save_pretrained(path / "tokenizer")
    return path


OFTEN = ("frozen tower", "adapters in both")
RUNS = [
    *(("vlm", case, 3) for case in CASES),
    *(("qwen3_vl", case, 3) for case in OFTEN),
    *(pytest.param("qwen3_vl", case, 3, marks=pytest.mark.slow) for case in CASES if case not in OFTEN),
    *(pytest.param("qwen3_vl", case, 2, marks=pytest.mark.slow) for case in CASES),
]


@pytest.mark.parametrize(("arch", "case", "stage"), RUNS)
def test_gradients_are_those_of_one_process(arch: str, case: str, stage: int, folder: Path) -> None:
    """Largest error seen: 1.1e-7."""
    own = folder / f"{arch}_{case}_{stage}".replace(" ", "_")
    own.mkdir()
    (own / "tokenizer").symlink_to(folder / "tokenizer")
    ranks = run_ranks(sharded, 2, arch, case, str(own), stage, timeout_s=200)
    model = make(arch, case, str(own / "tokenizer"))
    data, errors = Data(arch, model, own / "alone"), {}
    for number, (name, assignment) in enumerate(assignments(arch).items()):
        model.zero_grad()
        for names in (names for rank in assignment for names in rank):
            (model(data(names))[0] / targets(assignment, data)).backward()
        expected = gradients(model)
        errors[name] = max(gradient_error(steps[number], expected) for steps in ranks)
    print(f"measured: {arch}, {case}, stage {stage}: {max(errors.values()):.1e}")
    assert max(errors.values()) < 1e-5, errors
