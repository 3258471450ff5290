"""Runs on text: a language model answers prompts, and learns from how its answers are judged.

In: a `RunConfig` and the code that it names. Out: the run, by the training loop; and for whoever only evaluates, the
problems, the roles and the answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import fields
from functools import partial
from typing import Any

from rlinf.actors.judge import RewardError
from rlinf.agents.agent import opened
from rlinf.agents.endpoint.endpoint import Endpoint
from rlinf.algos.algorithms import Distillation
from rlinf.config.load import InputError
from rlinf.config.text import RewardConfig, RunConfig
from rlinf.data.datasets.benchmarks import benchmarks_of
from rlinf.data.datasets.load import Data, PromptOptions, Rooms, load_data
from rlinf.data.datasets.prompts import Room
from rlinf.data.datasets.source import DataError
from rlinf.data.datasets.stream import left_out
from rlinf.data.in_flight import InFlight, Ledger, Rules
from rlinf.data.in_flight.admission import teaches
from rlinf.data.ledger import CRITIC_ONLY, held_of
from rlinf.data.sample import Evaluation, NotScored, Prompt
from rlinf.data.step import Step, works_ahead
from rlinf.engines.base import RequestRefused
from rlinf.flows.session import Running, RunSession
from rlinf.flows.warm_up import warm_up
from rlinf.metrics.alarms import (
    FailureAlarm,
    MismatchAlarm,
    NothingLearnedAlarm,
    NoUpdateAlarm,
    RouteDriftAlarm,
    Scored,
    ShapingAlarm,
    StalenessAlarm,
    default_reward,
)
from rlinf.metrics.report import compared, in_words, rows
from rlinf.models.language.build import limits, pictures_of
from rlinf.placement.seats import Placed
from rlinf.runs.dry_run.footprint import spread_of
from rlinf.runs.evaluation import (
    answers_of,
    beside,
    compared_named,
    evaluate_named,
    evaluate_on,
    evaluation_of,
    named_in_words,
    numbers_of,
)
from rlinf.runs.loop import TrainingLoop
from rlinf.runs.prepare import InMemory, Prepared, default_correction, filled_in_limit
from rlinf.runs.roles import (
    CRITIC,
    KINDS,
    REFERENCE,
    Roles,
    RolloutKeeper,
    check_tools_shown,
    only,
    running_of,
    spawn_roles,
)
from rlinf.runs.text_roles import roles_to_start
from rlinf.runtime.streams.stream import Stream
from rlinf.runtime.system.system import ActorSystem
from rlinf.storage.directory import Checkpoint, RunDirectory
from rlinf.storage.files import JsonLines
from rlinf.training.weight_sync import LoadTorn

_IN_TURNS = (
    "staleness.max={} saves next to no time here, as generating and learning take turns in one process: answers are "
    "only older. Start more processes (torchrun), or take the flow that begins nothing early, such as rlinf.flows.grpo"
)
"""A line about working ahead where nothing runs side by side."""
_OUR_FLOWS = "rlinf.flows."
"""Flows from here learn from everything that is drawn, once; others may do as they like."""


class TextLoop(TrainingLoop[Evaluation]):
    """A run on text. Arguments are those of `TrainingLoop`."""

    generates = "rollout"
    kinds = KINDS
    headline = "evaluation/accuracy"
    failures = (FloatingPointError, RewardError, NotScored, LoadTorn, RequestRefused)
    config: RunConfig

    def __init__(self, system: ActorSystem, config: RunConfig, prepared: Prepared, directory: RunDirectory) -> None:
        super().__init__(system, config, prepared, directory)
        self.moving_reference, self.own_roles = config.reference.kind == "ema", tuple(config.roles)
        self.data = load_data_of(config, prepared.objects)
        self.counters: dict[str, int] = {}
        """How much was drawn by sessions, for their randomness to go on after a checkpoint."""
        self.ledger = Ledger(own=not prepared.flow.__module__.startswith(_OUR_FLOWS))
        """What became of every sample that was drawn."""
        self._session: RunSession | None = None
        self._endpoint = Endpoint(config.agent.endpoint)
        no_end = no_end_token(config, self.data)
        self.ahead = works_ahead(prepared.flow)
        """The flow takes what is in flight, and draws its prompts itself."""
        in_turns = self.ahead and system.hosts == 1 and takes_turns(config, prepared.objects)
        idle = _IN_TURNS.format(config.staleness.max) if in_turns else ""
        self.notes = (
            *prepared.told,
            *self.data.notes,
            *filter(None, (no_end, idle, beside_agent(config, prepared.objects))),
        )
        if self.ahead:
            assert prepared.algorithm is not None  # of every run on text
            stale, rollout = config.staleness, config.rollout
            rules = Rules(
                stale.max,
                config.algorithm.prompts_per_step,
                mode=stale.mode,
                carry=rollout.carry,
                extra=rollout.extra,
                partial=rollout.groups == "partial",
                sampling=prepared.algorithm.sampling,
                teaches=partial(teaches, prepared.algorithm),
            )
            keeper, draw = RolloutKeeper(lambda: self.roles["rollout"], lambda: self._session), self.data.train.draw
            self.in_flight = InFlight(rules, draw=draw, keeper=keeper, ledger=self.ledger, end=config.steps)
        self._alarm = MismatchAlarm(config.metrics.mismatch_mean, config.metrics.mismatch_max)
        self._routes_apart = RouteDriftAlarm(config.metrics.route_drift)
        self._too_old = StalenessAlarm(config.staleness.max, "staleness.max")
        self._no_update, self._shaping = NoUpdateAlarm(), ShapingAlarm()
        self._scoring = FailureAlarm()
        self._nothing_learned = NothingLearnedAlarm(
            self._compares, config.rollout.max_new_tokens, reward_path(config, prepared.objects), no_end
        )
        self._reward_is_default = reward_is_default(config, prepared.objects)
        self._rows: Sequence[Mapping[str, Any]] = ()
        """Some answers of the newest step."""
        self._judged = 0
        """Answers that the judge was given in the newest step."""
        self._unscored: Sequence[Mapping[str, Any]] = ()
        """Answers without a reward that the step's line tells of."""

    @asynccontextmanager
    async def started(self, begun: Checkpoint | None = None) -> AsyncIterator[None]:
        try:
            with JsonLines(self.directory.ledger) as self._account:
                async with opened(self.prepared.objects.agent), super().started(begun):
                    yield
        finally:
            await self._endpoint.close()

    @property
    def evaluates_every(self) -> int:
        return self.config.evaluation.every

    @property
    def patience(self) -> int:
        return self.config.evaluation.patience

    async def spawn(self, placed: Placed, names: Collection[str] | None = None) -> Roles:
        spread = spread_of(self.config, self.prepared.model_config, placed, self.prepared.roles)
        if spread.words is not None:
            self.report.line(f"{self.config.name}: {spread.words}")
        for told in (default_correction, filled_in_limit) if names is None else ():
            if (words := told(self.config, self.prepared.algorithm)) is not None:
                self.report.line(f"{self.config.name}: {words}")
        directory = str(self.directory.path)
        roles = roles_to_start(self.config, self.data, self.prepared, rescue=directory, sharding=spread.sharding)
        say, name = self.report.line, self.config.name
        return await spawn_roles(self.system, placed, only(roles, names), lambda words: say(f"{name}: {words}"))

    async def warm_up(self) -> bool:
        settings, roles = self.config.sft, self.roles
        if not settings.steps:
            return False
        worked = Stream.of(self.data.worked_batches(settings.steps, settings.batch_size))
        self.report.warmed_up(
            await warm_up(worked, roles["rollout"], roles["trainer"], lr=settings.lr), "worked problems"
        )
        # critic and reference start from the policy that came of it, unless they have models of their own
        if CRITIC in roles and self.config.critic.model is None:
            await roles[CRITIC].load(roles["trainer"].weights(exact=True))
        if REFERENCE in roles and self.config.reference.model is None:
            await roles[REFERENCE].load(roles["trainer"].weights(exact=True))
            await roles[REFERENCE][0].save(str(self.directory.path / REFERENCE))
        return True

    async def draw(self, index: int) -> Step:
        count = self.config.algorithm.prompts_per_step
        return self._step(index, () if self.ahead else Stream.of(await self._drawn(count)))

    def _step(self, index: int, prompts: Iterable[Prompt] | AsyncIterable[Prompt]) -> Step:
        assert self.prepared.algorithm is not None  # of every run on text
        return Step(
            index,
            prompts,
            self.config.algorithm.group_size,
            prompts_per_step=self.config.algorithm.prompts_per_step,
            sampling=None if self.ahead else self.prepared.algorithm.sampling,
            teaches=partial(teaches, self.prepared.algorithm),
            draw=self._drawn,
            critic_only=self._critic_only(index),
            moving_reference=REFERENCE in self.roles and self.moving_reference,
            in_flight=self.in_flight,
            ledger=self.ledger,
        )

    async def _drawn(self, count: int) -> Sequence[Prompt]:
        """The next prompts, entered in the ledger."""
        prompts = await self.data.train.draw(count)
        self.ledger.drawn((prompt.id for prompt in prompts), self.config.algorithm.group_size)
        return prompts

    def _critic_only(self, index: int) -> bool:
        return CRITIC in self.roles and index < self.config.critic.head_start

    @property
    def _compares(self) -> bool | None:
        """Advantages compare answers of a group; False: of a batch; None: they are not made of rewards."""
        assert self.prepared.algorithm is not None  # of every run on text
        algorithm = self.prepared.algorithm
        return None if isinstance(algorithm.advantage, Distillation) else algorithm.compares_within_groups

    @property
    def session(self) -> RunSession:
        """The roles as flows and agents call them."""
        if self._session is None:
            self._session = RunSession(self.running(judges=True))
        return self._session

    def offered(self, step: Any) -> dict[str, Any]:
        return {**super().offered(step), "session": self.session}

    def running(self, judges: bool) -> Running:
        """What a session on this run's roles has to know.

        Args:
            judges: the reward function was asked for, and is no mere default.
        """
        algorithm = self.prepared.algorithm
        assert algorithm is not None  # of every run on text
        return running_of(
            self.config,
            lambda: self.roles,
            self.data.tokenizer,
            self.prepared.model_config,
            self.prepared.objects.agent,
            compares=algorithm.name if self._compares else None,
            judges=judges,
            reward_chosen=not reward_is_default(self.config, self.prepared.objects),
            counters=self.counters,
            step=lambda: self._step(self.done, ()),
            say=self.report.line,
            dropped=(lambda *_: None) if self.ahead else self.ledger.dropped,  # what is in flight tells it itself
            endpoint=self._endpoint,
        )

    async def evaluate(self) -> Evaluation | None:
        found = None
        if self.data.held_out and self.prepared.objects.agent is not None:
            found = await self.session.evaluate(self.data.held_out, n=self.config.evaluation.samples)
        elif self.data.held_out:
            found = await evaluate_on(self.data, self.roles, self.config, self.prepared.objects.reward)
        if self.data.named:
            named = await evaluate_named(self.data, self.roles, self.config, self.prepared.model_config)
            found = beside(found, named)
        if found is not None:
            await self._hear_judges("evaluation")
        return found

    def numbers(self, evaluation: Evaluation) -> dict[str, float]:
        return numbers_of(evaluation)

    def in_words(self, evaluation: Evaluation) -> str:
        first = [in_words(evaluation, self.config.evaluation.temperature)] if evaluation.groups else []
        return "; ".join([*first, *named_in_words(evaluation)])

    def compared(self, before: Evaluation, after: Evaluation) -> Iterator[str]:
        if after.groups:
            yield from compared(before, after, self.config.evaluation.temperature)
        yield from compared_named(before, after)

    def answers(self, evaluation: Evaluation) -> list[dict[str, Any]]:
        return rows(evaluation, self.data.tokenizer)

    async def step_ended(self, returned: Mapping[str, float]) -> Mapping[str, float]:
        scored = await self._hear_judges(f"step {self.done + 1}")
        told = {"reward/failed": scored.failed} if scored.answers else {}
        told |= self.left_out(self.data.train)
        await self._account_for(self.done + 1)
        self._judged = scored.answers
        return await super().step_ended({**returned, **told})

    def files(self) -> Iterable[JsonLines]:
        return (*super().files(), self._account)

    async def _account_for(self, step: int) -> None:
        """Write the step's line of the ledger."""
        found = await self.roles["trainer"].learned()
        self.in_flight.learned()
        ledger, held = self.ledger, held_of(self.in_flight.entries)
        ledger.learned(found)
        if self._critic_only(step - 1):
            for prompt_id in ledger.open.keys() - held.keys():
                ledger.dropped(prompt_id, CRITIC_ONLY)
        self._account.add([ledger.close(step, held)])

    async def save(self, position: Mapping[str, Any] | None = None) -> None:
        await asyncio.to_thread(self._account.sync)  # before the checkpoint that goes on from there
        await super().save(position)

    async def _hear_judges(self, where: str) -> Scored:
        """What became of the answers that were judged since this was last asked; it is told if it is news."""
        found = Scored.total(await self.roles["judge"].scored())
        news = self._scoring.heard(where, found)
        if news is not None:
            self.alarm(news, self.done + where.startswith("step"))  # of the step that is not counted yet
        self._unscored = found.rows if news is not None else ()
        return found

    async def samples(self) -> Sequence[Mapping[str, Any]]:
        wanted = self.config.metrics
        found: Sequence[Mapping[str, Any]] = await self.roles["trainer"].samples(wanted.samples, wanted.token_rows)
        shown = {(row["prompt_id"], row["index"]) for row in found}
        self._rows = [*found, *(row for row in self._unscored if (row["prompt_id"], row["index"]) not in shown)]
        return self._rows

    async def failed(self) -> Sequence[Mapping[str, Any]]:
        return Scored.total(await self.roles["judge"].scored()).rows

    def remarks(self) -> Iterator[str]:
        if self._scoring.total.failed:
            yield str(self._scoring.total)
        yield from left_out(self.data.train).values()

    def stepped(self, metrics: Mapping[str, float]) -> None:
        too_old = (self._too_old,) if self.ahead else ()
        rang = [alarm.heard(self.done, metrics) for alarm in (self._alarm, self._routes_apart, *too_old, self._shaping)]
        if self._reward_is_default and self._rows and self._judged:
            self._reward_is_default = False  # said once
            rang.append(default_reward(f"step {self.done}", self._rows))
        last = self.done == self.steps or self.stopped is not None
        no_update = self._no_update.heard(self.done, metrics)
        # both say of one thing why nothing was learned, and the first one shows answers
        rang.append(self._nothing_learned.heard(self.done, metrics, self._rows, last) or no_update)
        for warning in rang:
            if warning is not None:
                self.alarm(warning)

    def queue(self) -> dict[str, Any]:
        before, after = answers_of(self.before), answers_of(self.after)
        return {**self.position(), "before": before, "after": after}

    def position(self) -> dict[str, Any]:
        return {"problems": self.data.state_dict(), "session": self.counters, "ledger": self.ledger.state_dict()}

    @property
    def restartable(self) -> bool:
        return not any("save" in self.roles[name].endpoints for name in self.own_roles)

    async def restore(self, begun: Checkpoint) -> None:
        queue: Any = begun.queue
        self.data.load_state_dict(queue["problems"])
        self.before, self.after = evaluation_of(queue["before"]), evaluation_of(queue["after"])
        self.counters |= queue.get("session", {})
        self.ledger.load_state_dict(queue.get("ledger", {}))


