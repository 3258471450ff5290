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
from rlinf.job.roles.running import restore_own, save_own
from rlinf.metrics.machine import machine
from rlinf.placement.auto.auto import AutoPlacement
from rlinf.placement.grammar import PlacementError
from rlinf.placement.hardware import Fleet
from rlinf.placement.modes import spread
from rlinf.placement.plan import Mode, Plan, RolePlan
from rlinf.placement.plan_file import save as save_plan
from rlinf.placement.profiling.ledger import Ledger
from rlinf.placement.seats import Placed, RoleKind, placed_by
from rlinf.runtime.base.tasks import all_or_none
from rlinf.runtime.system.handles import ActorGroup
from rlinf.runtime.system.system import ActorSystem
from rlinf.weights.parked_state import ParkedState, park

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
            count=placed.gpus,
            kinds=placed.fleet.kinds,
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
                placed.fleet,
                placed.memory_by_kind,
                explored=_explored(kinds, placed.fleet),
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
        spawn: Callable[[Placed, Collection[str]], Awaitable[Roles]],
        publish: Callable[[Roles], Awaitable[Any]],
    ) -> dict[str, ActorGroup]:
        """A step is over: plan and move, if it is time to.

        Args:
            seconds: that the step took.
            system, roles: running.
            directory: of the run.
            say: tells a line.
            rest: waits until nothing is under way between steps, such as a checkpoint.
            spawn, publish: see `placement_manager.relocate`.

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
            system, roles, moving, directory, spawn=lambda moving: spawn(goal, moving), publish=publish
        )
        where = (f"{role} to host {', '.join(map(str, now[role].hosts))}" for role in now if role in moving)
        say(f"moved: {', '.join(where)}")
        self.placed, self.ledger.devices = goal, goal.of_actors
        await asyncio.to_thread(save_plan, decision.plan, directory / PLAN)
        return now


def _explored(kinds: Sequence[RoleKind], fleet: Fleet) -> list[Plan]:
    """What to measure besides all roles on all devices: roles on devices of their own, if there are enough. Of several
    kinds of device, each role on each: as many placements as kinds, where generation has one and the others the next.
    """
    names, devices = [kind.name for kind in kinds if kind.on_devices], len(fleet.kinds)
    alike = [fleet.of_kind(kind) for kind in fleet.counts]
    if len(alike) > 1:
        return [
            Plan({name: RolePlan(alike[(turn + (at > 0)) % len(alike)]) for at, name in enumerate(names)})
            for turn in range(len(alike))
        ]
    modes: tuple[Mode, ...] = ("disaggregated", "hybrid")
    for mode in modes:
        try:
            shares = spread(mode, names[0], names[1:], devices)
        except PlacementError:
            continue
        return [Plan({role: RolePlan(where) for role, where in shares.items()})]
    return []


ASIDE = "checkpoints/.moving.partial"
"""Directory, in that of the run, into which moving roles are saved whose class only knows files. If a run is killed
meanwhile, it is removed with other unfinished checkpoints when the run is resumed."""


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
    spawn: Callable[[Collection[str]], Awaitable[Mapping[str, ActorGroup]]],
    publish: Callable[[Mapping[str, ActorGroup]], Awaitable[Any]],
) -> dict[str, ActorGroup]:
    """Move some roles, one after the other gone before the first comes: a device need not hold both.

    What a role knows stays in the memory of its old hosts meanwhile, and its new ranks fetch what they need of it. A
    role that has `save` and `restore` and no `export_state` goes through a directory.

    Args:
        system: where they run.
        roles: all of them, at rest: between two steps, with no checkpoint under way.
        moving: names of those that are spawned anew.
        directory: of the run, which all hosts can read.
        spawn: starts roles in their new places.
        publish: given all roles, has weights published to whoever needs them.

    Returns:
        All roles, in the same order.

    Raises:
        Exception: what a role raised; the run cannot go on then, but from its last checkpoint.
    """
    leaving = {role: roles[role] for role in moving}
    by_file = [role for role, group in leaving.items() if "export_state" not in group.endpoints]
    aside = directory / ASIDE
    parked: list[ParkedState] = []

    async def take_along(role: str, group: ActorGroup) -> None:
        parked.append(await park(system, role, group))

    try:
        await asyncio.to_thread(_remove, aside)
        await all_or_none(
            [
                save_own(leaving, aside, by_file),
                *(take_along(role, group) for role, group in leaving.items() if role not in by_file),
            ]
        )
        ended = await asyncio.gather(*(system.kill(group) for group in leaving.values()), return_exceptions=True)
        for failure in ended:
            if isinstance(failure, BaseException):
                raise failure
        come = await spawn(moving)
        now = {role: come.get(role, group) for role, group in roles.items()}
        await all_or_none(
            [restore_own(now, aside, by_file), *(now[state.role].import_state(state) for state in parked)]
        )
    finally:
        await asyncio.gather(*(system.kill(state.keepers) for state in parked))
    await publish(now)
    await asyncio.to_thread(_remove, aside)
    return now


def _remove(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
