"""Training runs side by side, a step each in turn: so that whatever else the machine does weighs on all alike.

In: one command per contestant, each of which takes its turns by `benchmarks.peers.grpo_job.Stopwatch`. Out: what each
printed. All start together and wait at their first step; from then on one at a time goes on for one step. Who ends
keeps its turn until its process is over, so that what it does after its steps disturbs nobody's.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.contestants import ONE_THREAD, ROOT, TurnFailed
from benchmarks.peers.grpo_job import GO, NAME, PLACE

START_SECONDS = 300.0
"""Within which all must have come to their first step: imports on a loaded machine."""
STEP_SECONDS = 120.0
"""Longest turn: several hundred times an idle machine's."""


@dataclass(frozen=True, slots=True)
class Command:
    """Command line of a contestant."""

    words: list[str]
    """The command line."""
    environment: Mapping[str, str]
    """Added to ours."""


class Running:
    """One started command; its output goes to files, which never fill up as pipes do."""

    def __init__(self, command: Command, place: Path, number: int) -> None:
        self._command = command
        self._output, self._errors = place / f"{number}.out", place / f"{number}.err"
        environment = os.environ | ONE_THREAD | command.environment | {PLACE: str(place / "turns"), NAME: str(number)}
        with self._output.open("w") as output, self._errors.open("w") as errors:
            self.process = subprocess.Popen(
                command.words, cwd=ROOT, env=environment, stdout=output, stderr=errors, start_new_session=True
            )
        self.spent: list[float] = []
        """Processor seconds of each turn, of the command and of all that descends from it."""
        self.line: socket.socket | None = None
        """To the process that takes the turns, once it has come to its first step."""

    def step(self) -> bool:
        """Let it take a step; False once it has ended.

        Raises:
            TurnFailed: it takes too long.
        """
        assert self.line is not None
        before = processor_seconds(self.process.pid)
        with contextlib.suppress(ConnectionError):  # it died: what it wrote says more
            self.line.settimeout(STEP_SECONDS)
            try:
                self.line.send(GO)
                if self.line.recv(1):
                    self.spent.append(processor_seconds(self.process.pid) - before)
                    return True
            except TimeoutError:
                raise TurnFailed(self._told(f"took more than {STEP_SECONDS:.0f} s for a step")) from None
        self.process.wait(STEP_SECONDS)
        return False

    def outcome(self) -> str | TurnFailed:
        """Return what it printed, or why it failed; call it when it has ended."""
        if self.process.returncode != 0:
            return TurnFailed(self._told(f"exited with {self.process.returncode}"))
        return self._output.read_text()

    def end(self) -> None:
        """Whatever is left of it goes."""
        if self.line is not None:
            self.line.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGTERM)  # torchrun takes its workers along
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def _told(self, what: str) -> str:
        return f"{' '.join(self._command.words)} {what}:\n{self._errors.read_text()[-4000:]}"


def processor_seconds(root: int) -> float:
    """Processor time of a process and of all that descend from it, as far as they live; 0 where there is no /proc."""
    children: dict[int, list[int]] = {}
    ticks: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            fields = path.read_text().rpartition(")")[2].split()
            children.setdefault(int(fields[1]), []).append(int(path.parent.name))
            ticks[int(path.parent.name)] = int(fields[11]) + int(fields[12])
    family = [root]
    for pid in family:  # which grows meanwhile
        family.extend(children.get(pid, ()))
    return sum(ticks.get(pid, 0) for pid in family) / os.sysconf("SC_CLK_TCK")


def in_turn(commands: Sequence[Command], spent: list[list[float]] | None = None) -> list[str | TurnFailed]:
    """Run all to their end.

    Args:
        commands: what to run.
        spent: gets, in the same order, the processor seconds of each one's turns, all its processes together.

    Returns:
        In their order, what each printed or why it failed.
    """
    started: list[Running] = []
    with tempfile.TemporaryDirectory() as directory, socket.socket(socket.AF_UNIX) as listener:
        place = Path(directory)
        listener.bind(str(place / "turns"))
        listener.listen(len(commands))
        try:
            for number, command in enumerate(commands):
                started.append(Running(command, place, number))
            taking = _assembled(listener, started)
            while taking:
                taking = [each for each in taking if each.step()]
            if spent is not None:
                spent.extend(each.spent for each in started)
            return [each.outcome() for each in started]
        finally:
            for each in started:
                each.end()


def _assembled(listener: socket.socket, started: Sequence[Running]) -> list[Running]:
    """Wait until each has come to its first step or has ended; those that have come."""
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        pending = dict(enumerate(started))
        for number, each in pending.items():
            selector.register(os.pidfd_open(each.process.pid), selectors.EVENT_READ, number)
        while pending:
            events = selector.select(START_SECONDS)
            if not events:
                raise TurnFailed(next(iter(pending.values()))._told(f"came to no step in {START_SECONDS:.0f} s"))
            for key, _ in events:
                if key.fileobj is listener:
                    line, _ = listener.accept()
                    number = int(line.recv(16))
                    started[number].line = line
                    pending.pop(number, None)
                else:  # it has ended
                    selector.unregister(key.fileobj)
                    os.close(key.fd)
                    started[key.data].process.wait()
                    pending.pop(key.data, None)
        for key in list(selector.get_map().values()):
            if key.fileobj is not listener:
                os.close(key.fd)
    return [each for each in started if each.line is not None]
