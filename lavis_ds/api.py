"""The functions that LAVIS users know, importable from `lavis_ds` itself."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from lavis_ds import registry
from lavis_ds.config.decode import decode
from lavis_ds.config.load import configs_dir, dataset_tree, model_tree
from lavis_ds.config.schema import DatasetConfig
from lavis_ds.data.conversation import Conversation


def load_model(
    name: str, model_type: str | None = None, is_eval: bool = False, device: Any = "cpu", **options: Any
) -> Any:
    """A registered model, built from its type's defaults and `options`.

    Args:
        name: registered name (`arch`).
        model_type: named defaults; see `print(model_zoo)`.
        is_eval: put it in evaluation mode.
        device: where to put it.
        options: keys of the `model:` block that replace the defaults.

    Raises:
        ConfigError: the name, the type or an option is wrong.
    """
    config = decode(
        registry.models.config_class(name),
        model_tree({"arch": name, "model_type": model_type, **options}),
        where="model",
    )
    model = registry.get_model_class(name).from_config(config).to(device)
    return model.eval() if is_eval else model


def load_preprocess(config: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Processors of a dataset entry: `(vis_processors, text_processors)`, each with `train` and `eval`.

    Text processors need the model's tokenizer, so they come as classes' options; image processors are ready to call.
    """
    entry: DatasetConfig = config
    images = entry.vis_processor
    ready = (
        {}
        if images is None
        else {k: registry.get_processor_class(o.name)(o) for k, o in (("train", images.train), ("eval", images.eval))}
    )
    return ready, {"train": entry.text_processor.train, "eval": entry.text_processor.eval}


def load_model_and_preprocess(
    name: str, model_type: str | None = None, is_eval: bool = False, device: Any = "cpu", **options: Any
) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """`(model, vis_processors, text_processors)`, all ready to call.

    Image processors turn a PIL picture and a `numpy.random.Generator` into (3, H, W) uint8, or into patches where the
    model takes pictures at their own size; text processors turn a `Conversation`, a list of what its pictures became,
    and a generator into a `Sample`.
    """
    from lavis_ds.runners.build import text_context

    model = load_model(name, model_type, is_eval, device, **options)
    context = text_context(model)

    def made(processor: str, *rest: Any, **keys: Any) -> Any:
        cls = registry.get_processor_class(processor)
        return cls(cls.Config(**keys), *rest)

    chat = made("chat", context)
    if model.image_shape is None:
        return model, {}, {"train": chat, "eval": chat}
    if model.merge_size is not None:
        patch_size = math.isqrt(model.image_shape[0] // 6)  # 3 channels, 2 frames
        native = made("image_native", patch_size=patch_size, merge_size=model.merge_size)
        return model, {"train": native, "eval": native}, {"train": chat, "eval": chat}
    size = {"image_size": model.image_size}
    return (
        model,
        {"train": made("image_train", **size), "eval": made("image_eval", **size)},
        {"train": chat, "eval": chat},
    )


def load_dataset(name: str, splits: Sequence[str] | None = None, **options: Any) -> dict[str, Sequence[Conversation]]:
    """Split -> conversations of a registered dataset builder.

    Args:
        name: registered name of the builder.
        splits: which ones; all that the options give files for where left out.
        options: keys of the dataset's entry, such as `annotations`.
    """
    config = decode(
        registry.builders.config_class(name), dataset_tree(name, {"builder": name, **options}), where=f"datasets.{name}"
    )
    builder = registry.get_builder_class(name)(name, config)
    return {split: builder.build(split) for split in (splits or builder.splits())}


class ModelZoo:
    """Registered models and their types; `print(model_zoo)` shows a table."""

    def types(self) -> dict[str, list[str]]:
        """Model -> its named types."""
        return {
            name: sorted(p.stem for p in (configs_dir() / "models" / name).glob("*.yaml"))
            for name in registry.list_models()
        }

    def __iter__(self) -> Any:
        return iter((name, kind) for name, kinds in self.types().items() for kind in kinds or [""])

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __str__(self) -> str:
        lines = [
            f"{'arch':<24} types",
            "=" * 60,
            *(f"{name:<24} {', '.join(kinds)}" for name, kinds in self.types().items()),
        ]
        return "\n".join(lines)


class DatasetZoo:
    """Registered dataset builders; `print(dataset_zoo)` shows them."""

    def get_names(self) -> list[str]:
        return registry.list_datasets()

    def __str__(self) -> str:
        return "\n".join(self.get_names())


model_zoo = ModelZoo()
dataset_zoo = DatasetZoo()
