"""The kernel is chosen by what is there, packed rows come out the same through every one, and no mask is built in vain.

Kernels of variable length run on GPUs. Here SDPA takes their place, stretch by stretch; all around it is what runs
there.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils._python_dispatch import TorchDispatchMode

from lavis_ds.batch import PADDING_SEGMENT, SEGMENT_STRIDE
from lavis_ds.errors import ConfigError
from lavis_ds.models import attention, attention_kernels
from lavis_ds.models.configs import HFCausalLMConfig
from lavis_ds.models.language.hf_causal_lm import HFCausalLM
from lavis_ds.models.skeleton import without_weights

Make = Callable[..., HFCausalLM]
WHERE = "model.language.attention"
STRIDE = SEGMENT_STRIDE


@pytest.fixture
def make(tokenizer_dir: str, qwen3: dict[str, Any]) -> Make:
    def build(attention: str = "auto", gradient_checkpointing: bool = False, **shape: Any) -> HFCausalLM:
        torch.manual_seed(0)
        config = {"config": qwen3 | {"initializer_range": 0.2} | shape, "tokenizer": tokenizer_dir}
        options = {**config, "attention": attention, "gradient_checkpointing": gradient_checkpointing}
        return HFCausalLM(HFCausalLMConfig.model_validate(options)).train()

    return build


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Say which kernels this machine has."""

    def have(*kernels: str) -> None:
        monkeypatch.setattr(attention, "load", lambda _: None)
        found = {*kernels, "sdpa", "eager"}
        monkeypatch.setattr(attention, "missing", lambda kernel: None if kernel in found else f"no {kernel} here")

    return have


