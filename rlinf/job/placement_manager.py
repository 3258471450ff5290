"""Decides where the roles of a running job are, and moves them when another placement would be faster.

In: the seconds of every step. Out: roles that have moved, lines for whoever watches, `profile.json` and `plan.yaml` in
the run's directory. Who wakes whom: nobody; the run waits while roles move.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlinf.config.placement import Placing
from rlinf.job.prepare import Prepared
from rlinf.metrics.machine import machine
from rlinf.placement.auto.auto import AutoPlacement
from rlinf.placement.grammar import PlacementError
from rlinf.placement.modes import spread
from rlinf.placement.plan import Mode, Plan, RolePlan
from rlinf.placement.plan_file import save as save_plan
from rlinf.placement.profiling.ledger import Ledger
from rlinf.placement.seats import Placed, RoleKind, placed_by
from rlinf.runtime.system.handles import ActorGroup
from rlinf.runtime.system.system import ActorSystem

PLAN = "plan.yaml"
"""File name in a run directory."""
Roles = Mapping[str, ActorGroup]


class PlacementManager:
    """The placement of one run.

    Args:
        wanted: the section `placement`.
        prepared: the roles, where they are at first, and the flow.
    """

    def __init__(self, wanted: Placing, prepared: Prepared) -> None:
        placed, kinds = prepared.placed, prepared.kinds
        self.placed, self._kinds = placed, kinds
        self.ledger = Ledger(
            placed.of_actors,
            prepared.items,
            count=placed.devices,
            model=prepared.model,
            machine=machine(),
            flow=prepared.path,
            held=prepared.held,
            staleness=prepared.staleness,
        )
        self._auto: AutoPlacement | None = None
        if wanted.mode == "auto" and placed.devices > 1:
            self._auto = AutoPlacement(
                prepared.flow,
                placed.devices,
                placed.memory,
                explored=_explored(kinds, placed.devices),
                first=wanted.profile_steps,
                replan_above=wanted.replan_above,
            )

    async def after(
        self,
        seconds: float,
        system: ActorSystem,
        roles: Roles,
        directory: Path,
        *,
        say: Callable[[str], None],
        rest: Callable[[], Awaitable[Any]],
        save: Callable[[Roles, Path], Awaitable[Any]],
        spawn: Callable[[Placed, Collection[str]], Awaitable[Roles]],
        restore: Callable[[Roles, Collection[str], Path], Awaitable[Any]],
    ) -> dict[str, ActorGroup]:
        """A step is over: plan and move, if it is time to.

        Args:
            seconds: that the step took.
            system, roles: running.
            directory: of the run.
            say: tells a line.
            rest: waits until nothing is under way between steps, such as a checkpoint.
            save, spawn, restore: see `placement_manager.relocate`.

        Returns:
            The roles, those that moved as they are now.
        """
        if self._auto is None or not self._auto.due(seconds) or (profile := self.ledger.profile) is None:
            return dict(roles)
        decision = await self._auto.decide(profile, self.placed.plan)
        say(decision.said)
        if decision.plan is None:
            return dict(roles)
        await rest()
        goal = placed_by(decision.plan, self.placed, self._kinds)
        moving = moved(self.placed, goal)
        now = await relocate(
            system, roles, moving, directory, save=save, spawn=lambda moving: spawn(goal, moving), restore=restore
        )
        where = (f"{role} to host {', '.join(map(str, now[role].hosts))}" for role in now if role in moving)
        say(f"moved: {', '.join(where)}")
        self.placed, self.ledger.devices = goal, goal.of_actors
        await asyncio.to_thread(save_plan, decision.plan, directory / PLAN)
        return now


def _explored(kinds: Sequence[RoleKind], devices: int) -> list[Plan]:
    """What to measure besides all roles on all devices: roles on devices of their own, if there are enough."""
    names = [kind.name for kind in kinds if kind.on_devices]
    modes: tuple[Mode, ...] = ("disaggregated", "hybrid")
    for mode in modes:
        try:
            shares = spread(mode, names[0], names[1:], devices)
        except PlacementError:
            continue
        return [Plan({role: RolePlan(where) for role, where in shares.items()})]
    return []


ASIDE = "checkpoints/.moving.partial"
"""Directory, in that of the run, into which moving roles are saved. If a run is killed meanwhile, it is removed with
other unfinished checkpoints when the run is resumed."""


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
        save: has some roles write their state into a directory.
        spawn: starts roles in their new places.
        restore: given all roles, has the new ones read that state, and weights published to whoever needs them.

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
