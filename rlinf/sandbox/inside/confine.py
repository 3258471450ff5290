"""Walls: namespaces, a file system of its own, no capabilities, resource limits.

In: what may be seen and used. Out: the calling process, confined. `enter` confines the fork server once: its root is a
small read-only file system that holds the interpreter and /usr. `isolate` gives one program namespaces of its own below
that, and a private /tmp; `restrict` takes away the rest. Nothing here needs root; where the user is root, programs run
as another user, whom limits on processes hold. Facts about the calls are in man 7 user_namespaces, mount_namespaces.
"""

from __future__ import annotations

import ctypes
import os
import resource
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlinf.sandbox.inside import seccomp

_NEW_MOUNTS, _NEW_USERS = 0x00020000, 0x10000000
_NEW_ALL = _NEW_MOUNTS | _NEW_USERS | 0x02000000 | 0x04000000 | 0x08000000 | 0x20000000 | 0x40000000
"""Mounts, users; control groups, host name, System V objects, processes, network."""
_BIND, _RECURSIVE, _PRIVATE, _NOSUID, _NODEV, _DETACH = 4096, 16384, 1 << 18, 2, 4, 2
_MOUNT_SETATTR, _PIVOT_ROOT = 442, {"x86_64": 155, "aarch64": 41}
_ATTR_RDONLY, _ATTR_NOSUID, _ATTR_NODEV, _AT_FDCWD, _AT_RECURSIVE = 1, 2, 4, -100, 0x8000
_OPEN_TREE, _MOVE_MOUNT, _CLONE_TREE, _FROM_DESCRIPTOR = 428, 429, 0x80000 | 0x8000 | 1, 4
"""Linux 5.2 has the calls; the flags are to close on exec, all below, a copy; and that the source is a descriptor."""
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _PR_CAP_AMBIENT = 1, 4, 24, 47
_CAPABILITIES_3 = 0x20080522

UNPRIVILEGED = 65534
"""The user, `nobody`, as which programs run where the sandbox itself runs as root."""
INSIDE = 1000
"""User and group of a program, as it sees itself."""
WORK = "/tmp"
"""Its directory: the only one that it can write."""
_DEVICES = ("null", "zero", "full", "random", "urandom")
_libc = ctypes.CDLL(None, use_errno=True)


def enter(shown: Sequence[str]) -> int:
    """Move this process into a user and a mount namespace whose root holds only what a program may read.

    Args:
        shown: directories, by their paths here, besides /usr.

    Returns:
        A descriptor of the machine's /proc, which nothing in the new root leads to. Never to be given to a program.

    Raises:
        OSError: the kernel refuses; the text has the call.
    """
    proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
    root, user, group = os.geteuid() == 0, os.geteuid(), os.getegid()
    users = [(0, user), (UNPRIVILEGED, UNPRIVILEGED)] if root else [(0, user)]
    groups = [(0, group), (UNPRIVILEGED, UNPRIVILEGED)] if root else [(0, group)]
    with _Mapper(proc, users, groups, root) as mapper:  # root's map can only be written from outside
        _call("unshare(user namespace)", _libc.unshare, _NEW_USERS | _NEW_MOUNTS)
        mapper.map()
    _new_root([path for path in shown if os.path.isdir(path)])
    return proc


class _Mapper:
    """A process that stays outside a new user namespace and says who its users are."""

    def __init__(self, proc: int, users: list[tuple[int, int]], groups: list[tuple[int, int]], keep_groups: bool):
        self._ready, tell = os.pipe()
        answer, self._answer = os.pipe()
        self._tell, target = tell, os.getpid()
        self._child = os.fork()
        if self._child == 0:
            os.close(tell)
            try:
                if os.read(self._ready, 1):
                    write_maps(proc, target, users, groups, keep_groups)
                    os.write(self._answer, b"ok")
            except OSError as error:
                os.write(self._answer, str(error).encode())
            finally:
                os._exit(0)
        os.close(self._answer)
        self._answer = answer

    def __enter__(self) -> _Mapper:
        return self

    def map(self) -> None:
        """Have the maps of the calling process written."""
        os.write(self._tell, b"!")
        said = os.read(self._answer, 1000).decode()
        if said != "ok":
            raise OSError(f"writing uid_map: {said}")

    def __exit__(self, *_: Any) -> None:
        for end in (self._ready, self._tell, self._answer):
            os.close(end)
        os.waitpid(self._child, 0)


