"""Where TensorPipe and gloo listen: the loopback on one machine, a named interface between machines.

Flows in: torchrun's environment. Flows out: `TP_SOCKET_IFNAME` and `GLOO_SOCKET_IFNAME`, before either starts.
"""

from __future__ import annotations

import os
import socket
import sys

from rlinf.runtime.base.errors import UserError


def bind_interface(interface: str | None, world: int) -> None:
    """Tell TensorPipe and gloo where to listen, before they start."""
    interface = interface or os.environ.get("RLINF_INTERFACE")
    all_local = int(os.environ.get("LOCAL_WORLD_SIZE", "0")) == world
    if interface is None and (all_local or _is_loopback(os.environ.get("MASTER_ADDR", ""))):
        interface = "lo0" if sys.platform == "darwin" else "lo"
    if interface is not None:
        there = [name for _, name in socket.if_nameindex()]
        if interface not in there:
            raise UserError(f"this machine has no network interface {interface!r}; it has {', '.join(there)}")
        os.environ["TP_SOCKET_IFNAME"] = interface
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def _is_loopback(address: str) -> bool:
    return address in ("localhost", "::1") or address.startswith("127.")
