"""What stands in a sample for a picture or a video: marks, times, and the places that the model fills."""

from __future__ import annotations

from collections.abc import Sequence

from lavis_ds.data.processors.base import TextContext
from lavis_ds.data.processors.tokens import TextEncoder, Tokens
from lavis_ds.data.processors.views import Views, step_times


class PictureWriter:
    """Pictures and videos -> ids.

    A picture is a mark, places, and a mark. So is a video where the model has positions in seconds (Qwen2.5-VL). Where
    it reads times (Qwen3-VL), each step along time is a picture of its own with `<1.5 seconds>` before it, and marks
    stand around the whole too: the chat template writes them, and `Qwen3VLProcessor` keeps them.

    Args:
        context: what encoding text needs to know of the model.
        encoder: text to ids.
        filler: id on places, for models without tokens for that.

    Source: `replace_video_token` of transformers' Qwen2_5_VLProcessor and Qwen3VLProcessor.
    """

    def __init__(self, context: TextContext, encoder: TextEncoder, filler: int) -> None:
        self._encoder = encoder
        self._tokens_a_view, self._reads_times = context.tokens_per_image, context.tokens_per_second is None
        before, after = context.image_marks or ("", "")
        self._before, self._after = (encoder.markup(mark, is_first=False) for mark in (before, after))
        holders = [encoder.markup(token, is_first=False) for token in context.placeholders or ()]
        self._of_picture, self._of_video = (ids[0] if len(ids) == 1 else filler for ids in holders or [(), ()])

    def write(self, tokens: Tokens, views: Views) -> None:
        """Add what stands for a picture or a video; none of it is a target."""
        start, count = len(tokens), int(len(views) * self._tokens_a_view)
        tokens.add(self._before)
        if views.times is None:
            tokens.add_places(self._of_picture, count)
        elif self._reads_times:
            self._write_steps(tokens, step_times(views.times), count)
        else:
            tokens.add_places(self._of_video, count)
        tokens.add(self._after)
        tokens.end_picture(start)

    def _write_steps(self, tokens: Tokens, times: Sequence[float], count: int) -> None:
        for time in times:
            tokens.add(self._encoder.text(f"<{time:.1f} seconds>"))
            tokens.add(self._before)
            tokens.add_places(self._of_video, count // len(times))
            tokens.add(self._after)
