"""Processes that join a job and leave it at random: does it hang, does its memory grow, is its loop held up?

    python -m benchmarks.joiners [--minutes 10] [--members 128] [--seed 0]

The job's side is the real one: the pool of engines, its listener and its connections, without an engine of its own, fed
with requests as fast as they are answered and with new weights every five seconds. Of a member everything is real but
the engine, whose answers are a plain function of the request, given after a moment: 128 processes that decode would
want 128 cores. Members are forked from one process that has imported torch and no more, so that a machine of two cores
has room for them; each says hello, proves the token, takes weights and answers like any other.

Four times a second one of them, drawn at random, is killed (`kill -9`) or told to leave (SIGTERM), and another joins.
Counted are requests not answered, or answered twice or wrongly, after a minute without any progress a hang, members
that are not there at the end, the resident memory and open files of the job, and how late its loop wakes a timer that
is due every 10 ms: wall time, which includes whatever else the machine does, and processor time of the loop's thread
from one to the next, which is the job's own part.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import gc
import os
import random
import secrets
import signal
import sys
import time
from array import array
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from rlinf.data.weights import Weights
from rlinf.engines.base import Completion, Engine, Request, Sampling
from rlinf.engines.pool.absent import Absent
from rlinf.engines.pool.far_side import serve
from rlinf.engines.pool.pool import Pool
from rlinf.joining.connection import connect
from rlinf.runtime.base.tasks import InThreads, cancel_all

PR_SET_PDEATHSIG = 1
ROWS = 8
"""Answers that a member gives at once."""
TICK = 0.01
"""Seconds between two timers of the loop that is watched."""
PATIENCE = 60.0
"""Seconds without any answer after which it counts as hung."""


def tokens_of(request: Request) -> np.ndarray:
    """The answer to a request."""
    return np.arange(request.sampling.max_new_tokens, dtype=np.int64) + request.seed % 1000


class Modelled(Engine):
    """Answers after a moment."""

    max_rows = ROWS
    reads_text = True

    def __init__(self) -> None:
        self._version, self._rng = 0, random.Random(os.getpid())
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._requests: dict[int, Request] = {}
        self._done: asyncio.Queue[Completion] = asyncio.Queue()

    @property
    def version(self) -> int:
        return self._version

    async def _answer(self, request: Request) -> None:
        await asyncio.sleep(self._rng.uniform(0.2, 2.0))
        ids = tokens_of(request)
        logprobs, versions = np.zeros(len(ids), np.float32), np.full(len(ids), self._version, np.int32)
        self._done.put_nowait(Completion(request.id, ids, logprobs, versions, "length"))
        del self._tasks[request.id], self._requests[request.id]

    async def batches(
        self, requests: Iterable[Request] | AsyncIterable[Request]
    ) -> AsyncGenerator[list[Completion], None]:
        async def read() -> None:
            assert isinstance(requests, AsyncIterable)
            async for request in requests:
                self._requests[request.id] = request
                self._tasks[request.id] = asyncio.create_task(self._answer(request))

        reading = asyncio.create_task(read())
        try:
            while True:
                yield [await self._done.get()]
        finally:
            await cancel_all([reading, *self._tasks.values()])

    async def abort(self, ids: Iterable[int] | None = None) -> None:
        for id in [*self._tasks] if ids is None else [id for id in ids if id in self._tasks]:
            self._tasks.pop(id).cancel()
            self._done.put_nowait(self._requests.pop(id).ended("abort"))

    async def take_out(self, ids: Iterable[int]) -> list[Request]:
        return []

    async def partial(self, ids: Iterable[int]) -> list[Request]:
        return [self._requests[id] for id in ids if id in self._requests]

    async def pause(self) -> None:
        """Nothing moves here."""

    async def resume(self) -> None:
        """Nothing moves here."""

    async def check(self, weights: Weights) -> None:
        """Take any."""

    async def load(self, weights: Weights) -> None:
        self._version = weights.version


async def member(port: int, token: str) -> None:
    """Be one of those who join, until told to leave."""
    leave = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, leave.set)

    async def build(**_: object) -> Engine:
        return Modelled()

    with contextlib.suppress(OSError, EOFError):  # the job is over
        await serve(await connect("127.0.0.1", port, token), build, lambda: None, leave)


def nursery(port: int) -> None:
    """Fork a member for every line that comes, and say its process."""
    token = os.environ["JOINERS_TOKEN"]
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those who end
    gc.collect()
    gc.freeze()
    for _ in sys.stdin:
        if pid := os.fork():
            print(pid, flush=True)
            continue
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        asyncio.run(member(port, token))
        os._exit(0)


@dataclass(slots=True)
class Seen:
    """Counts of a drill."""

    asked: int = 0
    answered: int = 0
    wrong: int = 0
    kills: int = 0
    leaves: int = 0
    joins: int = 0
    late: array[float] = field(default_factory=lambda: array("d"))
    """Seconds by which timers were late."""
    own: array[float] = field(default_factory=lambda: array("d"))
    """Seconds of the loop's thread from one timer to the next."""


