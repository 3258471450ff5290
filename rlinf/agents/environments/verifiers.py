"""Environments of verifiers (its v1: tasksets, harnesses, agents, judges), in a process of their own.

In: the name of a taskset, or verifiers' own configuration of an environment. Out: an agent that has an episode played
against `llm.base_url`, and returns the weighted sum of its rewards, with each reward and metric by name. What is
learned is this run's own record of the calls, whatever verifiers notes of them. verifiers' pins exclude ours, so it is
installed elsewhere, and `verifiers_worker.py` runs there: a line of JSON begins an episode there, and one ends it here.

The process is supervised: whatever it started ends with it, and it ends with the run, however that ends. If it dies,
the episodes that it played fail, and another one is started.
"""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

from rlinf.agents.environments import HeldOut, Listed, Seconds, Size, checked, last_words, reason
from rlinf.config.load import RunFailure
from rlinf.rewards.base import Score
from rlinf.runtime.base.errors import UserError
from rlinf.runtime.base.progress import work
from rlinf.runtime.base.tasks import OwnDirectory
from rlinf.runtime.processes.supervisor import Child, ChildDied

_WORKER = ("-P", __file__.replace("verifiers.py", "verifiers_worker.py"))
"""-P, since the worker's neighbours here bear the names of the packages that it imports."""
INSTALLED = ".venv-environments/bin/python"
"""Interpreter that `make environments` installs, from the directory where a run is started."""
_LONGEST = 1 << 26
"""Bytes of a line that the child writes."""
_DEATHS = 3
"""Deaths in a row that end the run; a process that has lived for a minute begins a new count."""


