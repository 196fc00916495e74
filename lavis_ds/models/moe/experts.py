"""How experts run: all in one grouped product, or one after the other."""

from __future__ import annotations

from typing import Any, Literal

from lavis_ds.errors import ConfigError
from lavis_ds.models.moe.grouped import NAME


def choose_experts(lm: Any, option: Literal["auto", "grouped", "eager"]) -> str | None:
    """Set how the experts of a model of transformers run; the name of the way, None where it has none.

    The grouped product is `torch.nn.functional.grouped_mm` where it runs (CPU; GPUs from compute capability 8.0), else
    transformers' own products, one an expert.

    Raises:
        ConfigError: `grouped` is asked for, and this model's experts can't be grouped.
    """
    if not _has_experts(lm):
        if option == "auto":
            return None
        raise ConfigError(
            f"the experts of a {lm.config.model_type} can't be run in a chosen way, or it has none.",
            where="model.language.experts",
            given=option,
            expected="auto",
        )
    lm.set_experts_implementation("eager" if option == "eager" else NAME)
    return "eager" if option == "eager" else "grouped_mm"


def _has_experts(lm: Any) -> bool:
    """Whether there are modules whose way of running transformers lets one choose."""
    return any(hasattr(module, "_apply_gate") and hasattr(module, "num_experts") for module in lm.modules())


def own_coefficient(config: Any) -> float:
    """Coefficient of the balance loss that a config.json asks for by `output_router_logits: true`, else 0."""
    asks = bool(getattr(config, "output_router_logits", False))
    return float(getattr(config, "router_aux_loss_coef", 0.0)) if asks else 0.0
