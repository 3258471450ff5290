"""Starting the roles of a run on their hosts.

In: a checked configuration and what it names. Out: a handle per role, under the name by which a flow takes it.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Any

from rlinf.actors.judge import Judge
from rlinf.actors.rollout import Rollout
from rlinf.actors.trainer import Trainer
from rlinf.config import InputError, RunConfig, roles_to_hosts
from rlinf.data.dataset import Data
from rlinf.rewards.base import OFFERED, Reward
from rlinf.runtime.group import ActorGroup
from rlinf.runtime.system import ActorSystem

Roles = dict[str, ActorGroup]
"""`rollout`, `judge`, and where a run trains `trainer`."""


async def spawn_roles(
    system: ActorSystem, config: RunConfig, data: Data, *, rescue: str | None = None, train: bool = True
) -> Roles:
    """Start every role on its hosts, all at once.

    Args:
        system: where.
        config: what.
        data: what is answered: its tokenizer, and the columns that a reward may take.
        rescue: directory for a batch whose loss is no number.
        train: start a trainer too.

    Raises:
        InputError: the reward takes a column that there is not.
    """
    _check_reward(config, data)
    hosts = roles_to_hosts(config.placement, system.hosts)
    shared: dict[str, Any] = {
        "model": config.model.path or config.model.config,
        "tokenizer": data.tokenizer_source,
        "seed": config.seed,
    }
    starting = {
        "rollout": system.spawn(Rollout, hosts=hosts["rollout"], name="rollout", **shared, **_rollout(config)),
        "judge": system.spawn(Judge, hosts=hosts["judge"], name="judge", **_judge(config, data)),
    }
    if train:
        trainer = {**shared, **_trainer(config), "rescue_dir": rescue}
        starting["trainer"] = system.spawn(Trainer, hosts=hosts["trainer"], name="trainer", **trainer)
    return dict(zip(starting, await asyncio.gather(*starting.values()), strict=True))


def _check_reward(config: RunConfig, data: Data) -> None:
    reward = config.reward
    if data.columns:  # they are not known yet where rows come one by one
        try:
            Reward.of(reward.parts or reward.function, reward.args, make=False).check(
                {*OFFERED, "messages", *data.columns}
            )
        except ValueError as error:
            raise InputError(f"reward: {error}") from error


def _rollout(config: RunConfig) -> dict[str, Any]:
    return asdict(config.rollout)


def _judge(config: RunConfig, data: Data) -> dict[str, Any]:
    reward = asdict(config.reward)
    one, parts = reward.pop("function"), reward.pop("parts")
    return {"reward": parts or one, **reward, "columns": data.columns or None}


def _trainer(config: RunConfig) -> dict[str, Any]:
    algorithm, lora = config.algorithm, config.model.lora
    return {
        **asdict(config.optimizer),
        **asdict(config.trainer),
        "total_steps": config.steps * algorithm.epochs * algorithm.minibatches,
        "epochs": algorithm.epochs,
        "minibatches": algorithm.minibatches,
        "clip_low": algorithm.clip_low,
        "clip_high": algorithm.clip_high,
        "dual_clip": algorithm.dual_clip,
        "advantage_scale": algorithm.advantage_scale,
        "lora": asdict(lora) if lora.r else None,
    }
