"""Supervised child processes: inference servers, simulators, reward functions; all that may crash or hang.

Flows in: a command line, or a Python function by its dotted path; calls of a worker's methods. Flows out: a process
that is up, or `ChildDied` with its exit status and last words; results of calls, or the errors of the code that ran.
Who wakes whom: the end of a process (end of file on its keeper's socket), a health answer that did not come and
`restart()` each wake the child's one task, which ends that life, waits out the back-off and starts the next; whoever
awaits `ready()` wakes when a life is up, and `failed()` when there will be none. A call waits until its worker is free
and up; an answer, the death of the worker or the deadline wakes the caller.

Children end with this process even if it is killed with SIGKILL, and so do all their descendants: each runs under a
small keeper process; `keeper.py` tells how and why. They are no sandboxes: a child may do what its user may. Nothing
here forks, so threads of torch are safe.

Foreign code cannot be interrupted, only ended. So a call that exceeds its deadline or is cancelled costs its worker
the process, which is replaced at once; calls that wait for their turn do not notice. Calls are pickles. So are answers,
unless the child runs code that is not ours: who sends a pickle runs code where it is read. Such a child answers in
JSON, and what it can do to us is to answer wrongly.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import pickle
import random
import shlex
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from rlinf.runtime.base.errors import RemoteError, RuntimeFault, UserError
from rlinf.runtime.processes import keeper

logger = logging.getLogger(__name__)

CHANNEL = "{channel}"
"""Word of a command line that stands for the descriptor of the child's channel."""

_KILL_DEADLINE = 10.0
"""Seconds that the kernel gets to end processes after SIGKILL; longer means that they hang in a driver."""

_LONGEST_LINE = 8192
"""Bytes of one line that are kept, so that a child that prints no newline cannot fill our memory."""


class TooLong(Exception):
    """A child announced a message that is longer than any that it should send."""


