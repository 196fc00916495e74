"""The original Qwen in Qwen2's classes: logits equal a plain re-statement of `modeling_qwen.py`."""

from __future__ import annotations

import base64
import json
import weakref
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import linear, silu

from lavis_ds.errors import CheckpointError, ConfigError
from lavis_ds.models import hub
from lavis_ds.models.configs import HFCausalLMConfig
from lavis_ds.models.conversion import qwen_tokenizer
from lavis_ds.models.conversion.stored import Stored
from lavis_ds.models.language.hf_causal_lm import HFCausalLM

WIDTH, HEADS, LAYERS, HIDDEN, IDS = 32, 4, 3, 48, 500
SHAPE: dict[str, Any] = {
    "architectures": ["QWenLMHeadModel"],
    "auto_map": {"AutoConfig": "configuration_qwen.QWenConfig", "AutoModelForCausalLM": "modeling_qwen.QWenLMHead"},
    "hidden_size": WIDTH,
    "intermediate_size": 2 * HIDDEN,
    "kv_channels": WIDTH // HEADS,
    "layer_norm_epsilon": 1e-6,
    "max_position_embeddings": 256,
    "model_type": "qwen",
    "no_bias": True,
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "rotary_emb_base": 5000,
    "rotary_pct": 1.0,
    "scale_attn_weights": True,
    "seq_length": 128,
    "tie_word_embeddings": False,
    "use_dynamic_ntk": True,
    "use_logn_attn": True,
    "vocab_size": IDS,
}  # fmt: skip
MERGES = ["he", "ll", "hell", "hello", " w", "or", "ld", "orld", " world", "你", "好", "123"]


def weights(prefix: str = "", seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) / shape[-1] ** 0.5

    tensors = {"transformer.wte.weight": random(IDS, WIDTH), "lm_head.weight": random(IDS, WIDTH)}
    tensors["transformer.ln_f.weight"] = 1 + random(WIDTH)
    for n in range(LAYERS):
        tensors |= {
            f"transformer.h.{n}.ln_1.weight": 1 + random(WIDTH),
            f"transformer.h.{n}.ln_2.weight": 1 + random(WIDTH),
            f"transformer.h.{n}.attn.c_attn.weight": 2 * random(3 * WIDTH, WIDTH),
            f"transformer.h.{n}.attn.c_attn.bias": random(3 * WIDTH),
            f"transformer.h.{n}.attn.c_proj.weight": random(WIDTH, WIDTH),
            f"transformer.h.{n}.mlp.w1.weight": random(HIDDEN, WIDTH),
            f"transformer.h.{n}.mlp.w2.weight": random(HIDDEN, WIDTH),
            f"transformer.h.{n}.mlp.c_proj.weight": random(WIDTH, HIDDEN),
        }
    return {prefix + name: tensor for name, tensor in tensors.items()}


def reference(w: dict[str, Tensor], ids_BT: Tensor) -> Tensor:
    """Logits as `modeling_qwen.py` computes them in training, where neither NTK nor log-n scaling acts."""
    t, size = ids_BT.shape[1], WIDTH // HEADS
    angles = torch.outer(torch.arange(t).float(), 5000 ** -(torch.arange(0, size, 2) / size))
    cos, sin = (torch.cat([f(angles)] * 2, -1)[None, :, None] for f in (torch.cos, torch.sin))

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight

    def rotate(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat([-second, first], -1) * sin

    x = w["transformer.wte.weight"][ids_BT]
    for n in range(LAYERS):
        h = f"transformer.h.{n}."
        mixed = linear(norm(x, w[h + "ln_1.weight"]), w[h + "attn.c_attn.weight"], w[h + "attn.c_attn.bias"])
        q, k, v = (part.unflatten(-1, (HEADS, size)) for part in mixed.split(WIDTH, -1))
        scores = torch.einsum("bqhd,bkhd->bhqk", rotate(q), rotate(k)) / size**0.5
        scores = scores.masked_fill(torch.ones(t, t).triu(1).bool(), -torch.inf).softmax(-1)
        x = x + linear(torch.einsum("bhqk,bkhd->bqhd", scores, v).flatten(-2), w[h + "attn.c_proj.weight"])
        y = norm(x, w[h + "ln_2.weight"])
        gated = linear(y, w[h + "mlp.w1.weight"]) * silu(linear(y, w[h + "mlp.w2.weight"]))
        x = x + linear(gated, w[h + "mlp.c_proj.weight"])
    return linear(norm(x, w["transformer.ln_f.weight"]), w["lm_head.weight"])


def write_tokenizer(folder: Path) -> dict[bytes, int]:
    """`qwen.tiktoken` of all bytes and a few merges, which are built from the left."""
    ranks = {bytes([byte]): byte for byte in range(256)}
    for text in MERGES:
        whole = text.encode()
        for end in range(2, len(whole) + 1):
            ranks.setdefault(whole[:end], len(ranks))
    lines = [b"%s %d\n" % (base64.b64encode(token), rank) for token, rank in ranks.items()]
    (folder / "qwen.tiktoken").write_bytes(b"".join(lines))
    return ranks


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """As `Qwen/Qwen-7B-Chat`: config.json, safetensors in two shards with an index, qwen.tiktoken."""
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    tensors = weights()
    names = list(tensors)
    weight_map = {}
    for number, part in enumerate((names[:9], names[9:]), 1):
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, tmp_path / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    remote = {"auto_map": {"AutoTokenizer": ["tokenization_qwen.QWenTokenizer", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(remote))
    write_tokenizer(tmp_path)
    return tmp_path


def make(folder: Path) -> HFCausalLM:
    return HFCausalLM(HFCausalLMConfig.model_validate({"path": str(folder)})).eval()


def test_logits_equal_the_original(folder: Path) -> None:
    model = make(folder)
    assert type(model.lm).__name__ == "Qwen2ForCausalLM"
    assert model.lm.config.max_position_embeddings == 128
    ids = torch.randint(0, IDS, (2, 40))
    hidden = model(model.embed(ids), torch.arange(40).expand(2, -1))
    torch.testing.assert_close(model.logits(hidden), reference(weights(), ids), atol=1e-5, rtol=1e-5)  # measured 5e-6


def test_weights_in_bin_files(folder: Path) -> None:
    for file in folder.glob("model*"):
        file.unlink()
    torch.save(weights(), folder / "pytorch_model.bin")
    ids = torch.randint(0, IDS, (1, 8))
    model = make(folder)
    logits = model.logits(model(model.embed(ids), torch.arange(8)[None]))
    torch.testing.assert_close(logits, reference(weights(), ids), atol=1e-5, rtol=1e-5)  # measured 4e-6


def test_one_tensor_at_a_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[weakref.ref[Tensor]] = []
    most = 0
    read = Stored.read

    def counted(self: Stored) -> Tensor:
        nonlocal most
        alive[:] = [ref for ref in alive if ref() is not None]
        tensor = read(self)
        alive.append(weakref.ref(tensor))
        most = max(most, len(alive))
        return tensor

    monkeypatch.setattr(Stored, "read", counted)
    make(folder)
    assert most == 1


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"no_bias": False}, "no other no_bias"),
        ({"rotary_pct": 0.5}, "no other rotary_pct"),
        ({"kv_channels": 16}, "no other kv_channels"),
    ],
)
def test_shapes_that_qwen2_has_not(folder: Path, change: dict[str, Any], text: str) -> None:
    (folder / "config.json").write_text(json.dumps(SHAPE | change))
    with pytest.raises(ConfigError, match=text):
        make(folder)


