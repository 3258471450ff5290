"""Runs every behaviour test (an `async def` with the argument `system`) in each of the worlds of `worlds.py`."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.programs.jobs import Zygote
from tests.runtime.worlds import DEADLINE, PROCESSES, WORLDS, opened, run_behaviour

ROOT = Path(__file__).parents[2]
_sessions = pytest.StashKey[dict[str, "Session"]]()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "worlds(*names): run this behaviour test in these worlds only")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "system" in metafunc.fixturenames:
        only = metafunc.definition.get_closest_marker("worlds")
        metafunc.parametrize("system", WORLDS if only is None else only.args, scope="function")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _world(item) in PROCESSES:
            item.add_marker(pytest.mark.torchrun)


@pytest.fixture(scope="session")
def zygotes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    """A fork server that has imported the runtime alone, so that forty processes are small."""
    server = Zygote(tmp_path_factory.mktemp("ranks"))
    yield server
    server.close()


def _world(item: pytest.Item) -> str | None:
    call = getattr(item, "callspec", None)
    world = None if call is None else call.params.get("system")
    return world if world in WORLDS else None


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    world = _world(pyfuncitem)
    if world is None:
        return None
    if world in PROCESSES:
        _session_in(world, pyfuncitem.session).report(_name(pyfuncitem))
    else:
        asyncio.run(_in_process(getattr(pyfuncitem.module, pyfuncitem.originalname), world))
    return True


async def _in_process(test: Any, world: str) -> None:
    async with opened(world) as system:
        await run_behaviour(test, system)


def _name(item: pytest.Item) -> str:
    path = Path(item.path).relative_to(ROOT).with_suffix("")
    return f"{'.'.join(path.parts)}:{item.originalname}"  # type: ignore[attr-defined]


def _session_in(world: str, session: pytest.Session) -> Session:
    sessions = session.stash.setdefault(_sessions, {})
    if world not in sessions:
        names = [_name(item) for item in session.items if _world(item) == world]
        sessions[world] = Session(world, names, session.config)
    return sessions[world]


def pytest_sessionfinish(session: pytest.Session) -> None:
    for running in session.stash.get(_sessions, {}).values():
        running.end()


class Session:
    """One torchrun that runs all behaviour tests in two processes, and its outcomes."""

    def __init__(self, world: str, names: list[str], config: pytest.Config):
        directory = config._tmp_path_factory.mktemp(world)  # type: ignore[attr-defined]
        self._outcomes, self._log = directory / "outcomes", directory / "log"
        self._shown = False
        command = [Path(sys.executable).parent / "torchrun", "--nproc-per-node", "2", "--master-port=0"]
        command += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", ROOT / "tests/runtime/worlds.py"]
        with self._log.open("w") as log:
            self._job = subprocess.Popen(
                [*map(str, command), str(self._outcomes), *names],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "RLINF_TRANSPORT": world},
                cwd=ROOT,
            )

    def report(self, name: str) -> None:
        """Wait for the outcome of one test, and fail or skip as it did."""
        deadline = time.monotonic() + 60.0 + DEADLINE
        while (error := self._read().get(name)) is None:
            if self._job.poll() is not None and name not in self._read():
                log = "(shown above)" if self._shown else self._log.read_text()[-6000:]
                self._shown = True
                pytest.fail(f"the session under torchrun ended before this test did:\n{log}", pytrace=False)
            if time.monotonic() > deadline:
                pytest.fail("the session under torchrun did not come to this test in time", pytrace=False)
            time.sleep(0.01)
        if error.startswith("skipped: "):
            pytest.skip(error.removeprefix("skipped: "))
        if error:
            pytest.fail(error, pytrace=False)

    def _read(self) -> dict[str, str]:
        lines = self._outcomes.read_text().splitlines(keepends=True) if self._outcomes.exists() else []
        return {name: error for name, error, _ in (json.loads(line) for line in lines if line.endswith("\n"))}

    def end(self) -> None:
        """Wait for its end, or make it end."""
        try:
            self._job.wait(10.0)
        except subprocess.TimeoutExpired:
            self._job.terminate()
            self._job.wait()
