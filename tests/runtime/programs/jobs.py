"""Real processes for tests: ranks started by hand from a fork server, or by torchrun; and what they leave behind."""

import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

PROGRAMS = Path(__file__).parent
ROOT = PROGRAMS.parents[2]
DEADLINE = 100.0
"""Seconds; generous, since tests share their cores."""


def patient(seconds):
    """What may take so many seconds where everyone has a core: as much longer as there are tasks to run per core."""
    load = Path("/proc/loadavg").read_text().split()
    return seconds * max(1.0, float(load[0]) / os.cpu_count(), int(load[3].partition("/")[0]) / os.cpu_count())


def until(condition, what, seconds=DEADLINE):
    """Wait until `condition()` is true; returns its value and fails with `what` when that takes too long."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > end:
            told = what() if callable(what) else what
            raise AssertionError(f"not within {seconds} s: {told}")
        time.sleep(0.005)
    return value


def environment(**more):
    """This process's, without anything of torchrun in it."""
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"} | more


class Zygote:
    """Starts processes that have imported torch already, and what else is named; keeps their output in a directory."""

    def __init__(self, directory, *modules):
        self._directory = Path(directory)
        self._server = subprocess.Popen(
            [sys.executable, PROGRAMS / "zygote.py", *modules],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment(), cwd=ROOT,
        )  # fmt: skip
        self._jobs, self._processes = itertools.count(), itertools.count()
        self._started = []
        self._running = {}  # numbers of processes by pid, which the system gives to others later
        self._news = threading.Condition()
        self._ended = False
        self.codes = {}
        """Exit codes by the numbers that `start` gives."""
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self):
        for line in self._server.stdout:
            message = json.loads(line)
            with self._news:
                if "code" in message:
                    self.codes[self._running.pop(message["pid"])] = message["code"]
                else:
                    self._running[message["pid"]] = number = next(self._processes)
                    self._started.append((message["pid"], number))
                self._news.notify_all()
        with self._news:
            self._ended = True
            self._news.notify_all()

    def run(self, program, world, *arguments, cwd=ROOT, text="", **more):
        """Start `world` ranks of a program of this directory, with a rendezvous of their own and `text` to read; or one
        process that is no rank, if `world` is 0."""
        return Ranks(self, self._directory / str(next(self._jobs)), program, world, arguments, cwd, text, more)

    def start(self, **job):
        """Start one process; returns its pid, and a number that no other one has."""
        with self._news:
            self._server.stdin.write(json.dumps(job).encode() + b"\n")
            self._server.stdin.flush()
            self._news.wait_for(lambda: self._started or self._ended, patient(DEADLINE))
            assert self._started, "the fork server has ended" if self._ended else "the fork server does not answer"
            return self._started.pop()

    def close(self):
        self._server.stdin.close()
        self._server.wait(DEADLINE)


