"""Qwen-VL's tower of native resolution: pictures of any size are rows of patches, and the merger makes them tokens.

Videos are pictures with several steps along time. Patches of one step do not attend to those of others.

Shape suffixes: P patches of all pictures, D numbers a patch, N pictures, Q tokens of all pictures, Dl language width.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import vision_utils

from lavis_ds.errors import DataError
from lavis_ds.models.attention import Attention
from lavis_ds.models.attention_kernels import can_run_one_length, planned_rows
from lavis_ds.models.parts import Part

_MAX_KNOWN = 256
"""Sizes of pictures whose places are kept: some 50 KB each at 448 x 448."""

_MAX_PLANS = 64
"""Pairs of size and number of pictures that cuDNN may plan its kernel for, from the second batch of a kind on: 0.1 s of
the host each."""


class PatchNorm(nn.Module):
    """Patches (P, D) uint8 -> (x / 255 - mean) / std in float32; the channel is the slowest index within D.

    Args:
        mean: of each channel, for pixels in 0..1.
        std: of each channel.
        patch_elements: D.
    """

    def __init__(self, mean: Sequence[float], std: Sequence[float], patch_elements: int) -> None:
        super().__init__()
        self.patch_elements = patch_elements
        self.mean: Tensor
        self.std: Tensor
        self.register_buffer("mean", torch.tensor(mean, dtype=torch.float32).view(-1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(std, dtype=torch.float32).view(-1, 1), persistent=False)

    def forward(self, patches_PD: Tensor) -> Tensor:
        """Normalised patches.

        Raises:
            DataError: they are not uint8, or of another size.
        """
        if patches_PD.dtype != torch.uint8 or patches_PD.shape[1:] != (self.patch_elements,):
            raise DataError(
                "these patches do not suit the vision tower.",
                given=f"{patches_PD.dtype} of shape {tuple(patches_PD.shape)}",
                expected=f"torch.uint8 of shape (P, {self.patch_elements})",
                hint="Use an image processor of native resolution with the model's patch_size.",
            )
        pixels_PCE = patches_PD.reshape(len(patches_PD), len(self.mean), -1).float() / 255
        return ((pixels_PCE - self.mean) / self.std).flatten(1)


class PatchProjection(nn.Conv3d):
    """A convolution that sees each patch once is a matrix product; as such it takes 3 ms a step less on an H200.

    The convolution of a tower of transformers is made one in place, so that hooks, names and weights stay.
    """

    def forward(self, patches: Tensor) -> Tensor:
        """(P, C, frames, rows, columns) -> (P, Dv, 1, 1, 1)."""
        if patches.shape[2:] != self.kernel_size:
            return super().forward(patches)
        return F.linear(patches.flatten(1), self.weight.flatten(1), self.bias)[..., None, None, None]


class QwenVLTower(Part):
    """The vision tower of a Qwen2.5-VL or Qwen3-VL of transformers, with its merger.

    Args:
        tower: `model.visual` of the whole model.
        mean: of each channel in pretraining, for pixels in 0..1.
        std: of each channel.
        kernel: of attention.

    Attributes:
        merge_size: patches a side that become one token.
        patch_elements: D = channels * frames * rows * columns of a patch.
        tokens_per_second: positions a second of video (Qwen2.5-VL); None where times are text (Qwen3-VL).
    """

    def __init__(self, tower: Any, mean: Sequence[float], std: Sequence[float], kernel: Attention) -> None:
        super().__init__()
        config = tower.config
        self.merge_size = int(config.spatial_merge_size)
        self.patch_elements = int(config.in_channels * config.temporal_patch_size * config.patch_size**2)
        self.tokens_per_second: float | None = getattr(config, "tokens_per_second", None)
        self.kernel = kernel.fitted_tower(tower)
        self.attention = str(self.kernel)
        self.tower: Any = tower
        if type(tower.patch_embed.proj) is nn.Conv3d:
            tower.patch_embed.proj.__class__ = PatchProjection
        self._known_places: OrderedDict[tuple[Any, ...], dict[str, Tensor]] = OrderedDict()
        self._plans = Counter[tuple[int, int]]()
        self.pixels = PatchNorm(mean, std, self.patch_elements)

    def forward(self, patches_PD: Tensor, grids_N3: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Tokens (Q, Dl), and as many (Q, Dl) again for each of the decoder's first layers (DeepStack; may be none).

        Args:
            patches_PD: see `lavis_ds.batch.Batch.images`.
            grids_N3: see `lavis_ds.batch.Batch.image_grids`.

        Raises:
            DataError: patches are of another kind, or not as many as the grids say.
        """
        grids_N3 = grids_N3.cpu()  # where `Batch.to` has left them
        num_patches = int(grids_N3.prod(-1).sum())
        if num_patches != len(patches_PD) or (grids_N3[:, 1:] % self.merge_size).any():
            raise DataError(
                "the patches do not fill the pictures' grids.",
                given=f"{len(patches_PD)} patches, grids {grids_N3.tolist()[:4]}",
                expected=f"{num_patches} patches, heights and widths that are multiples of {self.merge_size}",
            )
        pixels_PD = self.pixels(patches_PD).to(next(self.tower.parameters()).dtype)
        layout = self._layout(grids_N3, pixels_PD)
        output = self.tower(pixels_PD, grid_thw=grids_N3, return_dict=True, **layout)
        return output.pooler_output, tuple(getattr(output, "deepstack_features", None) or ())

    def _layout(self, grids_N3: Tensor, pixels_PD: Tensor) -> dict[str, Any]:
        """What the tower derives from grids, ready made: it would wait for the device in every layer."""
        config, device = self.tower.config, pixels_PD.device
        pictures = [self._places(tuple(grid), device) for grid in grids_N3.tolist()]
        layout: dict[str, Any] = {name: torch.cat([places[name] for places in pictures]) for name in pictures[0]}
        ends = {"seqlens": vision_utils.get_vision_cu_seqlens(grids_N3)}
        if hasattr(config, "window_size"):
            index, window_ends = vision_utils.get_vision_window_index(
                grids_N3, self.merge_size, config.window_size, config.patch_size
            )
            layout["window_index"] = index.to(device)
            ends["window_seqlens"] = window_ends
        return layout | self._ends(ends, pixels_PD)

    def _places(self, grid: tuple[int, ...], device: torch.device) -> dict[str, Tensor]:
        """Where the patches of one picture are. Sizes come again and again, so the latest are kept on the device."""
        key = (*grid, device)
        if key in self._known_places:
            self._known_places.move_to_end(key)
            return self._known_places[key]
        tower, grid_13 = self.tower, torch.tensor([grid])
        places = {"position_ids": vision_utils.get_vision_position_ids(grid_13, self.merge_size)}
        if hasattr(tower, "pos_embed"):
            places["interp_indices"], places["interp_weights"] = (
                vision_utils.get_vision_interpolation_indices_and_weights(
                    grid_13,
                    tower.num_grid_per_side,
                    mode=tower.interpolation_mode,
                    align_corners=tower.interpolation_align_corners,
                    spatial_merge_size=self.merge_size,
                )
            )
        self._known_places[key] = {name: tensor.to(device) for name, tensor in places.items()}
        if len(self._known_places) > _MAX_KNOWN:
            self._known_places.popitem(last=False)
        return self._known_places[key]

    def _ends(self, ends: dict[str, Tensor], pixels_PD: Tensor) -> dict[str, Any]:
        """Where pictures (and windows) end: on the CPU, where SDPA takes them apart, or on the device, for one kernel.

        Raises:
            ConfigError: the attention kernel that the configuration names can't run these patches.
        """
        if not self.kernel.runs(pixels_PD):
            return {f"cu_{name}": tensor for name, tensor in ends.items()}
        longest = {f"max_{name.removesuffix('s')}": int(tensor.diff().max()) for name, tensor in ends.items()}
        found = {f"cu_{name}": tensor.to(pixels_PD.device) for name, tensor in ends.items()} | longest
        rows = self._rows_of_one_length(ends, pixels_PD)
        return found | {"rows_of_one_length": rows} if rows else found

    def _rows_of_one_length(self, ends: dict[str, Tensor], pixels_PD: Tensor) -> int:
        """In how many rows cuDNN is to run these pictures: 0 unless all are of one size, which comes again."""
        lengths, config = ends["seqlens"].diff(), self.tower.config
        length, head_size = int(lengths[0]), config.hidden_size // config.num_heads
        if self.kernel.explicit or len(ends) > 1 or (lengths != length).any():
            return 0
        if not can_run_one_length(pixels_PD, length, head_size):
            return 0
        plan = length, planned_rows(len(lengths))
        if plan in self._plans or len(self._plans) < _MAX_PLANS:
            self._plans[plan] += 1
        return plan[1] if self._plans[plan] > 1 else 0
