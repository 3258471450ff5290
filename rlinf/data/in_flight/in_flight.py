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
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

from rlinf.data.in_flight.admission import Admission, Entry
from rlinf.data.in_flight.choosing import Choosing
from rlinf.data.in_flight.freshness import Fresh, fresh, oldest
from rlinf.data.in_flight.rules import Answers, Batch, Books, Draw, Keeper, Kept, Made, Rules
from rlinf.data.sample import Group
from rlinf.runtime.base.tasks import cancel_all
from rlinf.runtime.observe.stalls import Work
from rlinf.runtime.streams.stream import Stream, each


class InFlight:
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
        self.rules = Rules(rules) if isinstance(rules, int) else rules
        self.version = 0
        """How many times weights were published."""
        self._draw, self._keeper, self._ledger, self._end = draw, keeper, ledger, end
        self._book: Admission | None = None
        self._kept = kept
        self._base = 0  # version of the weights when nothing was published yet
        self._loaded = 0  # published versions when those in use were
        self._weights: Any = None  # published, and not loaded yet
        self._step: Any = None  # the last one that began
        self._index = 0  # of the step that takes what is complete now
        self._open = True  # that one has not begun
        self._taken: list[Entry] = []  # by the last step that began
        self._queue: deque[Entry] = deque()  # admitted, and not handed on
        self._making: set[int] = set()  # handed on, and not complete
        self._own: list[Any] = []  # prompts of steps that bring their own
        self._next = 0  # what is drawn next, where steps are counted
        self._size = 1  # answers of a prompt
        self._loading = asyncio.Lock()
        self._settled: list[int] = []
        self._exhausted = False  # there is no more to draw
        self._steps = 0  # what has happened, for the stall report
        self._pipe: asyncio.Task[None] | None = None
        self._error: BaseException | None = None
        self._changed = asyncio.Event()
        if kept is not None:
            self.resume(kept)

    def resume(self, kept: Kept) -> None:
        """Go on from what a checkpoint kept; before the first step."""
        self._kept, self.version = kept, kept.version

    # Steps -------------------------------------------------------------------------------------------------------

    def next_batch(self, step: Any, answers: Answers, actor: Any) -> Batch:
        """What a step learns from; answers for later steps go on being made.

        Args:
            step: the one that begins; all before it were learned from.
            answers: has prompts answered and scored; called once, or again after a failure.
            actor: the role whose weights make the answers; has `load`, and `version` where tokens have versions.

        Returns:
            The batch, at once. Its stream raises what `answers` raised, if the step lacks something because of it.
        """
        metrics: dict[str, float] = {}
        return Batch(Stream.of(self._batch(step, answers, actor, metrics), name="batch"), metrics)

    async def publish(self, actor: Any, weights: Any = None) -> None:
        """Let the actor have the newest weights: at once, in the middle of its answers; where the rules say so, before
        its next work.

        Args:
            actor: the role.
            weights: a promise of them; None where a step brought none.
        """
        if weights is not None:
            self._weights, self.version = weights, self.version + 1
        self.learned()
        if not (self.rules.between and self._making):
            await self._load(actor)
        await self._give_up_old()
        self._stir()

    def learned(self) -> None:
        """What the step has taken was learned from, and is not in flight any more."""
        self._taken.clear()
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
        if self._book is None:
            return self._kept or Kept(self.version)
        entries = [*self._book.entries.values(), *self._taken]
        kept = [
            replace(one, partial=partials.get(one.id, one.partial)) if one.result is None else one for one in entries
        ]
        return Kept(self.version, tuple(sorted(kept, key=lambda one: one.id)))

    @property
    def ids(self) -> list[int]:
        """Of what is in flight; several parts of one thing have one id."""
        kept = self._kept.entries if self._kept is not None else ()
        entries = kept if self._book is None else [*self._book.entries.values(), *self._taken]
        return sorted({one.id for one in entries})

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
        if pipe is not None:
            await cancel_all([pipe])
        self._error = None
        self._making.clear()
        if self._book is not None:
            unfinished = [one for one in self._book.entries.values() if one.result is None]
            self._queue = deque(sorted(unfinished, key=lambda one: one.id))

    # A batch -----------------------------------------------------------------------------------------------------

    async def _batch(self, step: Any, answers: Answers, actor: Any, metrics: dict[str, float]) -> AsyncIterator[Any]:
        book = await self._begin(step)
        if self._pipe is None:
            self._pipe = asyncio.create_task(self._make(answers, actor), name="answers in flight")
        self._stir()
        found, choosing = Fresh(), Choosing(self.rules.sampling, max(1, book.left // self._size))
        while book.left > 0 and not choosing.over:
            entry = book.take() or await self._wait_for(book, step.index)
            if entry is None:
                break
            self._settled.append(entry.id)
            results = self._usable(entry, found)
            if results is None or not choosing.keep(entry, results):
                book.reject(entry)
            else:
                self._taken.append(entry)
                for result in results:
                    yield result
            self._stir()
        for entry, results in choosing.instead():
            self._taken.append(entry)
            for result in results:
                yield result
        for entry, _ in choosing.even:
            self._drop(entry.id, "equal rewards", entry.tokens)
        metrics |= {**choosing.metrics(), **found.metrics()}
        metrics["in_flight/prompts"] = float(len(book.entries))
        metrics["in_flight/ready"] = float(sum(one.result is not None for one in book.entries.values()))

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
            self._taken.clear()
        else:
            self.learned()
            self._open_next()
        self._step, self._index, self._open = step, step.index, False
        self._size = getattr(step, "group_size", 1)
        if not again and self._draw is None and hasattr(step, "prompts"):
            own = [prompt async for prompt in each(step.prompts)]
            self._own += own
            book.batch = book.left = len(own) * self._size
        elif not book.batch:
            book.batch = book.left = max(self.rules.batch, 1) * self._size
        extra = self.rules.staleness * book.batch if self.rules.extra is None else self.rules.extra * self._size
        book.extra = extra
        if self._kept is not None:
            kept, self._kept = self._kept, None
            for entry in kept.entries:
                self._enter_again(entry)
        return book

    async def _wait_for(self, book: Admission, index: int) -> Entry | None:
        """The next entry that the step may take; None if there will be none.

        Raises:
            Exception: of what makes answers.
        """
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
                    self._drop(one.id, "not answered")
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
            self._enter_again(replace(entry, result=None, partial=()))
            return None
        masked, lost = found.masked, len(found.lost)
        usable = [fresh(one, version, mode, found) if isinstance(one, Group) else one for one in results]
        if self._ledger is not None:
            if found.masked > masked:
                self._ledger.masked(found.masked - masked)
            for number, index, tokens in found.lost[lost:]:
                self._ledger.dropped(number, "too old", [index], tokens)
        return [one for one in usable if one is not None] or None

    # Making ------------------------------------------------------------------------------------------------------

    async def _make(self, answers: Answers, actor: Any) -> None:
        prompts = Stream.of(self._feed(actor), name="prompts")
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
            if not (self.rules.between and self._making):
                if self.rules.between:
                    await self._load(actor)
                if not self._queue:
                    await self._admit()
                if self._queue:
                    entry = self._queue.popleft()
                    if entry.result is None and self._book is not None and (entry.id, 0) in self._book.entries:
                        self._making.add(entry.id)
                        for one in entry.partial or (entry.item,):
                            yield one
                    continue
            if self._exhausted and not self._queue:
                return
            await self._change()

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
        try:
            drawn = await self._drawn(count, step)
        except Exception as error:  # of the data: it is not the answers' failure
            self._error, self._exhausted = error, True
            return
        self._exhausted = not drawn
        for number, item in drawn:
            entry = Entry(number, item, self._size, self._base + self._loaded)
            book.enter(entry)
            self._queue.append(entry)
        if drawn and self._ledger is not None:
            self._ledger.drawn([number for number, _ in drawn], self._size)

    async def _drawn(self, count: int, step: Any) -> list[tuple[int, Any]]:
        if self._draw is not None:
            return [(item.id, item) for item in await self._draw(count)]
        if hasattr(step, "prompts"):
            own, self._own = self._own[:count], self._own[count:]
            return [(prompt.id, prompt) for prompt in own]
        first = max(self._next, step.index)
        self._next = first + count
        return [(index, replace(step, index=index)) for index in range(first, self._next)]

    def _enter_again(self, entry: Entry) -> None:
        """It is in flight once more, complete or not."""
        assert self._book is not None
        if entry.result is None:
            if not entry.partial:
                entry.version = self._base + self._loaded
            self._queue.append(entry)
        self._next = max(self._next, entry.id + 1)
        self._book.enter(entry)

    def _arrived(self, one: Any) -> None:
        """Something has come of what was begun."""
        book = self._book
        assert book is not None
        made = one if isinstance(one, Made) else Made(one.prompt.id, (one,))
        version, tokens = oldest(made.results)
        size = sum(len(group.samples) for group in made.results) if self.rules.partial else None
        if not made.results:
            if (entry := book.entries.get((made.id, 0))) is not None and entry.result is None:
                book.drop(entry)
                self._drop(made.id, made.dropped or "nothing came of it")
        else:
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
            if self.rules.mode == "drop":
                book.drop(entry)
                self._drop(entry.id, "too old", tokens)
            else:
                book.drop(entry)
                self._enter_again(replace(entry, partial=()))

    async def _load(self, actor: Any) -> None:
        async with self._loading:
            weights, self._weights, version = self._weights, None, self.version
            if weights is not None:
                await actor.load(weights)
                self._loaded = version

    # Waiting -----------------------------------------------------------------------------------------------------

    def _drop(self, number: int, reason: str, tokens: int = 0) -> None:
        if self._ledger is not None:
            self._ledger.dropped(number, reason, tokens=tokens)

    def _stir(self) -> None:
        """Something has changed: whoever waits looks again."""
        self._steps += 1
        self._changed.set()
        self._changed = asyncio.Event()

    async def _change(self) -> None:
        await self._changed.wait()
