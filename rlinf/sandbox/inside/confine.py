"""Walls around a program: namespaces, a file system of its own, no capabilities, limits, a filter of system calls.

In: what may be seen and used. Out: the calling process, confined. `enter` confines the fork server once: its root is a
small read-only file system that holds the interpreter and /usr. `isolate` gives one program namespaces of its own below
that, and a private /tmp; `restrict` takes away the rest. Nothing here needs root; where the user is root, programs run
as another user, whom limits on processes hold. Facts about the calls are in man 7 user_namespaces, mount_namespaces.

`forbid_calls` refuses the system calls that no program for a task needs, and that kernel bugs are reached through: a
program of classic BPF over a call's number and arguments (the kernel's Documentation/userspace-api/seccomp_filter.rst).
`confine_files` walls files off where there are no namespaces, by Landlock, which any process may set for itself from
Linux 5.13 on (Documentation/userspace-api/landlock.rst).
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import platform
import resource
import socket
import stat
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any


def _numbers(table: str) -> dict[str, int]:
    """System calls by name, of a table of pairs."""
    return {name: int(number) for name, number in map(str.split, table.split(","))}


_SAME = _numbers(  # from 424 on, a call has the same number everywhere
    """
    io_uring_setup 425, io_uring_enter 426, io_uring_register 427, open_tree 428, move_mount 429, fsopen 430,
    fsconfig 431, fsmount 432, fspick 433, pidfd_getfd 438, process_madvise 440, mount_setattr 442, quotactl_fd 443,
    memfd_secret 447, open_tree_attr 467
    """
)
_X86_64 = _numbers(
    """
    shmget 29, socket 41, semget 64, msgget 68, ptrace 101, syslog 103, uselib 134, personality 135, vhangup 153,
    modify_ldt 154, pivot_root 155, _sysctl 156, adjtimex 159, chroot 161, acct 163, settimeofday 164, mount 165,
    umount2 166, swapon 167, swapoff 168, reboot 169, sethostname 170, setdomainname 171, iopl 172, ioperm 173,
    create_module 174, init_module 175, delete_module 176, quotactl 179, io_setup 206, lookup_dcookie 212,
    clock_settime 227, mq_open 240, kexec_load 246, add_key 248, request_key 249, keyctl 250, migrate_pages 256,
    unshare 272, vmsplice 278, move_pages 279, perf_event_open 298, fanotify_init 300, name_to_handle_at 303,
    open_by_handle_at 304, clock_adjtime 305, setns 308, process_vm_readv 310, process_vm_writev 311, kcmp 312,
    finit_module 313, memfd_create 319, kexec_file_load 320, bpf 321, userfaultfd 323
    """
)
_AARCH64 = _numbers(
    """
    io_setup 0, lookup_dcookie 18, umount2 39, mount 40, pivot_root 41, chroot 51, vhangup 58, quotactl 60,
    vmsplice 75, acct 89, personality 92, unshare 97, kexec_load 104, init_module 105, delete_module 106,
    clock_settime 112, syslog 116, ptrace 117, reboot 142, sethostname 161, setdomainname 162, settimeofday 170,
    adjtimex 171, mq_open 180, msgget 186, semget 190, shmget 194, socket 198, add_key 217, request_key 218,
    keyctl 219, swapon 224, swapoff 225, migrate_pages 238, move_pages 239, perf_event_open 241, fanotify_init 262,
    name_to_handle_at 264, open_by_handle_at 265, clock_adjtime 266, setns 268, process_vm_readv 270,
    process_vm_writev 271, kcmp 272, finit_module 273, memfd_create 279, bpf 280, userfaultfd 282,
    kexec_file_load 294
    """
)
_MACHINES = {"x86_64": (0xC000003E, _X86_64, 56, 16), "aarch64": (0xC00000B7, _AARCH64, 220, 29)}
"""By machine: the architecture's mark in a call, the calls refused, the numbers of `clone` and `ioctl`."""
_CLONE3 = 435
_NEW_NAMESPACE = 0x7E020080
"""The flags of `clone` that make a namespace of any kind."""
_TIOCSTI = 0x5412
"""The `ioctl` that types into a terminal."""

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _FIRST, _SECOND = 0, 4, 16, 24
"""Where the call's number, its architecture and the low halves of two arguments lie in what a filter sees."""
_ALLOW, _KILL, _REFUSE = 0x7FFF0000, 0x80000000, 0x00050000
_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _MODE_FILTER = 22, 38, 2


