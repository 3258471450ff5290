"""Calls of tools that an answer has begun, read while it comes.

In: the text of an answer from its first call on, again and again, each time longer. Out: for each call, its name and as
much of the JSON of its arguments as is certain. A format says by `CallFormat.heads` what stands before arguments; those
whose arguments are no JSON have none, and their calls are known at the end alone. Each character is read once, and no
more is taken from where it is no JSON: what was taken is always the beginning of some object.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Literal

from rlinf.agents.tools.formats import MOST_CALLS, CallFormat

_BOTH = re.compile(r"\}\s*+\}")
"""Ends of the arguments and of the object that has them: a model that leaves out one of the two has written no call."""
_SPACE = re.compile(r"[ \t\n\r]++")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]++')
_ESCAPE = re.compile(
    r'\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[0-9a-fA-F]{4}|u(?![dD][89a-fA-F])[0-9a-fA-F]{4}|["\\/bfnrt])'
)
r"""Two halves of a character, `\ud83d\ude00`, are one; half a character is none."""
_WORD = re.compile(r"[\w.+\-]++")
_SCALAR = re.compile(r"true|false|null|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")

_Place = Literal["value", "first value", "key", "first key", "colon", "end of value"]
"""The next thing in JSON: `first` where the list or object may end instead."""


@dataclass(slots=True)
class Begun:
    """A call, as far as it has come."""

    name: str
    """Name of the tool."""
    written: str = ""
    """JSON of the arguments as the model writes it, but that line ends inside of texts, which JSON forbids and models
    write, stand there as escapes."""
    whole: bool = False
    """The arguments have ended."""

    def arguments(self) -> object:
        """The arguments; None: they have not ended."""
        try:
            return json.loads(self.written) if self.whole else None
        except (ValueError, RecursionError):  # a number of 5,000 digits, lists within lists without end
            return None


class Beginnings:
    """The calls of one answer.

    Args:
        format: how the model writes them.
    """

    def __init__(self, format: CallFormat) -> None:
        self.calls: list[Begun] = []
        self._heads = format.heads
        self._at = 0  # up to where the text was read
        self._open: list[str] = []  # ends of the objects and lists that the newest call's arguments are within
        self._place: _Place = "value"
        self._quoted: _Place | None = None  # what comes behind the text that is being read
        self._within = False  # the newest call is an object that has the arguments

    def read(self, text: str) -> None:
        """Read further.

        Args:
            text: the answer so far, from its first call on; it begins with what was read before.
        """
        while self._heads is not None:
            if not self.calls or self.calls[-1].whole:
                head = self._heads[bool(self.calls)].match(text, self._at)
                if head is None or len(self.calls) >= MOST_CALLS:
                    return
                try:
                    name = str(json.loads(f'"{head[head.lastgroup or 0]}"', strict=False))
                except ValueError:
                    return
                self.calls.append(Begun(name))
                self._at, self._place, self._within = head.end(), "value", head.lastgroup == "name"
            call, parts = self.calls[-1], list[str]()
            while not call.whole and (part := self._part(text)):
                parts.append(part)
                call.whole = not self._open
            call.written += "".join(parts)
            if not call.whole:
                return

    def _part(self, text: str) -> str:
        """The next piece of JSON; "": it has not come, or it is none."""
        at = self._at
        if at == len(text):
            return ""
        if self._quoted is not None:
            return self._of_text(text)
        if (space := _SPACE.match(text, at)) is not None:
            self._at = space.end()
            return space.group()
        if (word := _WORD.match(text, at)) is not None:
            fits = self._place in ("value", "first value") and _SCALAR.fullmatch(word.group())
            if word.end() == len(text) or not fits:
                return ""
            self._at, self._place = word.end(), "end of value"
            return word.group()
        last = self._within and len(self._open) == 1 and text[at] == "}"
        if (last and _BOTH.match(text, at) is None) or not self._sign(text[at]):
            return ""
        self._at += 1
        return text[at]

    def _of_text(self, text: str) -> str:
        """A piece of a text's inside, or its end."""
        at = self._at
        if (plain := _PLAIN.match(text, at)) is not None:
            self._at = plain.end()
            return plain.group()
        if text[at] == '"':
            self._at, self._place, self._quoted = at + 1, self._quoted or "colon", None
            return '"'
        if text[at] != "\\":
            self._at += 1
            return json.dumps(text[at])[1:-1]
        escape = _ESCAPE.match(text, at)
        if escape is None:  # the rest of it may come
            return ""
        self._at = escape.end()
        return escape.group()

    def _sign(self, sign: str) -> bool:
        """Take a sign of the grammar; False: it cannot stand here."""
        place, value = self._place, self._place in ("value", "first value")
        if sign == '"' and (value or place in ("key", "first key")):
            self._quoted = "end of value" if value else "colon"
        elif sign in ("{", "[") and value:
            self._open.append("}" if sign == "{" else "]")
            self._place = "first key" if sign == "{" else "first value"
        elif sign in ("}", "]") and place in ("first key", "first value", "end of value") and self._open[-1] == sign:
            self._open.pop()
            self._place = "end of value"
        elif sign == ":" and place == "colon":
            self._place = "value"
        elif sign == "," and place == "end of value":
            self._place = "key" if self._open[-1] == "}" else "value"
        else:
            return False
        return True
