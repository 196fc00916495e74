from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations import moe as integration
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from lavis_ds.batch import PADDING_SEGMENT, SEGMENT_STRIDE, Batch
from lavis_ds.config.decode import decode
from lavis_ds.config.schema import RunConfig
from lavis_ds.errors import ConfigError
from lavis_ds.models.configs import VlmConfig
from lavis_ds.models.moe.load import Load
from lavis_ds.models.moe.losses import routing_sums
from lavis_ds.models.moe.routers import SUPPORTED
from lavis_ds.models.skeleton import skeleton
from lavis_ds.models.vlm import Vlm
from lavis_ds.optim.groups import param_groups

LAYERS, EXPERTS, TOP_K = 2, 6, 2
SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "num_experts_per_tok": TOP_K,
    "initializer_range": 0.2,  # large enough that routers have preferences
}
QWEN = {"num_experts": EXPERTS, "moe_intermediate_size": 24}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2_moe": {**SHAPE, **QWEN, "shared_expert_intermediate_size": 40},
    "qwen3_moe": {**SHAPE, **QWEN, "head_dim": 8, "norm_topk_prob": True},
    "mixtral": {**SHAPE, "num_local_experts": EXPERTS},
    "olmoe": {**SHAPE, "num_experts": EXPERTS},
}
"""qwen2_moe and olmoe leave the weights of the chosen experts as they are; the others make them add up to 1."""

Make = Callable[..., Vlm]


@pytest.fixture
def make(make_vlm: Callable[..., Vlm], tokenizer_dir: str) -> Make:
    """A model with experts; `moe` is its block, other options go to the language model."""

    def build(moe: dict[str, Any] | None = None, family: str = "qwen3_moe", freeze: Any = (), **language: Any) -> Vlm:
        torch.manual_seed(0)
        shape = {"model_type": family, **FAMILIES.get(family, {}), **language.pop("config", {})}
        options = {"name": "hf_causal_lm", "config": shape, "tokenizer": tokenizer_dir, **language}
        return make_vlm(language=options, freeze=list(freeze), **({} if moe is None else {"moe": moe}))

    return build


