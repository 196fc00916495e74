from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config
from transformers.modeling_layers import GradientCheckpointingLayer

from lavis_ds.batch import IGNORE_INDEX, PADDING_SEGMENT, PREFIX_SEGMENT
from lavis_ds.errors import CheckpointError, ConfigError
from lavis_ds.models.configs import HFCausalLMConfig
from lavis_ds.models.language.hf_causal_lm import HFCausalLM
from lavis_ds.models.language.segments import attention_mask
from lavis_ds.models.loss import token_losses


@pytest.fixture
def folder(tmp_path: Path, tokenizer_dir: str, qwen3: dict[str, Any]) -> str:
    """A folder as on the hub: weights and tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    shape = {k: v for k, v in qwen3.items() if k != "model_type"}
    model = AutoModelForCausalLM.from_config(
        Qwen3Config(**shape, vocab_size=len(tokenizer) + 3, tie_word_embeddings=True)
    )
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    return str(tmp_path)


def make(**options: Any) -> HFCausalLM:
    return HFCausalLM(HFCausalLMConfig.model_validate(options)).eval()


def hidden(
    model: HFCausalLM, ids: torch.Tensor, segments: torch.Tensor | None = None, positions: torch.Tensor | None = None
) -> torch.Tensor:
    positions = torch.arange(ids.shape[1]).expand_as(ids) if positions is None else positions
    return model(model.embed(ids), positions, segments)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_logits_loss_and_gradient_equal_transformers(folder: str, attention: str) -> None:
    model = make(path=folder, attention=attention)
    reference: Any = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation=attention, dtype=torch.float32
    ).eval()
    ids = torch.randint(0, 250, (2, 11))
    logits = model.logits(hidden(model, ids).flatten(0, 1))
    expected = reference(input_ids=ids, labels=ids)
    torch.testing.assert_close(logits, expected.logits.flatten(0, 1), atol=1e-6, rtol=1e-5)  # measured 0
    loss = token_losses(logits, torch.nn.functional.pad(ids[:, 1:], (0, 1), value=IGNORE_INDEX).flatten()).sum() / 20
    torch.testing.assert_close(loss, expected.loss, atol=1e-6, rtol=1e-6)  # measured 0
    loss.backward()
    expected.loss.backward()
    for (name, p), q in zip(model.lm.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, atol=1e-6, rtol=1e-4, msg=name)  # measured 0


def test_padding_on_the_right_changes_nothing(folder: str) -> None:
    model = make(path=folder)
    short = torch.randint(5, 250, (1, 7))
    padded = torch.nn.functional.pad(short, (0, 5))
    both = torch.cat([padded, torch.randint(5, 250, (1, 12))])
    torch.testing.assert_close(hidden(model, both)[:1, :7], hidden(model, short), atol=1e-5, rtol=1e-5)  # measured 5e-7


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_independent_segments_equal_each_question_alone(folder: str, attention: str) -> None:
    model = make(path=folder, attention=attention)
    prefix, first, second = (torch.randint(5, 250, (1, n)) for n in (5, 4, 6))
    row = torch.cat([prefix, first, second, torch.zeros(1, 3, dtype=torch.long)], dim=1)
    segments = torch.tensor([[PREFIX_SEGMENT] * 5 + [1] * 4 + [2] * 6 + [PADDING_SEGMENT] * 3])
    positions = torch.tensor([[*range(9), *range(5, 11), 0, 1, 2]])
    together = hidden(model, row, segments, positions)
    for question, where in ((first, slice(5, 9)), (second, slice(9, 15))):
        alone = hidden(model, torch.cat([prefix, question], dim=1))[:, 5:]
        torch.testing.assert_close(together[:, where], alone, atol=1e-5, rtol=1e-5)  # measured 5e-7
    assert together.isfinite().all()
    joined = hidden(model, row, None)[:, 9:15]
    assert (joined - together[:, 9:15]).abs().max() > 1e-2  # without segments the second question sees the first


def test_attention_mask() -> None:
    mask = attention_mask(torch.tensor([[PREFIX_SEGMENT, 1, 2, 2, PADDING_SEGMENT]]))[0, 0].int().tolist()
    assert mask == [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 0, 1, 1, 0], [0, 0, 0, 0, 1]]


def test_generate_equals_transformers_and_ignores_left_padding(folder: str) -> None:
    model = make(path=folder)
    reference: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    short, long = torch.randint(5, 250, (1, 4)), torch.randint(5, 250, (1, 9))
    batch = torch.cat([torch.nn.functional.pad(short, (5, 0)), long])
    mask = torch.tensor([[0] * 5 + [1] * 4, [1] * 9])
    ids = model.generate(model.embed(batch), mask.bool(), max_new_tokens=6, eos_token_id=[399])
    for row, prompt in zip(ids, (short, long), strict=True):
        expected = reference.generate(prompt, max_new_tokens=6, do_sample=False, eos_token_id=[399], pad_token_id=0)
        assert row.tolist() == expected[0, prompt.shape[1] :].tolist()


def test_inline_shape_takes_vocabulary_from_the_tokenizer(tokenizer_dir: str, qwen3: dict[str, Any]) -> None:
    model = make(config=qwen3, tokenizer=tokenizer_dir)
    assert model.vocab_size == len(model.tokenizer)
    assert (model.hidden_size, model.sourced) == (32, ())
    assert model.lm.config.eos_token_id == model.tokenizer.convert_tokens_to_ids("<|im_end|>")


def test_a_cast_leaves_rotary_frequencies_in_float32(tokenizer_dir: str, qwen3: dict[str, Any]) -> None:
    model = make(config=qwen3, tokenizer=tokenizer_dir)
    before = model.lm.model.rotary_emb.inv_freq.clone()
    model.to(torch.bfloat16)
    assert model.lm.lm_head.weight.dtype == torch.bfloat16
    torch.testing.assert_close(model.lm.model.rotary_emb.inv_freq, before, atol=0, rtol=0)


def test_frozen_model_still_recomputes(tokenizer_dir: str, qwen3: dict[str, Any]) -> None:
    """The gradient passes through a frozen language model to the projector, so its activations count."""
    model = make(config=qwen3, tokenizer=tokenizer_dir, gradient_checkpointing=True).requires_grad_(False)
    model.train_frozen()
    calls = 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.input_layernorm.register_forward_pre_hook(count)
    embeds = torch.randn(1, 6, 32, requires_grad=True)
    model(embeds, torch.arange(6)[None]).sum().backward()
    assert calls == 4  # each of 2 layers once more in the backward pass
    assert embeds.grad is not None
    assert not model.lm.model.layers[0].self_attn.training


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 100}, r"tokenizer has \d+ entries and the model 100 rows"),
        ({"hidden_sice": 8}, "hidden_size"),
        ({"model_type": "qwen33"}, "qwen3"),
        ({"hidden_size": "wide"}, "hidden_size"),
    ],
)
def test_wrong_shapes(tokenizer_dir: str, qwen3: dict[str, Any], change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(config=qwen3 | change, tokenizer=tokenizer_dir)


def test_models_that_scale_logits_are_refused(tokenizer_dir: str, qwen3: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="scales its logits"):
        make(config=qwen3 | {"model_type": "gemma2"}, tokenizer=tokenizer_dir, attention="eager")


def test_sliding_windows_have_no_independent_segments(tokenizer_dir: str, qwen3: dict[str, Any]) -> None:
    layers = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
    model = make(config=qwen3 | layers, tokenizer=tokenizer_dir)
    ids = torch.randint(5, 250, (1, 6))
    with pytest.raises(ConfigError, match="sliding_attention"):
        hidden(model, ids, torch.zeros_like(ids))


def test_bad_paths(tmp_path: Path, tokenizer_dir: str, folder: str) -> None:
    with pytest.raises(CheckpointError, match="no such folder"):
        make(path="/nowhere/at/all")
    with pytest.raises(CheckpointError, match="Without internet"):
        make(path="nobody/nothing")
    with pytest.raises(CheckpointError, match="can't be loaded"):
        make(path=tokenizer_dir)
    bare = tmp_path / "bare"
    Qwen3Config().save_pretrained(bare)
    with pytest.raises(CheckpointError, match="no tokenizer files"):
        make(path=str(bare))
    with pytest.raises(CheckpointError, match=r"no file named model\.safetensors"):
        make(path=str(bare), tokenizer=tokenizer_dir)
    (Path(folder) / "model.safetensors").write_bytes(b"cut off")
    with pytest.raises(CheckpointError, match="can't be loaded"):
        make(path=folder)
