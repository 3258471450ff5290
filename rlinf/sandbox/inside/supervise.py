"""One run of one program: walls built, output collected, limits watched, everything killed at the end.

In: a request over a socket. Out: one answer over it. Who wakes whom: the supervisor sleeps until the program prints or
ends, whoever asked hangs up, or it is time to look at what the program uses.

Four processes: *supervisor → holder → first → program*. The holder makes the namespaces, in which the supervisor writes
the maps of users; it lives as long as the supervisor, so that the number of the first process stays taken. The first
process of the namespace buries orphans; with its end the kernel kills whatever else is in it. Where there are no
namespaces (`weak`), the supervisor starts the program itself and adopts its orphans.

What processes use: read from /proc, whose descriptor is all that the supervisor has of the machine's files.
"""

from __future__ import annotations

import os
import pickle
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
from dataclasses import dataclass, field
from typing import Any, NoReturn

from rlinf.sandbox.inside import confine, program

_CHUNK = 1 << 16
_TICKS, _PAGE = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")


def used(proc: int, root: int, ours: int) -> tuple[float, int]:
    """Processor time in seconds, and resident memory in bytes, of a process and all below it.

    Args:
        proc: a descriptor of /proc.
        root: the process.
        ours: how many of the first ones do not count for memory.
    """
    clock, memory = 0.0, 0
    for place, pid in enumerate(tree(proc, root)):
        fields = _stat(proc, pid)
        if fields is not None:
            clock += sum(int(text) for text in fields[11:15]) / _TICKS  # its own, and of its dead children
            memory += int(fields[21]) * _PAGE if place >= ours else 0
    return clock, memory


def tree(proc: int, root: int) -> list[int]:
    """`root` and the processes below it, parents before their children."""
    pids, todo = [], [root]
    while todo:
        pid = todo.pop()
        pids.append(pid)
        text = _text(proc, f"{pid}/task")
        for thread in text.split():
            todo += [int(child) for child in _text(proc, f"{pid}/task/{thread}/children").split()]
    return pids


def _text(proc: int, path: str) -> str:
    """The content of a file below /proc, or the names in a directory; empty if it is gone."""
    try:
        descriptor = os.open(path, os.O_RDONLY, dir_fd=proc)
    except OSError:
        return ""
    try:
        if path.endswith("/task"):
            return " ".join(os.listdir(descriptor))
        return os.read(descriptor, _CHUNK).decode(errors="replace")
    except OSError:
        return ""
    finally:
        os.close(descriptor)


