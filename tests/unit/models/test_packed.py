"""Packed rows have the losses and gradients of the same samples padded, a sample a row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from lavis_ds.batch import IGNORE_INDEX, Batch, Sample
from lavis_ds.data.collate import Collator
from lavis_ds.models.vlm import Vlm

MakeVlm = Callable[..., Vlm]

PATHS = ["sdpa", "eager"]
"""Attention kernels that run on a CPU."""


def sample(number: int, length: int, num_images: int, tokens_per_image: int, *, branched: bool = False) -> Sample:
    """Random ids, pictures first, the last 5 tokens targets; branched: the last 5 are two questions, 3 and 2 long."""
    rng = torch.Generator().manual_seed(number)
    filled = num_images * tokens_per_image
    ids = torch.randint(5, 250, (filled + length,), generator=rng)
    labels = ids.clone()
    labels[:-5] = IGNORE_INDEX
    made = Sample(
        id=f"s{number}",
        input_ids=ids,
        labels=labels,
        position_ids=torch.arange(len(ids)),
        images=torch.randint(0, 255, (num_images, 3, 32, 32), dtype=torch.uint8, generator=rng),
        image_index=torch.arange(filled),
        dataset=number % 2,
        target_weights=torch.full((len(ids),), 0.5) if number == 3 else None,
    )
    if not branched:
        return made
    segments, positions = torch.zeros_like(ids), torch.arange(len(ids))
    segments[-5:] = torch.tensor([1, 1, 1, 2, 2])
    positions[-2:] = positions[-5:-3]
    labels[[-5, -2]] = IGNORE_INDEX
    return replace(made, segment_ids=segments, position_ids=positions)


def losses_and_gradients(model: Vlm, batches: list[Batch]) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    model.zero_grad()
    outputs = [model(batch) for batch in batches]
    loss = torch.stack([output[0] for output in outputs]).sum()
    loss.backward()
    by_dataset = torch.stack([output[2] for output in outputs]).sum(0)
    return loss.detach(), by_dataset, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("attention", PATHS)
@pytest.mark.parametrize("branched", [False, True], ids=["causal", "independent questions"])
def test_packed_equals_padded_equals_one_by_one(make_vlm: MakeVlm, attention: str, branched: bool) -> None:
    language = make_vlm().config.language
    options = {"name": "hf_causal_lm", "config": language.config, "tokenizer": language.tokenizer}
    model = make_vlm(language={**options, "attention": attention}).eval()
    q = model.tokens_per_image
    samples = [
        sample(0, 9, 1, q),
        sample(1, 14, 0, q, branched=branched),
        sample(2, 7, 2, q, branched=branched),
        sample(3, 11, 0, q),
        sample(4, 20, 1, q),
    ]
    collate = Collator(0, (3, 32, 32), tokens_per_image=q, datasets=["a", "b"])
    layouts = {
        "one by one": [[[s]] for s in samples],
        "padded": [[[s] for s in samples]],
        "packed": [[samples[:3], samples[3:]]],
        "packed in one row": [[[samples[i] for i in (4, 1, 3, 0, 2)]]],
    }
    results = {name: losses_and_gradients(model, [collate(rows) for rows in ls]) for name, ls in layouts.items()}
    loss, by_dataset, gradients = results.pop("one by one")
    for name, (other, other_by_dataset, other_gradients) in results.items():
        torch.testing.assert_close(other, loss, atol=0, rtol=1e-6, msg=name)  # measured 1.2e-7
        torch.testing.assert_close(other_by_dataset, by_dataset, atol=0, rtol=1e-6)
        assert other_gradients.keys() == gradients.keys()
        for key, gradient in gradients.items():
            error = (other_gradients[key] - gradient).norm() / gradient.norm().clamp(min=1e-3)
            assert error < 1e-5, (name, key, error)  # measured 6e-7
    torch.testing.assert_close(by_dataset.sum(), loss, atol=0, rtol=1e-6)


def test_without_boundaries_the_loss_would_be_another(make_vlm: MakeVlm) -> None:
    model = make_vlm().eval()
    q = model.tokens_per_image
    collate = Collator(0, (3, 32, 32), tokens_per_image=q, datasets=["a", "b"])
    packed = collate([[sample(0, 9, 1, q), sample(1, 14, 0, q)]])
    loss = model(packed)[0]
    joined = replace(packed, segment_ids=None, position_ids=torch.arange(packed.shape[1])[None])
    assert abs(model(joined)[0] - loss) > 1e-3 * loss
