"""LLaVA-Qwen and MiniGPT4Qwen have the logits, losses and gradients of the classes that they are exported to.

Weights go over by the export's own table of names, and gradients are brought over by the same table, so that both are
compared tensor by tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from lavis_ds.batch import IGNORE_INDEX, Batch, Sample
from lavis_ds.data.collate import Collator
from lavis_ds.models.vlm import Vlm
from lavis_ds.runners.export.families import target_of
from lavis_ds.runners.export.target import Target
from tests.parity import Parity, gradient_error, gradients, relative_error

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
TOWER: dict[str, Any] = {**SIZES, "image_size": 32, "patch_size": 8}
CLIP = {"name": "hf_vision", "select_layer": -2, "config": {"model_type": "clip_vision_model", **TOWER}}
SIGLIP = {
    "name": "hf_vision",
    "final_norm": True,
    "config": {"model_type": "siglip_vision_model", **TOWER},
}
EVA = {
    "name": "timm_vit",
    "model_name": "eva_giant_patch14_clip_224",
    "image_size": 32,
    "model_args": {"patch_size": 8, "embed_dim": 32, "depth": 3, "num_heads": 4},
    "select_layer": -2,
    "final_norm": False,
    "layer_norm": True,
    "select_tokens": "all",
}
QFORMER = {
    "name": "qformer",
    "num_query_tokens": 4,
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "dropout": 0.0,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llava_qwen, CLIP": {"arch": "llava_qwen", "vision": CLIP, "projector": {"name": "mlp"}},
    "llava_qwen, SigLIP": {"arch": "llava_qwen", "vision": SIGLIP, "projector": {"name": "mlp"}},
    "minigpt4qwen": {"arch": "minigpt4qwen", "vision": EVA, "projector": QFORMER},
}
CONTENTS = {"one picture": (1,), "several pictures": (2, 3), "mixed": (1, 0, 2), "text": (0, 0)}
"""Pictures of each sample."""

TARGETS = 5


def sample(number: int, num_images: int, tokens_per_image: int) -> Sample:
    """Text, then each picture with text after it; the last tokens are targets."""
    generator = torch.Generator().manual_seed(number)
    index: list[int] = []
    length = 2 + number
    for _ in range(num_images):
        index += list(range(length, length + tokens_per_image))
        length += tokens_per_image + 2
    length += TARGETS
    ids = torch.randint(5, 250, (length,), generator=generator)
    labels = ids.clone()
    labels[:-TARGETS] = IGNORE_INDEX
    return Sample(
        id=f"s{number}",
        input_ids=ids,
        labels=labels,
        position_ids=torch.arange(length),
        images=torch.randint(0, 256, (num_images, 3, 32, 32), dtype=torch.uint8, generator=generator),
        image_index=torch.tensor(index, dtype=torch.long),
    )


def randomised(model: Vlm) -> Vlm:
    """Norms and biases are made as ones and zeros, under which mistakes could hide."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() < 2:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    if isinstance(norm := getattr(model.vision, "layer_norm", None), nn.LayerNorm):
        norm.eps = 1e-6  # 1e-5 in BLIP-2's own code and here; transformers has one for all norms, that of the blocks
    return model.eval()


def reference_of(model: Vlm, target: Target) -> Any:
    """The Hugging Face model with the same weights."""
    reference = target.model_class(target.config).eval()
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    made = {name: piece.make([state[s].detach() for s in piece.sources]) for name, piece in target.pieces.items()}
    loaded = reference.load_state_dict(made, strict=False)
    assert loaded.unexpected_keys == []
    assert [k for k in loaded.missing_keys if k not in reference.all_tied_weights_keys] == []
    return reference


def reference_inputs(model: Vlm, target: Target, samples: list[Sample]) -> dict[str, Tensor]:
    """What the Hugging Face processor would give: a sample a row, `<image>` on places, normalised pixels."""
    rows = [s.input_ids.index_fill(0, s.image_index, target.image_token_id) for s in samples]
    made = {
        "input_ids": pad_sequence(rows, batch_first=True),
        "attention_mask": pad_sequence([torch.ones_like(row) for row in rows], batch_first=True),
        "labels": pad_sequence([s.labels for s in samples], batch_first=True, padding_value=IGNORE_INDEX),
    }
    images = torch.cat([s.images for s in samples])
    if len(images) or target.needs_picture:
        made["pixel_values"] = model.vision.pixels(images if len(images) else torch.zeros(1, 3, 32, 32).byte())
    return made


def batch_of(model: Vlm, samples: list[Sample], layout: str) -> Batch:
    collate = Collator(0, model.image_shape, tokens_per_image=model.tokens_per_image, datasets=["d"])
    return collate([[s] for s in samples] if layout == "padded" else [samples])


def target_logits(logits: Tensor, labels: Tensor) -> Tensor:
    """Logits that predict a target, in the order of samples."""
    return logits[:, :-1][labels[:, 1:] != IGNORE_INDEX]


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("content", list(CONTENTS))
@pytest.mark.parametrize("family", list(FAMILIES))
def test_families(
    parity: Parity,
    make_vlm: Callable[..., Vlm],
    qwen3: dict[str, Any],
    tokenizer_dir: str,
    family: str,
    content: str,
    layout: str,
) -> None:
    torch.manual_seed(1)
    shape = {**qwen3, "vocab_size": 416}  # spare rows, as Qwen's own have: `<image>` takes one
    language = {"name": "hf_causal_lm", "config": shape, "tokenizer": tokenizer_dir}
    model = randomised(make_vlm(language=language, **FAMILIES[family]))
    target = target_of(model)
    reference = reference_of(model, target)
    num_tokens = int(model.tokens_per_image)
    samples = [sample(number, count, num_tokens) for number, count in enumerate(CONTENTS[content])]
    batch, inputs = batch_of(model, samples, layout), reference_inputs(model, target, samples)

    output = reference(**inputs)
    output.loss.backward()
    loss = model(batch)[0] / batch.num_targets
    loss.backward()
    hidden = model.hidden_states(batch).flatten(0, 1)[batch.target_index]
    logits = model.language.logits(hidden)
    expected = target_logits(output.logits, inputs["labels"])

    own = gradients(model)
    assert own.keys() == {name for name, _ in model.named_parameters()}
    theirs = gradients(reference)
    ours = {
        name: piece.make([own[s] for s in piece.sources]) for name, piece in target.pieces.items() if name in theirs
    }
    parity(
        family,
        f"`{type(reference).__name__}`",
        forward=relative_error(logits, expected),
        loss=relative_error(loss, output.loss),
        gradient=gradient_error(ours, theirs),
    )
    if content != "text":
        assert any(name.startswith("vision") or "vision" in name for name in theirs)
