"""Calls of a reward function that come to a verdict whatever happens, short of the end of the process.

In: arguments, one mapping per sample. Out: one `Verdict` per sample, in order. `Scorer` is what lives in the child
processes of `pool.py`, or in the judge's own process for functions that are trusted. Imports nothing heavy.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import math
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from rlinf.rewards.base import ON_REQUEST, RESPONSES, BadReward, Part, Reward, RewardSource
from rlinf.rewards.score import as_list
from rlinf.runtime.base.errors import line_of
from rlinf.runtime.processes.imports import ImportWatch

Arguments = Mapping[str, Any]
"""What is offered to the reward function for one sample."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of judging one sample."""

    outcome: Literal["ok", "timeout", "error"]
    """It was scored; it took too long; it raised, crashed, or returned no number."""
    value: float | None = None
    """The reward, if it was scored."""
    scores: Mapping[str, float] = field(default_factory=dict)
    """Its parts by name."""
    extracted: str | None = None
    """What was taken as the answer itself."""
    remark: str = ""
    """Why it was not scored, in a line."""
    trace: str = ""
    """The traceback, if an exception was why."""
    hopeless: bool = False
    """No other sample would fare better: a module that the function needs is not installed."""
    members: Sequence[Verdict] = ()
    """Of a group that was scored as one: what became of each of its answers."""

    @staticmethod
    def read(given: Any) -> Verdict:
        """The verdict that a child sent as plain data.

        Raises:
            ValueError: it is none.
        """
        try:
            given = {**given}
            verdict = Verdict(**{**given, "members": tuple(Verdict.read(one) for one in given.get("members", ()))})
        except TypeError as error:
            raise ValueError(f"{given!r:.200} is no verdict: {error}") from None
        texts = (verdict.extracted or "", verdict.remark, verdict.trace)
        numbers = [*verdict.scores.values()] if isinstance(verdict.scores, dict) else [None]
        if verdict.outcome == "ok":
            numbers.append(verdict.value)
        if (
            verdict.outcome not in ("ok", "timeout", "error")
            or not all(isinstance(text, str) for text in texts)
            or not all(type(number) is float and math.isfinite(number) for number in numbers)
        ):
            raise ValueError(f"{given!r:.200} is no verdict")
        return verdict


_deadline: contextvars.ContextVar[asyncio.Timeout | None] = contextvars.ContextVar("deadline", default=None)
"""Of the sample that an async function judges."""


@contextlib.contextmanager
def uncounted() -> Iterator[None]:
    """Time within which `reward.timeout` stands still, for an async reward that waits for its turn or has deadlines of
    its own."""
    limit, loop = _deadline.get(), asyncio.get_running_loop()
    end = None if limit is None else limit.when()
    if limit is None or end is None or end <= loop.time():
        yield
        return
    left = end - loop.time()
    limit.reschedule(None)
    try:
        yield
    finally:
        limit.reschedule(loop.time() + left)


class Scorer:
    """A reward function in the process where it runs.

    Args:
        source, args: as for `Reward.of`.
    """

    def __init__(self, source: RewardSource, args: Mapping[str, Any] | None = None):
        self.reward = Reward.of(source, args)
        self._runner: asyncio.Runner | None = None
        self._imports: ImportWatch | None = None

    def pauses(self, tell: Callable[[bool], None]) -> None:
        """Have `tell` called when a module begins and ends to be loaded: that counts against no deadline."""
        self._imports = ImportWatch(tell)

    def score(self, batch: Sequence[Arguments], timeout: float, budget: float) -> list[Verdict]:
        """Judge samples: plain functions one after the other, async ones together.

        Args:
            batch: arguments for each sample.
            timeout: seconds that an async function has for each.
            budget: seconds after which no further plain call is begun; the verdicts so far are returned, at least one.
        """
        if self.reward.is_async:
            if self._runner is None:  # one loop for all calls, so that sessions and pools of the function's own live on
                self._runner = asyncio.Runner(loop_factory=self._loop)
            return self._runner.run(self.together(batch, timeout))
        end = time.monotonic() + budget
        verdicts: list[Verdict] = []
        for offered in batch:
            verdicts.append(self.one(offered))
            if time.monotonic() >= end:
                break
        return verdicts

    def told(self, batch: Sequence[Arguments], timeout: float, budget: float) -> list[dict[str, Any]]:
        """`score` in plain data, for `Verdict.read`."""
        return [asdict(verdict) for verdict in self.score(batch, timeout, budget)]

    def one(self, offered: Arguments) -> Verdict:
        """Judge one sample, or one group, with a plain function."""
        if self.reward.over_group:
            return members(self.reward, offered, called(self.reward, offered))
        try:
            score = self.reward(offered)
        except (Exception, SystemExit) as error:  # foreign code: whatever it raises is the verdict on this sample
            return failed(error)
        return Verdict("ok", score.value, score.scores, score.extracted)

    async def together(self, batch: Sequence[Arguments], timeout: float) -> list[Verdict]:  # noqa: ASYNC109
        """Judge samples with an async function, all at once; each has `timeout` seconds."""
        return await asyncio.gather(*(self._one_async(offered, timeout) for offered in batch))

    def close(self) -> None:
        """End the loop of async functions."""
        if self._runner is not None:
            self._runner.close()

    def _loop(self) -> asyncio.AbstractEventLoop:
        """A loop whose clock, by which samples have their deadlines, stands still while modules are loaded."""
        loop, watch = asyncio.new_event_loop(), self._imports
        if watch is not None:
            loop.time = lambda: time.monotonic() - watch.seconds  # type: ignore[method-assign]
        return loop

    async def _one_async(self, offered: Arguments, seconds: float) -> Verdict:
        limit = asyncio.timeout(seconds)
        try:
            async with limit:
                _deadline.set(limit)
                if self.reward.over_group:
                    values = await asyncio.gather(*(_settled(part) for part in called(self.reward, offered)))
                    return members(self.reward, offered, values)
                score = await self.reward(offered)
        except (Exception, SystemExit) as error:
            if limit.expired():
                return Verdict("timeout", remark=f"took longer than {seconds:g} s")
            return failed(error)
        return Verdict("ok", score.value, score.scores, score.extracted)


