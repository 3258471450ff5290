"""The child process of a server: its interpreter, its address, its log, and the health that the supervisor asks for.

Flows in: a `Server`, the files of its model. Flows out: a server that is up and has the right weights, or `ChildDied`
with the end of its log. Who wakes whom: the supervisor (`runtime/processes/supervisor.py`) starts a life and asks
`_healthy` until it says yes; that is what `up` waits for. A life is healthy only after `prepare`, so nobody ever gets
an answer of a server that was restarted and has not got its weights back.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import socket
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from rlinf.engines.served.http import Http, Lost
from rlinf.engines.served.server import Server
from rlinf.runtime.base.progress import work
from rlinf.runtime.processes.supervisor import Child, ChildDied

_TORCHRUN = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME",
    "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_USE_AGENT_STORE", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV",
)  # fmt: skip
"""Variables that are about our processes: a server that sees them takes itself for one of our ranks."""


def environment_of(kind: str, python: str | None, variable: str, directory: str, target: str) -> str:
    """The interpreter of a server's own environment.

    Args:
        kind: what messages call the server.
        python: `rollout.engine_args.python`, if it was set.
        variable: environment variable that names the interpreter too.
        directory: of the environment, beside the project, such as `.venv-sglang`.
        target: make's target that creates it.

    Raises:
        ValueError: there is none; the text says how to make it.
    """
    project = Path(__file__).parents[3]  # of a checkout
    places = [Path.cwd() / directory / "bin/python", project / directory / "bin/python"]
    named = python or os.environ.get(variable)
    tried = [Path(named)] if named else list(dict.fromkeys(places))
    for path in tried:
        if os.access(path, os.X_OK):
            return str(path.absolute())  # not resolved: a link to an interpreter is what makes an environment
    raise ValueError(
        f"{kind} lives in an environment of its own, and there is none at {' or '.join(map(str, tried))}: make it by "
        f"`make {target}`, or name its interpreter by rollout.engine_args.python or ${variable}"
    )


class ServerChild:
    """A server that is kept running.

    Args:
        server: its kind.
        model: directory of the model's files.
        name: what messages and logs call it.
        prepare: awaited with every new life's connection once it is up, before anybody may use it.
        busy: whether something other than answers goes on with the server, which then need not be asked for its health.
        log: file that its output is appended to; None keeps the last lines.
        start_deadline, health_interval, health_deadline, max_restarts, backoff: see `Child`.
        silence: seconds without a token after which an answer counts as lost.
    """

    def __init__(
        self,
        server: Server,
        model: Path,
        name: str,
        prepare: Callable[[Http], Awaitable[None]],
        busy: Callable[[], bool],
        *,
        log: Path | None = None,
        start_deadline: float = 600.0,
        health_interval: float = 10.0,
        health_deadline: float = 60.0,
        max_restarts: int = 3,
        backoff: tuple[float, float, float] = (0.5, 2.0, 30.0),
        silence: float = 300.0,
    ) -> None:
        self.server, self._prepare, self._busy = server, prepare, busy
        host, port = _free_address()
        self.http = Http(f"http://{host}:{port}", server.kind, silence=silence)
        self._prepared: int | None = None  # process id of the life that has its weights
        self._scratch = Path(tempfile.mkdtemp(prefix="rlinf-"))  # of its sockets, which it leaves behind when killed
        environment: Mapping[str, str | None] = {
            **dict.fromkeys(_TORCHRUN), "TMPDIR": str(self._scratch), **server.environment(),
        }  # fmt: skip
        self.child = Child(
            server.command(model, host, port),
            name=name,
            env=environment,
            health=self._healthy,
            start_deadline=start_deadline,
            health_interval=health_interval,
            health_deadline=health_deadline,
            max_restarts=max_restarts,
            backoff=backoff,
            stop_deadline=0.0,  # it has nothing to save, and some take long to find that out
            log=log,
        )

    async def start(self) -> None:
        """Start it, and wait until it is up.

        Raises:
            ChildDied: it ended or was not up in time; with the end of its log.
        """
        try:
            with work(f"starting {self.server.kind}"):
                await self.child.start()
        except BaseException:
            await self.stop()
            raise

    async def up(self) -> None:
        """Wait until it is up and has its weights. Raises `ChildDied` if it is not started again."""
        await self.child.ready()

    async def after(self, lost: Lost, pause: float) -> None:
        """Wait until it is up after a request was lost: until the next life, if this one ends within `pause` seconds;
        otherwise it lives, and failed that request alone.

        Raises:
            ChildDied: there is no next life.
        """
        life = self.child._life
        if life is not None:
            await asyncio.wait([life.exited], timeout=pause)
        try:
            await self.child.ready()
        except ChildDied as died:
            died.__cause__ = died.__cause__ or lost
            raise

    async def restart(self) -> None:
        """Replace the process, which hangs or holds what nobody wants."""
        await self.child.restart()

    async def stop(self) -> None:
        """End the process, and let go of the connections."""
        await self.child.stop()
        await self.http.close()
        self.server.close()
        shutil.rmtree(self._scratch, ignore_errors=True)

    async def _healthy(self, child: Child) -> bool:
        pid = child.pid
        if pid is None:
            return False
        if pid != self._prepared:
            await self.server.greet(self.http)
            await self._prepare(self.http)
            self._prepared = pid
        elif not self._busy():
            await self.server.healthy(self.http)
        return True


def _free_address() -> tuple[str, int]:
    """A port of this machine that nobody else can reach, at an address that scans of 127.0.0.1 do not find."""
    draw = random.SystemRandom()
    host = f"127.{draw.randrange(1, 255)}.{draw.randrange(256)}.{draw.randrange(1, 255)}"
    for address in (host, "127.0.0.1"):  # some systems have the latter alone
        with socket.socket() as probe:
            try:
                probe.bind((address, 0))
            except OSError:
                continue
            return address, int(probe.getsockname()[1])
    raise OSError("no port is free on 127.0.0.1")
