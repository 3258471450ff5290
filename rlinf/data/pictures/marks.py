"""Where pictures stand in a prompt: `<image>` in the texts of data sets, parts of chat messages, or nothing at all.

In: what a row says. Out: the same as plain texts with the tokens of the model where a picture stands.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlinf.data.pictures.processor import MARK, Pictures


def pictured(said: str | list[Any], count: int, pictures: Pictures) -> str | list[Any]:
    """A text, or chat messages, with the model's tokens where pictures stand.

    Args:
        said: `<image>`, parts `{"type": "image"}`, or the model's own placeholders show where; nothing does where all
            stand before the first text of a user.
        count: of pictures.
        pictures: the model's.
    """
    if isinstance(said, str):
        return _marked(said, count, pictures)
    messages = [{**message, "content": _flat(message.get("content"))} for message in said]
    if not any(MARK in each["content"] or pictures.mark in each["content"] for each in messages):
        first = next((number for number, each in enumerate(messages) if each["role"] == "user"), 0)
        messages[first]["content"] = MARK * count + messages[first]["content"]
    return [{**each, "content": each["content"].replace(MARK, pictures.text)} for each in messages]


def _marked(text: str, count: int, pictures: Pictures) -> str:
    if MARK not in text and pictures.mark not in text:
        text = MARK * count + text
    return text.replace(MARK, pictures.text)


def _flat(content: Any) -> str:
    """A message's parts as one text; none of a message that only calls tools."""
    if content is None:
        return ""
    if isinstance(content, str) or not isinstance(content, Sequence):
        return str(content)
    return "".join(_part(part) for part in content)


def _part(part: Any) -> str:
    if not isinstance(part, Mapping):
        return str(part)
    kind = str(part.get("type", "text"))
    return MARK if kind.startswith("image") else str(part.get(kind, part.get("text", "")))
