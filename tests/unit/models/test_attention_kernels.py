"""Stretches of tokens say what the mask says, and kernels are called as each of their versions wants it."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention

from lavis_ds.batch import PADDING_SEGMENT, SEGMENT_STRIDE
from lavis_ds.errors import ConfigError
from lavis_ds.models import attention, attention_kernels
from lavis_ds.models.attention_kernels import Stretches, attention_function
from lavis_ds.models.language.segments import Boundaries, attention_mask, boundaries, rows_as_boundaries

STRIDE = SEGMENT_STRIDE
SEGMENTS: dict[str, list[list[tuple[int, int]]]] = {
    "one": [[(0, 9)]],
    "packed": [[(0, 5), (STRIDE, 1), (2 * STRIDE, 7), (PADDING_SEGMENT, 300)], [(0, 311), (STRIDE, 2)]],
    "independent": [[(0, 4), (1, 3), (2, 5), (3, 1), (STRIDE, 6), (PADDING_SEGMENT, 2)], [(0, 3), (1, 18)]],
    "in pieces": [[(0, 2), (1, 3), (2, 2), (1, 4), (0, 1), (2, 3), (STRIDE + 1, 2)]],
}
"""Rows of (segment, tokens)."""


def segment_ids(name: str) -> Tensor:
    return torch.tensor([[segment for segment, count in row for _ in range(count)] for row in SEGMENTS[name]])


def as_mask(found: Boundaries, total: int) -> Tensor:
    """(B * T, B * T), True where a query may attend to a key."""
    mask = torch.zeros(total, total, dtype=torch.bool)
    index = torch.arange(total) if found.key_index is None else found.key_index
    ends_q, ends_k = found.ends_q.tolist(), found.ends_k.tolist()
    for number in range(len(ends_q) - 1):
        queries, keys = range(ends_q[number], ends_q[number + 1]), index[ends_k[number] : ends_k[number + 1]]
        for place, query in enumerate(queries):
            mask[query, keys[: len(keys) - len(queries) + place + 1]] = True
    return mask


@pytest.mark.parametrize("name", SEGMENTS)
def test_boundaries_say_what_the_mask_says(name: str) -> None:
    ids_BT = segment_ids(name)
    found, real_F = boundaries(ids_BT, ids_BT.device), ids_BT.flatten() != PADDING_SEGMENT
    mask = as_mask(found, ids_BT.numel())
    expected = torch.block_diag(*attention_mask(ids_BT)[:, 0]).bool()
    assert torch.equal(mask[real_F], expected[real_F])
    assert mask.diagonal().all()  # padding attends to itself too
    assert not (mask[~real_F] & ~expected[~real_F]).any()
    assert (found.ends_q.dtype, found.ends_q[-1]) == (torch.int32, ids_BT.numel())
    assert found.max_q >= found.ends_q.diff().max()
    assert found.max_k >= found.ends_k.diff().max()
    for number in (found.max_q, found.max_k, len(found.ends_q) - 1):
        assert number & (number - 1) == 0, "a power of two"


def test_plain_rows_are_stretches() -> None:
    found = rows_as_boundaries((3, 5), torch.device("cpu"))
    assert (found.ends_q.tolist(), found.max_q, found.key_index) == ([0, 5, 10, 15, 15], 8, None)


def heads(rows: int, length: int, size: int, num_heads: int, num_key_heads: int) -> list[Tensor]:
    """Queries, keys and values as decoders have them, (B, H, T, D)."""
    shapes = [(rows, length, n, size) for n in (num_heads, num_key_heads, num_key_heads)]
    return [torch.randn(shape).transpose(1, 2).requires_grad_() for shape in shapes]


def layer(groups: int) -> nn.Module:
    made = nn.Module()
    made.num_key_value_groups, made.is_causal = groups, True
    return made


@pytest.mark.parametrize("name", SEGMENTS)
@pytest.mark.parametrize(("size", "num_heads", "num_key_heads"), [(64, 4, 2), (80, 2, 2), (96, 3, 1), (128, 4, 4)])
def test_with_boundaries_equals_with_a_mask(name: str, size: int, num_heads: int, num_key_heads: int) -> None:
    ids_BT = segment_ids(name)
    real_BT = ids_BT != PADDING_SEGMENT
    tensors = heads(*ids_BT.shape, size, num_heads, num_key_heads)
    attend = attention_function("varlen")
    module = layer(num_heads // num_key_heads)
    results = []
    for options in (
        {"attention_mask": attention._NO_MASK, **boundaries(ids_BT, ids_BT.device).options()},
        {"attention_mask": attention_mask(ids_BT)},
    ):
        out_BTHD, weights = attend(module, *tensors, scaling=0.2, **options)
        assert weights is None
        out = out_BTHD[real_BT]
        results.append([out, *torch.autograd.grad(out.square().sum(), tensors)])
    for ours, expected in zip(*results, strict=True):
        assert (ours - expected).norm() < 1e-5 * expected.norm()  # measured 4e-7


def test_pictures_see_all_of_themselves() -> None:
    q, k, v = (torch.randn(1, 2, 9, 8) for _ in range(3))
    ends, longest = torch.tensor([0, 4, 9], dtype=torch.int32), {"max_length_q": 5, "max_length_k": 5}
    out, _ = attention_function("varlen")(
        layer(1), q, k, v, None, is_causal=False, cu_seq_lens_q=ends, cu_seq_lens_k=ends, **longest
    )
    for part in (slice(0, 4), slice(4, 9)):
        alone = scaled_dot_product_attention(q[:, :, part], k[:, :, part], v[:, :, part]).transpose(1, 2)
        torch.testing.assert_close(out[:, part], alone, atol=1e-6, rtol=1e-5)  # measured 1e-7


def test_values_may_be_narrower_than_keys() -> None:
    ids_BT = segment_ids("independent")
    q, k, v = heads(*ids_BT.shape, 24, 2, 2)
    v = v[..., :16]
    out, _ = attention_function("varlen")(layer(1), q, k, v, None, **boundaries(ids_BT, ids_BT.device).options())
    expected = scaled_dot_product_attention(q, k, v, attention_mask(ids_BT)).transpose(1, 2)
    real_BT = ids_BT != PADDING_SEGMENT
    torch.testing.assert_close(out[real_BT], expected[real_BT], atol=1e-5, rtol=1e-5)  # measured 3e-7


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("name", SEGMENTS)
def test_block_mask_says_what_the_mask_says(name: str) -> None:
    ids_BT = segment_ids(name)
    q, k, v = heads(*ids_BT.shape, 16, 2, 2)
    q, k, v = (tensor.detach() for tensor in (q, k, v))  # on a CPU it has no backward pass
    out = flex_attention(q, k, v, block_mask=attention._block_mask(ids_BT))
    expected = scaled_dot_product_attention(q, k, v, attention_mask(ids_BT))
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)  # measured 5e-7


@pytest.mark.parametrize(
    ("argument", "message"),
    [("s_aux", "attention sinks"), ("softcap", "capped scores"), ("sliding_window", "a sliding window")],
)
def test_what_a_kernel_would_leave_out_is_refused(argument: str, message: str) -> None:
    q, k, v = heads(1, 4, 8, 2, 2)
    with pytest.raises(ConfigError, match=f"{message}, which varlen can't do"):
        attention_function("varlen")(layer(1), q, k, v, None, **{argument: 4})


HOW = Stretches(torch.tensor([0, 3]), torch.tensor([0, 3]), 4, 4, causal=True, scale=0.5)


def test_torchs_kernel_takes_what_it_is_given() -> None:
    """The arguments, in the torch that is installed, and that it has a gradient; it runs on GPUs alone."""
    q = torch.randn(10, 4, 64, device="meta", dtype=torch.bfloat16, requires_grad=True)
    k, v = (torch.randn(10, 2, 64, device="meta", dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    out = attention_kernels.load("varlen")(q, k, v, HOW)
    assert out.shape == q.shape
    assert [g.shape for g in torch.autograd.grad(out.sum(), (q, k, v))] == [q.shape, k.shape, v.shape]


def test_stretches_of_one_length_are_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """That the right tokens see each other; cuDNN's kernel itself is tested on a GPU."""

    def dense(q: Tensor, k: Tensor, v: Tensor, bias: None, with_sums: bool, *, scale: float) -> tuple[Tensor]:
        return (scaled_dot_product_attention(q, k, v, scale=scale),)

    monkeypatch.setattr(attention_kernels, "_cudnn_of_torch", dense)
    q, k, v = (torch.randn(1, 2, 12, 8) for _ in range(3))
    ends = torch.tensor([0, 4, 8, 12], dtype=torch.int32)
    options = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 4, "max_length_k": 4}
    attend = attention_function("varlen")
    found, expected = (
        attend(layer(1), q, k, v, None, is_causal=False, rows_of_one_length=rows, **options)[0] for rows in (4, 0)
    )
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)  # measured 1e-7


