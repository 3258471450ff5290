"""Rules for work in flight: when a prompt may be begun, and which answers a step learns from.

Nothing is ever older than allowed. Pure counting: nothing waits here. Versions are counted as the trainer counts them:
a step that begins when so many versions were published learns by the weights of that version, and a token made by an
older one is as many versions old as lie between.

Everything in flight has a *deadline*: the last version by whose weights it may be learned. With steps that learn from
`batch` answers each, all that is in flight can be learned in time if and only if for every version `d` that is yet to
come, no more answers are due until then than the steps until then take:

    due(d) <= left + (d - version) * batch        (`left`: what the present step still takes)

This is the condition for unit jobs on one machine (Jackson's rule, earliest due date first). It holds when nothing is
in flight; a prompt is admitted only if it still holds then, and younger answers overtake older ones only if it still
holds for those. So it holds always: no answer ever comes too late, in whatever order answers are finished, and a step
waits only for answers that would be too old in the next one.

Dynamic sampling (DAPO, arXiv:2503.14476, section 3.2) is over groups that come as they are finished; which of them
give a gradient is defined by `training.policy.teaches`.
"""

from __future__ import annotations

import heapq
import operator
from collections import Counter
from collections.abc import AsyncIterable, Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import numpy as np

from rlinf.algos.algorithms import DynamicSampling
from rlinf.data.ledger import Entry
from rlinf.data.sample import Group, Sample
from rlinf.runtime.streams.stream import Stream

WATCHED = 4
"""Steps in a row that have answers to spare before fewer are begun early: a single one may have had short answers."""
MOST_WATCHED = 64
"""The most that number becomes: it doubles whenever a step had to wait all the same, since a long tail that comes now
and then must be given its time."""


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
        """Entries in flight, by id and part."""
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
        """Enter the result of something that was drawn.

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
        """Describe in words what the present step waits for."""
        unfinished = [entry for entry in self.entries.values() if entry.result is None]
        if not unfinished:
            return "prompts to be drawn"
        first = min(unfinished, key=lambda entry: (entry.deadline, entry.id))
        return f"{len(unfinished)} unfinished prompts, the oldest {first.id} begun at version {first.version}"

    # Counting ----------------------------------------------------------------------------------------------------

    def _may_overtake(self, entry: Entry) -> bool:
        """True if those that are due before this one can still be learned in time when the step takes this one.

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


Teaches = Callable[[Group], bool]
"""Says of a judged group that it gives a gradient."""


def unequal(group: Group) -> bool:
    """Rewards of the group's answers differ: the definition for whoever knows no algorithm."""
    return len(set(group.rewards)) > 1