def available() -> bool:
    """True if there is a filter for this machine's kind of processor."""
    return platform.machine() in _MACHINES


_OF_CONTAINERS = frozenset(
    ("socket", "memfd_create", "shmget", "semget", "msgget", "mq_open", "personality", "io_setup")
)
"""Calls that a container's programs may make: what these make lies in namespaces of its own."""


def forbid_calls(container: bool = False) -> None:
    """Filter the calls of this process from now on, and forbid it to gain privileges.

    Args:
        container: allow what programs of a container may do besides.

    Raises:
        OSError: the kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_NO_NEW_PRIVS)")
    if not available():
        return
    code = program(platform.machine(), _OF_CONTAINERS if container else frozenset())
    buffer = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *one) for one in code))
    header = struct.pack("HxxxxxxP", len(code), ctypes.addressof(buffer))
    if libc.prctl(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.create_string_buffer(header), 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_SECCOMP)")


def program(machine: str, allowed: frozenset[str] = frozenset()) -> list[tuple[int, int, int, int]]:
    """The filter for a kind of processor: instructions (code, steps if true, steps if false, operand).

    Args:
        machine: the kind.
        allowed: calls that it does not refuse; of sockets those of this machine and of the Internet's protocols.
    """
    mark, calls, clone, ioctl = _MACHINES[machine]
    refuse, unknown = _REFUSE | errno.EPERM, _REFUSE | errno.ENOSYS
    instructions = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, mark),
        (_RETURN, 0, 0, _KILL),  # calls of the 32-bit interface have other numbers
        (_LOAD, 0, 0, _NUMBER),
    ]
    if machine == "x86_64":
        instructions += [(_AT_LEAST, 0, 1, 0x40000000), (_RETURN, 0, 0, unknown)]  # the x32 interface
    refused = {name: number for name, number in {**calls, **_SAME}.items() if name not in allowed}
    for number in sorted(refused.values()):
        instructions += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, refuse)]
    instructions += [
        (_EQUAL, 0, 1, _CLONE3),
        (_RETURN, 0, 0, unknown),
    ]  # its flags cannot be seen; libc falls back to clone
    if "socket" in allowed:
        wanted = [(_EQUAL, 3 - place, 0, family) for place, family in enumerate((1, 2, 10))]
        instructions += [(_EQUAL, 0, 6, calls["socket"]), (_LOAD, 0, 0, _FIRST), *wanted]
        instructions += [(_RETURN, 0, 0, _REFUSE | errno.EAFNOSUPPORT), (_RETURN, 0, 0, _ALLOW)]
    instructions += [
        (_EQUAL, 0, 3, clone),
        (_LOAD, 0, 0, _FIRST),
        (_ANY_BIT, 0, 5, _NEW_NAMESPACE),
        (_RETURN, 0, 0, refuse),
    ]
    instructions += [(_EQUAL, 0, 3, ioctl), (_LOAD, 0, 0, _SECOND), (_EQUAL, 0, 1, _TIOCSTI), (_RETURN, 0, 0, refuse)]
    return [*instructions, (_RETURN, 0, 0, _ALLOW)]


_CREATE, _ADD, _RESTRICT = 444, 445, 446
_BENEATH, _VERSION = 1, 1
_NO_NEW_PRIVS = 38
_READ = 0b1101
"""Execute, read files, read directories."""
_ON_FILES = 1 << 0 | 1 << 1 | 1 << 2 | 1 << 14 | 1 << 15
"""Rights that a rule on what is no directory may give."""
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_libc = ctypes.CDLL(None, use_errno=True)


def version() -> int:
    """Return the version of the kernel's Landlock; 0 where there is none."""
    return max(0, int(_libc.syscall(_CREATE, None, 0, _VERSION)))


