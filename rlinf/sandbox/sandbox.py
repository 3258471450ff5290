"""A sandbox: programs in Python go in, what became of them comes out.

In: code, its input and files, limits. Out: a `Result`. Who wakes whom: a run waits for a place among `at_once`, then
for the answer of its supervisor, which comes when the program ends or exceeds a limit; hanging up kills the program, so
a cancelled run leaves nothing behind. A fork server (`inside/warden.py`) starts with the first run and ends with this
process, or with `close`.

    async with Sandbox() as sandbox:
        result = await sandbox.run_python("print(input()[::-1])", stdin="abc")

docs/sandbox.md says what holds and what does not.

The fork server of a sandbox, seen from its owner: started, asked how far it keeps programs apart, ended.
All of it blocks, so it is called in a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import pickle
import socket
import subprocess
import sys
import sysconfig
import weakref
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import rlinf.sandbox
from rlinf.sandbox.inside.supervise import LENGTH
from rlinf.sandbox.limits import Channel, Isolation, Limits, Program, Result, SandboxError

_START_DEADLINE = 30.0
"""Seconds that the fork server has to start; it takes 0.1 s on an idle machine."""
_BOOT = (
    "import sys; sys.path.append(sys.argv[1]); from rlinf.sandbox.inside.{} import main; main(int(sys.argv[2]),"
    " sys.argv[3])"
)
_ENVIRONMENT = {"PYTHONHASHSEED": "0", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
_FILES = "no file of this machine but the interpreter and /usr, read-only"
_HELD = ("no network", _FILES, "a private /tmp in memory", "no view of other processes", "no capabilities")
_LANDLOCK = ((1, _FILES), (6, "no signals to other processes"))
"""Guards without namespaces, each with the version of Landlock that brings it."""
_ALWAYS = ("limits on time, memory, processes, files and output",)


@dataclass(slots=True, eq=False)
class Warden:
    """A fork server that runs."""

    process: subprocess.Popen[bytes]
    control: socket.socket
    isolation: Isolation

    def end(self) -> None:
        """End it. Programs that run have supervisors of their own, which end with those who wait for them."""
        self.control.close()
        self.process.kill()
        self.process.wait()


def start_warden(allow_weak: bool, preload: Sequence[str] = ()) -> Warden:
    """Start a fork server; blocks for some 0.1 s.

    Raises:
        SandboxError: it cannot be confined, and `allow_weak` does not say that this is acceptable; or it cannot start.
    """
    try:
        return _spawn(False, preload, "")
    except SandboxError as error:
        if not allow_weak:
            raise
        return _spawn(True, preload, str(error))


def _spawn(weak: bool, preload: Sequence[str], reason: str) -> Warden:
    home = str(Path(rlinf.sandbox.__file__).parents[2])
    packages = sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
    more = [path for path in _added(packages) if not (weak and os.geteuid() == 0) or _others_may_enter(path)]
    root = os.geteuid() == 0
    if weak and root and not all(_others_may_enter(path) for path in (sys.base_prefix, *packages)):
        raise SandboxError(
            f"{reason} Without namespaces, root would run programs as `nobody`, who may not read {sys.base_prefix}: "
            "start as an ordinary user"
        )
    paths = {"home": home, "shown": [sys.base_prefix, os.path.realpath(sys.base_prefix), sys.prefix]}
    modules = {"packages": [*packages, *more], "preload": [*preload]}
    process, control, answer = launch("warden", {**paths, **modules, "weak": weak, "root": root})
    if "refused" in answer:
        Warden(process, control, Isolation("weak", "", ())).end()
        refusal = answer["refused"]
        raise SandboxError(
            f"programs cannot be kept apart on this machine: {refusal}. It takes user namespaces (sysctl "
            "kernel.unprivileged_userns_clone=1, kernel.apparmor_restrict_unprivileged_userns=0, "
            "user.max_user_namespaces > 0; in a container, a seccomp profile that allows unshare and mount). "
            "allow_weak=True runs programs without them; docs/sandbox.md says what holds then."
        )
    walls = [words for least, words in _LANDLOCK if answer["landlock"] >= least] if weak else _HELD
    guards = (*walls, *_ALWAYS, *(("a filter of system calls (no sockets)",) if answer["filter"] else ()))
    return Warden(process, control, Isolation("weak" if weak else "namespaces", reason, guards))


def launch(server: str, settings: Mapping[str, Any]) -> tuple[subprocess.Popen[bytes], socket.socket, dict[str, Any]]:
    """Start a fork server, which ends with this process; blocks until it answers.

    Args:
        server: its module in `inside`.
        settings: for it.

    Returns:
        Its process, our end of the socket to it, and its answer, which has `refused` where it cannot serve.
    """
    home = str(Path(rlinf.sandbox.__file__).parents[2])
    control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    flags = ["-S", "-s", "-P", "-B", "-X", "utf8"]
    text = json.dumps({"owner": os.getpid(), **settings})
    with theirs:
        process = subprocess.Popen(
            [sys.executable, *flags, "-c", _BOOT.format(server), home, str(theirs.fileno()), text],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            env=_ENVIRONMENT,
            cwd="/",
            start_new_session=True,
        )
    control.settimeout(_START_DEADLINE)
    try:
        answer = json.loads(control.recv(1 << 16) or b'{"refused": "it ended at once"}')
    except TimeoutError:
        answer = {"refused": f"it did not start within {_START_DEADLINE:g} s"}
    control.settimeout(None)
    return process, control, answer


def isolation(*, allow_weak: bool = True) -> Isolation:
    """How far programs are kept apart on this machine. Blocks: it starts a fork server, and ends it.

    Raises:
        SandboxError: programs cannot be run at all.
    """
    warden = start_warden(allow_weak)
    warden.end()
    return warden.isolation


def _added(packages: Sequence[str]) -> list[str]:
    """Other directories of installed packages from which this process imports: of the user, or by a .pth file.

    Source trees, which editable installs add, are none: who knows what lies beside the code.
    """
    added = [os.path.abspath(path) for path in sys.path if os.path.basename(path) in ("site-packages", "dist-packages")]
    return [path for path in dict.fromkeys(added) if path not in packages and os.path.isdir(path)]


def _others_may_enter(path: str) -> bool:
    return all(os.stat(each).st_mode & 0o001 for each in (Path(path), *Path(path).parents) if os.path.exists(each))


logger = logging.getLogger(__name__)

_LONGEST_MESSAGE = 4 << 20
"""Bytes of the longest message that is taken from a program."""


class Sandbox:
    """Runs programs, a bounded number at once. Belongs to one event loop.

    Args:
        limits: of programs for which nothing else is said.
        at_once: most programs that run at the same time; None takes the number of cores. Others wait.
        allow_weak: run programs, too, where the kernel has no namespaces for us (see `Isolation`).
        preload: modules that programs are started with, such as numpy: importing them then costs nothing. They must not
            start threads.
    """

    def __init__(
        self,
        limits: Limits | None = None,
        *,
        at_once: int | None = None,
        allow_weak: bool = False,
        preload: Sequence[str] = (),
    ):
        self.limits = limits or Limits()
        self._allow_weak, self._preload = allow_weak, tuple(preload)
        self._places = asyncio.Semaphore(at_once or len(os.sched_getaffinity(0)))
        self._starting: asyncio.Future[Warden] | None = None
        self._finalizer: weakref.finalize[[], Any] | None = None

    async def __aenter__(self) -> Sandbox:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def run_python(
        self,
        code: str,
        *,
        stdin: str | bytes = b"",
        files: Mapping[str, str | bytes] | None = None,
        args: Sequence[str] = (),
        limits: Limits | None = None,
    ) -> Result:
        """Run a program as `python main.py` does, in an empty private directory.

        Args:
            code: the program.
            stdin: what it finds on standard input.
            files: what it finds in its directory: relative paths to contents.
            args: of its command line.
            limits: instead of the sandbox's.

        Returns:
            What became of it, whatever it did.

        Raises:
            SandboxError: programs cannot be kept apart here, or the sandbox failed.
            ValueError: a file's path leads out of the directory.
        """
        async with self._places, self.program(code, stdin=stdin, files=files, args=args, limits=limits) as program:
            return await program.result()

    @contextlib.asynccontextmanager
    async def program(
        self,
        code: str,
        *,
        stdin: str | bytes = b"",
        files: Mapping[str, str | bytes] | None = None,
        args: Sequence[str] = (),
        limits: Limits | None = None,
        channel: bool = False,
    ) -> AsyncIterator[Program]:
        """A program while it runs; it is killed, with all that descends from it, at the end of the block.

        Takes no place among `at_once`: `place` does, for whoever wants one.

        Args:
            code, stdin, files, args, limits: as for `run_python`.
            channel: give it a socket to us.

        Raises:
            SandboxError, ValueError: as for `run_python`.
        """
        limits = limits or self.limits
        request = {
            "code": code,
            "files": {_inside(name): _bytes(content) for name, content in (files or {}).items()},
            "args": list(args),
            "limits": asdict(limits),
        }
        message = pickle.dumps(request)
        warden = await self._warden()
        with contextlib.ExitStack() as ours:
            link, end = self._linked(warden, _bytes(stdin), channel, ours)
            reader, writer = await asyncio.open_unix_connection(sock=link)
            ours.callback(writer.transport.abort)
            writer.write(len(message).to_bytes(LENGTH, "big") + message)
            yield Program(reader, limits, end)

    @contextlib.asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """One of the places for programs that run at once; waits for it."""
        async with self._places:
            yield

    async def isolation(self) -> Isolation:
        """How far programs are kept apart here.

        Raises:
            SandboxError: not far enough.
        """
        return (await self._warden()).isolation

    async def close(self) -> None:
        """End the fork server; the next run would start another."""
        starting, self._starting = self._starting, None
        if starting is not None:
            with contextlib.suppress(SandboxError):
                await asyncio.shield(starting)
        self._end()

    def _end(self) -> None:
        if self._finalizer is not None:
            self._finalizer()

    def _linked(
        self, warden: Warden, stdin: bytes, channel: bool, ours: contextlib.ExitStack
    ) -> tuple[socket.socket, Channel | None]:
        """Ask for a supervisor; returns our ends of the link and of the channel, which `ours` closes."""
        link, theirs = socket.socketpair()
        ours.enter_context(link)
        with contextlib.ExitStack() as theirs_open:
            file = theirs_open.enter_context(open(os.memfd_create("stdin"), "w+b", buffering=0))
            file.write(stdin)
            file.seek(0)
            descriptors = [theirs_open.enter_context(theirs).fileno(), file.fileno()]
            talk = None
            if channel:
                end, other = socket.socketpair()
                end.setblocking(False)
                talk = Channel(end, _LONGEST_MESSAGE)
                ours.callback(talk.close)
                descriptors.append(theirs_open.enter_context(other).fileno())
            link.setblocking(False)
            try:
                socket.send_fds(warden.control, [b"!"], descriptors)
            except OSError as error:
                self._starting = None
                raise SandboxError("the sandbox's fork server is gone; the next run starts another") from error
        return link, talk

    async def _warden(self) -> Warden:
        if self._starting is not None and self._starting.done():
            dead = self._starting.exception() or self._starting.result().process.poll() is not None
            self._starting = None if dead else self._starting
        if self._starting is None:
            self._starting = asyncio.ensure_future(self._start())
        return await asyncio.shield(self._starting)

    async def _start(self) -> Warden:
        warden = await asyncio.to_thread(start_warden, self._allow_weak, self._preload)
        self._end()  # the one before, which is dead
        self._finalizer = weakref.finalize(self, warden.end)
        logger.log(logging.WARNING if warden.isolation.level == "weak" else logging.INFO, "%s", warden.isolation)
        return warden


_shared: dict[asyncio.AbstractEventLoop, dict[bool, Sandbox]] = {}


def shared(*, allow_weak: bool = False) -> Sandbox:
    """The sandbox of the running event loop, which tools and rewards share.

    Its fork server ends with the process, or when another loop asks for one after this loop was closed.
    """
    for loop in [loop for loop in _shared if loop.is_closed()]:
        for sandbox in _shared.pop(loop).values():
            sandbox._end()
    mine = _shared.setdefault(asyncio.get_running_loop(), {})
    if allow_weak not in mine:
        mine[allow_weak] = Sandbox(allow_weak=allow_weak)
    return mine[allow_weak]


async def run_python(
    code: str,
    *,
    stdin: str | bytes = b"",
    files: Mapping[str, str | bytes] | None = None,
    limits: Limits | None = None,
    allow_weak: bool = False,
) -> Result:
    """Run a program in the sandbox that this event loop shares; see `Sandbox.run_python`."""
    return await shared(allow_weak=allow_weak).run_python(code, stdin=stdin, files=files, limits=limits)


def _bytes(text: str | bytes) -> bytes:
    return text.encode("utf-8", "surrogatepass") if isinstance(text, str) else bytes(text)


def _inside(name: str) -> str:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name:
        raise ValueError(f"file {name!r} of a sandboxed program must be a relative path without `..`")
    return str(path)
