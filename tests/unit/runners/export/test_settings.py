"""Processors: the same ids and pixels as ours, or one clear error."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from lavis_ds.errors import CheckpointError, ConfigError
from tests.unit.runners.export.conftest import CLIP, SIGLIP, Tree

Exported = Callable[..., Any]

THINKING = (
    "{%- if messages[0].role == 'system' %}"
    "{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{%- endif %}"
    "{%- for message in messages %}"
    "{%- if message.content is string %}{%- set content = message.content %}"
    "{%- else %}{%- set content = '' %}{%- endif %}"
    "{%- if message.role == 'user' %}{{- '<|im_start|>user\\n' + content + '<|im_end|>\\n' }}"
    "{%- elif message.role == 'assistant' %}"
    "{{- '<|im_start|>assistant\\n' }}{%- if loop.last %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
    "{{- content + '<|im_end|>\\n' }}{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
    "{%- endif %}"
)
"""As Qwen3's: strings only, and an empty block of thoughts before an answer without any."""


def use_template(tree: Tree, template: str, folder: Path) -> None:
    language = tree["model"]["language"]
    tokenizer: Any = AutoTokenizer.from_pretrained(language["tokenizer"])
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder / "tokenizer")
    language["tokenizer"] = str(folder / "tokenizer")


def prompt(folder: Path, *messages: Tree) -> str:
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    return str(tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True))


ASKED = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what is it"}]}


def test_a_template_that_thinks(tree: Tree, exported: Exported, tmp_path: Path) -> None:
    use_template(tree, THINKING, tmp_path)
    folder, agreements = exported(tree)
    assert [a.logits < 2e-6 for a in agreements] == [True, True]  # measured 3e-7; and input ids were the same
    assert prompt(folder, ASKED).endswith("<image>what is it<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_a_template_of_other_prompts_is_refused(tree: Tree, exported: Exported, tmp_path: Path) -> None:
    use_template(tree, THINKING.replace("enable_thinking", "be_quick"), tmp_path)
    with pytest.raises(ConfigError, match="does not write the prompts that the model was trained with"):
        exported(tree)


def test_the_run_s_system_message(tree: Tree, exported: Exported) -> None:
    tree["datasets"]["tiny"]["text_processor"] = {"name": "chat", "system": 'Be "brief" \U0001f600\n.'}
    folder, _ = exported(tree)
    first = '<|im_start|>system\nBe "brief" \U0001f600\n.<|im_end|>\n<|im_start|>user\n<image>what'
    assert prompt(folder, ASKED).startswith(first)
    assert prompt(folder, {"role": "system", "content": "Hi"}, ASKED).startswith("<|im_start|>system\nHi<|im_end|>\n<")


def test_content_it_does_not_know_is_refused(tree: Tree, exported: Exported) -> None:
    folder, _ = exported(tree)
    with pytest.raises(Exception, match="no content of type audio"):
        prompt(folder, {"role": "user", "content": [{"type": "audio"}]})


def test_pretraining_without_a_template(tree: Tree, exported: Exported) -> None:
    tree["datasets"]["tiny"]["text_processor"] = "plain"
    _, agreements = exported(tree)
    assert [a.logits < 2e-6 for a in agreements] == [True, True]  # measured 3e-7


def test_crop(tree: Tree, exported: Exported) -> None:
    tree["datasets"]["tiny"]["vis_processor"] = {"name": "image_eval", "image_size": 32, "resize": "crop"}
    _, agreements = exported(tree)
    # transformers resizes first and crops then: measured 1.2 of 255 on average, 38 at most
    assert 0.5 < agreements[0].pixels_mean < 1.5


def test_pad(tree: Tree, exported: Exported) -> None:
    tree["model"]["vision"] = SIGLIP
    tree["datasets"]["tiny"]["vis_processor"] = {"name": "image_eval", "image_size": 32, "resize": "pad"}
    _, agreements = exported(tree)
    assert agreements[0].pixels_max < 1e-3  # measured 3e-5


@pytest.mark.parametrize(
    ("processor", "message"),
    [
        ({"name": "image_eval", "image_size": 32, "resize": "pad"}, "padded with grey"),
        ({"name": "image_anyres", "image_size": 32, "max_tiles": 4}, "tiles can't be exported"),
        ({"eval": {"name": "image_train", "image_size": 32}, "train": "image_train"}, "no image processor like"),
    ],
)
def test_pictures_that_transformers_has_no_processor_for(
    tree: Tree, exported: Exported, processor: Tree, message: str
) -> None:
    tree["datasets"]["tiny"]["vis_processor"] = processor
    with pytest.raises(ConfigError, match=message):
        exported(tree)


def test_the_processors_of_another_dataset(tree: Tree, exported: Exported) -> None:
    tree["datasets"]["tiles"] = json.loads(json.dumps(tree["datasets"]["tiny"]))
    tree["datasets"]["tiny"]["vis_processor"] = {"name": "image_anyres", "image_size": 32, "max_tiles": 4}
    exported(tree, dataset="tiles")


def test_an_unknown_dataset(tree: Tree, exported: Exported) -> None:
    with pytest.raises(ConfigError, match=r"no such dataset.*Did you mean 'tiny'"):
        exported(tree, dataset="tinny")


def test_other_pixels_are_an_error(tree: Tree, exported: Exported, monkeypatch: pytest.MonkeyPatch) -> None:
    from lavis_ds.runners.export import image_processor

    usual = image_processor._fixed

    def without_normalisation(*arguments: Any) -> Any:
        made = usual(*arguments)
        made.do_normalize = False
        return made

    monkeypatch.setattr(image_processor, "_fixed", without_normalisation)
    with pytest.raises(CheckpointError, match="other pixels"):
        exported(tree)


def test_pixels_are_normalised_as_the_tower_does(tree: Tree, exported: Exported) -> None:
    tree["model"]["vision"] = CLIP
    folder, _ = exported(tree)
    saved = json.loads((folder / "preprocessor_config.json").read_text())
    assert saved["image_mean"] == pytest.approx([0.4815, 0.4578, 0.4082], abs=1e-4)
    assert saved["size"] == {"height": 32, "width": 32}
