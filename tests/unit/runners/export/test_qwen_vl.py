from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoProcessor

from lavis_ds.api import load_model
from lavis_ds.runners.export import qwen_vl as qwen_vl_export
from tests.unit.runners.export.conftest import Tree

Exported = Callable[..., Any]
CLASSES = {
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration",
}


@pytest.mark.parametrize("arch", CLASSES)
def test_it_goes_out_as_itself(qwen_vl: Callable[[str], Tree], exported: Exported, arch: str) -> None:
    folder, agreements = exported(qwen_vl(arch))
    assert [a.logits < 3e-6 for a in agreements] == [True, True]  # measured 5.4e-7 to 6.6e-7
    assert agreements[0].pixels_max == pytest.approx(0, abs=1e-3)  # measured 3e-5 of 255
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == [CLASSES[arch]]
    processor: Any = AutoProcessor.from_pretrained(folder)
    assert processor.image_processor.size["longest_edge"] == 65536


def test_no_package_is_looked_for_by_the_name_of_our_kernel(
    qwen_vl: Callable[[str], Tree], exported: Exported, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there is a GPU, the tower's configuration has one; transformers takes it for a kind of FlashAttention."""
    made = qwen_vl_export.target

    def target(model: Any) -> Any:
        found = made(model)
        found.config.vision_config._attn_implementation = "lavis_ds_flash_varlen"
        return found

    monkeypatch.setattr(qwen_vl_export, "target", target)
    folder, agreements = exported(qwen_vl("qwen3_vl"))
    assert all(a.logits < 3e-6 for a in agreements)
    assert not [path for path in folder.glob("*.json") if "lavis_ds" in path.read_text()]


def test_its_processor_takes_videos(qwen_vl: Callable[[str], Tree], exported: Exported) -> None:
    folder, _ = exported(qwen_vl("qwen3_vl"))
    processor: Any = AutoProcessor.from_pretrained(folder)
    messages = [{"role": "user", "content": [{"type": "video"}, {"type": "text", "text": "what is it"}]}]
    text = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    video = np.zeros((4, 64, 64, 3), dtype=np.uint8)
    made = processor(text=text, videos=[video], do_sample_frames=False, return_tensors="pt")
    places = int((made["input_ids"] == processor.video_token_id).sum())
    assert places == int(made["video_grid_thw"].prod()) // 4 > 0


def test_the_folder_is_a_path_again(qwen_vl: Callable[[str], Tree], exported: Exported, tmp_path: Path) -> None:
    folder, _ = exported(qwen_vl("qwen3_vl"))
    model = load_model("qwen3_vl", path=str(folder))
    own = load_model("qwen3_vl", **_options(qwen_vl), pretrained=str(tmp_path / "run/checkpoints/step_00000001"))
    for (name, mine), theirs in zip(own.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0, msg=name)


def _options(qwen_vl: Callable[[str], Tree]) -> Tree:
    tree = dict(qwen_vl("qwen3_vl")["model"])
    tree.pop("arch")
    return tree
