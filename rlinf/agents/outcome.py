"""Results of episodes: conversion to samples and groups, reasons of failures, and counts of both.

In: what the user's program returned or raised. Out: samples, and groups of those of a task; metrics of a step, warnings
and notes for people. `Episode` is one play of a task while it goes on, and the running code can be asked which one it
plays. Nothing here waits.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, fields, replace
from importlib import import_module
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from rlinf.agents.agent import AgentLLM, OnlyPast
from rlinf.agents.arguments import WrongType, number, shown
from rlinf.agents.conversation import Conversation
from rlinf.agents.llm import Setting
from rlinf.agents.player import Player
from rlinf.agents.record import Record, RecordedModel
from rlinf.agents.trajectories import Turn
from rlinf.data.sample import Group, Prompt, Sample
from rlinf.metrics.tracing import RunSpans, nanoseconds
from rlinf.runtime.base.errors import INSTALLED, PACKAGE, UserError, line_of


@dataclass(slots=True, eq=False)
class Episode:
    """One play of a task, while it goes on: what a conversation that begins in it belongs to."""

    task: int
    """Number of the task."""
    index: int
    """Which of its episodes."""
    seed: tuple[int, ...]
    """Seed that its randomness depends on, besides its index."""
    prompt: Prompt | None
    """The task itself, if it is a prompt."""
    sampling: Mapping[str, Any]
    """How its conversations sample where they do not say."""
    conversations: list[Conversation] = field(default_factory=list)
    """Those that began in it."""
    llm: AgentLLM | None = None
    """The model as its agents call it, if it is played by agents."""
    record: Record = field(default_factory=Record)
    """Calls to the model, and their answers."""
    player: Player | None = None
    """Answers in the model's place; None: the model does."""

    def sibling(self, index: int, record: Record) -> Episode:
        """Another episode of the same task.

        Args:
            index: which.
            record: of its calls.
        """
        return replace(self, index=index, conversations=[], llm=None, record=record)

    def recorded(self, setting: Setting) -> Setting:
        """The setting with the model's calls going into the episode's record."""
        return replace(setting, llm=RecordedModel(setting.llm, self.record))

    def progress(self) -> int:
        """How much was said so far: answers of the model to agents, messages of conversations."""
        by_agents = 0 if self.llm is None else self.llm.counts().calls
        return by_agents + sum(len(conversation.messages) for conversation in self.conversations)

    def end(self) -> None:
        """It is over: the engine need keep nothing of it."""
        for conversation in self.conversations:
            conversation.end()
        if self.llm is not None:
            self.llm.end()
        self.record.end()


here: ContextVar[Episode | None] = ContextVar("episode", default=None)
"""The episode that the running code plays."""


def unjudged(sample: Sample) -> bool:
    """Nobody has said how good it is."""
    return sample.reward is None and sample.outcome is None


def samples_of(returned: Any, episode: Episode, judged: bool) -> list[Sample]:
    """Convert an episode's return value to samples that share its weight.

    Args:
        returned: by the user's program.
        episode: the record of it.
        judged: samples without a reward will get one.

    Raises:
        TypeError, ValueError, UserError: it returned something else.
    """
    samples = [returned] if isinstance(returned, Sample) else returned
    if isinstance(samples, (list, tuple)) and samples and all(isinstance(each, Sample) for each in samples):
        if not judged and any(unjudged(sample) for sample in samples):
            raise UserError(_no_reward(samples, by_agent=episode.llm is not None))
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


def _no_reward(samples: Sequence[Sample], *, by_agent: bool) -> str:
    """Return the message for an episode without a reward."""
    if not by_agent:
        return (
            "episode: its trajectory has no reward; give one by c.trajectory(reward=…) or c.reward(…), or give the "
            "session a reward function: rewards=…"
        )
    names = sorted({sample.agent for sample in samples if unjudged(sample)})
    whose = f" for {', '.join(map(repr, names))}" if any(names) else ""
    return (
        f"agent: it returned no reward{whose}, and nobody chose a reward function: is a `return` missing? Return a "
        "number (or {agent's name: number}), call llm.reward(value), or choose a function: reward.function, rewards=…"
    )


def groups_of(samples_of_attempts: Mapping[int, Sequence[Sample]]) -> list[Group]:
    """A group for each agent: its samples, numbered from 0; those that begin alike share their prompt."""
    ordered = [
        replace(sample, attempt=attempt) for attempt, own in sorted(samples_of_attempts.items()) for sample in own
    ]
    names = dict.fromkeys(sample.agent for sample in ordered)
    return [_group([sample for sample in ordered if sample.agent == name]) for name in names]


def _group(ordered: Sequence[Sample]) -> Group:
    first = ordered[0].prompt

    def shared(prompt: Prompt) -> Prompt:
        alike = (prompt.prefix_key, prompt.text) == (first.prefix_key, first.text)
        return first if alike else replace(prompt, id=first.id)

    samples = (replace(sample, index=index, prompt=shared(sample.prompt)) for index, sample in enumerate(ordered))
    return Group(first, tuple(samples))


