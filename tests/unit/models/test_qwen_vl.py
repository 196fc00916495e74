"""Qwen-VL here has the losses, gradients and answers of transformers' own classes with the same weights.

The references are loaded from the same folder, get pictures from transformers' image processor, and compute their
positions themselves.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from omegaconf import OmegaConf
from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer
from transformers.image_utils import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor

from lavis_ds import registry
from lavis_ds.batch import IGNORE_INDEX, PADDING_SEGMENT, SEGMENT_STRIDE, Batch, DatasetCounts
from lavis_ds.config.decode import decode
from lavis_ds.errors import CheckpointError, ConfigError, DataError
from lavis_ds.models.language.qwen_vl_decoder import DeepStack, _add_features
from lavis_ds.models.qwen_vl import QwenVL
from lavis_ds.models.skeleton import skeleton
from tests.parity import Parity

TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,  # at 0.02 neither pictures nor positions would matter much
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 1, 1]},
}
VISION: dict[str, Any] = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 4,
    "out_hidden_size": 32,
    "initializer_range": 0.1,
}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {
        "text_config": TEXT,
        "vision_config": {**VISION, "patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1]},
    },
    "qwen3_vl": {
        "text_config": {**TEXT, "head_dim": 8},
        "vision_config": {
            **VISION, "patch_size": 16, "num_position_embeddings": 25, "deepstack_visual_indexes": [0, 2],
        },
    },
}  # fmt: skip
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": [1]}
SHAPES["qwen3_vl_moe"] = {**SHAPES["qwen3_vl"], "text_config": {**TEXT, "head_dim": 8, **EXPERTS}}
STATISTICS = {
    "qwen2_5_vl": {"image_mean": OPENAI_CLIP_MEAN, "image_std": OPENAI_CLIP_STD},
    "qwen3_vl": {"image_mean": [0.5] * 3, "image_std": [0.5] * 3},
    "qwen3_vl_moe": {"image_mean": [0.5] * 3, "image_std": [0.5] * 3},
}
"""As in preprocessor_config.json of the released models."""

FAMILIES = list(SHAPES)
FILLER, TARGETS = 7, 4
SIZES = {"wide": (150, 60), "tall": (40, 130), "small": (30, 30)}
"""Pictures: width and height in pixels; they become 1 to 12 tokens."""

Row = list[int | str]
"""A sample: numbers of text tokens, and pictures."""


class Pair:
    """A model here and the reference."""

    def __init__(self, arch: str, folder: str, **options: Any) -> None:
        self.arch, self.folder = arch, folder
        config = decode(registry.models.config_class(arch), {"arch": arch, "path": folder, **options})
        self.ours: QwenVL = registry.models.get(arch).from_config(config)
        self.theirs: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).train()
        self.processor = Qwen2VLImageProcessor(
            patch_size=int(SHAPES[arch]["vision_config"]["patch_size"]),
            min_pixels=1,
            **STATISTICS[arch],
        )

    def name(self, theirs: str) -> str:
        """Our name of their parameter."""
        return (
            theirs.replace("model.visual.", "vision.tower.")
            .replace("model.language_model.", "language.decoder.")
            .replace("lm_head.", "language.lm_head.")
        )

    def encode(self, row: Row, seed: int) -> dict[str, Any]:
        """Ids, kinds, patches as bytes and as the reference takes them, grids and positions of one sample."""
        rng = np.random.default_rng(seed)
        names = [item for item in row if isinstance(item, str)]
        pictures = [PIL.Image.fromarray(rng.integers(0, 256, (*reversed(SIZES[n]), 3), dtype=np.uint8)) for n in names]
        floats, raw, grids = torch.empty(0), torch.empty(0, dtype=torch.uint8), torch.empty(0, 3, dtype=torch.long)
        if pictures:
            made = self.processor(pictures, return_tensors="pt")
            floats, grids = made["pixel_values"], made["image_grid_thw"]
            bare = self.processor(pictures, return_tensors="pt", do_rescale=False, do_normalize=False)
            raw = bare["pixel_values"].to(torch.uint8)
            assert torch.equal(raw.to(bare["pixel_values"].dtype), bare["pixel_values"])
        counts = iter((grids.prod(-1) // 4).tolist())
        kinds = torch.tensor([k for i in row for k in ([0] * i if isinstance(i, int) else [1] * next(counts))])
        ids = torch.from_numpy(rng.integers(10, 250, len(kinds)))
        ids[:-1][(kinds[:-1] == 0) & (kinds[1:] == 1)] = self.theirs.config.vision_start_token_id
        ids[kinds == 1] = self.theirs.config.image_token_id
        positions, _ = self.theirs.model.get_rope_index(ids[None], kinds[None], image_grid_thw=grids)
        return {"ids": ids, "kinds": kinds, "floats": floats, "raw": raw, "grids": grids, "positions": positions[:, 0]}

    def batch(self, rows: list[list[dict[str, Any]]], *, left: bool = False, targets: bool = True) -> Batch:
        """What the data side makes of rows of encoded samples: one a row padded, several packed."""
        length = max(sum(len(s["ids"]) for s in row) for row in rows)
        ids, labels = torch.zeros(len(rows), length, dtype=torch.long), torch.full((len(rows), length), IGNORE_INDEX)
        positions, segments = torch.zeros(3, len(rows), length, dtype=torch.long), torch.full_like(ids, PADDING_SEGMENT)
        index: list[torch.Tensor] = []
        for number, row in enumerate(rows):
            start = length - sum(len(s["ids"]) for s in row) if left else 0
            for order, sample in enumerate(row):
                place = slice(start, start + len(sample["ids"]))
                ids[number, place] = sample["ids"].masked_fill(sample["kinds"] == 1, FILLER)
                labels[number, place.stop - TARGETS : place.stop] = sample["ids"][-TARGETS:]
                positions[:, number, place] = sample["positions"]
                segments[number, place] = order * SEGMENT_STRIDE
                index.append((sample["kinds"] == 1).nonzero().flatten() + number * length + start)
                start = place.stop
        samples = [sample for row in rows for sample in row]
        raw, grids = torch.cat([s["raw"] for s in samples]), torch.cat([s["grids"] for s in samples])
        if not len(grids):
            grids = torch.tensor([[1, 2, 2]])
            raw = torch.zeros(4, *self.ours.image_shape, dtype=torch.uint8)
        if not targets:
            labels.fill_(IGNORE_INDEX)
        return Batch(
            input_ids=ids,
            labels=labels,
            position_ids=positions,
            attention_mask=segments != PADDING_SEGMENT,
            segment_ids=segments if any(len(row) > 1 for row in rows) else None,
            images=raw,
            image_grids=grids,
            image_index=torch.cat(index),
            target_index=(labels.flatten().roll(-1) != IGNORE_INDEX).nonzero().flatten(),
            num_targets=TARGETS * len(samples),
            target_weight=float(TARGETS * len(samples)),
            num_tokens=sum(len(s["ids"]) for s in samples),
            sample_ids=tuple(f"s{n}" for n in range(len(samples))),
            positions=tuple(range(len(samples))),
            by_dataset=(DatasetCounts("d"),),
        )

    @torch.no_grad()
    def target_logits(self, batch: Batch) -> torch.Tensor:
        """Logits that predict a target, in the order of samples."""
        hidden = self.ours.hidden_states(batch).flatten(0, 1)[batch.target_index]
        return self.ours.language.logits(hidden)

    def reference(self, samples: list[dict[str, Any]], *, left: bool = False) -> dict[str, Any]:
        """The same, padded, as transformers' own processor would give it."""
        length = max(len(s["ids"]) for s in samples)

        def padded(key: str) -> torch.Tensor:
            pads = [(length - len(s["ids"]), 0) if left else (0, length - len(s["ids"])) for s in samples]
            tensors = [s[key] if key != "mask" else torch.ones_like(s["ids"]) for s in samples]
            return torch.stack([torch.nn.functional.pad(t, pad) for t, pad in zip(tensors, pads, strict=True)])

        made = {"input_ids": padded("ids"), "attention_mask": padded("mask"), "mm_token_type_ids": padded("kinds")}
        pictures = [s for s in samples if len(s["grids"])]
        if pictures:
            made["pixel_values"] = torch.cat([s["floats"] for s in pictures])
            made["image_grid_thw"] = torch.cat([s["grids"] for s in pictures])
        return made


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tokenizer_dir: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder as on the hub, with random weights."""
    torch.manual_seed(1)
    path = tmp_path_factory.mktemp(request.param)
    return save(request.param, SHAPES[request.param], tokenizer_dir, path)


def save(arch: str, shape: dict[str, Any], tokenizer_dir: str, path: Path) -> str:
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    text = {**shape["text_config"], "vocab_size": len(tokenizer), "eos_token_id": 2, "bos_token_id": None}
    config = AutoConfig.for_model(
        arch, text_config=text, vision_config=shape["vision_config"], image_token_id=3, video_token_id=4,
        vision_start_token_id=5, vision_end_token_id=6,
    )  # fmt: skip
    whole = AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():  # biases and norms are made as zeros and ones, under which mistakes could hide
        for parameter in whole.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    whole.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def loaded(folder: str) -> Callable[..., Pair]:
    arch = AutoConfig.from_pretrained(folder).model_type
    cache: dict[str, Pair] = {}
    return lambda **options: cache.get(repr(options)) or cache.setdefault(repr(options), Pair(arch, folder, **options))


@pytest.fixture
def pair(loaded: Callable[..., Pair]) -> Callable[..., Pair]:
    """Copies of models that are loaded once."""
    return lambda **options: copy.deepcopy(loaded(**options))


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def error(value: torch.Tensor, reference: torch.Tensor) -> float:
    """Relative; against 1e-3 where the reference is smaller than that."""
    return float((value - reference).norm() / reference.norm().clamp(min=1e-3))


ROWS: dict[str, list[Row]] = {
    "one picture": [[3, "wide", 9]],
    "pictures of different grids": [[2, "wide", 3, "tall", 8], ["small", 1, "tall", 12]],
    "text in a batch with pictures": [[14], [3, "tall", 5, "small", 7]],
    "no picture": [[11], [7]],
}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("rows", ROWS.values(), ids=list(ROWS))
def test_loss_and_gradients_are_those_of_transformers(
    parity: Parity, pair: Callable[..., Pair], rows: list[Row], attention: str
) -> None:
    both = pair(language={"attention": attention}, vision={"attention": attention})
    samples = [both.encode(row, seed) for seed, row in enumerate(rows)]
    batch = both.batch([[s] for s in samples])
    output = both.theirs(**both.reference(samples), labels=batch.labels)
    output.loss.backward()
    loss, correct, _ = both.ours(batch)
    (loss / batch.num_targets).backward()
    assert error(loss.detach() / batch.num_targets, output.loss.detach()) < 1e-6  # measured 8e-8
    assert correct == (output.logits[:, :-1].argmax(-1) == batch.labels[:, 1:]).sum()
    ours, theirs = gradients(both.ours), {both.name(n): g for n, g in gradients(both.theirs).items()}
    assert ours.keys() == {name for name, _ in both.ours.named_parameters()}
    if rows is not ROWS["no picture"]:
        assert ours.keys() == theirs.keys()
    for name in ours:
        if name in theirs:
            assert error(ours[name], theirs[name]) < 1e-5, name  # measured 3e-6
        else:  # the blank picture: nothing of it in the loss, but the same collectives as on ranks with pictures
            assert name.startswith("vision.")
            assert not ours[name].any()
    parity(
        f"{both.arch}, padded",
        f"`{type(both.theirs).__name__}`",
        forward=error(both.target_logits(batch), output.logits[:, :-1][batch.labels[:, 1:] != IGNORE_INDEX].detach()),
        loss=error(loss.detach() / batch.num_targets, output.loss.detach()),
        gradient=max(error(ours[name], theirs[name]) for name in theirs),
    )


def test_packed_rows_are_those_of_transformers(parity: Parity, pair: Callable[..., Pair]) -> None:
    """Its samples, which go through transformers as a padded batch."""
    both = pair()
    rows: list[Row] = [[3, "wide", 9], [12], [1, "tall", 2, "small", 6], ["small", 8]]
    samples = [both.encode(row, seed) for seed, row in enumerate(rows)]
    labels, packed = both.batch([[s] for s in samples]).labels, both.batch([samples])
    output = both.theirs(**both.reference(samples), labels=labels)
    output.loss.backward()
    loss = both.ours(packed)[0] / packed.num_targets
    loss.backward()
    ours, theirs = gradients(both.ours), {both.name(n): g for n, g in gradients(both.theirs).items()}
    assert ours.keys() == theirs.keys()
    parity(
        f"{both.arch}, packed",
        f"`{type(both.theirs).__name__}`",
        forward=error(both.target_logits(packed), output.logits[:, :-1][labels[:, 1:] != IGNORE_INDEX].detach()),
        loss=error(loss.detach(), output.loss.detach()),
        gradient=max(error(ours[name], theirs[name]) for name in theirs),
    )


def test_packed_rows_are_their_samples_alone(pair: Callable[..., Pair]) -> None:
    both = pair()
    rows: list[Row] = [[3, "wide", 9], [12], [1, "tall", 2, "small", 6], ["small", 8]]
    samples = [both.encode(row, seed) for seed, row in enumerate(rows)]
    total = torch.zeros(())
    for sample in samples:
        loss, *_ = both.ours(both.batch([[sample]]))
        loss.backward()
        total += loss.detach()
    alone = gradients(both.ours)
    layouts = {"one row": [samples], "two rows": [samples[:1], samples[1:]], "padded": [[s] for s in samples]}
    for layout, packed in layouts.items():
        both.ours.zero_grad()
        loss, *_ = both.ours(both.batch(packed))
        loss.backward()
        assert error(loss.detach(), total) < 1e-6, layout  # measured 8e-8
        for name, gradient in gradients(both.ours).items():
            assert error(gradient, alone[name]) < 1e-5, (layout, name)  # measured 3e-6
    joined = dataclasses.replace(both.batch([samples]), segment_ids=None)
    assert error(both.ours(joined)[0].detach(), total) > 1e-3


@pytest.mark.parametrize("changed", ["positions", "pictures", "grids"])
def test_pictures_and_positions_count(pair: Callable[..., Pair], changed: str) -> None:
    both = pair()
    batch = both.batch([[both.encode([3, "wide", 9], 0)]])
    assert batch.images is not None
    assert batch.image_grids is not None
    other = {
        "positions": {"position_ids": torch.arange(batch.shape[1]).expand(3, 1, -1)},
        "pictures": {"images": 255 - batch.images},
        "grids": {"image_grids": batch.image_grids[:, [0, 2, 1]]},
    }[changed]
    both.ours.eval().requires_grad_(False)
    last = both.ours.hidden_states(batch)[0, -1]
    assert error(both.ours.hidden_states(dataclasses.replace(batch, **other))[0, -1], last) > 1e-3


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize(
    "rows", [[[3, "wide", 9], [2, "tall", 1, "small", 4]], [[6], [2, "tall", 5]], [[5], [9]]],
    ids=["pictures", "one of two", "text"],
)  # fmt: skip
def test_answers_are_those_of_transformers(pair: Callable[..., Pair], rows: list[Row], beams: int) -> None:
    both = pair()
    samples = [both.encode(row, seed) for seed, row in enumerate(rows)]
    options = {"max_new_tokens": 12, "num_beams": beams, "eos_token_id": [399], "do_sample": False, "pad_token_id": 0}
    reference = both.reference(samples, left=True)
    theirs = both.theirs.eval().generate(**reference, **options)[:, reference["input_ids"].shape[1] :]
    prompts = both.batch([[s] for s in samples], left=True, targets=False)
    ours = both.ours.eval().generate(prompts, **options)
    assert ours.tolist() == theirs.tolist()
    assert len(set(map(tuple, ours.tolist()))) == len(rows)
    assert not both.ours.language.decoder._forward_pre_hooks


def test_an_answer_right_after_a_picture_goes_on_after_its_largest_position(pair: Callable[..., Pair]) -> None:
    """Generated ids are most likely again when they stand in the prompt, with the positions of `get_rope_index`."""
    both = pair()
    sample = both.encode([3, "wide"], 0)
    both.ours.eval()
    answer = both.ours.generate(both.batch([[sample]], targets=False), max_new_tokens=6, eos_token_id=[399])[0]
    whole = dict(sample, ids=torch.cat([sample["ids"], answer]), kinds=torch.cat([sample["kinds"], answer * 0]))
    whole["positions"] = both.theirs.model.get_rope_index(
        whole["ids"][None], whole["kinds"][None], image_grid_thw=sample["grids"]
    )[0][:, 0]
    hidden = both.ours.hidden_states(both.batch([[whole]]))[0, -7:-1]
    assert both.ours.language.logits(hidden).argmax(-1).tolist() == answer.tolist()


def test_features_stand_at_their_tokens_whatever_the_order_of_the_index() -> None:
    features = (torch.arange(3.0)[:, None] + 1,)
    stack = DeepStack.at(torch.tensor([6, 1, 2]), features)
    assert stack is not None

    def added(stack: DeepStack, rows: int) -> list[list[float]]:
        hidden = torch.zeros(rows, 4, 1)
        return _add_features(hidden, stack.places, stack.features[0])[..., 0].tolist()

    assert added(stack, 2) == [[0, 2, 3, 0], [0, 0, 1, 0]]
    assert added(stack.repeated(2, 4), 4) == [[0, 2, 3, 0], [0, 2, 3, 0], [0, 0, 1, 0], [0, 0, 1, 0]]


@pytest.mark.parametrize(
    "freeze", [["vision"], ["language"], ["vision.tower.patch_embed", "vision.tower.blocks"]], ids=str
)
def test_frozen_parts_get_no_gradient_and_the_rest_the_same(pair: Callable[..., Pair], freeze: list[str]) -> None:
    whole, both = pair(), pair(freeze=freeze, vision={"gradient_checkpointing": True},
                               language={"gradient_checkpointing": True})  # fmt: skip
    batch = both.batch([[both.encode([3, "wide", 9], 0)], [both.encode([2, "tall", 7], 1)]])
    recording: list[bool] = []
    both.ours.vision.register_forward_hook(lambda *_: recording.append(torch.is_grad_enabled()))
    for model in (whole.ours, both.ours):
        model(batch)[0].backward()
    full, partly = gradients(whole.ours), gradients(both.ours)
    assert partly.keys() == {name for name in full if not name.startswith(tuple(freeze))}
    assert recording == [freeze != ["vision"]]
    for name, gradient in partly.items():
        assert error(gradient, full[name]) < 1e-6, name  # measured 0


@pytest.mark.parametrize("part", ["vision", "language"])
def test_gradient_checkpointing_recomputes(pair: Callable[..., Pair], part: str) -> None:
    model = pair(**{part: {"gradient_checkpointing": True}})
    calls: list[int] = []
    layers = model.ours.vision.tower.blocks if part == "vision" else model.ours.language.decoder.layers
    layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    model.ours(model.batch([[model.encode([3, "wide", 9], 0)]]))[0].backward()
    assert len(calls) == 2


def test_bf16_keeps_its_constants_and_the_loss(pair: Callable[..., Pair]) -> None:
    both = pair()
    batch = both.batch([[both.encode([3, "wide", 9], 0)], [both.encode([6], 1)]])
    loss = both.ours(batch)[0].detach()
    model = both.ours.to(torch.bfloat16)
    buffers = dict(model.named_buffers())
    assert {name for name, b in buffers.items() if b.dtype != torch.float32} == set()
    assert {"language.decoder.rotary_emb.inv_freq", "vision.pixels.mean"} <= buffers.keys()
    assert any(name.startswith("vision.tower.rotary_pos_emb.") for name in buffers)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    low = model(batch)[0]
    low.backward()
    assert low.dtype == torch.float32
    assert abs(low - loss) < 0.01 * loss  # measured 4e-4
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def facts(model: Any) -> dict[str, Any]:
    return {
        "parameters": {name: (tuple(p.shape), p.dtype, p.requires_grad) for name, p in model.named_parameters()},
        "state": {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()},
        "image": (model.tokens_per_image, model.image_size, model.image_shape, model.merge_size, model.image_marks),
        "work": model.work(),
        "vocabulary": model.tokenizer.get_vocab(),
        "sourced": [part.sourced for part in model.parts().values()],
        "describe": model.describe(),
    }


def test_a_skeleton_is_the_model_in_all_but_its_weights(pair: Callable[..., Pair], folder: str, tmp_path: Path) -> None:
    both = pair(freeze=["vision"])
    bare = tmp_path / "without_weights"
    bare.mkdir()
    for file in Path(folder).iterdir():
        if file.suffix != ".safetensors":
            (bare / file.name).write_bytes(file.read_bytes())
    config = both.ours.config.model_copy(update={"path": str(bare)})
    made = skeleton(config)
    assert facts(made) == facts(both.ours)
    assert {p.device.type for p in made.parameters()} == {"meta"}
    with pytest.raises(CheckpointError):
        type(both.ours).from_config(config)


def test_the_tower_reads_nothing_back_from_the_device(pair: Callable[..., Pair]) -> None:
    """It would wait for the GPU in every layer. On the meta device there is nothing to read."""
    both = pair()
    batch = both.batch([[both.encode([3, "wide", 9, "small", 4], 0)]])
    assert batch.images is not None
    assert batch.image_grids is not None
    tokens, features = skeleton(both.ours.config).vision(batch.images.to("meta"), batch.image_grids)
    assert (tokens.device.type, len(tokens)) == ("meta", len(batch.image_index))
    assert len(features) == len(getattr(both.theirs.config.vision_config, "deepstack_visual_indexes", ()))


def test_parts_and_properties(pair: Callable[..., Pair]) -> None:
    both = pair()
    patch = int(SHAPES[both.arch]["vision_config"]["patch_size"])
    assert list(both.ours.parts()) == ["vision", "language"]
    assert both.ours.image_shape == (3 * 2 * patch * patch,)
    assert (both.ours.tokens_per_image * 4, both.ours.image_size, both.ours.merge_size) == (1, None, 2)
    ours = {both.name(name) for name in both.theirs.state_dict()}
    assert set(both.ours.state_dict()) == ours
    work = both.ours.work()
    assert work.per_token > 0 < work.per_view
    assert work.per_view / 3 < pair(freeze=["vision"]).ours.work().per_view < work.per_view / 2


def test_tied_embeddings_are_one_parameter(tokenizer_dir: str, tmp_path: Path) -> None:
    shape = {**SHAPES["qwen3_vl"], "tie_word_embeddings": True}
    model = build("qwen3_vl", config=shape, language={"tokenizer": tokenizer_dir})
    assert model.language.lm_head.weight is model.language.decoder.embed_tokens.weight
    assert "language.lm_head.weight" not in dict(model.named_parameters())


def build(arch: str, **options: Any) -> QwenVL:
    built: QwenVL = registry.models.get(arch).from_config(
        decode(registry.models.config_class(arch), {"arch": arch, **options})
    )
    return built


def _text(hidden: int, mlp: int, layers: int, heads: int, kv_heads: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden, "intermediate_size": mlp, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "vocab_size": 151_936,
    }  # fmt: skip


REAL: dict[str, tuple[float, dict[str, Any]]] = {
    "qwen2_5_vl/3b": (
        3.755e9,
        {
            "text_config": _text(2048, 11_008, 36, 16, 2),
            "vision_config": {"hidden_size": 1280, "intermediate_size": 3420, "out_hidden_size": 2048},
            "tie_word_embeddings": True,
        },
    ),
    "qwen3_vl/8b": (
        8.767e9,
        {"text_config": _text(4096, 12_288, 36, 32, 8), "vision_config": {"out_hidden_size": 4096}},
    ),
    "qwen3_vl_moe/30b_a3b": (
        31.07e9,
        {
            "text_config": {
                **_text(2048, 6144, 48, 32, 4), "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
                "moe_intermediate_size": 768,
            },
            "vision_config": {"out_hidden_size": 2048},
        },
    ),
}  # fmt: skip
"""Types, their parameters as the hub states them, and their config.json."""


@pytest.mark.parametrize("name", REAL)
def test_types_of_real_size(name: str, tokenizer_dir: str, configs_root: Path, tmp_path: Path) -> None:
    parameters, shape = REAL[name]
    arch = name.split("/")[0]
    AutoConfig.for_model(arch, **shape).save_pretrained(tmp_path)
    tree: Any = OmegaConf.to_container(OmegaConf.load(configs_root / f"{name}.yaml"))
    tree |= {"arch": arch, "path": str(tmp_path), "language": {**tree["language"], "tokenizer": tokenizer_dir}}
    made: Any = skeleton(decode(registry.models.config_class(arch), tree))
    assert sum(p.numel() for p in made.parameters()) == pytest.approx(parameters, rel=1e-3)
    frozen = {n for n, p in made.named_parameters() if not p.requires_grad}
    assert any("blocks" in n for n in frozen)
    assert not any("merger" in n for n in frozen)


@pytest.mark.parametrize("arch", FAMILIES)
def test_tiny_types_train(arch: str, tokenizer_dir: str, configs_root: Path) -> None:
    tree: Any = OmegaConf.to_container(OmegaConf.load(configs_root / arch / "tiny.yaml"))
    model = build(arch, **{**tree, "language": {"tokenizer": tokenizer_dir}})
    (elements,) = model.image_shape
    ids = torch.arange(20, 28)[None]
    batch = Batch(
        input_ids=ids,
        labels=ids,
        position_ids=torch.arange(8).expand(3, 1, 8),
        attention_mask=ids > 0,
        images=torch.randint(0, 256, (4, elements), dtype=torch.uint8),
        image_grids=torch.tensor([[1, 2, 2]]),
        image_index=torch.tensor([1]),
        target_index=torch.arange(6),
        num_targets=6,
        target_weight=6.0,
        num_tokens=8,
        sample_ids=("s",),
        positions=(0,),
        by_dataset=(DatasetCounts("d"),),
    )
    model(batch)[0].backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []


@pytest.mark.parametrize("arch", FAMILIES)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vision_config": {"out_hidden_size": 48}}, "not as wide"),
        ({"text_config": {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 1]}}}, "add up to 4"),
        ({"text_config": {"hidden_sise": 32}}, "hidden_size"),
        ({"vision_config": {"patch_sise": 16}}, "patch_size"),
        ({"model_type": "qwen2_vl"}, "this is a qwen2_vl"),
    ],
    ids=["width", "frequencies", "text key", "vision key", "family"],
)
def test_impossible_shapes(arch: str, change: dict[str, Any], message: str, tokenizer_dir: str) -> None:
    shape = dict(SHAPES[arch])
    for key, value in change.items():
        shape[key] = {**shape.get(key, {}), **value} if isinstance(value, dict) else value
    with pytest.raises(ConfigError, match=message):
        build(arch, config=shape, language={"tokenizer": tokenizer_dir})


def test_a_balance_loss_that_the_configuration_asks_for_is_added(tokenizer_dir: str) -> None:
    shape = dict(SHAPES["qwen3_vl_moe"])
    asks = {"output_router_logits": True, "router_aux_loss_coef": 0.02}
    language = {"tokenizer": tokenizer_dir}
    plain, asked = (
        build("qwen3_vl_moe", config={**shape, "text_config": shape["text_config"] | more}, language=language)
        for more in ({}, asks)
    )
    assert plain.balancer is not None
    assert asked.balancer is not None
    assert (plain.balancer.coefficient, asked.balancer.coefficient) == (0.0, 0.02)


def test_a_token_costs_the_experts_it_visits(tokenizer_dir: str) -> None:
    def per_token(**experts: int) -> float:
        shape = {**SHAPES["qwen3_vl_moe"], "text_config": {**SHAPES["qwen3_vl_moe"]["text_config"], **experts}}
        return build("qwen3_vl_moe", config=shape, language={"tokenizer": tokenizer_dir}).work().per_token

    router = 2 * 3 * 2 * 6 * 32  # passes, forward and two backward products; layers; six rows more
    assert per_token(num_experts=12) - per_token() == pytest.approx(router)
    assert per_token(num_experts_per_tok=3) > per_token()


def test_another_familys_folder(folder: str) -> None:
    arch = AutoConfig.from_pretrained(folder).model_type
    other = next(family for family in FAMILIES if family != arch)
    with pytest.raises(ConfigError, match=f"this is a {arch}"):
        build(other, path=folder)


def test_batches_that_do_not_suit(pair: Callable[..., Pair]) -> None:
    both = pair()
    batch = both.batch([[both.encode([3, "wide", 9], 0)]])
    assert batch.images is not None
    for change, message in (
        ({"images": None}, "no patches"),
        ({"image_grids": None}, "no patches"),
        ({"images": batch.images.float()}, "do not suit the vision tower"),
        ({"images": batch.images[:, :-1]}, "do not suit the vision tower"),
        ({"images": batch.images[:-4]}, "do not fill"),
        ({"position_ids": batch.position_ids[0]}, "positions do not suit"),
        ({"image_index": batch.image_index[:-1]}, "places for"),
    ):
        with pytest.raises(DataError, match=message):
            both.ours(dataclasses.replace(batch, **change))
