"""`lavis-ds data stats`: tokens, pictures and shares of every dataset, and what padding and packing would do."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

from lavis_ds.engines import ds_config
from lavis_ds.runners import process
from lavis_ds.runners.data_tools import reading


def stats(
    cfg: str,
    options: Sequence[str],
    *,
    split: str | None,
    pack_lengths: Sequence[int],
    num_gpus: int,
    as_json: bool,
) -> int:
    """Print the numbers.

    Args:
        cfg: the project's YAML file.
        options: overrides of it.
        split: which split, as if the run trained on it; those that it does train on where left out.
        pack_lengths: lengths of packed rows to compute; the run's, twice and four times that where left out.
        num_gpus: ranks of the run.
        as_json: print JSON instead of tables.

    Returns:
        The exit code, 0.

    Raises:
        LavisError: the configuration or an annotation file is wrong, or a pack length is too short.
    """
    config = reading.load_config(cfg, options)
    batch = ds_config.batch_plan(config.run, num_gpus)
    found = reading.read(config, split).require_indexed()

    process.prepare()
    from lavis_ds.data import mixture
    from lavis_ds.data.order import SampleOrder
    from lavis_ds.runners import step_plan
    from lavis_ds.runners.data_tools import dataset_stats, padding, stats_text
    from lavis_ds.runners.data_tools.encoded import encode

    lengths = padding.pack_lengths(config, list(pack_lengths))
    encoded = encode(found, as_training=True)
    config, data = encoded.config, encoded.data
    counts = step_plan.count_tokens(config, data)
    order = SampleOrder(data.sizes, config.run.seed, mixture.quotas(config.datasets, encoded.sizes, config.data))
    datasets = dataset_stats.describe(data, counts, order)
    are_fixed = all(source.text_processor.config.has_fixed_lengths for source in data.sources)
    layouts = list(
        padding.layouts(
            config,
            order,
            counts,
            batch,
            lengths=lengths if are_fixed else [],
            num_ranks=num_gpus,
            work=encoded.model.work(),
            row_multiple=encoded.collator.pad_to_multiple_of,
        )
    )
    if as_json:
        tree = {
            "splits": list(found.splits),
            "max_txt_len": config.model.max_txt_len,
            "batch": dataclasses.asdict(batch),
            "num_gpus": num_gpus,
            "lengths_are_fixed": are_fixed,
            "datasets": [dataclasses.asdict(dataset) for dataset in datasets],
            "layouts": [dataclasses.asdict(layout) for layout in layouts],
        }
        print(json.dumps(tree, indent=2))
    else:
        stats_text.show(datasets, layouts, config, batch, are_fixed=are_fixed)
    return 0