def way_outside(error: BaseException) -> TracebackType | None:
    """The part of an error's way that is the user's own code."""
    way = error.__traceback__
    while way is not None and way.tb_frame.f_code.co_filename.startswith(PACKAGE):
        way = way.tb_next
    return way


class OutOfTime(TimeoutError):
    """An episode took longer than it may; the text says for what it waited then."""


def out_of_time(playing: Any, timeout: float) -> OutOfTime:
    """The error of an episode whose time is over.

    Args:
        playing: its coroutine, not cancelled yet.
        timeout: seconds that it had.
    """
    at, awaiting = "", playing
    while awaiting is not None:
        frame = getattr(awaiting, "cr_frame", None)
        if frame is not None and not frame.f_code.co_filename.startswith(INSTALLED):
            at = f", and waited at {Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        awaiting = getattr(awaiting, "cr_await", None)
    return OutOfTime(f"it took longer than timeout={timeout:g} s{at}")


class Stopped(BaseException):
    """Thrown into code that keeps the event loop from going on; no `except Exception` of a library takes it.

    Args:
        why: what the episode fails with.
    """

    def __init__(self, why: UserError | OutOfTime) -> None:
        super().__init__(str(why))
        self.why = why


def blocking_line(frame: FrameType | None) -> str:
    """File and line of the user's own code that called what a thread does now; "" where it is not called by such code,
    or by way of ours.

    Args:
        frame: the innermost of the thread's.
    """
    while frame is not None and not frame.f_code.co_filename.startswith(PACKAGE):
        if not frame.f_code.co_filename.startswith(INSTALLED):
            return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def remark_on(error: BaseException, program: str = "") -> str:
    """Why an episode failed, and where in the user's own code.

    Args:
        error: what it raised.
        program: `path:line` of what was played, which is where no line of it raised.
    """
    if isinstance(error, OutOfTime):
        return str(error)
    error, others = _leaf(error)
    reason = " ".join(str(error).split())
    if isinstance(error, AttributeError) and isinstance(error.obj, Prompt):
        columns = [f"task.row[{str(name)!r}]" for name in error.obj.row]
        reason += f"; a task has {', '.join(['task.text', 'task.answer', *columns])}"
    line = line_of(error) or program
    where = f" ({line.rpartition('/')[2]})" if line else ""
    where += f", and {others} more" if others else ""
    return f"{type(error).__name__}: {reason}{where}" if reason else f"{type(error).__name__}{where}"


def _leaf(error: BaseException) -> tuple[BaseException, int]:
    """The first exception of a group, and how many others there are in it; any other error itself."""
    if not isinstance(error, BaseExceptionGroup):
        return error, 0
    leaves = [_leaf(each) for each in error.exceptions]
    return leaves[0][0], len(leaves) - 1 + sum(others for _, others in leaves)


@dataclass(slots=True)
class Tally:
    """Counts of episodes and of their calls to the model."""

    played: int = 0
    """How many ended."""
    failures: int = 0
    """Number that raised, took too long or returned no sample."""
    failed: list[tuple[int, int]] = field(default_factory=list)
    """Which, unless somebody else tells of them: number of the task, and which attempt at it."""
    timeouts: int = 0
    """Number that took too long."""
    remark: str = ""
    """Why the first of them failed."""
    cause: BaseException | None = None
    """Exception of the first that failed."""
    calls: int = 0
    """Answers of the model to agents."""
    given_up: int = 0
    """Calls whose answer nobody waited for to its end."""
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
    reused: int = 0
    """Tokens of their records that were not made again."""
    dropped: int = 0
    """Tokens of their records that were of no use."""
    against: list[tuple[int, str]] = field(default_factory=list)
    """Tasks in which an earlier version of the policy played, with its name."""
    rewarded: list[tuple[Prompt, float]] = field(default_factory=list)
    """Tasks of which episodes went well, with the mean of their rewards."""

    def failure(self, episode: Episode, error: BaseException, remark: str) -> None:
        """An episode failed, or has nothing to be learned from."""
        self.failed.append((episode.task, episode.index))
        if isinstance(error, OnlyPast):
            return
        self.failures += 1
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
            self.reused += record.reused
            self.dropped += record.dropped
        if episode.llm is not None:
            counts = episode.llm.counts()
            self.calls += counts.calls
            self.branches += counts.branches
            self.given_up += counts.given_up
            for name, agent in episode.llm.agents.items():
                if not agent.learns and agent.adapter is not None:
                    self.against.append((episode.task, agent.adapter))
                if name:
                    self.by_agent[name] += agent.trajectories.counts.calls

    def add(self, other: Tally) -> None:
        """Take in what became of other episodes."""
        for each in fields(Tally):
            if each.name not in ("remark", "cause", "blocked"):
                setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))
        self.blocked = max(self.blocked, other.blocked)
        if not self.remark:
            self.remark, self.cause = other.remark, other.cause

    def nothing_to_learn(self) -> UserError:
        """Not one episode went well; the error is caused by the first one's."""
        error = UserError(
            f"gather: not one of {self.played} episodes went well, so there is nothing to learn from; the first: "
            f"{self.remark or 'only earlier versions of the policy spoke'}"
        )
        error.__cause__ = self.cause
        return error

    def metrics(self) -> dict[str, float]:
        """Numbers of a step; nothing if no episode was played."""
        if not self.played:
            return {}
        values = {
            "episodes": float(self.played),
            "episodes/failed": self.failures / self.played,
            "episodes/timeout": self.timeouts / self.played,
        }
        if self.calls:
            values |= {"episodes/calls": self.calls / self.played, "episodes/branches": self.branches / self.played}
        if self.given_up:
            values["episodes/given_up"] = self.given_up / self.played
        against, rewards = dict(self.against), dict[str, list[float]]()
        for prompt, reward in sorted(self.rewarded, key=lambda outcome: outcome[0].id):  # whichever ended first
            if (name := against.get(prompt.id)) is not None:
                rewards.setdefault(name, []).append(reward)
        values |= {f"{name}/reward": math.fsum(own) / len(own) for name, own in sorted(rewards.items())}
        return values | {f"agent/{name}/calls": count / self.played for name, count in sorted(self.by_agent.items())}

    def warnings(self, history: KnownFailures | None = None) -> Iterator[str]:
        """Yield sentences about failed episodes, where they are news to the history, and about blocking ones."""
        if (history or KnownFailures()).lacks(self):
            failed = f"{self.failures} of {self.played} episodes failed"
            yield f"{failed} and count as not drawn; the first: {self.remark}; from now on see metric episodes/failed"
        if self.blocked:
            yield (
                f"an episode ran for {self.blocked:.1f} s without an await, so that all others stood still: "
                "the machine is busy with other things, or it blocks; put what blocks in a thread (asyncio.to_thread)"
            )

    def notes(self) -> Iterator[str]:
        """Yield sentences about open episodes of a checkpoint that went on."""
        anew = +self.anew
        if self.went_on or anew:
            why = "".join(f", {count} began anew ({reason})" for reason, count in sorted(anew.items()))
            lost = f", {self.dropped:,} were of no use" if self.dropped else ""
            yield (
                f"of the checkpoint's open episodes, {self.went_on} went on{why}; {self.reused:,} tokens were taken "
                f"from their records{lost}"
            )