def _stat(proc: int, pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat after the name, the third of man 5 proc first."""
    text = _text(proc, f"{pid}/stat")
    return text.rpartition(")")[2].split() or None


def processes_of_user(proc: int) -> int:
    """Processes and threads of this user on the machine."""
    user, count = os.getuid(), 0
    for entry in os.listdir(proc):
        try:
            if entry.isdigit() and os.stat(entry, dir_fd=proc).st_uid == user:
                count += len(os.listdir(f"/proc/{entry}/task"))
        except OSError:
            continue
    return count


LENGTH = 8
"""Bytes of the big-endian length that goes before a request, and before each part of an answer."""
_LOOK_EVERY = 0.05
"""Seconds between looks at memory and processor time. The kernel tells nobody of sums over processes outside of control
groups, which most containers may not write; a program that is done sooner is never looked at."""


@dataclass(frozen=True, slots=True)
class Server:
    """State that all runs share."""

    proc: int
    """A descriptor of the machine's /proc."""
    weak: bool
    """There are no namespaces."""
    root: bool
    """The sandbox was started by root."""
    packages: tuple[str, ...]
    """Directories of installed packages."""
    readable: tuple[str, ...]
    """Directories that programs may read besides them."""


@dataclass(slots=True)
class Run:
    """State of one run: its request, output and outcome."""

    request: dict[str, Any]
    """See `Sandbox`: code, files, args, limits. The program has a copy in its memory, so nothing else may be in it."""
    output: dict[int, bytearray] = field(default_factory=dict)
    """Output, by descriptor: standard output first."""
    outcome: str = ""
    """The limit that it exceeded."""
    status: bytes = b""
    """The first process's report."""
    child: int = 0
    """The program's process, where it is a child of ours and no first process reports its end."""
    ours: int = 2
    """Processes at the top of its tree that are ours, and whose memory does not count: holder and first."""
    disk: int = -1
    """A descriptor in the file system that the program may fill, if that is to be watched."""


def supervise(server: Server, link: socket.socket, stdin: int, channel: int) -> None:
    """Run what is asked for, and answer.

    Args:
        server: what all runs share.
        link: to whoever asked; when it is closed, the program is killed.
        stdin: a descriptor of what the program reads, which never passes through this process: its memory is the
            program's.
        channel: a descriptor that the program is given as number 3, or -1.
    """
    request = pickle.loads(received(link))  # from our own process, which may do as it likes with this one
    run = Run(request)
    (out, out_end), (err, err_end), (report, report_end) = os.pipe(), os.pipe(), os.pipe()
    ends = (stdin, out_end, err_end, report_end, channel)
    confine.adopt()
    start = time.monotonic()
    directory = tempfile.mkdtemp(prefix="sandbox-") if server.weak else ""
    if server.weak:
        root = run.child = _unheld(server, run, ends, directory)
        run.ours = 0
    else:
        root = _held(server, run, ends)
    for end in ends:
        if end >= 0:
            os.close(end)
    watch(server, run, link, (out, err, report), root, start + request["limits"]["wall_seconds"])
    seconds = time.monotonic() - start
    end_all(server, root)
    drain(run)
    if directory:
        shutil.rmtree(directory, ignore_errors=True)
    answer(run, link, seconds)


# Starting ------------------------------------------------------------------------------------------------------------


def _held(server: Server, run: Run, ends: tuple[int, ...]) -> int:
    """Start holder and first process; returns the holder's number."""
    (ready, tell), (go, let_go) = os.pipe(), os.pipe()
    holder = os.fork()
    if holder == 0:
        os.close(ready)
        os.close(let_go)
        _hold(server, run, ends, tell, go)
    os.close(tell)
    os.close(go)
    if os.read(ready, 1):
        outside = confine.UNPRIVILEGED if server.root else 0
        maps = [(confine.INSIDE, outside)]
        confine.write_maps(server.proc, holder, maps, maps, server.root)
        os.write(let_go, b"!")
    os.close(ready)
    os.close(let_go)
    return holder


def _hold(server: Server, run: Run, ends: tuple[int, ...], tell: int, go: int) -> NoReturn:
    report = ends[3]
    try:
        confine.end_with_parent()
        confine.isolate()
        os.write(tell, b"!")
        if not os.read(go, 1):
            os._exit(1)
        if os.fork() == 0:
            os.close(go)
            os.close(tell)
            _first(server, run, ends)
        for end in ends:
            if end >= 0:
                os.close(end)
        while True:
            signal.pause()  # until the supervisor kills it; nothing reaps the first process, so its number stays taken
    except OSError as error:
        os.write(report, f"!{error}".encode())
    finally:
        os._exit(1)


def _first(server: Server, run: Run, ends: tuple[int, ...]) -> NoReturn:
    """The first process of the namespace: starts the program, and waits for its end."""
    report, limits = ends[3], run.request["limits"]
    try:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # the default does nothing to the first process of a namespace
        os.close(server.proc)
        confine.name_host(b"sandbox")
        confine.private_directory(int(limits["file_bytes"]))
        confine.become(confine.INSIDE, server.root)
        confine.end_with_parent()
        confine.hide()
        os.setsid()
        child = os.fork()
        if child == 0:
            _program(server, run, ends, 1 if server.root else 2)  # the first process, and the holder of the same user
        for end in ends:
            if end not in (report, -1):
                os.close(end)
        while True:
            pid, status = os.waitpid(-1, 0)
            if pid == child:
                os.write(report, b"=%d" % os.waitstatus_to_exitcode(status))
                break
    except OSError as error:
        os.write(report, f"!{error}".encode())
    finally:
        os._exit(0)


def _unheld(server: Server, run: Run, ends: tuple[int, ...], directory: str) -> int:
    """Start the program without namespaces; returns its number."""
    if server.root:
        os.chown(directory, confine.UNPRIVILEGED, confine.UNPRIVILEGED)
    child = os.fork()
    if child:
        return child
    try:
        os.chdir(directory)
        if server.root:
            confine.become(confine.UNPRIVILEGED, True)
        confine.end_with_parent()
        os.setsid()
        _program(server, run, ends, processes_of_user(server.proc))  # the limit counts all of a user
    except OSError as error:
        os.write(ends[3], f"!{error}".encode())
    finally:
        os._exit(1)


def _program(server: Server, run: Run, ends: tuple[int, ...], others: int) -> NoReturn:
    """Be the program: its descriptors and no others, its limits, its code.

    Args:
        others: processes that its limit counts besides its own.
    """
    stdin, out, err, report, channel = ends
    request, wanted = run.request, [stdin, out, err, *([channel] if channel >= 0 else [])]
    try:
        last = arrange(wanted, report)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if server.weak:
            confine.confine_files((*server.readable, *server.packages), os.getcwd())
        confine.restrict(request["limits"], others)
        os.close(last)
    except OSError as error:
        os.write(report, f"!{error}".encode())
        os._exit(1)
    try:
        program.run(request["code"], request["files"], request["args"], server.packages)
    finally:
        os._exit(121)  # what went wrong in starting it was printed, if it could be


def arrange(wanted: list[int], report: int) -> int:
    """Make descriptors the first ones of this process, and close all others but `report`; returns its new number."""
    high = [os.dup2(end, 200 + number) for number, end in enumerate(wanted)]  # out of each other's way
    last = os.dup2(report, 199, inheritable=False)
    for number, end in enumerate(high):
        os.dup2(end, number)
    os.closerange(len(high), last)
    os.closerange(last + 1, 4096)
    return last


# Watching ------------------------------------------------------------------------------------------------------------


def watch(
    server: Server, run: Run, link: socket.socket, pipes: tuple[int, int, int], root: int, deadline: float
) -> None:
    """Collect what the program prints until it ends, exceeds a limit, or nobody wants it any more."""
    out, err, report = pipes
    run.output = {out: bytearray(), err: bytearray()}
    poll = select.poll()
    for descriptor in (*pipes, link.fileno()):
        poll.register(descriptor, select.POLLIN)
    exited = os.pidfd_open(run.child) if run.child else -1
    if exited >= 0:
        poll.register(exited, select.POLLIN)
    most = int(run.request["limits"]["output_bytes"])
    look = time.monotonic() + _LOOK_EVERY
    while not (run.status or run.outcome):
        now = time.monotonic()
        if now >= deadline:
            run.outcome = "timeout"
            break
        if now >= look:
            look = now + _LOOK_EVERY
            if _exceeds(server, run, root):
                break
        for descriptor, _ in poll.poll(max(0, 1000 * (min(deadline, look) - time.monotonic())) + 1):
            if descriptor == link.fileno():  # whoever asked says no more, so this is the end of it
                run.outcome = "killed"
                run.output.clear()
                return
            if descriptor == exited:
                run.status = b"=%d" % os.waitstatus_to_exitcode(os.waitpid(run.child, 0)[1])
                continue
            data = os.read(descriptor, _CHUNK)
            if not data:
                poll.unregister(descriptor)
                if descriptor == report and not run.child:
                    run.status = b"?"  # the first process was killed
            elif descriptor == report:
                run.status = data
            else:
                _keep(run, descriptor, data, most)


def _keep(run: Run, descriptor: int, data: bytes, most: int) -> None:
    room = most - sum(map(len, run.output.values()))
    run.output[descriptor] += data[:room]
    if len(data) > room:
        run.outcome = run.outcome or "output"


def drain(run: Run) -> None:
    """Read what is still in the pipes of a program that has ended."""
    most = int(run.request["limits"]["output_bytes"])
    for descriptor in run.output:
        os.set_blocking(descriptor, False)
        try:
            while run.outcome != "output" and (data := os.read(descriptor, _CHUNK)):
                _keep(run, descriptor, data, most)
        except BlockingIOError:
            pass  # somebody else holds the other end: it has nothing more to say to us


def _exceeds(server: Server, run: Run, root: int) -> bool:
    """True if all processes together use more than they may; then `run.outcome` says what."""
    limits = run.request["limits"]
    clock, memory = used(server.proc, root, run.ours)
    if memory > limits["memory_bytes"]:
        run.outcome = "memory"
    elif clock > limits["cpu_seconds"]:
        run.outcome = "timeout"
    elif full(run.disk):
        run.outcome = "disk"
    return bool(run.outcome)


def full(disk: int) -> bool:
    """True if nothing more can be written to the file system of a descriptor; False where there is none."""
    if disk < 0:
        return False
    state = os.fstatvfs(disk)
    return state.f_bavail == 0 or state.f_favail == 0


# The end -------------------------------------------------------------------------------------------------------------


def end_all(server: Server, root: int) -> None:
    """Kill the program and all that descends from it; wait until nothing of it is left."""
    if not server.weak:
        try:
            os.kill(root, signal.SIGKILL)  # the first process dies with the holder, and its namespace with it
        except ProcessLookupError:
            return
    while True:
        for pid in tree(server.proc, os.getpid())[1:]:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                pass  # gone already
        try:
            os.waitpid(-1, 0)  # a parent that died hands its children to us, so each round sees more
        except ChildProcessError:
            return


def answer(run: Run, link: socket.socket, seconds: float) -> None:
    """Tell how it ended: outcome and status as text, then what was printed."""
    status = run.status.decode(errors="replace")
    code = status[1:] if status.startswith("=") and not run.outcome else ""
    if status.startswith("!"):
        run.outcome = "failed"
    head = "\n".join([run.outcome, status[1:] if run.outcome == "failed" else code, repr(seconds)])
    parts = [head.encode(), *(bytes(text) for text in run.output.values())]
    try:
        for part in parts:
            link.sendall(len(part).to_bytes(LENGTH, "big") + part)
    except OSError:
        pass  # nobody waits any more


def received(link: socket.socket) -> bytes:
    return _exactly(link, int.from_bytes(_exactly(link, LENGTH), "big"))


def _exactly(link: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        more = link.recv(min(size - len(data), _CHUNK))
        if not more:
            sys.exit(0)  # whoever asked has hung up
        data += more
    return bytes(data)
