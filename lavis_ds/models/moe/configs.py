"""Options of models with experts. No torch here."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from lavis_ds.config.base import Config


class GateLrRuleConfig(Config):
    """Slows the routers down while experts are unevenly loaded."""

    above: float = Field(2.0, gt=1, description="largest load of an expert, as a multiple of its layer's mean")
    factor: float = Field(0.1, ge=0, description="what gate_lr is multiplied by in a step whose load is above that")


class MoEConfig(Config):
    """Balance of the experts of a sparse language model, and how a dense one becomes sparse."""

    balance_loss: float | None = Field(
        None,
        ge=0,
        description="coefficient of the balance loss; where left out, router_aux_loss_coef of a config.json that asks "
        "for it with output_router_logits, else 0",
    )
    balance_over: Literal["layer", "model"] = Field(
        "layer", description="layer: each layer is balanced; model: the mean over layers is, as in transformers"
    )
    balance_scope: Literal["micro", "global"] = Field(
        "micro",
        description="tokens that loads are counted over: a rank's micro-batch, or all that the optimizer step has seen",
    )
    z_loss: float = Field(0.0, ge=0, description="coefficient of the z-loss, which keeps router logits small")
    aux_free_rate: float | None = Field(
        None,
        ge=0,
        description="change per optimizer step of the bias that experts are chosen with; 0 keeps it; null: no bias",
    )
    gate_lr: float | None = Field(None, gt=0, description="peak learning rate of the routers; run.init_lr if left out")
    gate_lr_rule: GateLrRuleConfig | None = Field(None, description="lowers gate_lr while experts are uneven")
    load_every: int | None = Field(
        100, ge=1, description="optimizer steps between full lists of tokens by expert in metrics.jsonl; null: never"
    )
    num_experts: int | None = Field(None, ge=2, description="makes a dense language model sparse: experts a layer")
    top_k: int = Field(2, ge=1, description="with num_experts: experts a token is sent to")
    every: int = Field(1, ge=1, description="with num_experts: every so many layers one has experts")
    init: Literal["copy"] = Field("copy", description="with num_experts: each expert starts as the dense layer")

    @model_validator(mode="after")
    def _check_combinations(self) -> MoEConfig:
        if self.num_experts is None and (self.top_k, self.every) != (2, 1):
            raise ValueError("top_k and every say how a dense model becomes sparse, so num_experts must be given too")
        if self.num_experts is not None and self.top_k > self.num_experts:
            raise ValueError(f"top_k ({self.top_k}) is larger than num_experts ({self.num_experts})")
        if self.gate_lr_rule is not None and self.gate_lr is None:
            raise ValueError("gate_lr_rule lowers gate_lr, so gate_lr must be given too")
        return self
