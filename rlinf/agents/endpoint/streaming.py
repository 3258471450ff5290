"""Answers while they come: which of their words a client may be told before the answer has ended.

In: tokens, as the engine makes them. Out: pieces of reasoning and of text that the whole answer begins with, however it
ends: no piece cuts a character, or is part of a text that stops the answer. Calls of tools are no text: each is told by
its name, then by pieces of its arguments that are the beginning of some object of JSON. Where the model goes on with
what is none, or is cut, the client has half a call. What cannot be known before its end is told at its end. Who wakes
whom: the engine's tokens, and the end of the answers, wake whoever awaits `Live.news`.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np

from rlinf.agents.chat import begins_thought
from rlinf.agents.tools import beginnings, formats

Kind = Literal["reasoning", "text", "call"]
THINK, THOUGHT = "<think>", "</think>"
_PIECE = 256
"""Characters of a piece of text that is told after the answer has ended."""
_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_TORN = "\N{REPLACEMENT CHARACTER}"
_PATIENT = 8
"""Tokens without a whole character after which they are looked at less often."""


class Detokenizer:
    """Turns tokens into text as they come; all that it gives is a beginning of the text of all of them.

    A character may have several tokens. Tokens for single bytes show as one broken character each if any byte in their
    row is wrong, so a row of them waits for its end.

    Args:
        tokenizer: the model's.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._before = self._given = 0  # of the tokens whose text was given: where the newest of them begin, and end
        self._look = 0  # at so many tokens
        self._silent = _rewrites(tokenizer)

    def add(self, ids: Iterable[int]) -> str:
        """Take further tokens; returns the text that is certain now."""
        self._ids += ids
        if self._silent or len(self._ids) < max(self._look, self._given + 1) or self._is_byte(self._ids[-1]):
            return ""
        shown = self._decoded(self._ids[self._before : self._given])
        now = self._decoded(self._ids[self._before :])
        if now.endswith(_TORN):  # perhaps a part of a character
            if (torn := len(self._ids) - self._given) > _PATIENT:
                self._look = len(self._ids) + torn // 2
            return ""
        self._before, self._given = self._given, len(self._ids)
        return now[len(shown) :]

    def _decoded(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False)) if ids else ""

    def _is_byte(self, id: int) -> bool:
        name = self._tokenizer.convert_ids_to_tokens(id)
        return isinstance(name, str) and _BYTE.fullmatch(name) is not None


def _rewrites(tokenizer: Any) -> bool:
    """The tokenizer takes spaces out of the text before words that come later."""
    if not getattr(tokenizer, "clean_up_tokenization_spaces", False):
        return False
    model = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
    forced = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
    return type(model).__name__ != "BPE" or bool(getattr(tokenizer, forced, False))


class Reading(NamedTuple):
    """How an answer's text will be read once it is whole."""

    stops: tuple[str, ...] = ()
    """Texts that stop it."""
    thinks: bool = False
    """Text in `<think>…</think>` is reasoning."""
    format: formats.CallFormat | None = None
    """How calls of tools are written, if they are told apart."""


class Certain(NamedTuple):
    """Beginnings of the parts that an answer has, whatever follows."""

    reasoning: str
    text: str
    calls: str = ""
    """From the first call on, as the model writes it."""


def certain(text: str, reading: Reading, thinking: bool) -> Certain:
    """See `Certain`.

    Args:
        text: the answer so far.
        reading: how it will be read.
        thinking: its prompt has begun the thought.
    """
    marks = () if reading.format is None else reading.format.marks
    if marks is None:
        return Certain("", "")
    clear = text[: _clear_of(text, reading.stops)]
    inside = clear.lstrip()
    if not reading.thinks or (not thinking and not THINK.startswith(inside[: len(THINK)])):
        return Certain("", *_beside_calls(clear, marks))
    if not thinking and len(inside) < len(THINK):
        return Certain("", "")
    if thinking and len(inside) < len(THINK) and THINK.startswith(inside):
        return Certain("", "")
    thought, ended, rest = inside.removeprefix(THINK).partition(THOUGHT)
    within = (
        thought[: _clear_of(thought, marks, calls=True)] if thinking else thought
    )  # else no call begins in a thought
    if not ended or len(within) < len(thought):
        return Certain(within[: _clear_of(within, (THOUGHT,))].strip(), "")
    return Certain(thought.strip(), *_beside_calls(rest.lstrip(), marks))


