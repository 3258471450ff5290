"""When a prompt may be begun, and which answers a step learns from, so that nothing is ever older than allowed.

Pure counting: nothing waits here. Versions are counted as the trainer counts them: a step that begins when so many
versions were published learns by the weights of that version, and a token made by an older one is as many versions old
as lie between.

Everything in flight has a *deadline*: the last version by whose weights it may be learned. With steps that learn from
`batch` answers each, all that is in flight can be learned in time if and only if for every version `d` that is yet to
come, no more answers are due until then than the steps until then take:

    due(d) <= left + (d - version) * batch        (`left`: what the present step still takes)

This is the condition for unit jobs on one machine (Jackson's rule, earliest due date first). It holds when nothing is
in flight; a prompt is admitted only if it still holds then, and younger answers overtake older ones only if it still
holds for those. So it holds always: no answer ever comes too late, in whatever order answers are finished, and a step
waits only for answers that would be too old in the next one.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

WATCHED = 4
"""Steps in a row that have answers to spare before fewer are begun early: a single one may have had short answers."""
MOST_WATCHED = 64
"""The same after several steps had to wait all the same: a long tail that comes now and then must be given its time."""


class Lookahead:
    """How many answers are begun for later steps: as few as let no step wait, since what begins later is made by newer
    weights.

    It begins with as many as the bound allows. What a row of steps had to spare is not begun early any more, down to
    one batch, which is what generating beside training takes; a step that waits has one more batch begun early, and the
    row twice as long from then on.
    """

    def __init__(self) -> None:
        self._early: int | None = None
        self._spare: list[int] = []
        self._row = WATCHED

    def answers(self, batch: int, most: int) -> int:
        """How many are in flight beside those of the step in hand.

        Args:
            batch: answers of a step.
            most: what the bound allows.
        """
        return most if self._early is None else min(max(self._early, batch), most)

    def step(self, batch: int, most: int, spare: int, waited: bool) -> None:
        """A step has its batch.

        Args:
            batch, most: as of `answers`.
            spare: complete answers beyond its batch that it found when it began.
            waited: it found too few.
        """
        early = self.answers(batch, most)
        if waited:
            self._spare.clear()
            if early < most:
                self._early, self._row = early + batch, min(2 * self._row, MOST_WATCHED)
            return
        self._spare.append(spare)
        if len(self._spare) == self._row:
            self._early = early - max(0, min(self._spare))
            self._spare.clear()


@dataclass(slots=True, eq=False)
class Entry:
    """Something that was drawn and not learned from yet: a prompt with its answers, a task, the acting of one step."""

    id: int
    """The prompt's, or the step's."""
    item: Any
    """What was drawn."""
    size: int
    """Answers that it has, or will have."""
    version: int
    """The oldest weights that may have made a token of it."""
    result: Any = None
    """What there is to learn from; None as long as it is not complete."""
    partial: tuple[Any, ...] = ()
    """What is made in its place, where it was begun before a restart."""
    tokens: int = 0
    """Learned tokens of the result."""
    deadline: int = 0
    """The last version by which it is to be learned."""


class Admission:
    """The answers in flight of a run, by when they are due.

    Args:
        batch: answers of a step.
        staleness: by how many versions tokens may be older than the weights that learn from them.
        carry: by how many versions an answer may be carried over before a step waits for it. None: `staleness`. More
            than that, and it is learned without its tokens that are too old.
        extra: answers in flight beside those of the step in hand. None: `staleness` batches.
        version: published so far.
    """

    def __init__(
        self, batch: int, staleness: int, *, carry: int | None = None, extra: int | None = None, version: int = 0
    ) -> None:
        self.batch, self.staleness = batch, staleness
        self.carry = staleness if carry is None else carry
        self.extra = staleness * batch if extra is None else extra
        self.version = version
        """Published so far: the weights by which the present step learns."""
        self.left = batch
        """Answers that the present step still takes."""
        self.entries: dict[tuple[int, int], Entry] = {}
        """What is in flight, by id and part."""
        self._due: Counter[int] = Counter()  # answers by deadline
        self._ready: list[tuple[int, int, int]] = []  # complete ones: version, id, part
        self._answers = 0
        self._parts = 0

    @property
    def answers(self) -> int:
        """In flight, complete ones too."""
        return self._answers

    # Into flight -------------------------------------------------------------------------------------------------

    def room(self, size: int, version: int, after: int | None = None) -> int:
        """How many more may be begun now.

        Args:
            size: answers of each.
            version: of the weights that will make their first tokens.
            after: steps that follow the present one, -1 if there is not even that; None for no end.
        """
        if after is not None and (most := self.left + after * self.batch - self._answers) <= 0:
            return 0
        spare = self.left + self.extra - self._answers
        deadline, due = version + self.carry, 0
        for when in sorted({*self._due, deadline}):
            due += self._due.get(when, 0)
            if when >= deadline:
                spare = min(spare, self._takes_until(when) - due)
        count = max(spare, 0) // size
        if after is not None:
            count = min(count, -(-most // size))
        return max(count, 1) if self.left > 0 and not self.entries else count  # one may be larger than a batch

    def enter(self, entry: Entry) -> None:
        """It is in flight from now on."""
        entry.deadline = entry.version + self.carry
        key = (entry.id, 0)
        if key in self.entries:
            self._parts += 1
            key = (entry.id, self._parts)
        self.entries[key] = entry
        self._due[entry.deadline] += entry.size
        self._answers += entry.size
        if entry.result is not None:
            heapq.heappush(self._ready, (entry.version, *key))

    def complete(self, id: int, result: Any, *, version: int | None, size: int | None = None, tokens: int = 0) -> bool:
        """What came of one.

        Args:
            id: of it.
            result: to learn from.
            version: the oldest that made a token of it; None where nobody knows.
            size: it is so many of its answers, and the rest stays in flight. None: it is all of it.
            tokens: that are learned of it.

        Returns:
            Whether something of that id was in flight.
        """
        waiting = self.entries.get((id, 0))
        if waiting is None or waiting.result is not None:
            return False
        oldest = waiting.version if version is None else version
        if size is not None and size < waiting.size:
            self._leave(waiting)
            waiting.size -= size
            self._due[waiting.deadline] += waiting.size
            self._answers += waiting.size
            self.enter(Entry(id, waiting.item, size, oldest, result, tokens=tokens))
            return True
        self.drop(waiting)
        waiting.version, waiting.result, waiting.tokens, waiting.partial = oldest, result, tokens, ()
        self.enter(waiting)
        return True

    # Out of flight -----------------------------------------------------------------------------------------------

    def take(self) -> Entry | None:
        """The oldest that is complete, for the present step; None if there is none, or if older ones that are not
        complete would then be learned too late."""
        if not self._ready or self.left <= 0:
            return None
        _, *key = self._ready[0]
        entry = self.entries[key[0], key[1]]
        if not self._may_overtake(entry):
            return None
        heapq.heappop(self._ready)
        self._leave(self.entries.pop((key[0], key[1])))
        self.left -= entry.size
        return entry

    def give_back(self, entry: Entry) -> None:
        """It was taken, and not learned from after all."""
        self.left += entry.size
        self.enter(entry)

    def reject(self, entry: Entry) -> None:
        """It was taken, and is dropped: the step takes another in its place."""
        self.left += entry.size

    def drop(self, entry: Entry) -> None:
        """It will never be complete."""
        self._leave(entry)
        del self.entries[entry.id, 0]

    def next_step(self) -> None:
        """The present step is over; the next one takes a batch."""
        self.left = self.batch

    def too_old(self) -> Iterator[Entry]:
        """Those that are not complete, and of which some tokens are too old already."""
        oldest = self.version - self.staleness
        yield from [entry for entry in self.entries.values() if entry.result is None and entry.version < oldest]

    @property
    def waits_for(self) -> str:
        """What the present step waits for, in words."""
        unfinished = [entry for entry in self.entries.values() if entry.result is None]
        if not unfinished:
            return "prompts to be drawn"
        first = min(unfinished, key=lambda entry: (entry.deadline, entry.id))
        return f"{len(unfinished)} unfinished prompts, the oldest {first.id} begun at version {first.version}"

    # Counting ----------------------------------------------------------------------------------------------------

    def _may_overtake(self, entry: Entry) -> bool:
        """Whether those that are due before this one can still be learned in time when the step takes this one.

        Where they could not anyway, as after a restart under a smaller bound, the oldest go first.
        """
        due = 0
        for when in sorted(self._due):
            if when >= entry.deadline:
                return True
            due += self._due[when]
            if due > self._takes_until(when) - entry.size:
                return False
        return True

    def _takes_until(self, version: int) -> int:
        return self.left + max(0, version - self.version) * self.batch

    def _leave(self, entry: Entry) -> None:
        self._due[entry.deadline] -= entry.size
        if not self._due[entry.deadline]:
            del self._due[entry.deadline]
        self._answers -= entry.size
