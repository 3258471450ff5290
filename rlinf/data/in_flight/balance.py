"""Whether a run's ledger adds up: every sample of every prompt drawn is trained once, dropped, or in flight.

In: the lines of `ledger.jsonl`, and what the newest checkpoint holds. Out: a `Balance`. Nothing is believed that can be
counted: what is open follows from what was drawn, trained and dropped, and is held against what is said to be in
flight.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from rlinf.data.in_flight.ledger import Held, unpacked

_SHOWN = 5
"""Samples that a problem names; the rest is counted."""


@dataclass(slots=True)
class Balance:
    """What became of everything that a run has drawn."""

    steps: int = 0
    """The last step that has a line."""
    lines: int = 0
    """How many lines there are."""
    prompts: int = 0
    """Prompts drawn."""
    samples: int = 0
    """Samples drawn: so many answers were to be given."""
    carried: int = 0
    """Samples that were in flight in a run whose checkpoint this one began with."""
    trained: int = 0
    """Samples that were trained."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Samples that were dropped, by reason."""
    in_flight: int = 0
    """Samples that are neither, and are held."""
    unknown: int = 0
    """Samples of which a flow of the user's own said nothing."""
    elsewhere: int = 0
    """Samples trained that a flow of the user's own got from elsewhere, or trained again."""
    tokens: Counter[str] = field(default_factory=Counter)
    """Generated tokens: `trained`, of those `masked` as too old; and `dropped`."""
    problems: list[str] = field(default_factory=list)
    """Why it does not balance, in words."""

    @property
    def balances(self) -> bool:
        """Nothing is lost, nothing was trained twice, and nothing came from nowhere."""
        return not self.problems


def balance(
    lines: Iterable[Mapping[str, Any]], held: Held | None = None, since: Mapping[str, Any] | None = None
) -> Balance:
    """Add up the lines of a ledger.

    Args:
        lines: of `ledger.jsonl`, in order.
        held: what is in flight, as found in the checkpoint that was written after the last line; None: as that line
            says itself.
        since: what the checkpoint tells of the time between that line and itself: `since` of `Ledger.state_dict`.

    Raises:
        ValueError: a line is none of a ledger.
    """
    count = _Counting()
    last: Mapping[str, Any] = {}
    for last in lines:
        count.line(last)
    if since:
        count.events(since, "after the last step")
    said = dict(unpacked(last.get("in_flight", {}))) if held is None else held
    count.ends(said, "the last line" if held is None else "the checkpoint")
    return count.found