# Rewards and ends of answers ------------------------------------------------------------------------------------------


def reward_is_default(config: RunConfig, objects: InMemory) -> bool:
    """True for rows of the user's own that nobody chose a reward for; the generated problems are made for `exact`."""
    chosen = objects.reward is not None or bool(config.reward.parts)
    own = objects.train is not None or config.data.train is not None
    return own and not chosen and config.reward.function == RewardConfig().function


def beside_agent(config: RunConfig, objects: InMemory) -> str:
    """A line on who rewards what an agent did, where a reward function was chosen beside it; else ""."""
    chosen = objects.reward is not None or config.reward.parts or config.reward.function != RewardConfig().function
    if objects.agent is None or not chosen:
        return ""
    return (
        "The agent's return value is its reward; the reward function is asked only where it returns None and did not "
        "call llm.reward"
    )


def takes_turns(config: RunConfig, objects: InMemory) -> bool:
    """True where one process has nothing to do beside learning: its own engine, and no agents who wait for others."""
    return config.staleness.max > 0 and config.rollout.engine == "transformers" and objects.agent is None


def reward_path(config: RunConfig, objects: InMemory) -> str | None:
    """The dotted path of the one function that scores; None where it was passed, or where there are several."""
    return None if objects.reward is not None or config.reward.parts else config.reward.function


