"""The far side of `supervisor.py`: the keeper of a child, and the child's own start when it is Python.

Flows in: a command line, and for Python children one pickled description over a socket. Flows out: the keeper's report
(`pid N`, `exit N`) and a worker's answers. Who wakes whom: the keeper sleeps until its child exits or its parent is
gone; a worker sleeps until the next call arrives.

The process tree is *parent → keeper → child*. The keeper exists because nothing else ends a whole tree when the parent
is killed with SIGKILL. PR_SET_PDEATHSIG alone does not: it follows the parent's *thread* and not its process, and
grandchildren do not inherit it. So the keeper, which has one thread, watches the parent itself (end of file on a
socket that only the parent holds, and a pidfd, which forked copies of that socket cannot fool), adopts orphaned
descendants as their subreaper, and kills all of them when the parent or the child is gone. Should the keeper itself be
killed, PR_SET_PDEATHSIG ends the child, and this time the thread that it follows lives exactly as long as the keeper.

This file is run by path and imports the standard library alone, so that a child starts fast and may belong to another
interpreter.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import signal
    import socket
    from collections.abc import Callable

if __name__ == "__main__" and sys.path[0] == os.path.dirname(os.path.abspath(__file__)):
    del sys.path[0]  # running a file by path puts its folder first, where our module names would hide the stdlib's


PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
HEADER = 8
"""Bytes of the big-endian length that goes before every message on a channel."""
_COPIED = 1 << 18
"""Bytes of a message that is sent together with its length: to copy so many takes less than another system call."""
PAUSE, RESUME = b"pause", b"resume"
"""Messages of a worker within a call: its deadline stands still, and runs on."""


# The keeper ------------------------------------------------------------------------------------------------------


def keep(parent: int, control: int, channel: int, argv: list[str]) -> None:
    """Run `argv` as a child and outlive it: report how it ended, and leave no descendant behind.

    Args:
        parent: process id that must still be our parent.
        control: descriptor of the socket whose other end only the parent holds.
        channel: descriptor that the child inherits and the keeper does not keep, or -1.
        argv: the child's command line.
    """
    import ctypes
    import select
    import signal

    prctl = ctypes.CDLL(None).prctl
    prctl.argtypes = [ctypes.c_int, *4 * [ctypes.c_ulong]]
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    os.set_inheritable(control, False)
    watched = [control]
    if hasattr(os, "pidfd_open"):
        try:
            watched.append(os.pidfd_open(parent))
        except ProcessLookupError:
            return
        except OSError:
            pass  # a kernel without pidfd still has the end of file on `control`
    if os.getppid() != parent:
        return

    woken, wake = os.pipe()
    os.set_blocking(woken, False)
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    terminating = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
    for number in (*terminating, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)  # SIGTERM to the group is meant for the child; the keeper sees it out

    signal.pthread_sigmask(
        signal.SIG_BLOCK, terminating
    )  # one that comes before exec must reach the child all the same
    keeper = os.getpid()
    child = os.fork()
    if child == 0:
        _become(argv, keeper, terminating, prctl)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, terminating)
    if channel >= 0:
        os.close(channel)  # so that its end of file tells that the child is gone
    os.write(control, b"pid %d\n" % child)

    status = None
    while status is None:
        ready, _, _ = select.select([*watched, woken], [], [])
        if ready != [woken]:
            break  # the parent never writes, so it is gone or wants everything gone
        os.read(woken, 4096)
        status = _reap(child)
    killed = _kill_descendants(child)
    status = killed if status is None else status
    try:
        os.write(control, b"exit %d\n" % os.waitstatus_to_exitcode(status or 0))
    except OSError:
        pass  # nobody is left to tell


def _become(argv: list[str], keeper: int, blocked: set[signal.Signals], prctl: Callable[..., int]) -> None:
    """Run in the fork of the keeper: turn into the child, with signals as a new process has them; never returns."""
    import signal

    try:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        for number in (*blocked, signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, blocked)
        if os.getppid() == keeper:
            os.execvp(argv[0], argv)
    except OSError as error:
        os.write(2, f"cannot run {argv[0]}: {error}\n".encode())
    finally:
        os._exit(127)  # a forked copy must not run the keeper's exit handlers


def _reap(child: int) -> int | None:
    """Bury every dead descendant; returns the wait status of `child` if it was among them."""
    status = None
    while True:
        try:
            pid, code = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return status
        if pid == 0:
            return status
        if pid == child:
            status = code


def _kill_descendants(child: int) -> int | None:
    """SIGKILL all descendants until none is left; returns the wait status of `child` if it died here."""
    import signal

    status = None
    while True:
        for pid in _descendants(os.getpid()):
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                pass  # gone already, or it changed its user: nothing that we could do
        try:
            pid, code = os.waitpid(-1, 0)  # a parent that died hands its children to us, so each round sees more
        except ChildProcessError:
            return status
        if pid == child:
            status = code
        more = _reap(child)
        status = status if more is None else more


def _descendants(root: int) -> list[int]:
    """Process ids of all that descend from `root`, whatever session or group they moved to."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat", "rb") as file:
                    parent = int(file.read().rpartition(b")")[2].split()[1])
            except OSError:
                continue
            children.setdefault(parent, []).append(int(entry))
    result = []
    todo = [root]
    while todo:
        below = children.get(todo.pop(), [])
        result += below
        todo += below
    return result


