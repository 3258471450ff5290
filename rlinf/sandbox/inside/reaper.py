"""Removes containers and snapshots of Docker or Podman whose owner is gone.

In: the daemon's socket, and labels that name owners. Out: nothing is left of them. As a process of its own it sleeps
until its owner ends in any way. Imports the standard library alone.
"""

from __future__ import annotations

import http.client
import json
import os
import select
import socket
from collections.abc import Callable
from urllib.parse import quote

LABEL = "rlinf.owner"
"""The label that names an owner: its machine, its process, and when that started."""


def owner(pid: int) -> str:
    """Name a process of this machine so that no later one has its name."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            began = file.read().rpartition(")")[2].split()[19]
    except OSError:
        began = "gone"
    return f"{socket.gethostname()}/{pid}/{began}"


def is_gone(label: str) -> bool:
    """True if a label names an owner of this machine that has ended."""
    host, _, rest = label.partition("/")
    pid = rest.partition("/")[0]
    return host == socket.gethostname() and pid.isdigit() and owner(int(pid)) != label


def reap(path: str, matches: Callable[[str], bool]) -> None:
    """Remove what carries a label that matches. Blocks.

    Raises:
        OSError: the daemon does not answer.
    """
    of_ours = quote(json.dumps({"label": [LABEL]}))
    for kind, name in (("containers", "Id"), ("images", "Id")):
        for each in json.loads(_ask(path, "GET", f"/{kind}/json?all=1&filters={of_ours}")):
            if matches((each.get("Labels") or {}).get(LABEL, "")):
                _ask(path, "DELETE", f"/{kind}/{quote(each[name])}?force=true")


def _ask(path: str, method: str, target: str) -> bytes:
    connection = http.client.HTTPConnection("docker", timeout=60)
    connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.sock.settimeout(60)
        connection.sock.connect(path)
        connection.request(method, f"/v1.41{target}")
        return connection.getresponse().read()
    finally:
        connection.close()


def main(descriptor: int, settings: str) -> None:
    """Wait for the owner's end, and remove what is left of it."""
    config = json.loads(settings)
    end = os.pidfd_open(config["owner"])
    os.write(descriptor, b"{}")
    select.select([end], [], [])
    reap(config["socket"], lambda label: label == config["label"])
