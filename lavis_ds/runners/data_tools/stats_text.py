"""The numbers of `lavis-ds data stats` as tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lavis_ds.config.schema import RootConfig
from lavis_ds.engines.ds_config import BatchPlan
from lavis_ds.runners.data_tools.dataset_stats import DatasetStats
from lavis_ds.runners.data_tools.padding import Layout
from lavis_ds.runners.data_tools.token_text import visible
from lavis_ds.runners.observers.numbers import percent, short

_BAR = 40


def show(
    datasets: Sequence[DatasetStats],
    layouts: Sequence[Layout],
    config: RootConfig,
    batch: BatchPlan,
    *,
    are_fixed: bool,
    console: Console | None = None,
) -> None:
    """Print all of it."""
    console = console or Console(highlight=False)
    for dataset in datasets:
        console.print(Text(f"\n{dataset.name}", "bold"))
        for label, value in _facts(dataset):
            console.print(Text.assemble((f"{label:<9} ", "dim"), value), soft_wrap=True)
        console.print(_histogram(dataset))
        for line in _unusable(dataset):
            console.print(line, soft_wrap=True)
    console.print(_layouts(layouts, batch))
    for note in _notes(layouts, config, are_fixed):
        console.print(Text(note), soft_wrap=True)


def _facts(dataset: DatasetStats) -> Iterator[tuple[str, str]]:
    yield "samples", f"{dataset.num_samples:,}"
    shares = f"{percent(dataset.sample_share)} of the samples, {percent(dataset.token_share)} of the tokens"
    yield "an epoch", f"{dataset.samples_an_epoch:,} samples: {shares}"
    yield "tokens", f"{short(dataset.tokens)} in all, {dataset.mean_tokens:,.1f} a sample"
    named = {0: "min", 50: "median", 100: "max"}
    marks = (f"{named.get(p, f'{p} %')} {value:,}" for p, value in dataset.percentiles.items())
    yield "a sample", ", ".join(marks)
    if dataset.probe is not None:
        targets, dropped = percent(dataset.probe.target_fraction), percent(dataset.probe.dropped_fraction)
        yield "targets", f"{targets} of the tokens (of {dataset.probe.num_samples:,} samples)"
        if dataset.probe.dropped_fraction:
            yield "cut", f"{dropped} of these samples lose turns that are too much for model.max_txt_len"
    without = percent(dataset.without_views_fraction)
    if dataset.max_views:
        yield "pictures", f"{dataset.mean_views:.2f} views a sample, at most {dataset.max_views}; {without} have none"


def _histogram(dataset: DatasetStats) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("tokens", justify="right", no_wrap=True)
    table.add_column("samples", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    edges, counts = dataset.histogram.edges, dataset.histogram.counts
    for low, high, count in zip(edges, edges[1:], counts, strict=False):
        bar = "█" * round(_BAR * count / max(counts)) or ("▏" if count else "")
        table.add_row(f"{low:,} - {high - 1:,}", f"{count:,}", Text(bar, "cyan"))
    return table


def _unusable(dataset: DatasetStats) -> Iterator[Text]:
    if not dataset.num_unusable:
        return
    yield Text(f"{dataset.num_unusable:,} of {dataset.num_samples:,} samples can't be used:", "bold red")
    for reason in dataset.reasons:
        yield Text(f"  {visible(reason)}")
    more = dataset.num_unusable - len(dataset.reasons)
    if more:
        yield Text(f"  and {more:,} more")


def _layouts(layouts: Sequence[Layout], batch: BatchPlan) -> Table:
    title = f"An epoch in steps of {batch.global_batch_size:,} rows, {batch.micro_batch_size:,} a micro-batch"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("data.batching", no_wrap=True)
    for name in ("padding", "samples a row", "tokens a step", "steps"):
        table.add_column(name, justify="right")
    for layout in layouts:
        name = layout.batching if layout.pack_length is None else f"packed, {layout.pack_length:,}"
        row = (f"{layout.samples_a_row:.2f}", f"{layout.tokens_a_step:,.0f}", f"{layout.num_steps:,}")
        table.add_row(name, percent(layout.padding), *row)
    return table


def _notes(layouts: Sequence[Layout], config: RootConfig, are_fixed: bool) -> Iterator[str]:
    if not are_fixed:
        yield (
            "A text processor draws lengths anew every epoch: the numbers are those of one draw, and rows can't be "
            "grouped or packed."
        )
    if any(layout.num_steps_seen < layout.num_steps for layout in layouts):
        seen = min(layout.num_steps_seen for layout in layouts)
        yield f"Padding is that of at least {seen:,} steps, evenly spread over the epoch."
    yield f"This run: data.batching {config.data.batching}. Pictures were not opened; unreadable ones show in training."
