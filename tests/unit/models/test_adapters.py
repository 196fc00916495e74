from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lavis_ds.batch import Batch
from lavis_ds.config.decode import decode
from lavis_ds.errors import ConfigError
from lavis_ds.models.adapters import adapted_layers, merge_adapters
from lavis_ds.models.configs import VlmConfig
from lavis_ds.models.patterns import is_adapter
from lavis_ds.models.skeleton import skeleton
from lavis_ds.models.vlm import Vlm
from lavis_ds.models.weights import save_weights

VlmTree = Callable[..., dict[str, Any]]
MakeBatch = Callable[..., Batch]


@pytest.fixture
def build(vlm_tree: VlmTree) -> Callable[..., Vlm]:
    """A tiny model, the same weights each time; keyword arguments go into the blocks of those names."""

    def make(*, language: dict[str, Any] | None = None, vision: dict[str, Any] | None = None, **rest: Any) -> Vlm:
        tree = vlm_tree()
        tree["language"] = {**tree["language"], **(language or {})}
        tree["vision"] = {**tree["vision"], **(vision or {})}
        torch.manual_seed(0)
        return Vlm.from_config(decode(VlmConfig, {**tree, **rest}))

    return make


def randomised(model: Vlm) -> Vlm:
    """With adapters that change something."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
    return model


def adapted(model: Vlm) -> list[str]:
    return [name for name, _ in adapted_layers(model)]


def test_adapters_change_nothing_at_first_and_train_alone_beside_a_full_projector(
    build: Callable[..., Vlm], make_batch: MakeBatch
) -> None:
    model, bare = build(language={"lora": {"r": 2}}), build()
    batch = make_batch(model.tokens_per_image)
    assert torch.equal(model(batch)[0], bare(batch)[0])  # exact: B is zero
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    assert {name for name in trainable if name.startswith("language.")} == {
        name for name, _ in model.named_parameters() if is_adapter(name)
    }
    assert any(name.startswith("projector.") for name in trainable)
    model(batch)[0].backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert gradients.keys() == trainable
    assert all(gradients[name].any() for name in gradients if ".lora_B." in name)


@pytest.mark.parametrize("options", [{}, {"use_dora": True}, {"use_rslora": True}, {"init_lora_weights": "gaussian"}])
def test_merged_adapters_compute_the_same(
    build: Callable[..., Vlm], make_batch: MakeBatch, options: dict[str, Any]
) -> None:
    model = randomised(build(language={"lora": {"r": 2, **options}}, vision={"lora": {"r": 2, **options}})).eval()
    batch = make_batch(model.tokens_per_image)
    before = model(batch)[0].detach()
    assert (before - build().eval()(batch)[0]).abs() > 1e-3
    merge_adapters(model)
    torch.testing.assert_close(model(batch)[0].detach(), before, atol=1e-5, rtol=1e-6)  # measured 8e-6 of 34
    assert model.state_dict().keys() == build().state_dict().keys()


def test_adapters_of_experts_are_merged(build: Callable[..., Vlm], make_batch: MakeBatch, vlm_tree: VlmTree) -> None:
    config = {**vlm_tree()["language"]["config"], "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2}
    config["moe_intermediate_size"] = 16
    lora = {"r": 2, "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
    model = build(language={"config": config, "lora": lora}).eval()
    bare = build(language={"config": config}).eval()
    batch = make_batch(model.tokens_per_image)
    assert torch.equal(model(batch)[0], bare(batch)[0])
    before = randomised(model)(batch)[0].detach()
    assert (before - bare(batch)[0]).abs() > 1e-4
    merge_adapters(model)
    torch.testing.assert_close(model(batch)[0].detach(), before, atol=1e-5, rtol=1e-6)
    assert model.state_dict().keys() == bare.state_dict().keys()


def test_all_linear_leaves_out_the_output_layer(build: Callable[..., Vlm]) -> None:
    names = adapted(build(language={"lora": {}}))
    assert len(names) == 2 * 7
    assert not any("lm_head" in name for name in names)
    assert adapted(build(language={"lora": {"target_modules": ["lm_head"]}})) == ["language.lm.lm_head"]


def test_targets_are_ends_of_names_or_expressions(build: Callable[..., Vlm]) -> None:
    lora = {"target_modules": ["q_proj", r"lm\.model\.layers\.1\.mlp\..*"], "exclude_modules": ["up_proj"]}
    assert adapted(build(language={"lora": lora})) == [
        "language.lm.model.layers.0.self_attn.q_proj",
        "language.lm.model.layers.1.self_attn.q_proj",
        "language.lm.model.layers.1.mlp.gate_proj",
        "language.lm.model.layers.1.mlp.down_proj",
    ]


def test_some_of_the_part_may_train_in_full(build: Callable[..., Vlm]) -> None:
    model = build(language={"lora": {"also_train": ["lm.model.embed_tokens", "*norm*", "*.q_proj.weight"]}})
    trainable = {name for name, p in model.named_parameters() if p.requires_grad and not is_adapter(name)}
    assert "language.lm.model.embed_tokens.weight" in trainable
    assert "language.lm.model.norm.weight" in trainable
    assert "language.lm.model.layers.0.self_attn.q_proj.base_layer.weight" in trainable
    assert "language.lm.model.layers.0.self_attn.k_proj.base_layer.weight" not in trainable


@pytest.mark.parametrize(
    ("lora", "where", "hint"),
    [
        ({"target_modules": ["q_proj", "k_porj"]}, "model.language.lora.target_modules", "k_proj"),
        ({"exclude_modules": ["nothing"]}, "model.language.lora.exclude_modules", "down_proj"),
        ({"also_train": ["lm.model.nom"]}, "model.language.lora.also_train", "lm.model.norm"),
        ({"target_parameters": ["mlp.experts.up"]}, "model.language.lora", "mlp.experts.up"),
    ],
)
def test_names_of_nothing_are_refused(build: Callable[..., Vlm], lora: dict[str, Any], where: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(language={"lora": lora})
    assert where in str(caught.value)
    assert hint in str(caught.value)


def test_adapters_outlive_a_frozen_part(build: Callable[..., Vlm]) -> None:
    model = build(language={"lora": {}}, freeze=["language", "vision"])
    parts = {name.split(".")[0] for name, p in model.named_parameters() if p.requires_grad}
    assert parts == {"projector", "language"}
    assert not model.vision.training
    assert model.language.lm.model.layers[0].self_attn.q_proj.training


def test_dropout_of_adapters_is_on_in_training_alone(build: Callable[..., Vlm], make_batch: MakeBatch) -> None:
    model = randomised(build(language={"lora": {"lora_dropout": 0.5}}))
    batch = make_batch(model.tokens_per_image)
    assert model(batch)[0] != model(batch)[0]
    model.eval()
    assert model(batch)[0] == model(batch)[0]


def test_weights_with_and_without_adapters_are_both_taken(
    build: Callable[..., Vlm], make_batch: MakeBatch, tmp_path: Path
) -> None:
    torch.manual_seed(5)
    first = build()
    for parameter in first.parameters():
        parameter.data += 0.01 * torch.randn_like(parameter)
    save_weights(first.state_dict().items(), tmp_path / "bare")
    lora = {"lora": {"r": 2, "use_dora": True}}
    second = build(language=lora, pretrained=str(tmp_path / "bare")).eval()
    batch = make_batch(first.tokens_per_image)
    torch.testing.assert_close(second(batch)[0], first.eval()(batch)[0], atol=1e-5, rtol=1e-6)  # measured 4e-6 of 34
    randomised(second)
    save_weights(second.state_dict().items(), tmp_path / "adapted")
    third = build(language=lora, pretrained=str(tmp_path / "adapted")).eval()
    assert torch.equal(third(batch)[0], second(batch)[0])
    trained = {name: p for name, p in second.named_parameters() if p.requires_grad}
    save_weights(trained.items(), tmp_path / "trained")
    fourth = build(language=lora, pretrained=str(tmp_path / "bare"), finetuned=str(tmp_path / "trained")).eval()
    assert torch.equal(fourth(batch)[0], second(batch)[0])  # vision was left as it was in bare: it did not train


def test_a_skeleton_has_the_adapters_names(vlm_tree: VlmTree, build: Callable[..., Vlm]) -> None:
    tree = vlm_tree()
    tree["language"] = {**tree["language"], "lora": {"r": 2}, "quantize": "nf4"}
    shapes = {name: p.shape for name, p in skeleton(decode(VlmConfig, tree)).named_parameters()}
    built = build(language={"lora": {"r": 2}})
    assert shapes == {name: p.shape for name, p in built.named_parameters()}


class TestFourBits:
    @pytest.fixture(autouse=True)
    def _needs_bitsandbytes(self) -> None:
        pytest.importorskip("bitsandbytes")

    def test_the_base_is_small_and_adapters_learn(self, build: Callable[..., Vlm], make_batch: MakeBatch) -> None:
        model = build(language={"lora": {"r": 2}, "quantize": "nf4"}).to("cpu")
        weight = model.language.lm.model.layers[0].mlp.up_proj.base_layer.weight
        assert weight.dtype == torch.uint8
        assert weight.nbytes * 8 == 64 * 32 * 4
        assert model.language.lm.lm_head.weight.dtype == torch.float32
        batch = make_batch(model.tokens_per_image)
        loss, exact = model(batch)[0], build()(batch)[0]
        assert 0 < (loss - exact).abs() < 0.05 * exact  # measured 0.6 %
        loss.backward()
        assert all(p.grad is not None for p in model.parameters() if p.requires_grad)

    def test_they_can_not_be_merged(self, build: Callable[..., Vlm]) -> None:
        with pytest.raises(ConfigError, match="4-bit"):
            merge_adapters(build(language={"lora": {"r": 2}, "quantize": "nf4"}))

    def test_a_missing_package_is_named(self, build: Callable[..., Vlm], monkeypatch: pytest.MonkeyPatch) -> None:
        import sys

        monkeypatch.setitem(sys.modules, "bitsandbytes.nn", None)
        with pytest.raises(ConfigError, match=r"lavis_ds\[qlora\]"):
            build(language={"quantize": "nf4"})


class TestOwnFormat:
    """A frozen part keeps its weights in bf16 while the others train in float32."""

    def test_loss_and_gradients_are_near_those_in_float32(
        self, build: Callable[..., Vlm], make_batch: MakeBatch
    ) -> None:
        half = {"dtype": "bfloat16"}
        frozen = {"freeze": ["vision", "language"]}
        model, exact = build(vision=half, language=half, **frozen), build(**frozen)
        types = {name.split(".")[0]: p.dtype for name, p in model.named_parameters()}
        assert types == {"vision": torch.bfloat16, "projector": torch.float32, "language": torch.bfloat16}
        batch = make_batch(model.tokens_per_image)
        losses = []
        for one in (model, exact):
            loss = one(batch)[0]
            assert loss.dtype == torch.float32
            loss.backward()
            losses.append(loss.detach())
        torch.testing.assert_close(losses[0], losses[1], rtol=2e-3, atol=0)  # measured 4e-4
        for ours, theirs in zip(model.projector.parameters(), exact.projector.parameters(), strict=True):
            assert ours.grad is not None
            assert theirs.grad is not None
            assert (ours.grad - theirs.grad).norm() < 0.03 * theirs.grad.norm()  # measured 0.01

    def test_adapters_stay_in_float32(self, build: Callable[..., Vlm], make_batch: MakeBatch) -> None:
        model = build(language={"dtype": "bfloat16", "lora": {"r": 2}})
        assert {p.dtype for name, p in model.language.named_parameters() if is_adapter(name)} == {torch.float32}
        model(make_batch(model.tokens_per_image))[0].backward()
        assert all(p.grad is not None for p in model.parameters() if p.requires_grad)

    def test_weights_that_train_have_the_runs_format(self, build: Callable[..., Vlm]) -> None:
        with pytest.raises(ConfigError, match=r"model\.vision\.dtype.*model\.freeze"):
            build(vision={"dtype": "bfloat16"})