class Verifiers(Listed):
    """An environment of verifiers.

    Args:
        environment: name of a taskset, or a mapping as verifiers' `[env]` block has it: `{"taskset": {"id": …},
            "agent": {"harness": {"id": "bash"}, "max_turns": 8}}`. An agent for which it names no runtime works on this
            machine, and one without a harness has one conversation without tools.
        python: interpreter of the environment in which verifiers and the taskset are installed; None: this one if
            verifiers is there, else what `make environments` made.
        size: tasks to learn from, at most.
        held_out: tasks after those that are evaluated on, at most one in eight.
        columns: fields of a task's data that its row has, too, for players and rewards.
        starting: seconds that its process has to import the packages and to make the tasks.

    Raises:
        UserError: there is no verifiers.
    """

    @checked
    def __init__(
        self,
        environment: str | Mapping[str, Any],
        *,
        python: str | None = None,
        size: Size = 1000,
        held_out: HeldOut = 100,
        columns: Sequence[str] = (),
        starting: Seconds = 300.0,
    ) -> None:
        self._columns, self._starting = list(columns), starting
        self._settings = {"taskset": {"id": environment}} if isinstance(environment, str) else dict(environment)
        self._python, self._size, self.most_held_out = python or _interpreter(), size, held_out
        self._numbers = count()
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._child: Child
        self._pid: int | None = None
        self._lines: asyncio.StreamWriter | None = None
        self._reading: list[asyncio.Task[None]] = []

    # Tasks --------------------------------------------------------------------------------------------------------

    def rows(self) -> list[dict[str, Any]]:
        """All tasks: the prompt, the task's name, its number in the taskset, and `columns` of its data."""
        return self._rows

    @functools.cached_property
    def _rows(self) -> list[dict[str, Any]]:
        command = [self._python, *_WORKER, self._request]
        try:
            with work("asking verifiers for its tasks"):
                listed = subprocess.run(command, capture_output=True, check=False, timeout=self._starting)
        except OSError as error:
            why = f"python={self._python!r}: it cannot be run: {error.strerror}"
            raise UserError(f"verifiers: {why}; name an interpreter that has verifiers") from error
        except subprocess.TimeoutExpired as error:
            many = f"it did not list its {self._size + self.most_held_out:,} tasks within {self._starting:g} s"
            advice = "ask for fewer (agent.args.size, agent.args.held_out), or wait longer (agent.args.starting)"
            raise UserError(f"verifiers: {many}: {advice}") from error
        first = listed.stdout.partition(b"\n")[0]
        if listed.returncode or not first:
            raise UserError(f"verifiers: it has no tasks for us: {reason(listed.stderr.decode(errors='replace'))}")
        rows = json.loads(first)["tasks"]
        if not rows:
            raise UserError(f"verifiers: the taskset {self._settings['taskset']} has no tasks")
        return [{**row, "prompt": row["prompt"] or "", "task": at} for at, row in enumerate(rows)]

    @property
    def _request(self) -> str:
        tasks = self._size + self.most_held_out
        return json.dumps({"environment": self._settings, "tasks": tasks, "columns": self._columns})

    # Episodes -----------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Verifiers:
        self._room = OwnDirectory("verifiers")
        self._socket = str(self._room.path / "episodes")
        command = [self._python, *_WORKER, self._request, self._socket]
        how: dict[str, Any] = {
            "start_deadline": self._starting,
            "max_restarts": _DEATHS - 1,
            "backoff": (0.0, 1.0, 0.0),
        }
        self._child = Child(command, name="verifiers", health=self._connected, **how)
        try:
            await self._child.start()
        except ChildDied as died:
            raise RunFailure(f"verifiers: its process could not be started: {last_words(self._child)}") from died
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._child.stop()
        await asyncio.gather(*self._reading)
        self._room.remove()

    async def __call__(self, task: Any, llm: Any) -> Any:
        """Have an episode played; returns its score, or one for each of its agents that learn.

        Raises:
            RuntimeError: it went wrong, or its process died.
            RunFailure: the process died again and again.
        """
        lines = await self._up()
        episode = next(self._numbers)
        result = self._waiting[episode] = asyncio.get_running_loop().create_future()
        try:
            _write(lines, episode=episode, task=task.row["task"], url=llm.base_url, key=llm.api_key)
            ended = await result
        except asyncio.CancelledError:
            _write(lines, cancel=episode)
            raise
        finally:
            del self._waiting[episode]
        if ended["errors"]:
            raise RuntimeError(f"verifiers: {'; '.join(ended['errors'])}")
        agents = ended["agents"]
        if "" in agents:
            return _score(agents[""])
        for name in [name for name, one in agents.items() if not one["learns"]]:
            llm.agent(name).leave_out()
        return {name: _score(one) for name, one in agents.items() if one["learns"] and name in llm.agents}

    async def _up(self) -> asyncio.StreamWriter:
        """The way to a process that lives."""
        try:
            await self._child.ready()
            while self._lines is None:  # it hung up, so it ends
                await self._child.after_fault()
        except ChildDied as died:
            raise RunFailure(
                f"verifiers: its process died {_DEATHS} times in a row: {last_words(self._child)}"
            ) from died
        return self._lines

    async def _connected(self, child: Child) -> bool:
        """It is connected; a process that hung up and lives on is no longer healthy."""
        if child.pid != self._pid:
            reader, self._lines = await asyncio.open_unix_connection(self._socket, limit=_LONGEST)
            self._pid = child.pid
            self._reading = [*(each for each in self._reading if not each.done())]
            self._reading.append(asyncio.create_task(self._read(reader, self._lines), name="results of verifiers"))
        return self._lines is not None

    async def _read(self, reader: asyncio.StreamReader, lines: asyncio.StreamWriter) -> None:
        """Hand out results until the process ends; then fail what it played."""
        cause = ""
        try:
            async for line in reader:
                result = json.loads(line)
                if (waits := self._waiting.get(result["episode"])) is not None and not waits.done():
                    waits.set_result(result)
        except ConnectionError:
            pass
        except ValueError as error:  # a line without end, or one that is no JSON
            cause = f"it was ended, as it wrote what is no result: {error}"
        if self._lines is lines:
            self._lines = None
        lines.close()
        await self._child.ended()
        for waits in self._waiting.values():
            if not waits.done():
                waits.set_result({"errors": [cause or f"its process died: {last_words(self._child)}"]})


def _score(agent: Mapping[str, Any]) -> Score:
    return Score(sum(agent["rewards"].values()), {**agent["rewards"], **agent["metrics"]})


def _write(lines: asyncio.StreamWriter, **line: Any) -> None:
    if not lines.is_closing():
        lines.write(json.dumps(line).encode() + b"\n")


def _interpreter() -> str:
    if importlib.util.find_spec("verifiers") is not None:
        return sys.executable
    if os.path.exists(INSTALLED):
        return INSTALLED
    raise UserError(
        "verifiers: it is not installed here: `make environments` makes an environment that has it, and "
        "agent.args.python names one of your own"
    )
