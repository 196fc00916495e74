"""Square grids of patches, for projectors that look at neighbours.

Shape suffixes: N images, P patches an image, S patches a side, D width.
"""

from __future__ import annotations

import math

from torch import Tensor

from lavis_ds.errors import ConfigError


def square_side(num_patches: int, projector: str) -> int:
    """S where P = S * S.

    Args:
        num_patches: P, the tokens that the vision encoder gives for an image.
        projector: registered name, for the message.

    Raises:
        ConfigError: they are no square, so that a token's neighbours are not known.
    """
    side = math.isqrt(num_patches)
    if side**2 != num_patches:
        raise ConfigError(
            f"{num_patches} tokens an image are no square grid of patches, which {projector} needs.",
            where="model.projector.name",
            given=projector,
            expected="patches only, as many in height as in width",
            hint="Set vision.select_tokens to patch: a class token is no patch.",
        )
    return side


def as_grid(features_NPD: Tensor) -> Tensor:
    """(N, D, S, S), as convolutions and pooling take it."""
    num_images, num_patches, width = features_NPD.shape
    side = math.isqrt(num_patches)
    return features_NPD.transpose(1, 2).reshape(num_images, width, side, side)


def as_tokens(grid_NDSS: Tensor) -> Tensor:
    """(N, P, D), row by row."""
    return grid_NDSS.flatten(2).transpose(1, 2)


def pooled_side(side: int, grid_size: int) -> int:
    """`grid_size`, once it is known that averages can make that many tokens a side of `side` patches.

    Raises:
        ConfigError: there are fewer patches than that.
    """
    if grid_size > side:
        raise ConfigError(
            f"{side} x {side} patches can't be averaged to {grid_size} x {grid_size} tokens.",
            where="model.projector.grid_size",
            given=grid_size,
            expected=f"at most {side}",
        )
    return grid_size
