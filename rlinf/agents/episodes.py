"""Episodes: a program of the user's plays one task several times; what comes of it is a group of samples.

In: tasks, and an `async def episode(task)` that returns a sample, a number or samples. Out: groups, each as soon as its
last episode is over; where several agents work on a task, one for each. Episodes that raise, take too long or return
something else count as not drawn, and are told. Who wakes whom: the end of an episode starts the next one; the end of a
group's last one wakes whoever waits for groups.
"""

from __future__ import annotations

import asyncio
import time
import traceback
import types
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from rlinf.agents.agent import AgentLLM
from rlinf.agents.checks import WrongType, number, shown
from rlinf.agents.conversation import Conversation
from rlinf.data.sample import Group, Prompt, Sample
from rlinf.runtime.base.errors import RuntimeFault, UserError
from rlinf.runtime.base.tasks import cancel_all
from rlinf.runtime.observe.stalls import Work
from rlinf.runtime.streams.stream import each

_OURS = str(Path(__file__).parents[1])
"""The package: what a remark does not point at."""
_GRACE = 5.0
"""Seconds that an episode has to end once it is cancelled."""
_BLOCKING = 1.0
"""Seconds without an `await` that are told: meanwhile no other episode went on, and no answer came."""
Play = Callable[[Any], Awaitable[Any]]
"""`async def episode(task)`: a `Sample`, a number, or several samples."""


@dataclass(slots=True, eq=False)
class Episode:
    """One play of a task, while it goes on: what a conversation that begins in it belongs to."""

    task: int
    """Number of the task."""
    index: int
    """Which of its episodes."""
    seed: tuple[int, ...]
    """What its randomness depends on, besides its index."""
    prompt: Prompt | None
    """The task itself, if it is a prompt."""
    sampling: Mapping[str, Any]
    """How its conversations sample where they do not say."""
    conversations: list[Conversation] = field(default_factory=list)
    """Those that began in it."""
    llm: AgentLLM | None = None
    """The model as its agents call it, if it is played by agents."""

    def said(self) -> int:
        """How much was said so far: answers of the model to agents, messages of conversations."""
        by_agents = 0 if self.llm is None else self.llm.counts().calls
        return by_agents + sum(len(conversation.messages) for conversation in self.conversations)


here: ContextVar[Episode | None] = ContextVar("episode", default=None)
"""The episode that the running code plays."""


@dataclass(slots=True)
class Tally:
    """What became of episodes."""

    played: int = 0
    """How many ended."""
    failed: list[tuple[int, int]] = field(default_factory=list)
    """Those that raised, took too long or returned no sample: number of the task, and which attempt at it."""
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

    def failure(self, episode: Episode, error: BaseException, remark: str) -> None:
        """An episode failed."""
        self.failed.append((episode.task, episode.index))
        self.timeouts += isinstance(error, TimeoutError)
        if not self.remark:
            self.remark, self.cause = remark, error.with_traceback(_outside(error))

    def ended(self, episode: Episode) -> None:
        """An episode is over, however it went."""
        self.played += 1
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
        self.failed += other.failed
        self.timeouts += other.timeouts
        self.calls += other.calls
        self.branches += other.branches
        self.by_agent += other.by_agent
        self.blocked = max(self.blocked, other.blocked)
        if not self.remark:
            self.remark, self.cause = other.remark, other.cause

    def metrics(self) -> dict[str, float]:
        """Numbers of a step; nothing if no episode was played."""
        if not self.played:
            return {}
        told = {
            "episodes": float(self.played),
            "episodes/failed": len(self.failed) / self.played,
            "episodes/timeout": self.timeouts / self.played,
        }
        if self.calls:
            told |= {"episodes/calls": self.calls / self.played, "episodes/branches": self.branches / self.played}
        return told | {f"agent/{name}/calls": count / self.played for name, count in sorted(self.by_agent.items())}

    def warnings(self) -> Iterator[str]:
        """What a person should know."""
        if self.failed:
            failed = f"{len(self.failed)} of {self.played} episodes failed"
            yield f"{failed} and count as not drawn; the first: {self.remark}"
        if self.blocked:
            yield (
                f"an episode ran for {self.blocked:.1f} s without an await, so that all others stood still; put what "
                "blocks in a thread: `await asyncio.to_thread(function, …)`"
            )


