"""On one GPU: every attention kernel that is there gives what the float32 reference with a mask gives, in bf16."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

from lavis_ds.batch import PADDING_SEGMENT, SEGMENT_STRIDE
from lavis_ds.errors import ConfigError
from lavis_ds.models.attention import Attention, choose
from lavis_ds.models.attention_kernels import attention_function, load, missing
from lavis_ds.models.language.segments import attention_mask, boundaries
from lavis_ds.models.vision.qwen_vl_tower import QwenVLTower

pytestmark = pytest.mark.gpu

VARLEN = ["varlen", "flash_attention_2", "flash_attention_3", "flash_attention_4"]
TOLERANCE = 0.01
"""Of ||out - reference|| / ||reference|| in bf16."""


def require(kernel: str) -> None:
    if reason := missing(kernel):
        pytest.skip(reason)


def segment_ids(kind: str, length: int) -> Tensor:
    """(2, length): packed samples, or a prefix with questions that do not see each other; and padding."""
    stretches = {
        "packed": [[(n * SEGMENT_STRIDE, m) for n, m in enumerate((300, 1, 513, 64))], [(0, 700)]],
        "independent": [[(0, 200), (1, 40), (2, 61), (3, 128), (SEGMENT_STRIDE, 90)], [(0, 129), (1, 300), (2, 7)]],
    }[kind]
    rows = [[segment for segment, count in row for _ in range(count)] for row in stretches]
    return torch.tensor([row + [PADDING_SEGMENT] * (length - len(row)) for row in rows], device="cuda")


def error(value: Tensor, reference: Tensor) -> float:
    return float((value.double() - reference.double()).norm() / reference.double().norm())


@pytest.mark.parametrize("kind", ["packed", "independent"])
@pytest.mark.parametrize(("size", "heads", "key_heads"), [(64, 4, 2), (80, 4, 4), (96, 6, 2), (128, 16, 8)])
@pytest.mark.parametrize("kernel", VARLEN)
def test_kernels_equal_the_reference(kernel: str, size: int, heads: int, key_heads: int, kind: str) -> None:
    """Measured on an H200 with torch's kernel: 2.5e-3 forward, 3.5e-3 backward."""
    require(kernel)
    load(kernel)
    ids_BT = segment_ids(kind, 1000)
    real_BT = ids_BT != PADDING_SEGMENT
    tensors = [
        torch.randn(2, 1000, n, size, device="cuda", dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
        for n in (heads, key_heads, key_heads)
    ]
    exact = [tensor.detach().float().requires_grad_() for tensor in tensors]
    module = nn.Module()
    module.is_causal, module.num_key_value_groups = True, heads // key_heads  # type: ignore[assignment]
    out = attention_function(kernel)(module, *tensors, None, **boundaries(ids_BT, ids_BT.device).options())[0][real_BT]
    expected = scaled_dot_product_attention(
        *exact, attn_mask=attention_mask(ids_BT), enable_gqa=heads != key_heads
    ).transpose(1, 2)[real_BT]
    weights = torch.randn_like(expected)
    found = torch.autograd.grad((out.float() * weights).sum(), tensors)
    reference = torch.autograd.grad((expected * weights).sum(), exact)
    for ours, other in zip((out, *found), (expected, *reference), strict=True):
        assert error(ours, other) < TOLERANCE


SHAPE: dict[str, Any] = {
    "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 128, "pad_token_id": None, "initializer_range": 0.05,
}  # fmt: skip


def decoder(kernel: str, dtype: torch.dtype, **change: Any) -> tuple[Any, Attention]:
    torch.manual_seed(0)
    chosen = choose(kernel, "model.language.attention")
    config = AutoConfig.for_model("qwen3", **SHAPE | change)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=chosen.build_with).cuda().to(dtype)
    return model, chosen.fitted(model)


