"""`rlinf join`: one more engine, replica of the trainer, or process that scores, for a run that goes on, until it ends
or this process is told to leave.

    rlinf join ADDRESS --role rollout|trainer|reward

In: HOST:PORT, where the run listens (`rollout.join`, `trainer.join`, `reward.join`), or its directory, where it leaves
that and the token. Out: exit code 0, or 1 if the run is gone, or what was made here failed.

First it says hello, which takes few modules, so that a wrong address or token is answered at once. What the run then
sends says what is imported: for an engine of a model like a Llama, whose weights the run has, no transformers.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import importlib
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlinf.config.importing import look_in_working_directory
from rlinf.config.load import InputError, RunFailure
from rlinf.engines.pool.far_side import outlined_engine, serve
from rlinf.joining.address import FILES, TOKEN, read
from rlinf.joining.connection import Connection, connect
from rlinf.joining.listener import Sent
from rlinf.rewards.far_side import score
from rlinf.runtime.base.errors import UserError
from rlinf.runtime.base.tasks import in_thread

if TYPE_CHECKING:
    from rlinf.engines.base import Engine

_ROLES = "what it does there: rollout generates, trainer computes gradients, reward scores answers"


def join(arguments: Sequence[str]) -> int:
    """Serve a run; returns the exit code."""
    parser = argparse.ArgumentParser(prog="rlinf join", description="Help a run that goes on.")
    parser.add_argument("address", metavar="ADDRESS", help="HOST:PORT, or the directory of the run")
    parser.add_argument("--role", choices=tuple(FILES), required=True, help=_ROLES)
    options = parser.parse_args(list(arguments))
    where, token = _job_at(options.address, options.role)
    look_in_working_directory()
    serve_job = {"rollout": _generate, "trainer": _replicate, "reward": score}[options.role]

    async def main(where: str) -> str:
        leave = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, leave.set)
        while True:
            try:
                connection = await connect(*_parts(where), token)
            except (OSError, EOFError, TimeoutError) as error:
                raise InputError(f"rlinf join {where}: {error or 'nobody answers'}") from None
            try:
                return await serve_job(
                    connection, partial(print, f"joined {where} as {options.role}", flush=True), leave
                )
            except Sent as elsewhere:
                where = str(elsewhere)
            except (OSError, UserError) as error:
                raise RunFailure(f"rlinf join {where}: {error}") from None

    print(asyncio.run(main(where)))
    return 0


async def _replicate(connection: Connection, ready: Callable[[], Any], leave: asyncio.Event) -> str:
    trainer, far_side = await in_thread(partial(_imported, "rlinf.actors.trainer", "rlinf.actors.replicas.far_side"))
    how: str = await far_side.replicate(connection, trainer.Trainer, ready, leave)
    return how


async def _generate(connection: Connection, ready: Callable[[], Any], leave: asyncio.Event) -> str:
    return await serve(connection, _engine, ready, leave)


async def _engine(*, weights_come: bool, outlined: Mapping[str, Any] | None, **made_of: Any) -> Engine:
    """The engine of what the job says that its own is made from, with as few imports as that needs.

    Args:
        weights_come: the job sends weights before any request.
        outlined: see `rlinf.actors.rollout.outline_for`.
        made_of: see `rlinf.actors.rollout.joining_engine`.
    """
    if weights_come and outlined is not None:
        try:
            await in_thread(partial(_imported, "rlinf.engines.transformers.engine", "rlinf.engines.transformers.plain"))
            about = {key: made_of[key] for key in ("tokenizer", "settings")}
            return await outlined_engine("engine", **outlined, **about)
        except ValueError as error:  # the fast way is off by too much on this device: by the model's own forward
            print(f"{error}; it begins again with transformers", file=sys.stderr)
    (rollout,) = await in_thread(partial(_imported, "rlinf.actors.rollout"))
    engine: Engine = await rollout.joining_engine("engine", **made_of)
    return engine


def _imported(*names: str) -> list[Any]:
    """Import torch and modules, and return these. Blocking."""
    gc.disable()  # while much is imported and little dropped
    import torch

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # as the job's own processes do, see `runtime.system.torchrun`
    modules = [importlib.import_module(name) for name in names]
    gc.freeze()
    gc.enable()
    return modules


def _parts(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _job_at(address: str, role: str) -> tuple[str, str]:
    """Its "host:port", and the token."""
    directory = Path(address).expanduser()
    token = os.environ.get(TOKEN)
    if directory.is_dir():
        try:
            address, its = read(directory, role)
        except FileNotFoundError:
            text = f"rlinf join {address}: the run does not go on, or was started without {role}.join"
            raise InputError(text) from None
        token = token or its
    before, _, port = address.rpartition(":")
    if not before or not port.isdigit():
        raise InputError(f"rlinf join {address}: there is no such directory of a run, and it is no HOST:PORT")
    if not token:
        raise InputError(f"rlinf join {address}: set {TOKEN} to the token in {FILES[role]} of the run's directory")
    return address, token
