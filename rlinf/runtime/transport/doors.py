"""Who may connect to the ports that torch RPC opens: the other machines of the job, and nobody else.

Flows in: the sockets that `init_rpc` made listen; the store. Flows out: a packet filter on each of them. Who wakes
whom: processes of one machine wait in the store until all of them have reached each other, and then let none in.

One stray connection to TensorPipe's port ends a job: bytes that are not its protocol abort the process
(`std::bad_alloc`), and a connection that closes at once makes the port deaf. Neither can be configured away, and the
address can only be an interface's first one, so any port scan finds it. But a process may put a filter on its own
sockets: a connection that the filter refuses never comes to be. Pipes between two processes are made at the first call
and used for ever, so processes of one machine make theirs while joining, and then let nobody in from there. Other
machines are let in by address, because at 1,000 machines not everybody can call everybody first.

Only Linux has this. What it cannot keep out is in docs/security.md.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import json
import os
import socket
import stat
import struct
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore

from .rendezvous import job_store

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
    for inode, found in _listening():
        if inode not in before and found.getsockname()[0] != "0.0.0.0":
            opened.append(found)


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
    store = PrefixStore("doors", job_store())
    store.set_timeout(timedelta(seconds=timeout))
    mine = opened[0].getsockname()[0] if opened else ""
    store.set(f"address/{rank}", mine)
    if rank == 0:
        found = [text.decode() for text in store.multi_get([f"address/{other}" for other in range(hosts)])]
        strange = _connected(opened) - set(found)
        if strange or "" in found:
            sys.stderr.write(
                "rlinf: the RPC ports stay open to whoever can reach them (docs/security.md): "
                + (f"{', '.join(strange)} is connected, and no process listens there\n" if strange else "no filter\n")
            )
        store.set("addresses", json.dumps([] if strange or "" in found else found))
    where: list[str] = json.loads(store.get("addresses"))
    if where:
        reach([other for other in range(hosts) if other != rank and where[other] == mine])
        if store.add(f"reached/{mine}", 1) == Counter(where)[mine]:
            store.set(f"closing/{mine}", "")
        store.wait([f"closing/{mine}"])
    for door in opened:
        if where:
            admit(door, sorted(set(where) - {mine}))
        door.close()


def admit(door: socket.socket, guests: Sequence[str]) -> None:
    """Let only these IPv4 addresses make connections to a listening socket; those that exist go on."""
    numbers = sorted(int(ipaddress.IPv4Address(guest)) for guest in guests)
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
    door.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, filter_of)


def _listening() -> list[tuple[int, socket.socket]]:
    """The IPv4 sockets of this process that listen, as (inode, a duplicate)."""
    found = []
    for name in os.listdir("/proc/self/fd") if sys.platform == "linux" else ():
        with contextlib.suppress(OSError):  # closed meanwhile by another thread
            status = os.fstat(int(name))
            if not stat.S_ISSOCK(status.st_mode):
                continue
            candidate = socket.socket(fileno=os.dup(int(name)))
            if candidate.family == socket.AF_INET and candidate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                found.append((status.st_ino, candidate))
            else:
                candidate.close()
    return found


def _connected(doors: Sequence[socket.socket]) -> set[str]:
    """The addresses from which connections to these sockets came that exist now."""
    ports = {door.getsockname()[1] for door in doors}
    found = set()
    with open("/proc/self/net/tcp") as table:
        for line in list(table)[1:]:
            _, local, remote, state, *_ = line.split()
            if state == "01" and int(local.partition(":")[2], 16) in ports:
                found.add(socket.inet_ntoa(struct.pack("=I", int(remote.partition(":")[0], 16))))
    return found
