"""Builds the roles of a run on text: from the keys of a configuration to the arguments of each `setup`.

In: a configuration, its data and the code that it names. Out: a `Role` per name, ready to be started.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rlinf.actors.critic import Critic
from rlinf.actors.judge import Judge
from rlinf.actors.reference import Blend, Reference
from rlinf.actors.reward_model import GenerativeJudge, reward_model_class
from rlinf.actors.rollout import Rollout
from rlinf.actors.trainer import Trainer
from rlinf.algos.algorithms import AlgorithmSpec
from rlinf.config.learning import CriticSettings, NamedTeacher, ReferenceSettings, TrainerSettings, combine
from rlinf.config.load import InputError
from rlinf.config.text import RolloutSettings, RunConfig
from rlinf.data.datasets import source
from rlinf.data.datasets.benchmarks import benchmarks_of
from rlinf.data.datasets.load import Data
from rlinf.data.step import works_ahead
from rlinf.models.language.fsdp import Sharding
from rlinf.rewards.base import OFFERED, Reward, RewardSource
from rlinf.runs.prepare import RunPlan
from rlinf.runs.roles import CRITIC, REFERENCE, REWARD_MODEL, Role, own_roles

Settings = dict[str, Any]
"""Arguments of an actor's `setup`."""


def roles_to_start(
    config: RunConfig,
    data: Data,
    prepared: RunPlan | None = None,
    rescue: str | None = None,
    sharding: Sharding = "shard",
) -> dict[str, Role]:
    """The roles of a run, ready to be started.

    Args:
        config: what.
        data: what is answered: its tokenizer, and the columns that a reward may take.
        prepared: the code that the configuration names; None is for an evaluation, which needs no trainer.
        rescue: directory of the run, for a batch whose loss is no number and the output of inference servers.
        sharding: how trainer and critic lie on their processes.

    Raises:
        InputError: the reward takes a column that there is not.
    """
    passed = None if prepared is None else prepared.objects.reward
    check_reward(config, data, passed)
    ahead = prepared is not None and works_ahead(prepared.flow) and config.staleness.max > 0
    if ahead and config.trainer.order == "prompt":
        # Which answers a step learns from depends on when they come, so nothing is gained by waiting for an order
        config = replace(config, trainer=replace(config.trainer, order="arrival"))
    shared: Settings = {
        "model": config.model.path or config.model.config,
        "tokenizer": data.tokenizer_source,
        "seed": config.seed,
    }
    roles: dict[str, tuple[type[Any], Settings]] = {
        "rollout": (Rollout, {**shared, "settings": rollout_settings(config), "directory": rescue}),
        "judge": (Judge, _judge(config, data, passed)),
    }
    if config.reward_model.path is not None:
        roles[REWARD_MODEL] = (reward_model_class(config.reward_model), _reward_model(config, passed))
    if prepared is None:
        return {name: Role(actor, settings) for name, (actor, settings) in roles.items()}
    assert prepared.algorithm is not None  # of every run on text
    template = None if config.data.chat_template is None else data.tokenizer.chat_template
    learns: Settings = {
        **shared,
        "settings": trainer_settings(
            config,
            prepared.algorithm,
            sharding=sharding,
            rescue_dir=rescue,
            staleness=config.staleness.max if ahead else 0,
        ),
        "algorithm": prepared.algorithm,
        "chat_template": template,
        "lora": config.model.lora.settings,
        "freeze": config.model.freeze,
    }
    roles["trainer"] = (Trainer, learns)
    if CRITIC in prepared.roles:
        changed = {} if config.critic.model is None else {"model": config.critic.model}
        critic = _critic_settings(config, sharding)
        roles[CRITIC] = (Critic, {**shared, "algorithm": prepared.algorithm, "settings": critic, **changed})
    for name in (REFERENCE, "teacher", *config.named_teachers):
        if name in prepared.roles:
            roles[name] = (Reference, {**shared, **_reference(config, name)})
    # The rollout of a run that works ahead always has answers under way: it gives its devices away when there is enough
    # for its share of a step
    hosts = len(prepared.placed.seats["rollout"].hosts)
    grain = {"rollout": -(-config.algorithm.prompts_per_step // hosts)} if ahead else {}
    ours = {
        name: Role(actor, settings, prepared.held.get(name, (0, 0)), lease_items=grain.get(name))
        for name, (actor, settings) in roles.items()
    }
    return {**ours, **own_roles(config)}


def check_reward(config: RunConfig, data: Data, passed: RewardSource | None) -> None:
    """See that rows have what the reward takes.

    Raises:
        InputError: it takes a column that there is not.
    """
    reward = config.reward
    if data.columns:  # they are not known yet where rows come one by one
        try:
            Reward.of(passed or reward.source, reward.args, make=False).check({*OFFERED, "messages", *data.columns})
        except ValueError as error:
            raise InputError(f"reward: {error}") from error
        columns = {*OFFERED, "messages", *data.columns}
        fields = source.fields(config.reward_model.template or "")
        if missing := [name for name in fields if name not in columns and name.partition(".")[0] not in columns]:
            raise InputError(f"reward_model.template: there is no column {missing[0]!r}; there are {sorted(columns)}")


def _judge(config: RunConfig, data: Data, passed: RewardSource | None) -> Settings:
    benchmarks = benchmarks_of(config.evaluation.named)
    return {
        "settings": config.reward,
        "reward": passed,
        "columns": data.columns or None,
        "named": {name: (each.reward, dict(each.args)) for name, each in benchmarks.items()},
    }


def _learning_steps(config: RunConfig, algorithm: AlgorithmSpec) -> int:
    """Steps in which the policy learns: all but those that the critic has for itself."""
    return config.steps - (0 if algorithm.critic is None else config.critic.head_start)


def rollout_settings(config: RunConfig) -> RolloutSettings:
    """How the rollout of a run samples answers."""
    replays = config.trainer.backend != "megatron"  # which routes freely: nobody would read what the engine tells
    routes = config.trainer.router_replay if replays else False
    return combine(RolloutSettings, config.rollout, kv=config.staleness.kv, routes=routes)


def trainer_settings(config: RunConfig, algorithm: AlgorithmSpec, **more: Any) -> TrainerSettings:
    """How the trainer of a run learns.

    Args:
        config: of the run.
        algorithm: what it makes of the configuration.
        more: further settings, which the run alone knows.
    """
    passes = config.algorithm
    return combine(
        TrainerSettings,
        config.algorithm,
        config.optimizer,
        config.trainer,
        saved_dtype=config.checkpoint.dtype,
        total_steps=max(1, _learning_steps(config, algorithm) * passes.epochs * passes.minibatches),
        reference=config.reference.inside if algorithm.needs_reference else None,
        teacher=config.teacher.adapter if algorithm.needs_teacher else None,
        # a moving mean that bfloat16 rounds at every step would not move
        publishes="float32" if config.reference.kind == "ema" else config.rollout.dtype,
        **more,
    )


def _critic_settings(config: RunConfig, sharding: Sharding) -> CriticSettings:
    constant = {"schedule": "constant", "min_lr_ratio": 0.0}
    sections = (config.algorithm, config.optimizer, config.trainer, config.critic)
    return combine(CriticSettings, *sections, saved_dtype=config.checkpoint.dtype, sharding=sharding, **constant)


def scores_alone(config: RunConfig, passed: RewardSource | None) -> bool:
    """Tell whether no reward function scores, only a reward model."""
    return passed is None and config.reward.function is None and not config.reward.parts


def _reward_model(config: RunConfig, passed: RewardSource | None) -> Settings:
    order = {} if reward_model_class(config.reward_model) is GenerativeJudge else {"order": config.trainer.order}
    return {"settings": config.reward_model, **order, "alone": scores_alone(config, passed)}


def _reference(config: RunConfig, role: str) -> Settings:
    """The reference policy, or the teacher: log-probs by a model that does not learn."""
    settings = config.frozen[role]
    moving = role == "reference" and config.reference.kind == "ema"
    changed: dict[str, Any] = {} if settings.model is None else {"model": settings.model}
    column = "ref_logprobs" if role == REFERENCE else "teacher_logprobs"
    if isinstance(settings, NamedTeacher):
        share = settings.weight / sum(each.weight for each in config.named_teachers.values())
        name = role.removeprefix("teacher_")
        changed["blend"] = Blend(name, tuple(config.teachers), share, config.teacher.route)
        column = f"{column}/{name}"
    decay = config.reference.decay if moving else None
    how = combine(ReferenceSettings, config.trainer, column=column, decay=decay, dtype=settings.dtype)
    return {"settings": how, **changed}
