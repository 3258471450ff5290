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
next one. `admission.py` says what may be begun and taken, and why nothing is too old then.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from rlinf.data.in_flight.admission import Admission, Entry, Lookahead
from rlinf.data.in_flight.choosing import Choosing
from rlinf.data.in_flight.freshness import Fresh, without_old
from rlinf.data.in_flight.held import sample_numbers
from rlinf.data.in_flight.ledger import EQUAL_REWARDS, TOO_OLD
from rlinf.data.in_flight.making import Making
from rlinf.data.in_flight.rules import Answers, Batch, Books, Draw, Keeper, Kept, Rules
from rlinf.runtime.base.tasks import cancel_all
from rlinf.runtime.observe.stalls import Work
from rlinf.runtime.streams.stream import Stream


class InFlight(Making):
    """What was begun for the steps to come.

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
        keeper: Keeper | None = None,
        ledger: Books | None = None,
        end: int | None = None,
        kept: Kept | None = None,
    ) -> None:
        super().__init__(rules, draw, keeper, ledger, end)
        self._open = True  # the step `_index` has not begun
        self._lookahead = Lookahead()
        self._told: list[Callable[[], None]] = []  # what is entered in the ledger once the step is over
        self.resume(kept)

    def resume(self, kept: Kept | None) -> None:
        """Go on from what a checkpoint kept; before the first step."""
        self._kept, self.version = kept, 0 if kept is None else kept.version

    # Steps -------------------------------------------------------------------------------------------------------

    def next_batch(self, step: Any, answers: Answers, actor: Any) -> Batch:
        """What a step learns from; answers for later steps go on being made.

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
        """What the step has taken was learned from, and is not in flight any more."""
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
        """What a checkpoint keeps: everything drawn and not learned from or dropped, with its answers so far.

        Given back by `resume`, nothing of it is lost or made twice. It holds of the moment at which this returns.
        """
        partials = {} if self._keeper is None or self._pipe is None else await self._keeper.partials()
        async with self._reading:
            kept = [
                replace(one, partial=self._rest(one.id, partials.get(one.id, one.partial)))
                if one.result is None
                else one
                for one in self.entries
            ]
            return Kept(self.version, tuple(sorted(kept, key=lambda one: one.id)))

    def _rest(self, number: int, begun: tuple[Any, ...]) -> tuple[Any, ...]:
        """What was begun of one thing, without the parts that have been received."""
        if self._keeper is None or not self.rules.partial:
            return begun
        return self._keeper.rest(begun, {*range(self._size)} - self._unfinished(number))

    async def suspend(self) -> None:
        """Stop all work under way, and keep it: the next batch goes on from there, whoever makes answers by then."""
        keeper = None if self._pipe is None else self._keeper
        if keeper is not None:
            await keeper.pause()  # what it made from now on would be lost
        kept = await self.state()
        await self.close()
        if keeper is not None:
            await keeper.unpause()
        self._book = None
        self._queue.clear()
        self.resume(kept)

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
        found, choosing = Fresh(), Choosing(rules.sampling, wanted, rules.teaches)
        spare, waited = sum(one.size for one in book.entries.values() if one.result is not None) - book.left, False
        while book.left > 0 and not choosing.over:
            entry = book.take()
            if entry is None:
                waited, entry = True, await self._wait_for(book, step.index)
            if entry is None:
                break
            results = self._usable(entry, found)
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
                    yield result
            self._stir()
        self._lookahead.step(book.batch, self._most_early(book), spare, waited)
        for _, results in choosing.instead():
            for result in results:
                yield result
        for entry, results in choosing.even:
            gone = sample_numbers(results)
            self._told.append(partial(self._drop, entry.id, EQUAL_REWARDS, entry.tokens, gone))
        metrics |= {**choosing.metrics(), **found.metrics()}
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
            kept, self._kept = self._kept, None
            for entry in kept.entries:
                self._enter_again(replace(entry))
        return book

    def _most_early(self, book: Admission) -> int:
        """Answers that may be begun for later steps."""
        return self.rules.staleness * book.batch if self.rules.extra is None else self.rules.extra * self._size

    async def _wait_for(self, book: Admission, index: int) -> Entry | None:
        """The next entry that the step may take; None if there will be none. Raises what ended the answers."""
        asked = False
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
            if self.rules.partial and self._keeper is not None and not asked:
                asked = True
                await self._keeper.split()
                continue
            change = self._change()
            with Work(f"batch of step {index}, which waits for {book.waits_for}", change, lambda: self._steps):
                await change
        return entry

    def _usable(self, entry: Entry, found: Fresh) -> Sequence[Any] | None:
        """What may be learned of an entry; None for nothing."""
        version, mode = self._base + self.version - self.rules.staleness, self.rules.mode
        results: Sequence[Any] = entry.result
        if entry.version >= version:
            return results
        if mode == "resample":
            found.resampled += entry.tokens
            return None
        masked, lost = found.masked, len(found.lost)
        usable = without_old(results, version, mode, found)
        if not usable:
            self._drop(entry.id, TOO_OLD, entry.tokens, sample_numbers(results))
        elif self._ledger is not None:
            gone = sample_numbers(results) - sample_numbers(usable)
            tokens = sum(each for _, _, each in found.lost[lost:])
            self._told.append(partial(self._ledger.masked, found.masked - masked))
            self._told.append(partial(self._drop, entry.id, TOO_OLD, tokens, gone))
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
