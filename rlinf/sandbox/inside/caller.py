"""Runs in a sandbox: programs one after the other, each in a child process, and calls what they define.

In: on standard input, for each program its length in 8 digits, then JSON of its code and calls; the only argument is
the seconds that each may take. Out: over the channel a message for each, JSON of a pair per call: what it returned, and
why it did not. This file is itself the program that the sandbox runs, so it imports nothing of ours.

A child has a copy of this process's memory, freed memory too. So no program and no result passes through it: a child
reads its own program, and the kernel carries its results on. Nor does a file stay from one program to the next.
"""

import ctypes
import json
import os
import resource
import select
import signal
import sys

_LONGEST = 1000
"""Characters of a value or an error that are told."""
_MOST = 1 << 18
"""Bytes of results of one program that are passed on."""
LATE = b"late"
"""The message of a program that took too long."""
_HERE = os.getcwd()
"""Its directory. A dot would lead nowhere once a program has taken away the right to look into it."""
_CHANNEL, _DIGITS, _RESULT = 3, 8, ".result"


def _results(code: str, calls: list[str]) -> list[tuple[str | None, str]]:
    scope: dict[str, object] = {"__name__": "program"}
    results: list[tuple[str | None, str]] = []
    try:
        exec(compile(code, "program.py", "exec"), scope)
    except BaseException as error:
        return [(None, _error_text(error))] * len(calls)
    for call in calls:
        try:
            results.append((repr(eval(call, scope))[:_LONGEST], ""))
        except BaseException as error:
            results.append((None, _error_text(error)))
    return results


def _error_text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:_LONGEST]


def _child(result: int, position: int, size: int) -> None:
    """Run one program with nothing at hand but a file for its results; never returns."""
    try:
        os.lseek(0, position, os.SEEK_SET)
        program = json.loads(_exactly(size))
        nothing = os.open("/dev/null", os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(nothing, number)
        os.dup2(result, 3)
        os.closerange(4, 256)
        resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))  # neither processes nor threads
        results = json.dumps(_results(program[0], program[1:])).encode()
        while results:
            results = results[os.write(3, results) :]
    finally:
        os._exit(0)


def _exactly(size: int) -> bytes:
    data = b""
    while len(data) < size and (part := os.read(0, size - len(data))):
        data += part
    return data


def _run(position: int, size: int, seconds: float) -> None:
    """Run one program, and pass its results on."""
    result = os.open(_RESULT, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    os.unlink(_RESULT)
    directory = os.stat(_HERE).st_ctime_ns
    child = os.fork()
    if child == 0:
        _child(result, position, size)
    ended = os.pidfd_open(child)
    in_time = bool(select.select([ended], [], [], seconds)[0])
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(ended)
    if not in_time:
        os.ftruncate(result, 0)
        os.pwrite(result, LATE, 0)
    length, sent = min(os.fstat(result).st_size, _MOST), 0
    os.write(_CHANNEL, length.to_bytes(8, "big"))
    while sent < length:
        sent += os.sendfile(_CHANNEL, result, sent, length - sent)
    os.close(result)
    if os.stat(_HERE).st_ctime_ns != directory and not _emptied():
        os._exit(1)  # what is left of it could be read by those that follow, so they have another sandbox


def _emptied() -> bool:
    """Empty the directory, in a process of its own: names of files are a program's, too."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1] == 0
    try:
        os.chmod(_HERE, 0o700)
        for name in os.listxattr(_HERE):
            os.removexattr(_HERE, name)
        _empty(_HERE, os.stat(_HERE).st_dev)
        os._exit(0)
    finally:
        os._exit(1)


def _empty(directory: str, device: int) -> None:
    """Remove what is in a directory, but for what is mounted there."""
    for entry in os.scandir(directory):
        if not entry.is_dir(follow_symlinks=False):
            os.unlink(entry.path)
        elif entry.stat(follow_symlinks=False).st_dev == device:
            os.chmod(entry.path, 0o700)
            _empty(entry.path, device)
            os.rmdir(entry.path)


def main() -> None:
    """Run all programs."""
    ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # not dumpable: a child cannot open what this process has open
    _emptied()
    position, size = 0, os.fstat(0).st_size
    while position < size:
        length = int(os.pread(0, _DIGITS, position))
        _run(position + _DIGITS, length, float(sys.argv[1]))
        position += _DIGITS + length


if __name__ == "__main__":
    main()
