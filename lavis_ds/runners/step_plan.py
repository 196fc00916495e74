"""From configuration to the rows of every optimizer step: mixture, token counts, packing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress

import lavis_ds
from lavis_ds import registry
from lavis_ds.config.schema import RootConfig
from lavis_ds.data import cache, lengths, mixture
from lavis_ds.data.builders.base import ConversationStream
from lavis_ds.data.dataset import EncodedDataset, Source
from lavis_ds.data.lengths import TokenCounts
from lavis_ds.data.order import SampleOrder
from lavis_ds.data.plan import GroupedRows, PackedRows, PlainRows, Row, RowPlan, StepPlan
from lavis_ds.data.stream import StreamPlan
from lavis_ds.engines.base import Engine
from lavis_ds.engines.ds_config import BatchPlan
from lavis_ds.models.work import Work


def build(
    config: RootConfig, data: EncodedDataset, plan: BatchPlan, engine: Engine, work: Work
) -> StepPlan | StreamPlan:
    """Which samples make up which optimizer step, and which of them are this rank's."""
    ranks, rank, run = engine.data_parallel_size, engine.data_parallel_rank, config.run
    if isinstance(data.sources[0].conversations, ConversationStream):
        return StreamPlan(
            plan.global_batch_size, plan.micro_batch_size, ranks, rank, run.num_workers, run.max_steps or 0
        )
    rows, counts = row_plan(config, data, plan.global_batch_size)

    def cost(row: Row) -> float:
        return sum(work.of(*counts.at(key)) for key in row) if counts else 0.0

    return StepPlan(rows, plan.micro_batch_size, ranks, rank, cost if config.data.batching == "packed" else None)


def row_plan(config: RootConfig, data: EncodedDataset, rows_a_step: int) -> tuple[RowPlan, TokenCounts | None]:
    """The rows of all optimizer steps, and the token counts they were planned by, if they were."""
    run, options = config.run, config.data
    sizes = {source.name: size for source, size in zip(data.sources, data.sizes, strict=True)}
    order = SampleOrder(data.sizes, run.seed, mixture.quotas(config.datasets, sizes, options))
    total = (run.max_epoch or 0) * order.total
    if options.batching == "padded":
        return PlainRows(order, rows_a_step, total or (run.max_steps or 0) * rows_a_step), None
    counts = count_tokens(config, data)
    if options.batching == "grouped":
        total = total or (run.max_steps or 0) * rows_a_step
        return GroupedRows(order, rows_a_step, total, counts, options.plan_window), counts
    capacity = options.pack_length or config.model.max_txt_len
    steps = {"total": total} if total else {"num_steps": run.max_steps}
    views = options.pack_views
    return PackedRows(order, rows_a_step, counts, capacity, options.plan_window, max_views=views, **steps), counts


def count_tokens(config: RootConfig, data: EncodedDataset) -> TokenCounts:
    """Tokens of every training sample, counted once and then read from the cache; of one draw, where they are drawn."""
    keys = [_counts_key(config, source) for source in data.sources]
    with _progress_bar() as progress:
        return lengths.count(data, keys, progress=progress)


def _counts_key(config: RootConfig, source: Source) -> str | None:
    """Fingerprint of all that a source's token counts depend on; None where its files are not known."""
    entry, context = config.datasets[source.name], source.text_processor.context
    builder = registry.get_builder_class(entry.builder)(source.name, entry)
    files = [file for split in config.run.train_splits if split in builder.splits() for file in builder.files(split)]
    backend = getattr(context.tokenizer, "backend_tokenizer", None)
    if not files or backend is None:
        return None
    options = entry.model_dump(mode="json", exclude={"weight", "repeat"})
    tokenizer = [backend.to_str(), context.tokenizer.chat_template]
    return cache.fingerprint(
        lavis_ds.__version__, cache.stamp(files), config.run.train_splits, options, tokenizer,
        str(context.tokens_per_image), context.max_length, context.merge_size, context.image_marks,
        context.tokens_per_second,
    )  # fmt: skip


@contextmanager
def _progress_bar() -> Iterator[lengths.Progress]:
    """A bar on standard error, shown once there is something to count."""
    with Progress(*Progress.get_default_columns(), MofNCompleteColumn(), console=Console(stderr=True)) as bar:
        task = bar.add_task("counting tokens", visible=False)
        yield lambda done, total: bar.update(task, completed=done, total=total, visible=True)
