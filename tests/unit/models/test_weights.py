from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lavis_ds.errors import CheckpointError
from lavis_ds.models.vlm import Vlm
from lavis_ds.models.weights import load_weights, read_keys, save_weights

MakeVlm = Callable[..., Vlm]


def perturbed(make_vlm: MakeVlm) -> Vlm:
    model = make_vlm()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    return model


def same(a: Vlm, b: Vlm) -> bool:
    pairs = zip(a.named_parameters(), b.named_parameters(), strict=True)
    return all(n == m and torch.equal(p, q) for (n, p), (m, q) in pairs)


@pytest.mark.parametrize("shard_bytes", [2**30, 20_000], ids=["one file", "shards"])
def test_round_trip(make_vlm: MakeVlm, tmp_path: Path, shard_bytes: int) -> None:
    model = perturbed(make_vlm)
    save_weights(model.named_parameters(), tmp_path / "weights", max_shard_bytes=shard_bytes)
    files = sorted(p.name for p in (tmp_path / "weights").iterdir())
    assert (files == ["model.safetensors"]) == (shard_bytes == 2**30)
    for folder in (tmp_path, tmp_path / "weights"):
        fresh = make_vlm(pretrained=str(folder))
        assert same(fresh, model)
    assert read_keys(tmp_path).keys() == dict(model.named_parameters()).keys()


def test_shards_are_those_of_hugging_face(make_vlm: MakeVlm, tmp_path: Path) -> None:
    model = make_vlm()
    save_weights(model.named_parameters(), tmp_path, max_shard_bytes=20_000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(p.numel() * 4 for p in model.parameters())
    for name, file in index["weight_map"].items():
        assert name in load_file(tmp_path / file)


def test_other_ranks_take_part_without_writing(tmp_path: Path) -> None:
    seen = []
    save_weights(((seen.append(n) or n, torch.zeros(1)) for n in "ab"), tmp_path / "w", write=False)  # type: ignore[func-returns-value]
    assert seen == ["a", "b"]
    assert not (tmp_path / "w").exists()


def test_tensors_that_are_freed_after_their_turn(tmp_path: Path) -> None:
    def gathered() -> object:
        tensor = torch.ones(3)
        yield "a", tensor
        tensor.zero_()

    save_weights(gathered(), tmp_path)  # type: ignore[arg-type]
    assert load_file(tmp_path / "model.safetensors")["a"].tolist() == [1, 1, 1]


def test_what_a_part_has_from_elsewhere_may_be_missing(make_vlm: MakeVlm, tmp_path: Path) -> None:
    model = perturbed(make_vlm)
    save_weights(((n, p) for n, p in model.named_parameters() if n.startswith("projector.")), tmp_path)
    fresh = make_vlm()
    with pytest.raises(CheckpointError, match="tensors of the model are not in the files"):
        load_weights(fresh, tmp_path)
    fresh.vision.sourced, fresh.language.sourced = ("vit",), ("lm",)
    load_weights(fresh, tmp_path)
    assert torch.equal(fresh.projector.layers[0].weight, model.projector.layers[0].weight)


@pytest.mark.parametrize("tied", [True, False])
def test_tied_weights_are_wanted_once(
    make_vlm: MakeVlm, vlm_tree: Callable[..., dict[str, object]], tmp_path: Path, tied: bool
) -> None:
    language = vlm_tree()["language"]
    assert isinstance(language, dict)
    blocks = {"language": language | {"config": language["config"] | {"tie_word_embeddings": tied}}}
    model = make_vlm(**blocks)
    save_weights(model.named_parameters(), tmp_path)
    assert ("language.lm.lm_head.weight" in read_keys(tmp_path)) is not tied
    assert same(make_vlm(**blocks, pretrained=str(tmp_path)), model)


def test_misfits_are_counted_and_named_and_change_nothing(make_vlm: MakeVlm, tmp_path: Path) -> None:
    model, before = make_vlm(), make_vlm()
    load = dict(before.state_dict())
    model.load_state_dict(load)
    tensors = {n: torch.ones_like(p) for n, p in model.named_parameters()}
    tensors["stranger"] = tensors.pop("projector.layers.0.bias")
    tensors["projector.layers.2.bias"] = torch.zeros(5)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError) as info:
        load_weights(model, tmp_path)
    text = str(info.value)
    assert "1 of" in text
    assert "not the model's: stranger" in text
    assert "not in the files: projector.layers.0.bias" in text
    assert "projector.layers.2.bias is (5,) in the file and (32,) in the model" in text
    assert "model_type" in text
    assert same(model, before)


def test_missing_and_damaged_files(make_vlm: MakeVlm, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such folder"):
        read_keys(tmp_path / "none")
    with pytest.raises(CheckpointError, match=r"model\.safetensors is missing"):
        read_keys(tmp_path)
    save_weights(make_vlm().named_parameters(), tmp_path, max_shard_bytes=20_000)
    shard = sorted(tmp_path.glob("model-*"))[1]
    data = shard.read_bytes()
    shard.write_bytes(data[: len(data) // 2])
    with pytest.raises(CheckpointError, match=f"damaged.*|{shard.name}"):
        read_keys(tmp_path)
    shard.unlink()
    with pytest.raises(CheckpointError, match=f"{shard.name} is missing"):
        read_keys(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{")
    with pytest.raises(CheckpointError, match="index of weights is damaged"):
        read_keys(tmp_path)
