"""The fork server of containers, and what it starts: a machine of its own for each, in which commands run.

In: over a socket, a container's description with two descriptors: a report to its owner, and a door by which requests
come in. Out: over the report that it started, or why not, and why it ended; over each request's link its result. Who
wakes whom: a container's keeper sleeps until its owner hangs up, its first process ends, or it is time to look at what
it uses; the first process forks a servant for each request; a servant watches one command as the supervisor of a
sandboxed program does.

Processes: *server → keeper → holder → first → servant → command*. The keeper is outside of the namespaces and ends
everything; each of them is killed when the one before it ends, so nothing outlives the server, and the
server not its owner. What is written lies in a file system in memory that ends with the namespaces. The run's directory
is removed by the server.
"""

from __future__ import annotations

import gc
import importlib
import itertools
import json
import os
import pickle
import select
import shutil
import signal
import socket
import stat
import sys
import tarfile
import time
from collections.abc import Callable
from typing import Any, NoReturn

from rlinf.sandbox.inside import confine, supervise

_PRELOADED = ("bz2", "encodings.ascii", "encodings.idna", "grp", "gzip", "lzma", "pwd", "warnings", "zlib")
_LOOK_EVERY = 1.0
"""Seconds between a keeper's looks; each command is watched more closely by its servant."""
_SLACK = 64 << 20
"""Bytes of memory that a container's processes of ours may count for."""
_OTHERS = 16
"""Processes of ours in a container that count for its user."""
_OPAQUE = "user.overlay.opaque"


def main(descriptor: int, settings: str) -> None:
    """Start containers until the owner is gone.

    Args:
        descriptor: of the socket to the owner.
        settings: JSON: `owner` (its process), `directory` (the run's, which ends with it).
    """
    control = socket.socket(fileno=descriptor)
    os.set_inheritable(descriptor, False)
    config = json.loads(settings)
    for name in _PRELOADED:
        importlib.import_module(name)
    sys.path[:] = []  # what is imported from now on would be a container's
    proc, owner = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY), os.pidfd_open(config["owner"])
    control.send(b"{}")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel buries keepers
    tarfile.TarFile.extraction_filter = staticmethod(lambda entry, _: entry)  # where files are unpacked, all is theirs
    gc.collect()
    gc.freeze()
    poll = select.poll()
    poll.register(control, select.POLLIN)
    poll.register(owner, select.POLLIN)  # a forked copy of the owner's socket would hide its end
    while owner not in (ready := [each for each, _ in poll.poll()]) and ready:
        spec, descriptors, _, _ = socket.recv_fds(control, 1 << 17, 2)
        if not spec:
            break
        if os.fork() == 0:
            control.close()
            os.close(owner)
            _bury(_keep, proc, json.loads(spec), *(socket.socket(fileno=each) for each in descriptors))
        for each in descriptors:
            os.close(each)
    shutil.rmtree(config["directory"], ignore_errors=True)


def _bury(work: Callable[..., object], *args: Any) -> NoReturn:
    """Do the work of this process, and end it."""
    status = 1
    try:
        work(*args)
        status = 0
    finally:
        os._exit(status)


# Outside -------------------------------------------------------------------------------------------------------------


def _keep(proc: int, spec: dict[str, Any], report: socket.socket, door: socket.socket) -> None:
    """Start a container, end it when it is to end, and say why."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    confine.end_with_parent()
    confine.adopt()
    ours, theirs = socket.socketpair()
    holder = os.fork()
    if holder == 0:
        ours.close()
        report.close()
        _bury(_hold, proc, spec, theirs, door)
    theirs.close()
    door.close()
    answer, descriptors, _, _ = socket.recv_fds(ours, 4096, 1)
    server = supervise.Server(proc, False, os.geteuid() == 0, (), ())
    cause = ""
    if descriptors:
        report.send(b"ok\n")
        cause = _guard(proc, spec, holder, report, ours, descriptors[0])
    supervise.end_all(server, holder)
    try:
        report.sendall(cause.encode() if descriptors else answer or b"its first process was killed")
    except OSError:
        pass  # nobody is interested any more


def _guard(proc: int, spec: dict[str, Any], holder: int, report: socket.socket, first: socket.socket, disk: int) -> str:
    """Wait for a container's end; returns why, or nothing where its owner wished it."""
    poll = select.poll()
    poll.register(report, select.POLLIN)
    poll.register(first, select.POLLIN)
    looks = 0
    while True:
        ready = [each for each, _ in poll.poll(1000 * _LOOK_EVERY)]
        if report.fileno() in ready:
            return ""
        if ready:
            return "its first process ended"
        if supervise.full(disk):
            return f"disk: it wrote more than {spec['bytes']} bytes"
        memory = supervise.used(proc, holder, 2)[1]
        looks = looks + 1 if memory > spec["memory"] + _SLACK else 0
        if looks == 2:  # a command that exceeds it alone has been ended by then
            return f"memory: its processes together use {memory} bytes; {spec['memory']} are allowed"


