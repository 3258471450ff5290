"""The network of a job: interface, meeting store, packet filters, and whether the other hosts live.

Which network interface a job listens on: the loopback on one machine, between machines the one to MASTER_ADDR.

Flows in: torchrun's environment, and what the user named. Flows out: `TP_SOCKET_IFNAME`, `GLOO_SOCKET_IFNAME` and
`NCCL_SOCKET_IFNAME`, before any of the three starts; or one error that names what to set.

Left alone, TensorPipe and gloo listen on the address that the host's name resolves to. On many machines that is
127.0.0.1, where no other machine can come in; on some it is a public address, where everybody can.

The store on which the processes of a job find each other, with a part of its own for every restart.

On one machine it is a file that this user alone can reach: whoever can write where the processes look for each other's
addresses can point them elsewhere, and torchrun's store listens on every address and asks nobody for a password. Its
place is the directory that torchrun makes for the logs of a start of the job, whose processes all know it.

On several machines it is torchrun's. torchrun may keep one store over restarts, and with it the addresses of processes
that are dead. Who meets there would wait for them, so nobody looks at what an earlier start of the job has left. Where
it makes a new store for every start there is nothing to keep apart, and the count of restarts must not be looked at:
each machine has its own, and one that has taken another's place begins at 0.

Who may connect to the ports that torch RPC opens: the other machines of the job, and nobody else.

Who wakes whom: processes of one machine wait in the store until all of them have reached each other, and then let none
in.

One stray connection to TensorPipe's port ends a job: bytes that are not its protocol abort the process
(`std::bad_alloc`), and a connection that closes at once makes the port deaf. Neither can be configured away, and the
address can only be an interface's first one, so any port scan finds it. But a process may put a filter on its own
sockets: a connection that the filter refuses never comes to be. Pipes between two processes are made at the first call
and used for ever, so processes of one machine make theirs while joining, and then let nobody in from there. Other
machines are let in by address, because at 1,000 machines not everybody can call everybody first.

Only Linux has this. What it cannot keep out is in docs/security.md.

Liveness of the other hosts: each is asked again and again, one question at a time, and counts as lost after too long
a silence.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import ipaddress
import json
import os
import socket
import stat
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, Store
from torch.distributed.rendezvous import register_rendezvous_handler

from rlinf.runtime.base.errors import UserError

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


def bind_interface(interface: str | None, world: int) -> None:
    """Tell TensorPipe, gloo and NCCL where to listen, before they start.

    Args:
        interface: what the program named; else `RLINF_INTERFACE` counts, and between machines `TP_SOCKET_IFNAME`.
        world: number of processes of the job.

    Raises:
        UserError: there is no such interface, or there are several machines and none is named or can be found.
    """
    interface = interface or os.environ.get("RLINF_INTERFACE")
    if not interface:
        interface = LOOPBACK if on_one_machine(world) else os.environ.get("TP_SOCKET_IFNAME") or _towards_master()
    there = [name for _, name in socket.if_nameindex()]
    if interface not in there:
        raise UserError(f"this machine has no network interface {interface!r}; it has {', '.join(there)}")
    os.environ["TP_SOCKET_IFNAME"] = interface
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")  # without the sign: all whose names begin so


def on_one_machine(world: int) -> bool:
    """True if all processes of the job are on this machine: torchrun started all, or they meet on the loopback."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    return local == world or _is_loopback(os.environ.get("MASTER_ADDR", ""))


def addresses() -> list[tuple[str, str]]:
    """This machine's interfaces with their addresses, IPv4 before IPv6, as (name, address)."""
    libc = ctypes.CDLL(None, use_errno=True)
    first = ctypes.POINTER(_Address)()
    if libc.getifaddrs(ctypes.byref(first)) != 0:
        raise OSError(ctypes.get_errno(), "getifaddrs failed")
    pairs = []
    entry = first
    while entry:
        if text := _readable(entry.contents.address):
            pairs.append((entry.contents.name.decode(), text))
        entry = ctypes.cast(entry.contents.next, ctypes.POINTER(_Address))
    libc.freeifaddrs(first)
    return sorted(pairs, key=lambda pair: ":" in pair[1])


