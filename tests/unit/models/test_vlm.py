from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lavis_ds.batch import IGNORE_INDEX, Batch, DatasetCounts
from lavis_ds.config.decode import decode
from lavis_ds.errors import ConfigError, DataError
from lavis_ds.models.configs import MiniGPT4QwenConfig
from lavis_ds.models.minigpt4qwen import MiniGPT4Qwen
from lavis_ds.models.vlm import Vlm

MakeVlm = Callable[..., Vlm]
MakeBatch = Callable[..., Batch]
QFORMER = {
    "name": "qformer",
    "num_query_tokens": 3,
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}


def test_loss_and_accuracy_equal_transformers_on_the_same_embeddings(make_vlm: MakeVlm, make_batch: MakeBatch) -> None:
    model = make_vlm().eval()
    batch = make_batch(model.tokens_per_image)
    loss_sum, num_correct, by_dataset = model(batch)
    assert by_dataset.tolist() == pytest.approx([loss_sum.item()], rel=1e-6)
    reference = model.language.lm
    assert batch.images is not None
    tokens = model.projector(model.vision(batch.images)).flatten(0, 1)
    embeds = reference.model.embed_tokens(batch.input_ids).flatten(0, 1)
    embeds[batch.image_index] = tokens
    output = reference(
        inputs_embeds=embeds.view(*batch.shape, -1), attention_mask=batch.attention_mask.long(), labels=batch.labels
    )
    torch.testing.assert_close(loss_sum / batch.num_targets, output.loss, atol=1e-6, rtol=1e-6)  # measured 0
    right = (output.logits[:, :-1].argmax(-1) == batch.labels[:, 1:]).sum()
    assert num_correct.item() == right.item()
    assert (loss_sum.dtype, loss_sum.shape, num_correct.requires_grad) == (torch.float32, (), False)


def test_a_batch_is_the_sum_of_its_rows(make_vlm: MakeVlm, make_batch: MakeBatch) -> None:
    model = make_vlm().eval()
    batch = make_batch(model.tokens_per_image)
    assert batch.images is not None
    total = torch.zeros(())
    for row, length in enumerate((12, 9)):
        labels = batch.labels[row : row + 1, :length]
        total += model(
            dataclasses.replace(
                batch,
                input_ids=batch.input_ids[row : row + 1, :length],
                labels=labels,
                position_ids=batch.position_ids[row : row + 1, :length],
                images=batch.images[row : row + 1],
                image_index=torch.arange(model.tokens_per_image) + 1,
                target_index=(labels.flatten().roll(-1) != IGNORE_INDEX).nonzero().flatten(),
            )
        )[0]
    torch.testing.assert_close(model(batch)[0], total, atol=1e-5, rtol=1e-6)  # measured 4e-6


@pytest.mark.parametrize(
    "projector", [{"name": "mlp", "merge_size": 2}, QFORMER, {"name": "linear"}], ids=lambda p: p["name"]
)
@pytest.mark.parametrize("freeze", [[], ["vision"], ["language"], ["vision", "language.*.layers.0.*"]], ids=str)
def test_gradients_reach_what_trains_and_nothing_else(
    make_vlm: MakeVlm, make_batch: MakeBatch, projector: Any, freeze: list[str]
) -> None:
    model = make_vlm(projector=projector, freeze=freeze)
    model(make_batch(model.tokens_per_image, lengths=(30, 24)))[0].backward()
    trains = {name for name, p in model.named_parameters() if p.requires_grad}
    assert {name for name, p in model.named_parameters() if p.grad is not None} == trains
    assert any(name.startswith("projector.") for name in trains)
    assert "vision" not in freeze or not any(name.startswith("vision.") for name in trains)


def test_text_only_batch_has_the_same_graph(make_vlm: MakeVlm, make_batch: MakeBatch) -> None:
    model = make_vlm()
    batch = make_batch(model.tokens_per_image, images=0)
    model(batch)[0].backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    assert all(g is not None for g in gradients.values())
    assert not any(g.any() for n, g in gradients.items() if g is not None and not n.startswith("language."))
    with pytest.raises(DataError, match="no pictures"):
        model(dataclasses.replace(batch, images=None))


def test_vision_runs_once_a_batch_and_without_graph_when_frozen(make_vlm: MakeVlm, make_batch: MakeBatch) -> None:
    model = make_vlm(freeze=["vision"])
    recording: list[bool] = []
    model.vision.register_forward_hook(lambda *_: recording.append(torch.is_grad_enabled()))
    model(make_batch(model.tokens_per_image))
    assert recording == [False]


def test_image_tokens_that_do_not_fit(make_vlm: MakeVlm, make_batch: MakeBatch) -> None:
    model = make_vlm()
    with pytest.raises(DataError, match=r"samples s0, s1.*10 image tokens and its pictures have 8"):
        model(make_batch(model.tokens_per_image + 1))


def test_pictures_change_the_answer_and_left_padding_does_not(make_vlm: MakeVlm) -> None:
    model = make_vlm().eval()
    ids = torch.randint(5, 250, (1, 9))
    images = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    index = torch.arange(1, 1 + model.tokens_per_image)

    def prompt(pad: int, image: torch.Tensor) -> Batch:
        padded = torch.nn.functional.pad(ids, (pad, 0))
        return Batch(
            input_ids=padded,
            labels=torch.full_like(padded, IGNORE_INDEX),
            position_ids=(torch.arange(9 + pad)[None] - pad).clamp(min=0),
            attention_mask=torch.arange(9 + pad)[None] >= pad,
            images=image[None],
            image_index=index + pad,
            target_index=torch.tensor([0]),
            num_targets=0,
            num_tokens=9,
            target_weight=0.0,
            sample_ids=("p",),
            positions=(0,),
            by_dataset=(DatasetCounts("d"),),
        )

    options = {"max_new_tokens": 8, "eos_token_id": [399]}
    plain = model.generate(prompt(0, images[0]), **options)
    assert plain.shape == (1, 8)
    assert torch.equal(model.generate(prompt(4, images[0]), **options), plain)
    hidden = [model.hidden_states(prompt(0, image))[0, -1] for image in images]
    assert (hidden[0] - hidden[1]).abs().max() > 1e-3


def test_properties_and_parts(make_vlm: MakeVlm) -> None:
    model = make_vlm()
    assert list(model.parts()) == ["vision", "projector", "language"]
    assert (model.tokens_per_image, model.image_size) == (4, 32)
    assert model.tokenizer is model.language.tokenizer


def test_parts_that_do_not_fit_are_refused_when_built(make_vlm: MakeVlm) -> None:
    with pytest.raises(ConfigError, match="16 tokens an image"):
        make_vlm(projector={"name": "mlp", "merge_size": 3})


def test_a_frozen_random_qformer_is_refused(vlm_tree: Callable[..., dict[str, Any]]) -> None:
    tree = vlm_tree(arch="minigpt4qwen", projector=QFORMER, freeze=["projector.qformer"])
    with pytest.raises(ConfigError, match="random"):
        MiniGPT4Qwen.from_config(decode(MiniGPT4QwenConfig, tree))
