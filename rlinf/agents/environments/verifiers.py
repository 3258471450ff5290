"""Environments of verifiers (its v1: tasksets, harnesses, agents, judges), in a process of their own.

In: the name of a taskset, or verifiers' own configuration of an environment. Out: an agent that has an episode played
against `llm.base_url`, and returns the weighted sum of its rewards, with each reward and metric by name. What is
learned is this run's own record of the calls, whatever verifiers notes of them. verifiers' pins exclude ours, so it is
installed elsewhere, and `verifiers_worker.py` runs there: a line of JSON begins an episode there, and one ends it here.

A child that dies fails the episodes that it played, and another is started for the next one.
"""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import json
import os
import subprocess
import sys
from collections import deque
from collections.abc import Mapping
from itertools import count
from typing import Any

from rlinf.config.load import RunFailure
from rlinf.rewards.base import Score
from rlinf.runtime.base.errors import UserError

_WORKER = ("-P", __file__.replace("verifiers.py", "verifiers_worker.py"))
"""-P, since the worker's neighbours here bear the names of the packages that it imports."""
INSTALLED = ".venv-environments/bin/python"
"""Interpreter that `make environments` installs, from the directory where a run is started."""
_LONGEST = 1 << 26
"""Bytes of a line that the child writes."""
_DEATHS = 3
"""Children in a row that may die before any of their episodes has ended."""
_ENDING = 5.0
"""Seconds that a child has to end what it started."""
_LINES = 20
"""Lines of a child's errors that are told when it dies."""
_ONE_IN = 8
"""Of so many tasks at least, one is held out."""


