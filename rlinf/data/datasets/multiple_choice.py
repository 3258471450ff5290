"""Multiple choice: options in, lettered options and the right letter out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from string import ascii_uppercase
from typing import Any

from rlinf.data.datasets.rows import DataError
from rlinf.data.rng import permutation


def lettered(
    options: Sequence[Any] | Mapping[str, Any], answer: Any, where: str, *, shuffle: int | None = None
) -> tuple[str, str]:
    """The options as lines "A) …", and the letter of the right one.

    Args:
        options: the texts; or texts by letter; or `{"label": [...], "text": [...]}`.
        answer: the right one: its position from 0, its letter or label, or its text.
        where: the row, for messages.
        shuffle: key of another order of the options; None keeps theirs.

    Raises:
        DataError: the answer is none of the options.
    """
    labels, texts = _both(options, where)
    right = _position(answer, labels, texts)
    if right is None or len(texts) > len(ascii_uppercase):
        raise DataError(f"{where}: the answer {answer!r} is none of the {len(texts)} options {texts}")
    order = list(range(len(texts))) if shuffle is None else permutation(len(texts), shuffle).tolist()
    lines = [f"{letter}) {texts[index]}" for letter, index in zip(ascii_uppercase, order, strict=False)]
    return "\n".join(lines), ascii_uppercase[order.index(right)]


def _both(options: Any, where: str) -> tuple[list[str], list[str]]:
    if isinstance(options, Mapping):
        if options.keys() >= {"label", "text"}:
            return [str(label) for label in options["label"]], [str(text) for text in options["text"]]
        return [str(label) for label in options], [str(text) for text in options.values()]
    if not isinstance(options, Sequence) or isinstance(options, str):
        raise DataError(f"{where}: the options are a {type(options).__name__}, not a list")
    return list(ascii_uppercase[: len(options)]), [str(text) for text in options]


def _position(answer: Any, labels: list[str], texts: list[str]) -> int | None:
    if isinstance(answer, int) and not isinstance(answer, bool):
        return answer if 0 <= answer < len(texts) else None
    text = str(answer)
    for candidates in (texts, labels):
        if candidates.count(text) == 1:
            return candidates.index(text)
    return None
