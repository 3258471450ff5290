"""samples.jsonl as it lies on disk: which steps it tells of, and the rows of any one of them.

In: the file, which may grow. Out: rows. What is in memory is where each step's rows lie, not the rows.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlinf.config.reading import open_regular, parse_json
from rlinf.metrics.reading.appended import Appended

Row = dict[str, Any]
"""One line of metrics.jsonl or samples.jsonl."""
HELD_OUT = "held-out"
"""`kind` of rows that are answers to held-out problems."""
MOST_TEXT = 6_000
"""Characters of one text that a page shows; the whole is in samples.jsonl."""
MOST_TOKENS = 2_000
"""Tokens of one answer that a page colours."""
_BEGINS, _HELD_OUT = re.compile(rb'\{"step": (-?\d+)[,}]'), b'"kind": "held-out"'
"""As the run writes it, which saves the reading of rows that nobody asks for. Within a text, a quotation mark has a
backslash before it, so none looks like this."""
_TOKENS = ("texts", "logprobs", "mask", "versions")


class Samples:
    """The rows of a samples.jsonl.

    Args:
        path: of the file, which need not be there.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, Appended(path, self._forget)
        self._answers: dict[int, list[tuple[int, int]]] = defaultdict(list)
        self._held_out: dict[int, list[tuple[int, int]]] = defaultdict(list)
        self.remark = ""
        """Why the first answer could not be scored; empty if all could."""

    @property
    def steps(self) -> list[int]:
        """Steps of which there are answers that were learned from."""
        return sorted(self._answers)

    @property
    def left_out(self) -> int:
        """Lines that no run writes: too long."""
        return self._file.left_out

    def refresh(self) -> list[int]:
        """Look at what was added since the last time, or at all of a file that is another one now.

        Returns:
            The steps of which it has new answers.
        """
        new: set[int] = set()
        for place, block in self._file.blocks():
            for line in block.splitlines(keepends=True):
                if (told := _told(line)) is not None:
                    step, held_out = told
                    (self._held_out if held_out else self._answers)[step].append((place, len(line)))
                    if not held_out:
                        new.add(step)
                        if not self.remark and b'"remark": ' in line:
                            self.remark = str((_row(line) or {}).get("remark") or "")
                place += len(line)
        return sorted(new)

    def _forget(self) -> None:
        """The file is another one now: of a run begun anew, or gone on with from earlier."""
        self._answers.clear()
        self._held_out.clear()
        self.remark = ""

    def rows(self, step: int, most: int | None = None) -> list[Row]:
        """Answers of a step that were learned from, long texts cut; at most so many."""
        return [cut(row) for row in self._rows(self._answers.get(step, [])[:most])]

    def held_out(self, most: int) -> list[tuple[Row, Row]]:
        """The same held-out problems before and after; those first whose answer changed, and at most so many."""
        if not self._held_out:
            return []
        first, last = ({str(row.get("prompt")): row for row in self._rows(self._held_out[step])} for step in self._ends)
        pairs = [(first.get(prompt, row), row) for prompt, row in last.items()]
        pairs.sort(key=lambda pair: pair[0].get("response") == pair[1].get("response"))  # stable
        return [(cut(before), cut(after)) for before, after in pairs[:most]]

    @property
    def _ends(self) -> tuple[int, int]:
        return min(self._held_out), max(self._held_out)

    def _rows(self, places: list[tuple[int, int]]) -> Iterator[Row]:
        if not places:
            return
        with open_regular(self._path, links=False) as file:
            for start, length in places:
                file.seek(start)
                if (row := _row(file.read(length))) is not None:
                    yield row


def cut(row: Row) -> Row:
    """A row whose texts and tokens are no more than a page shows."""
    shown: dict[str, Any] = {}
    for name, value in row.items():
        long = isinstance(value, str) and len(value) > MOST_TEXT
        shown[name] = f"{value[:MOST_TEXT]}… ({len(value):,} characters)" if long else value
    if isinstance(spans := row.get("read"), list):
        shown["read"] = [[begin, min(end, MOST_TEXT)] for begin, end in spans if begin < MOST_TEXT]
    if isinstance(tokens := row.get("tokens"), dict):
        lists = {name: tokens[name] for name in _TOKENS if isinstance(tokens.get(name), list)}
        shown["tokens"] = {name: each[:MOST_TOKENS] for name, each in lists.items()}
        left_out = max(map(len, lists.values()), default=0) - MOST_TOKENS
        if (gone := max(left_out, 0) + int(tokens.get("cut") or 0)) > 0:
            shown["tokens"]["cut"] = gone
    return shown


def _told(line: bytes) -> tuple[int, bool] | None:
    """(step, whether it is held-out) of a line; None if it is none."""
    if (found := _BEGINS.match(line)) is not None:
        return int(found[1]), _HELD_OUT in line
    row = _row(line)
    step = None if row is None else row.get("step")
    return None if row is None or not isinstance(step, int) else (step, row.get("kind") == HELD_OUT)


def _row(line: bytes) -> Row | None:
    try:
        row = parse_json(line.decode(errors="replace"))
    except ValueError:
        return None
    return row if isinstance(row, dict) else None
