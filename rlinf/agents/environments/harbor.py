"""Tasks as Harbor's directories have them: an instruction, a machine to work on, and tests that decide.

In: a folder of task directories (`instruction.md`, `task.toml`, `environment/`, `tests/` with a `test.sh`). Out: an
agent that works on a task in a container of its own, has the task's tests run there, and returns the reward that they
write to `/logs/verifier`. Images are built here, step by step, from the part of the Dockerfile's language that
`dockerfile.py` reads, once for each task.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import math
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlinf.agents.environments import HeldOut, Listed, by_path, checked, reason
from rlinf.agents.environments.dockerfile import Recipe, recipe_of
from rlinf.agents.environments.harnesses import Bash, harness_of
from rlinf.config.load import RunFailure
from rlinf.rewards.base import Score
from rlinf.runtime.base.errors import UserError
from rlinf.runtime.base.tasks import OwnDirectory
from rlinf.sandbox.containers.pool import Kind, Pool
from rlinf.sandbox.containers.protocol import LIMITS

logger = logging.getLogger(__name__)

_MOST = 1024
"""Containers at once; agent.at_once bounds them first."""
_REWARDS = "/logs/verifier"
_ABSENT = ("steps", "environment.gpus", "environment.mcp_servers", "environment.healthcheck", "verifier.environment")
"""Keys of task.toml for which nothing is here."""


@dataclass(frozen=True, slots=True)
class Task:
    """A task directory, read."""

    path: Path
    instruction: str
    recipe: Recipe
    seconds: float
    """Of the agent."""
    test_seconds: float
    test_env: Mapping[str, str]
    megabytes: tuple[int | None, int | None]
    """Of memory, and of what it writes."""


class Harbor(Listed):
    """Task directories of Harbor's.

    Args:
        tasks: a folder of task directories, or one of them.
        harness: who works on a task: None for a conversation with one tool, which runs commands in the container; a
            name, a command line, or a mapping; see docs/harnesses.md.
        containers: the class of their provider, as a dotted path or itself; None: those of this machine's namespaces.
        settings: arguments of that class.
        image: what containers are made from, whatever the tasks say, in place of their base image; `base` is what the
            provider has without an image.
        network: containers reach this machine's network.
        weights: what counts besides the reward: factors of the numbers that are reported, such as `commands`, by name.
        held_out: tasks that are evaluated on, at most one in eight: the last ones.

    Raises:
        UserError: there are no tasks, or one needs what is not here.
    """

    @checked
    def __init__(
        self,
        tasks: str | Path,
        *,
        harness: Any = None,
        containers: Any = "rlinf.sandbox.containers.namespaces.Namespaces",
        settings: Mapping[str, Any] | None = None,
        image: str | None = None,
        network: bool = False,
        weights: Mapping[str, float] | None = None,
        held_out: HeldOut = 100,
    ) -> None:
        self._tasks = {each.path.name: each for each in map(_read, _directories(Path(tasks)))}
        self._harness = harness_of(harness)
        self.offers_tools = isinstance(self._harness, Bash)
        self._make = by_path("harbor: containers", containers)
        self._settings, self._image, self._network = dict(settings or {}), image, network
        self.most_held_out = held_out
        self._weights = dict(weights or {})
        self._kinds: dict[str, Kind] = {}
        self._reported: set[str] = set()

    def rows(self) -> list[dict[str, Any]]:
        """All tasks, in the order of their names."""
        return [{"prompt": task.instruction, "task": name} for name, task in self._tasks.items()]

    async def __aenter__(self) -> Harbor:
        async with AsyncExitStack() as stack:
            self._pool = await stack.enter_async_context(Pool(self._make(**self._settings), size=_MOST))
            if hasattr(self._harness, "__aenter__"):
                await stack.enter_async_context(self._harness)
            self._open = stack.pop_all()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._open.aclose()

    async def __call__(self, task: Any, llm: Any) -> Score:
        """Work on a task, and have it judged.

        Raises:
            RunFailure: the task's image cannot be built.
            RuntimeError: the harness failed before the model had answered.
            ContainerEnded: the container is gone.
        """
        one = self._tasks[task.row["task"]]
        numbers = {"out_of_time": 0.0}
        async with self._pool.container(self._kind(one)) as box:
            try:
                async with asyncio.timeout(one.seconds) as limit:
                    numbers |= await self._harness(one.instruction, box, llm)
            except TimeoutError:
                if not limit.expired():
                    raise
                numbers["out_of_time"] = 1.0
            rewards = await self._judged(one, box)
        value = rewards.get("reward", math.fsum(rewards.values()) / max(len(rewards), 1))
        numbers |= {**rewards, "without_verdict": float(not rewards)}
        value += math.fsum(factor * numbers.get(name, 0.0) for name, factor in self._weights.items())
        return Score(value, numbers)

    def directory(self, name: str) -> Path:
        """Where a task lies."""
        return self._tasks[name].path

    async def solved(self, name: str) -> Mapping[str, float]:
        """Rewards of the task's own solution (`solution/solve.sh`): a task whose solution earns nothing is broken."""
        one = self._tasks[name]
        async with self._pool.container(self._kind(one)) as box:
            await box.upload(one.path / "solution", "/solution")
            await box.run(["bash", "/solution/solve.sh"], seconds=one.seconds)
            return await self._judged(one, box)

    # Containers ---------------------------------------------------------------------------------------------------

    def _kind(self, one: Task) -> Kind:
        """Containers of a task: made by the steps of its image, which are taken once."""
        if one.path.name not in self._kinds:
            memory, disk = one.megabytes
            more = {name: size << 20 for name, size in (("memory_bytes", memory), ("file_bytes", disk)) if size}
            base = one.recipe.base if self._image is None else self._image
            self._kinds[one.path.name] = Kind(
                None if base == "base" else base,
                workdir=one.recipe.workdir,
                env=one.recipe.env,
                limits=replace(LIMITS, **more),
                network=self._network,
                prepare=functools.partial(_prepared, one) if one.recipe.steps else None,
            )
        return self._kinds[one.path.name]

    # Tests --------------------------------------------------------------------------------------------------------

    async def _judged(self, one: Task, box: Any) -> dict[str, float]:
        """Rewards that the task's tests write, none where they write none: an agent can make its tests hang."""
        await box.run(["sh", "-c", f"rm -rf /tests {_REWARDS}; mkdir -p {_REWARDS} /logs/agent"])
        await box.upload(one.path / "tests", "/tests")
        result = await box.run(["bash", "/tests/test.sh"], seconds=one.test_seconds, env=one.test_env)
        with OwnDirectory("harbor") as room:
            for name in ("reward.json", "reward.txt"):
                try:
                    await box.download(f"{_REWARDS}/{name}", room / name)
                    return _rewards((room / name).read_text())
                except (FileNotFoundError, ValueError):
                    continue
        if one.path.name not in self._reported:
            self._reported.add(one.path.name)
            end = f"{result.outcome}: {reason(result.stdout + result.stderr)}"
            logger.warning("harbor: %s: its tests wrote no reward, which counts as 0 (%s)", one.path.name, end)
        return {}