class Gathered(list[Group]):
    """All groups of a batch, and what became of its episodes, which may have been played while another was learned."""

    def __init__(self, groups: Iterable[Group], tally: Tally) -> None:
        super().__init__(groups)
        self.tally = tally


@dataclass(slots=True)
class _Pending:
    """The episodes of one task."""

    left: int
    """How many have not ended."""
    found: dict[int, list[Sample]] = field(default_factory=dict)
    """What came of those that went well, by index."""


class Episodes:
    """Plays tasks.

    Args:
        play: the user's program.
        n: episodes per task.
        begin: makes the record of an episode, from (task's place, task, index).
        tallies: are told what became of every episode.
        timeout: seconds of one episode; None for no limit.
        at_once: how many are played at the same time.
        judge: gives rewards to a group whose samples have none; None where they must have one.
    """

    def __init__(
        self,
        play: Play,
        n: int,
        begin: Callable[[Any, int], Episode],
        tallies: Sequence[Tally],
        *,
        timeout: float | None,
        at_once: int,
        judge: Callable[[Group], Awaitable[Group]] | None,
    ) -> None:
        self._play, self._n, self._begin, self._timeout, self._judge = play, n, begin, timeout, judge
        self._own = Tally()
        self._tallies = (self._own, *tallies)
        self._room = asyncio.Semaphore(at_once)
        self._news: asyncio.Queue[Group | BaseException | None] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._left_behind: set[asyncio.Task[Any]] = set()
        self._groups = 0

    async def groups(self, tasks: Any) -> AsyncIterator[Group]:
        """The groups, in order of completion.

        Args:
            tasks: a list or a stream of them.

        Raises:
            UserError: not one episode went well; the first one's exception is its cause.
        """
        self._start(self._read(tasks))
        try:
            while self._tasks or not self._news.empty():
                news = await self._news.get()
                if isinstance(news, BaseException):
                    raise news
                if news is not None:
                    self._groups += 1
                    yield news
        finally:
            await cancel_all(self._tasks)
            await cancel_all(self._left_behind, _GRACE)
        if self._own.played and not self._groups:
            raise UserError(
                f"gather: not one of {self._own.played} episodes went well, so there is nothing to learn from; the "
                f"first: {self._own.remark}"
            ) from self._own.cause

    async def _read(self, tasks: Any) -> None:
        async for task in each(tasks):
            pending = _Pending(self._n)
            first = self._begin(task, 0)
            for index in range(self._n):
                await self._room.acquire()
                record = first if index == 0 else replace(first, index=index, conversations=[])
                self._start(self._one(task, record, pending))

    def _start(self, work: Any) -> None:
        """Run it as a task of ours, whose end is news."""
        task = asyncio.create_task(work, name="episode")
        self._tasks.add(task)

        def ended(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            error = None if task.cancelled() else task.exception()
            self._news.put_nowait(error)

        task.add_done_callback(ended)

    async def _one(self, task: Any, episode: Episode, pending: _Pending) -> None:
        here.set(episode)
        try:
            returned = await self._within(task, episode)
            pending.found[episode.index] = _samples(returned, episode, self._judge is not None)
        except Exception as error:
            if isinstance(error, RuntimeFault) and not isinstance(error, UserError):
                raise  # a lost host or actor is not the episode's own failure
            for tally in self._tallies:
                tally.failure(episode, error, _remark(error, self._timeout))
        finally:
            self._room.release()
            for conversation in episode.conversations:
                conversation.end()
            if episode.llm is not None:
                episode.llm.end()
        for tally in self._tallies:
            tally.ended(episode)
        pending.left -= 1
        if not pending.left and pending.found:
            for group in _groups(pending.found):
                if self._judge is not None and any(_unjudged(sample) for sample in group.samples):
                    group = await self._judge(group)
                self._news.put_nowait(group)

    async def _within(self, given: Any, episode: Episode) -> Any:
        """What an episode returns, within its time. One that does not end when it is cancelled is left behind: it is
        cancelled once more with everything else."""
        playing = self._play(given)
        if not isinstance(playing, Awaitable):
            raise WrongType("episode: it is no `async def` function; it returned without being awaited")
        task = asyncio.create_task(_awaited(playing, self._blocked))
        try:
            with Work(f"episode {episode.index} of task {episode.task}", playing, episode.said):
                await asyncio.wait([task], timeout=self._timeout)
            if task.cancelled():
                raise UserError("CancelledError: it cancelled itself, or what it awaited was cancelled")
            if task.done():
                return task.result()
            raise TimeoutError
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait([task], timeout=_GRACE)
            if not task.done():
                self._left_behind.add(task)
                task.add_done_callback(self._left_behind.discard)

    def _blocked(self, seconds: float) -> None:
        for tally in self._tallies:
            tally.blocked = max(tally.blocked, seconds)


async def _awaited(playing: Awaitable[Any], blocked: Callable[[float], None]) -> Any:
    """What an episode returns; `blocked` is told of long times between its awaits."""
    return await _timed(playing, blocked)


@types.coroutine
def _timed(playing: Awaitable[Any], blocked: Callable[[float], None]) -> Generator[Any, Any, Any]:
    """Awaits, step by step, and looks at the clock before and after each."""
    steps: Any = playing.__await__()
    thrown: BaseException | None = None
    while True:
        began = time.monotonic()
        try:
            waits_for = steps.send(None) if thrown is None else steps.throw(thrown)
        except StopIteration as end:
            return end.value
        finally:
            if (seconds := time.monotonic() - began) > _BLOCKING:
                blocked(seconds)
        thrown = None
        try:
            yield waits_for
        except BaseException as error:  # of whoever waits, such as a cancellation: it is the play's
            thrown = error


def _unjudged(sample: Sample) -> bool:
    return sample.reward is None and sample.outcome is None


def _samples(returned: Any, episode: Episode, judged: bool) -> list[Sample]:
    """What an episode returned, as samples that share its weight.

    Args:
        returned: by the user's program.
        episode: the record of it.
        judged: samples without a reward will get one.

    Raises:
        TypeError, ValueError, UserError: it returned something else.
    """
    samples = [returned] if isinstance(returned, Sample) else returned
    if isinstance(samples, (list, tuple)) and samples and all(isinstance(each, Sample) for each in samples):
        if not judged and any(_unjudged(sample) for sample in samples):
            raise UserError(
                "episode: its trajectory has no reward; give one by c.trajectory(reward=…) or c.reward(…), or give the "
                "session a reward function: rewards=…"
            )
        count = Counter(sample.agent for sample in samples)
        return [replace(sample, weight=sample.weight / count[sample.agent]) for sample in samples]
    if isinstance(returned, Conversation) or returned is None or isinstance(returned, (str, list, tuple, dict)):
        raise WrongType(
            f"episode: it returned {shown(returned)}; return c.trajectory(reward=…), a list of those, or a number"
        )
    reward = number(returned, "episode")
    if len(episode.conversations) != 1:
        raise UserError(
            f"episode: it returned a number and began {len(episode.conversations)} conversations; a number is the "
            "reward of exactly one: return c.trajectory(reward=…), or a list of those"
        )
    return [episode.conversations[0].trajectory(reward)]


def _groups(found: Mapping[int, Sequence[Sample]]) -> list[Group]:
    """A group for each agent: its samples, numbered from 0; those that begin alike share their prompt."""
    ordered = [replace(sample, attempt=attempt) for attempt, own in sorted(found.items()) for sample in own]
    names = dict.fromkeys(sample.agent for sample in ordered)
    return [_group([sample for sample in ordered if sample.agent == name]) for name in names]


def _group(ordered: Sequence[Sample]) -> Group:
    first = ordered[0].prompt
    samples = tuple(
        replace(
            sample,
            index=index,
            prompt=first if (sample.prompt.prefix_key, sample.prompt.text) == (first.prefix_key, first.text) else
            replace(sample.prompt, id=first.id),
        )
        for index, sample in enumerate(ordered)
    )  # fmt: skip
    return Group(first, samples)


def _outside(error: BaseException) -> TracebackType | None:
    """The part of an error's way that is the user's own code."""
    way = error.__traceback__
    while way is not None and way.tb_frame.f_code.co_filename.startswith(_OURS):
        way = way.tb_next
    return way


def _remark(error: BaseException, timeout: float | None) -> str:
    """Why an episode failed, and where in the user's own code."""
    if isinstance(error, TimeoutError) and not str(error):
        return f"it took longer than timeout={timeout:g} s" if timeout is not None else "TimeoutError"
    said = " ".join(str(error).split())
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(_OURS)]
    where = f" ({frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {said}{where}" if said else f"{type(error).__name__}{where}"
