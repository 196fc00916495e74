from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lavis_ds.errors import CheckpointError
from lavis_ds.models.conversion.stored import Stored
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
    with pytest.raises(CheckpointError, match="no such file or folder"):
        read_keys(tmp_path / "none")
    with pytest.raises(CheckpointError, match="holds no weights"):
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


def test_a_file_of_weights_needs_no_folder(make_vlm: MakeVlm, tmp_path: Path) -> None:
    model = perturbed(make_vlm)
    save_file(dict(model.named_parameters()), tmp_path / "any.name")
    assert same(make_vlm(pretrained=str(tmp_path / "any.name")), model)
    torch.save(dict(model.named_parameters()), tmp_path / "pickle")
    assert same(make_vlm(pretrained=str(tmp_path / "pickle")), model)


def test_finetuned_goes_over_pretrained_and_may_be_partial(make_vlm: MakeVlm, tmp_path: Path) -> None:
    first, second = perturbed(make_vlm), perturbed(make_vlm)
    save_weights(first.named_parameters(), tmp_path / "first")
    save_weights(((n, p) for n, p in second.named_parameters() if n.startswith("projector.")), tmp_path / "second")
    model = make_vlm(pretrained=str(tmp_path / "first"), finetuned=str(tmp_path / "second"), freeze=["vision"])
    for name, parameter in model.named_parameters():
        source = second if name.startswith("projector.") else first
        assert torch.equal(parameter, source.get_parameter(name))
    assert model.notices[0].startswith("model.pretrained: ")
    assert "model.finetuned: 4 tensors of" in model.notices[1]
    assert len(model.notices) == 2


@pytest.mark.parametrize(
    ("tensors", "freeze", "text"),
    [
        ({"projector.layers.0.bias": torch.ones(32)}, ["projector"], "none of these tensors is one that trains"),
        ({"projector.layers.0.bias": torch.ones(5)}, [], r"is \(5,\) in the file"),
        ({"stranger": torch.ones(5)}, [], "not the model's: stranger"),
    ],
)
def test_finetuned_that_does_not_fit(
    make_vlm: MakeVlm, tmp_path: Path, tensors: dict[str, torch.Tensor], freeze: list[str], text: str
) -> None:
    save_file(tensors, tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match=text):
        make_vlm(finetuned=str(tmp_path / "x.safetensors"), freeze=freeze)


def test_random_weights_are_said_loudly(make_vlm: MakeVlm, tmp_path: Path) -> None:
    model = make_vlm(freeze=["vision"])
    count = sum(p.numel() for p in model.parameters())
    expected = f"RANDOM WEIGHTS: language, projector, vision ({count:,} of {count:,} parameters)"
    assert model.notices[0].startswith(expected)
    assert model.notices[1].startswith("FROZEN WITH RANDOM WEIGHTS: vision.")
    save_weights(model.named_parameters(), tmp_path)
    assert not any("RANDOM" in line for line in make_vlm(pretrained=str(tmp_path)).notices)


def test_one_tensor_at_a_time(make_vlm: MakeVlm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_vlm()
    save_weights(model.named_parameters(), tmp_path, max_shard_bytes=20_000)
    alive: list[weakref.ref[torch.Tensor]] = []
    numbers: list[int] = []
    read = Stored.read

    def counted(self: Stored) -> torch.Tensor:
        tensor = read(self)
        alive.append(weakref.ref(tensor))
        numbers.append(sum(ref() is not None for ref in alive))
        return tensor

    monkeypatch.setattr(Stored, "read", counted)
    load_weights(model, tmp_path)
    assert numbers == [1] * len(list(model.parameters()))