@pytest.fixture
def as_on_a_gpu(there: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    there("varlen")
    monkeypatch.setattr(attention, "cannot_run", lambda _: None)


LAYOUTS = {
    "packed": [[(0, 7), (SEGMENT_STRIDE, 12), (2 * SEGMENT_STRIDE, 3)], [(0, 20), (PADDING_SEGMENT, 2)]],
    "independent": [[(0, 7), (1, 4), (2, 6), (SEGMENT_STRIDE, 3)], [(0, 4), (1, 5), (2, 6), (PADDING_SEGMENT, 5)]],
}


def rows(layout: str) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, positions, segments; positions start again at each sample, and at each question behind its prefix."""
    ids, positions, segments = [], [], []
    for row in LAYOUTS[layout]:
        lengths: dict[int, int] = {}
        for segment, count in row:
            start = lengths.get(segment // SEGMENT_STRIDE * SEGMENT_STRIDE, 0)
            lengths[segment] = count
            positions += range(start, start + count)
            segments += [segment] * count
    shape = (len(LAYOUTS[layout]), -1)
    ids = torch.randint(5, 250, (len(segments),), generator=torch.Generator().manual_seed(1))
    return ids.view(shape), torch.tensor(positions).view(shape), torch.tensor(segments).view(shape)


def outputs_and_gradients(model: HFCausalLM, layout: str | None) -> dict[str, Tensor]:
    """Of rows of this layout; of plainly causal ones for None."""
    model.zero_grad()
    ids, positions, segments = rows(layout or "packed")
    real = segments != PADDING_SEGMENT
    embeds = model.embed(ids)
    hidden = model(embeds, positions, segments) if layout else model(embeds, torch.arange(ids.shape[1]).expand_as(ids))
    hidden[real].sin().sum().backward()  # squares add up to the same in every row, behind the norm
    return {"hidden": hidden[real].detach()} | {
        name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
    }


def assert_equal(ours: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert ours.keys() == expected.keys()
    for name, value in ours.items():
        error = (value - expected[name]).norm() / expected[name].norm().clamp(min=1e-3)
        assert error < 1e-5, (name, error)  # measured 9e-7


@pytest.mark.parametrize("layout", [*LAYOUTS, None])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.usefixtures("as_on_a_gpu")
def test_varlen_and_sdpa_equal_eager(make: Make, layout: str | None, recompute: bool) -> None:
    expected = outputs_and_gradients(make("eager"), layout)
    for kernel in ("sdpa", "varlen"):
        model = make(kernel, gradient_checkpointing=recompute)
        assert model.attention == kernel
        assert_equal(outputs_and_gradients(model, layout), expected)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_packed_rows_see_their_own_sample_alone(make: Make) -> None:
    model = make("varlen").eval()
    ids, positions, segments = rows("packed")
    packed = model(model.embed(ids), positions, segments)
    alone = model(model.embed(ids[:1, 7:19]), torch.arange(12)[None])
    torch.testing.assert_close(packed[:1, 7:19], alone, atol=1e-5, rtol=1e-5)  # measured 2e-6


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("layout", [*LAYOUTS, None])
def test_flex_equals_eager_and_is_told_not_to_decode(
    make: Make, there: Callable[..., None], monkeypatch: pytest.MonkeyPatch, layout: str | None
) -> None:
    """In every layer, since its kernel for decoding refuses some short rows on a GPU. Here nothing is compiled."""
    there("flex")
    told = []

    def uncompiled(*tensors: Any, training: bool, **options: Any) -> Any:
        told.append(options["kernel_options"])
        return flex_attention(*tensors, **options)

    def mask_uncompiled(*given: Any, **options: Any) -> Any:
        return create_block_mask(*given, **options | {"_compile": False})

    monkeypatch.setattr("transformers.integrations.flex_attention.compile_friendly_flex_attention", uncompiled)
    monkeypatch.setattr("transformers.masking_utils.create_block_mask", mask_uncompiled)
    ids, positions, segments = rows(layout or "packed")
    given = (positions, segments) if layout else (torch.arange(ids.shape[1]).expand_as(ids),)
    with torch.no_grad():  # on a CPU it has no backward pass
        ours, expected = (model(model.embed(ids), *given) for model in (make("flex"), make("eager")))
    real = segments != PADDING_SEGMENT
    torch.testing.assert_close(ours[real], expected[real], atol=1e-5, rtol=1e-5)  # measured 0, and 2e-6 of SDPA
    assert told == [{"FORCE_USE_FLEX_ATTENTION": True}] * 2


class LargestTensor(TorchDispatchMode):
    """Number of elements of the largest tensor that is made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.untyped_storage().nbytes() // tensor.element_size())
        return out


def largest(model: HFCausalLM, length: int) -> int:
    segments = (torch.arange(length) // 16 * SEGMENT_STRIDE)[None]
    positions = (torch.arange(length) % 16)[None]
    with LargestTensor() as seen:
        model(model.embed(torch.full((1, length), 7)), positions, segments).sum().backward()
    return seen.elements


@pytest.mark.usefixtures("as_on_a_gpu")
def test_no_mask_of_row_times_row_is_built(make: Make) -> None:
    length = 600
    assert largest(make("sdpa"), length) >= length**2
    assert largest(make("varlen"), length) < length**2 / 2  # measured 64 * 600


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("packed", [False, True])
def test_positions_are_not_searched_for_samples(make: Make, monkeypatch: pytest.MonkeyPatch, packed: bool) -> None:
    """Transformers would, waiting for the device, and then build a mask."""
    model = make("varlen")
    monkeypatch.setattr("transformers.masking_utils.find_packed_sequence_indices", None)
    ids, positions, segments = rows("packed")
    model(model.embed(ids), positions, segments if packed else None)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_generation_is_the_same(make: Make) -> None:
    prompts = torch.randint(5, 250, (2, 9))
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[0, :4] = False
    answers = []
    for kernel in ("eager", "varlen"):
        model = make(kernel).eval()
        answers.append(model.generate(model.embed(prompts), mask, max_new_tokens=5, eos_token_id=[399]).tolist())
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("found", "chosen"),
    [
        ([], "sdpa (no varlen here)"),
        (["varlen", "flex"], "varlen"),
        (["varlen", "flash_attention_2"], "flash_attention_2"),
        (["varlen", "flash_attention_2", "flash_attention_4"], "flash_attention_4"),
        (["varlen", "flash_attention_3", "flash_attention_4"], "flash_attention_3"),
    ],
)
def test_auto_takes_the_best_that_is_there(there: Callable[..., None], found: list[str], chosen: str) -> None:
    there(*found)
    assert str(attention.choose("auto", WHERE)) == chosen


@pytest.mark.parametrize("kernel", ["flash_attention_4", "flash_attention_3", "flash_attention_2", "varlen", "flex"])
def test_what_is_named_runs_or_nothing_does(make: Make, there: Callable[..., None], kernel: str) -> None:
    there()
    with pytest.raises(ConfigError, match=f"attention kernel {kernel} can't run here: no {kernel} here"):
        make(kernel)
    with without_weights():  # as where a job is planned, on a machine without GPUs
        assert make(kernel).attention == kernel


def test_named_kernel_refuses_float32_and_auto_says_that_it_falls_back(make: Make, there: Callable[..., None]) -> None:
    there("varlen")
    ids, positions, segments = rows("packed")
    model = make("varlen")
    with pytest.raises(ConfigError, match=r"varlen can't run here: tensors are on the cpu"):
        model(model.embed(ids), positions, segments)
    model(model.embed(ids), positions)  # plainly causal rows run PyTorch's causal kernel
    auto = make("auto")
    assert auto.attention == "varlen"
    with pytest.warns(UserWarning, match=r"tensors are on the cpu.*sdpa runs instead"):
        made = outputs_and_gradients(auto, "independent")
    assert_equal(made, outputs_and_gradients(make("eager"), "independent"))


WINDOWS = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (WINDOWS, "sliding_attention"),
        ({"attention_dropout": 0.1}, "dropout in attention"),
        ({"head_dim": 20}, "heads have size 20"),
        ({"head_dim": 264}, "heads have size 264"),
    ],
)
def test_what_a_model_needs_and_a_kernel_can_not_do(
    make: Make, there: Callable[..., None], shape: dict[str, Any], message: str
) -> None:
    there("varlen", "flash_attention_2")
    with pytest.raises(ConfigError, match=f"varlen can't run this model: .*{message}"):
        make("varlen", **shape)
    there("varlen")
    model = make("auto", **shape)
    assert model.attention.startswith("sdpa (")
    assert message in model.attention
    assert model.lm.config._attn_implementation == "sdpa"
    if shape is not WINDOWS:
        assert outputs_and_gradients(model.eval(), "packed")["hidden"].isfinite().all()


