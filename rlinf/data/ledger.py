"""The ledger: an account of every sample of every prompt that a run has drawn.

In: what was drawn, dropped and trained, as it happens. Out: one line of `ledger.jsonl` per step. Pure counting: nobody
waits here.

A sample is one of the `answers` that were asked for a prompt, named by the prompt's id and its index from 0; for
agents, one attempt at a task, whatever number of conversations came of it. A line holds ids as ranges: 1,000 prompts of
16 answers are

    {"step": 7, "drawn": {"0-15": "6000-6999"}, "trained": {"0-15": "6000-6998", "0-14": "6999"},
     "dropped": {"unscored": {"15": "6999"}}, "tokens": {"trained": 1203311}}

`held_of` and `held_in` list the samples in flight of a run and of a checkpoint: indices by the prompt's id; or how many
there are, where not all answers to a prompt are complete, so that nobody knows yet which will come of it.

`balance` reads the lines back and says whether every sample of every prompt drawn is trained once, dropped, or in
flight in the newest checkpoint. Nothing is believed that can be counted: what is open follows from what was drawn,
trained and dropped, and is held against what is said to be in flight.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from rlinf.config.reading import parse_json
from rlinf.data.sample import Group, Learned

Counted = dict[int, list[int] | int]
"""Samples by the prompt's id: which, or how many."""


@dataclass(slots=True, eq=False)
class Entry:
    """Something that was drawn and not learned from yet: a prompt with its answers, a task, the acting of one step."""

    id: int
    """The prompt's, or the step's."""
    item: Any
    """The prompt, task or step that was drawn."""
    size: int
    """Answers that it has, or will have."""
    version: int
    """The oldest weights that may have made a token of it."""
    result: Any = None
    """Results to learn from; None as long as it is not complete."""
    partial: tuple[Any, ...] = ()
    """Partial answers that are made in its place, where it was begun before a restart."""
    tokens: int = 0
    """Learned tokens of the result."""
    deadline: int = 0
    """The last version by which it is to be learned."""


def sample_numbers(results: Iterable[Any]) -> set[int]:
    """Numbers of all samples of groups."""
    return {one.number for group in results if isinstance(group, Group) for one in group.samples}


def held_of(entries: Iterable[Entry]) -> Counted:
    """The samples of entries."""
    return _held(
        (
            entry.id,
            entry.size,
            None if entry.result is None else sample_numbers(entry.result),
        )
        for entry in entries
    )


def held_in(path: Path) -> Counted:
    """The samples in the file `in_flight.json` of a checkpoint; see `kept_files`. No array is read.

    Raises:
        ValueError: it is no such file.
    """
    try:
        objects = parse_json(path.read_text(encoding="utf-8"))["objects"]
        return _held(
            (parts["id"], parts["size"], _numbers(parts["result"], objects))
            for name, parts in objects
            if name == Entry.__name__
        )
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise ValueError(f"{path} is damaged: {type(error).__name__}: {error}") from error


def _numbers(result: Any, objects: list[Any]) -> list[int] | None:
    """Numbers of the samples of a result in the file of a checkpoint; None if there is no result yet."""
    if result is None:
        return None
    numbers = []
    for group in result["t"]:
        for sample in objects[group["o"]][1]["samples"]["t"]:
            parts: Mapping[str, Any] = objects[sample["o"]][1]
            numbers.append(parts["index"] if parts.get("attempt") is None else parts["attempt"])
    return numbers


def _held(entries: Iterable[tuple[int, int, Iterable[int] | None]]) -> Counted:
    """The samples of (prompt id, how many, which if that is known)."""
    complete: dict[int, set[int]] = {}
    unknown: dict[int, int] = {}
    for number, size, indices in entries:
        if indices is None:
            unknown[number] = unknown.get(number, 0) + size
        else:
            complete.setdefault(number, set()).update(indices)
    return {
        number: len(complete.get(number, ())) + unknown[number] if number in unknown else sorted(complete[number])
        for number in {**complete, **unknown}
    }


