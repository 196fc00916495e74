"""Write checkpoints, all ranks together, at once or while training goes on. See `checkpoint_files` for the layout."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers
from torch import Tensor

import lavis_ds
from lavis_ds import distributed
from lavis_ds.engines import fragments
from lavis_ds.engines.base import Engine
from lavis_ds.engines.fragments import Fragment
from lavis_ds.errors import CheckpointError
from lavis_ds.models import frozen
from lavis_ds.models.frozen import Frozen
from lavis_ds.models.weights import save_weights
from lavis_ds.runners import checkpoint_files, checksums
from lavis_ds.runners.checkpoint_files import Keep
from lavis_ds.runners.checksums import Content
from lavis_ds.runners.state import TrainState

ResultT = TypeVar("ResultT")


@dataclass(frozen=True)
class _Content:
    """What one rank writes.

    Attributes:
        fragments: its stretches of the optimizer.
        weights: the whole weights by name; on all ranks but the main one they are only gone through.
        left_out: frozen weights that are not among them.
        texts: file name -> text.
        rng: its random states.
    """

    fragments: Iterable[Fragment]
    weights: Iterator[tuple[str, Tensor]]
    left_out: Mapping[str, Frozen]
    texts: Mapping[str, str]
    rng: Mapping[str, Tensor]

    def on_host(self) -> _Content:
        """Copies that later steps do not change."""
        is_main = distributed.is_main()
        weights = [(name, tensor.detach().to("cpu", copy=True)) for name, tensor in self.weights if is_main]
        return replace(self, fragments=fragments.on_host(self.fragments), weights=iter(weights))

    def write(self, folder: Path, rank: int) -> dict[str, Content]:
        """Write the files of this rank; returns what they must hold from now on."""
        own = f"rank_{rank:05d}"
        with ThreadPoolExecutor(1) as beside:  # the disk is busy while weights are gathered and checksums are read
            try:
                fragments.write(self.fragments, folder / "optimizer", rank)
                early = beside.submit(checkpoint_files.flush, sorted((folder / "optimizer").glob(f"{own}_*")))
                save_weights(self.weights, folder / "weights", write=rank == 0)
            finally:
                for _ in self.weights:  # where gathering them needs all ranks, none may leave early
                    continue
            self._write_small(folder, rank)
            names = [n for n in checkpoint_files.written(folder) if own in n or (rank == 0 and "rank_" not in n)]
            paths = [folder / name for name in names]
            late = beside.submit(checkpoint_files.flush, [*paths, *{path.parent for path in paths}])
            found = checksums.contents(folder, names)  # read again while the system has them in memory
            for flushed in (early, late):  # an error of the disk is told but once
                flushed.result()
        return found

    def _write_small(self, folder: Path, rank: int) -> None:
        if rank == 0 and self.left_out:
            frozen.write(folder / "weights", self.left_out)
        torch.save(dict(self.rng), folder / checkpoint_files.rng_file(rank))
        for name, text in self.texts.items():
            (folder / name).write_text(text)


class CheckpointWriter:
    """Checkpoints of one run, one at a time.

    A checkpoint is written beside its final name and renamed when every rank is done, so that a run killed at any
    moment leaves either the whole of it or nothing.

    Args:
        folder: they are made in here.
        engine: what is saved.
        in_background: go on training while files are written, from a copy in host memory.
        size_bytes: of a checkpoint, about.
        left_out: frozen weights that checkpoints do not hold.

    Raises:
        CheckpointError: the disk has no room for one.
    """

    def __init__(
        self,
        folder: Path,
        engine: Engine,
        *,
        in_background: bool,
        size_bytes: int = 0,
        left_out: Mapping[str, Frozen] | None = None,
    ) -> None:
        self._folder, self._engine, self._in_background = folder, engine, in_background
        self._size_bytes, self._left_out = size_bytes, left_out or {}
        _by_main(lambda: checkpoint_files.clear(folder), folder)
        self._check_space()
        self._final: Path | None = None
        self._keep = Keep(1)
        self._thread: threading.Thread | None = None
        self._files: dict[str, Content] = {}
        self._error: Exception | None = None

    @property
    def is_pending(self) -> bool:
        """Whether a checkpoint was begun and not finished; the same on all ranks."""
        return self._final is not None

    def is_busy(self) -> bool:
        """Whether this rank still writes."""
        return self._thread is not None and self._thread.is_alive()

    def begin(self, state: TrainState, config_yaml: str, keep: Keep, data_state: Mapping[str, Any]) -> None:
        """Write this step's files, or start to. Called on all ranks; `finish` makes a checkpoint of them.

        Args:
            state: of the run.
            config_yaml: the resolved configuration.
            keep: which checkpoints stay once this one is complete.
            data_state: what this rank's batches need to go on, where they need anything.

        Raises:
            CheckpointError: the disk has no room for it, or can't be written any more.
        """
        assert self._final is None, "the one before is not finished"
        self._check_space()
        final = checkpoint_files.step_folder(self._folder, state.step)
        partial = _by_main(lambda: checkpoint_files.begin(final), final)
        self._final, self._keep, self._partial, self._files = final, keep, partial, {}
        content = self._content(state, config_yaml, data_state)
        if self._in_background:
            self._thread = threading.Thread(target=self._write, args=(content.on_host(),), daemon=True)
            self._thread.start()
        else:
            self._write(content)

    def finish(self) -> Path:
        """Wait for the files of all ranks and make them a checkpoint. Called on all ranks. Returns its path.

        Raises:
            CheckpointError: a rank could not write; the checkpoint before stays the newest.
        """
        assert self._final is not None
        if self._thread is not None:
            self._thread.join()
        final, own = self._final, self._error
        error = None if own is None else f"{type(own).__name__}: {own}"
        self._final = self._thread = self._error = None
        answers = distributed.gather_objects((error, self._files))
        failed = [(rank, what) for rank, (what, _) in enumerate(answers) if what is not None]
        if failed:
            if distributed.is_main():
                shutil.rmtree(self._partial, ignore_errors=True)  # its room is needed now
            raise _not_written(failed[0][1], f"{final}, rank {failed[0][0]}") from own
        files = {name: content for _, listed in answers for name, content in listed.items()}
        layout = self._engine.describe()
        _by_main(lambda: checkpoint_files.finish(self._partial, final, layout, _versions(), self._keep, files), final)
        return final

    def _check_space(self) -> None:
        _by_main(lambda: checkpoint_files.check_space(self._folder, self._size_bytes), self._folder)

    def _content(self, state: TrainState, config_yaml: str, data_state: Mapping[str, Any]) -> _Content:
        texts = {}
        if data_state:
            texts[checkpoint_files.data_file(distributed.global_rank())] = json.dumps(data_state) + "\n"
        if distributed.is_main():
            texts |= {"train_state.json": state.to_json(), "config.yaml": config_yaml}
            if scaler_state := self._engine.scaler_state():
                texts[f"optimizer/{checkpoint_files.LOSS_SCALE}"] = json.dumps(scaler_state) + "\n"
        weights = self._engine.full_tensors(lambda name: name not in self._left_out)
        return _Content(self._engine.fragments(), weights, self._left_out, texts, _rng_state())

    def _write(self, content: _Content) -> None:
        try:
            self._files = content.write(self._partial, distributed.global_rank())
        except Exception as error:  # noqa: BLE001  (raised by `finish`, on all ranks together)
            self._error = error


def _by_main(action: Callable[[], ResultT], where: Path) -> ResultT:
    """What `action`, done by the main rank, returns; called on all ranks, which go on when it is done.

    Raises:
        CheckpointError: it failed; all ranks raise the same.
    """
    result, error = None, None
    if distributed.is_main():
        try:
            result = action()
        except CheckpointError as found:
            error = found.of_all_ranks()
        except OSError as found:
            error = _not_written(f"{type(found).__name__}: {found}", str(where))
    result, error = distributed.broadcast_object((result, error))
    if error is not None:
        raise error
    return result  # type: ignore[return-value]


def _not_written(why: str, where: str) -> CheckpointError:
    error = CheckpointError(
        f"the checkpoint could not be written: {why}.",
        where=where,
        hint="The one before it is whole: make room, or mend the disk, and start again with --resume auto.",
    )
    error.exit_code = 1  # nothing was wrong with what the user gave
    return error.of_all_ranks()


def _versions() -> dict[str, str]:
    return {"lavis_ds": lavis_ds.__version__, "torch": torch.__version__, "transformers": transformers.__version__}


def _rng_state() -> dict[str, Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state
