"""What an episode returned, as samples, and those of a task as groups; why an episode failed.

In: what the user's program returned or raised. Out: samples, groups, remarks. Nobody waits here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from rlinf.agents.checks import WrongType, number, shown
from rlinf.agents.conversation import Conversation
from rlinf.agents.episodes.episode import Episode
from rlinf.data.sample import Group, Prompt, Sample
from rlinf.runtime.base.errors import INSTALLED, PACKAGE, UserError, line_of


def unjudged(sample: Sample) -> bool:
    """Nobody has said how good it is."""
    return sample.reward is None and sample.outcome is None


def samples_of(returned: Any, episode: Episode, judged: bool) -> list[Sample]:
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
    """What is said where nobody says how good an episode was."""
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


def groups_of(found: Mapping[int, Sequence[Sample]]) -> list[Group]:
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
    said = " ".join(str(error).split())
    if isinstance(error, AttributeError) and isinstance(error.obj, Prompt):
        columns = [f"task.row[{str(name)!r}]" for name in error.obj.row]
        said += f"; a task has {', '.join(['task.text', 'task.answer', *columns])}"
    line = line_of(error) or program
    where = f" ({line.rpartition('/')[2]})" if line else ""
    where += f", and {others} more" if others else ""
    return f"{type(error).__name__}: {said}{where}" if said else f"{type(error).__name__}{where}"


def _leaf(error: BaseException) -> tuple[BaseException, int]:
    """The first exception of a group, and how many others there are in it; any other error itself."""
    if not isinstance(error, BaseExceptionGroup):
        return error, 0
    leaves = [_leaf(each) for each in error.exceptions]
    return leaves[0][0], len(leaves) - 1 + sum(others for _, others in leaves)