def outward_address() -> str:
    """This machine's address for processes that are none of the job's: on the interface that was named, or on the only
    one that leads out.

    Raises:
        UserError: there are several, or none.
    """
    outward = _outward(addresses())
    names = (os.environ.get("RLINF_INTERFACE", ""), os.environ.get("TP_SOCKET_IFNAME", ""), *outward)
    address = next((outward[name] for name in names[: 2 + (len(outward) == 1)] if name in outward), None)
    if address is None:
        there = ", ".join(f"{name} ({own})" for name, own in sorted(outward.items())) or "none but the loopback"
        raise UserError(
            f"by which network interface others reach {socket.gethostname()} cannot be told: set RLINF_INTERFACE to "
            f"one of those that it has: {there}; or write the address instead of auto"
        )
    return f"[{address}]" if ":" in address else address


class _Address(ctypes.Structure):
    """The beginning of `struct ifaddrs`."""

    _fields_ = (
        ("next", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("flags", ctypes.c_uint),
        ("address", ctypes.c_void_p),
    )


def _readable(sockaddr: int | None) -> str | None:
    """The address in a `struct sockaddr`, unless it is of a family without ports."""
    if sockaddr is None:
        return None
    head = ctypes.string_at(sockaddr, 2)
    family = head[1] if sys.platform == "darwin" else int.from_bytes(head, sys.byteorder)
    if family == socket.AF_INET:
        return socket.inet_ntop(family, ctypes.string_at(sockaddr, 8)[4:])
    if family == socket.AF_INET6:
        return socket.inet_ntop(family, ctypes.string_at(sockaddr, 24)[8:])
    return None


def _towards_master() -> str:
    """The interface over which packets to MASTER_ADDR leave; on that machine itself, the one that has this address."""
    master = os.environ.get("MASTER_ADDR", "")
    here = addresses()
    try:
        local = _source_towards(master)
    except OSError as error:
        raise _cannot_tell(master, f"there is no way to it from here ({error})", here) from None
    names = [name for name, address in here if address == local]
    if names and not _is_loopback(local):
        return names[0]
    # On the master's own machine its name may stand for 127.0.0.1; with one way out, that is the one meant.
    if len(outward := _outward(here)) == 1:
        return next(iter(outward))
    raise _cannot_tell(master, f"it is {local} here, which is on no interface that other machines can reach", here)


def _source_towards(master: str) -> str:
    """This machine's address on the way to another. Connecting a UDP socket asks for the route and sends nothing."""
    if not master:
        raise OSError("MASTER_ADDR is not set")
    error = OSError("it resolves to no address")
    for family, kind, protocol, _, address in socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM):
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0]).partition("%")[0]
        except OSError as failed:
            error = failed
    raise error


def _outward(here: list[tuple[str, str]]) -> dict[str, str]:
    """Interfaces by which other machines may be reached, each with its first address."""
    return {n: a for n, a in reversed(here) if not _is_loopback(a) and not a.startswith("fe80:")}


def _cannot_tell(master: str, why: str, here: list[tuple[str, str]]) -> UserError:
    choice = ", ".join(f"{name} ({address})" for name, address in sorted(_outward(here).items()))
    return UserError(
        f"this job runs on several machines, and which network interface of {socket.gethostname()} leads to the others "
        f"cannot be told from MASTER_ADDR {master!r}: {why}. Set RLINF_INTERFACE to the one of the private network"
        f"{f': {choice}' if choice else '; this machine has none but the loopback'}"
    )


def _is_loopback(address: str) -> bool:
    return address in ("localhost", "::1") or address.startswith("127.")


SCHEME = "rlinf"
"""`init_method=f"{SCHEME}://"` makes torch meet here."""


def job_store() -> Store:
    """A connection to the store, by what torchrun set in the environment."""
    if (directory := _private_directory()) is not None:
        port = os.environ.get("MASTER_PORT", "")  # of another job that one of the processes starts, it is another one
        return FileStore(str(directory / f"rlinf-store-{port}"), -1)
    store, _, _ = next(dist.rendezvous("env://"))
    lasting = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return PrefixStore(f"start/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0') if lasting else 'only'}", store)


