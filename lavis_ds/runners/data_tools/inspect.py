"""`lavis-ds data inspect`: samples as the model sees them, in the terminal or on an HTML sheet."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lavis_ds.errors import ConfigError
from lavis_ds.runners import output, process
from lavis_ds.runners.data_tools import reading

if TYPE_CHECKING:
    from lavis_ds.data.order import SampleKey
    from lavis_ds.runners.data_tools.encoded import Encoded


def inspect(
    cfg: str,
    options: Sequence[str],
    *,
    split: str | None,
    dataset: str | None,
    num: int,
    index: Sequence[int],
    epoch: int,
    html: str | None,
) -> int:
    """Show samples.

    Args:
        cfg: the project's YAML file.
        options: overrides of it.
        split: which split; those that the run trains on where left out.
        dataset: only samples of this entry.
        num: how many samples, the first ones of the run's order.
        index: numbers of samples in their dataset, to show instead.
        epoch: pass over the data, which decides order and augmentation.
        html: write a sheet to this file instead of showing them in the terminal.

    Returns:
        The exit code, 0.

    Raises:
        ConfigError: there is no such split, dataset or sample, or the file can't be written.
    """
    if num < 1 or epoch < 0:
        raise ConfigError("numbers of samples and epochs start at 1 and 0.", where="lavis-ds data inspect")
    if html is not None:
        output.require_file(Path(html), "--html")
    found = reading.read(reading.load_config(cfg, options), split, dataset)
    if found.streams and epoch:
        raise ConfigError("a stream is looked at from its start only.", where="--seed-epoch", given=epoch)
    is_shuffled = found.is_training and not found.streams
    found = found.with_first_of_streams(max(num, *(number + 1 for number in index), 1))

    process.prepare()
    from lavis_ds.runners.data_tools.encoded import encode
    from lavis_ds.runners.data_tools.samples import look

    encoded = encode(found, as_training=found.is_training)
    keys = _numbered(encoded, dataset, index, epoch) if index else _first(encoded, found, num, epoch, is_shuffled)
    looks = (look(encoded, key) for key in keys)
    if html is not None:
        from lavis_ds.runners.data_tools.sheet import write_sheet

        print(write_sheet(Path(html), list(looks), f"{Path(cfg).stem}: {', '.join(found.splits)}, epoch {epoch}"))
    else:
        from lavis_ds.runners.data_tools.terminal import show

        show(looks)
    return 0


def _first(encoded: Encoded, found: reading.Annotations, num: int, epoch: int, is_shuffled: bool) -> list[SampleKey]:
    """The samples that the run begins `epoch` with; of one dataset alone, in an order of its own."""
    from lavis_ds.data import mixture
    from lavis_ds.data.order import SampleOrder

    data, config = encoded.data, encoded.config
    quotas = None
    if found.is_training and found.dataset is None:
        quotas = mixture.quotas(config.datasets, encoded.sizes, config.data)
    order = SampleOrder(data.sizes, config.run.seed, quotas, shuffle=is_shuffled)
    start = epoch * order.total
    keys = order.keys(start, start + min(num, order.total))
    return [keys[i] for i in range(len(keys))]


def _numbered(encoded: Encoded, dataset: str | None, index: Sequence[int], epoch: int) -> list[SampleKey]:
    """The samples with these numbers in their dataset.

    Raises:
        ConfigError: there is no such sample, or several datasets that it may be of.
    """
    from lavis_ds.data.order import SampleKey

    names = [source.name for source in encoded.data.sources]
    if dataset is None and len(names) > 1:
        raise ConfigError("a sample has its number in one dataset.", where="--index", hint=f"Add --dataset {names[0]}.")
    number = names.index(dataset) if dataset is not None else 0
    size = encoded.data.sizes[number]
    for wrong in (i for i in index if not 0 <= i < size):
        raise ConfigError(
            f"there is no such sample of {names[number]}.", where="--index", given=wrong, expected=f"0 to {size - 1}"
        )
    return [SampleKey(number, i, epoch, 0) for i in index]
