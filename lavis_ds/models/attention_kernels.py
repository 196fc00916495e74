"""Attention over stretches of tokens of any length, by the kernels of PyTorch and of the FlashAttention packages.

Shape suffixes: N queries, M keys, H heads, D head size, B rows, T tokens a row.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from lavis_ds.errors import ConfigError

_HALF = (torch.float16, torch.bfloat16)

_PACKAGES = {
    "flash_attention_4": ("flash_attn.cute", "flash-attn-4", range(9, 100)),
    "flash_attention_3": ("flash_attn_interface", "flash-attn-3", range(9, 10)),
    "flash_attention_2": ("flash_attn", "flash-attn", range(8, 100)),
}
"""Kernel -> module, package, and the major compute capabilities of the GPUs it is for."""


_SHORT = 128
"""Tokens up to which cuDNN is no faster."""

_ROWS = 4
"""Numbers of rows that cuDNN's kernel is planned for are multiples of it."""

_flash_of_torch = torch.ops.aten._flash_attention_forward
_cudnn_of_torch = torch.ops.aten._scaled_dot_product_cudnn_attention

_UNKNOWN = {"s_aux": "attention sinks", "softcap": "capped scores", "sliding_window": "a sliding window"}
"""Arguments of transformers' layers that these kernels leave out."""


class Stretches(NamedTuple):
    """How queries and keys belong together; see `lavis_ds.models.language.segments.Boundaries`.

    Attributes:
        ends_q: (S + 1,) int32.
        ends_k: (S + 1,) int32.
        max_q: no stretch has more queries.
        max_k: no stretch has more keys.
        causal: the last query of a stretch sees the last key, the one before it the key before, and so on.
        scale: of scores.
    """

    ends_q: Tensor
    ends_k: Tensor
    max_q: int
    max_k: int
    causal: bool
    scale: float


Kernel = Callable[[Tensor, Tensor, Tensor, Stretches], Tensor]
"""Queries (N, H, D), keys and values (M, Hk, D) -> (N, H, D)."""


def missing(kernel: str) -> str | None:
    """Why this machine can't run `kernel`; None where it can."""
    if kernel in ("sdpa", "eager"):
        return None
    if not torch.cuda.is_available():
        return "there is no NVIDIA GPU"
    if kernel == "flex":
        return None
    if torch.version.hip is not None and kernel != "flash_attention_2":
        return "it is for NVIDIA GPUs"
    major = torch.cuda.get_device_capability()[0]
    if kernel == "varlen":
        return None if major >= 8 else f"it needs compute capability 8.0, and the GPU has {major}"
    module, package, majors = _PACKAGES[kernel]
    if torch.version.hip is None and major not in majors:
        return f"it is not for GPUs of compute capability {major}"
    return _import_failure(module, package)


def cannot_run(tensor: Tensor) -> str | None:
    """Why kernels of variable length can't run tensors of this kind; None where they can."""
    kind = tensor.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else tensor.dtype
    if kind != "cuda":
        return f"tensors are on the {kind}"
    return None if dtype in _HALF else f"tensors are {str(dtype).removeprefix('torch.')}, not bfloat16 or float16"


_LOADED: dict[str, Kernel] = {}


def load(kernel: str) -> Kernel:
    """The function, which is there (see `missing`). Called when a model is made: compiled layers can't import."""
    if kernel not in _LOADED:
        _LOADED[kernel] = _varlen if kernel == "varlen" else _flash(kernel)
    return _LOADED[kernel]


def _flash(kernel: str) -> Kernel:
    function = importlib.import_module(_PACKAGES[kernel][0]).flash_attn_varlen_func

    def flash(q: Tensor, k: Tensor, v: Tensor, how: Stretches) -> Tensor:
        ends = {"cu_seqlens_q": how.ends_q, "cu_seqlens_k": how.ends_k}
        most = {"max_seqlen_q": how.max_q, "max_seqlen_k": how.max_k}
        made = function(q, k, v, **ends, **most, softmax_scale=how.scale, causal=how.causal)
        out: Tensor = made[0] if isinstance(made, tuple) else made  # some versions give the log-sum-exp too
        return out

    return flash


def attention_function(kernel: str) -> Callable[..., tuple[Tensor, None]]:
    """What transformers calls in every layer: `kernel` where it is told the stretches' ends, SDPA where not.

    So right-padded rows and generation run PyTorch's causal kernels, and packed rows this one.
    """

    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        cu_seq_lens_q: Tensor | None = None,
        cu_seq_lens_k: Tensor | None = None,
        max_length_q: int = 0,
        max_length_k: int = 0,
        key_index: Tensor | None = None,
        rows_of_one_length: int = 0,
        **others: Any,
    ) -> tuple[Tensor, None]:
        _refuse(kernel, others)
        if cu_seq_lens_q is None or cu_seq_lens_k is None:
            mask = None if attention_mask is None or attention_mask.numel() == 0 else attention_mask
            out_BTHD, _ = sdpa_attention_forward(
                module, query, key, value, mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **others
            )
            return out_BTHD, None
        function = _LOADED[kernel] if cannot_run(query) is None else _one_by_one
        if rows_of_one_length:
            function = partial(of_one_length, rows=rows_of_one_length)
        causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        q_NHD, k_MHD, v_MHD = (_flat(tensor, value.dtype) for tensor in (query, key, value))
        if key_index is not None:
            k_MHD, v_MHD = k_MHD[key_index], v_MHD[key_index]
        out_NHD = function(
            q_NHD,
            k_MHD,
            _widened(v_MHD, q_NHD.shape[-1]),
            Stretches(cu_seq_lens_q, cu_seq_lens_k, _number(max_length_q), _number(max_length_k), causal, scale),
        )
        rows, length = query.shape[0], query.shape[2]
        return out_NHD[..., : value.shape[-1]].reshape(rows, length, *out_NHD.shape[1:-1], value.shape[-1]), None

    return attend