def step(model: Vlm, batch: Batch) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of one micro-batch."""
    model.zero_grad()
    loss = model(batch)[0]
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def load(model: Vlm) -> Load:
    assert model.balancer is not None
    found = model.balancer.finish_step()
    assert found is not None
    return found


def gates(gradients: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    return [g for name, g in gradients.items() if name.endswith(".gate.weight")]


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_router_gradient_equal_transformers(family: str, make: Make, make_batch: Callable[..., Batch]) -> None:
    """The padded row's padding is left out, the pictures' tokens are in, as transformers does with attention_mask."""
    coefficient = 0.5
    plain = make(family=family)
    model = make({"balance_loss": coefficient, "balance_over": "model"}, family=family)
    batch = make_batch(plain.tokens_per_image)
    alone, without = step(plain, batch)
    total, with_it = step(model, batch)

    reference: Any = plain.language.lm
    output = reference(
        inputs_embeds=plain.embed_batch(batch),
        position_ids=batch.position_ids,
        attention_mask=batch.attention_mask.long(),
        output_router_logits=True,
    )
    expected = load_balancing_loss_func(output.router_logits, EXPERTS, TOP_K, batch.attention_mask.long())
    assert isinstance(expected, torch.Tensor)
    scale = coefficient * batch.target_weight
    assert (total - alone) / scale == pytest.approx(expected.item(), abs=2e-6)  # measured 6e-7: `total` is about 40
    assert load(model).balance_loss == pytest.approx(expected.item(), abs=1e-6)  # measured 2e-7
    plain.zero_grad()
    torch.autograd.backward(scale * expected)
    wanted = gates({name: p.grad for name, p in plain.named_parameters() if p.grad is not None})
    assert len(wanted) == LAYERS
    for both, token, balance in zip(gates(with_it), gates(without), wanted, strict=True):
        torch.testing.assert_close(both - token, balance, atol=1e-5, rtol=1e-4)  # measured 4e-7
        assert balance.abs().max() > 1e-2


@pytest.mark.parametrize("key", ["balance_loss", "z_loss"])
def test_router_gradient_changes_with_the_coefficient(key: str, make: Make, make_batch: Callable[..., Batch]) -> None:
    batch = make_batch(4)
    by_value = [gates(step(make({key: value}), batch)[1]) for value in (0.0, 0.1, 0.2)]
    for none, one, two in zip(*by_value, strict=True):
        assert (one - none).abs().max() > 1e-3
        torch.testing.assert_close(two - none, 2 * (one - none), atol=1e-5, rtol=1e-3)  # measured 5e-7


def test_z_loss_is_added(make: Make, make_batch: Callable[..., Batch]) -> None:
    batch, model = make_batch(4), make({"z_loss": 0.1})
    plain = step(make(), batch)[0]
    total = step(model, batch)[0]
    found = load(model).z_loss
    assert found > 1
    assert total - plain == pytest.approx(0.1 * found * batch.target_weight, rel=1e-5)  # measured 5e-7


def test_evaluation_has_the_token_loss_alone(make: Make, make_batch: Callable[..., Batch]) -> None:
    batch, model = make_batch(4), make({"balance_loss": 1.0, "z_loss": 1.0})
    model.eval()
    assert model(batch)[0].item() == make()(batch)[0].item()
    assert model.balancer is not None
    assert model.balancer.finish_step() is None


@pytest.mark.parametrize("frozen", [False, True])
def test_recomputation_counts_once(frozen: bool, make: Make, make_batch: Callable[..., Batch]) -> None:
    batch = make_batch(4)
    moe = {"balance_loss": 0.3, "z_loss": 0.1, "aux_free_rate": 0.01}
    freeze = ["language.*.self_attn.*", "language.lm.model.embed_tokens"] if frozen else []
    models = [make(moe, freeze=freeze, gradient_checkpointing=on) for on in (False, True)]
    (loss, gradients), (again, same) = (step(model, batch) for model in models)
    assert again == loss
    assert same.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(same[name], gradient, atol=1e-6, rtol=1e-5, msg=name)  # measured 0
    one, two = (load(model).counts for model in models)
    assert torch.equal(one, two)
    assert one.sum() == LAYERS * TOP_K * batch.num_tokens


def test_packed_and_padded_rows_have_the_same_losses(make: Make, make_batch: Callable[..., Batch]) -> None:
    """Two samples of 12 and 9 tokens, in two rows or one after the other in a row of 24."""
    moe = {"balance_loss": 0.3, "z_loss": 0.1}
    padded = make_batch(4, images=0)
    packed = pack(padded, 24)
    models = make(moe), make(moe)
    losses = [step(model, batch) for model, batch in zip(models, (padded, packed), strict=True)]
    assert losses[0][0] == pytest.approx(losses[1][0], abs=1e-5)  # measured 0
    first, second = (load(model) for model in models)
    assert torch.equal(first.counts, second.counts)
    assert first.balance_loss == pytest.approx(second.balance_loss, abs=1e-6)  # measured 0
    for name, gradient in losses[0][1].items():
        torch.testing.assert_close(losses[1][1][name], gradient, atol=1e-5, rtol=1e-4, msg=name)  # measured 2e-6


def pack(batch: Batch, length: int) -> Batch:
    """The rows of a padded batch one after the other in a single one."""
    lengths = batch.attention_mask.sum(1).tolist()

    def row(values: torch.Tensor, fill: int) -> torch.Tensor:
        joined = torch.cat([values[i, :n] for i, n in enumerate(lengths)])
        return torch.nn.functional.pad(joined, (0, length - len(joined)), value=fill)[None]

    samples = torch.arange(len(lengths))[:, None].expand(batch.shape) * SEGMENT_STRIDE
    labels = row(batch.labels, -100)
    return dataclasses.replace(
        batch,
        input_ids=row(batch.input_ids, 0),
        labels=labels,
        position_ids=row(batch.position_ids, 0),
        attention_mask=row(batch.attention_mask.long(), 0).bool(),
        segment_ids=row(samples, PADDING_SEGMENT),
        target_index=(labels.flatten().roll(-1) != -100).nonzero().flatten(),
    )


def test_scope_global_counts_what_the_step_has_seen(make: Make, make_batch: Callable[..., Batch]) -> None:
    """On one rank: each micro-batch has its own probabilities, and loads of all micro-batches so far."""
    moe = {"balance_loss": 0.5, "balance_scope": "global"}
    model, plain = make(moe), make()
    batches = [make_batch(4, (12, 9), seed=0), make_batch(4, (7, 14), seed=1), make_batch(4, (5, 6), seed=2)]
    for _ in range(2):  # the second step knows nothing of the first
        counts, tokens = torch.zeros(LAYERS, EXPERTS), 0
        for batch in batches:
            assert plain.balancer is not None
            with plain.balancer.recording() as choices:
                alone = plain._outputs(plain.hidden_states(batch), batch)[0].item()
            sums = routing_sums([choices[row] for row in range(LAYERS)], batch.attention_mask.flatten())
            counts, tokens = counts + sums.counts, tokens + batch.num_tokens
            expected = EXPERTS * (counts / tokens * sums.probs / batch.num_tokens).sum(-1).mean().item()
            added = (model(batch)[0].item() - alone) / (0.5 * batch.target_weight)
            assert added == pytest.approx(expected, abs=5e-6)  # measured 6e-7
        assert torch.equal(load(model).counts, counts.double())


def test_empty_rows_change_nothing(make: Make, make_batch: Callable[..., Batch]) -> None:
    batch = make_batch(4, images=0)
    empty: dict[str, Any] = {
        "input_ids": torch.zeros(2, batch.shape[1], dtype=torch.long),
        "labels": torch.full((2, batch.shape[1]), -100),
        "position_ids": batch.position_ids,
        "attention_mask": torch.zeros(2, batch.shape[1], dtype=torch.bool),
    }
    joined: dict[str, Any] = {k: torch.cat([getattr(batch, k), rows]) for k, rows in empty.items()}
    longer = dataclasses.replace(batch, **joined)
    models = make({"balance_loss": 1.0}), make({"balance_loss": 1.0})
    one, two = step(models[0], batch)[0], step(models[1], longer)[0]
    assert one == pytest.approx(two, abs=1e-5)  # measured 0
    assert torch.equal(load(models[0]).counts, load(models[1]).counts)


def second_router(model: Vlm) -> Any:
    lm: Any = model.language.lm
    return lm.model.layers[1].mlp.gate


def test_a_bias_moves_choices_but_not_weights(make: Make) -> None:
    """Every router, with a bias that makes experts 4 and 5 the only ones, still weighs them by their probabilities."""
    for family in FAMILIES:
        model = make({"aux_free_rate": 0.1}, family=family)
        assert model.balancer is not None
        router = second_router(model)
        hidden = torch.randn(7, 32)
        logits, weights, experts = router(hidden)
        plain = second_router(make(family=family))(hidden)
        for ours, theirs in zip((logits, weights, experts), plain, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)  # measured 0
        assert model.balancer.selection_bias is not None
        model.balancer.selection_bias[1, 4:] = 2.0
        _, weights, experts = router(hidden)
        assert (experts >= 4).all()
        wanted = logits.softmax(-1).gather(-1, experts)
        if getattr(router, "norm_topk_prob", True):
            wanted = wanted / wanted.sum(-1, keepdim=True)
        torch.testing.assert_close(weights, wanted, atol=1e-6, rtol=1e-6)  # measured 0


def test_the_bias_steps_against_the_load(make: Make, make_batch: Callable[..., Batch]) -> None:
    model = make({"aux_free_rate": 0.01})
    balancer, batch = model.balancer, make_batch(4)
    assert balancer is not None
    assert balancer.selection_bias is not None
    step(model, batch)
    assert not balancer.selection_bias.any()  # not before the optimizer step ends
    counts = load(model).counts
    expected = 0.01 * (counts.mean(-1, keepdim=True) - counts).sign()
    torch.testing.assert_close(balancer.selection_bias.double(), expected, atol=1e-8, rtol=0)  # measured 2e-10
    assert "language.balancer.selection_bias" in model.state_dict()
    assert "language.balancer.selection_bias" not in make({"balance_loss": 0.1}).state_dict()
    before = balancer.selection_bias.clone()
    model.to(torch.bfloat16)
    assert torch.equal(balancer.selection_bias, before)
    unmoved = make({"aux_free_rate": 0.0})
    step(unmoved, batch)
    load(unmoved)
    assert not unmoved.state_dict()["language.balancer.selection_bias"].any()


def test_the_bias_evens_out_the_load(make: Make, make_batch: Callable[..., Batch]) -> None:
    model, batch = make({"aux_free_rate": 0.02}), make_batch(4, (40, 40))
    seen = []
    with torch.no_grad():
        for _ in range(40):
            model(batch)
            seen.append(load(model).max_load)
    assert seen[0] > 1.5
    assert max(seen[-5:]) < seen[0] - 0.25  # measured 1.76, then at most 1.28


def test_metrics(make: Make, make_batch: Callable[..., Batch]) -> None:
    model, batch = make({"load_every": 2}), make_batch(4)
    for number in (1, 2):
        step(model, batch)
        step(model, batch)
        metrics = model.before_step(number).metrics
        assert ("moe/layer_01/tokens_by_expert" in metrics) == (number == 2)
    counts = metrics["moe/layer_01/tokens_by_expert"]
    mean = 2 * TOP_K * batch.num_tokens / EXPERTS
    assert sum(counts) == pytest.approx(mean * EXPERTS)
    assert metrics["moe/layer_01/max_load"] == pytest.approx(max(counts) / mean)
    assert metrics["moe/layer_01/min_load"] == pytest.approx(min(counts) / mean)
    shares = [c / sum(counts) for c in counts if c]
    assert metrics["moe/layer_01/entropy"] == pytest.approx(-sum(p * math.log(p) for p in shares) / math.log(EXPERTS))
    assert metrics["moe/max_load"] == max(metrics[f"moe/layer_0{i}/max_load"] for i in range(LAYERS))
    assert model.before_step(3).metrics == {}


def run_options(**options: Any) -> RunConfig:
    return RunConfig.model_validate({"task": "instruct", "max_steps": 1, "batch_size_train": 1, **options})


def test_routers_have_a_learning_rate_of_their_own_that_reacts_to_load(
    make: Make, make_batch: Callable[..., Batch]
) -> None:
    rule = {"above": 1.2, "factor": 0.25}
    model = make({"gate_lr": 5e-4, "gate_lr_rule": rule, "balance_loss": 0.1})
    groups = param_groups(model, run_options(init_lr=1e-3, param_groups={"language": {"lr": 1e-5}}))
    by_lr = {group["lr"]: len(group["params"]) for group in groups if "gate" in group["name"]}
    assert by_lr == {5e-4: LAYERS}
    step(model, make_batch(4))
    settings = model.before_step(1)
    name = next(group["name"] for group in groups if "gate" in group["name"])
    assert settings.lr_factors == {name: 0.25}
    assert settings.metrics["moe/gate_lr_factor"] == 0.25
    calm = make({"gate_lr": 5e-4, "gate_lr_rule": {"above": 6.5, "factor": 0.25}})
    step(calm, make_batch(4))
    assert calm.before_step(1).lr_factors == {name: 1.0}


class Slow(Vlm):
    """A rule of one's own."""

    def gate_lr_factor(self, load: Load) -> float:
        return 1 / load.max_load