# Groups --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Raised:
    """What a part raised instead of returning a value."""

    error: BaseException


def called(reward: Reward, offered: Arguments) -> list[list[Any]]:
    """Call every part of a reward for a group.

    Args:
        reward: some part of which scores groups.
        offered: for the group: `responses`, `truncated` and `response_ids` are lists.

    Returns:
        For each part what its calls returned or raised, or awaitables of it: one for the group, or one per answer.
    """
    answers = [_of_answer(offered, index) for index in range(len(offered[RESPONSES]))]
    return [[_attempt(part, each) for each in ([offered] if part.over_group else answers)] for part in reward.parts]


def members(reward: Reward, offered: Arguments, values: Sequence[Sequence[Any]]) -> Verdict:
    """The verdict on a group, with one for each of its answers.

    Args:
        reward, offered: see `called`.
        values: what it returned, awaited.
    """
    count = len(offered[RESPONSES])
    columns: list[Sequence[Any]] = []
    for part, found in zip(reward.parts, values, strict=True):
        if not part.over_group:
            columns.append(found)
            continue
        (given,) = found
        if isinstance(given, _Raised):
            return failed(given.error)
        scores = as_list(given)
        if scores is None or len(scores) != count:
            told = f"{given!r:.100}" if scores is None else f"{len(scores)} scores"
            wanted = f"a list of {count}, one score per answer"
            return failed(
                BadReward(f"reward {part.described} returned {told} for {count} answers: it must return {wanted}")
            )
        columns.append(scores)
    return Verdict("ok", 0.0, members=tuple(_member(reward, row) for row in zip(*columns, strict=True)))


def _member(reward: Reward, values: Sequence[Any]) -> Verdict:
    for value in values:
        if isinstance(value, _Raised):
            return failed(value.error)
    try:
        score = reward.summed(values)
    except BadReward as error:
        return failed(error)
    return Verdict("ok", score.value, score.scores, score.extracted)


def _of_answer(offered: Arguments, index: int) -> dict[str, Any]:
    """What a part that scores single answers is offered for one of the group."""
    one = {name: value for name, value in offered.items() if name != RESPONSES}
    one["response"] = offered[RESPONSES][index]
    for name in ("truncated", ON_REQUEST):
        if name in offered:
            one[name] = offered[name][index]
    return one


def _attempt(part: Part, offered: Arguments) -> Any:
    try:
        return part(offered)
    except (Exception, SystemExit) as error:  # foreign code, see `Scorer.one`
        return _Raised(error)


async def _settled(values: Sequence[Any]) -> list[Any]:
    async def settle(value: Any) -> Any:
        try:
            return await value if inspect.isawaitable(value) else value
        except (Exception, SystemExit) as error:  # foreign code, see `Scorer.one`
            return _Raised(error)

    return list(await asyncio.gather(*(settle(value) for value in values)))


def failed(error: BaseException) -> Verdict:
    """The verdict on a sample for which the function raised."""
    if isinstance(error, BadReward):  # raised by a line of ours, which helps nobody
        return Verdict("error", remark=str(error))
    line = line_of(error)
    where = f" ({line})" if line else ""
    return Verdict(
        "error",
        remark=f"{type(error).__name__}: {error}{where}",
        trace="".join(traceback.format_exception(error)),
        hopeless=isinstance(error, ImportError),
    )