def confine_files(readable: Iterable[str], writable: str) -> None:
    """Wall this process in; nothing where the kernel has no Landlock.

    Args:
        readable: directories of which it may read all.
        writable: a directory in which it may do anything.

    Raises:
        OSError: the kernel refuses.
    """
    landlock = version()
    if not landlock:
        return
    everything = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(landlock, 16)) - 1
    fields = (
        everything,
        3 if landlock >= 4 else 0,
        3 if landlock >= 6 else 0,
    )  # files; TCP; abstract sockets and signals
    size = 24 if landlock >= 6 else 16 if landlock >= 4 else 8
    rules = _checked("landlock_create_ruleset", _CREATE, struct.pack("QQQ", *fields), size, 0)
    files = ["/etc/ld.so.cache", *_DEVICES]
    for path in [*readable, "/usr", "/bin", "/lib", "/lib64", *files, writable]:
        try:
            place = os.open(path, os.O_PATH)
        except OSError:
            continue
        allowed = everything if path == writable else _READ | 2 * (path in _DEVICES)
        allowed &= everything if os.path.isdir(path) else _ON_FILES
        _checked("landlock_add_rule", _ADD, rules, _BENEATH, struct.pack("=Qi", allowed, place), 0)
        os.close(place)
    _libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0)
    _checked("landlock_restrict_self", _RESTRICT, rules, 0)
    os.close(rules)


def _checked(name: str, *args: int | bytes) -> int:
    result = int(_libc.syscall(*args))
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")
    return result


_NEW_MOUNTS, _NEW_USERS = 0x00020000, 0x10000000
_NEW_ALL = _NEW_MOUNTS | _NEW_USERS | 0x02000000 | 0x04000000 | 0x08000000 | 0x20000000 | 0x40000000
"""Mounts, users; control groups, host name, System V objects, processes, network."""
_NEW_NETWORK = 0x40000000
_BIND, _RECURSIVE, _PRIVATE, _NOSUID, _NODEV, _NOEXEC, _DETACH = 4096, 16384, 1 << 18, 2, 4, 8, 2
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
_CONFINE_DEVICES = ("null", "zero", "full", "random", "urandom")


def enter(readable: Sequence[str]) -> int:
    """Move this process into a user and a mount namespace whose root holds only what a program may read.

    Args:
        readable: directories, by their paths here, besides /usr.

    Returns:
        A descriptor of the machine's /proc, which nothing in the new root leads to. Never to be given to a program.

    Raises:
        OSError: the kernel refuses; the text has the call.
    """
    proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
    root, user, group = os.geteuid() == 0, os.geteuid(), os.getegid()
    users = [(0, user), (UNPRIVILEGED, UNPRIVILEGED)] if root else [(0, user)]
    groups = [(0, group), (UNPRIVILEGED, UNPRIVILEGED)] if root else [(0, group)]
    with Mapper(proc, users, groups, root) as mapper:  # root's map can only be written from outside
        _call("unshare(user namespace)", _libc.unshare, _NEW_USERS | _NEW_MOUNTS)
        mapper.map()
    _new_root([path for path in readable if os.path.isdir(path)])
    return proc


class Mapper:
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

    def __enter__(self) -> Mapper:
        return self

    def map(self) -> None:
        """Have the maps of the calling process written."""
        os.write(self._tell, b"!")
        answer = os.read(self._answer, 1000).decode()
        if answer != "ok":
            raise OSError(f"writing uid_map: {answer}")

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