def test_a_rule_of_ones_own(make: Make, make_batch: Callable[..., Batch]) -> None:
    model = make({"gate_lr": 5e-4})
    model.__class__ = Slow
    step(model, make_batch(4))
    settings = model.before_step(1)
    assert next(iter(settings.lr_factors.values())) == pytest.approx(1 / settings.metrics["moe/max_load"])


DEEPSEEK = {
    "model_type": "deepseek_v3", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "moe_intermediate_size": 16, "num_attention_heads": 4, "num_key_value_heads": 4, "n_routed_experts": 4,
    "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8, "v_head_dim": 8, "first_k_dense_replace": 0,
}  # fmt: skip


def test_refusals(make: Make, make_vlm: Callable[..., Vlm]) -> None:
    with pytest.raises(ConfigError, match="has no experts"):
        make_vlm(moe={"balance_loss": 0.1})
    with pytest.raises(ConfigError, match=r"routers of this kind \(DeepseekV3\w+\) are not supported"):
        make({"balance_loss": 0.1}, family="deepseek_v3", config=DEEPSEEK)
    assert make(family="deepseek_v3", config=DEEPSEEK).balancer is None  # nothing was asked for
    with pytest.raises(ConfigError, match="frozen"):
        make({"balance_loss": 0.1}, freeze=["language"])
    assert make(freeze=["language"]).balancer is not None  # it only watches
    with pytest.raises(ConfigError, match="experts already"):
        make({"num_experts": 4})
    with pytest.raises(ConfigError, match="gate_lr must be given"):
        make({"gate_lr_rule": {}})
    with pytest.raises(ConfigError, match="num_experts must be given"):
        make({"every": 2})


