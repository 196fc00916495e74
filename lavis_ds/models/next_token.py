"""What models that predict next tokens share: from hidden states to the loss.

Shape suffixes: B rows, T tokens a row, K targets, D the language model's width, V ids.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from torch import Tensor

from lavis_ds.batch import Batch
from lavis_ds.models.base import Model
from lavis_ds.models.loss import sum_by_dataset, token_losses
from lavis_ds.models.parts import LanguageModel


class NextTokenModel(Model):
    """Subclass, make `language` in `__init__`, and say what its hidden states are.

    Attributes:
        language: the part with the tokenizer and the output layer.
    """

    language: LanguageModel

    @abstractmethod
    def hidden_states(self, batch: Batch) -> Tensor:
        """Hidden states before the output layer (B, T, D)."""

    @property
    def tokenizer(self) -> Any:
        return self.language.tokenizer

    def describe(self) -> dict[str, str]:
        return {"attention": self.language.attention}

    def forward(self, batch: Batch) -> tuple[Tensor, ...]:
        """(sum of token losses, number of right targets, sums of token losses by dataset); see `Model.forward`."""
        hidden_KD = self.hidden_states(batch).flatten(0, 1)[batch.target_index]
        labels_K = batch.labels.flatten()[batch.target_index + 1]
        logits_KV = self.language.logits(hidden_KD)
        num_correct = (logits_KV.detach().argmax(-1) == labels_K).sum().float()  # an ignored label is never an argmax
        losses_K = token_losses(logits_KV, labels_K)
        if batch.target_weights is not None:
            losses_K = losses_K * batch.target_weights
        return losses_K.sum(), num_correct, sum_by_dataset(losses_K, batch)