def run(model: Any, kernel: Attention, ids_BT: Tensor | None, embeds_BTD: Tensor, real_BT: Tensor) -> list[Tensor]:
    """Hidden states of real tokens, and the gradients of the embeddings and of all weights."""
    embeds = embeds_BTD.detach().to(next(model.parameters()).dtype).requires_grad_()
    options = kernel.options(embeds, ids_BT)
    hidden = model.model(inputs_embeds=embeds, position_ids=positions(ids_BT, embeds), use_cache=False, **options)[0]
    hidden[real_BT].float().sin().sum().backward()
    gradients = [p.grad.clone() for p in model.model.parameters() if p.grad is not None]
    model.zero_grad()
    return [hidden[real_BT].detach(), embeds.grad[real_BT], *gradients]  # type: ignore[index]


def positions(ids_BT: Tensor | None, embeds: Tensor) -> Tensor:
    """From the start of each segment on; any will do that are the same for every kernel."""
    place_BT = torch.arange(embeds.shape[1], device="cuda").expand(embeds.shape[:2])
    if ids_BT is None:
        return place_BT
    starts_BT = torch.nn.functional.pad(ids_BT[:, 1:] != ids_BT[:, :-1], (1, 0), value=True)
    return place_BT - (place_BT * starts_BT).cummax(1).values


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("kind", ["packed", "independent", None])
@pytest.mark.parametrize("kernel", ["sdpa", "eager", "flex", *VARLEN])
def test_decoders_equal_the_reference(kernel: str, kind: str | None, recompute: bool) -> None:
    """Measured: 6e-3 forward, 1.5e-2 backward, as eager in bf16 against itself in float32."""
    require(kernel)
    embeds = torch.randn(2, 1000, 512, device="cuda")
    ids_BT = segment_ids(kind, 1000) if kind else None
    real_BT = segment_ids(kind or "packed", 1000) != PADDING_SEGMENT
    expected = run(*decoder("eager", torch.float32), ids_BT, embeds, real_BT)
    bf16 = run(*decoder("eager", torch.bfloat16), ids_BT, embeds, real_BT)
    model, chosen = decoder(kernel, torch.bfloat16)
    if recompute:
        model.train().gradient_checkpointing_enable({"use_reentrant": False})
    for ours, rounded, reference in zip(run(model, chosen, ids_BT, embeds, real_BT), bf16, expected, strict=True):
        assert error(ours, reference) < 1.5 * error(rounded, reference) + 2e-3


@pytest.mark.parametrize("kernel", ["auto", "flex"])
def test_packed_equals_unpacked(kernel: str) -> None:
    """Measured: 4e-3."""
    require(kernel if kernel != "auto" else "varlen")
    model, chosen = decoder(kernel, torch.bfloat16)
    ids_BT = segment_ids("packed", 878)[:1]
    embeds = torch.randn(1, 878, 512, device="cuda")
    packed = run(model, chosen, ids_BT, embeds, ids_BT >= 0)
    for segment in ids_BT.unique():
        part = (ids_BT == segment)[0]
        alone = run(model, chosen, None, embeds[:, part], torch.ones(1, int(part.sum()), dtype=torch.bool))
        for ours, other in zip(packed[:2], alone[:2], strict=True):
            assert error(ours[part], other) < TOLERANCE