Samples = Mapping[int, Sequence[int]]
"""Samples as their indices by the prompt's id."""
Held = Mapping[int, Iterable[int] | int]
"""Samples in flight by the prompt's id: their indices; or how many there are, where it is not known yet which."""
EQUAL_REWARDS, SURPLUS, UNSCORED, FAILED, CRITIC_ONLY, TOO_OLD = (
    *("equal rewards", "surplus", "unscored", "failed", "critic only", "too old"),
)
"""Reasons for a drop: dynamic sampling learns nothing from a group, or has a full batch without it; no reward could be
given; an agent's attempt raised or took too long; only the critic learned from it; its tokens are too old."""


class Ledger:
    """Keeps account of one run, step by step.

    Args:
        own: the flow is the user's own: it may learn from samples whenever and as often as it likes, so what it says
            nothing about is unknown and not lost.
    """

    def __init__(self, *, own: bool = False) -> None:
        self.own = own
        self.load_state_dict({})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave when a checkpoint was written; {} begins anew."""
        self._before: Mapping[str, str] = state.get("before", {})
        """Samples that were open after the last line, packed."""
        self._carried = self._before
        """Samples that were open in the run that is gone on with, packed, until the next line has told it."""
        self._open = {number: set(indices) for number, indices in unpacked(state.get("open", {}))}
        """The samples that are neither trained nor dropped."""
        events = state.get("since", {})
        self._drawn = {number: list(indices) for number, indices in unpacked(events.get("drawn", {}))}
        self._trained = {number: list(indices) for number, indices in unpacked(events.get("trained", {}))}
        self._dropped = {
            reason: {number: list(indices) for number, indices in unpacked(samples)}
            for reason, samples in events.get("dropped", {}).items()
        }
        self._tokens: dict[str, int] = dict(events.get("tokens", {}))

    # What happens ------------------------------------------------------------------------------------------------

    def drawn(self, ids: Iterable[int], answers: int) -> None:
        """Prompts were drawn, to be answered `answers` times each; those that are open already stay as they are."""
        for number in ids:
            if number not in self._open:
                self._open[number] = {*range(answers)}
                self._drawn[number] = list(range(answers))

    def dropped(self, prompt_id: int, reason: str, indices: Iterable[int] | None = None, tokens: int = 0) -> None:
        """Samples will never be trained; those of them that are not open are left as they are.

        Args:
            prompt_id: whose.
            reason: a few words.
            indices: which; None: all that are open. None of them, (), where tokens alone were thrown away.
            tokens: generated tokens that were thrown away.
        """
        opened = self._open.get(prompt_id, set())
        lost = sorted(opened if indices is None else opened.intersection(indices))
        if lost:
            self._dropped.setdefault(reason, {}).setdefault(prompt_id, []).extend(lost)
            self._settle(prompt_id, lost)
        self._count("dropped", tokens)

    def masked(self, tokens: int) -> None:
        """So many generated tokens of samples that are trained give no gradient, because they were too old."""
        self._count("masked", tokens)

    def trained(self, samples: Samples, tokens: int = 0) -> None:
        """A trainer has learned from samples, with so many generated tokens in all."""
        for number, indices in samples.items():
            self._trained.setdefault(number, []).extend(indices)
            self._settle(number, indices)
        self._count("trained", tokens)

    def learned(self, report: Learned) -> None:
        """Enter a trainer's report."""
        self.trained(report.trained, report.tokens)
        for reason, samples in ((UNSCORED, report.unscored), (EQUAL_REWARDS, report.even)):
            for number, indices in samples.items():
                self.dropped(number, reason, indices)

    # What it says ------------------------------------------------------------------------------------------------

    @property
    def open(self) -> dict[int, list[int]]:
        """The samples that are neither trained nor dropped, in the order in which their prompts were drawn."""
        return {number: sorted(indices) for number, indices in self._open.items()}

    @property
    def learned_tokens(self) -> int:
        """Generated tokens of the samples trained since the last step was closed."""
        return self._tokens.get("trained", 0)

    def close(self, step: int, in_flight: Held | None = None) -> dict[str, Any]:
        """The step is over: its line, as JSON. What is open and not in flight is not asked about again.

        Args:
            step: which, from 1.
            in_flight: what whoever holds unfinished samples says that it holds.
        """
        in_hand = {number: self._held(number, indices) for number, indices in (in_flight or {}).items()}
        lost = {number: sorted(still.difference(in_hand.get(number, ()))) for number, still in self._open.items()}
        lost = {number: indices for number, indices in lost.items() if indices}
        line: dict[str, Any] = {"step": step, **({"own": True} if self.own else {})}
        line |= {**({"carried": self._carried} if self._carried else {}), **self._since()}
        line |= {
            key: packed(samples)
            for key, samples in (
                ("in_flight", {number: indices for number, indices in in_hand.items() if indices}),
                ("unknown" if self.own else "lost", lost),
            )
            if samples
        }
        for number, indices in lost.items():
            self._settle(number, indices)
        self._drawn, self._trained, self._dropped, self._tokens = {}, {}, {}, {}
        self._before, self._carried = packed(self.open), {}
        return line

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint: what is open, and what has happened since the last line; as JSON.

        To be called at the same moment at which the samples in flight are listed for the checkpoint."""
        return {"open": packed(self.open), "before": self._before, "since": self._since()}

    def _since(self) -> dict[str, Any]:
        """Samples and tokens counted since the last line, packed; empty counts are left out."""
        events = {
            "drawn": packed(self._drawn),
            "trained": packed(self._trained),
            "dropped": {reason: packed(samples) for reason, samples in self._dropped.items()},
            "tokens": dict(self._tokens),
        }
        return {key: value for key, value in events.items() if value}

    def _held(self, number: int, samples: Iterable[int] | int) -> list[int]:
        if isinstance(samples, int):
            return sorted(self._open.get(number, ()))[:samples]
        return sorted(samples)

    def _settle(self, number: int, indices: Iterable[int]) -> None:
        if number in self._open:
            self._open[number].difference_update(indices)
            if not self._open[number]:
                del self._open[number]

    def _count(self, kind: str, tokens: int) -> None:
        if tokens:
            self._tokens[kind] = self._tokens.get(kind, 0) + tokens


# Samples as ranges ----------------------------------------------------------------------------------------------------


def packed(samples: Samples) -> dict[str, str]:
    """Samples as JSON: prompts that have the same indices are named together, `{"0-7": "96-103,105"}`."""
    alike: dict[str, list[int]] = {}
    for number, indices in samples.items():
        alike.setdefault(ranges(indices), []).append(number)
    return {indices: ranges(numbers) for indices, numbers in alike.items()}


def unpacked(samples: Mapping[str, str]) -> Iterator[tuple[int, Sequence[int]]]:
    """Read what `packed` made: each prompt's id with the indices of its samples.

    Raises:
        ValueError: it is something else.
    """
    for spelled, numbers in samples.items():
        indices = of_ranges(spelled)
        yield from ((number, indices) for number in of_ranges(numbers))


def ranges(numbers: Iterable[int]) -> str:
    """Whole numbers as text, in their order: `0-3,7`. A number that is there twice is spelled twice."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def of_ranges(text: str) -> list[int]:
    """The numbers that `ranges` has spelled.

    Raises:
        ValueError: it is something else.
    """
    numbers: list[int] = []
    for run in text.split(",") if text else ():
        first, dash, last = run[1:].partition("-")  # a number may have a sign of its own
        numbers += range(int(run[0] + first), (int(last) if dash else int(run[0] + first)) + 1)
    return numbers


_SHOWN = 5
"""Samples that a problem names; the rest is counted."""


@dataclass(slots=True)
class Balance:
    """The account of everything that a run has drawn."""

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
    lines: Iterable[Mapping[str, Any]], in_flight: Held | None = None, since: Mapping[str, Any] | None = None
) -> Balance:
    """Add up the lines of a ledger.

    Args:
        lines: of `ledger.jsonl`, in order.
        in_flight: as the checkpoint has it that was written after the last line; None: as that line says itself.
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
    samples = dict(unpacked(last.get("in_flight", {}))) if in_flight is None else in_flight
    count.ends(samples, "the last line" if in_flight is None else "the checkpoint")
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
        samples = {number: set(indices) for number, indices in unpacked(carried)}
        if self.found.lines == 1:
            self._open = samples
            self.found.carried = sum(map(len, samples.values()))
        elif samples != self._open:
            self._problem(f"{where}: the run went on with other samples in flight than it had before")

    def events(self, record: Mapping[str, Any], where: str) -> None:
        """Take in what was drawn, trained and dropped."""
        totals = self.found
        again = []
        for number, indices in unpacked(record.get("drawn", {})):
            if number in self._open or number in self._settled:
                again += [(number, index) for index in indices]
                continue
            totals.prompts += 1
            totals.samples += len(indices)
            self._open[number] = set(indices)
        self._samples_problem(f"{where}: drawn twice", again)
        repeated: list[tuple[int, int]] = []
        strange: list[tuple[int, int]] = []
        for number, index in _each(record.get("trained", {})):
            totals.trained += 1
            if not self._settle(number, index):
                drawn_before = number in self._settled or number in self._open
                (repeated if drawn_before else strange).append((number, index))
        totals.elsewhere += len(repeated) + len(strange) if self._own else 0
        self._samples_problem(f"{where}: trained although they were trained or dropped before", repeated)
        self._samples_problem(f"{where}: trained and never drawn", strange)
        wrong = []
        for reason, samples in record.get("dropped", {}).items():
            for number, index in _each(samples):
                totals.dropped[reason] += 1
                if not self._settle(number, index):
                    wrong.append((number, index))
        self._samples_problem(f"{where}: dropped although they were not open", wrong)
        totals.tokens.update(record.get("tokens", {}))

    def ends(self, in_flight: Held, who: str) -> None:
        """Hold what is open against what is held."""
        lost, settled = [], []
        for number in {**self._open, **in_flight}:
            still_open, claimed = self._open.get(number, set()), in_flight.get(number, ())
            if isinstance(claimed, int):  # so many, and nobody knows which
                here = set(islice(sorted(still_open), claimed))
                settled += [(number, at) for at in range(len(still_open), claimed)]
            else:
                here = still_open.intersection(claimed)
                settled += [(number, index) for index in claimed if index not in still_open]
            self.found.in_flight += len(here)
            lost += [(number, index) for index in sorted(still_open - here)]
        self._samples_problem(f"lost: neither trained nor dropped, and {who} does not have them", lost)
        self._samples_problem(f"{who} has in flight what was trained, dropped or never drawn", settled)

    def _settle(self, number: int, index: int) -> bool:
        """A sample is open no more; whether it was."""
        still_open = self._open.get(number)
        if still_open is None or index not in still_open:
            return False
        still_open.discard(index)
        if not still_open:
            del self._open[number]
            self._settled.add(number)
        return True

    def _samples_problem(self, what: str, samples: list[tuple[int, int]]) -> None:
        if samples and not self._own:
            first = ", ".join(f"{number}/{index}" for number, index in samples[:_SHOWN])
            more = f" and {len(samples) - _SHOWN:,} more" if len(samples) > _SHOWN else ""
            self._problem(f"{what}: {len(samples):,} samples (prompt/sample {first}{more})")

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


def _each(samples: Mapping[str, str]) -> Iterator[tuple[int, int]]:
    return ((number, index) for number, indices in unpacked(samples) for index in indices)