def test_weights_that_do_not_fit_the_shape(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(SHAPE | {"num_hidden_layers": 4}))
    with pytest.raises(CheckpointError, match=r"12 tensors are missing.*model\.layers\.3\.input_layernorm"):
        make(folder)
    (folder / "config.json").write_text(json.dumps(SHAPE | {"vocab_size": 999}))
    with pytest.raises(CheckpointError, match=r"2 tensors .*another shape.*lm_head\.weight"):
        make(folder)


# the tokenizer


def plain_bpe(ranks: dict[bytes, int], piece: bytes) -> list[int]:
    """tiktoken's rule: a known piece is one token; else the pair of lowest rank is joined, again and again."""
    if piece in ranks:
        return [ranks[piece]]
    parts = [piece[i : i + 1] for i in range(len(piece))]
    while True:
        pairs = [(ranks.get(a + b), i) for i, (a, b) in enumerate(pairwise(parts))]
        known = [(rank, i) for rank, i in pairs if rank is not None]
        if not known:
            return [ranks[part] for part in parts]
        i = min(known)[1]
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("hello world", ["hello", " world"]),
        ("hellohello  worlds", ["hellohello", " ", " worlds"]),
        ("HE'LL say 123", ["HE", "'LL", " say", " ", "1", "2", "3"]),
        ("你好,world!\n\n", ["你好", ",world", "!\n\n"]),
        ("e\u0301", ["é"]),  # composed first
    ],
)
def test_tokens_equal_tiktoken_s(folder: Path, text: str, pieces: list[str]) -> None:
    ranks = write_tokenizer(folder)
    tokenizer = hub.load_tokenizer(str(folder), "model.language.tokenizer")
    expected = [i for piece in pieces for i in plain_bpe(ranks, piece.encode())]
    assert tokenizer(text).input_ids == expected
    assert tokenizer.decode(expected) == "".join(pieces)


def test_special_tokens_follow_the_file(folder: Path) -> None:
    size = len(write_tokenizer(folder))
    tokenizer = hub.load_tokenizer(str(folder), "model.language.tokenizer")
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|extra_0|>", "<|extra_204|>"]
    assert tokenizer.convert_tokens_to_ids(names) == [size, size + 1, size + 2, size + 3, size + 207]
    assert (len(tokenizer), tokenizer.eos_token, tokenizer.pad_token) == (size + 208, "<|im_end|>", "<|endoftext|>")
    assert tokenizer("<|im_start|>he<|im_end|>").input_ids == [size + 1, 256, size + 2]


def test_round_trip_through_a_folder(folder: Path, tmp_path: Path) -> None:
    tokenizer = hub.load_tokenizer(str(folder), "model.language.tokenizer")
    tokenizer.save_pretrained(tmp_path / "saved")
    again = hub.load_tokenizer(str(tmp_path / "saved"), "model.language.tokenizer")
    text = "hello 你好 <|im_end|> 12\n"
    assert again(text).input_ids == tokenizer(text).input_ids
    assert again.decode(again(text).input_ids) == text


def test_chat_template_writes_what_make_context_does(folder: Path) -> None:
    tokenizer = hub.load_tokenizer(str(folder), "model.language.tokenizer")
    turns = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_damaged_tokenizer_files(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such file"):
        qwen_tokenizer.qwen_tokenizer(tmp_path)
    path = tmp_path / "qwen.tiktoken"
    path.write_text("IQ== 0\nIg==\n")
    with pytest.raises(CheckpointError, match="damaged"):
        qwen_tokenizer.qwen_tokenizer(tmp_path)
    path.write_text("IQ== 0\nIg== 5\n")
    with pytest.raises(CheckpointError, match="ids are missing"):
        qwen_tokenizer.qwen_tokenizer(tmp_path)
