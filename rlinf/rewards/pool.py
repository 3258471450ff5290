"""Rewards in killable child processes, with a deadline for each sample.

In: arguments, one mapping per sample, from any number of calls at once. Out: a verdict for each. Who wakes whom:
`score` puts its samples in one queue and wakes the runners, one per child; a runner takes its share of what waits,
whichever call it came from, and settles the futures that `score` awaits. Children of other processes, which joined the
job, have runners beside those of its own; what such a child had when it was lost goes back into the queue.

Several samples go to a child in one call, since a message costs more than many a reward. A child that hangs or crashes
takes them all with it, so they are then given out one by one: the one that does it again is found, and the others get
their rewards. A plain function returns early with what it has when it is slow, so that one deadline fits all.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rlinf.config.text import RewardConfig
from rlinf.rewards.base import RESPONSES, Arguments, Reward, RewardSource, Verdict, name_in_main
from rlinf.runtime.base.errors import RemoteError, again
from rlinf.runtime.base.tasks import cancel_all
from rlinf.runtime.processes.supervisor import CallTimeout, ChildDied, Worker

_BUDGET = 0.25
"""Seconds after which a child begins no further sample of its call: long beside a message (0.3 ms), short beside any
deadline, so that a share of slow samples is never mistaken for a hang and results do not wait for their neighbours."""
_SHARE = 64
"""Most samples in one call of a plain function: as many more would save nothing that a message costs."""
_TOGETHER = 256
"""Most samples that one child judges at once with an async function: that many requests a server takes at once."""
_GRACE = 2.0
"""Seconds that a child of an async function gets beyond the deadline, for time-outs of its own to come back."""
_TRIES = 2
"""How often a sample may end its process, alone, before that is its verdict: once may have been somebody else's doing,
such as the out-of-memory killer's."""
_MOST_WORKERS = 8
"""Children where nobody says how many: mathematics takes some 10 ms a sample, so eight judge 800 samples a second."""
_MAX_DEATHS = 60
"""Deaths in a row after which a child is given up: 30 samples in a row that crash it twice each are no accident."""

NO_CHILDREN = (
    "the reward function runs in the judge's own process, so nobody can help: set reward.isolate=always, or leave "
    "reward.join out"
)
"""Why others cannot join."""


@dataclass(slots=True, eq=False)
class _Job:
    """One sample in the queue."""

    offered: Arguments
    """Arguments that the function may take."""
    verdict: asyncio.Future[Verdict]
    """Settled by a runner; cancelled if nobody waits any more."""
    alone: bool = False
    """It was in a call that hung or crashed, so it shares no call again."""
    deaths: int = 0
    """Processes that ended over it alone."""


class Scores(Protocol):
    """A child that runs a reward function: a `Worker` of this process, or what stands for one of another."""

    name: str

    async def ready(self) -> None:
        """Wait until it is up."""
        ...

    async def call(self, method: str, *args: Any, timeout: float | None = None) -> Any:  # noqa: ASYNC109
        """Call a method of its `Scorer`; see `Worker.call`."""
        ...


