"""Annotations -> the encoded samples of training, without the model's weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lavis_ds.config.schema import RootConfig
from lavis_ds.data.collate import Collator
from lavis_ds.data.conversation import Conversation
from lavis_ds.data.dataset import EncodedDataset
from lavis_ds.data.order import SampleKey
from lavis_ds.models.base import Model
from lavis_ds.models.skeleton import skeleton
from lavis_ds.runners import build
from lavis_ds.runners.data_tools.reading import Annotations


@dataclass(frozen=True)
class Encoded:
    """Samples as a run has them.

    Attributes:
        config: the run, with the splits looked at as its `train_splits`.
        model: a skeleton.
        data: the samples by key.
        collator: checks them, and makes batches of them.
    """

    config: RootConfig
    model: Model
    data: EncodedDataset
    collator: Collator

    def conversation(self, key: SampleKey) -> Conversation:
        """The sample of `key` before it is encoded.

        Raises:
            DataError: its annotation is wrong.
        """
        indexed: Any = self.data.sources[key.dataset].conversations
        found: Conversation = indexed[key.index]
        return found

    @property
    def sizes(self) -> dict[str, int]:
        """Dataset entry -> its samples."""
        return {source.name: size for source, size in zip(self.data.sources, self.data.sizes, strict=True)}


def encode(found: Annotations, *, as_training: bool) -> Encoded:
    """The samples with the processors of training, or else of evaluation."""
    run = found.config.run.model_copy(update={"train_splits": list(found.splits)})
    config = found.config.model_copy(update={"run": run})
    by_split = {split: dict(entries) for split, entries in found.splits.items()}
    datasets = build.train_datasets(config, by_split) if as_training else next(iter(by_split.values()))
    model = skeleton(config.model)
    data = build.encoded(config, datasets, build.text_context(model), training=as_training)
    return Encoded(config, model, data, build.collator(model, data))