def test_what_the_configuration_asks_for_counts_unless_said_otherwise(make: Make) -> None:
    asks = {"output_router_logits": True, "router_aux_loss_coef": 0.02}
    for moe, expected in ((None, 0.02), ({"z_loss": 0.1}, 0.02), ({"balance_loss": 0.0}, 0.0)):
        balancer = make(moe, config=asks).balancer
        assert balancer is not None
        assert balancer.coefficient == expected
    with pytest.raises(ConfigError, match="output_router_logits"):
        make(family="ernie4_5_moe", config={**SHAPE, "output_router_logits": True, "moe_num_experts": 4})


def test_what_balances_is_said(make: Make) -> None:
    moe = {"balance_loss": 0.1, "z_loss": 0.01, "aux_free_rate": 0.001, "balance_scope": "global"}
    said = "balance loss 0.1 (global, by layer), z-loss 0.01, bias in steps of 0.001"
    assert make(moe).describe()["balance of experts"] == said
    assert make().describe()["balance of experts"] == "nothing balances them"


def test_a_token_costs_the_experts_it_visits(make: Make) -> None:
    few, many = make(config={"num_experts": 4}), make(config={"num_experts": 8})
    routers = 2 * 3 * LAYERS * 4 * 32  # passes, forward and two backward products; layers; four rows more
    assert many.work().per_token - few.work().per_token == pytest.approx(routers)


