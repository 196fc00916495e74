"""Tiny parts and batches. Nothing here touches the network."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from lavis_ds.batch import IGNORE_INDEX, Batch, DatasetCounts
from lavis_ds.config.decode import decode
from lavis_ds.models.configs import VlmConfig
from lavis_ds.models.vlm import Vlm
from tests.parity import Parity

torch.set_num_threads(1)

SENTENCES = [
    "What shape is in the picture?",
    "a red circle",
    "Is there a blue square?",
    "yes",
    "no",
    "a green triangle",
]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|image_pad|>"]

QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
}
VIT: dict[str, Any] = {
    "name": "timm_vit",
    "model_name": "vit_tiny_patch16_224",
    "image_size": 32,
    "model_args": {"patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4},
}


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub id fails at once instead of after half a minute of retries."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    torch.manual_seed(0)


@pytest.fixture
def parity(record_property: Callable[[str, object], None]) -> Parity:
    return Parity(record_property)


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A byte-level BPE tokenizer with ChatML's special tokens, trained on a few sentences."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    folder = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", extra_special_tokens=SPECIAL[1:]
    ).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def vlm_tree(tokenizer_dir: str) -> Callable[..., dict[str, Any]]:
    """Options of a tiny model; keyword arguments replace its blocks."""

    def make(**blocks: Any) -> dict[str, Any]:
        return {
            "arch": "vlm",
            "vision": VIT,
            "projector": {"name": "mlp", "merge_size": 2},
            "language": {"name": "hf_causal_lm", "config": QWEN3, "tokenizer": tokenizer_dir},
            **blocks,
        }

    return make


@pytest.fixture
def make_vlm(vlm_tree: Callable[..., dict[str, Any]]) -> Callable[..., Vlm]:
    def make(**blocks: Any) -> Vlm:
        return Vlm.from_config(decode(VlmConfig, vlm_tree(**blocks)))

    return make


def make_batch(num_image_tokens: int, lengths: tuple[int, ...] = (12, 9), *, images: int = 2, seed: int = 0) -> Batch:
    """Rows of random ids; a picture stands at the beginning of each of the first `images` rows; the last 3 are targets.

    With `images=0` the batch carries the blank picture.
    """
    generator = torch.Generator().manual_seed(seed)
    rows, longest = len(lengths), max(lengths)
    ids = torch.randint(5, 250, (rows, longest), generator=generator)
    labels = torch.full_like(ids, IGNORE_INDEX)
    mask = torch.arange(longest)[None] < torch.tensor(lengths)[:, None]
    for row, length in enumerate(lengths):
        labels[row, length - 3 : length] = ids[row, length - 3 : length]
    index = torch.cat(
        [torch.arange(num_image_tokens) + row * longest + 1 for row in range(images)]
        or [torch.tensor([], dtype=torch.long)]
    )
    pixels = torch.randint(0, 256, (max(images, 1), 3, 32, 32), generator=generator, dtype=torch.uint8)
    return Batch(
        input_ids=ids.masked_fill(~mask, 0),
        labels=labels,
        position_ids=torch.arange(longest).expand(rows, -1),
        attention_mask=mask,
        images=pixels if images else torch.zeros_like(pixels),
        image_index=index,
        target_index=(labels.flatten().roll(-1) != IGNORE_INDEX).nonzero().flatten(),
        num_targets=3 * rows,
        num_tokens=sum(lengths),
        target_weight=3.0 * rows,
        sample_ids=tuple(f"s{row}" for row in range(rows)),
        positions=tuple(range(rows)),
        by_dataset=(DatasetCounts("d"),),
    )


@pytest.fixture(name="make_batch")
def _make_batch() -> Callable[..., Batch]:
    return make_batch


@pytest.fixture
def qwen3() -> dict[str, Any]:
    return dict(QWEN3)


@pytest.fixture
def configs_root() -> Path:
    return Path(__file__).parents[3] / "configs" / "models"