def _new_root(readable: Sequence[str]) -> None:
    """Make a read-only root of bind mounts, and let go of the old one."""
    _mount(None, "/", None, _RECURSIVE | _PRIVATE)
    trees, files, links = machine(readable)
    if hidden := [path for path in trees if path in ("/", WORK)]:
        raise OSError(
            f"{hidden[0]} itself holds the interpreter or its packages, and a program has its own; install them into "
            "a directory below"
        )
    sources = {path: os.open(path, os.O_PATH) for path in [*trees, *files]}
    _mount("sandbox", WORK, "tmpfs", _NOSUID | _NODEV, "mode=755,size=1m,nr_inodes=2k")
    for path, source in sources.items():
        _make_place(f"{WORK}{path}", path in files)
        _mount(f"/proc/self/fd/{source}", f"{WORK}{path}", None, _BIND | _RECURSIVE)
        os.close(source)
        _read_only(f"{WORK}{path}", devices=path.startswith("/dev/"))
    for name, leads in links.items():
        os.symlink(leads, f"{WORK}/{name}")
    Path(f"{WORK}/etc").mkdir(exist_ok=True)
    Path(f"{WORK}/etc/passwd").write_text(f"user:x:{INSIDE}:{INSIDE}::{WORK}:/bin/sh\n")
    Path(f"{WORK}/etc/group").write_text(f"user:x:{INSIDE}:\n")
    Path(f"{WORK}{WORK}").mkdir(exist_ok=True)
    if not os.path.isdir(f"{WORK}/dev/shm"):  # where an environment lies below it, it is shown and no more
        os.symlink(WORK, f"{WORK}/dev/shm")
    _pivot(WORK)
    _read_only("/", recursive=False)


