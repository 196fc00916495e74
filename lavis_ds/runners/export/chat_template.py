"""A chat template that takes pictures among the text and writes what the model was trained with."""

from __future__ import annotations

import json
from typing import Any

from jinja2 import TemplateError

from lavis_ds.data.conversation import Conversation, Text, Turn
from lavis_ds.data.processors.base import TextProcessor
from lavis_ds.data.processors.chat import Chat
from lavis_ds.data.tokenizer import CHAT_TEMPLATE
from lavis_ds.errors import ConfigError

_FLATTEN = """\
{%- set flat = namespace(messages=[]) -%}
{%- for message in messages -%}
{%- if message['content'] is string or not message['content'] -%}
{%- set flat.messages = flat.messages + [message] -%}
{%- else -%}
{%- set said = namespace(text='') -%}
{%- for part in message['content'] -%}
{%- if part is string -%}{%- set said.text = said.text + part -%}
{%- elif part['type'] == 'text' -%}{%- set said.text = said.text + part['text'] -%}
{%- elif part['type'] in ('image', 'image_url') -%}{%- set said.text = said.text + IMAGE -%}
{%- elif part['type'] == 'video' and VIDEO -%}{%- set said.text = said.text + VIDEO -%}
{%- else -%}{{ raise_exception('this model takes no content of type ' + part['type']) }}
{%- endif -%}
{%- endfor -%}
{%- set flat.messages = flat.messages + [dict(message, content=said.text)] -%}
{%- endif -%}
{%- endfor -%}
{%- set messages = flat.messages -%}
"""
_SYSTEM = """\
{%- if not messages or messages[0]['role'] != 'system' -%}
{%- set messages = [{'role': 'system', 'content': SYSTEM}] + messages -%}
{%- endif -%}
"""
_NOT_THINKING = "{%- if enable_thinking is not defined -%}{%- set enable_thinking = false -%}{%- endif -%}\n"
"""Templates of Qwen3 write an empty block of thoughts before an answer that was given without thinking."""

_QUESTION = "What is it?"


def chat_template(processor: TextProcessor, tokenizer: Any, image_text: str, video_text: str | None) -> str | None:
    """The template of the processor, taking pictures too; None where there is none.

    Args:
        processor: the text processor used in evaluation.
        tokenizer: the exported one.
        image_text: what is written for a picture.
        video_text: what is written for a video; None where they are refused.

    Raises:
        ConfigError: no template writes the prompts that the model was trained with.
    """
    own = tokenizer.chat_template
    own = own["default"] if isinstance(own, dict) else own
    config = processor.config if isinstance(processor, Chat) else None
    inner = CHAT_TEMPLATE if config and (config.template == "chatml" or own is None) else own
    if inner is None:
        return None
    before = "" if _takes_pictures(tokenizer, inner, image_text) else _flattening(image_text, video_text)
    if config is None:
        return before + inner
    if config.system is not None:
        before += _SYSTEM.replace("SYSTEM", _literal(config.system))
    trained = processor.prompt(Conversation("prompt", (Turn("user", (Text(_QUESTION),)),)), []).input_ids.tolist()
    for thinking in ("", _NOT_THINKING):
        template = before + thinking + inner
        if _prompt_ids(tokenizer, template) == trained:
            return template
    raise ConfigError(
        "the tokenizer's chat template does not write the prompts that the model was trained with.",
        where="model.language.tokenizer",
        given=repr(tokenizer.decode(_prompt_ids(tokenizer, before + inner))),
        expected=repr(tokenizer.decode(trained)),
    )


def _flattening(image_text: str, video_text: str | None) -> str:
    """Jinja that turns lists of content parts into strings, for templates that know strings only."""
    return _FLATTEN.replace("IMAGE", _literal(image_text)).replace("VIDEO", _literal(video_text or ""))


def _literal(text: str) -> str:
    """`text` as a string of Jinja."""
    return json.dumps(text, ensure_ascii=False)


def _takes_pictures(tokenizer: Any, template: str, image_text: str) -> bool:
    content = [{"type": "image"}, {"type": "text", "text": _QUESTION}]
    messages = [{"role": "user", "content": content}]
    try:
        text = tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False)
    except (TemplateError, TypeError):  # it joins strings
        return False
    return f"{image_text}{_QUESTION}" in str(text)


def _prompt_ids(tokenizer: Any, template: str) -> list[int]:
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": [{"type": "text", "text": _QUESTION}]}],
        chat_template=template,
        tokenize=False,
        add_generation_prompt=True,
    )
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids
