"""`python -m benchmarks.guests`: does a trainer's device that waits for answers pay when it generates meanwhile?

An asynchronous run with devices of its own for trainer and rollout, whose answers grow to three times their length, so
that a split that was right becomes wrong. Beside it: the same with *guests*, engines on the trainer's devices that
generate while it waits; with roles that move when steps leave what was expected, as `placement.mode: auto` has it; and
with both. All is modelled, by the constants below, and calculated in virtual time.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import math
import statistics
import sys
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.changing_hands import DEVICES, PUBLISHED, STEP, TRAINING
from benchmarks.changing_hands_modelled import Lengths
from rlinf.placement import auto

CACHE = 1.2e-8
"""Seconds per token of context that a row's step reads: 57 KB of a 7B model with grouped keys, on two GPUs at 0.7 of
3.35 TB/s each. At 8k tokens that and `ROW` are the 0.112 ms of `PUBLISHED`."""
ROW = PUBLISHED.row - 8_000 * CACHE
"""Seconds of a row in a decode step, without its cache."""
PROMPT = 300
"""Tokens."""
ROWS = 64
"""Rows of an engine that has its device alone."""
SHARES = (0.5, 1.0)
"""Of what is left of a batch that has to be there before a guest makes room; the better of them counts."""
MOVING = 20.0
"""Seconds in which nothing works while roles move: 60 GB leave each device and others come; assumed."""
REPLAN = (0.15, 0.05)
"""Values of `placement.replan_above`, the first of them its default. The rest of the rule is that of
`rlinf.placement.auto`: the median of the last steps, and a gain that a move must promise."""


@dataclass(frozen=True, slots=True)
class Guest:
    """Costs of a guest engine."""

    name: str
    """Its column in the table."""
    switch: float
    """Seconds to begin, and to make room again."""
    rows: int
    """Rows that its device has room for."""
    keeps: bool = False
    """Its half answers wait in its device's memory while the trainer learns; else others go on with them, and read them
    first."""


RESIDENT = Guest("guests beside the trainer's state", 0.3, 24)
"""The trainer's weights are the engine's, and its optimizer stays: what its activations leave is room for keys and
values. Assumed: 0.3 s to take that room and to give it back."""
PARKED = Guest("guests in its place", 2.0, ROWS)
"""The trainer is parked, as in `benchmarks.changing_hands`: 60 GB over a bus of 30 GB/s, each way."""
KEEPS = Guest("guests that keep their half answers", 0.3, 24, keeps=True)
FREE = Guest("guests that keep them, and cost nothing", 0.0, ROWS, keeps=True)
"""The bound."""


@dataclass(frozen=True, slots=True)
class Case:
    """A run."""

    name: str
    """Its row in the table."""
    lengths: Lengths
    """Tokens of answers at the beginning of the run."""
    growth: float = 3.0
    """How many times as long they are at its end, step by step."""
    prompts: int = 64
    """Prompts of a step."""
    n: int = 8
    """Answers per prompt."""
    staleness: int = 1
    """Steps that are begun early."""
    steps: int = 40
    """Steps of the run."""
    least: int = 1
    """Devices that the trainer needs at least."""


GROWING = Lengths(4_000, 0.6, 49_152)
CASES = (
    Case("4k grow to 12k", GROWING),
    Case("the same, staleness 4", GROWING, staleness=4),
    Case("the same, four times the prompts", GROWING, prompts=256, steps=24),
    Case("the same, a trainer that needs 10 devices", GROWING, least=10),
    Case("1k grow to 3k, long tails", Lengths(1_000, 1.0, 49_152)),
    Case("4k stay", GROWING, growth=1.0),
    Case("12k shrink to 4k", Lengths(12_000, 0.6, 49_152), growth=1 / 3),
)


@dataclass(slots=True, eq=False)
class Answer:
    """An answer on its way."""

    group: int
    """Its prompt, numbered through the run."""
    left: float
    """Tokens until it ends, from when its engine took it in."""
    context: float = PROMPT
    """Tokens that are read in its next step, then."""


class Engine:
    """Decodes up to so many rows; a step takes what its rows and their contexts take.

    Args:
        rows: so many.
        since: when it begins.
        on: it takes answers.
    """

    def __init__(self, rows: int, since: float, *, on: bool = True) -> None:
        self.rows, self.since, self.on = rows, since, on
        self.stamp = 0
        """How often it changed: what was foreseen before is void."""
        self.count = 0
        """Answers that it has."""
        self._answers: list[
            tuple[float, int, Answer, float]
        ] = []  # step of its end, order, which, step of its beginning
        self._steps = self._contexts = 0.0  # steps since the beginning, and tokens of context in the next one
        self._order = itertools.count()

    def pass_to(self, now: float) -> list[Answer]:
        """Account for the steps since the last time; returns what has ended."""
        if now <= self.since:
            return []
        if self._answers:
            # Of s steps: each·s + growth·s², since contexts grow by a token per row and step.
            each, growth = self._pace, CACHE * self.count / 2
            passed = now - self.since
            steps = (math.sqrt(each * each + 4 * growth * passed) - each) / (2 * growth)
            self._steps += steps
            self._contexts += steps * self.count
        self.since = now
        ended = []
        while self._answers and self._answers[0][0] <= self._steps + 1e-6:
            ended.append(self._out(heapq.heappop(self._answers)))
        return ended

    @property
    def _pace(self) -> float:
        return PUBLISHED.step + ROW * self.count + CACHE * self._contexts

    def _out(self, row: tuple[float, int, Answer, float]) -> Answer:
        end, _, answer, begin = row
        answer.context += self._steps - begin
        answer.left = end - self._steps
        self.count -= 1
        self._contexts -= answer.context
        return answer

    def begin(self, answer: Answer) -> None:
        """Take an answer in, whose tokens are read first while all others wait."""
        self.since += PUBLISHED.token * answer.context
        heapq.heappush(self._answers, (self._steps + answer.left, next(self._order), answer, self._steps))
        self.count += 1
        self._contexts += answer.context

    def hand_back(self) -> list[Answer]:
        """Give all answers away."""
        rows, self._answers = self._answers, []
        self.on, self.stamp = False, self.stamp + 1
        return [self._out(row) for row in rows]

    def next(self) -> float:
        """When the next answer ends."""
        steps = max(0.0, self._answers[0][0] - self._steps)
        return self.since + steps * self._pace + CACHE * self.count / 2 * steps * steps


class Run:
    """One run in virtual time.

    Args:
        case: what is generated.
        own: devices of the trainer at first; the others have an engine each.
        guest: of the trainer's devices; None: none.
        share: of what is left of a batch that has to be there before a guest makes room.
        replan: as `placement.replan_above`; None: roles stay.
    """

    def __init__(
        self,
        case: Case,
        own: int,
        guest: Guest | None = None,
        share: float = 1.0,
        replan: float | None = None,
    ) -> None:
        self.case, self.own, self.guest, self.share, self.replan = case, own, guest, share, replan
        self.now, self.waited, self.moves, self.lent = 0.0, 0.0, 0, 0
        self.ends: list[float] = []
        self._events: list[tuple[float, int, Any, tuple[Any, ...]]] = []
        self._order = itertools.count()
        self._queue: deque[Answer] = deque()
        self._begun = 0  # groups
        self.answers: dict[int, int] = defaultdict(int)
        """By group, how many of its answers have ended."""
        self.tokens: dict[int, float] = defaultdict(float)
        """By group, those of its answers that have ended, prompts included."""
        self._ready: deque[float] = deque()  # tokens of groups that are complete
        self._learned = 0  # groups of this step
        self._busy = False  # the trainer computes, or its devices change hands
        self._lent = False
        self._idle_since: float | None = 0.0
        self._took: deque[float] = deque(maxlen=auto.WINDOW + 1)
        self._expected: float | None = None
        self._seats()

    def _seats(self) -> None:
        self._engines = [Engine(ROWS, self.now) for _ in range(DEVICES - self.own)]
        self._guests = [Engine(self.guest.rows if self.guest else 0, self.now, on=False) for _ in range(self.own)]

    def seconds(self) -> float:
        """Run to the end."""
        self._fill()
        while len(self.ends) < self.case.steps:
            self.now, _, what, arguments = heapq.heappop(self._events)
            what(*arguments)
        return self.ends[-1]

    def _after(self, seconds: float, what: Any, *arguments: Any) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._order), what, arguments))

    # Generation -------------------------------------------------------------------------------------------------------

    def factor(self, step: int) -> float:
        """How many times as long answers are in a step."""
        return self.case.growth ** (min(step, self.case.steps - 1) / (self.case.steps - 1))

    def _request(self) -> Answer | None:
        """The next answer to be begun: of those handed back, else of a prompt that may be begun."""
        if self._queue:
            return self._queue.popleft()
        step = self._begun // self.case.prompts
        if step > len(self.ends) + self.case.staleness:
            return None
        group, self._begun = self._begun, self._begun + 1
        self._queue.extend(Answer(group, length) for length in self.lengths(group))
        return self._queue.popleft()

    def lengths(self, group: int) -> list[int]:
        """Tokens of the answers of a group."""
        longer = self.case.lengths.median * self.factor(group // self.case.prompts)
        law = replace(self.case.lengths, median=longer)
        return [law.of(group, group * self.case.n + k) for k in range(self.case.n)]

    def _fill(self) -> None:
        """Give answers to who has the smallest share of its rows taken."""
        changed = set()
        while True:
            room = [one for one in (*self._engines, *self._guests) if one.on and one.count < one.rows]
            if not room or (answer := self._request()) is None:
                break
            engine = min(room, key=lambda one: one.count / one.rows)
            if engine not in changed:
                self._ended(engine.pass_to(self.now))
            changed.add(engine)
            engine.begin(answer)
        for engine in changed:
            self._foresee(engine)

    def _foresee(self, engine: Engine) -> None:
        engine.stamp += 1
        if engine.count:
            self._after(max(0.0, engine.next() - self.now), self._look, engine, engine.stamp)

    def _look(self, engine: Engine, stamp: int) -> None:
        if stamp == engine.stamp:
            self._ended(engine.pass_to(self.now))
            self._foresee(engine)
            self._fill()
            self._train()

    def _ended(self, answers: list[Answer]) -> None:
        for one in answers:
            self.answers[one.group] += 1
            self.tokens[one.group] += one.context
            if self.answers[one.group] == self.case.n:
                self._ready.append(self.tokens[one.group])

    def _hand_back(self, engines: list[Engine]) -> None:
        for engine in engines:
            if engine.on:
                self._ended(engine.pass_to(self.now))
            self._queue.extendleft(engine.hand_back())

    # Learning ---------------------------------------------------------------------------------------------------------

    def _train(self) -> None:
        """Learn from what is there; or lend the devices, or take them back."""
        if self._busy:
            return
        left = self.case.prompts - self._learned
        if self._lent:
            if len(self._ready) >= self.share * left:
                self._switch(False)
        elif self._ready and (self.guest is None or self._learned or len(self._ready) >= self.share * left):
            count = min(left, len(self._ready))
            self._learned += count
            tokens = sum(self._ready.popleft() for _ in range(count))
            last = self._learned == self.case.prompts
            self._work(tokens * TRAINING / self.own + STEP * last, self._learnt, last)
        elif self.guest is not None and self._pays(self.share * left - len(self._ready)):
            self._switch(True)

    def _pays(self, groups: float) -> bool:
        """So many groups take longer to come than both switches, twice over."""
        if not self.ends or self.guest is None:
            return False
        if any(one.count for one in self._guests):
            return True
        each = (self.ends[-1] - (self.ends[-2] if len(self.ends) > 1 else 0.0)) / self.case.prompts
        return groups * each > 4 * self.guest.switch

    def _work(self, seconds: float, then: Any, *arguments: Any, lent: bool = False) -> None:
        if self._idle_since is not None and not lent:
            self.waited += self.now - self._idle_since
        self._busy, self._idle_since = True, None
        self._after(seconds, then, *arguments)

    def _idle(self) -> None:
        self._busy, self._idle_since = False, self.now
        self._fill()
        self._train()

    def _learnt(self, last: bool) -> None:
        if last:
            self._learned = 0
            self.ends.append(self.now)
            if self._moves():
                return
        self._idle()

    def _switch(self, lent: bool) -> None:
        assert self.guest is not None
        if not lent:
            self._hand_back([] if self.guest.keeps else self._guests)
            for engine in self._guests if self.guest.keeps else ():
                self._ended(engine.pass_to(self.now))
                engine.on, engine.stamp = False, engine.stamp + 1
            self._fill()
        self._lent = lent
        self.lent += lent
        self._work(self.guest.switch, self._switched, lent=not lent)

    def _switched(self) -> None:
        for engine in self._guests if self._lent else ():
            engine.on, engine.since = True, self.now
            self._foresee(engine)
        self._idle()

    # Roles that move --------------------------------------------------------------------------------------------------

    def _moves(self) -> bool:
        """Move the roles, if the last steps were not as expected and another split is better."""
        done = len(self.ends)
        self._took.append(self.now - (self.ends[-2] if done > 1 else 0.0))
        if self.replan is None or len(self._took) <= auto.WINDOW:
            return False
        typical = statistics.median([*self._took][1:])
        self._expected = self._expected or typical
        if abs(typical / self._expected - 1) <= self.replan:
            return False
        self._took.clear()
        measured = done - 1 - auto.WINDOW // 2  # the middle of those steps, by which costs are known
        best = best_split(self.case, round(self.factor(measured) * 4) / 4)
        if best[1] == self.own or best[0] > (1 - auto.WORTH) * typical:
            self._expected = typical
            return False
        self._expected, best = best
        self._hand_back([*self._engines, *self._guests])
        self.own, self.moves = best, self.moves + 1
        self._seats()
        for engine in self._engines:
            engine.since = self.now + MOVING
        self._work(MOVING, self._idle)
        self._fill()
        return True


@cache
def even(case: Case, own: int) -> float:
    """Seconds of a step in the long run, where answers stay as long as they are."""
    run = Run(replace(case, growth=1.0, steps=8), own)
    run.seconds()
    return (run.ends[-1] - run.ends[3]) / 4


def least(case: Case, seconds: Callable[[int], float]) -> int:
    """The split that takes least: with more devices of the trainer's generation takes longer, with fewer learning."""
    own, before = max(DEVICES // 2, case.least), 0
    while own != before:
        near = [one for one in (own, own - 1, own + 1) if case.least <= one < DEVICES]
        own, before = min(near, key=seconds), own
    return own


@cache
def best_split(case: Case, factor: float) -> tuple[float, int]:
    """Seconds of a step in the long run at one length of answers, and the split by which it takes least."""
    scaled = replace(case, lengths=replace(case.lengths, median=case.lengths.median * factor))
    own = least(scaled, lambda own: even(scaled, own))
    return even(scaled, own), own


def rows(case: Case) -> list[tuple[str, Run, float]]:
    """All ways of one run, and their seconds."""
    _, first = best_split(case, 1.0)
    ways = [(f"the split that is best at first: {first} train", Run(case, first))]
    static = cache(lambda own: Run(case, own).seconds())
    own = least(case, static)
    ways.append((f"the split that is best in hindsight: {own} train", Run(case, own)))
    ways += [(f"roles that move, replan_above={share}", Run(case, first, replan=share)) for share in REPLAN]
    done = [(name, run, run.seconds()) for name, run in ways]
    for guest, replan in ((RESIDENT, None), (KEEPS, None), (PARKED, None), (FREE, None), (RESIDENT, REPLAN[0])):
        found = [Run(case, first, guest, share, replan) for share in SHARES]
        name = guest.name + (f", and roles that move ({replan})" if replan else "")
        done.append((name, *min(((run, run.seconds()) for run in found), key=lambda one: one[1])))
    return done


def main() -> int:
    """Print a table for each case."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cases", type=int, default=len(CASES), help="only the first so many")
    parser.add_argument("--from", type=int, default=0, dest="first", help="leave so many out")
    arguments = parser.parse_args()
    for case in CASES[arguments.first : arguments.cases]:
        table = Table(title=f"{case.name}: {case.steps} steps on {DEVICES} devices (virtual)")
        for name in ("way", "seconds", "over the first", "over roles that move", "the trainer waits", "lent", "moves"):
            table.add_column(name)
        done = rows(case)
        first, moving = done[0][2], done[2][2]
        for name, run, seconds in done:
            table.add_row(
                name, f"{seconds:,.0f}", f"{first / seconds:.3f} x", f"{moving / seconds:.3f} x",
                f"{run.waited / seconds:.0%}", str(run.lent), str(run.moves),
            )  # fmt: skip
        Console(width=160).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