def _private_directory() -> Path | None:
    """The directory that torchrun makes anew for every start of a job on one machine, within one that its user alone
    may enter; None on several machines, without torchrun, or where others may enter.

    It is there for logs and errors: `RUN/attempt_N/LOCAL_RANK/error.json`, where RUN is of the job and private.
    """
    file, local = os.environ.get("TORCHELASTIC_ERROR_FILE"), os.environ.get("LOCAL_WORLD_SIZE")
    if not file or local is None or local != os.environ.get("WORLD_SIZE"):
        return None
    attempt = Path(file).absolute().parents[1]
    try:
        about = attempt.parent.lstat()
    except OSError:  # a container of its own for each process
        return None
    private = stat.S_ISDIR(about.st_mode) and not about.st_mode & 0o077 and about.st_uid == os.geteuid()
    return attempt if private and attempt.is_dir() else None


def _meet(url: str, **options: Any) -> Iterator[tuple[Store, int, int]]:
    yield job_store(), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    raise RuntimeError(f"{url} serves one meeting")


register_rendezvous_handler(SCHEME, _meet)


SO_ATTACH_FILTER = 26
MANY = 400
"""Machines beyond which their addresses are admitted as one range: the kernel bounds the memory of a filter."""

# Instructions of a classic packet filter: linux/bpf_common.h
LOAD_BYTE, LOAD_WORD, AND, IF_EQUAL, IF_AT_LEAST, IF_GREATER, RETURN = 0x30, 0x20, 0x54, 0x15, 0x35, 0x25, 0x06
TCP_FLAGS, SYN, SYN_OR_ACK = 13, 0x02, 0x12
IP_SOURCE = 0xFFF00000 + 12
"""The sender's address: SKF_NET_OFF, where a filter finds the network header, and its place in it."""


@contextlib.contextmanager
def noticing() -> Iterator[list[socket.socket]]:
    """The list that it gives holds, at the end, the IPv4 sockets that began to listen on one address meanwhile."""
    before = {inode for inode, _ in _listening()}
    opened: list[socket.socket] = []
    yield opened
    for inode, listener in _listening():
        if inode not in before and listener.getsockname()[0] != "0.0.0.0":
            opened.append(listener)


def close_to_strangers(
    opened: Sequence[socket.socket], rank: int, hosts: int, reach: Callable[[list[int]], None], timeout: float
) -> None:
    """Filter who may connect to these sockets from now on. Called by all processes of a job, which wait for each other.

    Args:
        opened: listening sockets, all on one address; closed here, which the listener does not notice.
        rank, hosts: this process's, and how many there are.
        reach: makes the connections from this process to those of these ranks.
        timeout: seconds to wait for others.
    """
    store = PrefixStore("firewall", job_store())
    store.set_timeout(timedelta(seconds=timeout))
    mine = opened[0].getsockname()[0] if opened else ""
    store.set(f"address/{rank}", mine)
    if rank == 0:
        everybody = [text.decode() for text in store.multi_get([f"address/{other}" for other in range(hosts)])]
        strange = _connected(opened) - set(everybody)
        if strange or "" in everybody:
            sys.stderr.write(
                "rlinf: the RPC ports stay open to whoever can reach them (docs/security.md): "
                + (f"{', '.join(strange)} is connected, and no process listens there\n" if strange else "no filter\n")
            )
        store.set("addresses", json.dumps([] if strange or "" in everybody else everybody))
    where: list[str] = json.loads(store.get("addresses"))
    if where:
        reach([other for other in range(hosts) if other != rank and where[other] == mine])
        if store.add(f"reached/{mine}", 1) == Counter(where)[mine]:
            store.set(f"closing/{mine}", "")
        store.wait([f"closing/{mine}"])
    for listener in opened:
        if where:
            admit(listener, sorted(set(where) - {mine}))
        listener.close()