def _widened(v_MHD: Tensor, size: int) -> Tensor:
    """Kernels want values as wide as keys; DeepSeek's are narrower. Padding by nothing would copy."""
    return v_MHD if v_MHD.shape[-1] == size else functional.pad(v_MHD, (0, size - v_MHD.shape[-1]))


def _number(length: int | Tensor) -> int:
    """Older versions of transformers give a tensor; in compiled layers numbers are symbols, and stay so."""
    return int(length) if isinstance(length, Tensor) else length


def _refuse(kernel: str, others: dict[str, Any]) -> None:
    """Raises:
    ConfigError: the layer asks for something that would be left out.
    """
    for name, what in _UNKNOWN.items():
        if others.get(name) is not None:
            raise ConfigError(
                f"this model has {what}, which {kernel} can't do here.",
                where="model.language.attention",
                hint="Set it to sdpa or eager.",
            )


def _flat(rows_BHTD: Tensor, dtype: torch.dtype) -> Tensor:
    """(B * T, H, D). Norms of queries and keys give float32 in autocast, which the kernels don't take."""
    kind = rows_BHTD.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else dtype
    return rows_BHTD.transpose(1, 2).flatten(0, 1).to(dtype)


def _varlen(q: Tensor, k: Tensor, v: Tensor, how: Stretches) -> Tensor:
    """What `torch.nn.attention.varlen` calls, without its layers in Python: the host saves 0.3 ms a layer and step."""
    return _flash_of_torch(  # type: ignore[no-any-return]
        q, k, v, *how[:4], 0.0, how.causal, False, scale=how.scale
    )[0]


def of_one_length(q_NHD: Tensor, k_NHD: Tensor, v_NHD: Tensor, how: Stretches, rows: int) -> Tensor:
    """Stretches that are all as long as the longest, each seeing all of itself: rows of a batch, for cuDNN's kernel.

    For pictures of 784 patches on an H200 it takes 0.6 times the time of FlashAttention 2.

    Args:
        q_NHD: queries.
        k_NHD: keys.
        v_NHD: values.
        how: their stretches.
        rows: `planned_rows` of their number; those at the end are empty.
    """
    empty = rows * how.max_q - q_NHD.shape[0]
    padded = (functional.pad(tensor, (0, 0, 0, 0, 0, empty)) for tensor in (q_NHD, k_NHD, v_NHD))
    q_SHLD, k_SHLD, v_SHLD = (t.view(rows, how.max_q, *t.shape[1:]).transpose(1, 2) for t in padded)
    out_SHLD = _cudnn_of_torch(q_SHLD, k_SHLD, v_SHLD, None, True, scale=how.scale)[0]
    return out_SHLD.transpose(1, 2).flatten(0, 1)[: q_NHD.shape[0]]  # type: ignore[no-any-return]


def planned_rows(rows: int) -> int:
    """A few more, since cuDNN plans its kernel for each number; at least one, since none would be another graph."""
    return rows + _ROWS - rows % _ROWS


def can_run_one_length(tensor: Tensor, length: int, head_size: int) -> bool:
    """Whether `of_one_length` runs tensors of this kind, and faster than the kernels for all lengths."""
    if cannot_run(tensor) is not None or torch.version.hip is not None or not torch.backends.cudnn.is_available():  # type: ignore[no-untyped-call]
        return False
    is_new = torch.cuda.get_device_capability(tensor.device)[0] >= 9
    return is_new and length > _SHORT and head_size <= 128 and head_size % 8 == 0


def _one_by_one(q: Tensor, k: Tensor, v: Tensor, how: Stretches) -> Tensor:
    """Stretch by stretch through SDPA, for vision towers in float32 or on a CPU."""
    made = []
    for (a, b), (c, d) in zip(pairwise(how.ends_q.tolist()), pairwise(how.ends_k.tolist()), strict=True):
        if b == a:
            continue
        unseen = d - c - (b - a)
        mask = torch.ones(b - a, d - c, dtype=torch.bool, device=q.device).tril(unseen) if how.causal else None
        q_1HND, k_1HMD, v_1HMD = (tensor.transpose(0, 1)[None] for tensor in (q[a:b], k[c:d], v[c:d]))
        out_1HND = functional.scaled_dot_product_attention(
            q_1HND, k_1HMD, v_1HMD, mask, scale=how.scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        made.append(out_1HND[0].transpose(0, 1))
    return torch.cat(made)


def _import_failure(module: str, package: str) -> str | None:
    """In one line, why `module` can't be used; a compiled package of another torch fails on import."""
    try:
        if importlib.util.find_spec(module) is None:
            return f"the package {package} is not installed"
        found = importlib.import_module(module)
    except ModuleNotFoundError:
        return f"the package {package} is not installed"
    except (ImportError, OSError, RuntimeError) as error:
        return f"the package {package} can't be imported: {' '.join(str(error).split())[:200]}"
    return None if hasattr(found, "flash_attn_varlen_func") else f"the package {package} is not installed"
