"""Feed-forward layers that take a row's tokens in pieces, so that few inner activations exist at a time.

As in Arctic Long Sequence Training (https://arxiv.org/abs/2506.13996).

Shape suffixes: B rows, T tokens a row, D width.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lavis_ds.errors import ConfigError
from lavis_ds.models.recomputation import put_before


def tile_mlps(layers: Iterable[nn.Module], tiles: int | None, where: str) -> None:
    """Turn the `mlp` of each decoder layer, in place, into one that takes its input in `tiles` pieces.

    The number of pieces is fixed, and not their length: under ZeRO-3 every piece gathers the weights anew, and all
    ranks must do so equally often. Layers with experts are left as they are.

    Args:
        layers: of the decoder.
        tiles: None leaves all as it is.
        where: of the part in the configuration.

    Raises:
        ConfigError: no layer has such an `mlp`.
    """
    if tiles is None:
        return
    found = [getattr(layer, "mlp", None) for layer in layers]
    dense = [mlp for mlp in found if isinstance(mlp, nn.Module) and not hasattr(mlp, "experts")]
    if not dense:
        raise ConfigError(
            "this model has no feed-forward layers that can be taken in pieces.",
            where=f"{where}.mlp_tiles",
            given=tiles,
            expected="a model of dense layers",
        )
    for mlp in dense:
        put_before(mlp, _Tiled).tiles = tiles


class _Tiled(nn.Module):
    """Goes before a feed-forward layer's own class. It is in `__call__`, since kernels may have replaced `forward`."""

    tiles: int

    def __call__(self, hidden_BTD: Tensor) -> Tensor:
        function, pieces = super().__call__, hidden_BTD.tensor_split(self.tiles, dim=1)
        if torch.is_grad_enabled():
            function = partial(checkpoint, function, use_reentrant=False)
        return torch.cat([function(piece) for piece in pieces], dim=1)
