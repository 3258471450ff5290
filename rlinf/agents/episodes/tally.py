"""What became of episodes, counted and told.

In: every episode's end. Out: metrics of a step, warnings and notes for people.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from rlinf.agents.episodes.episode import Episode
from rlinf.agents.episodes.outcome import way_outside
from rlinf.data.sample import Group
from rlinf.runtime.base.errors import UserError


@dataclass(slots=True)
class Tally:
    """What became of episodes."""

    played: int = 0
    """How many ended."""
    failures: int = 0
    """Of those, how many raised, took too long or returned no sample."""
    failed: list[tuple[int, int]] = field(default_factory=list)
    """Which, unless somebody else tells of them: number of the task, and which attempt at it."""
    timeouts: int = 0
    """Of those, how many took too long."""
    remark: str = ""
    """Why the first of them failed."""
    cause: BaseException | None = None
    """The same as an exception."""
    calls: int = 0
    """Answers of the model to agents."""
    branches: int = 0
    """How often an agent's history was rewritten or forked; see `trajectories`."""
    by_agent: Counter[str] = field(default_factory=Counter)
    """Answers of the model to each agent that has a name."""
    blocked: float = 0.0
    """Seconds of the longest time in which an episode kept all others waiting; 0 where none did for long."""
    went_on: int = 0
    """Episodes of an earlier process that ended here, and asked nothing else than they had asked there."""
    anew: Counter[str] = field(default_factory=Counter)
    """Those that asked something else, by what was not the same."""
    taken: int = 0
    """Tokens of their records that were not made again."""
    dropped: int = 0
    """Tokens of their records that were of no use."""

    def failure(self, episode: Episode, error: BaseException, remark: str) -> None:
        """An episode failed."""
        self.failures += 1
        self.failed.append((episode.task, episode.index))
        self.timeouts += isinstance(error, TimeoutError)
        if not self.remark:
            self.remark, self.cause = remark, error.with_traceback(way_outside(error))

    def ended(self, episode: Episode) -> None:
        """An episode is over, however it went."""
        self.played += 1
        record = episode.record
        if record.resumed:
            self.went_on += not record.anew
            self.anew[record.anew] += bool(record.anew)
            self.taken += record.taken
            self.dropped += record.dropped
        if episode.llm is not None:
            counts = episode.llm.counts()
            self.calls += counts.calls
            self.branches += counts.branches
            for name, agent in episode.llm.agents.items():
                if name:
                    self.by_agent[name] += agent.trajectories.counts.calls

    def add(self, other: Tally) -> None:
        """Take in what became of other episodes."""
        self.played += other.played
        self.failures += other.failures
        self.failed += other.failed
        self.timeouts += other.timeouts
        self.calls += other.calls
        self.branches += other.branches
        self.by_agent += other.by_agent
        self.blocked = max(self.blocked, other.blocked)
        self.went_on += other.went_on
        self.anew += other.anew
        self.taken += other.taken
        self.dropped += other.dropped
        if not self.remark:
            self.remark, self.cause = other.remark, other.cause

    def nothing_to_learn(self) -> UserError:
        """Not one episode went well; the error is caused by the first one's."""
        error = UserError(
            f"gather: not one of {self.played} episodes went well, so there is nothing to learn from; the first: "
            f"{self.remark}"
        )
        error.__cause__ = self.cause
        return error

    def metrics(self) -> dict[str, float]:
        """Numbers of a step; nothing if no episode was played."""
        if not self.played:
            return {}
        told = {
            "episodes": float(self.played),
            "episodes/failed": self.failures / self.played,
            "episodes/timeout": self.timeouts / self.played,
        }
        if self.calls:
            told |= {"episodes/calls": self.calls / self.played, "episodes/branches": self.branches / self.played}
        return told | {f"agent/{name}/calls": count / self.played for name, count in sorted(self.by_agent.items())}

    def warnings(self) -> Iterator[str]:
        """What a person should know."""
        if self.failures:
            failed = f"{self.failures} of {self.played} episodes failed"
            yield f"{failed} and count as not drawn; the first: {self.remark}"
        if self.blocked:
            yield (
                f"an episode ran for {self.blocked:.1f} s without an await, so that all others stood still: "
                "the machine is busy with other things, or it blocks; put what blocks in a thread (asyncio.to_thread)"
            )

    def notes(self) -> Iterator[str]:
        """What is good to know."""
        anew = +self.anew
        if self.went_on or anew:
            why = "".join(f", {count} began anew ({reason})" for reason, count in sorted(anew.items()))
            lost = f", {self.dropped:,} were of no use" if self.dropped else ""
            yield (
                f"of the checkpoint's open episodes, {self.went_on} went on{why}; {self.taken:,} tokens were taken from"
                f" their records{lost}"
            )


class Gathered(list[Group]):
    """All groups of a batch, and what became of its episodes, which may have been played while another was learned."""

    def __init__(self, groups: Iterable[Group], tally: Tally) -> None:
        super().__init__(groups)
        self.tally = tally
