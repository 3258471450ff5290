"""The roles of a run: started on their hosts, saved into a checkpoint, restored from one.

In: the class and the settings of each role, and where each runs. Out: a handle per role, under the name by which a flow
takes it. Who wakes whom: nobody; the run waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlinf.actors.base.spmd import JointActor
from rlinf.placement.seats import Placed
from rlinf.runtime.actor.actor import Actor
from rlinf.runtime.base.progress import work
from rlinf.runtime.base.tasks import all_or_none
from rlinf.runtime.system.handles import ActorGroup
from rlinf.runtime.system.system import ActorSystem

Roles = dict[str, ActorGroup]
"""By name: of a run on text `rollout`, `judge`, `trainer` and those that its algorithm needs; of a run of a policy that
acts `env`, `policy`, `trainer`, and `trials` where there are any."""
TRAINER, CRITIC, REFERENCE, REWARD_MODEL = "trainer", "critic", "reference", "reward_model"


OWN = "roles"
"""Directory of the user's own roles in a checkpoint."""
ALWAYS = ("rollout", "judge", "trainer")
"""Roles of every run on text."""


@dataclass(frozen=True, slots=True)
class Role:
    """A role that is to be started."""

    actor: type[Actor]
    """Its class."""
    settings: Mapping[str, Any]
    """Arguments of its `setup`."""
    held: tuple[int, int] = (0, 0)
    """Bytes on each of its devices while it is loaded, and while it is parked."""
    hosts: tuple[int, ...] | None = None
    """Where it runs if the placement does not know it."""
    lease_items: int | None = None
    """After so many items it offers devices that it shares, where the plan says nothing."""


async def spawn_roles(
    system: ActorSystem, placed: Placed, roles: Mapping[str, Role], say: Callable[[str], None] | None = None
) -> Roles:
    """Start roles, all or none of them.

    Args:
        system: where.
        placed: on which host and devices.
        roles: by name.
        say: is told how roles compute that do so in an unusual way.

    Returns:
        Their handles, in the same order.
    """
    found: Roles = {}

    async def spawn(names: Iterable[str]) -> None:
        for name in names:
            role = roles[name]
            where: dict[str, Any] = {"hosts": role.hosts}
            if role.hosts is None:
                where = placed.spawning(name, *role.held)
            if role.lease_items is not None and "devices" in where:
                where.setdefault("lease_items", role.lease_items)
            group = found[name] = await system.spawn(role.actor, name=name, **where, **role.settings)
            if say is not None and "computes" in group.endpoints and (words := await group[0].computes()):
                say(f"{name}: {words}")
            starting.advance()

    # Each of these makes its model on all its ranks together, with a lock held in every process: two at once could wait
    # for each other for ever, one on each of two hosts.
    joint = [name for name, role in roles.items() if issubclass(role.actor, JointActor)]
    with work("starting", len(roles), "roles") as starting:
        await all_or_none([spawn(joint), *(spawn([name]) for name in roles if name not in joint)])
    return {name: found[name] for name in roles}


def save_roles(
    roles: Mapping[str, ActorGroup], directory: Path, moving_reference: bool = False, own: Collection[str] = ()
) -> Awaitable[Any]:
    """Begin to write what changes from step to step; every role is called before this returns.

    Args:
        roles: running; those that have nothing to keep are passed over.
        directory: of the checkpoint.
        moving_reference: the reference policy is not the same in every step.
        own: names of the user's own; each process of those with an endpoint `save` writes into a directory of its own.
    """
    calls = []
    if TRAINER in roles:
        calls.append(roles[TRAINER].save(str(directory)))
    if CRITIC in roles:
        calls.append(roles[CRITIC].save(str(directory / CRITIC)))
    if REFERENCE in roles and moving_reference:
        calls.append(roles[REFERENCE][0].save(str(directory / REFERENCE)))
    return asyncio.gather(*calls, save_own(roles, directory, own))


def save_own(roles: Mapping[str, ActorGroup], directory: Path, own: Collection[str]) -> asyncio.Future[Any]:
    """Begin to write what the user's own roles keep; every role is called before this returns. Arguments are those of
    `save_roles`."""
    savers = [(name, roles[name]) for name in own if name in roles and "save" in roles[name].endpoints]
    return asyncio.gather(
        *(ref.save(str(directory / OWN / name / str(rank))) for name, group in savers for rank, ref in enumerate(group))
    )


async def restore_roles(
    roles: Mapping[str, ActorGroup],
    checkpoint: Path,
    run: Path,
    into: Path | None = None,
    own: Collection[str] = (),
) -> None:
    """Take over what `save_roles` wrote; whoever generates still has to be handed the trainer's weights.

    Args:
        roles: running, as new; those that have nothing to restore are passed over.
        checkpoint: its directory.
        run: the directory of the run that wrote it.
        into: the directory of the run that goes on: if that is another, it keeps the frozen reference too, which its
            own checkpoints do not have.
        own: names of the user's own; those with an endpoint `restore` get back what `save` wrote. Of n processes that
            wrote, process r reads what r mod n wrote; a role that the checkpoint does not know starts as new.

    Raises:
        FileNotFoundError: a role's part is missing.
        ValueError: a part does not fit, or is damaged.
    """
    if TRAINER in roles:
        await roles[TRAINER].restore(str(checkpoint / "state"))
    if CRITIC in roles:
        await roles[CRITIC].restore(str(checkpoint / CRITIC))
    if REFERENCE in roles:
        kept = [place / REFERENCE for place in (checkpoint, run) if (place / REFERENCE).exists()]
        if kept:
            await roles[REFERENCE].restore(str(kept[0]))
            if into is not None and not await asyncio.to_thread((into / REFERENCE).exists):
                await roles[REFERENCE][0].save(str(into / REFERENCE))
    await restore_own(roles, checkpoint, own)


async def restore_own(roles: Mapping[str, ActorGroup], checkpoint: Path, own: Collection[str]) -> None:
    """Have the user's own roles take over what `save_own` wrote. Arguments are those of `restore_roles`."""
    for name in own:
        if name in roles and "restore" in roles[name].endpoints:
            wrote = len(list((checkpoint / OWN / name).glob("*")))
            places = [str(checkpoint / OWN / name / str(rank % wrote)) for rank in range(len(roles[name])) if wrote]
            await asyncio.gather(*(ref.restore(place) for ref, place in zip(roles[name], places, strict=False)))


def only(roles: Mapping[str, Role], names: Collection[str] | None) -> dict[str, Role]:
    """Those of these names; all if None."""
    return {name: role for name, role in roles.items() if names is None or name in names}