def no_end_token(config: RunConfig, data: Data) -> str:
    """A line on answers that cannot end, as neither tokenizer nor model nor configuration names an end; else ""."""
    model, rollout = config.model.path or config.model.config, config.rollout
    ends = data.tokenizer.eos_token_id is not None or limits(model).end_ids
    if ends or rollout.stop or rollout.stop_token_ids:
        return ""
    return (
        f"Neither tokenizer nor model names an end token, so every answer runs into rollout.max_new_tokens="
        f"{rollout.max_new_tokens}; set rollout.stop_token_ids or rollout.stop, or the tokenizer's eos_token"
    )


# Data and evaluations -------------------------------------------------------------------------------------------------


def read_from(config: RunConfig, objects: InMemory | None) -> dict[str, Any]:
    """Where a configuration has rows to learn from and to be evaluated on, as arguments of what loads them.

    Args:
        config: what.
        objects: rows that were passed instead of being named.
    """
    data, evaluation = config.data, config.evaluation
    passed = InMemory() if objects is None else objects
    return {
        "train": data.train if passed.train is None else passed.train,
        "split": data.split,
        "shuffle": data.shuffle,
        "seed": config.seed,
        "task": config.task.name,
        "digits": config.task.digits,
        "evaluation": evaluation.data if passed.evaluation is None else passed.evaluation,
        "evaluation_split": evaluation.split,
        "evaluation_columns": evaluation.columns,
        "problems": evaluation.problems,
        "pictures": lambda tokenizer: pictures_of(config.model.path or config.model.config, tokenizer),
    }