def test_a_copy_is_on_its_own(make: Make, make_batch: Callable[..., Batch]) -> None:
    model = make({"aux_free_rate": 0.01, "balance_loss": 0.1})
    twin = copy.deepcopy(model)
    step(twin, make_batch(4))
    assert model.balancer is not None
    assert model.balancer.finish_step() is None
    assert load(twin).counts.sum() > 0


def test_skeleton(make: Make, vlm_tree: Callable[..., dict[str, Any]], tokenizer_dir: str) -> None:
    shape = {"model_type": "qwen3_moe", **FAMILIES["qwen3_moe"]}
    language = {"name": "hf_causal_lm", "config": shape, "tokenizer": tokenizer_dir}
    made = skeleton(decode(VlmConfig, vlm_tree(language=language, moe={"aux_free_rate": 0.01})))
    assert {tensor.device.type for tensor in made.state_dict().values()} == {"meta"}


@pytest.mark.parametrize("way", ["eager", "grouped"])
@pytest.mark.parametrize("family", FAMILIES)
def test_grouped_experts_equal_the_loop(
    family: str, way: str, make: Make, make_batch: Callable[..., Batch], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    original: Any = integration._grouped_mm

    def counted(*args: Any, **given: Any) -> Any:
        calls.append(family)
        return original(*args, **given)

    monkeypatch.setattr(integration, "_grouped_mm", counted)
    batch = make_batch(4)
    model, reference = make(family=family, experts=way), make(family=family, experts="eager")
    loss, gradients = step(model, batch)
    assert len(calls) == (2 * LAYERS if way == "grouped" else 0)
    assert model.describe()["experts"] == ("grouped_mm" if way == "grouped" else "eager")
    assert make(family=family).describe()["experts"] == "grouped_mm"
    expected, same = step(reference, batch)
    assert loss == pytest.approx(expected, abs=1e-5)  # measured 0
    for name, gradient in same.items():
        torch.testing.assert_close(gradients[name], gradient, atol=1e-5, rtol=1e-5, msg=name)  # measured 1e-6


def test_a_way_for_experts_that_are_not_there(make_vlm: Callable[..., Vlm], qwen3: Any, tokenizer_dir: str) -> None:
    language = {"name": "hf_causal_lm", "config": qwen3, "tokenizer": tokenizer_dir, "experts": "grouped"}
    with pytest.raises(ConfigError, match=r"language\.experts"):
        make_vlm(language=language)
    assert "experts" not in make_vlm().describe()


def test_every_supported_router_is_in_transformers() -> None:
    families = {*FAMILIES, "qwen3_vl_moe"}  # the last is tested in test_qwen_vl.py
    assert set(SUPPORTED.values()) == families
    shape = {k: v for k, v in FAMILIES["qwen3_moe"].items() if k != "model_type"}
    for family in FAMILIES:
        config = AutoConfig.for_model(family, **{**shape, **FAMILIES[family], "vocab_size": 16})
        auto: Any = AutoModelForCausalLM
        made = auto.from_config(config)
        assert type(made.model.layers[0].mlp.gate).__name__ in SUPPORTED


def test_adapters_beside_balanced_experts(make: Make, make_batch: Callable[..., Batch]) -> None:
    """The routers are frozen, what comes before them is not, so there is something for the loss to move."""
    lora = {"r": 2, "target_modules": ["q_proj", "v_proj"]}
    batch, by_coefficient = make_batch(4), []
    for coefficient in (0.0, 1.0):
        model = make({"balance_loss": coefficient}, lora=lora)
        gradients = step(model, batch)[1]
        assert not gates(gradients)
        by_coefficient.append([g for name, g in gradients.items() if ".lora_B." in name])
        assert load(model).counts.sum() == LAYERS * TOP_K * batch.num_tokens
    without, with_it = by_coefficient
    assert len(without) == 2 * LAYERS
    # The last layer's adapters come before its router, too.
    assert all((a - b).abs().max() > 1e-4 for a, b in zip(without, with_it, strict=True))
    trained = make({"balance_loss": 0.1, "gate_lr": 1e-4}, lora={**lora, "also_train": ["*.mlp.gate.weight"]})
    assert len(gates(step(trained, batch)[1])) == LAYERS