def _beside_calls(text: str, marks: tuple[str, ...]) -> tuple[str, str]:
    """The text up to the first call, without the white space there; and from there on."""
    if not marks:
        return text, ""
    place = _clear_of(text, marks, calls=True)
    before = text[:place]
    thoughts = THINK in before or THOUGHT in before  # a call in them is none
    return before.rstrip(), text[place:] if text.startswith(marks, place) and not thoughts else ""


def _clear_of(text: str, marks: Iterable[str], *, calls: bool = False) -> int:
    """Where in a text the first of the marks begins, or may begin.

    Args:
        text: an answer so far.
        marks: that end what is certain.
        calls: they begin calls; one of a single character does so only where nothing was said before it.
    """
    end = len(text)
    for mark in marks:
        place = text.find(mark)
        if calls and len(mark) == 1:
            place = next((at.start() for at in re.finditer(re.escape(mark), text) if _fresh(text[: at.start()])), -1)
        if place < 0:
            parts = range(min(len(mark) - 1, len(text)), 0, -1)
            place = next((len(text) - part for part in parts if text.endswith(mark[:part])), -1)
        end = min(end, place) if place >= 0 else end
    return end


def _fresh(before: str) -> bool:
    """Nothing was said yet, but for thoughts."""
    return not before.strip() or before.rstrip().endswith(THOUGHT)


@dataclass(frozen=True, slots=True)
class LiveCall:
    """A call that a client is told of while it comes."""

    id: str
    """Names it in the tool's answer."""
    name: str
    """Name of the tool."""
    written: str
    """JSON of its arguments, so far."""
    readable: bool = True
    """It is a call; False: it was cut, or went on as what is no JSON."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Some words of an answer."""

    number: int
    """Which of the response's answers."""
    kind: Kind
    """Part of the answer."""
    text: str
    """The words, at least one character but at the beginning of a call."""
    call: LiveCall | None = None
    """To whose arguments they belong, if to any."""


class Live:
    """The answers to one request of a client while they come. Each is heard by a `LiveAnswer`.

    Args:
        answering: makes them.
    """

    def __init__(self, answering: Callable[[], Awaitable[list[Any]]]) -> None:
        self.start = asyncio.get_running_loop().time()
        self.waited: float | None = None
        """Seconds until the first words."""
        self.prompt: tuple[int, int] | None = None
        """Tokens that the model reads, and how many of them earlier answers had; None: it was not asked yet."""
        self._told: dict[tuple[int, Kind, str], str] = {}
        self._new: list[Piece] = []
        self._news = asyncio.Event()
        self.task = asyncio.ensure_future(answering())
        """Comes to the answers."""
        self.task.add_done_callback(lambda _: self._news.set())

    def answer(self, number: int, tokenizer: Any, reading: Reading) -> LiveAnswer:
        """Listens to one of the answers."""
        return LiveAnswer(self, number, tokenizer, reading)

    def tell(self, number: int, kind: Kind, whole: str, call: LiveCall | None = None) -> None:
        """The part of an answer has come so far."""
        part = (number, kind, "" if call is None else call.id)
        so_far = self._told.get(part, "")
        if not whole.startswith(so_far):
            raise RuntimeError(f"the {kind} of an answer does not begin with what of it was told: {so_far[-80:]!r}")
        if len(whole) > len(so_far) or (call is not None and part not in self._told):
            self._told[part] = whole
            self._new.append(Piece(number, kind, whole[len(so_far) :], call))
            if self.waited is None:
                self.waited = asyncio.get_running_loop().time() - self.start
            self._news.set()

    async def news(self, seconds: float) -> bool:
        """Wait for words or the end, no longer than so many seconds; True if there are some."""
        try:
            async with asyncio.timeout(seconds):
                await self._news.wait()
        except TimeoutError:
            return False
        self._news.clear()
        return True

    def take(self) -> list[Piece]:
        """The words since the last time."""
        new, self._new = self._new, []
        return new

    def rest(self) -> Iterator[Piece]:
        """Tell the remainder of the whole answers.

        Raises:
            Exception: there are none; whatever kept the model from answering.
        """
        for number, result in enumerate(self.task.result()):
            self.tell(number, "reasoning", result.reasoning or "")
            self.tell(number, "text", result.text)
            for call in result.live_calls:
                self.tell(number, "call", call.written, call)
        for piece in self.take():
            for at in range(0, max(1, len(piece.text)), _PIECE):
                yield replace(piece, text=piece.text[at : at + _PIECE])