def peak(model: Any, chosen: Attention, length: int) -> int:
    """Bytes above what was there before a forward pass of packed samples of 256 tokens."""
    ids_BT = (torch.arange(length, device="cuda") // 256 * SEGMENT_STRIDE)[None]
    embeds = torch.zeros(1, length, 512, device="cuda", dtype=torch.bfloat16)
    place = positions(ids_BT, embeds)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.no_grad():
        model.model(inputs_embeds=embeds, position_ids=place, use_cache=False, **chosen.options(embeds, ids_BT))
    return torch.cuda.max_memory_allocated() - before


def test_no_mask_of_row_times_row_is_built() -> None:
    require("varlen")
    length = 32_768
    assert peak(*decoder("sdpa", torch.bfloat16), length) > length**2
    assert peak(*decoder("varlen", torch.bfloat16), length) < length**2 / 2  # measured 270 MB of 1.07 GB


def test_layers_do_not_wait_for_the_device() -> None:
    require("varlen")
    model, chosen = decoder("varlen", torch.bfloat16)
    embeds = torch.randn(2, 1000, 512, device="cuda", dtype=torch.bfloat16)
    for ids_BT in (segment_ids("independent", 1000), None):
        options, place = chosen.options(embeds, ids_BT), positions(ids_BT, embeds)
        torch.cuda.set_sync_debug_mode("error")
        try:
            model.model(inputs_embeds=embeds, position_ids=place, use_cache=False, **options)[0].sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def kernels_of(function: Callable[[], Any]) -> set[str]:
    function()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        function()
        torch.cuda.synchronize()
    return {event.key for event in profile.key_averages()}


def test_autocast_runs_the_kernel_over_float32_weights() -> None:
    require("varlen")
    model, chosen = decoder("varlen", torch.float32)
    ids_BT = segment_ids("packed", 1000)
    embeds = torch.randn(2, 1000, 512, device="cuda")

    def forward() -> list[Tensor]:
        with torch.autocast("cuda", torch.bfloat16):
            return run(model, chosen, ids_BT, embeds, ids_BT != PADDING_SEGMENT)

    names = kernels_of(forward)
    assert any("flash_fwd" in name for name in names), sorted(names)
    assert any("flash_bwd" in name for name in names), sorted(names)
    expected = run(*decoder("eager", torch.float32), ids_BT, embeds, ids_BT != PADDING_SEGMENT)
    assert error(forward()[0], expected[0]) < 0.02  # measured 5e-3


def test_float32_falls_back_or_is_refused() -> None:
    require("varlen")
    ids_BT = segment_ids("packed", 1000)
    embeds = torch.randn(2, 1000, 512, device="cuda")
    real_BT = ids_BT != PADDING_SEGMENT
    expected = run(*decoder("eager", torch.float32), ids_BT, embeds, real_BT)
    with pytest.warns(UserWarning, match="float32, not bfloat16"):
        found = run(*decoder("auto", torch.float32), ids_BT, embeds, real_BT)
    assert error(found[0], expected[0]) < 1e-5  # measured 1e-6
    with pytest.raises(ConfigError, match="float32, not bfloat16"):
        run(*decoder("varlen", torch.float32), ids_BT, embeds, real_BT)


@pytest.mark.parametrize(("hidden", "heads"), [(320, 4), (512, 8), (288, 4)])
def test_towers_run_pictures_in_one_call(hidden: int, heads: int) -> None:
    """Heads of 80, 64 and 72. Measured: 4e-3."""
    require("varlen")
    shape = {"depth": 2, "hidden_size": hidden, "num_heads": heads, "intermediate_size": 512, "out_hidden_size": 64}
    config = AutoConfig.for_model("qwen3_vl_vision", **shape, deepstack_visual_indexes=[0], initializer_range=0.05)
    grids = torch.tensor([[1, 16, 20], [1, 8, 8], [2, 12, 12]])

    def made(kernel: str) -> tuple[Tensor, set[str]]:
        torch.manual_seed(0)
        model = Qwen3VLVisionModel._from_config(config).cuda().bfloat16()
        tower = QwenVLTower(model, (0.5,) * 3, (0.5,) * 3, choose(kernel, "model.vision.attention")).cuda()
        rng = torch.Generator().manual_seed(1)
        shape = (int(grids.prod(-1).sum()), tower.patch_elements)
        patches = torch.randint(0, 255, shape, dtype=torch.uint8, generator=rng).cuda()
        tokens = tower(patches, grids)[0]
        return tokens, kernels_of(lambda: tower(patches, grids)[0].sum().backward())

    (expected, _), (found, names) = made("eager"), made("varlen")
    assert error(found, expected) < 0.02
    assert any("flash_fwd" in name for name in names), sorted(names)


def test_pictures_of_one_size_run_cudnns_kernel() -> None:
    """Compiled, with one graph for batches of any number of pictures, and one for pictures of several sizes."""
    require("varlen")
    if torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("this GPU runs FlashAttention for all pictures")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    shape = {"depth": 3, "hidden_size": 256, "num_heads": 4, "intermediate_size": 512, "out_hidden_size": 128}

    def run(part: QwenVLTower, patches: Tensor, grids: Tensor) -> list[Tensor]:
        part.zero_grad()
        part(patches, grids)[0].float().sin().sum().backward()
        return [p.grad.clone() for p in part.parameters() if p.grad is not None]

    def made(kernel: str) -> QwenVLTower:
        torch.manual_seed(0)
        config = AutoConfig.for_model("qwen3_vl_vision", **shape, deepstack_visual_indexes=[1], initializer_range=0.05)
        model = Qwen3VLVisionModel._from_config(config).cuda().bfloat16()
        return QwenVLTower(model, (0.5,) * 3, (0.5,) * 3, choose(kernel, "model.vision.attention")).cuda()

    ours, plain, reference, results = made("auto"), made("varlen"), made("eager").float(), list[list[Tensor]]()
    for block in ours.tower.blocks:
        block.compile(dynamic=True, fullgraph=True)
    for sizes in ([[1, 28, 28]] * 3, [[1, 28, 28]] * 5, [[1, 28, 28], [1, 20, 16]], [[2, 20, 16]]):
        grids = torch.tensor(sizes)
        num_patches = int(grids.prod(-1).sum())
        patches = torch.randint(0, 255, (num_patches, ours.patch_elements), dtype=torch.uint8, device="cuda")
        names = kernels_of(partial(lambda *batch: results.append(run(ours, *batch)), patches, grids))
        others, exact = run(plain, patches, grids), run(reference, patches, grids)
        for gradient, other, expected in zip(results[-1], others, exact, strict=True):
            assert error(gradient, expected) < max(TOLERANCE, 2 * error(other, expected))
        is_uniform = len({(height, width) for _, height, width in sizes}) == 1  # `kernels_of` runs it twice
        assert any("cudnn" in name for name in names) == is_uniform, sorted(names)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 4  # the first block's input is a view


def test_one_graph_for_all_layers_and_packs() -> None:
    """And one more where keys are gathered, as in rows of independent questions."""
    require("varlen")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model, chosen = decoder("varlen", torch.bfloat16)
    plain, _ = decoder("varlen", torch.bfloat16)
    for layer in model.model.layers:
        layer.compile(dynamic=True, fullgraph=True)
    embeds = torch.randn(2, 1000, 512, device="cuda")
    for kind in ("packed", "independent", "packed"):
        ids_BT = segment_ids(kind, 1000).flip(0)
        found = run(model, chosen, ids_BT, embeds, ids_BT != PADDING_SEGMENT)
        expected = run(plain, chosen, ids_BT, embeds, ids_BT != PADDING_SEGMENT)
        for ours, other in zip(found, expected, strict=True):
            assert error(ours, other) < 0.03  # fused kernels round less often
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2


def test_generation_is_the_same() -> None:
    require("varlen")
    prompts = torch.randint(0, 128, (2, 9), device="cuda")
    mask = torch.ones(2, 9, dtype=torch.long, device="cuda")
    mask[0, :4] = 0
    answers = []
    for kernel in ("eager", "varlen"):
        model, _ = decoder(kernel, torch.float32)
        answers.append(model.eval().generate(prompts, attention_mask=mask, max_new_tokens=6, do_sample=False).tolist())
    assert answers[0] == answers[1]