def workers_of(made_of: Mapping[str, Any], name: str, count: int | None) -> tuple[Worker, ...]:
    """Children that are to be started.

    Args:
        made_of: `source` and `args` of the function, as for `Reward.of`.
        name: names them.
        count: how many; None takes half of this machine's cores, from 2 to 8.
    """
    return tuple(
        Worker(
            "rlinf.rewards.base:Scorer",
            made_of,
            name=f"{name}.{number}",
            answers="json",
            env={"OMP_NUM_THREADS": "1"},
            max_restarts=_MAX_DEATHS,
            backoff=(0.05, 2.0, 0.5),
        )
        for number in range(count or max(2, min(_MOST_WORKERS, len(os.sched_getaffinity(0)) // 2)))
    )


async def start_all(workers: Sequence[Worker]) -> None:
    """Start children at once, and wait until they have the function.

    Raises:
        ChildDied: one could not be started, and none is left; its last words are in the text.
    """
    try:
        async with asyncio.TaskGroup() as group:
            for worker in workers:
                group.create_task(worker.start())
    except* ChildDied as several:
        await stop_all(workers)
        raise several.exceptions[0] from None


async def stop_all(workers: Sequence[Worker]) -> None:
    """End children."""
    await asyncio.gather(*(worker.stop() for worker in workers))


class RewardPool:
    """Children that run a reward function.

    Args:
        source, args: the function, as for `Reward.of`; it and the arguments must pickle.
        is_async: whether it is async.
        name: names the children.
        workers: how many; see `workers_of`.
        timeout: seconds for one sample.

    Raises:
        ValueError: the function cannot be sent to a child.
    """

    def __init__(
        self,
        source: RewardSource,
        args: Mapping[str, Any] | None,
        *,
        is_async: bool,
        name: str,
        workers: int | None,
        timeout: float,
    ):
        check_sendable(source, args)
        self.made_of = {"source": source, "args": args}
        """The function, for processes that join."""
        self.away = 0
        """Answers that children of such processes have scored."""
        self._is_async = is_async
        self._timeout = timeout
        self._jobs: deque[_Job] = deque()
        self._some = asyncio.Event()
        self._runners: set[asyncio.Task[None]] = set()
        self._died: ChildDied | None = None  # the last child that was given up
        self._lost: ChildDied | None = None  # the same, once none is left
        self.workers = workers_of(self.made_of, name, workers)

    async def start(self) -> None:
        """Start all children at once, and wait until they have the function.

        Raises:
            ChildDied: one could not be started; its last words are in the text.
        """
        await start_all(self.workers)
        for worker in self.workers:
            self.feed(worker)

    def feed(self, worker: Scores) -> asyncio.Task[None]:
        """Have a child that is up take samples, until it is given up or the task that is returned is cancelled: then
        others get what it had."""
        runner = asyncio.create_task(self._run(worker), name=f"runs {worker.name}")
        self._runners.add(runner)
        runner.add_done_callback(self._ended)
        return runner

    def _ended(self, runner: asyncio.Task[None]) -> None:
        self._runners.discard(runner)
        if not self._runners and self._died is not None:
            self._give_up(self._died)

    async def stop(self) -> None:
        """End the children; whoever still waits for a verdict gets a `ChildDied`."""
        await cancel_all([*self._runners])
        self._give_up(ChildDied("the judge was closed"))
        await stop_all(self.workers)

    async def score(self, batch: Sequence[Arguments]) -> list[Verdict]:
        """Judge samples. Cancelled, those that wait are dropped; what runs comes to its end or its deadline.

        Raises:
            ChildDied: no child is left.
            TypeError: arguments cannot be pickled.
        """
        if self._lost is not None:
            raise again(self._lost)
        loop = asyncio.get_running_loop()
        jobs = [_Job(offered, loop.create_future()) for offered in batch]
        self._jobs.extend(jobs)
        self._some.set()
        try:
            return await asyncio.gather(*(job.verdict for job in jobs))
        finally:
            for job in jobs:
                job.verdict.cancel()

    async def _run(self, worker: Scores) -> None:
        """Feed one child for as long as it lives. Consumes jobs; unblocked by `score`, and by its child coming up."""
        jobs: list[_Job] = []
        try:
            while True:
                await worker.ready()
                jobs = await self._take()
                rest = await self._judge(worker, jobs)
                jobs = []
                self._again(rest)
        except ChildDied as died:  # it will not be started again; the others go on
            self._died = died
        finally:
            self._again(jobs)

    async def _take(self) -> list[_Job]:
        """This child's share of what waits: at least one sample."""
        while True:
            jobs: list[_Job] = []
            most = min(_TOGETHER if self._is_async else _SHARE, math.ceil(len(self._jobs) / len(self._runners)))
            while self._jobs and len(jobs) < most and not (jobs and self._jobs[0].alone):
                job = self._jobs.popleft()
                if not job.verdict.done():
                    jobs.append(job)
                    if job.alone:
                        break
            if jobs:
                return jobs
            if not self._jobs:
                self._some.clear()
                await self._some.wait()

    async def _judge(self, worker: Scores, jobs: list[_Job]) -> list[_Job]:
        """Have a child judge; returns those without a verdict yet."""
        spare = _GRACE if self._is_async else _BUDGET if len(jobs) > 1 else 0.0
        batch = [job.offered for job in jobs]
        try:
            answers = await worker.call("plain_verdicts", batch, self._timeout, _BUDGET, timeout=self._timeout + spare)
            if not isinstance(answers, list) or not 0 < len(answers) <= len(jobs):
                raise ValueError(f"{worker.name} was given {len(jobs)} samples and answered {answers!r:.200}")
            verdicts = [Verdict.read(one) for one in answers]
        except CallTimeout:
            return self._suspect(jobs, Verdict("timeout", remark=f"took longer than {self._timeout:g} s; killed"))
        except ChildDied as died:
            if len(jobs) == 1:
                jobs[0].deaths += 1
                if jobs[0].deaths < _TRIES:
                    jobs[0].alone = True
                    return jobs
            return self._suspect(jobs, Verdict("error", remark=last_words(died), trace=str(died)))
        except (RemoteError, ValueError) as error:  # it answered what no child of ours does
            return self._suspect(jobs, Verdict("error", remark=str(error).splitlines()[0], trace=str(error)))
        except Exception as error:  # what was to be sent is no pickle: the callers' business
            for job in jobs:
                _fail(job, error)
            return []
        away = not isinstance(worker, Worker)
        for job, verdict in zip(jobs, verdicts, strict=False):
            _settle(job, verdict)
            self.away += away * len(job.offered.get(RESPONSES, (1,)))
        return jobs[len(verdicts) :]

    def _suspect(self, jobs: list[_Job], verdict: Verdict) -> list[_Job]:
        """After a hang or a crash: the verdict on a sample that was alone; otherwise any of them may have done it."""
        if len(jobs) == 1:
            _settle(jobs[0], verdict)
            return []
        for job in jobs:
            job.alone = True
        return jobs

    def _again(self, jobs: list[_Job]) -> None:
        """Put samples back where they were, at the front."""
        if jobs:
            self._jobs.extendleft(reversed(jobs))
            self._some.set()

    def _give_up(self, died: ChildDied) -> None:
        self._lost = died
        while self._jobs:
            _fail(self._jobs.popleft(), died)


def runs_in_children(source: RewardSource, settings: RewardConfig) -> bool:
    """True if a reward function runs in child processes, beside which others may join.

    Raises:
        ValueError: the function is not found, or is given what it does not take.
    """
    how = settings.isolate
    return how == "always" or (how == "auto" and not Reward.of(source, settings.args, make=False).trusted)


def check_sendable(source: RewardSource, args: Mapping[str, Any] | None) -> None:
    """See that a child can get a reward function and its arguments.

    Raises:
        ValueError: it cannot; the text says what to do.
    """
    advice = (
        "define it at the top of a module file and name it by its dotted path, such as my_rewards.score; or set "
        "isolate to never, which runs it in the judge's own process, where a hang hangs the job"
    )
    try:
        name = name_in_main((source, args))
    except Exception as error:
        raise ValueError(f"the reward cannot be sent to a child process ({error}): {advice}") from error
    if name is not None:
        raise ValueError(f"reward {name} of the main program cannot be run in a child process: {advice}")


def _settle(job: _Job, verdict: Verdict) -> None:
    if not job.verdict.done():
        job.verdict.set_result(verdict)


def _fail(job: _Job, error: Exception) -> None:
    if not job.verdict.done():
        job.verdict.set_exception(error)


def last_words(died: ChildDied) -> str:
    """How a child ended, and what it said last, in a line."""
    how = str(died).splitlines()[0]
    return f"{how}; its last line: {died.output[-1].strip()}" if died.output else how