def write_maps(
    proc: int, pid: int, users: list[tuple[int, int]], groups: list[tuple[int, int]], keep_groups: bool
) -> None:
    """Say which users a new user namespace has.

    Args:
        proc: a descriptor of /proc.
        pid: of a process in it.
        users, groups: (number inside, number outside).
        keep_groups: the caller is privileged, so that `setgroups` need not be forbidden.
    """

    def write(file: str, text: str) -> None:
        descriptor = os.open(f"{pid}/{file}", os.O_WRONLY, dir_fd=proc)
        try:
            os.write(descriptor, text.encode())
        finally:
            os.close(descriptor)

    if not keep_groups:
        write("setgroups", "deny")
    write("uid_map", "".join(f"{inside} {outside} 1\n" for inside, outside in users))
    write("gid_map", "".join(f"{inside} {outside} 1\n" for inside, outside in groups))


def _new_root(shown: Sequence[str]) -> None:
    """Make a read-only root of bind mounts, and let go of the old one."""
    _mount(None, "/", None, _RECURSIVE | _PRIVATE)
    links = {name: os.readlink(f"/{name}") for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
             if os.path.islink(f"/{name}")}  # fmt: skip
    trees = ["/usr", *(f"/{name}" for name in ("bin", "sbin", "lib", "lib64") if name not in links)]
    files = ["/etc/ld.so.cache", *(f"/dev/{name}" for name in _DEVICES)]
    wanted = _outermost([path for path in [*trees, *shown] if os.path.isdir(path)])
    if hidden := [path for path in wanted if path in ("/", WORK)]:
        raise OSError(f"{hidden[0]} itself holds the interpreter or its packages, and a program has its own; install "
                      "them into a directory below")  # fmt: skip
    sources = {path: os.open(path, os.O_PATH) for path in [*wanted, *files] if os.path.exists(path)}
    _mount("sandbox", WORK, "tmpfs", _NOSUID | _NODEV, "mode=755,size=1m,nr_inodes=2k")
    for path, source in sources.items():
        target = Path(f"{WORK}{path}")
        if path in files:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.touch()
        else:
            target.mkdir(parents=True, exist_ok=True)
        _mount(f"/proc/self/fd/{source}", str(target), None, _BIND | _RECURSIVE)
        os.close(source)
        _read_only(str(target), devices=path.startswith("/dev/"))
    for name, leads in links.items():
        os.symlink(leads, f"{WORK}/{name}")
    Path(f"{WORK}/etc").mkdir(exist_ok=True)
    Path(f"{WORK}/etc/passwd").write_text(f"user:x:{INSIDE}:{INSIDE}::{WORK}:/bin/sh\n")
    Path(f"{WORK}/etc/group").write_text(f"user:x:{INSIDE}:\n")
    Path(f"{WORK}{WORK}").mkdir(exist_ok=True)
    if not os.path.isdir(f"{WORK}/dev/shm"):  # where an environment lies below it, it is shown and no more
        os.symlink(WORK, f"{WORK}/dev/shm")
    os.chdir(WORK)
    _call("pivot_root", _libc.syscall, _PIVOT_ROOT[os.uname().machine], b".", b".")
    _call("umount of the old root", _libc.umount2, b".", _DETACH)
    os.chdir("/")
    _read_only("/", recursive=False)


def _outermost(paths: Sequence[str]) -> list[str]:
    """Paths without those that lie in others of them."""
    kept: list[str] = []
    for path in sorted({os.path.abspath(path) for path in paths}):
        if not any(path == outer or path.startswith(f"{outer}/") for outer in kept):
            kept.append(path)
    return kept


def isolate() -> None:
    """Give the calling process namespaces of its own; its next child is the first process of the new one.

    The maps of its users are to be written by another process, in the fork server's namespace.
    """
    _call("unshare", _libc.unshare, _NEW_ALL)


