"""`lavis-ds data index`: every index and cache that a run would need, made ahead."""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from lavis_ds.config.schema import RootConfig
from lavis_ds.data import cache
from lavis_ds.data.builders.base import ConversationStream
from lavis_ds.data.builders.webdataset import WebDataset
from lavis_ds.data.shards.parallel import run_all
from lavis_ds.engines import ds_config
from lavis_ds.runners import preflight, process
from lavis_ds.runners.data_tools import reading

_KINDS = {
    "records": "index of records",
    "checked": "check of items",
    "items": "joined items",
    "shard_index": "index of shards",
    "lengths": "token counts",
    "packs": "plan of rows",
}
"""Kinds of cache entries that are told about, and what to call them."""


@dataclass(frozen=True)
class Outcome:
    """What one job did.

    Attributes:
        what: dataset and split, or what was counted.
        made: kinds of the entries that it made; empty where all were there.
        summary: what there is now.
        seconds: it took.
    """

    what: str
    made: tuple[str, ...]
    summary: str
    seconds: float

    def __str__(self) -> str:
        names = Counter(_KINDS[kind] for kind in self.made if kind in _KINDS)
        counted = ", ".join(name if count == 1 else f"{count} x {name}" for name, count in names.items())
        state = f"made {counted} in {self.seconds:.1f} s" if names else "all there"
        return f"{self.what}: {self.summary}; {state}"


def index(cfg: str, options: Sequence[str], *, splits: Sequence[str], num_processes: int | None, num_gpus: int) -> int:
    """Make what is missing, and say what was made and what was there.

    Args:
        cfg: the project's YAML file.
        options: overrides of it.
        splits: which splits; all that the run trains and evaluates on where empty.
        num_processes: datasets read at the same time; one for each CPU where left out.
        num_gpus: ranks of the run, on which the plan of packed rows may depend.

    Returns:
        The exit code, 0.

    Raises:
        LavisError: the configuration, an annotation file or a shard is wrong.
    """
    config = reading.load_config(cfg, options)
    run, batching = config.run, config.data.batching
    batch = ds_config.batch_plan(run, num_gpus)
    wanted = list(dict.fromkeys(splits or [*run.train_splits, *run.valid_splits, *run.test_splits]))
    made = 0
    for outcome in _read_all(config, wanted, num_processes or len(os.sched_getaffinity(0))):
        made += _tell(outcome)
    if batching == "padded":
        print("token counts: not needed, since data.batching is padded")
    elif set(run.train_splits) <= set(wanted):
        made += _tell(_plan(config, batch.global_batch_size))
    else:
        print(f"token counts: made only together with all training splits ({', '.join(run.train_splits)})")
    print(f"{'Made what was missing' if made else 'All was there'}, in {cache.folder()}.")
    return 0


def _tell(outcome: Outcome) -> bool:
    print(outcome)
    return bool(outcome.made)


def _read_all(config: RootConfig, splits: Sequence[str], num_processes: int) -> Iterator[Outcome]:
    """Read every split of every dataset; shards one dataset after another, since each is read in parallel itself."""
    jobs = [(name, split) for split in splits for name in _having(config, split)]
    shards = [job for job in jobs if isinstance(reading.builder(config, job[0]), WebDataset)]
    files = [job for job in jobs if job not in shards]
    read = partial(_read, config)
    yield from map(read, shards)
    if files:
        yield from run_all(
            read, files, num_processes=num_processes, progress=sys.stderr.isatty(), title="reading annotations"
        )


def _having(config: RootConfig, split: str) -> list[str]:
    """The entries with this split; raises ConfigError where there are none."""
    return list(preflight.read_split(config, split, only=""))  # reads none of them


def _read(config: RootConfig, job: tuple[str, str]) -> Outcome:
    name, split = job

    def read() -> str:
        samples = reading.builder(config, name).build(split)
        if isinstance(samples, ConversationStream):
            return "a stream, which needs no index"
        return f"{len(samples):,} samples"

    return _timed(f"{name}/{split}", read)


def _plan(config: RootConfig, rows_a_step: int) -> Outcome:
    """Count the tokens of all training samples, and plan the rows of all steps."""
    found = reading.read(config, None).require_indexed()

    process.prepare()
    from lavis_ds.runners import step_plan
    from lavis_ds.runners.data_tools.encoded import encode

    def plan() -> str:
        encoded = encode(found, as_training=True)
        rows, _ = step_plan.row_plan(encoded.config, encoded.data, rows_a_step)
        return f"{rows.num_steps:,} optimizer steps of {config.data.batching} rows"

    return _timed("token counts", plan)


def _timed(what: str, do: Callable[[], str]) -> Outcome:
    start, before = time.monotonic(), len(cache.made)
    summary = do()
    return Outcome(what, tuple(cache.made[before:]), summary, time.monotonic() - start)