async def _prepared(one: Task, box: Any) -> None:
    """Take the steps of a task's image.

    Raises:
        RunFailure: one of them failed.
    """
    if failure := await one.recipe.carry_out(box):
        raise RunFailure(f"harbor: {one.path}: {failure}")


def _rewards(text: str) -> dict[str, float]:
    """Rewards by name from what tests wrote.

    Raises:
        ValueError: no finite number.
    """
    content = json.loads(text)
    by_name = content if isinstance(content, dict) else {"reward": content}
    rewards = {str(name): float(value) for name, value in by_name.items()}
    if not rewards or not all(map(math.isfinite, rewards.values())):
        raise ValueError(text)
    return rewards


def _directories(folder: Path) -> Sequence[Path]:
    inside = [folder] if (folder / "task.toml").exists() else sorted(each.parent for each in folder.glob("*/task.toml"))
    if not inside:
        raise UserError(f"harbor: tasks={str(folder)!r}: there is no task.toml in it, nor in a directory of it")
    return inside


def _read(path: Path) -> Task:
    """Read a task directory.

    Raises:
        UserError: a file is missing or wrong, or it needs what is not here.
    """
    try:
        config = tomllib.loads((path / "task.toml").read_text())
        instruction = (path / "instruction.md").read_text()
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"harbor: {path}: {error}") from error
    sections = {name: config.get(name) or {} for name in ("agent", "verifier", "environment")}
    flat = {
        **config,
        **{f"{name}.{key}": value for name, section in sections.items() for key, value in section.items()},
    }
    lacking = [key for key in _ABSENT if flat.get(key)]
    lacking += [f"environment.os={flat['environment.os']}"] if flat.get("environment.os", "linux") != "linux" else []
    lacking += ["verifier.environment_mode=separate"] if flat.get("verifier.environment_mode") == "separate" else []
    if lacking:
        raise UserError(f"harbor: {path}/task.toml: {', '.join(lacking)}: nothing is here for that")
    if not (path / "tests" / "test.sh").exists():
        raise UserError(f"harbor: {path}: there is no test.sh in its folder tests, and nothing else decides")
    recipe = recipe_of(path / "environment", flat.get("environment.docker_image"), flat.get("environment.workdir"))
    return Task(
        path,
        instruction,
        replace(recipe, env={**recipe.env, **_texts(path, flat, "environment.env")}),
        float(flat.get("agent.timeout_sec") or 600.0),
        float(flat.get("verifier.timeout_sec") or 600.0),
        _texts(path, flat, "verifier.env"),
        (flat.get("environment.memory_mb"), flat.get("environment.storage_mb")),
    )


def _texts(path: Path, flat: Mapping[str, Any], key: str) -> dict[str, str]:
    values = {str(name): str(value) for name, value in (flat.get(key) or {}).items()}
    if foreign := [name for name, value in values.items() if "${" in value]:
        raise UserError(f"harbor: {path}/task.toml: {key}.{foreign[0]}: variables of this machine do not go in")
    return values
