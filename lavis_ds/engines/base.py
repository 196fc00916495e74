"""What a training loop needs of whatever computes gradients, shards them and updates weights."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lavis_ds.batch import Batch
from lavis_ds.engines.fragments import Fragment, StoredFragments
from lavis_ds.errors import CheckpointError
from lavis_ds.optim.adamw import NO_FACTORS


@dataclass(frozen=True)
class StepResult:
    """Outcome of one optimizer step, the same on every rank.

    Attributes:
        grad_norm: global L2 norm of the gradient before clipping; infinite where it was not finite.
        applied: False where the gradient was not finite and the weights were left alone.
    """

    grad_norm: float
    applied: bool


def every(name: str) -> bool:
    """True."""
    return True


class Engine(Protocol):
    """One model, its optimizer and its shards on one rank.

    Attributes:
        name: what the user wrote in `run.engine`.
        module: the model; call the engine itself for a forward pass with gradients.
        device: where batches belong.
        data_parallel_size: ranks that see different data.
        data_parallel_rank: this rank among them.
        is_sharded: True where a rank holds only a part of each parameter (ZeRO-3), so that every rank must run the same
            submodules the same number of times.
        trained: the parameters that train, by name, as autograd knows them; those of `module` may be arranged in
            another way.
    """

    name: str
    module: nn.Module
    device: torch.device
    data_parallel_size: int
    data_parallel_rank: int
    is_sharded: bool
    trained: dict[str, nn.Parameter]

    def __call__(self, batch: Batch) -> tuple[Tensor, ...]:
        """The model's forward pass."""
        ...

    def micro_batch(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Context of one micro-batch's forward and backward pass; `is_last` marks the last one before `step`."""
        ...

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of a scalar, divided by the number of ranks and by nothing else."""
        ...

    def step(self, lr: float, factors: Mapping[str, float] = NO_FACTORS) -> StepResult:
        """Clip and update. `lr` is the schedule's value; a parameter group scales it by its own `lr_scale`.

        `factors` scales it once more in this step, by the name of the group.
        """
        ...

    def fragments(self) -> Iterator[Fragment]:
        """All that this rank holds of the optimizer, in the model's order; the same at any time but for the values."""
        ...

    def scaler_state(self) -> dict[str, float]:
        """Numbers of a dynamic loss scale; none without one."""
        ...

    def restore(
        self,
        stored: StoredFragments,
        weights: Mapping[str, Tensor],
        scaler_state: Mapping[str, float],
        kept: Container[str] = (),
    ) -> list[str]:
        """Take over the state of any engine, at any number of ranks. Called on all ranks.

        Args:
            stored: what all ranks' `fragments` were.
            weights: what `full_tensors` gave then, by name.
            scaler_state: what it was then.
            kept: names of parameters that stay as they are, since `weights` leaves them out.

        Returns:
            Names of parameters whose moments start anew, since they did not train then.

        Raises:
            CheckpointError: something is missing, or has another shape.
        """
        ...

    def full_tensors(self, wanted: Callable[[str], bool] = every) -> Iterator[tuple[str, Tensor]]:
        """Every parameter and persistent buffer whose name is wanted, whole, one at a time, by name.

        All ranks must iterate to the end.
        """
        ...

    def finish(self) -> None:
        """Training is over, or stops here: print what the engine's own tools have measured. Called on all ranks."""
        ...

    def describe(self) -> dict[str, Any]:
        """What a checkpoint's manifest says of the layout (engine, ranks, ZeRO stage, precision)."""
        ...


def fill_weights(module: nn.Module, weights: Mapping[str, Tensor], kept: Container[str] = ()) -> None:
    """Copy `weights` into a module that is whole on this rank; parameters that are `kept` stay as they are.

    Raises:
        CheckpointError: one is missing.
    """
    for name, tensor in [*saved_parameters(module), *persistent_buffers(module)]:
        if name not in kept:
            tensor.detach().copy_(weight_of(weights, name, tensor.shape))


def weight_of(weights: Mapping[str, Tensor], name: str, shape: torch.Size) -> Tensor:
    """The weight of this name.

    Raises:
        CheckpointError: there is none, or it has another shape.
    """
    if name not in weights:
        raise CheckpointError("the checkpoint lacks a tensor of the model.", given=name)
    tensor = weights[name]
    if tensor.shape != shape:
        raise CheckpointError(f"{name} had another shape.", given=str(tuple(shape)), expected=str(tuple(tensor.shape)))
    return tensor


def saved_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters that belong to the weights, by name: all but those stored in 4 bits.

    These never change, and are made anew from the weights that the model is built of.
    """
    yield from ((name, parameter) for name, parameter in module.named_parameters() if parameter.is_floating_point())


def persistent_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Buffers that belong to the weights, by name."""
    saved = module.state_dict(keep_vars=True).keys()
    yield from ((name, buffer) for name, buffer in module.named_buffers() if name in saved)
