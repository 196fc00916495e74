"""SigLIP 2 with NaFlex has the features and gradients of transformers' own class, and works in a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from transformers import Siglip2Config, Siglip2Model, Siglip2VisionModel, SiglipVisionConfig
from transformers.models.siglip2.image_processing_siglip2 import Siglip2ImageProcessor

from lavis_ds.batch import Batch
from lavis_ds.data.collate import Collator
from lavis_ds.data.configs import ChatConfig, ImageNativeConfig
from lavis_ds.data.conversation import Conversation, Image, Text, Turn
from lavis_ds.data.processors.chat import Chat
from lavis_ds.data.processors.native import ImageNative
from lavis_ds.data.processors.views import Views
from lavis_ds.errors import CheckpointError, ConfigError, DataError
from lavis_ds.models.configs import Siglip2NaFlexConfig
from lavis_ds.models.vision.siglip2_naflex import Siglip2NaFlex
from lavis_ds.models.vlm import Vlm
from lavis_ds.runners.build import text_context
from tests.parity import Parity, gradient_error, input_gradients, relative_error

SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "patch_size": 8,
    "num_patches": 16,
}
TEXT = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 50}
VISION = {"name": "siglip2_naflex", "config": {"model_type": "siglip2_vision_model", **SHAPE}}
SIZES = [(48, 16), (32, 64), (16, 16)]
"""Width and height in pixels of pictures, which are 12, 32 and 4 patches."""

MakeVlm = Callable[..., Vlm]


def make(**options: Any) -> Siglip2NaFlex:
    return Siglip2NaFlex(Siglip2NaFlexConfig.model_validate(options)).eval()


def pictures(sizes: list[tuple[int, int]]) -> list[PIL.Image.Image]:
    rng = np.random.default_rng(0)
    return [PIL.Image.fromarray(rng.integers(0, 256, (*reversed(size), 3), dtype=np.uint8)) for size in sizes]


def processor(merge_size: int) -> ImageNative:
    return ImageNative(ImageNativeConfig(patch_size=8, merge_size=merge_size, min_pixels=64, max_pixels=65_536))


def views_of(images: list[PIL.Image.Image], merge_size: int) -> list[Views]:
    process = processor(merge_size)
    return [process(image, np.random.default_rng(0)) for image in images]


def patches_of(images: list[PIL.Image.Image], merge_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    views = views_of(images, merge_size)
    return torch.cat([v.pixels for v in views]), torch.tensor([v.grid for v in views])


def reference_inputs(image: PIL.Image.Image) -> dict[str, torch.Tensor]:
    """One picture at its own size, as transformers' own processor gives it, with four patches of padding."""
    width, height = image.size
    made = Siglip2ImageProcessor(patch_size=8, max_num_patches=width * height // 64)(image, return_tensors="pt")
    assert made["spatial_shapes"].tolist() == [[height // 8, width // 8]]
    pad = (0, 0, 0, 4)
    return {
        "pixel_values": torch.nn.functional.pad(made["pixel_values"], pad),
        "pixel_attention_mask": torch.nn.functional.pad(made["pixel_attention_mask"], pad[2:]),
        "spatial_shapes": made["spatial_shapes"],
    }


def square_by_square(features_PD: torch.Tensor, image: PIL.Image.Image, merge_size: int) -> torch.Tensor:
    """Rows of patches in the order in which our processor gives them."""
    columns, rows = (side // 8 for side in image.size)
    grid = features_PD.view(rows // merge_size, merge_size, columns // merge_size, merge_size, -1)
    return grid.transpose(1, 2).flatten(0, 3)


@pytest.fixture
def folder(tmp_path: Path) -> tuple[str, Siglip2VisionModel]:
    """A folder as on the hub, and the reference tower."""
    whole: Any = Siglip2Model(Siglip2Config(vision_config=SHAPE, text_config=TEXT))
    with torch.no_grad():
        for parameter in whole.parameters():
            if parameter.dim() < 2:
                parameter.add_(0.1 * torch.randn_like(parameter))
    whole.save_pretrained(tmp_path)
    return str(tmp_path), whole.vision_model.eval()


@pytest.mark.parametrize("merge_size", [1, 2])
@pytest.mark.parametrize("layer", [-1, -2, 0])
def test_features_and_gradients_equal_transformers(
    parity: Parity, folder: tuple[str, Siglip2VisionModel], layer: int, merge_size: int
) -> None:
    path, tower = folder
    encoder = make(path=path, select_layer=layer)
    images = pictures(SIZES)
    features = encoder(*patches_of(images, merge_size), merge_size)
    expected = []
    for image in images:
        inputs = reference_inputs(image)
        hidden = tower(**inputs, output_hidden_states=True).hidden_states[layer][0]
        expected.append(square_by_square(hidden[:-4], image, merge_size))
    ours = {name.removeprefix("tower."): g for name, g in input_gradients(features, encoder).items()}
    assert len(ours) == len(list(encoder.parameters()))
    parity(
        "siglip2_naflex",
        "`Siglip2VisionModel`",
        forward=relative_error(features, torch.cat(expected)),
        gradient=gradient_error(ours, input_gradients(torch.cat(expected), tower)),
    )


def test_final_norm_is_the_last_hidden_state(folder: tuple[str, Siglip2VisionModel]) -> None:
    path, tower = folder
    (image,) = pictures(SIZES[:1])
    expected = tower(**reference_inputs(image)).last_hidden_state[0, :-4]
    features = make(path=path, final_norm=True)(*patches_of([image], 1), 1)
    torch.testing.assert_close(features, expected, atol=1e-5, rtol=1e-5)  # measured 3e-6


def test_it_runs_in_bf16() -> None:
    encoder = make(config=VISION["config"])
    patches, grids = patches_of(pictures(SIZES), 2)
    expected = encoder(patches, grids, 2)
    features = encoder.to(torch.bfloat16)(patches, grids, 2)
    assert (features.dtype, encoder.pixels.mean.dtype) == (torch.bfloat16, torch.float32)
    error = (features.float() - expected).abs().mean() / expected.abs().mean()
    assert error < 0.05, error  # measured 0.008


def test_recomputing_changes_nothing() -> None:
    encoders = [make(config=VISION["config"], gradient_checkpointing=on).train() for on in (False, True)]
    encoders[1].load_state_dict(encoders[0].state_dict())
    inputs = patches_of(pictures(SIZES), 1)
    ours, theirs = (input_gradients(encoder(*inputs, 1), encoder) for encoder in encoders)
    assert gradient_error(ours, theirs) < 1e-6  # measured 0


def test_patches_that_do_not_fill_their_grids() -> None:
    encoder = make(config=VISION["config"])
    patches, grids = patches_of(pictures(SIZES[:1]), 2)
    for bad in (grids + torch.tensor([0, 2, 0]), grids * torch.tensor([2, 1, 1])):
        with pytest.raises(DataError, match="do not fill"):
            encoder(patches, bad, 2)
    with pytest.raises(DataError, match="do not fill"):
        encoder(patches[:12], torch.tensor([[1, 3, 4]]), 2)
    with pytest.raises(DataError, match=r"uint8 of shape \(P, 384\)"):
        encoder(patches.float(), grids, 2)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"path": "/nowhere/at/all"}, CheckpointError, "no such folder"),
        ({"config": {"model_type": "siglip_vision_model"}}, ConfigError, "use hf_vision"),
        ({"config": VISION["config"], "select_layer": 4}, ConfigError, "-4 to 3"),
    ],
)
def test_wrong_options(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make(**options)


def test_a_fixed_size_siglip_folder_is_refused(tmp_path: Path) -> None:
    SiglipVisionConfig(**{k: v for k, v in SHAPE.items() if k != "num_patches"}).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="use hf_vision"):
        make(path=str(tmp_path))


# --- in a model ----------------------------------------------------------------------------------------------------


def conversation(number: int, num_images: int) -> Conversation:
    shown = tuple(Image(f"{k}.png") for k in range(num_images))
    turns = (Turn("user", (*shown, Text("What shape is in the picture?"))), Turn("assistant", (Text("a red circle"),)))
    return Conversation(f"s{number}", turns)


def batch_of(model: Vlm, rows: list[list[int]]) -> Batch:
    """What the data side makes of samples with so many pictures each."""
    assert model.merge_size is not None
    chat = Chat(ChatConfig(), text_context(model))
    collate = Collator(
        0,
        model.image_shape,
        tokens_per_image=model.tokens_per_image,
        datasets=["d"],
        merge_size=model.merge_size,
        mrope=model.has_mrope,
    )
    shown = views_of(pictures(SIZES), model.merge_size)

    def sample(count: int) -> Any:
        made = chat(conversation(count, count), shown[:count], np.random.default_rng(0))
        return collate.checked(made)

    return collate([[sample(count) for count in row] for row in rows])


PROJECTORS = [
    {"name": "linear"},
    {"name": "mlp"},
    {"name": "mlp", "merge_size": 2},
    {"name": "average_pool", "kernel_size": 2},
]


@pytest.mark.parametrize("projector", PROJECTORS, ids=str)
def test_packed_pictures_of_any_size_have_the_loss_of_each_alone(make_vlm: MakeVlm, projector: dict[str, Any]) -> None:
    model = make_vlm(vision=VISION, projector=projector).eval()
    merge = projector.get("merge_size") or projector.get("kernel_size") or 1
    assert (model.tokens_per_image, model.merge_size) == (Fraction(1, merge**2), merge)
    assert (model.image_size, model.image_shape) == (None, (2 * 3 * 64,))
    alone = [batch_of(model, [[count]]) for count in (0, 1, 3)]
    packed = batch_of(model, [[0, 1, 3]])
    assert packed.position_ids.dim() == 2  # no positions in time, height and width
    assert packed.image_index.numel() == (12 + 12 + 32 + 4) // merge**2
    loss = sum(model(batch)[0] for batch in alone)
    torch.testing.assert_close(model(packed)[0], loss, atol=1e-5, rtol=1e-6)  # measured 8e-6 of 60
    padded = batch_of(model, [[0], [1], [3], []])
    torch.testing.assert_close(model(padded)[0], loss, atol=1e-5, rtol=1e-6)  # measured 8e-6
    model(packed)[0].backward()
    assert [n for n, p in model.named_parameters() if p.grad is None] == []


def test_squares_become_tokens_as_a_fixed_size_grid_does(make_vlm: MakeVlm) -> None:
    """A square picture has the tokens that the projector makes of a whole grid of the same features."""
    model = make_vlm(vision=VISION, projector={"name": "mlp", "merge_size": 2}).eval()
    (image,) = pictures([(32, 32)])
    tokens = model.encode_patches(*patches_of([image], 2))
    whole = model.vision(*patches_of([image], 1), 1)
    torch.testing.assert_close(tokens[:, 0], model.projector(whole[None])[0], atol=1e-6, rtol=0)  # measured 0


def test_text_alone_has_the_same_graph_and_a_blank_picture(make_vlm: MakeVlm) -> None:
    model = make_vlm(vision=VISION, projector={"name": "mlp", "merge_size": 2})
    batch = batch_of(model, [[0]])
    assert batch.images is not None
    assert len(batch.images) == 4
    model(batch)[0].backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    assert all(g is not None for g in gradients.values())
    assert not any(g.any() for n, g in gradients.items() if g is not None and not n.startswith("language."))
    assert batch_of(model, [[], []]).position_ids.dim() == 2


def test_pictures_change_the_answer(make_vlm: MakeVlm) -> None:
    model = make_vlm(vision=VISION).eval()
    batch = batch_of(model, [[1]])
    assert batch.images is not None
    other = replace(batch, images=255 - batch.images)
    hidden = [model.hidden_states(b)[0, -4] for b in (batch, other)]
    assert (hidden[0] - hidden[1]).abs().max() > 1e-3
    assert model.generate(batch, max_new_tokens=3, eos_token_id=[399]).shape == (1, 3)


@pytest.mark.parametrize("projector", ["qformer", "perceiver", "c_abstractor"])
def test_projectors_of_whole_pictures_are_refused(make_vlm: MakeVlm, projector: str) -> None:
    with pytest.raises(ConfigError, match=r"fixed number of patches.*linear, mlp"):
        make_vlm(vision=VISION, projector={"name": projector})