def machine(readable: Sequence[str]) -> tuple[list[str], list[str], dict[str, str]]:
    """Parts of this machine that a root without an image shows: directories, files and devices, links in `/`."""
    names = [name for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32") if os.path.islink(f"/{name}")]
    links = {name: os.readlink(f"/{name}") for name in names}
    trees = ["/usr", *(f"/{name}" for name in ("bin", "sbin", "lib", "lib64") if name not in links), *readable]
    files = ["/etc/ld.so.cache", *(f"/dev/{name}" for name in _CONFINE_DEVICES)]
    return (
        _outermost([path for path in trees if os.path.isdir(path)]),
        [path for path in files if os.path.exists(path)],
        links,
    )


def _make_place(path: str, file: bool) -> None:
    """Make an empty file or directory on which something is mounted."""
    os.makedirs(os.path.dirname(path) if file else path, exist_ok=True)
    if file:
        if os.path.islink(path):
            os.unlink(path)
        Path(path).touch()


def _pivot(root: str) -> None:
    """Make a mounted directory the root, and let go of the old one."""
    os.chdir(root)
    _call("pivot_root", _libc.syscall, _PIVOT_ROOT[os.uname().machine], b".", b".")
    _call("umount of the old root", _libc.umount2, b".", _DETACH)
    os.chdir("/")


def _outermost(paths: Sequence[str]) -> list[str]:
    """Paths without those that lie in others of them."""
    outermost: list[str] = []
    for path in sorted({os.path.abspath(path) for path in paths}):
        if not any(path == outer or path.startswith(f"{outer}/") for outer in outermost):
            outermost.append(path)
    return outermost


def isolate(network: bool = False) -> None:
    """Give the calling process namespaces of its own; its next child is the first process of the new one.

    The maps of its users are to be written by another process, in the fork server's namespace.

    Args:
        network: leave it the machine's network.
    """
    _call("unshare", _libc.unshare, _NEW_ALL & ~(_NEW_NETWORK if network else 0))


def private_directory(size: int) -> None:
    """Mount an empty directory at /tmp, which lies in memory and holds `size` bytes; go there.

    What the root shows below /tmp, an environment that was made there, is mounted in it again.
    """
    devices = {}
    for name in os.listdir(WORK):
        path = f"{WORK}/{name}"
        opening = (_OPEN_TREE, _AT_FDCWD, path.encode(), _CLONE_TREE)
        devices[name] = _call(f"open_tree of {path}", _libc.syscall, *opening)
    text = f"mode=700,uid={INSIDE},gid={INSIDE},size={size},nr_inodes=16k"
    _mount("work", WORK, "tmpfs", _NOSUID | _NODEV, text)
    os.chdir(WORK)
    _libc.setfsuid(INSIDE)  # to whom new directories belong: nobody else need exist in this namespace
    _libc.setfsgid(INSIDE)
    for name, tree in devices.items():
        os.mkdir(name)
        moving = (_MOVE_MOUNT, tree, b"", _AT_FDCWD, name.encode(), _FROM_DESCRIPTOR)
        _call(f"move_mount to {WORK}/{name}", _libc.syscall, *moving)
        os.close(tree)


CONTAINER_CAPABILITIES = (0, 1, 3, 4, 5, 10)
"""CHOWN, DAC_OVERRIDE, FOWNER, FSETID, KILL, NET_BIND_SERVICE: what the owner of a container's files is used to."""


def private_root(spec: Mapping[str, Any]) -> tuple[int, int]:
    """Give the first process of a container, who becomes its root user, a root directory of its own.

    Args:
        spec: `layers`, directories that hold its files, the uppermost first, which are not written; `bytes` that may be
            written, in memory; `visible`, directories of this machine besides /usr that are seen in it, read-only, or
            None for nothing of the machine; `network`, names are resolved as on this machine; `upper`, where what is
            written goes instead of into memory, or None.

    Returns:
        Descriptors of the directory that is written and of its file system.

    Raises:
        OSError: the kernel refuses; the text has the call.
    """
    _mount(None, "/", None, _RECURSIVE | _PRIVATE)
    trees, files, links = machine(spec["visible"] or ())
    if spec["visible"] is None:
        trees, files, links = [], [path for path in files if path.startswith("/dev/")], {}
    else:
        trees += ["/etc/alternatives", "/etc/ssl"]
    wanted = [*trees, *files, "/dev/tty", *(["/etc/resolv.conf"] if spec["network"] else [])]
    copies = {path: _copied(os.path.realpath(path)) for path in wanted if os.path.exists(path)}
    layers = [f"/proc/self/fd/{os.open(path, os.O_PATH | os.O_DIRECTORY)}" for path in spec["layers"]]
    over = f"/proc/self/fd/{os.open(spec['upper'], os.O_PATH | os.O_DIRECTORY)}" if spec["upper"] else WORK
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    end_with_parent()
    size = int(spec["bytes"])
    _mount("container", WORK, "tmpfs", _NOSUID | _NODEV, f"mode=755,size={size},nr_inodes={max(1024, size >> 12)}")
    for path in (f"{over}/upper", f"{over}/work", *(f"{WORK}/{name}" for name in ("none", "root", "proc"))):
        os.mkdir(path)
    _mount("proc", f"{WORK}/proc", "proc", _NOSUID | _NODEV | _NOEXEC)  # refused where no other is to be seen
    copies = {"/proc": _copied(f"{WORK}/proc"), **copies}
    upper, disk = (os.open(path, os.O_RDONLY | os.O_DIRECTORY) for path in (f"{over}/upper", WORK))
    options = f"lowerdir={':'.join([*layers, f'{WORK}/none'])},upperdir={over}/upper,workdir={over}/work,userxattr"
    _mount("container", f"{WORK}/root", "overlay", _NOSUID | _NODEV, options)
    _pivot(f"{WORK}/root")
    _furnish(copies, links)
    return upper, disk


def _copied(path: str) -> int:
    """A copy of the mounts at a path, to be mounted elsewhere."""
    return _call(f"open_tree of {path}", _libc.syscall, _OPEN_TREE, _AT_FDCWD, path.encode(), _CLONE_TREE)


def _furnish(copies: Mapping[str, int], links: Mapping[str, str]) -> None:
    """Mount in a new root what is shown of the machine, and /proc and /dev of its own."""
    for path in ("/proc", "/dev"):
        if os.path.islink(path):
            os.unlink(path)  # an image may hold anything
        os.makedirs(path, exist_ok=True)
    _mount("dev", "/dev", "tmpfs", _NOSUID, "mode=755,size=64k")
    os.mkdir("/dev/pts")
    _mount("devpts", "/dev/pts", "devpts", _NOSUID | _NOEXEC, "newinstance,ptmxmode=0666,mode=620")
    for path, copy in copies.items():
        _make_place(path, not stat.S_ISDIR(os.fstat(copy).st_mode))
        _call(f"move_mount to {path}", _libc.syscall, _MOVE_MOUNT, copy, b"", _AT_FDCWD, path.encode(), 4)
        os.close(copy)
        if not path.startswith(("/dev/", "/proc")):
            _read_only(path)
    for name, leads in {
        **links,
        "dev/fd": "/proc/self/fd",
        "dev/stdin": "fd/0",
        "dev/stdout": "fd/1",
        "dev/stderr": "fd/2",
        "dev/ptmx": "pts/ptmx",
        "dev/shm": WORK,
    }.items():
        if not os.path.lexists(f"/{name}"):
            os.symlink(leads, f"/{name}")
    for path, text in {
        "/etc/passwd": "root:x:0:0::/root:/bin/sh\n",
        "/etc/group": "root:x:0:\n",
        "/etc/hosts": "127.0.0.1 localhost\n",
    }.items():
        os.makedirs(os.path.dirname(path), exist_ok=True)
        if not os.path.exists(path):
            Path(path).write_text(text)
    for path, mode in (("/tmp", 0o1777), ("/var/tmp", 0o1777), ("/root", 0o700)):
        os.makedirs(path, exist_ok=True)
        os.chmod(path, mode)


def raise_loopback() -> None:
    """Set the loopback device of a new network namespace going."""
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, 0x8914, struct.pack("16sH14s", b"lo", 0x41, b""))  # SIOCSIFFLAGS: up, running


