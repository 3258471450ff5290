"""Work in flight between steps: answers that are begun for steps to come, while earlier ones are learned from.

Consumes prompts, as many as there is room for, and weights as they are published. Produces what each step learns from,
never older than the bound. Who wakes whom: a finished answer wakes the step that waits for it; a published version, and
every answer that is learned from or dropped, wakes the drawing of more prompts. The run owns an `InFlight` and closes
it however it ends; a flow asks it for its batch and publishes:

    async def grpo_async(step, rollout, judge, trainer):
        def answers(prompts):
            return judge.score.map(rollout.generate(prompts, n=step.group_size))

        batch = step.in_flight.next_batch(step, answers, rollout)
        metrics = await trainer.train(batch.groups)             # answers for the next steps are under way
        await step.in_flight.publish(rollout, trainer.weights())
        return {**metrics, **batch.metrics}

`answers` is called once, and its stream goes on from step to step: what one step does not learn from is there for the
next one. Groups that are complete stay where they were judged, as far as their faces tell what is decided here
(`data/face.py`); a checkpoint fetches them, and a step those of which some tokens are too old. `admission.py` says what
may be begun and taken, and why nothing is too old then. `Producer` has the answers made: it draws what there is room
for, hands it on, and takes the results.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import aclosing, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from rlinf.data.face import GroupFace, known, passed_on, wholes
from rlinf.data.in_flight.admission import (
    Admission,
    Answers,
    Batch,
    Choosing,
    Completed,
    Draw,
    Fresh,
    Kept,
    LedgerSink,
    Lookahead,
    RolloutSnapshots,
    Rules,
    oldest,
    without_old,
)
from rlinf.data.ledger import EQUAL_REWARDS, FAILED, TOO_OLD, Entry, sample_numbers
from rlinf.runtime.base.tasks import cancel_all
from rlinf.runtime.observe.stalls import Work
from rlinf.runtime.streams.handles import handles
from rlinf.runtime.streams.stream import Stream, each


class Drawing:
    """The source of prompts, or of whatever else is drawn, with their ids.

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
            items = [(item.id, item) for item in await self._draw(count)]
        elif hasattr(step, "prompts"):
            own, self._own = self._own[:count], self._own[count:]
            items = [(prompt.id, prompt) for prompt in own]
        else:
            first = max(self._next, step.index)
            self._next = first + count
            items = [(index, replace(step, index=index)) for index in range(first, self._next)]
        self.exhausted = not items
        return items


