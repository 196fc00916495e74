"""The composition root: configuration -> parts, one small function a part. Nothing else knows how they fit together."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch.utils.data import ConcatDataset, Subset

from lavis_ds import distributed, registry, shares
from lavis_ds.config.schema import RootConfig, RunConfig
from lavis_ds.data.collate import Collator
from lavis_ds.data.conversation import Conversation
from lavis_ds.data.dataset import EncodedDataset, Source
from lavis_ds.data.loader import BatchLoader, StepLoader
from lavis_ds.data.plan import StepPlan
from lavis_ds.data.processors.base import ImageProcessor, TextContext, TextProcessor
from lavis_ds.data.stream import StreamLoader, StreamPlan
from lavis_ds.engines.base import Engine
from lavis_ds.engines.ds_config import BatchPlan, zero_stage
from lavis_ds.errors import ConfigError
from lavis_ds.models import layers
from lavis_ds.models.base import Model
from lavis_ds.optim.schedules import Schedule, ScheduleShape
from lavis_ds.tasks.base import EvalContext, Task

Datasets = dict[str, Sequence[Conversation]]
"""Entry name -> its samples; a training split may also be a single `ConversationStream`."""


def build_model(config: RootConfig, *, in_shares: bool = False) -> Model:
    """The model, on the CPU in float32, frozen and loaded as the options say; the same on every rank.

    Args:
        config: the run.
        in_shares: no rank holds the whole model (`lavis_ds.shares`); the weights are the same. For ZeRO-3 alone.
    """
    torch.manual_seed(config.run.seed)
    with shares.building() if in_shares else contextlib.nullcontext():
        built: Model = registry.get_model_class(config.model.arch).from_config(config.model)
    torch.manual_seed(config.run.seed + 1 + distributed.global_rank())  # dropout differs between ranks, weights don't
    return built


def trains_in_shares(config: RootConfig) -> bool:
    """Whether the model of a training run is built in shares: with ZeRO-3 on several ranks.

    Weights in 4 bits are the exception: they are quantised when a rank's device gets them whole.
    """
    ranks = distributed.world_size()
    quantised = any(getattr(options, "quantize", None) for _, options in config.model)
    return ranks > 1 and not quantised and zero_stage(config.run, ranks) == 3


def compile_layers(config: RootConfig, model: Model) -> str:
    """Compile the model's layers if `run.compile` says so; what the run's start says of it.

    Raises:
        ConfigError: they are to be compiled, and can't be.
    """
    option = config.run.compile
    reason = "run.compile is false" if option is False else layers.would_not_pay(model)
    if reason is None or option is True:
        count = layers.compile_layers(model)
        reason = None if count else "the model has none that can be compiled"
    if reason is None:
        return f"compiled ({count})"
    if option is True:
        raise ConfigError(f"layers can't be compiled: {reason}.", where="run.compile", hint="Leave it out.")
    return f"not compiled: {reason}"


def build_engine(config: RootConfig, model: Model, groups: list[dict[str, Any]], plan: BatchPlan) -> Engine:
    """What computes and updates, with the model inside. `groups` are the optimizer's (`optim.groups`)."""
    made: Engine = registry.engines.get(config.run.engine)(model, groups, config.run, plan)
    return made


def build_task(config: RootConfig) -> Task:
    made: Task = registry.get_task_class(config.run.task.name)(config.run.task)
    return made


def text_context(model: Model) -> TextContext:
    """What encoding text needs to know of the model."""
    return TextContext(
        tokenizer=model.tokenizer,
        tokens_per_image=model.tokens_per_image,
        max_length=model.config.max_txt_len,
        merge_size=model.merge_size if model.has_mrope else None,
        image_marks=model.image_marks,
        placeholders=model.placeholders,
        tokens_per_second=model.tokens_per_second,
    )


def encoded(
    config: RootConfig, datasets: Datasets, context: TextContext, *, training: bool, prompts: bool = False
) -> EncodedDataset:
    """Conversations with their processors: training or evaluation ones.

    Args:
        config: the run.
        datasets: entry name -> its conversations.
        context: what encoding text needs to know of the model.
        training: use the processors of training.
        prompts: leave out the last answer and what follows, for generation.
    """
    sources = [
        Source(
            name,
            samples,
            _image_processor(config, name, training),
            _text_processor(config, name, context, training),
            config.datasets[name].video,
        )
        for name, samples in datasets.items()
    ]
    return EncodedDataset(sources, seed=config.run.seed, as_prompts=prompts)


