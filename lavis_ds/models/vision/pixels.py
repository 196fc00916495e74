"""uint8 pixels to what a vision tower was pretrained on."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lavis_ds.errors import DataError


class PixelNorm(nn.Module):
    """Pixels (N, 3, S, S) uint8 -> (x / 255 - mean) / std in float32.

    Args:
        mean: of each channel, for pixels in 0..1.
        std: of each channel.
        image_size: S; other sizes are refused.

    Attributes:
        statistics: mean and std as they were given, also where there are no tensors.
    """

    def __init__(self, mean: Sequence[float], std: Sequence[float], image_size: int) -> None:
        super().__init__()
        self.image_size = image_size
        self.statistics = (tuple(mean), tuple(std))
        self.mean: Tensor
        self.std: Tensor
        self.register_buffer("mean", torch.tensor(mean, dtype=torch.float32).view(3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(std, dtype=torch.float32).view(3, 1, 1), persistent=False)

    def forward(self, images_N3HW: Tensor) -> Tensor:
        """Normalised pixels.

        Raises:
            DataError: the pixels are not uint8, or of another size.
        """
        size = (3, self.image_size, self.image_size)
        if images_N3HW.dtype != torch.uint8 or images_N3HW.shape[1:] != size:
            raise DataError(
                "these pixels do not suit the vision encoder.",
                given=f"{images_N3HW.dtype} of shape {tuple(images_N3HW.shape)}",
                expected=f"torch.uint8 of shape (N, 3, {self.image_size}, {self.image_size})",
                hint="Set image_size of the image processors to that of the vision encoder.",
            )
        return (images_N3HW.float() / 255 - self.mean) / self.std
