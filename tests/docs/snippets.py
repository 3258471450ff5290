"""The blocks of code on a page, in its order, and what the page says about running them.

A block runs unless a line `<!-- not run: REASON -->` stands before it. A block with `title="NAME"` is a file that the
reader saves under that name: Markdown of GitHub shows it without, the site with its name.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("examples/*.md"), *ROOT.glob("benchmarks/*.md")]
)
_FENCE = re.compile(
    r"(?:^ *<!-- not run: (?P<reason>[^\n]*\S) *-->\n)?^(?P<indent> *)```(?P<language>\w*)(?P<more>[^\n]*)\n"
    r"(?P<text>.*?)^(?P=indent)```[ ]*$",
    re.MULTILINE | re.DOTALL,
)
_TITLE = re.compile(r'title="([\w./-]+)"')
COMMAND = re.compile(r"^(?: {4}|\t)(?:\w+=\S+ )*(?:rlinf|python|torchrun|make|pip|uv) \S", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Block:
    """A block of code."""

    language: str
    """As the fence names it; "" where it names none."""
    text: str
    """Without the fence, and without the indent of a list."""
    line: int
    """Of its fence, counted from 1."""
    file: str | None
    """What the reader saves it as; None for what is run as it stands."""
    not_run: str | None
    """Why it is not run; None if it is."""


def blocks_of(text: str) -> Iterator[Block]:
    """Every fenced block of a page.

    Args:
        text: Markdown.
    """
    for found in _FENCE.finditer(text):
        title = _TITLE.search(found["more"])
        line = 1 + text.count("\n", 0, found.start("indent"))
        body = textwrap.dedent(found["text"])
        yield Block(found["language"], body, line, None if title is None else title[1], found["reason"])


def without_blocks(text: str) -> str:
    """The page without its fenced blocks.

    Args:
        text: Markdown.
    """
    return _FENCE.sub("", text)