def admit(listener: socket.socket, peers: Sequence[str]) -> None:
    """Let only these IPv4 addresses make connections to a listening socket; those that exist go on."""
    numbers = sorted(int(ipaddress.IPv4Address(address)) for address in peers)
    ranges = [(number, number) for number in numbers] if len(numbers) <= MANY else [(numbers[0], numbers[-1])]
    program = [
        (LOAD_BYTE, 0, 0, TCP_FLAGS),
        (AND, 0, 0, SYN_OR_ACK),
        (IF_EQUAL, 1, 0, SYN),
        (RETURN, 0, 0, 0xFFFFFFFF),  # of a connection that exists
        (LOAD_WORD, 0, 0, IP_SOURCE),
    ]
    for first, last in ranges:
        program += [(IF_AT_LEAST, 0, 2, first), (IF_GREATER, 1, 0, last), (RETURN, 0, 0, 0xFFFFFFFF)]
    program.append((RETURN, 0, 0, 0))
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *instruction) for instruction in program))
    filter_of = struct.pack("HP", len(program), ctypes.addressof(code))
    listener.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, filter_of)


def _listening() -> list[tuple[int, socket.socket]]:
    """The IPv4 sockets of this process that listen, as (inode, a duplicate)."""
    sockets = []
    for name in os.listdir("/proc/self/fd") if sys.platform == "linux" else ():
        with contextlib.suppress(OSError):  # closed meanwhile by another thread
            status = os.fstat(int(name))
            if not stat.S_ISSOCK(status.st_mode):
                continue
            candidate = socket.socket(fileno=os.dup(int(name)))
            if candidate.family == socket.AF_INET and candidate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                sockets.append((status.st_ino, candidate))
            else:
                candidate.close()
    return sockets


def _connected(listeners: Sequence[socket.socket]) -> set[str]:
    """The addresses from which connections to these sockets came that exist now."""
    ports = {listener.getsockname()[1] for listener in listeners}
    peers = set()
    with open("/proc/self/net/tcp") as table:
        for line in list(table)[1:]:
            _, local, remote, state, *_ = line.split()
            if state == "01" and int(local.partition(":")[2], 16) in ports:
                peers.add(socket.inet_ntoa(struct.pack("=I", int(remote.partition(":")[0], 16))))
    return peers


HOST_TIMEOUT = 60.0
"""Seconds. TCP tries again at growing intervals after a network's failure: one of 20 s may cost 45 s of silence."""
BEATS = 20
"""Questions per timeout. A host's end is noticed up to one beat later than the timeout says; a question costs both
sides 0.15 ms together, so 1,000 hosts asked every 3 s take 5 % of a core."""
AT_ONCE = 16
"""Questions until the loop gets to do something else: about 2 ms."""


class Heartbeat:
    """Asks hosts whether they live.

    Only time in which this process was awake counts as silence: after it was stopped itself, or its loop was blocked,
    the answers may be here, unread.

    Args:
        timeout: seconds of silence after which a host counts as lost.
        wanted: the hosts to ask now.
        probe: asks a host; its second argument is to be called on the loop with the answer's arrival.
        lost: told of a host, and why.
        now: the clock, seconds.
    """

    def __init__(
        self,
        timeout: float,
        wanted: Callable[[], Iterable[int]],
        probe: Callable[[int, Callable[[], None]], None],
        lost: Callable[[int, str], None],
        now: Callable[[], float],
    ):
        self._timeout = timeout
        self._beat = timeout / BEATS
        self._wanted = wanted
        self._probe = probe
        self._lost = lost
        self._now = now
        self._silence: dict[int, int] = {}
        """Of hosts with an unanswered question, beats since it was asked."""

    async def run(self) -> None:
        """Go on until cancelled."""
        while True:
            await self._ask()
            start = self._now()
            await asyncio.sleep(self._beat)
            if self._now() - start < 2 * self._beat:
                self._count()

    async def _ask(self) -> None:
        for number, host in enumerate(sorted(set(self._wanted()) - self._silence.keys()), 1):
            self._silence[host] = 0
            self._probe(host, partial(self._answered, host))
            if number % AT_ONCE == 0:
                await asyncio.sleep(0)

    def _answered(self, host: int) -> None:
        self._silence.pop(host, None)

    def _count(self) -> None:
        for host in list(self._silence):
            self._silence[host] += 1
            if self._silence[host] == BEATS:
                del self._silence[host]
                since = time.strftime("%H:%M:%S", time.localtime(time.time() - self._timeout))
                self._lost(host, f"it has not answered since {since}, for {self._timeout:g} s (host_timeout)")