def room_of(config: RunConfig, answer: int, key: str) -> Room:
    """What the model and its engine take of a prompt.

    Args:
        config: of the run.
        answer: tokens that the answer behind it may have; 0 for none.
        key: of the configuration that says so.
    """
    model = limits(config.model.path or config.model.config)
    served = None if config.rollout.engine == "transformers" else config.rollout.max_tokens
    lengths = {"the model has positions for": model.length, "a server's cache, rollout.max_tokens, holds": served}
    found = [(length, what) for what, length in lengths.items() if length is not None]
    if not found:
        return Room(ids=model.vocabulary)
    length, what = min(found)
    behind = f", and an answer may have {answer:,} of them by {key}" if answer else ""
    return Room(length - answer, f"{what} {length:,}{behind}", model.vocabulary)


def rooms_of(config: RunConfig, objects: InMemory | None) -> Rooms:
    """What is left of the model's length for problems, behind which an answer as long as allowed must fit; an agent's
    answers are as long as there is room for."""
    if config.agent.function is not None or (objects is not None and objects.agent is not None):
        one = room_of(config, 1, "its least length")
        return Rooms(one, one)
    own, evaluated = config.rollout.max_new_tokens, config.evaluation.max_new_tokens
    train = room_of(config, own, "rollout.max_new_tokens")
    return Rooms(train, train if evaluated is None else room_of(config, evaluated, "evaluation.max_new_tokens"))


def load_data_of(config: RunConfig, objects: InMemory | None = None) -> Data:
    """What a configuration learns from and is evaluated on, in an order drawn from its seed.

    Args:
        config: what.
        objects: problems that were passed instead of being named.

    Raises:
        InputError: something cannot be read or used, or the chat template hides the tools of the agent.
    """
    options = {field.name: getattr(config.data, field.name) for field in fields(PromptOptions)}
    try:
        data = load_data(
            config.model.tokenizer or config.model.path,
            named=benchmarks_of(config.evaluation.named),
            rooms=rooms_of(config, objects),
            **read_from(config, objects),
            **options,
        )
    except DataError as error:
        raise InputError(str(error)) from error
    check_tools_shown(config, data.tokenizer, None if objects is None else objects.agent)
    return data