class Producer:
    """The part of `InFlight` that has answers made.

    Args:
        rules, draw, keeper, ledger, end: as of `InFlight`.
    """

    version: int
    """How many times weights were published."""

    def __init__(
        self,
        rules: Rules | int,
        draw: Draw | None,
        keeper: RolloutSnapshots | None,
        ledger: LedgerSink | None,
        end: int | None,
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

    # Producing -----------------------------------------------------------------------------------------------------

    async def _make(self, answers: Answers, actor: Any) -> None:
        prompts: Stream[Any] = Stream.of(self._feed(actor), name="prompts")
        try:
            results = answers(prompts)
            try:
                async with aclosing(handles(results)) as arriving:
                    async for handle in arriving:
                        self._arrived(await known(handle))
            finally:
                if isinstance(results, Stream):
                    await results.close()
        except Exception as error:
            self._error = self._error or error
        finally:
            await prompts.close()  # whoever reads them may take time to end, and must not get what is made anew
        self._stir()

    async def _feed(self, actor: Any) -> AsyncIterator[Any]:
        """Yield what is to be made, as soon as it may be begun."""
        while True:
            if (entry := await self._next(actor)) is not None:
                for one in entry.partial or (entry.item,):
                    yield one
                continue
            if self._drawing.exhausted and not self._queue:
                return
            await self._change()

    async def _next(self, actor: Any) -> Entry | None:
        """Take the entry that is handed on now, if anything may be begun. Between two things, no weights are published
        from when the newest are loaded until this one is under way: it would be made by some of each."""
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
                items = await self._drawing.take(count, step)
            except Exception as error:  # of the data: it is not the answers' failure
                self._error, self._drawing.exhausted = error, True
                return
            for number, item in items:
                entry = Entry(number, item, self._size, self._base + self._loaded)
                book.enter(entry)
                self._queue.append(entry)
            if self._ledger is not None:
                self._ledger.drawn([number for number, _ in items], self._size)

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
        result = one if isinstance(one, Completed) else Completed(one.prompt.id, (one,))
        version, tokens = oldest(result.results)
        part = self.rules.partial and one is not result  # groups come in parts, and what came of a task all at once
        size = sum(len(group.samples) for group in result.results) if part else None
        if not result.results:
            if (entry := book.entries.get((result.id, 0))) is not None and entry.result is None:
                book.drop(entry)
                self._drop(result.id, result.dropped or FAILED)
        else:
            if not part:  # all that will come of it: the other attempts at a task have failed
                self._drop(result.id, FAILED, 0, {*range(self._size)} - sample_numbers(result.results))
            book.complete(result.id, result.results, version=version, size=size, tokens=tokens)
        if (rest := book.entries.get((result.id, 0))) is None or rest.result is not None:
            self._making.discard(result.id)
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
        """All entries in flight, those included that the step under way has taken."""
        resumed = self._kept.entries if self._kept is not None else ()
        return [*resumed, *(() if self._book is None else self._book.entries.values()), *self._taken, *self._aside]

    def _drop(self, number: int, reason: str, tokens: int = 0, indices: Iterable[int] | None = None) -> None:
        if self._ledger is not None and (indices is None or tokens or [*indices]):
            self._ledger.dropped(number, reason, indices, tokens)

    def _unfinished(self, number: int) -> set[int]:
        """Samples of which nothing complete has come."""
        parts = (one.result for one in self.entries if one.id == number and one.result is not None)
        return {*range(self._size)}.difference(*map(sample_numbers, parts))


class InFlight(Producer):
    """The work in flight of a run: answers that are begun for the steps to come.

    Args:
        rules: what may be in flight; a number is its `staleness`.
        draw: draws prompts. None: a step brings its own; what is no prompt is drawn by counting steps on.
        keeper: where answers are made, for checkpoints; None: what is not complete begins anew.
        ledger: is told what is drawn and dropped.
        end: of the run, in steps; nothing is begun for later ones.
        kept: what `state` said when a checkpoint was written.
    """

    def __init__(
        self,
        rules: Rules | int = 0,
        *,
        draw: Draw | None = None,
        keeper: RolloutSnapshots | None = None,
        ledger: LedgerSink | None = None,
        end: int | None = None,
        snapshot: Kept | None = None,
    ) -> None:
        super().__init__(rules, draw, keeper, ledger, end)
        self._open = True  # the step `_index` has not begun
        self._lookahead = Lookahead()
        self._told: list[Callable[[], None]] = []  # what is entered in the ledger once the step is over
        self.resume(snapshot)

    def resume(self, snapshot: Kept | None) -> None:
        """Go on from what a checkpoint kept; before the first step."""
        self._kept, self.version = snapshot, 0 if snapshot is None else snapshot.version

    # Steps -------------------------------------------------------------------------------------------------------

    def next_batch(self, step: Any, answers: Answers, actor: Any) -> Batch:
        """Return the batch that a step learns from; answers for later steps go on being made.

        Args:
            step: the one that begins; all before it were learned from.
            answers: has prompts answered and scored; called once, and again after a failure.
            actor: the role whose weights make the answers; has `load`.

        Returns:
            The batch, at once. Its stream raises what `answers` raised, if the step lacks something because of it.
        """
        metrics: dict[str, float] = {}
        return Batch(Stream.of(self._batch(step, answers, actor, metrics), name="batch"), metrics)

    async def publish(self, actor: Any, weights: Any = None) -> None:
        """Let the actor have the newest weights, in the middle of its answers or, by the rules, before its next work.

        Args:
            weights: a promise of them; None where a step brought none.
        """
        if weights is not None:
            self._weights, self.version = weights, self.version + 1
        self.learned()
        async with self._loading:
            if not (self.rules.between and self._making):
                await self._load(actor)
        await self._give_up_old()
        self._stir()

    def learned(self) -> None:
        """Settle what the step has taken: it was learned from, and is not in flight any more."""
        for tell in self._told:
            tell()
        for done in (self._taken, self._aside, self._told):
            done.clear()  # type: ignore[attr-defined]
        if self._book is not None:
            self._book.version = self._base + self.version
        if self.rules.staleness:  # otherwise nothing may begin before the next step does
            self._open_next()

    def _open_next(self) -> None:
        if not self._open and self._book is not None:
            self._open, self._index = True, self._index + 1
            self._book.next_step()

    async def state(self) -> Kept:
        """Return the state for a checkpoint: everything drawn and not learned from or dropped, with its answers so far.

        Given back by `resume`, nothing of it is lost or made twice. It holds of the moment at which this returns.
        """
        partials = {} if self._keeper is None or self._pipe is None else await self._keeper.partials()
        async with self._reading:
            whole: dict[GroupFace, Any] = {}
            while away := [one for one in self._away() if one not in whole]:  # more may come while these are fetched
                whole.update(zip(away, await wholes(away), strict=True))

            def brought(result: Any) -> Any:
                return whole[result] if isinstance(result, GroupFace) else result

            entries = [
                replace(one, partial=self._rest(one.id, partials.get(one.id, one.partial)))
                if one.result is None
                else replace(one, result=tuple(map(brought, one.result)))
                for one in self.entries
            ]
            return Kept(self.version, tuple(sorted(entries, key=lambda one: one.id)))

    def _away(self) -> list[GroupFace]:
        """The groups in flight that are elsewhere."""
        return [result for one in self.entries for result in one.result or () if isinstance(result, GroupFace)]

    def _rest(self, number: int, partial: tuple[Any, ...]) -> tuple[Any, ...]:
        """The part of what was begun of one thing that has not been received yet."""
        if self._keeper is None or not self.rules.partial:
            return partial
        return self._keeper.rest(partial, {*range(self._size)} - self._unfinished(number))

    async def suspend(self) -> None:
        """Stop all work under way, and keep it: the next batch goes on from there, whoever makes answers by then."""
        keeper = None if self._pipe is None else self._keeper
        if keeper is not None:
            await keeper.pause()  # what it made from now on would be lost
        snapshot = await self.state()
        await self.close()
        if keeper is not None:
            await keeper.unpause()
        self._book = None
        self._queue.clear()
        self.resume(snapshot)

    async def close(self) -> None:
        """Give up work under way; what was drawn and what is complete is kept, and weights that are to be loaded."""
        pipe, self._pipe = self._pipe, None
        await cancel_all([] if pipe is None else [pipe])
        self._error = None
        self._making.clear()
        unfinished = [one for one in self._book.entries.values() if one.result is None] if self._book else []
        self._queue = deque(sorted(unfinished, key=lambda one: one.id))

    # A batch -----------------------------------------------------------------------------------------------------

    async def _batch(self, step: Any, answers: Answers, actor: Any, metrics: dict[str, float]) -> AsyncIterator[Any]:
        book = await self._begin(step)
        if self._pipe is None:
            self._pipe = asyncio.create_task(self._make(answers, actor), name="answers in flight")
        self._stir()
        rules, wanted = self.rules, max(1, book.left // self._size)
        fresh, choosing = Fresh(), Choosing(rules.sampling, wanted, rules.teaches)
        spare, waited = sum(one.size for one in book.entries.values() if one.result is not None) - book.left, False
        while book.left > 0 and not choosing.over:
            entry = book.take()
            if entry is None:
                waited, entry = True, await self._wait_for(book, step.index)
            if entry is None:
                break
            await self._bring_old(entry)
            results = self._usable(entry, fresh)
            if results is None and self.rules.mode == "resample":
                await self._resample(book, entry)
                continue
            self._settled.append(entry.id)
            if results is None or not choosing.keep(entry, results):
                book.reject(entry)
                if results is not None:
                    self._aside.append(entry)
            else:
                self._taken.append(entry)
                for result in results:
                    yield passed_on(result)
            self._stir()
        self._lookahead.step(book.batch, self._most_early(book), spare, waited)
        for _, results in choosing.instead():
            for result in results:
                yield passed_on(result)
        for entry, results in choosing.even:
            numbers = sample_numbers(results)
            self._told.append(partial(self._drop, entry.id, EQUAL_REWARDS, entry.tokens, numbers))
        metrics |= {**choosing.metrics(), **fresh.metrics()}
        ready = sum(one.result is not None for one in book.entries.values())
        metrics |= {"in_flight/prompts": float(len(book.entries)), "in_flight/ready": float(ready)}

    async def _begin(self, step: Any) -> Admission:
        """The step begins, or begins anew after it was given up."""
        if self._book is None:
            self._base = 0 if self._keeper is None else await self._keeper.version() - self.version
            self._loaded = self.version
            self._book = Admission(
                0, self.rules.staleness, carry=self.rules.carry, extra=0, version=self._base + self.version
            )
        book = self._book
        again = not self._open and step.index == self._index
        if again:
            for entry in self._taken:
                book.give_back(entry)
            for entry in self._aside:
                book.enter(entry)
            for undone in (self._taken, self._aside, self._told):
                undone.clear()  # type: ignore[attr-defined]
        else:
            self.learned()
            self._open_next()
        self._step, self._index, self._open = step, step.index, False
        self._size = getattr(step, "group_size", 1)
        if not again and (own := await self._drawing.own(step)) is not None:
            book.batch = book.left = own * self._size
        elif not book.batch:
            book.batch = book.left = max(self.rules.batch, 1) * self._size
        book.extra = self._lookahead.answers(book.batch, self._most_early(book))
        if self._kept is not None:
            snapshot, self._kept = self._kept, None
            for entry in snapshot.entries:
                self._enter_again(replace(entry))
        return book

    def _most_early(self, book: Admission) -> int:
        """Answers that may be begun for later steps."""
        return self.rules.staleness * book.batch if self.rules.extra is None else self.rules.extra * self._size

    async def _wait_for(self, book: Admission, index: int) -> Entry | None:
        """The next entry that the step may take; None if there will be none. Raises what ended the answers."""
        split = False
        while (entry := book.take()) is None:
            if self._error is not None:
                error, self._error = self._error, None
                await self.close()
                raise error
            if self._pipe is None or self._pipe.done():  # it has come to its end: nothing was left to draw
                unfinished = [one for one in book.entries.values() if one.result is None]
                if not unfinished:
                    self._pipe = None
                    return None
                for one in unfinished:
                    book.drop(one)
                    self._drop(one.id, "not answered", 0, self._unfinished(one.id))
                continue
            if self.rules.partial and self._keeper is not None and not split:
                split = True
                await self._keeper.split()
                continue
            change = self._change()
            with Work(f"batch of step {index}, which waits for {book.waits_for}", change, lambda: self._steps):
                await change
        return entry

    async def _bring_old(self, entry: Entry) -> None:
        """Have the groups of an entry here of which some tokens are too old: what is left of them is made here."""
        if entry.version < self._base + self.version - self.rules.staleness and self.rules.mode != "resample":
            self._taken.append(entry)
            entry.result = tuple(await wholes(entry.result))
            self._taken.remove(entry)

    def _usable(self, entry: Entry, fresh: Fresh) -> Sequence[Any] | None:
        """The results of an entry that may be learned from; None if there are none."""
        version, mode = self._base + self.version - self.rules.staleness, self.rules.mode
        results: Sequence[Any] = entry.result
        if entry.version >= version:
            return results
        if mode == "resample":
            fresh.resampled += entry.tokens
            return None
        masked, lost = fresh.masked, len(fresh.lost)
        usable = without_old(results, version, mode, fresh)
        if not usable:
            self._drop(entry.id, TOO_OLD, entry.tokens, sample_numbers(results))
        elif self._ledger is not None:
            lost_numbers = sample_numbers(results) - sample_numbers(usable)
            tokens = sum(each for _, _, each in fresh.lost[lost:])
            self._told.append(partial(self._ledger.masked, fresh.masked - masked))
            self._told.append(partial(self._drop, entry.id, TOO_OLD, tokens, lost_numbers))
        return usable or None

    async def _resample(self, book: Admission, entry: Entry) -> None:
        """Have something made anew, of which tokens are too old."""
        book.reject(entry)
        self._aside.append(entry)
        if self._keeper is not None:
            await self._keeper.settled([entry.id])  # what there was of it, before there is more of that id
        self._aside.remove(entry)
        self._drop(entry.id, TOO_OLD, entry.tokens, ())
        self._enter_again(replace(entry, result=None, partial=()))
        self._stir()
