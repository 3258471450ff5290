"""Calls into a child process, which answers them one at a time.

Flows in: method calls. Flows out: their results, or the errors of the code that ran. Who wakes whom: a call waits
until its worker is free and up; an answer, the death of the worker or the deadline wakes the caller; a worker that is
up again wakes the next call.

Foreign code cannot be interrupted, only ended. So a call that exceeds its deadline or is cancelled costs its worker
the process, which is replaced at once; calls that wait for their turn do not notice.

Calls are pickles. So are answers, unless the child runs code that is not ours: who sends a pickle runs code where it is
read. Such a child answers in JSON, and what it can do to us is to answer wrongly.
"""

from __future__ import annotations

import asyncio
import json
import pickle
import socket
from collections.abc import Mapping
from typing import Any, Literal

from rlinf.runtime.base.errors import RemoteError, RuntimeFault, UserError
from rlinf.runtime.processes.keeper import PAUSE, RESUME
from rlinf.runtime.processes.supervisor import Child, Process, TooLong, how_it_ended, receive, send

_LARGE = 1 << 20
"""Bytes from which an answer is read in a thread, so that the loop stays free."""
_MOST = 64 << 20
"""Bytes that an answer in JSON may have, since such a child may claim any number."""


class CallTimeout(RuntimeFault, TimeoutError):
    """A call exceeded its deadline; the process that ran it was killed."""


class Worker(Child):
    """A Python child that holds an object and answers calls of its methods, one at a time, in the order of calling.

        async with Worker("simulators:Cabinet", {"seed": 1}, name="env0") as env:
            observation = await env.call("reset", timeout=10)

    Args:
        target: "module:name" of what makes the object in the child: a class or function. If the object has a `close()`,
            it is called when the worker is stopped. If it has `pauses(tell)`, that is called first: with `tell(True)`
            in a call its deadline stands still until `tell(False)`, `start_deadline` seconds at most.
        kwargs: keyword arguments for it, which must pickle.
        name: what messages and logs call it.
        answers: "pickle", or "json" where the child runs code that is not ours: results are then plain data, and errors
            `RemoteError`.
        supervision: see `Child`; `start_deadline` includes making the object, and there is no `health`: calls have
            deadlines. A call that succeeds makes earlier deaths forgotten.
    """

    def __init__(
        self,
        target: str,
        kwargs: Mapping[str, Any] | None = None,
        *,
        name: str,
        answers: Literal["pickle", "json"] = "pickle",
        **supervision: Any,
    ):
        self._role = answers
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
            RemoteError: the answer cannot be read; or it is an error that cannot travel, with its traceback as a note.
            Exception: what the method raised, with its traceback as a note.
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
        try:
            kind, *rest = await self._read(reply)
        except Exception as error:
            raise RemoteError(f"the result of {self.name}.{method}() cannot be read here: {error}") from error
        if kind == "result":
            return rest[0]
        raise self._remote_error(method, *rest)

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
            async with asyncio.timeout(seconds) as limit:
                await send(life.channel, request)
                return await self._answer(life.channel, limit)
        except TimeoutError:
            self._replace(life)
            text = f"{self.name}.{method}() exceeded its {seconds:g} s; its process was killed and is being replaced"
            raise CallTimeout(text) from None
        except asyncio.CancelledError:
            self._replace(life)
            raise
        except TooLong as error:
            self._replace(life)
            raise RemoteError(f"the result of {self.name}.{method}() cannot be read here: {error}") from None
        except (EOFError, ConnectionError):
            if life is self._life:
                self._down()
            await asyncio.wait([life.exited], timeout=self._stop_deadline)
            self._replace(life)  # only what closed its channel and lives on is still there
            await asyncio.wait([life.exited])
            raise self._death(f"died in {method}(): it {how_it_ended(life)}", life) from None

    async def _answer(self, channel: socket.socket, limit: asyncio.Timeout) -> bytearray:
        """The answer to a call. While the child says that it pauses, its deadline stands still: for as long in all as
        it may take to start."""
        loop = asyncio.get_running_loop()
        spare, rest, since = self._start_deadline, None, 0.0
        while True:
            message = await receive(channel, _MOST if self._role == "json" else None)
            end = limit.when()
            if message == PAUSE and rest is None and end is not None:
                since = loop.time()
                rest = end - since
                limit.reschedule(since + spare)
            elif message == RESUME and rest is not None:
                spare -= loop.time() - since
                limit.reschedule(loop.time() + rest)
                rest = None
            elif message not in (PAUSE, RESUME):
                return message

    def _replace(self, life: Process) -> None:
        """Kill `life` and have the next one begin at once; that is no death to be counted."""
        if life is self._life and not life.exited.done():
            life.kill()
            self._ask(0.0)

    async def _read(self, reply: bytearray) -> Any:
        loads = _from_json if self._role == "json" else pickle.loads
        return loads(reply) if len(reply) < _LARGE else await asyncio.to_thread(loads, reply)

    def _remote_error(self, method: str, pickled: bytes | None, kind: str, text: str, trace: str) -> Exception:
        try:
            error = pickle.loads(pickled) if pickled is not None else None
        except Exception:  # a class whose pickle does not fit its constructor, or that we cannot import
            error = None
        if not isinstance(error, Exception):
            error = RemoteError(f"{kind}: {text}")
        error.add_note(f"raised in {self.name}.{method}(), process {self.pid}:\n{trace}")
        return error


def _from_json(reply: bytearray) -> tuple[Any, ...]:
    """An answer of a child that may send anything."""
    match json.loads(reply):
        case ["result", value]:
            return "result", value
        case ["error", None, str(kind), str(text), str(trace)]:
            return "error", None, kind, text, trace
    raise ValueError("it is neither a result nor an error")