def _image_processor(config: RootConfig, name: str, training: bool) -> ImageProcessor | None:
    options = config.datasets[name].vis_processor
    if options is None:
        return None
    chosen = options.train if training else options.eval
    made: ImageProcessor = registry.get_processor_class(chosen.name)(chosen)
    return made


def _text_processor(config: RootConfig, name: str, context: TextContext, training: bool) -> TextProcessor:
    options = config.datasets[name].text_processor
    chosen = options.train if training else options.eval
    made: TextProcessor = registry.get_processor_class(chosen.name)(chosen, context)
    return made


def collator(model: Model, data: EncodedDataset, *, padding_side: Literal["right", "left"] = "right") -> Collator:
    _check_merge_sizes(model, data)
    tokenizer = model.tokenizer
    pad_id = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    names = [source.name for source in data.sources]
    return Collator(
        pad_id,
        model.image_shape,
        tokens_per_image=model.tokens_per_image,
        datasets=names,
        padding_side=padding_side,
        merge_size=model.merge_size,
        mrope=model.has_mrope,
    )


def _check_merge_sizes(model: Model, data: EncodedDataset) -> None:
    """Patches in squares of another size would be in another order, which nothing later can see.

    Raises:
        ConfigError: an image processor of native resolution has another merge_size than the model.
    """
    for source in data.sources:
        merge_size = getattr(source.image_processor and source.image_processor.config, "merge_size", None)
        if None not in (merge_size, model.merge_size) and merge_size != model.merge_size:
            raise ConfigError(
                "the image processor's squares of patches are not the model's.",
                where=f"datasets.{source.name}.vis_processor.merge_size",
                given=merge_size,
                expected=str(model.merge_size),
            )


def train_datasets(config: RootConfig, splits: Mapping[str, Datasets]) -> Datasets:
    """Entry name -> its samples of all training splits, no more than `max_samples`."""
    parts: dict[str, list[Any]] = {}
    for split in config.run.train_splits:
        for entry, samples in splits[split].items():
            parts.setdefault(entry, []).append(samples)
    joined: Datasets = {entry: lists[0] if len(lists) == 1 else ConcatDataset(lists) for entry, lists in parts.items()}
    return {entry: _first(samples, config.datasets[entry].max_samples) for entry, samples in joined.items()}


def _first(samples: Sequence[Conversation], limit: int | None) -> Any:
    indexable: Any = samples
    return samples if limit is None or len(samples) <= limit else Subset(indexable, range(limit))


def train_loader(
    config: RootConfig,
    data: EncodedDataset,
    collate: Collator,
    steps: StepPlan | StreamPlan,
    start_step: int,
    state: dict[str, Any],
) -> StepLoader:
    """The micro-batches of the steps from `start_step` to the end, one list a step.

    `state` is what a resumed run's `StepLoader.state` was.
    """
    if isinstance(steps, StreamPlan):
        pin, timeout_s = torch.cuda.is_available(), config.data.worker_timeout_s
        number = steps.num_steps * steps.accumulation
        return StepLoader(StreamLoader(data, steps, collate, number, state, pin, timeout_s), steps.accumulation)
    return StepLoader(_loader(config, data, collate, steps, range(start_step, steps.num_steps)), steps.accumulation)


def eval_loader(config: RootConfig, data: EncodedDataset, collate: Collator) -> BatchLoader:
    """Every rank gets the same number of batches; rows that the last ones lack are empty."""
    plan = StepPlan.for_evaluation(
        data.sizes, config.run.batch_size_eval, distributed.world_size(), distributed.global_rank()
    )
    return _loader(config, data, collate, plan, range(plan.num_steps))


def _loader(config: RootConfig, data: EncodedDataset, collate: Collator, plan: StepPlan, steps: range) -> BatchLoader:
    return BatchLoader(
        data,
        plan,
        collate,
        steps,
        num_workers=config.run.num_workers,
        pin_memory=torch.cuda.is_available(),
        timeout_s=config.data.worker_timeout_s,
    )


def eval_context(data: EncodedDataset, *, synced: bool) -> EvalContext:
    """Stop ids and decoding of the first dataset's text processor (one tokenizer serves all)."""
    text = data.sources[0].text_processor
    return EvalContext(synced=synced, stop_ids=text.stop_ids, decode=text.decode)


def schedule(run: RunConfig, total_steps: int) -> tuple[Schedule, ScheduleShape]:
    """Learning rate as a function of the optimizer step, and the numbers it depends on."""
    warmup = run.warmup_steps if run.warmup_steps is not None else round((run.warmup_ratio or 0.0) * total_steps)
    function: Any = registry.lr_schedulers.get(run.lr_sched)
    return function, ScheduleShape(run.init_lr, run.min_lr, run.warmup_lr, warmup, total_steps)
