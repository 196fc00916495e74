"""What a checkpoint may leave out, and how it is known again."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from lavis_ds.errors import CheckpointError
from lavis_ds.models import frozen
from lavis_ds.models.frozen import Frozen, Origin, Source
from lavis_ds.models.vlm import Vlm
from lavis_ds.models.weights import load_weights

MakeVlm = Callable[..., Vlm]
SOURCE = Source("model.language.path", "/models/a")


@pytest.mark.parametrize("shape", [(3, 4), ()])
def test_a_float32_tensor_is_known_in_16_bits_too(shape: tuple[int, ...]) -> None:
    tensor = torch.rand(shape)
    sums = frozen.checksums(tensor)
    assert set(sums) == {"float32", "bfloat16", "float16"}
    for dtype in (torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")
        assert frozen.checksums(tensor.to(dtype)) == {name: sums[name]}
    assert frozen.checksums(tensor + 1e-6)["float32"] != sums["float32"]


def test_a_view_has_the_checksum_of_its_content() -> None:
    view = torch.rand(4, 6).t()[1:3]
    assert frozen.checksums(view) == frozen.checksums(view.clone(memory_format=torch.contiguous_format))


def record(tensor: torch.Tensor) -> dict[str, Frozen]:
    return {"a.weight": Frozen(Origin(SOURCE, "weight"), frozen.checksums(tensor))}


def test_compared_in_the_formats_that_both_know() -> None:
    tensor = torch.rand(8)
    low = tensor.bfloat16()
    frozen.check(record(tensor), {"a.weight": frozen.checksums(low)}, Path("c"))
    frozen.check(record(low), {"a.weight": frozen.checksums(tensor)}, Path("c"))
    shifted = tensor.clone()
    shifted[0] += 1e-7 * shifted[0]
    assert not torch.equal(shifted, tensor)
    assert torch.equal(shifted.bfloat16(), low)
    expected = r"c: 1 of the 1 frozen .* Given: a.weight. Expected: those of model.language.path /models/a as they were"
    with pytest.raises(CheckpointError, match=expected):
        frozen.check(record(tensor), {"a.weight": frozen.checksums(shifted)}, Path("c"))


@pytest.mark.parametrize("found", [{"a.weight": frozen.checksums(torch.rand(8).half())}, {}])
def test_what_can_not_be_compared_is_refused(found: Any) -> None:
    with pytest.raises(CheckpointError, match=r"1 frozen tensors .* can't be compared.*run\.precision"):
        frozen.check(record(torch.rand(8).bfloat16()), found, Path("c"))


def test_written_and_read(tmp_path: Path) -> None:
    whole = Source("model.finetuned", "/b"), Source("model.pretrained", "/c")
    entries = {str(n): Frozen(Origin(source, "t"), {"float32": n}) for n, source in enumerate((*whole, SOURCE))}
    frozen.write(tmp_path, entries)
    assert frozen.read(tmp_path) == entries
    text = (tmp_path / frozen.FILE).read_text()
    order = sorted((*whole, SOURCE), key=lambda source: text.index(f'"{source.path}"'))
    assert order == [SOURCE, whole[1], whole[0]], "in which they were read"
    assert frozen.read(tmp_path / "other") == {}
    (tmp_path / frozen.FILE).write_text("{}")
    with pytest.raises(CheckpointError, match="damaged"):
        frozen.read(tmp_path)


@pytest.fixture
def language(make_vlm: MakeVlm, tokenizer_dir: str, tmp_path: Path) -> dict[str, Any]:
    """Options of a language model that is read from a folder."""
    make_vlm().language.lm.save_pretrained(tmp_path / "language")  # type: ignore[operator, union-attr]
    shutil.copytree(tokenizer_dir, tmp_path / "language", dirs_exist_ok=True)
    return {"name": "hf_causal_lm", "path": str(tmp_path / "language")}


def test_where_weights_come_from(make_vlm: MakeVlm, language: dict[str, Any], tmp_path: Path) -> None:
    model = make_vlm(language=language)
    source = Source("model.language.path", language["path"])
    names = {name for name, _ in model.named_parameters() if name.startswith("language.")}
    assert model.origins.keys() == names
    name = "language.lm.model.layers.0.mlp.up_proj.weight"
    assert model.origins[name] == Origin(source, "model.layers.0.mlp.up_proj.weight")
    adapted = make_vlm(language={**language, "lora": {"r": 2}}).origins
    assert adapted[name.replace(".weight", ".base_layer.weight")] == model.origins[name]
    save_file({"projector.layers.0.bias": torch.ones(32), name: torch.ones(64, 32)}, tmp_path / "b.safetensors")
    file = Source("model.finetuned", str(tmp_path / "b.safetensors"))
    other = make_vlm(language={**language, "lora": {"r": 2}}, finetuned=file.path).origins
    assert other["projector.layers.0.bias"].source == file
    assert other[name.replace(".weight", ".base_layer.weight")] == Origin(file, name)


def test_what_was_made_of_other_weights_comes_from_nowhere(make_vlm: MakeVlm, language: dict[str, Any]) -> None:
    """Routers are new in every model that was made sparse."""
    assert make_vlm(language=language, moe={"num_experts": 4, "top_k": 2}).origins == {}


def test_a_checkpoint_without_them_needs_its_source(make_vlm: MakeVlm, tmp_path: Path) -> None:
    first, folder = make_vlm(), tmp_path / "weights"
    state = {name: tensor.clone() for name, tensor in first.state_dict().items()}
    file = tmp_path / "whole.safetensors"
    save_file(state, file)
    folder.mkdir()
    save_file({n: t for n, t in state.items() if n.startswith("projector.")}, folder / "model.safetensors")
    left = {n: t for n, t in state.items() if not n.startswith("projector.")}
    source = Source("model.pretrained", str(file))
    frozen.write(folder, {n: Frozen(Origin(source, n), frozen.checksums(t)) for n, t in left.items()})
    torch.manual_seed(5)
    second = make_vlm()
    loaded = load_weights(second, tmp_path)
    assert all(torch.equal(tensor, state[name]) for name, tensor in second.state_dict().items())
    assert loaded.names == state.keys()
    assert f"{len(left)} more, which it leaves out, from model.pretrained {file}." in loaded.notices[1]
    file.unlink()
    with pytest.raises(CheckpointError, match=rf"they can't be read: there is no such .*{file}.*link"):
        load_weights(make_vlm(), tmp_path)
