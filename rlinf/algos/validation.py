"""Errors that say what was wrong and what was probably meant. Names and numbers in, ValueError out."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from torch import Tensor


def one_of(where: str, argument: str, value: object, choices: Iterable[str]) -> None:
    """Check that `value` is one of the names.

    Raises:
        ValueError: it is not; the text names the nearest.
    """
    names = list(choices)
    if value not in names:
        near = get_close_matches(str(value), names, n=1)
        raise ValueError(
            f"{where}: {argument}={value!r} is none of {names}" + (f"; meant {near[0]!r}?" if near else "")
        )


def same_shape(where: str, of: str, like: Tensor, **others: Tensor | None) -> None:
    """Check that the tensors given (None is not) have the shape of `like`, which the text calls `of`.

    Raises:
        ValueError: one has not.
    """
    for argument, value in others.items():
        if value is not None and value.shape != like.shape:
            raise ValueError(f"{where}: {argument} {list(value.shape)} must have the shape of {of} {list(like.shape)}")


def within(where: str, argument: str, value: float, low: float = float("-inf"), high: float = float("inf")) -> None:
    """Check that low <= value <= high, and that it is a number.

    Raises:
        ValueError: it is not.
    """
    if not low <= value <= high:
        bounds = f"at least {low:g}" if high == float("inf") else f"between {low:g} and {high:g}"
        raise ValueError(f"{where}: {argument}={value} must be {bounds}")
