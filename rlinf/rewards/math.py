"""Rewards for mathematics: whether the value that a response comes to is equal to the answer."""

from __future__ import annotations

import logging
from functools import lru_cache
from importlib import import_module
from typing import Any

from rlinf.rewards.base import Score


def math(response: str, answer: str) -> Score:
    """1 if the `\\boxed{…}` of the response, or else its last formula or number, equals the answer; else 0.

    Several boxes next to each other are read as a set. Equality is math-verify's: 1/2 equals 0.5 and \\frac{1}{2};
    sets, intervals and equations are understood.

    Args:
        response: what the model wrote.
        answer: a number or LaTeX, with or without `\\boxed{}` or dollars; of GSM8K's answers, what follows "####".

    Raises:
        ImportError: math-verify is not installed.
        ValueError: the answer cannot be read as mathematics, so nothing can be compared with it.
    """
    from math_verify import verify

    parsed = _parsed(response)
    right = verify(_truth(answer), parsed, timeout_seconds=None)  # as for parsing_timeout below
    return Score(1.0 if right else 0.0, extracted=str(parsed[0]) if parsed else None)


def _ready(**_: Any) -> None:
    """See before a run begins that answers can be compared.

    Raises:
        ImportError: math-verify is not installed.
    """
    import_module("math_verify")


vars(math)["__ready__"] = _ready


@lru_cache(maxsize=1024)  # a prompt's samples come together, and all ask for the same one
def _truth(answer: str) -> list[Any]:
    text = answer.rpartition("####")[2].strip()
    truth = _parsed(text if "$" in text or "\\boxed" in text else f"\\boxed{{{text}}}") or _parsed(text)
    if not truth:
        raise ValueError(f"the answer {answer!r} cannot be read as mathematics; is it the right column?")
    return truth


def _parsed(text: str) -> list[Any]:
    from math_verify import parse

    # Its own time limits use SIGALRM and count as wrong; ours kill the process, and a timeout counts as such.
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns about exactly that, once per process
    expressions: list[Any] = parse(text, parsing_timeout=None)
    return expressions
