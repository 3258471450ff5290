"""Environments of verifiers (its v1: tasksets, harnesses, agents, judges), in a process of their own.

In: the name of a taskset, or verifiers' own configuration of an environment. Out: an agent that has an episode played
against `llm.base_url`, and returns the weighted sum of its rewards, with each reward and metric by name. What is
learned is this run's own record of the calls, whatever verifiers notes of them. verifiers' pins exclude ours, so it is
installed elsewhere, and `verifiers_worker.py` runs there: a line of JSON begins an episode there, and one ends it here.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import IO, Any

from rlinf.agents.environments import HeldOut, Listed, Seconds, Size, checked, reason
from rlinf.agents.environments.worker import Worker
from rlinf.rewards.base import Score
from rlinf.runtime.base.errors import UserError
from rlinf.runtime.base.progress import work

_WORKER = ("-P", __file__.replace("verifiers.py", "verifiers_worker.py"))
"""-P, since the worker's neighbours here bear the names of the packages that it imports."""
INSTALLED = ".venv-environments/bin/python"
"""Interpreter that `make environments` installs, from the directory where a run is started."""
_END = b"\n"
_ADVICE = "wait longer (agent.args.starting), or ask for fewer (agent.args.size, agent.args.held_out)"


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
        starting: seconds that its process has to import the packages, and to make each of the tasks.

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

    # Tasks --------------------------------------------------------------------------------------------------------

    def rows(self) -> list[dict[str, Any]]:
        """All tasks: the prompt, the task's name, its number in the taskset, and `columns` of its data."""
        return self._rows

    @functools.cached_property
    def _rows(self) -> list[dict[str, Any]]:
        rows = [json.loads(line) for line in self._listed().splitlines()]
        if not rows:
            raise UserError(f"verifiers: the taskset {self._settings['taskset']} has no tasks")
        return [{**row, "prompt": row["prompt"] or "", "task": at} for at, row in enumerate(rows)]

    def _listed(self) -> bytes:
        """A line of JSON for each task, as they are made, however long that takes in all."""
        command, wanted = [self._python, *_WORKER, self._request], self._size + self.most_held_out
        lines = bytearray()
        with tempfile.TemporaryFile() as errors, work("asking verifiers for its tasks", wanted, "tasks") as asking:
            try:
                listing = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors)
            except OSError as error:
                why = f"python={self._python!r}: it cannot be run: {error.strerror}"
                raise UserError(f"verifiers: {why}; name an interpreter that has verifiers") from error
            with listing:
                assert listing.stdout is not None
                try:
                    while self._more(listing.stdout, lines):
                        asking.at(lines.count(_END))
                except BaseException:
                    listing.kill()
                    raise
            errors.seek(0)
            if listing.returncode:
                raise UserError(f"verifiers: it has no tasks for us: {reason(errors.read().decode(errors='replace'))}")
        return bytes(lines)

    def _more(self, listing: IO[bytes], lines: bytearray) -> bool:
        """Read what has come of a listing; false at its end."""
        if not select.select([listing], [], [], self._starting)[0]:
            many = f"{lines.count(_END):,} of {self._size + self.most_held_out:,} tasks"
            raise UserError(f"verifiers: it listed {many}, and no further one within {self._starting:g} s: {_ADVICE}")
        part = os.read(listing.fileno(), 1 << 16)
        lines += part
        return bool(part)

    @property
    def _request(self) -> str:
        tasks = self._size + self.most_held_out
        return json.dumps({"environment": self._settings, "tasks": tasks, "columns": self._columns})

    # Episodes -----------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Verifiers:
        self._worker = Worker("verifiers", [self._python, *_WORKER, self._request], self._starting)
        await self._worker.__aenter__()
        with work("waiting for verifiers to make its tasks"):
            async with self._worker.episode() as ready:
                await ready.read()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._worker.__aexit__(*error)

    async def __call__(self, task: Any, llm: Any) -> Any:
        """Have an episode played; returns its score, or one for each of its agents that learn.

        Raises:
            RuntimeError: it went wrong, or its process died.
            RunFailure: the process died again and again.
        """
        async with self._worker.episode(task=task.row["task"], url=llm.base_url, key=llm.api_key) as episode:
            ended = await episode.read()
        if ended["errors"]:
            raise RuntimeError(f"verifiers: {'; '.join(ended['errors'])}")
        agents = ended["agents"]
        if "" in agents:
            return _score(agents[""])
        for name in [name for name, one in agents.items() if not one["learns"]]:
            llm.agent(name).leave_out()
        return {name: _score(one) for name, one in agents.items() if one["learns"] and name in llm.agents}


def _score(agent: Mapping[str, Any]) -> Score:
    return Score(sum(agent["rewards"].values()), {**agent["rewards"], **agent["metrics"]})


def _interpreter() -> str:
    if importlib.util.find_spec("verifiers") is not None:
        return sys.executable
    if os.path.exists(INSTALLED):
        return INSTALLED
    raise UserError(
        "verifiers: it is not installed here: `make environments` makes an environment that has it, and "
        "agent.args.python names one of your own"
    )
