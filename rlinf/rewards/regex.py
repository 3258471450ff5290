"""Rewards by a regular expression."""

from __future__ import annotations

import re

from rlinf.rewards.base import Score


def regex(response: str, answer: str, *, pattern: str) -> Score:
    """1 if the response has the pattern, and, if the pattern has a group named `answer`, that is the answer; else 0.

    Of several places where the pattern matches, the last one counts. White space around the answer is ignored. Patterns
    can take exponential time, so this runs in a child process.

    Args:
        response: what the model wrote.
        answer: the right answer.
        pattern: as for Python's `re.finditer`, "." matching line ends too, such as "the answer is (?P<answer>[A-D])".
    """
    compiled = re.compile(pattern, re.DOTALL)
    last = max(compiled.finditer(response), key=lambda match: match.start(), default=None)
    if last is None:
        return Score(0.0)
    if "answer" not in compiled.groupindex:
        return Score(1.0)
    extracted = (last["answer"] or "").strip()
    return Score(float(extracted == answer.strip()), extracted=extracted)