class Ranks:
    """The ranks of one job, or the one process."""

    def __init__(self, zygote, directory, program, world, arguments, cwd, text, more):
        self._zygote = zygote
        self._directory = directory
        directory.mkdir(parents=True)
        (directory / "in").write_text(text)
        self.port = free_port()
        """Where rank 0 opens the store at which all meet."""
        shared = {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": self.port}
        ranks = [shared | {"RANK": rank, "LOCAL_RANK": rank} for rank in range(world)] or [{}]
        started = [
            zygote.start(
                program=str(PROGRAMS / program),
                arguments=list(map(str, arguments)),
                environment={k: str(v) for k, v in (environment | more).items()},
                directory=str(cwd),
                input=str(directory / "in"),
                output=str(directory / f"{rank}.out"),
                errors=str(directory / f"{rank}.err"),
            )
            for rank, environment in enumerate(ranks)
        ]
        self.pids, self._numbers = map(list, zip(*started, strict=True))

    def kill(self, rank, number=signal.SIGKILL):
        """Send one rank a signal."""
        os.kill(self.pids[rank], number)

    def kill_all(self, number):
        """Send all ranks a signal, as torchrun does."""
        for rank, process in enumerate(self._numbers):
            if process not in self._zygote.codes:
                with contextlib.suppress(ProcessLookupError):  # it has ended, and its code is on its way
                    self.kill(rank, number)

    def printed(self, rank):
        """What a rank wrote to its standard output so far."""
        return _text(self._directory / f"{rank}.out")

    def complained(self, rank):
        """What a rank wrote to its standard error so far."""
        return _text(self._directory / f"{rank}.err")

    def everything(self):
        """All that was written, for a failing test."""
        ranks = range(len(self.pids))
        return "\n".join(f"--- rank {r}\n{self.printed(r)}\n{self.complained(r)}" for r in ranks)

    def await_line(self, line, rank=0, seconds=DEADLINE):
        """Wait until a rank has printed a line; returns the lines so far."""
        return until(
            lambda: (lines := self.printed(rank).splitlines()) and line in lines and lines,
            lambda: f"rank {rank} printing {line!r}\n{self.everything()}",
            seconds,
        )

    def ended(self, *ranks):
        """Whether all of these ranks have ended; without any, whether one of all has."""
        over = [process in self._zygote.codes for process in self._numbers]
        return all(over[rank] for rank in ranks) if ranks else any(over)

    def codes(self, seconds=DEADLINE):
        """Wait until all ranks have ended; returns their exit codes."""
        return [self.code(rank, seconds) for rank in range(len(self.pids))]

    def code(self, rank, seconds=DEADLINE):
        """Wait until a rank has ended; returns its exit code."""
        ended, process = self._zygote.codes, self._numbers[rank]
        until(lambda: process in ended, self._why_not, seconds)
        return ended[process]

    def _why_not(self):
        self.kill_all(signal.SIGUSR1)
        time.sleep(0.2)  # for the stacks to be written
        return f"all ranks ending\n{self.everything()}"

    def end(self):
        """Kill what is left, with the children that it has in its process group."""
        for pid, process in zip(self.pids, self._numbers, strict=True):
            if process not in self._zygote.codes:
                for kill in (os.killpg, os.kill):  # a process that has just begun has no group yet
                    with contextlib.suppress(ProcessLookupError):
                        kill(pid, signal.SIGKILL)


def _text(path):
    return path.read_text() if path.exists() else ""


@contextlib.contextmanager
def torchrun(program, processes, *arguments, **more):
    """A running torchrun over a program of this directory, in a session of its own."""
    command = [Path(sys.executable).parent / "torchrun", "--nproc-per-node", str(processes)]
    command += [f"--master-port={free_port()}", PROGRAMS / program, *map(str, arguments)]
    job = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(**more),
        start_new_session=True,
    )
    try:
        yield job
    finally:
        for pid in [*descendants(job.pid), job.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        job.wait()
        job.stdout.close()
        job.stderr.close()


def free_port():
    """A port that nobody listens on right now, and that the kernel gives to nobody else: below its own range, and
    another one for each call of this process."""
    for port in _PORTS:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


_PORTS = itertools.cycle(range(10_000 + os.getpid() * 97 % 20_000, 32_000))


def descendants(pid):
    """Living processes below a process."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if fields[0] != "Z":
                    parents.setdefault(int(fields[1]), []).append(int(entry.name))
    below, queue = [], [pid]
    while queue:
        children = parents.get(queue.pop(), [])
        below += children
        queue += children
    return below


def listening(pids):
    """(address in hex, port) of every TCP socket that these processes listen on."""
    inodes = set()
    for pid in pids:
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                inodes.add(os.readlink(fd))
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                address, _, port = fields[1].partition(":")
                found.add((address, int(port, 16)))
    return found


def shared_memory():
    """What lies under /dev/shm although no living process has it open: other jobs of this machine are not ours."""
    # listed first: what somebody else makes meanwhile is not in it; nor what tests of the sandbox put there
    there, held = {name for name in os.listdir("/dev/shm") if not name.startswith("sandbox-test-")}, set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            held.update(line.rpartition("/dev/shm/")[2] for line in (process / "maps").read_text().splitlines())
            held.update(os.readlink(fd).removeprefix("/dev/shm/") for fd in (process / "fd").iterdir())
    return (there - held) & set(os.listdir("/dev/shm"))
