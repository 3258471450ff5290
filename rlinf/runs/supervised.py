"""Supervised runs on given texts: a language model learns from conversations, or from preference pairs.

In: a `RunConfig` with `algorithm: sft`, `dpo` or `reward_model`, and the code that it names. Out: the run, by the
training loop: batches in an order drawn from the seed, the loss on held-out rows, checkpoints.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rlinf.actors.reference import Reference
from rlinf.actors.supervised_trainer import SupervisedTrainer
from rlinf.config.learning import DPO, SFT, ReferenceSettings, SupervisedSettings, combine
from rlinf.config.load import InputError
from rlinf.config.text import RunConfig
from rlinf.data.datasets.load import Conversations
from rlinf.data.datasets.rendering import REF
from rlinf.data.datasets.stream import left_out
from rlinf.data.step import SupervisedStep
from rlinf.flows.text import annotate_in_order
from rlinf.metrics.alarms import NothingLearnedAlarm
from rlinf.placement.seats import Placed
from rlinf.runs.callbacks import Alarms, RunState
from rlinf.runs.data import conversations_of
from rlinf.runs.dry_run.footprint import spread_of
from rlinf.runs.loop import Described, Workload
from rlinf.runs.prepare import REFERENCE, TRAINER, RunPlan, objective_of
from rlinf.runs.roles import Role, Roles, only, spawn_roles
from rlinf.runtime.base.progress import work
from rlinf.runtime.system.handles import ActorGroup
from rlinf.storage.directory import Checkpoint
from rlinf.training.supervised import measured

Numbers = dict[str, float]
"""The loss of the held-out rows, and what the objective watches."""


class SupervisedWorkload(Workload[Numbers]):
    """Learning from given texts."""

    generates = TRAINER
    headline = "evaluation/loss"
    config: RunConfig

    def __init__(self, run: RunState) -> None:
        self.data = conversations_of(run.config, run.plan.objects)
        super().__init__(run, with_steps(run.config, self.data.rows))
        self.objective, self.notes = objective_of(self.config), self.plan.notes
        self.evaluates_every = self.config.evaluation.every
        self.observers = [Alarms(run, [NothingLearnedAlarm()])]

    async def spawn(self, placed: Placed, names: Collection[str] | None = None) -> Roles:
        spread = spread_of(self.config, self.plan.model_config, placed, self.plan.roles)
        for line in (*((spread.words,) if spread.words is not None else ()), *self.data.notes):
            self.run.report.line(f"{self.config.name}: {line}")
        roles = roles_to_start(self.config, self.data, self.plan, spread.sharding)
        return await spawn_roles(self.run.system, placed, only(roles, names), self.run.computes)

    async def draw(self, index: int) -> SupervisedStep:
        return SupervisedStep(index, await self.data.train.draw(self.config.supervised.batch_size))

    async def evaluate(self) -> Numbers | None:
        if not self.data.held_out:
            return None
        groups = []
        with work("evaluating", len(self.data.held_out), "rows") as evaluating:
            async for group in self.run.roles[TRAINER].outputs(self.data.held_out):
                groups.append(group)
                evaluating.advance()
        groups.sort(key=lambda group: group.id)
        if REFERENCE in self.run.roles:
            groups = await annotate_in_order(groups, self.run.roles[REFERENCE])
        return with_perplexity(await asyncio.to_thread(measured, self.objective, groups), self.config.algorithm.name)

    def describe(self, evaluation: Numbers) -> Described:
        sentence = f"loss {evaluation['loss']:.4f} on {len(self.data.held_out)} held-out rows"
        if "perplexity" in evaluation:
            sentence += f", perplexity {evaluation['perplexity']:.3f}"
        if "rewards/accuracies" in evaluation:
            sentence += f", the chosen one ahead in {evaluation['rewards/accuracies']:.1%}"
        return Described(evaluation, sentence)

    def conclude(self, before: Numbers | None, after: Numbers | None) -> Iterator[str]:
        if before and after:
            yield f"held-out loss {before['loss']:.4f} -> {after['loss']:.4f}"
            if "rewards/accuracies" in after:
                yield f"the chosen one ahead: {before['rewards/accuracies']:.1%} -> {after['rewards/accuracies']:.1%}"
        stream = self.data.train
        for line in left_out(stream).values():
            yield f"of {stream.position:,} rows drawn, {line}"

    async def samples(self) -> Sequence[Mapping[str, Any]]:
        wanted = self.config.metrics
        rows: Sequence[Mapping[str, Any]] = await self.run.roles[TRAINER].samples(wanted.samples, wanted.token_rows)
        return rows

    async def finish(self, returned: Mapping[str, float]) -> Mapping[str, float]:
        metrics = with_perplexity(returned, self.config.algorithm.name)
        return {**metrics, **self.left_out(self.data.train)}

    @property
    def restartable(self) -> bool:
        return True

    def position(self) -> dict[str, Any]:
        return {"data": self.data.train.state_dict()}

    async def restore(self, checkpoint: Checkpoint) -> None:
        await super().restore(checkpoint)
        queue: Any = checkpoint.queue
        self.data.train.load_state_dict(queue["data"])

    async def publish(self, roles: Mapping[str, ActorGroup]) -> None:
        """Nobody generates."""


def with_perplexity(metrics: Mapping[str, float], algorithm: str) -> dict[str, float]:
    """Metrics of a likelihood with exp(loss)."""
    has_loss = algorithm == SFT and "loss" in metrics
    return {**metrics, "perplexity": math.exp(min(metrics["loss"], 700.0))} if has_loss else dict(metrics)


def with_steps(config: RunConfig, rows: int | None) -> RunConfig:
    """The configuration with as many steps as its epochs have.

    Raises:
        InputError: it is not known how many rows an epoch has.
    """
    settings = config.supervised
    if settings.epochs is None:
        return config
    if rows is None:
        raise InputError("supervised.epochs: rows come one after the other, so nobody knows their number: set steps")
    return replace(config, steps=math.ceil(settings.epochs * rows / settings.batch_size))


def roles_to_start(config: RunConfig, data: Conversations, plan: RunPlan, sharding: str = "shard") -> dict[str, Role]:
    """The roles of a run on given texts, ready to be started.

    Args:
        config: what, with its number of steps.
        data: whose tokenizer the roles load.
        plan: says which roles there are.
        sharding: how the trainer lies on its processes.
    """
    shared: dict[str, Any] = {
        "model": config.model.path or config.model.config,
        "tokenizer": data.tokenizer_source,
        "seed": config.seed,
    }
    learns = {
        **shared,
        "settings": combine(
            SupervisedSettings,
            config.optimizer,
            config.trainer,
            sharding=sharding,
            saved_dtype=config.checkpoint.dtype,
            total_steps=max(1, config.steps),
            reference=config.reference.inside if config.algorithm.name == DPO else None,
        ),
        "chat_template": None if config.data.chat_template is None else data.tokenizer.chat_template,
        "lora": config.model.lora.settings,
        "freeze": config.model.freeze,
        "objective": objective_of(config),
    }
    roles = {TRAINER: Role(SupervisedTrainer, learns, plan.held.get(TRAINER, (0, 0)))}
    if REFERENCE in plan.roles:
        own = {} if config.reference.model is None else {"model": config.reference.model}
        how = combine(ReferenceSettings, config.trainer, order="arrival", column=REF, dtype=config.reference.dtype)
        roles[REFERENCE] = Role(Reference, {**shared, "settings": how, **own}, plan.held.get(REFERENCE, (0, 0)))
    return roles
