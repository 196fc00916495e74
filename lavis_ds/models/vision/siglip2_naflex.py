"""SigLIP 2 with NaFlex (https://arxiv.org/abs/2502.14786): pictures of any size and shape, as rows of patches.

Shape suffixes: P patches of all pictures, E numbers a patch, N pictures, L patches of the largest picture, S patches a
side in pretraining, D width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModel
from transformers.masking_utils import create_bidirectional_mask
from transformers.models.siglip2.modeling_siglip2 import Siglip2VisionEmbeddings

from lavis_ds import registry
from lavis_ds.errors import ConfigError, DataError
from lavis_ds.models import hub
from lavis_ds.models.configs import Siglip2NaFlexConfig
from lavis_ds.models.layers import repeated_layers
from lavis_ds.models.parts import NativeVisionEncoder
from lavis_ds.models.recomputation import recompute
from lavis_ds.models.vision.hf_tower import detach_final_norm, drop_unused, statistics_of, truncate
from lavis_ds.models.vision.qwen_vl_tower import PatchNorm

_WHERE = "model.vision"


@registry.register_vision_encoder("siglip2_naflex")
class Siglip2NaFlex(NativeVisionEncoder):
    """`hidden_states[select_layer]` of transformers' `Siglip2VisionModel`; the layers after it do not exist.

    Raises:
        ConfigError: there is no such layer, or the model is no SigLIP 2 with NaFlex.
        CheckpointError: the folder or hub id does not hold the model's weights.
    """

    Config = Siglip2NaFlexConfig

    def __init__(self, config: Siglip2NaFlexConfig) -> None:
        super().__init__()
        tower_config = _tower_config(config)
        truncate(tower_config, config.select_layer)
        self.tower: Any = _build(config, tower_config)
        self.sourced = ("tower", "norm") if config.path else ()
        self.norm = detach_final_norm(self.tower) if config.final_norm else nn.Identity()
        drop_unused(self.tower)
        recompute(repeated_layers(self.tower), config, _WHERE)
        self.patch_size = int(tower_config.patch_size)
        self.patch_elements = 2 * int(tower_config.num_channels) * self.patch_size**2
        self.hidden_size = int(tower_config.hidden_size)
        self.pixels = PatchNorm(*statistics_of(config.path, str(tower_config.model_type)), self.patch_elements)

    def forward(self, patches_PE: Tensor, grids_N3: Tensor, merge_size: int) -> Tensor:
        shapes_N2 = self._shapes(len(patches_PE), grids_N3.cpu(), merge_size)
        pixels_PE = self._one_frame(self.pixels(patches_PE)).to(next(self.tower.parameters()).dtype)
        longest = int(shapes_N2.prod(-1).max())
        # A picture a row, its patches row by row, the shorter ones padded.
        place_P = _places(shapes_N2, longest, merge_size).to(pixels_PE.device)
        size = (len(shapes_N2), longest)
        pixels_NLE = pixels_PE.new_zeros(size[0] * size[1], pixels_PE.shape[1]).index_copy(0, place_P, pixels_PE)
        mask_NL = torch.zeros(size, dtype=torch.bool, device=place_P.device).view(-1).index_fill(0, place_P, True)
        hidden_NLD = self._encode(pixels_NLE.view(*size, -1), mask_NL.view(size), shapes_N2)
        features_PD: Tensor = self.norm(hidden_NLD.flatten(0, 1)[place_P])
        return features_PD

    def _encode(self, pixels_NLE: Tensor, mask_NL: Tensor, shapes_N2: Tensor) -> Tensor:
        """As `Siglip2VisionModel.forward`, which reads the weight of a submodule that is not called.

        Under ZeRO-3 that weight is gathered by a call only, so the table of positions is asked for all its rows.
        """
        embeddings: Siglip2VisionEmbeddings = self.tower.embeddings
        side = embeddings.position_embedding_size
        table_SSD = embeddings.position_embedding(torch.arange(side**2, device=mask_NL.device)).view(side, side, -1)
        positions_NLD = embeddings.resize_positional_embeddings(table_SSD, shapes_N2, mask_NL.shape[1])  # type: ignore[arg-type]
        hidden_NLD = embeddings.patch_embedding(pixels_NLE) + positions_NLD
        mask = create_bidirectional_mask(config=self.tower.config, inputs_embeds=hidden_NLD, attention_mask=mask_NL)
        made: Tensor = self.tower.encoder(inputs_embeds=hidden_NLD, attention_mask=mask).last_hidden_state
        return made

    def _shapes(self, num_patches: int, grids_N3: Tensor, merge_size: int) -> Tensor:
        """(N, 2): height and width of each picture in patches.

        Raises:
            DataError: there are not as many patches as the grids say, or one is a video's.
        """
        whole = bool((grids_N3[:, 0] == 1).all()) and not bool((grids_N3[:, 1:] % merge_size).any())
        if not whole or int(grids_N3.prod(-1).sum()) != num_patches:
            raise DataError(
                "the patches do not fill the pictures' grids.",
                given=f"{num_patches} patches, grids {grids_N3.tolist()[:4]}",
                expected=f"pictures, not videos, with heights and widths that are multiples of {merge_size}",
                hint="merge_size of the image processor must be the projector's.",
            )
        return grids_N3[:, 1:]

    def _one_frame(self, pixels_PE: Tensor) -> Tensor:
        """Of a patch's two equal frames the first, its channels last, as the tower was trained."""
        frames = pixels_PE.view(len(pixels_PE), -1, 2, self.patch_size, self.patch_size)
        return frames[:, :, 0].permute(0, 2, 3, 1).flatten(1)


def _places(shapes_N2: Tensor, longest: int, merge_size: int) -> Tensor:
    """(P,): where in (N * L) the patches go, that come square by square and stand there row by row."""
    places = []
    for number, (height, width) in enumerate(shapes_N2.tolist()):
        rows = torch.arange(height * width).view(height // merge_size, merge_size, width // merge_size, merge_size)
        places.append(rows.transpose(1, 2).flatten() + number * longest)
    return torch.cat(places)


def _tower_config(config: Siglip2NaFlexConfig) -> Any:
    if config.path is not None:
        whole = hub.read_config(config.path, f"{_WHERE}.path")
    else:
        whole = hub.config_of_shape(config.config or {}, f"{_WHERE}.config")
    tower = getattr(whole, "vision_config", whole)
    if tower.model_type != "siglip2_vision_model":
        raise ConfigError(
            "this is no SigLIP 2 with NaFlex.",
            where=_WHERE,
            given=f"a {whole.model_type}",
            expected="a siglip2, such as google/siglip2-base-patch16-naflex",
            hint="SigLIP 2 of a fixed size is a siglip: use hf_vision.",
        )
    return tower


def _build(config: Siglip2NaFlexConfig, tower_config: Any) -> Any:
    if config.path is not None:
        return hub.load_model(AutoModel, config.path, f"{_WHERE}.path", config=tower_config, holds_more=True)
    return hub.make_model(AutoModel, tower_config)
