"""A reward for answers in the requested format, whatever their content."""

from __future__ import annotations

from collections.abc import Sequence

from rlinf.rewards.base import trusted


@trusted
def format(response: str, tags: Sequence[str] = ("think", "answer")) -> float:
    """1.0 if the response is `<think>…</think><answer>…</answer>` and nothing else; else 0.0.

    Args:
        response: what the model wrote; white space around the tags is free.
        tags: which tags, in which order. Each stands exactly once, and is opened before it is closed.
    """
    rest = response.strip()
    for tag in tags:
        opening, closing = f"<{tag}>", f"</{tag}>"
        if response.count(opening) != 1 or response.count(closing) != 1 or not rest.startswith(opening):
            return 0.0
        inside, closed, rest = rest[len(opening) :].partition(closing)
        if not closed or any(f"<{other}>" in inside or f"</{other}>" in inside for other in tags):
            return 0.0
        rest = rest.lstrip()
    return 0.0 if rest else 1.0