def become(inside: int, set_groups: bool) -> None:
    """Become a user for good, and give up all capabilities."""
    if set_groups:
        os.setgroups([])
    os.setresgid(inside, inside, inside)
    os.setresuid(inside, inside, inside)
    drop_capabilities()


def drop_capabilities(keep: Sequence[int] = ()) -> None:
    """Give up all capabilities, also of programs started later.

    Args:
        keep: numbers of those that stay.
    """
    _libc.prctl(_PR_CAP_AMBIENT, 4, 0, 0, 0)
    capability = 0
    while capability in keep or _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) == 0:
        capability += 1
    mask = sum(1 << number for number in keep)
    header, rest = struct.pack("Ii", _CAPABILITIES_3, 0), struct.pack("6I", mask, mask, 0, 0, 0, 0)
    _call("capset", _libc.capset, header, rest)


def restrict(limits: Mapping[str, float], others: int, container: bool = False) -> None:
    """Set resource limits, and filter system calls, for this process and all that it starts.

    Args:
        limits: the fields of `Limits`.
        others: processes of this user that count besides those of the program.
        container: programs of every kind run, many of which reserve far more addresses than they use; so it is what
            they may write that is limited.
    """
    seconds, memory = max(1, round(limits["cpu_seconds"] + 0.5)), int(limits["memory_bytes"])
    wanted = {
        resource.RLIMIT_CPU: (seconds, seconds + 1),  # SIGXCPU, and a second later SIGKILL
        resource.RLIMIT_DATA if container else resource.RLIMIT_AS: memory,
        resource.RLIMIT_NPROC: int(limits["processes"]) + others,
        resource.RLIMIT_NOFILE: int(limits["open_files"]),
        resource.RLIMIT_FSIZE: int(limits["file_bytes"]),
        resource.RLIMIT_STACK: (8 if container else 64) << 20,
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
    forbid_calls(container)


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