def _hold(proc: int, spec: dict[str, Any], keeper: socket.socket, door: socket.socket) -> None:
    """Make the namespaces and their first process; lives as long as they do."""
    confine.end_with_parent()
    root = os.geteuid() == 0
    users, groups = [[(0, confine.UNPRIVILEGED if root else number)] for number in (os.geteuid(), os.getegid())]
    try:
        with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
            file.write("1000")  # the kernel, short of memory, ends these first
        with confine.Mapper(proc, users, groups, root) as mapper:
            confine.isolate(spec["network"])
            mapper.map()
        if os.fork() == 0:
            _bury(_first, proc, spec, keeper, door, root)
    except OSError as error:
        keeper.send(str(error).encode())
        return
    keeper.close()
    door.close()
    while True:
        signal.pause()  # until the keeper kills it


# Inside --------------------------------------------------------------------------------------------------------------


def _first(proc: int, spec: dict[str, Any], keeper: socket.socket, door: socket.socket, root: bool) -> None:
    """The first process of a container: makes its root directory, then has a servant for each request."""
    os.close(proc)
    try:
        confine.name_host(b"container")
        if root:
            os.setgroups([])
        upper, disk = confine.private_root(spec)
        if not spec["network"]:
            confine.raise_loopback()
        if spec["workdir"]:
            os.makedirs(spec["workdir"], exist_ok=True)
        confine.hide()
    except OSError as error:
        keeper.send(str(error).encode())
        return
    wanted = sorted((2, keeper.fileno(), door.fileno(), upper, disk, 4096))
    for low, high in itertools.pairwise(wanted):
        os.closerange(low + 1, high)
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the default does nothing to the first process of a namespace
    socket.send_fds(keeper, [b"ok"], [disk])
    while True:
        word, descriptors, _, _ = socket.recv_fds(door, 1, 2)
        if not word:
            return
        if os.fork() == 0:
            keeper.close()
            door.close()
            _bury(_serve, socket.socket(fileno=descriptors[0]), descriptors[1], upper, disk)
        for each in descriptors:
            os.close(each)