# Python children -------------------------------------------------------------------------------------------------


class Terminated(BaseException):
    """SIGTERM reached a worker; not an `Exception`, so that a handler's own `except` does not eat it."""


def call(descriptor: int) -> None:
    """Run the function that the parent names, then exit."""
    channel = _channel(descriptor)
    target, kwargs = _description(channel)
    channel.close()
    _resolve(target)(**kwargs)


def serve(descriptor: int, form: str) -> None:
    """Make the handler that the parent names and answer calls of its methods, one after the other.

    Args:
        descriptor: of the socket to the parent.
        form: of the answers, "pickle" or "json".
    """
    import signal

    def terminate(*_: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # closing is under way; SIGKILL comes if it takes too long
        raise Terminated

    channel = _channel(descriptor)
    target, kwargs = _description(channel)
    signal.signal(signal.SIGTERM, terminate)
    handler = None
    try:
        handler = _resolve(target)(**kwargs)
        if (pauses := getattr(handler, "pauses", None)) is not None:
            pauses(lambda paused: _send(channel, PAUSE if paused else RESUME))
        _send(channel, b"ready")
        while True:
            _send(channel, _answer(handler, _receive(channel), form))
    except (Terminated, EOFError, ConnectionError):
        pass
    finally:
        close = getattr(handler, "close", None)
        if close is not None:
            close()


def _answer(handler: Any, request: bytearray, form: str) -> bytes:
    """Run one call; returns ("result", value) or ("error", pickled exception, type name, text, traceback)."""
    import pickle

    method = "?"
    try:
        method, args, kwargs = pickle.loads(request)
        value = getattr(handler, method)(*args, **kwargs)
    except Terminated:
        raise
    except BaseException as error:  # also SystemExit: foreign code that calls exit() is an error of its call alone
        return _failure(error, form)
    try:
        return _encoded(("result", value), form)
    except Exception as error:
        text = f"the result of {method}(), a {type(value).__name__}, cannot be sent as {form}: {error}"
        return _failure(TypeError(text).with_traceback(error.__traceback__), form)


def _failure(error: BaseException, form: str) -> bytes:
    import pickle
    import traceback

    pickled = None
    # StopIteration and those that are no Exception would end the parent's coroutine
    if form == "pickle" and isinstance(error, Exception) and not isinstance(error, StopIteration):
        try:
            pickled = pickle.dumps(error)
        except Exception:
            pass  # the parent raises a stand-in that has the same text
    return _encoded(("error", pickled, type(error).__name__, str(error), traceback.format_exc()), form)


def _encoded(answer: tuple[Any, ...], form: str) -> bytes:
    if form == "json":
        import json

        return json.dumps(answer).encode()
    import pickle

    return pickle.dumps(answer, protocol=pickle.HIGHEST_PROTOCOL)


def _resolve(target: str) -> Callable[..., Any]:
    """The object that "module:name" or "module:Class.method" means."""
    import importlib

    module, _, name = target.partition(":")
    value: Any = importlib.import_module(module)
    for part in name.split("."):
        value = getattr(value, part)
    return value  # type: ignore[no-any-return]


def _channel(descriptor: int) -> socket.socket:
    import socket

    os.set_inheritable(descriptor, False)  # a grandchild that held it would hide the end of file
    return socket.socket(fileno=descriptor)


def _description(channel: socket.socket) -> tuple[str, dict[str, Any]]:
    import pickle

    path, target, kwargs = pickle.loads(_receive(channel))
    if path is not None:
        sys.path[:] = path
    return target, pickle.loads(kwargs)  # apart, because it may need modules that only `path` finds


def _send(channel: socket.socket, message: bytes) -> None:
    for part in framed(message):
        channel.sendall(part)


def framed(message: bytes) -> tuple[bytes, ...]:
    """A message behind its length, as parts to be sent one after the other: one, unless it is too large to copy.

    The first part wakes who reads, which on a busy core takes the place of who sends: in two parts, a short message
    cost two more switches between them.
    """
    length = len(message).to_bytes(HEADER, "big")
    return (length + message,) if len(message) < _COPIED else (length, message)


def _receive(channel: socket.socket) -> bytearray:
    return _exactly(channel, int.from_bytes(_exactly(channel, HEADER), "big"))


def _exactly(channel: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        count = channel.recv_into(view)
        if count == 0:
            raise EOFError("the parent closed the channel")
        view = view[count:]
    return data


if __name__ == "__main__":
    role, *rest = sys.argv[1:]
    if role == "keep":
        keep(int(rest[0]), int(rest[1]), int(rest[2]), rest[3:])
    elif role == "call":
        call(int(rest[0]))
    else:
        serve(int(rest[0]), role)
