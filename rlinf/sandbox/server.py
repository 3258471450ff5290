"""The fork server of a sandbox, seen from its owner: started, asked how far it keeps programs apart, ended.

In: what programs may see. Out: a socket to ask for programs with. All of it blocks; `sandbox.py` calls it in a thread.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import rlinf.sandbox
from rlinf.sandbox.limits import Isolation, SandboxError

_START_DEADLINE = 30.0
"""Seconds that the fork server has to start; it takes 0.1 s on an idle machine."""
_BOOT = (
    "import sys; sys.path.append(sys.argv[1]); from rlinf.sandbox.inside.warden import main; main(int(sys.argv[2]),"
    " sys.argv[3])"
)
_HELD = ("no network", "no file of this machine but the interpreter and /usr, read-only", "a private /tmp in memory",
         "no view of other processes", "no capabilities")  # fmt: skip
_LANDLOCK = (
    (1, "no file of this machine but the interpreter and /usr, read-only"),
    (6, "no signals to other processes"),
)
"""What holds without namespaces from which version of Landlock on."""
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
        raise SandboxError(f"{reason} Without namespaces, root would run programs as `nobody`, who may not read "
                           f"{sys.base_prefix}: start as an ordinary user")  # fmt: skip
    control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    settings = {
        "owner": os.getpid(), "home": home, "shown": [sys.base_prefix, os.path.realpath(sys.base_prefix), sys.prefix],
        "packages": [*packages, *more], "preload": [*preload], "weak": weak, "root": root,
    }  # fmt: skip
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-S", "-s", "-P", "-B", "-X", "utf8", "-c", _BOOT, home, str(theirs.fileno()),
             json.dumps(settings)],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()], env={"PYTHONHASHSEED": "0", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1",
                                             "OPENBLAS_NUM_THREADS": "1"},
            cwd="/", start_new_session=True,
        )  # fmt: skip
    control.settimeout(_START_DEADLINE)
    try:
        said = json.loads(control.recv(1 << 16) or b'{"refused": "it ended at once"}')
    except TimeoutError:
        said = {"refused": f"it did not start within {_START_DEADLINE:g} s"}
    if "refused" in said:
        Warden(process, control, Isolation("weak", "", ())).end()
        refusal = said["refused"]
        raise SandboxError(
            f"programs cannot be kept apart on this machine: {refusal}. It takes user namespaces (sysctl "
            "kernel.unprivileged_userns_clone=1, kernel.apparmor_restrict_unprivileged_userns=0, "
            "user.max_user_namespaces > 0; in a container, a seccomp profile that allows unshare and mount). "
            "allow_weak=True runs programs without them; docs/sandbox.md says what holds then."
        )
    control.settimeout(None)
    walls = [words for least, words in _LANDLOCK if said["landlock"] >= least] if weak else _HELD
    guards = (*walls, *_ALWAYS, *(("a filter of system calls (no sockets)",) if said["filter"] else ()))
    return Warden(process, control, Isolation("weak" if weak else "namespaces", reason, guards))


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
