"""Where pictures stand in a prompt: `<image>` in the texts of data sets, parts of chat messages, or nothing at all.

In: what a row says. Out: the same as plain texts with the tokens of the model where a picture stands.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlinf.data.pictures.processor import MARK, Pictures

_ASKING = frozenset({"user", "system", "developer"})
"""Roles whose texts may have marks. What an assistant or a tool says of `<image>` is what it says."""


def pictured(said: str | list[Any], count: int, pictures: Pictures) -> str | list[Any]:
    """A text, or chat messages, with the model's tokens where pictures stand.

    Args:
        said: parts `{"type": "image"}` show where and, if there is none, `<image>` or the model's own placeholders in
            the texts of who asks; nothing does where all stand before the first text of a user.
        count: of pictures.
        pictures: the model's.
    """
    if isinstance(said, str):
        return _marked(said, count, pictures)
    messages = [{**message, "content": _flat(message.get("content"), pictures.text)} for message in said]
    if any(_has_picture(message.get("content")) for message in said):
        return messages  # a text beside such parts means what it says
    asking = [number for number, message in enumerate(messages) if message["role"] in _ASKING]
    if not any(_is_marked(messages[number]["content"], pictures) for number in asking):
        first = next((number for number in asking if messages[number]["role"] == "user"), 0)
        messages[first]["content"] = MARK * count + messages[first]["content"]
        asking = [first]
    for number in asking:
        messages[number]["content"] = messages[number]["content"].replace(MARK, pictures.text)
    return messages


def _marked(text: str, count: int, pictures: Pictures) -> str:
    text = text if _is_marked(text, pictures) else MARK * count + text
    return text.replace(MARK, pictures.text)


def _is_marked(text: str, pictures: Pictures) -> bool:
    return MARK in text or pictures.mark in text


def _flat(content: Any, picture: str) -> str:
    """A message's parts as one text; none of a message that only calls tools."""
    if content is None:
        return ""
    if isinstance(content, str) or not isinstance(content, Sequence):
        return str(content)
    return "".join(picture if _is_picture(part) else _text(part) for part in content)


def _has_picture(content: Any) -> bool:
    return isinstance(content, list | tuple) and any(_is_picture(part) for part in content)


def _is_picture(part: Any) -> bool:
    return isinstance(part, Mapping) and str(part.get("type", "text")).startswith("image")


def _text(part: Any) -> str:
    if not isinstance(part, Mapping):
        return str(part)
    return str(part.get(str(part.get("type", "text")), part.get("text", "")))