class Verifiers:
    """An environment of verifiers.

    Args:
        environment: name of a taskset, or a mapping as verifiers' `[env]` block has it: `{"taskset": {"id": …},
            "agent": {"harness": {"id": "bash"}, "max_turns": 8}}`. An agent for which it names no runtime works on this
            machine, and one without a harness has one conversation without tools.
        python: interpreter of the environment in which verifiers and the taskset are installed; None: this one if
            verifiers is there, else what `make environments` made.
        size: tasks to learn from, at most.
        held_out: tasks after those that are evaluated on, at most one in eight.

    Raises:
        UserError: there is no verifiers.
    """

    def __init__(
        self,
        environment: str | Mapping[str, Any],
        *,
        python: str | None = None,
        size: int = 1000,
        held_out: int = 100,
    ) -> None:
        self._settings = {"taskset": {"id": environment}} if isinstance(environment, str) else dict(environment)
        self._python, self._size, self._held_out = python or _interpreter(), size, held_out
        self._numbers, self._deaths = count(), 0
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._child: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self._errors: deque[str] = deque(maxlen=_LINES)

    # Tasks --------------------------------------------------------------------------------------------------------

    def tasks(self) -> list[dict[str, Any]]:
        """Rows to learn from: the prompt, the task's name and its number in the taskset."""
        return self._rows[: len(self._rows) - self._kept]

    def held_out(self) -> list[dict[str, Any]]:
        """Rows to be evaluated on: the last ones."""
        return self._rows[len(self._rows) - self._kept :]

    @functools.cached_property
    def _rows(self) -> list[dict[str, Any]]:
        listed = subprocess.run(
            [self._python, *_WORKER], input=self._first_line, capture_output=True, env=_variables(), check=False
        )
        first = listed.stdout.partition(b"\n")[0]
        if listed.returncode or not first:
            raise UserError(f"verifiers: it has no tasks for us: {_reason(listed.stderr.decode(errors='replace'))}")
        rows = json.loads(first)["tasks"]
        if not rows:
            raise UserError(f"verifiers: the taskset {self._settings['taskset']} has no tasks")
        return [{"prompt": row["prompt"] or "", "name": row["name"], "task": at} for at, row in enumerate(rows)]

    @property
    def _kept(self) -> int:
        return min(self._held_out, len(self._rows) // _ONE_IN)

    @property
    def _first_line(self) -> bytes:
        request = {"environment": self._settings, "tasks": self._size + self._held_out}
        return json.dumps(request).encode() + b"\n"

    # Episodes -----------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Verifiers:
        await self._started()
        return self

    async def __aexit__(self, *error: Any) -> None:
        child, self._child = self._child, None
        if child is None or child.stdin is None:
            return
        child.stdin.close()
        await asyncio.wait([asyncio.ensure_future(child.wait())], timeout=_ENDING)
        if child.returncode is None:
            child.kill()
        if self._reading is not None:
            await self._reading

    async def __call__(self, task: Any, llm: Any) -> Score:
        """Have an episode played.

        Raises:
            RuntimeError: it went wrong, or the child died.
        """
        child = await self._started()
        episode = next(self._numbers)
        ended = self._waiting[episode] = asyncio.get_running_loop().create_future()
        try:
            _write(child, episode=episode, task=task.row["task"], url=llm.base_url, key=llm.api_key)
            result = await ended
        except asyncio.CancelledError:
            _write(child, cancel=episode)
            raise
        finally:
            del self._waiting[episode]
        if result["errors"]:
            raise RuntimeError(f"verifiers: {'; '.join(result['errors'])}")
        rewards = result["rewards"]
        return Score(sum(rewards.values()), {**rewards, **result["metrics"]})

    async def _started(self) -> asyncio.subprocess.Process:
        async with self._starting:
            if self._child is None or self._child.returncode is not None:
                if self._deaths >= _DEATHS:
                    raise RunFailure(f"verifiers: its process died {_DEATHS} times in a row: {self._last_words()}")
                pipe = asyncio.subprocess.PIPE
                self._child = await asyncio.create_subprocess_exec(
                    self._python, *_WORKER, stdin=pipe, stdout=pipe, stderr=pipe, limit=_LONGEST, env=_variables()
                )
                assert self._child.stdin is not None
                self._child.stdin.write(self._first_line)
                self._reading = asyncio.create_task(self._read(self._child), name="results of verifiers")
            return self._child

    async def _read(self, child: asyncio.subprocess.Process) -> None:
        """Hand out results until the child ends; then fail what it played."""
        assert child.stdout is not None
        assert child.stderr is not None
        telling = asyncio.create_task(self._keep_errors(child.stderr), name="errors of verifiers")
        async for line in child.stdout:
            result = json.loads(line)
            if (waits := self._waiting.get(result.get("episode", -1))) is not None and not waits.done():
                self._deaths = 0
                waits.set_result(result)
        await asyncio.gather(child.wait(), telling)
        if child is self._child:
            self._deaths += 1
        for waits in list(self._waiting.values()):
            if not waits.done():
                waits.set_result({"errors": [f"its process ended with code {child.returncode}: {self._last_words()}"]})

    async def _keep_errors(self, stream: asyncio.StreamReader) -> None:
        async for line in stream:
            self._errors.append(line.decode(errors="replace").rstrip())

    def _last_words(self) -> str:
        return _reason("\n".join(self._errors))


def _write(child: asyncio.subprocess.Process, **line: Any) -> None:
    if child.stdin is not None and not child.stdin.is_closing():
        child.stdin.write(json.dumps(line).encode() + b"\n")


def _interpreter() -> str:
    if importlib.util.find_spec("verifiers") is not None:
        return sys.executable
    if os.path.exists(INSTALLED):
        return INSTALLED
    raise UserError(
        "verifiers: it is not installed here: `make environments` makes an environment that has it, and "
        "agent.args.python names one of your own"
    )


def _variables() -> dict[str, str]:
    """The child's environment variables: this process's, without the path from which rlinf is imported."""
    return {**os.environ, "PYTHONUNBUFFERED": "1"}


def _reason(text: str) -> str:
    """The last line that a process wrote as it died, or that it wrote nothing."""
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip() if lines else "it said nothing"
