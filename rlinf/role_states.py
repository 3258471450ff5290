"""What the roles of a run have to keep, and to agree on: after a warm-up, at a checkpoint, and when it is gone on from.

checkpoints/step_000100/{state/, hf/}   the trainer
checkpoints/step_000100/critic/         the critic, where there is one
checkpoints/step_000100/reference/      a reference policy that moves
reference/                              in the run's directory: one that does not, if it was warmed up first
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping
from pathlib import Path
from typing import Any

from rlinf.config import RunConfig
from rlinf.runtime.system.handles import ActorGroup

TRAINER, CRITIC, REFERENCE = "trainer", "critic", "reference"


async def follow_warm_up(config: RunConfig, roles: Mapping[str, ActorGroup], directory: Path) -> None:
    """After a supervised warm-up: critic and reference start from the policy that came of it.

    Args:
        config: of the run; a role with a model of its own stays as it is.
        roles: running.
        directory: of the run, where a frozen reference is kept.
    """
    if CRITIC in roles and config.critic.model is None:
        await roles[CRITIC].load(roles["trainer"].weights())
    if REFERENCE in roles and config.reference.model is None:
        await roles[REFERENCE].load(roles["trainer"].weights())
        await roles[REFERENCE][0].save(str(directory / REFERENCE))


def save_roles(roles: Mapping[str, ActorGroup], directory: Path, moving_reference: bool) -> Awaitable[Any]:
    """Begin to write what changes from step to step; every role is asked before this returns.

    Args:
        roles: running; those that have nothing to keep are passed over.
        directory: of the checkpoint.
        moving_reference: the reference policy is not the same in every step.
    """
    calls = []
    if TRAINER in roles:
        calls.append(roles[TRAINER].save(str(directory)))
    if CRITIC in roles:
        calls.append(roles[CRITIC].save(str(directory / CRITIC)))
    if REFERENCE in roles and moving_reference:
        calls.append(roles[REFERENCE][0].save(str(directory / REFERENCE)))
    return asyncio.gather(*calls)


async def restore_roles(roles: Mapping[str, ActorGroup], checkpoint: Path, run: Path, into: Path | None = None) -> None:
    """Be where a checkpoint was written; whoever generates still has to be handed the trainer's weights.

    Args:
        roles: running, as new; those that have nothing to restore are passed over.
        checkpoint: its directory.
        run: the directory of the run that wrote it.
        into: the directory of the run that goes on: if that is another, it keeps the frozen reference too, which its
            own checkpoints do not have.

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