def private_directory(size: int) -> None:
    """Mount an empty directory at /tmp, which lies in memory and holds `size` bytes; go there.

    What the root shows below /tmp, an environment that was made there, is mounted in it again.
    """
    shown = {name: _call(f"open_tree of {WORK}/{name}", _libc.syscall, _OPEN_TREE, _AT_FDCWD,
                         f"{WORK}/{name}".encode(), _CLONE_TREE) for name in os.listdir(WORK)}  # fmt: skip
    text = f"mode=700,uid={INSIDE},gid={INSIDE},size={size},nr_inodes=16k"
    _mount("work", WORK, "tmpfs", _NOSUID | _NODEV, text)
    os.chdir(WORK)
    _libc.setfsuid(INSIDE)  # to whom new directories belong: nobody else need exist in this namespace
    _libc.setfsgid(INSIDE)
    for name, tree in shown.items():
        os.mkdir(name)
        _call(f"move_mount to {WORK}/{name}", _libc.syscall, _MOVE_MOUNT, tree, b"", _AT_FDCWD, name.encode(),
              _FROM_DESCRIPTOR)  # fmt: skip
        os.close(tree)


def become(inside: int, set_groups: bool) -> None:
    """Become a user for good, and give up all capabilities."""
    if set_groups:
        os.setgroups([])
    os.setresgid(inside, inside, inside)
    os.setresuid(inside, inside, inside)
    drop_capabilities()


def drop_capabilities() -> None:
    """Give up all capabilities, also of programs started later."""
    _libc.prctl(_PR_CAP_AMBIENT, 4, 0, 0, 0)
    capability = 0
    while _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) == 0:
        capability += 1
    header, none = struct.pack("Ii", _CAPABILITIES_3, 0), bytes(24)
    _call("capset", _libc.capset, header, none)


def restrict(limits: Mapping[str, float], others: int) -> None:
    """Set resource limits, and filter system calls, for this process and all that it starts.

    Args:
        limits: the fields of `Limits`.
        others: processes of this user that count besides those of the program.
    """
    seconds, memory = max(1, round(limits["cpu_seconds"] + 0.5)), int(limits["memory_bytes"])
    wanted = {
        resource.RLIMIT_CPU: (seconds, seconds + 1),  # SIGXCPU, and a second later SIGKILL
        resource.RLIMIT_AS: memory,
        resource.RLIMIT_NPROC: int(limits["processes"]) + others,
        resource.RLIMIT_NOFILE: int(limits["open_files"]),
        resource.RLIMIT_FSIZE: int(limits["file_bytes"]),
        resource.RLIMIT_STACK: 64 << 20,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_SIGPENDING: 256,
        resource.RLIMIT_NICE: 0,
        resource.RLIMIT_RTPRIO: 0,
    }
    for kind, value in wanted.items():
        hard = resource.getrlimit(kind)[1]
        soft, most = value if isinstance(value, tuple) else (value, value)
        ceiling = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (min(soft, ceiling), ceiling))
    seccomp.install()


def end_with_parent() -> None:
    """Be killed when the parent ends. To be called after the user is settled, which forgets it."""
    _call("prctl(PR_SET_PDEATHSIG)", _libc.prctl, _PR_SET_PDEATHSIG, 9, 0, 0, 0)


def hide() -> None:
    """Let no process of the same user look into this one."""
    _libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def adopt() -> None:
    """Become the parent of all descendants whose own parents end."""
    _call("prctl(PR_SET_CHILD_SUBREAPER)", _libc.prctl, 36, 1, 0, 0, 0)


def name_host(name: bytes) -> None:
    """Name the machine, in a host name's namespace of one's own."""
    _libc.sethostname(name, len(name))


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    encoded = [None if text is None else text.encode() for text in (source, target, kind, options)]
    what, where, how, more = encoded
    _call(f"mount of {target}", _libc.mount, what, where, how, ctypes.c_ulong(flags), more)


def _read_only(path: str, *, recursive: bool = True, devices: bool = False) -> None:
    wanted = _ATTR_RDONLY | _ATTR_NOSUID | (0 if devices else _ATTR_NODEV)
    attributes = struct.pack("QQQQ", wanted, 0, 0, 0)
    flags = _AT_RECURSIVE if recursive else 0
    named = f"mount_setattr of {path} (Linux 5.12 has it)"
    _call(named, _libc.syscall, _MOUNT_SETATTR, _AT_FDCWD, path.encode(), flags, attributes, len(attributes))


def _call(name: str, function: Any, *args: Any) -> int:
    result = int(function(*args))
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result
