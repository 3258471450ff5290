"""A fork server that has imported torch, and the modules that its arguments name: a test's processes start in
milliseconds.

Reads one JSON object per line: {"program": path, "arguments": [...], "environment": {...}, "directory": path, "input":
path, "output": path, "errors": path}. Answers with {"pid": n} when the process runs, and {"pid": n, "code": c} when it
has ended, c as in subprocess.Popen.returncode. The process is an ordinary one: it runs the program as `__main__` and
ends as Python does, except that modules which were there before the fork are not taken apart: that would copy most of
their memory for nothing, and take longer than many a program.
"""

import atexit
import ctypes
import faulthandler
import gc
import importlib
import json
import os
import runpy
import select
import signal
import sys

inherited = {}
"""Modules that a child found when it began, by name."""


@atexit.register  # before all others, so it runs after them
def leave_inherited():
    """Let Python overlook them when it takes modules apart."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(inherited))  # not even the last reference to them goes
    for name in inherited:
        sys.modules.pop(name, None)


import rlinf.runtime.system.torchrun  # noqa: E402
import rlinf.runtime.transport.torch_rpc  # noqa: E402, F401  # what takes seconds to import is here before the first fork


def serve():
    """Fork what is asked for; returns in the child, with what it is to run."""
    gc.freeze()  # or every child would copy the pages of all modules when it collects garbage
    wake, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # meant for the test, which ends us by closing our input
    while True:
        ready, _, _ = select.select([0, wake], [], [])
        if wake in ready:
            os.read(wake, 4096)
            report_ended()
        if 0 in ready:
            line = read_line()
            if not line:
                os._exit(0)
            job = json.loads(line)
            pid = os.fork()
            if not pid:
                return job
            say({"pid": pid})


def read_line():
    line = b""
    while not line.endswith(b"\n") and (byte := os.read(0, 1)):
        line += byte
    return line


def report_ended():
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        say({"pid": pid, "code": os.waitstatus_to_exitcode(status)})


def say(message):
    os.write(1, json.dumps(message).encode() + b"\n")


def become(job):
    """Turn this child into the process that was asked for."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.setpgid(0, 0)
    for number, path in enumerate((job["input"], job["output"], job["errors"])):
        opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        os.dup2(opened, number)
        os.close(opened)
    libc = ctypes.CDLL(None)
    libc.on_exit(libc._exit, None)  # with the status that `exit` was given, before what libraries do at the end
    kept = ("sys", "builtins", "__main__")
    inherited.update((name, module) for name, module in sys.modules.items() if name not in kept)
    faulthandler.register(signal.SIGUSR1)  # a test that has waited too long wants to see the stacks
    os.environ.update(job["environment"])
    os.chdir(job["directory"])
    sys.argv = [job["program"], *job["arguments"]]
    sys.path[0] = os.path.dirname(job["program"])


if __name__ == "__main__":
    for module in sys.argv[1:]:
        importlib.import_module(module)
    job = serve()
    become(job)
    runpy.run_path(job["program"], run_name="__main__")
