"""What has answers made: it draws what there is room for, hands it on, and takes what comes of it.

Consumes prompts and weights. Produces entries that are complete. Who wakes whom: whatever changes wakes who feeds and
who waits for a batch, and each looks again.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from rlinf.data.in_flight.admission import Admission, Entry
from rlinf.data.in_flight.freshness import oldest
from rlinf.data.in_flight.held import sample_numbers
from rlinf.data.in_flight.ledger import FAILED, TOO_OLD
from rlinf.data.in_flight.rules import Answers, Books, Draw, Keeper, Kept, Made, Rules
from rlinf.runtime.streams.stream import Stream, each


class Drawing:
    """What is drawn, with its ids.

    Args:
        draw: draws prompts. None: a step brings its own; what has no prompts is drawn by counting steps on.
    """

    def __init__(self, draw: Draw | None) -> None:
        self.exhausted = False
        """There is no more to draw."""
        self._draw = draw
        self._own: list[Any] = []
        self._next = 0

    def drawn_before(self, number: int) -> None:
        """This one was drawn already."""
        self._next = max(self._next, number + 1)

    async def own(self, step: Any) -> int | None:
        """How many prompts a step brings; None where they are drawn."""
        if self._draw is not None or not hasattr(step, "prompts"):
            return None
        own = [prompt async for prompt in each(step.prompts)]
        self._own += own
        self.exhausted = False
        return len(own)

    async def take(self, count: int, step: Any) -> list[tuple[int, Any]]:
        """So many more; fewer where there are no more.

        Args:
            count: how many.
            step: the one in hand.
        """
        if self._draw is not None:
            drawn = [(item.id, item) for item in await self._draw(count)]
        elif hasattr(step, "prompts"):
            own, self._own = self._own[:count], self._own[count:]
            drawn = [(prompt.id, prompt) for prompt in own]
        else:
            first = max(self._next, step.index)
            self._next = first + count
            drawn = [(index, replace(step, index=index)) for index in range(first, self._next)]
        self.exhausted = not drawn
        return drawn


class Making:
    """The part of `InFlight` that has answers made.

    Args:
        rules, draw, keeper, ledger, end: as of `InFlight`.
    """

    version: int
    """How many times weights were published."""

    def __init__(
        self, rules: Rules | int, draw: Draw | None, keeper: Keeper | None, ledger: Books | None, end: int | None
    ) -> None:
        self.rules = rules if isinstance(rules, Rules) else Rules(rules)
        self._drawing, self._keeper, self._ledger, self._end = Drawing(draw), keeper, ledger, end
        self._book: Admission | None = None
        self._base = self._loaded = 0  # version of the weights at first; what was published when those in use were
        self._weights: Any = None  # published, and not loaded yet
        self._step: Any = None  # the last one that began
        self._index = 0  # of the step that takes what is complete now
        self._size = 1  # answers of a prompt
        self._kept: Kept | None = None  # of a checkpoint, and not in flight yet
        self._taken: list[Entry] = []  # by the last step that began
        self._aside: list[Entry] = []  # that it has looked at, and takes nothing of
        self._queue: deque[Entry] = deque()  # admitted, and not handed on
        self._making: set[int] = set()  # handed on, and not complete
        self._settled: list[int] = []  # taken by steps, and not told to the keeper
        self._loading = asyncio.Lock()  # weights are being loaded, and what is made by them is begun
        self._reading = asyncio.Lock()  # the data have been read, and what was drawn is not entered yet
        self._steps = 0  # what has happened, for the stall report
        self._pipe: asyncio.Task[None] | None = None
        self._error: Exception | None = None
        self._changed = asyncio.Event()

    # Making ------------------------------------------------------------------------------------------------------

    async def _make(self, answers: Answers, actor: Any) -> None:
        prompts: Stream[Any] = Stream.of(self._feed(actor), name="prompts")
        try:
            made = answers(prompts)
            try:
                async for one in each(made):
                    self._arrived(one)
            finally:
                if isinstance(made, Stream):
                    await made.close()
        except Exception as error:
            self._error = self._error or error
        finally:
            await prompts.close()  # whoever reads them may take time to end, and must not get what is made anew
        self._stir()

    async def _feed(self, actor: Any) -> AsyncIterator[Any]:
        """What is to be made, as soon as it may be begun."""
        while True:
            if (entry := await self._next(actor)) is not None:
                for one in entry.partial or (entry.item,):
                    yield one
                continue
            if self._drawing.exhausted and not self._queue:
                return
            await self._change()

    async def _next(self, actor: Any) -> Entry | None:
        """What is handed on now, if anything may be begun. Between two things, no weights are published from when the
        newest are loaded until this one is under way: it would be made by some of each."""
        async with self._loading if self.rules.between else nullcontext():
            if self.rules.between and self._making:
                return None
            if self.rules.between:
                await self._load(actor)
            if not self._queue:
                await self._admit()
            while self._queue:
                entry = self._queue.popleft()
                if entry.result is None and self._book is not None and (entry.id, 0) in self._book.entries:
                    self._making.add(entry.id)
                    return entry
        return None

    async def _admit(self) -> None:
        """Draw as many as there is room for."""
        book, step = self._book, self._step
        if book is None or step is None:
            return
        end = getattr(step, "until", None) if self._end is None else self._end
        after = None if end is None else end - self._index - 1
        count = book.room(self._size, self._base + self._loaded, after)
        if not count:
            return
        async with self._reading:
            try:
                drawn = await self._drawing.take(count, step)
            except Exception as error:  # of the data: it is not the answers' failure
                self._error, self._drawing.exhausted = error, True
                return
            for number, item in drawn:
                entry = Entry(number, item, self._size, self._base + self._loaded)
                book.enter(entry)
                self._queue.append(entry)
            if self._ledger is not None:
                self._ledger.drawn([number for number, _ in drawn], self._size)

    def _enter_again(self, entry: Entry) -> None:
        """It is in flight once more, complete or not."""
        assert self._book is not None
        if entry.result is None:
            if not entry.partial:
                entry.version = self._base + self._loaded
            self._queue.append(entry)
        self._drawing.drawn_before(entry.id)
        self._book.enter(entry)

    def _arrived(self, one: Any) -> None:
        """Something has come of what was begun."""
        book = self._book
        assert book is not None
        made = one if isinstance(one, Made) else Made(one.prompt.id, (one,))
        version, tokens = oldest(made.results)
        part = self.rules.partial and one is not made  # groups come in parts, and what came of a task all at once
        size = sum(len(group.samples) for group in made.results) if part else None
        if not made.results:
            if (entry := book.entries.get((made.id, 0))) is not None and entry.result is None:
                book.drop(entry)
                self._drop(made.id, made.dropped or FAILED)
        else:
            if not part:  # all that will come of it: the other attempts at a task have failed
                self._drop(made.id, FAILED, 0, {*range(self._size)} - sample_numbers(made.results))
            book.complete(made.id, made.results, version=version, size=size, tokens=tokens)
        if (rest := book.entries.get((made.id, 0))) is None or rest.result is not None:
            self._making.discard(made.id)
        self._stir()

    async def _give_up_old(self) -> None:
        """Give up what is not complete and has tokens that are too old already, if it is not to be masked."""
        book, keeper = self._book, self._keeper
        if keeper is not None and self._settled:
            settled, self._settled = self._settled, []
            await keeper.settled(settled)
        if book is None or keeper is None or self.rules.mode == "mask":
            return
        for entry in [one for one in book.too_old() if one.id in self._making]:
            tokens = await keeper.drop([entry.id])
            if entry.result is not None or (entry.id, 0) not in book.entries:
                continue  # it was completed meanwhile
            self._making.discard(entry.id)
            book.drop(entry)
            if self.rules.mode == "drop":
                self._drop(entry.id, TOO_OLD, tokens, self._unfinished(entry.id))
            else:
                self._drop(entry.id, TOO_OLD, tokens, ())
                self._enter_again(replace(entry, partial=()))

    async def _load(self, actor: Any) -> None:
        """Have what was published last used; whoever calls this has `_loading`."""
        weights, self._weights, version = self._weights, None, self.version
        if weights is not None:
            await actor.load(weights)
            self._loaded = version

    def _stir(self) -> None:
        """Something has changed: whoever waits looks again."""
        self._steps += 1
        self._changed.set()
        self._changed = asyncio.Event()

    async def _change(self) -> None:
        await self._changed.wait()

    # Counting ----------------------------------------------------------------------------------------------------

    @property
    def entries(self) -> list[Entry]:
        """What is in flight: what the step under way has taken, too."""
        kept = self._kept.entries if self._kept is not None else ()
        return [*kept, *(() if self._book is None else self._book.entries.values()), *self._taken, *self._aside]

    def _drop(self, number: int, reason: str, tokens: int = 0, indices: Iterable[int] | None = None) -> None:
        if self._ledger is not None and (indices is None or tokens or [*indices]):
            self._ledger.dropped(number, reason, indices, tokens)

    def _unfinished(self, number: int) -> set[int]:
        """Samples of which nothing complete has come."""
        parts = (one.result for one in self.entries if one.id == number and one.result is not None)
        return {*range(self._size)}.difference(*map(sample_numbers, parts))
