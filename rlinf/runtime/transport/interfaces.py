"""Which network interface a job listens on: the loopback on one machine, between machines the one to MASTER_ADDR.

Flows in: torchrun's environment, and what the user named. Flows out: `TP_SOCKET_IFNAME`, `GLOO_SOCKET_IFNAME` and
`NCCL_SOCKET_IFNAME`, before any of the three starts; or one error that names what to set.

Left alone, TensorPipe and gloo listen on the address that the host's name resolves to. On many machines that is
127.0.0.1, where no other machine can come in; on some it is a public address, where everybody can.
"""

from __future__ import annotations

import ctypes
import os
import socket
import sys

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
    chosen = interface or os.environ.get("RLINF_INTERFACE")
    if not chosen:
        chosen = LOOPBACK if on_one_machine(world) else os.environ.get("TP_SOCKET_IFNAME") or _towards_master()
    there = [name for _, name in socket.if_nameindex()]
    if chosen not in there:
        raise UserError(f"this machine has no network interface {chosen!r}; it has {', '.join(there)}")
    os.environ["TP_SOCKET_IFNAME"] = chosen
    os.environ.setdefault("GLOO_SOCKET_IFNAME", chosen)
    os.environ.setdefault(
        "NCCL_SOCKET_IFNAME", f"={chosen}"
    )  # without the sign NCCL takes it as the beginning of names


def on_one_machine(world: int) -> bool:
    """Whether all processes of the job are on this machine: torchrun started all, or they meet on the loopback."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    return local == world or _is_loopback(os.environ.get("MASTER_ADDR", ""))


def addresses() -> list[tuple[str, str]]:
    """This machine's interfaces with their addresses, IPv4 before IPv6, as (name, address)."""
    libc = ctypes.CDLL(None, use_errno=True)
    first = ctypes.POINTER(_Address)()
    if libc.getifaddrs(ctypes.byref(first)) != 0:
        raise OSError(ctypes.get_errno(), "getifaddrs failed")
    found = []
    entry = first
    while entry:
        if text := _readable(entry.contents.address):
            found.append((entry.contents.name.decode(), text))
        entry = ctypes.cast(entry.contents.next, ctypes.POINTER(_Address))
    libc.freeifaddrs(first)
    return sorted(found, key=lambda pair: ":" in pair[1])


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