class KnownFailures:
    """Failures of episodes that a run has told of, so that it does not say at every step what it has said."""

    def __init__(self) -> None:
        self._share = 0.0
        self._causes: set[tuple[str, str]] = set()

    def lacks(self, tally: Tally) -> bool:
        """Take a step's failures in; True if they are news: the first one's type or line is, or their share is a fifth
        of all episodes away from that of the last news, or from none where a step had none since."""
        cause = tally.cause
        if cause is None:
            self._share = 0.0
            return False
        kind, share = (type(cause).__name__, line_of(cause)), tally.failures / tally.played
        if kind in self._causes and abs(share - self._share) < 0.2:
            return False
        self._causes.add(kind)
        self._share = share
        return True


class Gathered(list[Group]):
    """All groups of a batch, and what became of its episodes, which may have been played while another was learned."""

    def __init__(self, groups: Iterable[Group], tally: Tally) -> None:
        super().__init__(groups)
        self.tally = tally


def send_spans(episode: Episode, failure: str | None, spans: RunSpans) -> None:
    """Send an episode as an OpenTelemetry span, with one below it for each answer of its agents, named and described by
    the semantic conventions for generative AI.

    Args:
        episode: over.
        failure: why it failed; None: it did not.
        spans: of its run.
    """
    if episode.llm is None:
        return
    tracer, zero = spans.tracer, time.time() - (time.monotonic() - episode.llm.start)
    about = {"gen_ai.operation.name": "invoke_agent", "rlinf.task": episode.task, "rlinf.attempt": episode.index}
    root = tracer.start_span("invoke_agent", context=spans.episodes, attributes=about, start_time=nanoseconds(zero))
    if failure is not None:
        api = import_module("opentelemetry.trace")
        root.set_status(api.Status(api.StatusCode.ERROR, failure))
    below = import_module("opentelemetry.trace").set_span_in_context(root)
    for agent in episode.llm.agents.values():
        for turn in agent.trajectories.turns:
            start = zero + turn.start
            span = tracer.start_span(
                "chat policy", context=below, attributes=_about_answer(agent, turn), start_time=nanoseconds(start)
            )
            for call in turn.calls:
                span.add_event("tool_call", {"gen_ai.tool.name": str(call.get("name") or call.get("broken"))})
            span.end(nanoseconds(start + turn.took))
    root.end()


def _about_answer(agent: AgentLLM, turn: Turn) -> dict[str, Any]:
    written = len(turn.answer.token_ids)
    about: dict[str, Any] = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "rlinf",
        "gen_ai.request.model": "policy",
        "gen_ai.request.temperature": turn.temperature,
        "gen_ai.conversation.id": str(turn.conversation),
        "gen_ai.usage.input_tokens": turn.length - written,
        "gen_ai.usage.output_tokens": written,
        "gen_ai.response.finish_reasons": [turn.finish],
    }
    if agent.name:
        about["gen_ai.agent.name"] = agent.name
    return about if turn.reward is None else about | {"rlinf.reward": turn.reward}
