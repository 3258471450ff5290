"""The fork server of a sandbox: confines itself, then forks a supervisor for each program.

In: over a socket, descriptors for each run: a link, standard input, perhaps a channel. Out: a word on how far
programs are kept apart; the rest is `supervise.py`'s. Who wakes whom: it sleeps until a run is asked for or its owner
is gone.

Programs are forked from here, so they start with an interpreter that has loaded what programs mostly import.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import traceback

from rlinf.sandbox.inside import confine
from rlinf.sandbox.inside.supervise import Server, supervise

_PRELOADED = (
    "array", "ast", "atexit", "base64", "bisect", "calendar", "cmath", "collections", "copy", "dataclasses", "datetime",
    "decimal", "enum", "fractions", "functools", "hashlib", "heapq", "inspect", "io", "itertools", "json", "linecache",
    "math", "numbers", "operator", "pathlib", "pickle", "pprint", "queue", "random", "re", "secrets", "select",
    "shutil", "statistics", "string", "struct", "subprocess", "tempfile", "textwrap", "threading", "time", "traceback",
    "types", "typing", "zlib",
)  # fmt: skip


def main(descriptor: int, settings: str) -> None:
    """Serve until the owner is gone.

    Args:
        descriptor: of the socket to the owner.
        settings: JSON: `owner` (its process), `shown` (directories), `packages` (those that hold installed packages),
            `preload` (modules besides ours), `weak` (do without namespaces).
    """
    control = socket.socket(fileno=descriptor)
    os.set_inheritable(descriptor, False)
    config = json.loads(settings)
    try:
        for name in (*_PRELOADED, *config["preload"]):
            sys.path += [path for path in config["packages"] if path not in sys.path]
            importlib.import_module(name)
        sys.path[:] = [path for path in sys.path if path not in (config["home"], *config["packages"])]
        proc = (
            os.open("/proc", os.O_RDONLY) if config["weak"] else confine.enter([*config["shown"], *config["packages"]])
        )
    except Exception as error:
        control.send(json.dumps({"refused": f"{error}", "trace": traceback.format_exc()}).encode())
        return
    control.send(json.dumps({"filter": confine.available(), "landlock": confine.version()}).encode())
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel buries supervisors
    gc.collect()
    gc.freeze()  # a program's collections do not write to, and so copy, what it shares with us
    server = Server(proc, config["weak"], config["root"], tuple(config["packages"]), tuple(config["shown"]))
    serve(control, config["owner"], server)


def serve(control: socket.socket, owner: int, server: Server) -> None:
    """Fork a supervisor for every set of descriptors that comes."""
    poll = select.poll()
    poll.register(control, select.POLLIN)
    with contextlib.suppress(OSError):  # gone already: the socket tells, too
        poll.register(os.pidfd_open(owner), select.POLLIN)  # a forked copy of the owner's socket would hide its end
    while True:
        if [ready for ready, _ in poll.poll() if ready != control.fileno()]:
            return
        word, descriptors, _, _ = socket.recv_fds(control, 1, 3)
        if not word:
            return
        if os.fork() == 0:
            status = 1
            try:
                control.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                link, stdin, *channel = descriptors
                supervise(server, socket.socket(fileno=link), stdin, channel[0] if channel else -1)
                status = 0
            finally:
                os._exit(status)
        for descriptor in descriptors:
            os.close(descriptor)