def _serve(link: socket.socket, data: int, upper: int, disk: int) -> None:
    """Do one request, and answer."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    request = pickle.loads(supervise.received(link))  # from the owner
    proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
    run = supervise.Run(request, ours=1, disk=disk)
    confine.adopt()
    (out, out_end), (err, err_end), (report, report_end) = os.pipe(), os.pipe(), os.pipe()
    start = time.monotonic()
    run.child = os.fork()
    if run.child == 0:
        os.dup2(upper, 198)
        _bury(_do, request, [data, out_end, err_end, 198], report_end)
    for end in (data, out_end, err_end, report_end):
        os.close(end)
    server = supervise.Server(proc, True, False, (), ())
    deadline = start + request["limits"]["wall_seconds"]
    supervise.watch(server, run, link, (out, err, report), os.getpid(), deadline)
    seconds = time.monotonic() - start
    if run.outcome or request["do"] != "run":
        supervise.end_all(server, os.getpid())
    supervise.drain(run)
    if supervise.full(disk):
        run.outcome = "disk"
    supervise.answer(run, link, seconds)


def _do(request: dict[str, Any], ends: list[int], report: int) -> None:
    """Be what was asked for: a command, or a copy of files."""
    os.setsid()
    supervise.arrange(ends, report)
    try:
        _TASKS[request["do"]](request)
    except Exception as error:  # whatever it is, whoever asked is to read it
        os.write(2, f"{type(error).__name__}: {error}\n".encode(errors="replace"))
        os._exit(2 if isinstance(error, FileNotFoundError) else 1)


def _run(request: dict[str, Any]) -> None:
    """Become a command."""
    os.close(3)
    command, env = request["command"], request["env"]
    for number in (signal.SIGINT, signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    try:
        os.chdir(request["cwd"])
        confine.drop_capabilities(confine.CONTAINER_CAPABILITIES)
        confine.restrict(request["limits"], _OTHERS, container=True)
        os.execvpe(command[0], command, env)
    except OSError as error:
        where = request["cwd"] if error.filename == request["cwd"] else command[0]
        os.write(2, f"{where}: {error.strerror}\n".encode(errors="replace"))
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


def _upload(request: dict[str, Any]) -> None:
    """Unpack the tar file that is standard input at the root."""
    with open(0, "rb") as file, tarfile.open(fileobj=file, mode="r|*") as tar:
        for entry in tar:
            tar.extract(entry, "/", numeric_owner=True)


def _layer(request: dict[str, Any]) -> None:
    """Unpack a layer of an image, a tar file, over those before it."""
    fresh: set[str] = set()
    with open(0, "rb") as file, tarfile.open(fileobj=file, mode="r|*") as tar:
        for entry in tar:
            path = os.path.normpath(f"/{entry.name}")
            directory, name = os.path.split(path)
            if name == ".wh..wh..opq":
                below = os.scandir(directory) if os.path.isdir(directory) else ()
                for other in [each.path for each in below if each.path not in fresh]:
                    _removed(other)
            elif name.startswith(".wh."):
                _removed(os.path.join(directory, name.removeprefix(".wh.")))
            elif path != "/" and not entry.isdev():
                while directory not in fresh:
                    fresh.add(directory)
                    directory = os.path.dirname(directory)
                fresh.add(path)
                if os.path.lexists(path) and (os.path.islink(path) or not (entry.isdir() and os.path.isdir(path))):
                    _removed(path)
                entry.uid = entry.gid = 0  # all files are of one user, the only one that there is
                tar.extract(entry, "/", numeric_owner=True)


def _removed(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    elif os.path.lexists(path):
        os.unlink(path)


def _download(request: dict[str, Any]) -> None:
    """Pack a path into the file that is standard input."""
    path = os.path.realpath(request["path"])
    if not os.path.lexists(path):
        raise FileNotFoundError(f"{request['path']}: there is no such file or directory in the container")
    with open(0, "wb", closefd=False) as file, tarfile.open(fileobj=file, mode="w") as tar:
        tar.add(path, os.path.basename(path) or "root", filter=_portable)


def _portable(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return entry if entry.isreg() or entry.isdir() or entry.issym() or entry.islnk() else None


def _listen(request: dict[str, Any]) -> None:
    """Hand a socket that listens on the container's own loopback out over the one that is standard input."""
    with socket.socket() as listening, socket.socket(fileno=0) as link:
        listening.bind(("127.0.0.1", 0))
        listening.listen(64)
        socket.send_fds(link, [b"!"], [listening.fileno()])


def _snapshot(request: dict[str, Any]) -> None:
    """Copy what was written, marks of removal included, into the directory that is standard input."""
    _copy_layer(3, 0)


def _copy_layer(source: int, target: int) -> None:
    """Copy a directory into an empty one, both by descriptor; nothing that lies there is followed."""
    with os.scandir(source) as entries:
        for entry in entries:
            state, name = entry.stat(follow_symlinks=False), entry.name
            if stat.S_ISLNK(state.st_mode):
                os.symlink(os.readlink(name, dir_fd=source), name, dir_fd=target)
                continue
            if stat.S_ISCHR(state.st_mode):
                os.mknod(name, stat.S_IFCHR, 0, dir_fd=target)  # it hides what lies below
                continue
            if stat.S_ISDIR(state.st_mode):
                os.mkdir(name, 0o700, dir_fd=target)
                here, there = (os.open(name, os.O_RDONLY | os.O_DIRECTORY, dir_fd=each) for each in (source, target))
                if _OPAQUE in os.listxattr(here):
                    os.setxattr(there, _OPAQUE, b"y")
                _copy_layer(here, there)
            elif stat.S_ISREG(state.st_mode):
                here = os.open(name, os.O_RDONLY, dir_fd=source)
                there = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=target)
                while os.sendfile(there, here, None, 1 << 24):
                    pass
            else:
                continue  # sockets and pipes belong to processes
            os.fchmod(there, stat.S_IMODE(state.st_mode))
            os.utime(there, ns=(state.st_atime_ns, state.st_mtime_ns))
            os.close(here)
            os.close(there)


_TASKS = {
    "run": _run,
    "upload": _upload,
    "layer": _layer,
    "download": _download,
    "listen": _listen,
    "snapshot": _snapshot,
}
