"""Calls into child processes: `Worker` answers them one at a time, `WorkerPool` spreads them over several.

Flows in: method calls. Flows out: their results, or the errors of the code that ran. Who wakes whom: a call waits
until its worker is free and up; an answer, the death of the worker or the deadline wakes the caller; a worker that is
up again wakes the next call.

Foreign code cannot be interrupted, only ended. So a call that exceeds its deadline or is cancelled costs its worker
the process, which is replaced at once; calls that wait for their turn do not notice.

Messages are pickles in both directions: a child is as trusted as we are. Code that nobody vouches for belongs into a
process below the child.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Mapping
from typing import Any, Self

from rlinf.runtime.base.errors import RemoteError, RuntimeFault, UserError

from .process import Process, receive, send
from .supervisor import Child, ChildDied, how_it_ended

_LARGE = 1 << 20
"""Bytes from which an answer is unpickled in a thread, so that the loop stays free."""


class CallTimeout(RuntimeFault, TimeoutError):
    """A call exceeded its deadline; the process that ran it was killed."""


class Worker(Child):
    """A Python child that holds an object and answers calls of its methods, one at a time, in the order of calling.

        async with Worker("simulators:Cabinet", {"seed": 1}, name="env0") as env:
            observation = await env.call("reset", timeout=10)

    Args:
        target: "module:name" of what makes the object in the child: a class or function. If the object has a `close()`,
            it is called when the worker is stopped.
        kwargs: keyword arguments for it, which must pickle.
        name: what messages and logs call it.
        supervision: see `Child`; `start_deadline` includes making the object, and there is no `health`: calls have
            deadlines. A call that succeeds makes earlier deaths forgotten.
    """

    _role = "serve"

    def __init__(self, target: str, kwargs: Mapping[str, Any] | None = None, *, name: str, **supervision: Any):
        if "health" in supervision:
            raise UserError(f"worker {name!r} takes no health check: it cannot answer one while it computes")
        super().__init__(target, kwargs, name=name, **supervision)
        self._turn = asyncio.Lock()

    async def call(self, method: str, *args: Any, timeout: float | None = None, **kwargs: Any) -> Any:  # noqa: ASYNC109
        """Call a method of the object in the child. Cancelling a call that runs replaces the process.

        Args:
            method: its name; "__call__" if the object is a function.
            args, kwargs: its arguments, which must pickle.
            timeout: seconds from when the worker turns to this call; None for no limit.

        Raises:
            CallTimeout: the deadline passed.
            ChildDied: the process ended while it ran this call, or will not be started again.
            Exception: what the method raised, with its traceback as a note; `RemoteError` if that cannot be pickled.
        """
        self._check_started()
        try:
            request = pickle.dumps((method, args, kwargs), protocol=pickle.HIGHEST_PROTOCOL)
        except Exception as error:
            raise TypeError(f"arguments of {self.name}.{method}() cannot be pickled: {error}") from error
        async with self._turn:
            life = await asyncio.shield(self._ready)
            reply = await self._ask_child(life, method, request, timeout)
        self._failures = 0
        answer = await self._unpickle(reply, method)
        if answer[0] == "result":
            return answer[1]
        raise self._remote_error(method, *answer[1:])

    async def _greet(self, life: Process) -> None:
        await super()._greet(life)
        assert life.channel is not None
        try:
            await receive(life.channel)  # "ready"
        except (EOFError, ConnectionError):
            await asyncio.wait([life.exited])  # the exit status says more

    async def _ask_child(self, life: Process, method: str, request: bytes, seconds: float | None) -> bytearray:
        assert life.channel is not None
        try:
            async with asyncio.timeout(seconds):
                await send(life.channel, request)
                return await receive(life.channel)
        except TimeoutError:
            self._replace(life)
            text = f"{self.name}.{method}() exceeded its {seconds:g} s; its process was killed and is being replaced"
            raise CallTimeout(text) from None
        except asyncio.CancelledError:
            self._replace(life)
            raise
        except (EOFError, ConnectionError):
            if life is self._life:
                self._down()
            await asyncio.wait([life.exited], timeout=self._stop_deadline)
            self._replace(life)  # only what closed its channel and lives on is still there
            await asyncio.wait([life.exited])
            raise self._death(f"died in {method}(): it {how_it_ended(life)}", life) from None

    def _replace(self, life: Process) -> None:
        """Kill `life` and have the next one begin at once; that is no death to be counted."""
        if life is self._life and not life.exited.done():
            life.kill()
            self._ask(0.0)

    async def _unpickle(self, reply: bytearray, method: str) -> Any:
        try:
            if len(reply) < _LARGE:
                return pickle.loads(reply)
            return await asyncio.to_thread(pickle.loads, reply)
        except Exception as error:
            raise RemoteError(f"the result of {self.name}.{method}() cannot be unpickled here: {error}") from error

    def _remote_error(self, method: str, pickled: bytes | None, kind: str, text: str, trace: str) -> Exception:
        try:
            error = pickle.loads(pickled) if pickled is not None else None
        except Exception:  # a class whose pickle does not fit its constructor, or that we cannot import
            error = None
        if not isinstance(error, Exception):
            error = RemoteError(f"{kind}: {text}")
        error.add_note(f"raised in {self.name}.{method}(), process {self.pid}:\n{trace}")
        return error


class WorkerPool:
    """Equal workers that take calls as they become free.

        async with WorkerPool(4, "rlinf.rewards.code:Runner", name="reward", timeout=5) as pool:
            scores = await asyncio.gather(*(pool.call("score", sample) for sample in samples))

    Args:
        size: number of processes.
        target, kwargs: as for `Worker`.
        name: workers are called name.0, name.1, …
        retries: how often a call is given to another worker after the one that ran it crashed.
        timeout: seconds for calls that name none; None for no limit.
        supervision: see `Worker`.
    """

    def __init__(
        self,
        size: int,
        target: str,
        kwargs: Mapping[str, Any] | None = None,
        *,
        name: str,
        retries: int = 1,
        timeout: float | None = None,
        **supervision: Any,
    ):
        if size < 1:
            raise UserError(f"pool {name!r} needs at least one worker, not {size}")
        self.name = name
        self._retries = retries
        self._timeout = timeout
        supervision["on_restart"] = self._back_up
        self.workers = tuple(Worker(target, kwargs, name=f"{name}.{i}", **supervision) for i in range(size))
        self._free: asyncio.Queue[Worker | ChildDied] = asyncio.Queue()
        self._recovering: set[Worker] = set()
        self._lost: set[Worker] = set()
        self._watchers: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Start all workers. Raises the `ChildDied` of the first that cannot be, after stopping the others."""
        try:
            async with asyncio.TaskGroup() as group:
                for worker in self.workers:
                    group.create_task(worker.start())
        except* ChildDied as several:
            await self.stop()
            raise several.exceptions[0] from None
        for worker in self.workers:
            self._free.put_nowait(worker)
            self._watchers.append(asyncio.create_task(self._watch(worker), name=f"watch of {worker.name}"))

    async def stop(self) -> None:
        """Stop all workers; calls that run or wait raise `ChildDied`."""
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*(worker.stop() for worker in self.workers))
        self._free.put_nowait(ChildDied(f"pool {self.name!r} was stopped"))

    async def call(self, method: str, *args: Any, timeout: float | None = None, **kwargs: Any) -> Any:  # noqa: ASYNC109
        """Have the next free worker run a method; see `Worker.call`.

        Args:
            method: its name.
            args, kwargs: its arguments, which must pickle.
            timeout: seconds for each attempt, from when a worker takes it; None for the pool's.

        Raises:
            CallTimeout: the deadline passed; such a call is not tried again.
            ChildDied: it crashed `retries + 1` workers, or no worker is left.
        """
        limit = self._timeout if timeout is None else timeout
        attempt = 0
        while True:
            worker = await self._take()
            try:
                return await worker.call(method, *args, timeout=limit, **kwargs)
            except ChildDied as died:
                if attempt == self._retries:
                    died.add_note(f"pool {self.name!r} gave this call to {attempt + 1} workers, and each died")
                    raise
                attempt += 1
            finally:
                self._give_back(worker)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def _take(self) -> Worker:
        """The next worker that is up. Unblocked by: a call that ended, a worker that is up again."""
        while True:
            item = await self._free.get()
            if isinstance(item, ChildDied):
                self._free.put_nowait(item)  # for all others who wait
                raise item
            if item.up:
                return item
            self._give_back(item)

    def _give_back(self, worker: Worker) -> None:
        if worker.up:
            self._free.put_nowait(worker)
        elif worker not in self._lost:
            self._recovering.add(worker)

    async def _back_up(self, worker: Worker) -> None:
        if worker in self._recovering:
            self._recovering.discard(worker)
            self._free.put_nowait(worker)

    async def _watch(self, worker: Worker) -> None:
        """Wait until a worker is given up. Unblocks everybody when it was the last one."""
        try:
            await worker.failed()
        except ChildDied as died:
            self._lost.add(worker)
            self._recovering.discard(worker)
            if len(self._lost) == len(self.workers):
                self._free.put_nowait(died)
