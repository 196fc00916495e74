"""Which frozen weights checkpoints leave out (`run.save_trainable_only`), and whether they are still the same."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from lavis_ds import distributed
from lavis_ds.engines.base import Engine
from lavis_ds.errors import CheckpointError
from lavis_ds.models import frozen
from lavis_ds.models.frozen import Frozen, Origin


class FrozenWeights:
    """The frozen weights that the model of a run has read from somewhere; checksums are taken once, and shared out.

    Every method is called on all ranks.

    Args:
        engine: with the model inside.
        origins: name of a parameter -> where its weights can be read again (`Model.origins`).
    """

    def __init__(self, engine: Engine, origins: Mapping[str, Origin]) -> None:
        self._engine = engine
        self._origins = {name: origin for name, origin in origins.items() if name not in engine.trained}
        self._checksums: dict[str, dict[str, int]] = {}
        self._num_bytes: dict[str, int] = {}

    def num_bytes(self, names: Iterable[str]) -> int:
        """Their size, once they were looked at."""
        return sum(self._num_bytes[name] for name in names)

    def look(self) -> None:
        """Remember what they are now."""
        self._look_at(self._origins)

    def verify(self, recorded: Mapping[str, Frozen], where: Path) -> None:
        """Compare those that a checkpoint leaves out.

        Raises:
            CheckpointError: some are not what they were when it was written.
        """
        self._look_at(recorded)
        try:
            frozen.check(recorded, self._checksums, where)
        except CheckpointError as error:
            raise error.of_all_ranks() from None

    def left_out(self, *, look_again: bool) -> dict[str, Frozen]:
        """What checkpoints of this run leave out: all that was there when `look` was called.

        With `look_again` what has changed since then is not among it: a whole checkpoint has put it there.
        """
        before = self._checksums
        if look_again:
            self._checksums = {}
            self.look()
        now = self._checksums
        same = {name for name in now if now[name] == before.get(name)}
        return {name: Frozen(origin, now[name]) for name, origin in self._origins.items() if name in same}

    def _look_at(self, names: Iterable[str]) -> None:
        missing = {name for name in names if name not in self._checksums}
        rank, size, own = distributed.global_rank(), distributed.world_size(), {}
        for number, (name, tensor) in enumerate(self._engine.full_tensors(missing.__contains__)):
            self._num_bytes[name] = tensor.nbytes
            if number % size == rank:
                own[name] = frozen.checksums(tensor)
        for found in distributed.gather_objects(own):
            self._checksums.update(found)