class Process:
    """One life of a child: its keeper, its output and its end. Made and owned by `Child`; needs a running loop.

    Args:
        argv: command line.
        channel: whether the child gets a socket to us, whose descriptor replaces the word `CHANNEL` in `argv`.
        env: its whole environment.
        cwd: its working directory, or None for ours.
        log: file to append its output to, or None to keep the last lines in memory.
        lines: how many lines to keep.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        channel: bool,
        env: Mapping[str, str],
        cwd: Path | str | None,
        log: Path | None,
        lines: int,
    ):
        self._loop = asyncio.get_running_loop()
        self.started: asyncio.Future[int] = self._loop.create_future()
        self.exited: asyncio.Future[int] = self._loop.create_future()
        self.channel: socket.socket | None = None
        self._lines: deque[str] = deque(maxlen=lines)
        self._partial = b""
        self._report = b""
        self._log = log
        self._log_start = log.stat().st_size if log is not None and log.exists() else 0
        with contextlib.ExitStack() as theirs:  # closes the child's ends on our side
            self._control, control = socket.socketpair()
            passed = [theirs.enter_context(control).fileno()]
            if channel:
                self.channel, end = socket.socketpair()
                passed.append(theirs.enter_context(end).fileno())
                self.channel.setblocking(False)
            if log is None:
                self._output, stdout = os.pipe()
                theirs.callback(os.close, stdout)
            else:
                self._output, stdout = -1, theirs.enter_context(log.open("ab")).fileno()
            words = [str(passed[-1]) if word == CHANNEL else word for word in argv]
            keeping = [sys.executable, "-I", "-S", keeper.__file__, "keep", str(os.getpid()), str(passed[0])]
            try:
                self._popen = subprocess.Popen(
                    [*keeping, str(passed[1] if channel else -1), *words],
                    stdin=subprocess.DEVNULL,
                    stdout=stdout,
                    stderr=subprocess.STDOUT,
                    pass_fds=passed,
                    env=dict(env),
                    cwd=cwd,
                    start_new_session=True,  # a group of its own: signals reach all of it, and Ctrl-C none of it
                )
            except BaseException:
                self._close_descriptors()
                raise
        self._control.setblocking(False)
        self._loop.add_reader(self._control, self._on_control)
        if log is None:
            os.set_blocking(self._output, False)
            self._loop.add_reader(self._output, self._on_output)

    @property
    def output(self) -> tuple[str, ...]:
        """The last lines that this life printed, oldest first."""
        if self._log is None:
            return (*self._lines, self._partial.decode(errors="replace")) if self._partial else tuple(self._lines)
        with self._log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(self._log_start, size - 4 * _LONGEST_LINE))
            return tuple(deque(file.read().decode(errors="replace").splitlines(), self._lines.maxlen))

    async def end(self, grace: float = 0.0) -> None:
        """End the child and all its descendants: SIGTERM if there is `grace` (seconds), then SIGKILL."""
        try:
            if grace > 0 and not self.exited.done():
                self._signal(signal.SIGTERM)
                await asyncio.wait([self.exited], timeout=grace)
            self.kill()
            await asyncio.wait([self.exited], timeout=_KILL_DEADLINE)
            if not self.exited.done():
                logger.error("process %s does not end %g s after SIGKILL; left behind", self._popen.pid, _KILL_DEADLINE)
                self._signal(signal.SIGKILL)
            else:
                await asyncio.to_thread(self._popen.wait)  # buries the keeper, which has just closed its last socket
        finally:
            self._close_descriptors()

    def kill(self) -> None:
        """Have the keeper SIGKILL everything, now; who reads the channel sees its end."""
        for end, how in ((self._control, socket.SHUT_WR), (self.channel, socket.SHUT_RDWR)):
            with contextlib.suppress(OSError):
                if end is not None:
                    end.shutdown(how)

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._popen.pid, number)  # not buried yet, so the id cannot belong to anybody else

    def _on_control(self) -> None:
        try:
            data = self._control.recv(4096)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        self._report += data
        facts = dict(line.split() for line in self._report.decode().splitlines(keepends=True) if line.endswith("\n"))
        if "pid" in facts and not self.started.done():
            self.started.set_result(int(facts["pid"]))
        if data:
            return
        self._loop.remove_reader(self._control)
        self.kill()
        if "exit" not in facts:
            self._signal(signal.SIGKILL)  # the keeper was killed: nobody else ends what it left
        if self._output >= 0:
            self._on_output()
        self.exited.set_result(int(facts.get("exit", -signal.SIGKILL)))

    def _on_output(self) -> None:
        while True:
            try:
                data = os.read(self._output, 1 << 16)
            except BlockingIOError:
                return
            if not data:
                self._loop.remove_reader(self._output)
                return
            *lines, rest = (self._partial + data).split(b"\n")
            self._lines.extend(line[:_LONGEST_LINE].decode(errors="replace") for line in lines)
            self._partial = rest[:_LONGEST_LINE]
            if len(data) < 1 << 16:
                return

    def _close_descriptors(self) -> None:
        self._loop.remove_reader(self._control)
        self._control.close()
        if self.channel is not None:
            self.channel.close()
        if self._output >= 0:
            self._loop.remove_reader(self._output)
            os.close(self._output)
            self._output = -1


async def send(channel: socket.socket, message: bytes) -> None:
    """Send one length-prefixed message to a Python child."""
    for part in keeper.framed(message):
        await asyncio.get_running_loop().sock_sendall(channel, part)


async def receive(channel: socket.socket, most: int | None = None) -> bytearray:
    """Receive one message from a Python child.

    Raises:
        EOFError: its end is closed.
        TooLong: the message has more than `most` bytes.
    """
    loop = asyncio.get_running_loop()
    size = int.from_bytes(await _exactly(loop, channel, keeper.HEADER), "big")
    if most is not None and size > most:
        raise TooLong(f"a message of {size} bytes, where at most {most} are taken")
    return await _exactly(loop, channel, size)


async def _exactly(loop: asyncio.AbstractEventLoop, channel: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        count = await loop.sock_recv_into(channel, view)
        if count == 0:
            raise EOFError("the child closed its channel")
        view = view[count:]
    return data


_SHORTEST_PAUSE = 0.05
"""Seconds before a child that is not healthy yet is asked again; doubles up to `health_interval`."""


class ChildDied(RuntimeFault):
    """A child process is gone, and with it whatever it was doing.

    Attributes:
        returncode: exit status; minus the signal's number if one killed it; None if it never ran.
        output: the last lines that it printed, oldest first.
    """

    returncode: int | None = None
    output: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Supervision:
    """How long a child may take for what, and what becomes of one that has died."""

    start_deadline: float = 60.0
    """Seconds from the start until it must be healthy."""
    health_interval: float = 5.0
    """Seconds from a healthy answer to the next question."""
    health_deadline: float = 30.0
    """Seconds until a question must have been answered with True; else the child is killed as hung."""
    max_restarts: int = 3
    """Deaths in a row that are followed by a restart."""
    backoff: tuple[float, float, float] = (0.5, 2.0, 30.0)
    """Seconds before the first restart, factor for each further one, most seconds."""
    reset_after: float = 60.0
    """Seconds up after which earlier deaths are forgotten."""
    stop_deadline: float = 5.0
    """Seconds from SIGTERM to SIGKILL when it is stopped."""
    log: Path | str | None = None
    """File to append its output to; None keeps the last `lines` in memory."""
    lines: int = 40
    """Lines of output that `ChildDied` carries."""


class Child:
    """A process that is kept running: started, checked, restarted, and ended with us.

        async with Child(["python", "-m", "http.server", "8000"], name="files", health=answers) as child:
            await use("http://127.0.0.1:8000")

    Args:
        command: a command line; or "module:function", run in a fresh interpreter that has our `sys.path`.
        kwargs: arguments of that function, which must pickle.
        name: what messages and logs call it.
        env: variables to add to our environment, or to remove if None (a server may have to forget torchrun's RANK).
        cwd: its working directory; ours if None.
        python: interpreter for "module:function"; another one than ours uses its own `sys.path`.
        health: awaited as `health(child)`; True is healthy, and False, or an exception, is asked again until the
            deadline. It may as well wait until it can tell. None: a child that runs is healthy.
        on_restart: awaited as `on_restart(child)` whenever a new life is up; if it raises, that life is ended too.
        supervision: see `Supervision`.
    """

    _role: str = "call"

    def __init__(
        self,
        command: Sequence[str] | str,
        kwargs: Mapping[str, Any] | None = None,
        *,
        name: str,
        env: Mapping[str, str | None] | None = None,
        cwd: Path | str | None = None,
        python: str = sys.executable,
        health: Callable[[Any], Awaitable[bool]] | None = None,
        on_restart: Callable[[Any], Awaitable[None]] | None = None,
        **supervision: Any,
    ):
        self.name = name
        self.restarts = 0
        self._target = command if isinstance(command, str) else None
        if self._target is None:
            self._argv = [str(word) for word in command]
        else:
            self._argv = [python, keeper.__file__, self._role, CHANNEL]
            try:
                description = pickle.dumps(dict(kwargs or {}))
            except Exception as error:
                raise UserError(f"arguments of child {name!r} ({command}) cannot be pickled: {error}") from error
            path = [os.path.abspath(entry) for entry in sys.path] if python == sys.executable else None
            self._description = pickle.dumps((path, command, description))
        self._env = env or {}
        self._cwd = cwd
        self._health = health
        self._on_restart = on_restart
        self._rules = Supervision(**supervision)
        self._failures = 0
        self._up_since: float | None = None
        self._life: Process | None = None
        self._stopping = False
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the child and wait until it is healthy.

        Raises:
            ChildDied: it ended, or was not healthy in time. The first life is not retried: what never ran needs a
                person, not patience.
        """
        if self._task is not None:
            raise UserError(f"child {self.name!r} was started before; make a new Child to run it again")
        loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[Process] = loop.create_future()
        self._failed: asyncio.Future[None] = loop.create_future()
        self._asked: asyncio.Future[float] = loop.create_future()
        self._ended: asyncio.Future[None] = loop.create_future()
        self._ended.set_result(None)
        self._task = asyncio.create_task(self._supervise(), name=f"child {self.name}")
        try:
            await self.ready()
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """End the child and its descendants: SIGTERM, and SIGKILL after `stop_deadline`. May be called repeatedly."""
        if self._task is None:
            return
        self._stopping = True
        self._ask(self._rules.stop_deadline)
        await asyncio.wait([self._task])
        if not self._failed.done():
            self._down()
            self._failed.set_result(None)
            self._ready.set_exception(ChildDied(f"child {self.name!r} was stopped"))
            self._ready.exception()  # marks it as seen: nobody has to be waiting

    async def restart(self) -> None:
        """End the present life as `stop` does, begin the next at once, and wait until it is healthy.

        Raises:
            ChildDied: there will be no next life.
        """
        self._check_started()
        self._ask(self._rules.stop_deadline)
        await self.ready()

    async def ready(self) -> None:
        """Wait until the child is up. Raises `ChildDied` if it will not be."""
        self._check_started()
        await asyncio.shield(self._ready)

    async def ended(self) -> None:
        """Wait until the present life is over, which returns at once between lives; `ready` is then about the next."""
        self._check_started()
        await asyncio.shield(self._ended)

    async def after_fault(self, pause: float | None = None) -> None:
        """Wait until it is up after what may be its death: until its next life, if this one ends within `pause`
        seconds; otherwise it lives. Raises `ChildDied` if it will not be up."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.ended(), pause)
        await self.ready()

    async def failed(self) -> None:
        """Wait until the child is given up, then raise `ChildDied`; returns if it is stopped before."""
        self._check_started()
        await asyncio.shield(self._failed)

    @property
    def pid(self) -> int | None:
        """Process id of the present life, or None between lives."""
        life = self._life
        return life.started.result() if life and life.started.done() and not life.exited.done() else None

    @property
    def up(self) -> bool:
        """True if a life is up and healthy at this moment."""
        return self._task is not None and self._ready.done() and self._ready.exception() is None

    @property
    def output(self) -> tuple[str, ...]:
        """The last lines of output of the present life, oldest first."""
        return self._life.output if self._life is not None else ()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def _check_started(self) -> None:
        if self._task is None:
            raise UserError(f"child {self.name!r} was not started; await its start() or enter it with `async with`")

    # The one task ------------------------------------------------------------------------------------------------

    async def _supervise(self) -> None:
        """Begin lives until told to stop or none is worth a try. Unblocked by: a death, `restart`, `stop`."""
        try:
            while not self._stopping:
                died = await self._live()
                if died is not None and not self._stopping:
                    if self._up_since is None and self.restarts == 0:
                        return self._give_up(died, "it was never up")
                    if self._failures >= self._rules.max_restarts:
                        return self._give_up(died, f"it died {self._failures + 1} times in a row")
                    first, factor, most = self._rules.backoff
                    delay = min(most, first * factor**self._failures)
                    self._failures += 1
                    logger.warning("%s\nrestart %d in %g s", died, self.restarts + 1, delay)
                    await asyncio.wait([self._asked], timeout=delay)
                self.restarts += 1
        except Exception as error:
            self._give_up(self._death(f"cannot be run: {error}"), "it could not be started", error)

    async def _live(self) -> ChildDied | None:
        """One life from start to end; returns why it ended, or None if a restart was asked for."""
        loop = asyncio.get_running_loop()
        self._asked = loop.create_future()
        changed = {**os.environ, **self._env}
        env = {key: value for key, value in changed.items() if value is not None}
        log = Path(self._rules.log) if self._rules.log is not None else None
        channel = self._target is not None
        self._life = life = Process(
            self._argv, channel=channel, env=env, cwd=self._cwd, log=log, lines=self._rules.lines
        )
        self._up_since, self._ended = None, loop.create_future()
        attend = asyncio.create_task(self._attend(life), name=f"health of {self.name}")
        grace = self._rules.stop_deadline
        alone = False
        try:
            endings: list[asyncio.Future[Any]] = [attend, life.exited, self._asked]
            await asyncio.wait(endings, return_when=asyncio.FIRST_COMPLETED)
            grace = self._asked.result() if self._asked.done() else 0.0
            alone = life.exited.done()
        finally:
            attend.cancel()
            self._down()
            await asyncio.wait([attend])
            try:
                await life.end(grace)
            finally:
                self._ended.set_result(None)
        wrong = None if attend.cancelled() else attend.exception()
        if self._up_since is not None and loop.time() - self._up_since >= self._rules.reset_after:
            self._failures = 0
        if self._asked.done():
            return None
        died = self._death(how_it_ended(life) if alone else f"was killed: {wrong}", life)
        died.__cause__ = None if isinstance(wrong, RuntimeFault) else wrong
        return died

    async def _attend(self, life: Process) -> None:
        """See a life up, then keep asking for its health. Raises when it is to be killed."""
        async with _deadline(self._rules.start_deadline, "it was not healthy {} after its start") as reason:
            await self._greet(life)
            await self._until_healthy(reason)
        self._up_since = asyncio.get_running_loop().time()
        self._ready.set_result(life)
        if self.restarts and self._on_restart is not None:
            await self._on_restart(self)
        while self._health is not None:
            await asyncio.sleep(self._rules.health_interval)
            async with _deadline(self._rules.health_deadline, "it hung: no healthy answer within {}") as reason:
                await self._until_healthy(reason)
        await asyncio.wait([life.exited])

    async def _greet(self, life: Process) -> None:
        """Wait for the process, and tell a Python child what to run."""
        await asyncio.wait([life.started, life.exited], return_when=asyncio.FIRST_COMPLETED)
        if life.channel is not None:
            try:
                await send(life.channel, self._description)
            except ConnectionError:
                await asyncio.wait([life.exited])  # the exit status says more

    async def _until_healthy(self, reason: list[str]) -> None:
        pause = _SHORTEST_PAUSE
        while self._health is not None:
            try:
                if await self._health(self):
                    return
            except Exception as error:  # a server that is not up yet refuses connections, and that is an answer
                reason[:] = [f"health check: {type(error).__name__}: {error}"]
            await asyncio.sleep(pause)
            pause = min(2 * pause, self._rules.health_interval)

    def _ask(self, grace: float) -> None:
        """Have the present life replaced, without counting it as a death; `grace`: seconds between the signals."""
        if not self._asked.done() and not self._failed.done():
            self._asked.set_result(grace)
            self._down()

    def _down(self) -> None:
        """From now on `ready` waits for the next life."""
        if self._ready.done() and not self._failed.done():
            self._ready = asyncio.get_running_loop().create_future()

    def _death(self, what: str, life: Process | None = None) -> ChildDied:
        command = self._target or shlex.join(self._argv)
        text = f"child {self.name!r} {what}\n  command: {command}"
        if life is not None and life.output:
            text += "\n  last output:\n" + "\n".join(f"    {line}" for line in life.output)
        died = ChildDied(text)
        if life is not None:
            died.returncode = life.exited.result() if life.exited.done() else None
            died.output = life.output
        return died

    def _give_up(self, died: ChildDied, why: str, cause: Exception | None = None) -> None:
        died.add_note(f"child {self.name!r} is not restarted: {why}")
        died.__cause__ = cause
        self._down()
        for future in (self._failed, self._ready):
            future.set_exception(died)
            future.exception()  # marks it as seen: nobody has to be waiting


def how_it_ended(life: Process) -> str:
    code = life.exited.result()
    if code >= 0:
        return f"exited with status {code}"
    if code == -signal.SIGKILL:
        return "was killed by SIGKILL, which the kernel's OOM killer sends where memory runs out (see dmesg)"
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"


@contextlib.asynccontextmanager
async def _deadline(seconds: float, text: str) -> AsyncIterator[list[str]]:
    """Raise `RuntimeFault(text)` when time is up; yields a list for what was seen last."""
    reason: list[str] = []
    try:
        async with asyncio.timeout(seconds):
            yield reason
    except TimeoutError:
        raise RuntimeFault("; ".join([text.format(f"{seconds:g} s"), *reason])) from None


def free_address(*, hidden: bool = True) -> tuple[str, int]:
    """A port of this machine that nobody else can reach, at an address that scans of 127.0.0.1 do not find if it is to
    be hidden."""
    draw = random.SystemRandom()
    host = f"127.{draw.randrange(1, 255)}.{draw.randrange(256)}.{draw.randrange(1, 255)}"
    for address in (host, "127.0.0.1") if hidden else ("127.0.0.1",):  # some systems have the latter alone
        with socket.socket() as probe:
            try:
                probe.bind((address, 0))
            except OSError:
                continue
            return address, int(probe.getsockname()[1])
    raise OSError("no port is free on 127.0.0.1")


# Calls into a child -----------------------------------------------------------------------------------------------

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
            await asyncio.wait([life.exited], timeout=self._rules.stop_deadline)
            self._replace(life)  # only what closed its channel and lives on is still there
            await asyncio.wait([life.exited])
            raise self._death(f"died in {method}(): it {how_it_ended(life)}", life) from None

    async def _answer(self, channel: socket.socket, limit: asyncio.Timeout) -> bytearray:
        """The answer to a call. While the child says that it pauses, its deadline stands still: for as long in all as
        it may take to start."""
        loop = asyncio.get_running_loop()
        spare, rest, since = self._rules.start_deadline, None, 0.0
        while True:
            message = await receive(channel, _MOST if self._role == "json" else None)
            end = limit.when()
            if message == keeper.PAUSE and rest is None and end is not None:
                since = loop.time()
                rest = end - since
                limit.reschedule(since + spare)
            elif message == keeper.RESUME and rest is not None:
                spare -= loop.time() - since
                limit.reschedule(loop.time() + rest)
                rest = None
            elif message not in (keeper.PAUSE, keeper.RESUME):
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