@pytest.mark.parametrize("kernel", ["auto", "sdpa", "flash_attention_2"])
def test_sliding_windows_are_left_to_transformers_and_do_not_pack(
    make: Make, there: Callable[..., None], kernel: str
) -> None:
    there("varlen", "flash_attention_2")
    model = make(kernel, **WINDOWS)
    assert not model.kernel.packs
    ids, positions, segments = rows("packed")
    with pytest.raises(ConfigError, match="sliding_attention"):
        model(model.embed(ids), positions, segments)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_model_made_sparse_keeps_its_kernel(make: Make) -> None:
    from lavis_ds.models.moe.configs import MoEConfig

    model = make("varlen")
    model.upcycle(MoEConfig(num_experts=2, top_k=1))
    assert model.lm.config._attn_implementation == "lavis_ds_rows_varlen"
    assert outputs_and_gradients(model, "packed")["hidden"].isfinite().all()


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_copy_is_independent(make: Make) -> None:
    model = make("varlen")
    assert_equal(
        outputs_and_gradients(copy.deepcopy(model), "independent"), outputs_and_gradients(model, "independent")
    )


@pytest.mark.usefixtures("as_on_a_gpu")
def test_compiled_layers_take_every_pack_without_a_break(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """One graph for all layers, and one more where keys are gathered; rows, samples and lengths may change."""
    monkeypatch.setattr(attention_kernels, "cannot_run", lambda _: None)
    monkeypatch.setitem(
        attention_kernels._LOADED, "varlen", lambda q, k, v, how: q * how.scale + how.ends_q.sum() + how.max_q + k.sum()
    )
    model = make("varlen", num_hidden_layers=3)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for block in model.lm.model.layers:
        block.compile(dynamic=True, fullgraph=True, backend="eager")
    for stretches in ([(0, 60), (1, 9), (2, 12)], [(0, 40), (STRIDE, 80)], [(0, 9), (STRIDE, 30), (2 * STRIDE, 7)]):
        segments = torch.tensor([[segment for segment, count in stretches for _ in range(count)]])
        model(
            model.embed(torch.full_like(segments, 7)), torch.arange(segments.shape[1])[None], segments
        ).sum().backward()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