@dataclass(slots=True, eq=False)
class Choosing:
    """The choice of groups for one step, and counts of those that it has looked at."""

    sampling: DynamicSampling | None
    """None takes everything."""
    wanted: int
    """Groups of a full batch."""
    teaches: Teaches = unequal
    """Which groups give a gradient."""
    offered: int = 0
    """Groups seen."""
    accepted: int = 0
    """Groups taken."""
    rewards: list[float] = field(default_factory=list)
    """Rewards of all groups that were seen."""
    even: list[tuple[Entry, Sequence[Any]]] = field(default_factory=list)
    """Those that give no gradient."""

    @property
    def over(self) -> bool:
        """So many were looked at that the batch goes on as it is."""
        return self.sampling is not None and self.offered >= self.sampling.max_rounds * self.wanted

    def keep(self, entry: Entry, results: Sequence[Any]) -> bool:
        """Count an entry as seen, and return True if the step learns from it."""
        self.offered += 1
        if self.sampling is None:
            self.accepted += 1
            return True
        groups = [group for group in results if isinstance(group, Group)]
        self.rewards += [reward for group in groups for reward in group.rewards]
        if not any(map(self.teaches, groups)):
            self.even.append((entry, results))
            return False
        self.accepted += 1
        return True

    def instead(self) -> list[tuple[Entry, Sequence[Any]]]:
        """Results for the trainer where not one group gives a gradient: it learns nothing, but tells of them."""
        if self.accepted:
            return []
        results, self.even = self.even[: self.wanted], self.even[self.wanted :]
        return results

    def metrics(self) -> dict[str, float]:
        """Metrics of dynamic sampling, as those of `flows.text`; empty without it."""
        if self.sampling is None:
            return {}
        counts = {
            "sampling/rounds": float(-(-self.offered // max(self.wanted, 1))),
            "sampling/drawn": float(self.offered),
            "sampling/dropped": float(self.offered - self.accepted),
            "sampling/kept": float(self.accepted),
        }
        return counts | ({"sampling/reward/mean": sum(self.rewards) / len(self.rewards)} if self.rewards else {})


Mode = Literal["drop", "mask", "resample"]
"""Treatment of an answer with tokens that are too old: it is not learned from; those tokens are read and not learned;
or its prompt is answered again."""


@dataclass(slots=True)
class Fresh:
    """Counts of tokens of a batch that were too old, by what became of them."""

    masked: int = 0
    """Tokens that are read, and not learned."""
    dropped: int = 0
    """Tokens of answers that are not learned from, young ones too."""
    resampled: int = 0
    """Tokens of answers whose prompts are answered again."""
    lost: list[tuple[int, int, int]] = field(default_factory=list)
    """Answers that are not learned from: prompt id, index, tokens."""

    def metrics(self) -> dict[str, float]:
        """Numbers of a step."""
        return {
            "staleness/masked": float(self.masked),
            "staleness/dropped": float(self.dropped),
            "staleness/resampled": float(self.resampled),
        }


def oldest(results: Sequence[Any]) -> tuple[int | None, int]:
    """The oldest version that made a learned token of groups, None if nobody knows; and how many those tokens are."""
    versions = [sample.learned_versions for one in results if isinstance(one, Group) for sample in one.samples]
    joined = np.concatenate([np.empty(0, np.int32), *versions])  # one minimum over all costs a tenth of one for each
    return (int(joined.min()) if len(joined) else None), len(joined)


def without_old(results: Sequence[Any], version: int, mode: Mode, counts: Fresh) -> list[Any]:
    """Results without what was made by weights older than `version`, see `fresh`; those without versions stay."""
    young = [fresh(one, version, mode, counts) if isinstance(one, Group) else one for one in results]
    return [one for one in young if one is not None]


def fresh(group: Group, version: int, mode: Mode, counts: Fresh) -> Group | None:
    """A group without what was made by weights older than `version`; None if nothing is left of it.

    Args:
        group: of which nothing was learned yet.
        version: the oldest that may be learned.
        mode: `mask` keeps answers, and learns their other tokens; `drop` leaves out whole answers.
        counts: counts what became of old tokens.
    """
    samples: list[Sample] = []
    for sample in group.samples:
        old = sample.versions < version
        if sample.loss_mask is not None:
            old &= sample.loss_mask
        if not (count := int(np.count_nonzero(old))):
            samples.append(sample)
        elif mode == "mask":
            learned = np.ones(len(old), bool) if sample.loss_mask is None else sample.loss_mask
            samples.append(replace(sample, loss_mask=learned & ~old, too_old=sample.too_old + count))
            counts.masked += count
        else:
            counts.dropped += sample.learned_tokens
            counts.lost.append((group.prompt.id, sample.index, sample.learned_tokens))
    if len(samples) == len(group.samples) and all(map(operator.is_, samples, group.samples)):
        return group
    return Group(group.prompt, tuple(samples)) if samples else None


Answers = Callable[[Any], AsyncIterable[Any]]
"""From a stream of what was drawn to what came of it, in any order: `Group`s, or `Completed`."""
Draw = Callable[[int], Awaitable[Sequence[Any]]]
"""Draws so many more prompts; fewer where there are no more."""


@dataclass(frozen=True, slots=True, eq=False)
class Rules:
    """Bounds on what may be in flight, and the treatment of what is too old."""

    staleness: int = 0
    """By how many versions tokens may be older than the weights that learn from them. 0: nothing begins early."""
    batch: int = 0
    """Prompts of a step; 0: as many as the step brings."""
    mode: Mode = "mask"
    """Treatment of answers with tokens that are too old all the same."""
    carry: int | None = None
    """By how many versions an answer may be carried over before a step waits for it; None: `staleness`."""
    extra: int | None = None
    """Prompts in flight beside those of the step in hand; None: `staleness` batches."""
    partial: bool = False
    """Groups of which some answers are complete are learned from in parts, where a step would have to wait."""
    between: bool = False
    """One thing is made after the other, and weights are switched only between two."""
    sampling: DynamicSampling | None = None
    """Drop groups that give no gradient, and learn from others in their place."""
    teaches: Teaches = unequal
    """Which groups give one, for `sampling`."""


@dataclass(frozen=True, slots=True, eq=False)
class Completed:
    """The results of one thing that was drawn, where they are no single group."""

    id: int
    """Id of what was drawn."""
    results: tuple[Any, ...]
    """To learn from; none, where nothing came of it."""
    dropped: str = ""
    """Why, if nothing came of it."""


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """The groups that a step learns from, with metrics."""

    groups: Stream[Any]
    """The groups as they are chosen, the oldest first."""
    metrics: dict[str, float] = field(default_factory=dict)
    """How they were found, complete once `groups` has ended: `in_flight/prompts` that are under way for later steps,
    and `in_flight/ready` of those, which are complete; `staleness/dropped` and `staleness/masked`, tokens that were too
    old; with dynamic sampling, what `flows.text` tells."""


class LedgerSink(Protocol):
    """A ledger for everything that is drawn and not learned from."""

    def drawn(self, ids: Iterable[int], answers: int) -> None:
        """Prompts were drawn, for so many answers each."""

    def dropped(self, prompt_id: int, reason: str, indices: Iterable[int] | None = None, tokens: int = 0) -> None:
        """Answers will not be learned from, None: all that there are."""

    def masked(self, tokens: int) -> None:
        """So many tokens are read, and not learned."""


class RolloutSnapshots(Protocol):
    """The maker of answers, as far as it keeps those that it has begun."""

    async def version(self) -> int:
        """Return the version of the weights in use."""

    async def partials(self) -> Mapping[int, tuple[Any, ...]]:
        """Return what was begun and is not settled, by id: given in place of what was drawn, one after the other, it
        goes on from there."""

    async def settled(self, ids: Sequence[int]) -> None:
        """These have been received, and need not be kept."""

    async def drop(self, ids: Sequence[int]) -> int:
        """Give these up; returns how many tokens there were of them."""

    async def split(self) -> None:
        """Let the complete answers of groups under way come by themselves."""

    def rest(self, partial: tuple[Any, ...], samples: Collection[int]) -> tuple[Any, ...]:
        """Return what was begun of one thing, without these of its samples, which have been received as a part of
        it."""

    async def pause(self) -> None:
        """Make nothing more, and keep what there is."""

    async def unpause(self) -> None:
        """Go on after `pause`."""


@dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """The work in flight that a checkpoint keeps."""

    version: int
    """How many times weights had been published."""
    entries: tuple[Entry, ...] = ()
    """Entries in flight, in the order in which they were drawn."""