@pytest.mark.parametrize("gives_tuple", [False, True])
def test_packages_are_called_by_name(monkeypatch: pytest.MonkeyPatch, gives_tuple: bool) -> None:
    package = types.ModuleType("flash_attn_interface")

    def flash_attn_varlen_func(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        assert options["cu_seqlens_q"] is HOW.ends_q
        assert (options["max_seqlen_k"], options["softmax_scale"], options["causal"]) == (4, 0.5, True)
        return (q + 1, None) if gives_tuple else q + 1

    package.flash_attn_varlen_func = flash_attn_varlen_func  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn_interface", package)
    monkeypatch.setattr(attention_kernels, "_LOADED", {})
    q = torch.zeros(3, 2, 8)
    assert torch.equal(attention_kernels.load("flash_attention_3")(q, q, q, HOW), q + 1)


@pytest.mark.parametrize(
    ("kernel", "capability", "message"),
    [
        ("varlen", (7, 5), "8.0"),
        ("flash_attention_3", (10, 0), "not for GPUs of compute capability 10"),
        ("flash_attention_4", (8, 0), "not for GPUs of compute capability 8"),
        ("flash_attention_2", (9, 0), "flash-attn is not installed"),
        ("flash_attention_3", (9, 0), "flash-attn-3 is not installed"),
        ("flash_attention_4", (9, 0), "flash-attn-4 is not installed"),
        ("varlen", (9, 0), None),
        ("flex", (9, 0), None),
        ("sdpa", (7, 5), None),
    ],
)
def test_what_a_gpu_can_run(
    monkeypatch: pytest.MonkeyPatch, kernel: str, capability: tuple[int, int], message: str | None
) -> None:
    for name in ("flash_attn", "flash_attn_interface"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    reason = attention_kernels.missing(kernel)
    assert reason is None if message is None else message in str(reason)


def test_a_package_of_another_torch_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    (tmp_path / "flash_attn.py").write_text("raise ImportError('undefined symbol: _ZN3c10')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert "flash-attn can't be imported: undefined symbol" in str(attention_kernels.missing("flash_attention_2"))
