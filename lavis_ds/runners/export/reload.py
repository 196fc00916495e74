"""A program of its own: load an exported folder with nothing but transformers, and say what it computes.

Usage: python -P reload.py FOLDER WORK. `WORK/request.json` lists samples; for each, `WORK/<n>.in.safetensors` is what
the model is given, and `WORK/<n>.out.safetensors` will hold its logits, and ids and pixels that the processor makes.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText, AutoProcessor


def main(folder: str, work: Path) -> None:
    """Answer the request."""
    torch.set_grad_enabled(False)
    loaded: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    model, info = loaded
    model.eval()
    embeddings = [layer.weight for layer in (model.get_input_embeddings(), model.get_output_embeddings())]
    report = {
        "class": type(model).__name__,
        "problems": {kind: sorted(map(str, names)) for kind, names in info.items() if names},
        "tied_embeddings": embeddings[0] is embeddings[1],
    }
    (work / "report.json").write_text(json.dumps(report))
    if (Path(folder) / "adapter").is_dir():
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, f"{folder}/adapter").eval()
    processor_class: Any = AutoProcessor  # untyped
    processor = processor_class.from_pretrained(folder)
    request = json.loads((work / "request.json").read_text())
    for number, sample in enumerate(request):
        inputs = load_file(work / f"{number}.in.safetensors")
        made = processed(processor, sample)
        result = {"logits": model(**inputs).logits, "input_ids": made["input_ids"]}
        if sample["picture"]:
            result["pixel_values"] = made["pixel_values"]
        save_file({name: tensor.contiguous() for name, tensor in result.items()}, work / f"{number}.out.safetensors")


def processed(processor: Any, sample: dict[str, Any]) -> Any:
    """What the processor makes of the question, called as its users call it."""
    picture = Image.open(sample["picture"]) if sample["picture"] else None
    if sample["messages"] is None:
        return processor(images=picture, text=sample["text"], return_tensors="pt")
    writer = processor if processor.chat_template else processor.tokenizer
    text = writer.apply_chat_template(sample["messages"], tokenize=False, add_generation_prompt=True)
    return processor(images=picture, text=text, add_special_tokens=False, return_tensors="pt")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
