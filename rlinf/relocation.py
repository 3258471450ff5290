"""Roles move to other devices between two steps: no process is restarted, and nothing that they learned is lost.

In: running roles, and where a plan wants them. Out: the same roles, those that had to move spawned anew where they
belong, with what they had. Who wakes whom: nobody; the run waits.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from rlinf.placing import Placed
from rlinf.runtime.system.handles import ActorGroup
from rlinf.runtime.system.system import ActorSystem

ASIDE = "checkpoints/.moving.partial"
"""Directory, in that of the run, through which what roles have learned passes; what a killed run leaves of it goes with
the other halves of checkpoints when the run is gone on with."""


def moved(before: Placed, after: Placed) -> frozenset[str]:
    """Names of the roles that are to be elsewhere, or to ask for their devices where they did not."""
    return frozenset(
        role
        for role in after.seats
        if (before.seats[role].hosts, before.seats[role].devices)
        != (after.seats[role].hosts, after.seats[role].devices)
        or ("devices" in before.spawning(role)) != ("devices" in after.spawning(role))
    )


async def relocate(
    system: ActorSystem,
    roles: Mapping[str, ActorGroup],
    moving: Collection[str],
    directory: Path,
    *,
    save: Callable[[Mapping[str, ActorGroup], Path], Awaitable[Any]],
    spawn: Callable[[Collection[str]], Awaitable[Mapping[str, ActorGroup]]],
    restore: Callable[[Mapping[str, ActorGroup], Collection[str], Path], Awaitable[Any]],
) -> dict[str, ActorGroup]:
    """Move some roles.

    Args:
        system: where they run.
        roles: all of them, at rest: between two steps, with no checkpoint under way.
        moving: names of those that are spawned anew.
        directory: of the run, which all hosts can read.
        save: has some roles write what they have into a directory.
        spawn: starts roles where they are to be.
        restore: of all roles has some, which are as new, take what was written, and weights be published to whoever
            needs them.

    Returns:
        All roles, in the same order.

    Raises:
        Exception: what a role raised; the run cannot go on then, but from its last checkpoint.
    """
    aside = directory / ASIDE
    await asyncio.to_thread(_empty, aside)
    leaving = {role: roles[role] for role in moving}
    await save(leaving, aside)
    ended = await asyncio.gather(*(system.kill(group) for group in leaving.values()), return_exceptions=True)
    for failure in ended:
        if isinstance(failure, BaseException):
            raise failure
    come = await spawn(moving)
    now = {role: come.get(role, group) for role, group in roles.items()}
    await restore(now, moving, aside)
    await asyncio.to_thread(shutil.rmtree, aside)
    return now


def _empty(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