class Members:
    """Processes that join, by a nursery.

    Args:
        process: of the nursery.
    """

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process, self.alive = process, list[int]()

    async def join(self) -> None:
        """One more."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(b"\n")
        await self._process.stdin.drain()
        self.alive.append(int(await self._process.stdout.readline()))

    def end(self, which: int, number: signal.Signals) -> None:
        """End one of them."""
        os.kill(self.alive.pop(which), number)


def _mark() -> str:
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return f"{resident / 1e6:.0f} MB, {len(os.listdir('/proc/self/fd'))} files"


async def _watch(seen: Seen) -> None:
    loop = asyncio.get_running_loop()
    while True:
        due, worked = loop.time() + TICK, time.thread_time()
        await asyncio.sleep(TICK)
        seen.late.append(loop.time() - due)
        seen.own.append(time.thread_time() - worked)


async def _publish(pool: Pool) -> None:
    for version in range(1, 1 << 30):
        await pool.load(Weights.pack([("weight", torch.full((16_384,), float(version)))], version))
        await asyncio.sleep(5)


async def _come_and_go(members: Members, seen: Seen, rng: random.Random, ends: float) -> None:
    loop = asyncio.get_running_loop()
    while loop.time() < ends:  # and not in the middle of a join, of which nobody would then know the process
        await asyncio.sleep(rng.expovariate(4.0))
        killed = rng.random() < 0.5
        members.end(rng.randrange(len(members.alive)), signal.SIGKILL if killed else signal.SIGTERM)
        seen.kills, seen.leaves, seen.joins = seen.kills + killed, seen.leaves + (not killed), seen.joins + 1
        await members.join()


async def _ask(pool: Pool, seen: Seen, ends: float) -> None:
    """Ask until the end, and take every answer."""
    loop, open_ids = asyncio.get_running_loop(), set[int]()

    async def requests() -> AsyncIterator[Request]:
        while loop.time() < ends:
            seen.asked += 1
            open_ids.add(seen.asked)
            yield Request(seen.asked, np.array([1, 2, 3]), Sampling(4 + seen.asked % 60), seen.asked)

    answers = pool.batches(requests())
    while True:
        async with asyncio.timeout(PATIENCE):
            completions = await anext(answers, None)
        if completions is None:
            break
        for one in completions:
            like = Request(one.id, np.array([1]), Sampling(4 + one.id % 60), one.id)
            right = one.finish == "length" and np.array_equal(one.response_ids, tokens_of(like))
            seen.wrong += one.id not in open_ids or not right
            open_ids.discard(one.id)
            seen.answered += 1


async def run(minutes: float, count: int, seed: int) -> bool:
    """Have members come and go, print what was seen, and say whether all was well."""
    seen, token = Seen(), secrets.token_hex(8)
    pool = Pool(Absent("transformers", {"max_rows": ROWS, "reads_text": True}), InThreads(), {}, "job")
    _, _, port = (await pool.listen("127.0.0.1:0", None, token)).rpartition(":")
    arguments = (sys.executable, "-m", "benchmarks.joiners", "--nursery", port)
    pipe, env = asyncio.subprocess.PIPE, {**os.environ, "JOINERS_TOKEN": token}
    process = await asyncio.create_subprocess_exec(*arguments, stdin=pipe, stdout=pipe, env=env)
    members, hung = Members(process), False
    for _ in range(count):
        await members.join()
    while len(pool.members) < count:
        await pool._changed.wait()
    print(f"{count} have joined; {_mark()}", flush=True)
    gc.collect()
    gc.freeze()  # as a run does once it has started
    loop = asyncio.get_running_loop()
    ends = loop.time() + 60 * minutes
    background = [asyncio.create_task(each) for each in (_publish(pool), _watch(seen))]
    moving = asyncio.create_task(_come_and_go(members, seen, random.Random(seed), ends))
    asking = asyncio.create_task(_ask(pool, seen, ends))
    while loop.time() < ends and not (asking.done() or moving.done()):
        await asyncio.wait([asking, moving], timeout=60 * minutes / 5, return_when=asyncio.FIRST_COMPLETED)
        print(f"{60 * minutes - ends + loop.time():.0f} s: {seen.answered:,} answers; {_mark()}", flush=True)
    try:
        await moving
        await asking
        async with asyncio.timeout(PATIENCE):
            while len(pool.members) != len(members.alive):
                await pool._changed.wait()
    except TimeoutError:
        hung = True
    there = len(pool.members)
    await cancel_all(background)
    await pool.close()
    process.stdin.close()  # type: ignore[union-attr]
    await process.wait()
    _tell(seen, there, len(members.alive), "HUNG" if hung else "no hang")
    return not hung and seen.wrong == 0 and seen.asked == seen.answered and there == len(members.alive)


def _tell(seen: Seen, there: int, alive: int, end: str) -> None:
    print(f"{seen.kills} killed, {seen.leaves} told to leave, {seen.joins} joined; {there} of {alive} are there")
    print(f"{seen.asked:,} asked, {seen.answered:,} answered, {seen.wrong} wrong or twice; {end}")
    for name, values in (("timers late by", seen.late), ("of the loop's own work", seen.own)):
        ranks = np.percentile(values, [50, 99, 99.9, 100]) * 1000
        print(f"{name}, ms: median {ranks[0]:.1f}, p99 {ranks[1]:.1f}, p99.9 {ranks[2]:.1f}, most {ranks[3]:.1f}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; the exit code says whether all was well."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.joiners", description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="of coming and going (10)")
    parser.add_argument("--members", type=int, default=128, help="who are there at once (128)")
    parser.add_argument("--seed", type=int, default=0, help="of who comes and goes when (0)")
    parser.add_argument("--nursery", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.nursery is not None:
        nursery(options.nursery)
        return 0
    return 0 if asyncio.run(run(options.minutes, options.members, options.seed)) else 1


if __name__ == "__main__":
    sys.exit(main())
