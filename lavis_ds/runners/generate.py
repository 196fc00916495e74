"""Ask a trained model about pictures."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from lavis_ds.config.load import load
from lavis_ds.data.conversation import Content, Conversation, Image, Text, Turn
from lavis_ds.errors import ConfigError
from lavis_ds.runners import job


def generate(checkpoint: str, prompt: str, images: Sequence[str], *, max_new_tokens: int, temperature: float) -> str:
    """The model's answer to one question.

    Args:
        checkpoint: checkpoint folder, or a run folder for its newest one.
        prompt: the question; pictures stand before it.
        images: picture files.
        max_new_tokens: longest answer, in tokens.
        temperature: 0 takes the most likely token each time.

    Raises:
        CheckpointError: there is no complete checkpoint.
        ConfigError: a picture is missing.
    """
    folder, passed_over = job.checkpoint(Path(checkpoint))
    print("".join(f"{line}\n" for line in passed_over), end="", file=sys.stderr)
    missing = [path for path in images if not Path(path).is_file()]
    if missing:
        raise ConfigError("there is no such picture.", where="--image", given=missing[0])
    config = load(folder / "config.yaml").config
    weights = {"pretrained": str(folder), "finetuned": None}
    config = config.model_copy(update={"model": config.model.model_copy(update=weights)})

    import torch

    from lavis_ds import distributed
    from lavis_ds.data.order import SampleKey
    from lavis_ds.runners import build
    from lavis_ds.runners.evaluate import evaluation_mode

    model = build.build_model(config).to(distributed.device())
    entry = next(iter(config.datasets))
    content: tuple[Content, ...] = (*(Image(str(Path(path).absolute())) for path in images), Text(prompt))
    question = Conversation("prompt", (Turn("user", content), Turn("assistant", (Text(""),))))
    data = build.encoded(config, {entry: [question]}, build.text_context(model), training=False, prompts=True)
    batch = build.collator(model, data, padding_side="left")([[data[SampleKey(0, 0, epoch=0, position=0)]]])
    context = build.eval_context(data, synced=False)
    sampling = {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}
    with evaluation_mode(model):
        ids: torch.Tensor = model.generate(
            batch.to(distributed.device()),
            max_new_tokens=max_new_tokens,
            eos_token_id=list(context.stop_ids),
            **sampling,
        )
    return context.decode(ids[0].tolist())
