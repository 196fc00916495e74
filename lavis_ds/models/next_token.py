"""What models that predict next tokens share: from hidden states to the loss, and the balance of experts.

Shape suffixes: B rows, T tokens a row, K targets, D the language model's width, V ids.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from typing import Any

from torch import Tensor

from lavis_ds.batch import Batch
from lavis_ds.config.schema import ParamGroupConfig
from lavis_ds.errors import ConfigError
from lavis_ds.models.base import Model, StepSettings, is_frozen
from lavis_ds.models.conversion.source import open_weights
from lavis_ds.models.loss import sum_by_dataset
from lavis_ds.models.moe.balancer import Balancer
from lavis_ds.models.moe.configs import MoEConfig
from lavis_ds.models.moe.load import Load
from lavis_ds.models.moe.routers import find_routers, require_routers
from lavis_ds.models.parts import LanguageModel, Part
from lavis_ds.models.skeleton import reads_weights
from lavis_ds.models.weights import Loaded


class NextTokenModel(Model):
    """Subclass, make `language` in `__init__`, call `set_up_experts` at its end, and say what hidden states are.

    Attributes:
        language: the part with the tokenizer and the output layer.
    """

    language: LanguageModel
    _experts_are_set_up = False
    _to_sparsify = False

    @abstractmethod
    def hidden_states(self, batch: Batch) -> Tensor:
        """Hidden states before the output layer (B, T, D)."""

    @property
    def tokenizer(self) -> Any:
        return self.language.tokenizer

    @property
    def balancer(self) -> Balancer | None:
        """What watches the routers; None in a dense model."""
        found: Balancer | None = self.language._modules.get("balancer")  # type: ignore[assignment]
        return found

    def describe(self) -> dict[str, str]:
        lines = {"attention": self.language.attention}
        if self.language.experts is not None:
            lines["experts"] = self.language.experts
        if self.balancer is not None:
            lines["balance of experts"] = self.balancer.describe()
        parts = {name: part for name, part in self.parts().items() if isinstance(part, Part)}
        lines |= {f"{name} in fp8": part.fp8 for name, part in parts.items() if part.fp8}
        return lines

    def forward(self, batch: Batch) -> tuple[Tensor, ...]:
        """(sum of token losses, number of right targets, sums of token losses by dataset); see `Model.forward`.

        In training the first holds the balance and z-loss of the experts too; the third never does.
        """
        balancer = self.balancer if self.training else None
        if balancer is None:
            return self._outputs(self.hidden_states(batch), batch)
        with balancer.recording() as choices:
            hidden_BTD = self.hidden_states(batch)
        loss_sum, *rest = self._outputs(hidden_BTD, batch)
        return loss_sum + balancer.loss_sum(choices, batch), *rest

    def _outputs(self, hidden_BTD: Tensor, batch: Batch) -> tuple[Tensor, ...]:
        hidden_KD = hidden_BTD.flatten(0, 1).index_select(0, batch.target_index)  # its gradient needs no sorting
        labels_K = batch.labels.flatten()[batch.target_index + 1]
        found = self.language.losses(hidden_KD, labels_K, batch.target_weights)
        return found.total, found.right.sum().float(), sum_by_dataset(found.each, batch)

    # --- experts ---------------------------------------------------------------------------------------------------

    @property
    def _moe(self) -> MoEConfig | None:
        return getattr(self.config, "moe", None)

    def set_up_experts(self) -> None:
        """Make the language model sparse if `model.moe` says so, and watch its routers. Called once the parts are made.

        Dense weights of `model.pretrained` are loaded into the dense model, which becomes sparse in `complete`.

        Raises:
            ConfigError: `model.moe` is given, and there are no routers, or some of an unsupported kind.
        """
        self._experts_are_set_up = True
        if self._moe is not None and self._moe.num_experts is not None:
            source = self.config.pretrained if reads_weights() else None
            self._to_sparsify = source is not None and not any(".experts." in name for name in open_weights(source))
            if self._to_sparsify:
                return
            self._refuse_experts()
            self.language.upcycle(self._moe)
        self._watch_routers()

    def complete(self) -> list[Loaded]:
        loaded = super().complete()
        if not self._experts_are_set_up:
            raise NotImplementedError(f"{type(self).__name__}.__init__ must end with self.set_up_experts()")
        if self._to_sparsify and self._moe is not None:
            self._refuse_experts()
            self.language.upcycle(self._moe)
            self._watch_routers()
            self._to_sparsify = False
            names = frozenset(name for name, _ in self.named_parameters() if ".experts." in name)
            loaded.append(Loaded(names, ("model.moe: experts are copies of the dense layers, routers are new.",)))
        return loaded

    def made_parts(self) -> list[str]:
        """The language model, where it was made sparse: its routers are new."""
        return ["language"] if self._moe is not None and self._moe.num_experts is not None else []

    def _refuse_experts(self) -> None:
        if find_routers(self.language):
            raise ConfigError(
                "the language model has experts already.",
                where="model.moe.num_experts",
                hint="Leave num_experts, top_k and every out.",
            )

    def _watch_routers(self) -> None:
        self.language.choose_experts()
        options, routers = self._moe, find_routers(self.language)
        default = self.language.balance_coefficient
        if options is not None or default:
            where = "model.moe" if options is not None else "output_router_logits in the model's config.json"
            require_routers(self.language, routers, where)
        if routers:
            options = options or MoEConfig()
            coefficient = default if options.balance_loss is None else options.balance_loss
            self.language.balancer = Balancer(routers, options, coefficient)

    def adapt(self) -> None:
        """As in `Model`.

        Raises:
            ConfigError: adapters can't be added, or experts of a frozen language model are to be balanced.
        """
        super().adapt()
        balancer = self.balancer
        if balancer is not None and balancer.is_active and is_frozen(self.language):
            raise ConfigError(
                "the language model is frozen, so nothing can balance its experts.",
                where="model.moe",
                hint="Set balance_loss to 0 and leave z_loss and aux_free_rate out, or take it out of model.freeze.",
            )

    def own_groups(self) -> dict[str, ParamGroupConfig]:
        """The routers, where they have a learning rate of their own (`model.moe.gate_lr`)."""
        if self._moe is None or self._moe.gate_lr is None:
            return {}
        return {self._gates: ParamGroupConfig(lr=self._moe.gate_lr)}

    @property
    def _gates(self) -> str:
        """The pattern of the routers' weights, which is the name of their parameter group."""
        name = next(iter(find_routers(self.language)))
        return re.sub(r"\.\d+\.", ".*.", f"language.{name}.weight")

    def gate_lr_factor(self, load: Load) -> float:
        """What `gate_lr` is multiplied by in a step with this load; override it for another rule.

        It sees the step's own load, before weights are updated, and keeps nothing, so a resumed run continues exactly.
        """
        rule = self._moe.gate_lr_rule if self._moe is not None else None
        return rule.factor if rule is not None and load.max_load > rule.above else 1.0

    def before_step(self, step: int) -> StepSettings:
        """Loads of the step as metrics, and the learning rate of the routers."""
        load = self.balancer.finish_step() if self.balancer is not None else None
        if load is None:
            return super().before_step(step)
        every = MoEConfig().load_every if self._moe is None else self._moe.load_every
        metrics = load.metrics(full=every is not None and step % every == 0)
        if not self.own_groups():
            return StepSettings(metrics)
        factor = self.gate_lr_factor(load)
        return StepSettings({**metrics, "moe/gate_lr_factor": factor}, {self._gates: factor})
