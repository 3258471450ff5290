"""Starting the roles of a run on their hosts.

In: a checked configuration and what it names. Out: a handle per role, under the name by which a flow takes it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlinf.actors.base.spmd import JointActor
from rlinf.actors.critic import Critic
from rlinf.actors.judge import Judge
from rlinf.actors.reference import Reference
from rlinf.actors.rollout import Rollout
from rlinf.actors.trainer import Trainer
from rlinf.algos.spec import AlgorithmSpec
from rlinf.config.loading import InputError
from rlinf.config.text import RunConfig
from rlinf.data.datasets.load import Data
from rlinf.models.language.fsdp import Sharding
from rlinf.placement.seats import Placed
from rlinf.rewards.base import OFFERED, Reward
from rlinf.runtime.actor.actor import Actor
from rlinf.runtime.base.tasks import all_or_none
from rlinf.runtime.system.handles import ActorGroup
from rlinf.runtime.system.system import ActorSystem

Roles = dict[str, ActorGroup]
"""`rollout` and `judge`; where a run trains `trainer`, and those that its algorithm needs: `critic`, `reference`,
`teacher`."""


async def spawn_roles(
    system: ActorSystem,
    config: RunConfig,
    data: Data,
    placed: Placed,
    *,
    algorithm: AlgorithmSpec | None = None,
    beside: Sequence[str] = (),
    rescue: str | None = None,
    held: Mapping[str, tuple[int, int]] | None = None,
    sharding: Sharding = "shard",
    only: Collection[str] | None = None,
) -> Roles:
    """Start every role on its hosts, all at once.

    Args:
        system: where.
        config: what.
        data: what is answered: its tokenizer, and the columns that a reward may take.
        placed: on which host and devices.
        algorithm: what is trained by; None starts no trainer.
        beside: which of `critic`, `reference` and `teacher` to start too.
        rescue: directory for a batch whose loss is no number.
        held: by role, bytes on each of its devices while it is loaded, and while it is parked.
        sharding: how trainer and critic lie on their processes.
        only: the roles to start; None for all.

    Raises:
        InputError: the reward takes a column that there is not.
    """
    _check_reward(config, data)
    shared: dict[str, Any] = {
        "model": config.model.path or config.model.config,
        "tokenizer": data.tokenizer_source,
        "seed": config.seed,
    }
    kinds: dict[str, tuple[type[Actor], dict[str, Any]]] = {
        "rollout": (Rollout, {**shared, **asdict(config.rollout)}),
        "judge": (Judge, _judge(config, data)),
    }
    if algorithm is not None:
        kinds["trainer"] = (
            Trainer,
            {**shared, **_trainer(config, algorithm), "sharding": sharding, "rescue_dir": rescue},
        )
        if "critic" in beside:
            kinds["critic"] = (Critic, {**shared, **_critic(config, algorithm), "sharding": sharding})
        for role in ("reference", "teacher"):
            if role in beside:
                kinds[role] = (Reference, {**shared, **_onlooker(config, role)})
    if only is not None:
        kinds = {role: kind for role, kind in kinds.items() if role in only}
    found: Roles = {}

    async def spawn(roles: Iterable[str]) -> None:
        for role in roles:
            kind, given = kinds[role]
            found[role] = await system.spawn(
                kind, name=role, **placed.spawning(role, *(held or {}).get(role, ())), **given
            )

    # Each of these makes its model on all its ranks together, with a lock held in every process: two at once could wait
    # for each other for ever, one on each of two hosts.
    joint = [role for role in kinds if issubclass(kinds[role][0], JointActor)]
    await all_or_none([spawn(joint), *(spawn([role]) for role in kinds if role not in joint)])
    return {role: found[role] for role in kinds}


def _check_reward(config: RunConfig, data: Data) -> None:
    reward = config.reward
    if data.columns:  # they are not known yet where rows come one by one
        try:
            Reward.of(reward.parts or reward.function, reward.args, make=False).check(
                {*OFFERED, "messages", *data.columns}
            )
        except ValueError as error:
            raise InputError(f"reward: {error}") from error


def _judge(config: RunConfig, data: Data) -> dict[str, Any]:
    reward = asdict(config.reward)
    one, parts = reward.pop("function"), reward.pop("parts")
    return {"reward": parts or one, **reward, "columns": data.columns or None}


def _trainer(config: RunConfig, algorithm: AlgorithmSpec) -> dict[str, Any]:
    lora = config.model.lora
    inside = algorithm.needs_reference and config.reference.kind == "adapters_off"
    return {
        **asdict(config.optimizer),
        **_learning(config, algorithm),
        "total_steps": config.steps * config.algorithm.epochs * config.algorithm.minibatches,
        "lora": asdict(lora) if lora.r else None,
        "reference": config.reference.kind if inside else None,
    }


def _critic(config: RunConfig, algorithm: AlgorithmSpec) -> dict[str, Any]:
    critic = config.critic
    changed = {} if critic.model is None else {"model": critic.model}
    common = _learning(config, algorithm)
    common.pop("logprob_chunk")  # it has no vocabulary
    return {
        **common,
        "betas": config.optimizer.betas,
        **{name: getattr(critic, name) for name in ("lr", "warmup_steps", "grad_clip", "weight_decay")},
        **changed,
    }


def _learning(config: RunConfig, algorithm: AlgorithmSpec) -> dict[str, Any]:
    """What trainer and critic have in common: how a batch becomes optimizer steps."""
    return {
        **asdict(config.trainer),
        "algorithm": algorithm,
        "epochs": config.algorithm.epochs,
        "minibatches": config.algorithm.minibatches,
    }


def _onlooker(config: RunConfig, role: str) -> dict[str, Any]:
    """A role that only says how likely it finds each token."""
    settings = config.reference if role == "reference" else config.teacher
    moving = role == "reference" and config.reference.kind == "ema"
    changed = {} if settings.model is None else {"model": settings.model}
    return {
        "column": "ref_logprobs" if role == "reference" else "teacher_logprobs",
        "decay": config.reference.decay if moving else None,
        "micro_batch_tokens": config.trainer.micro_batch_tokens,
        "logprob_chunk": config.trainer.logprob_chunk,
        "order": config.trainer.order,
        "dtype": settings.dtype,
        **changed,
    }


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