class _Counting:
    """A ledger as far as it was read."""

    def __init__(self) -> None:
        self.found = Balance()
        self._open: dict[int, set[int]] = {}
        self._settled = _Numbers()
        self._own = False
        self._step: int | None = None

    def line(self, line: Mapping[str, Any]) -> None:
        step = line["step"]
        if self._step is not None and step != self._step + 1:
            self._problem(f"the line after that of step {self._step} is of step {step}")
        self._step = self.found.steps = step
        self.found.lines += 1
        self._own = self._own or bool(line.get("own"))
        self._goes_on(line.get("carried"), f"step {step}")
        self.events(line, f"step {step}")
        lost = list(_each(line.get("lost", {})))
        if lost:
            self._samples_problem(f"step {step}: lost", lost)
        for number, index in [*lost, *_each(line.get("unknown", {}))]:
            self._settle(number, index)
        self.found.unknown += sum(1 for _ in _each(line.get("unknown", {})))

    def _goes_on(self, carried: Mapping[str, str] | None, where: str) -> None:
        """A run was gone on with: what it had open then is what is open here, unless its lines are elsewhere."""
        if carried is None:
            return
        found = {number: set(indices) for number, indices in unpacked(carried)}
        if self.found.lines == 1:
            self._open = found
            self.found.carried = sum(map(len, found.values()))
        elif found != self._open:
            self._problem(f"{where}: the run went on with other samples in flight than it had before")

    def events(self, told: Mapping[str, Any], where: str) -> None:
        """Take in what was drawn, trained and dropped."""
        found = self.found
        again = []
        for number, indices in unpacked(told.get("drawn", {})):
            if number in self._open or number in self._settled:
                again += [(number, index) for index in indices]
                continue
            found.prompts += 1
            found.samples += len(indices)
            self._open[number] = set(indices)
        self._samples_problem(f"{where}: drawn twice", again)
        repeated: list[tuple[int, int]] = []
        strange: list[tuple[int, int]] = []
        for number, index in _each(told.get("trained", {})):
            found.trained += 1
            if not self._settle(number, index):
                known = number in self._settled or number in self._open
                (repeated if known else strange).append((number, index))
        found.elsewhere += len(repeated) + len(strange) if self._own else 0
        self._samples_problem(f"{where}: trained although they were trained or dropped before", repeated)
        self._samples_problem(f"{where}: trained and never drawn", strange)
        wrong = []
        for reason, samples in told.get("dropped", {}).items():
            for number, index in _each(samples):
                found.dropped[reason] += 1
                if not self._settle(number, index):
                    wrong.append((number, index))
        self._samples_problem(f"{where}: dropped although they were not open", wrong)
        found.tokens.update(told.get("tokens", {}))

    def ends(self, held: Held, who: str) -> None:
        """Hold what is open against what is held."""
        lost, settled = [], []
        for number in {**self._open, **held}:
            left, said = self._open.get(number, set()), held.get(number, ())
            if isinstance(said, int):  # so many, and nobody knows which
                here = set(islice(sorted(left), said))
                settled += [(number, at) for at in range(len(left), said)]
            else:
                here = left.intersection(said)
                settled += [(number, index) for index in said if index not in left]
            self.found.in_flight += len(here)
            lost += [(number, index) for index in sorted(left - here)]
        self._samples_problem(f"lost: neither trained nor dropped, and {who} does not have them", lost)
        self._samples_problem(f"{who} has in flight what was trained, dropped or never drawn", settled)

    def _settle(self, number: int, index: int) -> bool:
        """A sample is open no more; whether it was."""
        left = self._open.get(number)
        if left is None or index not in left:
            return False
        left.discard(index)
        if not left:
            del self._open[number]
            self._settled.add(number)
        return True

    def _samples_problem(self, what: str, samples: list[tuple[int, int]]) -> None:
        if samples and not self._own:
            shown = ", ".join(f"{number}/{index}" for number, index in samples[:_SHOWN])
            more = f" and {len(samples) - _SHOWN:,} more" if len(samples) > _SHOWN else ""
            self._problem(f"{what}: {len(samples):,} samples (prompt/sample {shown}{more})")

    def _problem(self, text: str) -> None:
        self.found.problems.append(text)


class _Numbers:
    """A set of whole numbers, of which most follow on each other: kept as ranges, whatever their number."""

    def __init__(self) -> None:
        self._first: list[int] = []
        self._end: list[int] = []

    def add(self, number: int) -> None:
        at = bisect_right(self._first, number)
        if at and number < self._end[at - 1]:
            return
        joins_before, joins_after = (
            at > 0 and self._end[at - 1] == number,
            at < len(self._first) and self._first[at] == number + 1,
        )
        if joins_before and joins_after:
            self._end[at - 1] = self._end.pop(at)
            del self._first[at]
        elif joins_before:
            self._end[at - 1] = number + 1
        elif joins_after:
            self._first[at] = number
        else:
            self._first.insert(at, number)
            self._end.insert(at, number + 1)

    def __contains__(self, number: int) -> bool:
        at = bisect_right(self._first, number)
        return at > 0 and number < self._end[at - 1]


def _each(found: Mapping[str, str]) -> Iterator[tuple[int, int]]:
    return ((number, index) for number, indices in unpacked(found) for index in indices)