class LiveAnswer:
    """A `Listener` that tells the words of one answer as soon as they are certain.

    Args:
        live: takes them.
        number: which of the response's answers.
        tokenizer: the model's.
        reading: how the answer will be read.
    """

    def __init__(self, live: Live, number: int, tokenizer: Any, reading: Reading) -> None:
        self._live, self._number, self._reading = live, number, reading
        self._tokenizer, self._words = tokenizer, Detokenizer(tokenizer)
        self._calls = None if reading.format is None else beginnings.Beginnings(reading.format)
        self._text, self._begun, self._name, self._count = "", False, "", 0

    def reads(self, new_ids: np.ndarray, cached: int, name: str) -> None:
        """See `Listener`."""
        self._live.prompt, self._name = (cached + len(new_ids), cached), name
        self._begun = self._reading.thinks and begins_thought(self._tokenizer, new_ids)

    def tells(self, ids: Sequence[int]) -> None:
        """See `Listener`."""
        if new := self._words.add(ids):
            self._text += new
            sure = certain(self._text, self._reading, self._begun)
            self._live.tell(self._number, "reasoning", sure.reasoning)
            self._live.tell(self._number, "text", sure.text)
            if sure.calls and self._calls is not None:
                self._calls.read(sure.calls)
                for place in range(max(0, self._count - 1), len(self._calls.calls)):  # those before are whole
                    call = self._calls.calls[place]
                    live = LiveCall(formats.call_id(self._name, place), call.name, call.written)
                    self._live.tell(self._number, "call", call.written, live)
                self._count = len(self._calls.calls)

    def settled(
        self, text: str, calls: Sequence[formats.ToolCall]
    ) -> tuple[tuple[formats.ToolCall, ...], tuple[LiveCall, ...]]:
        """The calls of the whole answer by the ids under which they were told; and those that can be told in pieces.

        Args:
            text: the answer, up to what stopped it.
            calls: in it.
        """
        if self._calls is None:
            return tuple(calls), ()
        self._calls.read(certain(text, self._reading._replace(stops=()), self._begun).calls)
        rest, live = list(calls), list[LiveCall]()
        ready: list[formats.ToolCall] = []
        for place, call in enumerate(self._calls.calls):
            id = formats.call_id(self._name, place)
            if rest and (rest[0].name, rest[0].arguments) == (call.name, call.arguments()):
                ready.append(replace(rest.pop(0), id=id))
                live.append(LiveCall(id, call.name, call.written))
            elif place < self._count:
                live.append(LiveCall(id, call.name, call.written, readable=False))
        behind = len(self._calls.calls)
        more = (replace(call, id=formats.call_id(self._name, behind + n)) for n, call in enumerate(rest))
        return (*ready, *more), tuple(live)
