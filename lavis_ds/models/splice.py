"""Image tokens take the places of their fillers among the text embeddings.

Shape suffixes: B rows, T tokens a row, N images, Q tokens an image, M filled positions, D width.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lavis_ds.errors import DataError


def splice(
    embeds_BTD: Tensor, image_tokens_NQD: Tensor, image_index_M: Tensor, sample_ids: Sequence[str] = ()
) -> Tensor:
    """Embeddings (B, T, D) with the image tokens written, in order, at flat positions `image_index_M` of (B * T).

    Out of place; differentiable in embeddings and image tokens. With M = 0 (the blank picture of a batch without
    pictures) the tokens enter with weight zero, so that the graph and every collective are the same on all ranks.

    Args:
        embeds_BTD: embeddings of the ids, fillers included.
        image_tokens_NQD: what the projector gives.
        image_index_M: M = N * Q, or 0.
        sample_ids: named in the message.

    Raises:
        DataError: M is neither N * Q nor 0.
    """
    num_positions, num_tokens = image_index_M.numel(), image_tokens_NQD.shape[0] * image_tokens_NQD.shape[1]
    tokens_MD = image_tokens_NQD.flatten(0, 1).to(embeds_BTD.dtype)
    if num_positions == 0:
        return embeds_BTD + (tokens_MD * 0).sum()  # zero before the sum: it can't overflow
    if num_positions != num_tokens:
        raise DataError(
            f"the batch has places for {num_positions} image tokens and its pictures have {num_tokens}.",
            where=f"samples {', '.join(sample_ids)}" if sample_ids else "batch",
            given=f"{image_tokens_NQD.shape[0]} images of {image_tokens_NQD.shape[1]} tokens",
            hint="tokens_per_image of the text processor must be the model's.",
        )
    return embeds_BTD.flatten(0, 1).index_copy(0, image_index_M, tokens_MD).view_as(embeds_BTD)
