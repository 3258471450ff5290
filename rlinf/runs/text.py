"""Runs on text: a language model answers prompts, and learns from how its answers are judged.

In: a `RunConfig` and the code that it names. Out: the run, by the training loop; its roles, ready to be started, also
for whoever only evaluates.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import statistics
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rlinf.actors.critic import Critic
from rlinf.actors.judge import Judge, RewardError
from rlinf.actors.reference import Blend, Reference
from rlinf.actors.remote_teacher import RemoteTeacher
from rlinf.actors.reward_model import GenerativeJudge, reward_model_class
from rlinf.actors.rollout import Rollout
from rlinf.actors.trainer import Trainer
from rlinf.agents.agent import opened
from rlinf.agents.configuration import adapting
from rlinf.agents.endpoint.endpoint import Endpoint
from rlinf.agents.episodes import KINDS
from rlinf.agents.llm import PastSelves
from rlinf.agents.player import Player
from rlinf.algos.algorithms import AlgorithmSpec, Distillation, Divergence
from rlinf.config.learning import (
    PAST,
    CriticSettings,
    NamedTeacher,
    ReferenceConfig,
    ReferenceSettings,
    TeacherConfig,
    TrainerSettings,
    combine,
    own_adapters,
    past_adapters,
)
from rlinf.config.load import InputError
from rlinf.config.text import RewardConfig, RolloutSettings, RunConfig, SftConfig
from rlinf.data.datasets.benchmarks import benchmarks_of
from rlinf.data.datasets.load import Data
from rlinf.data.datasets.stream import left_out
from rlinf.data.in_flight import InFlight, Ledger, Rules
from rlinf.data.ledger import CRITIC_ONLY, held_of
from rlinf.data.rng import permutation
from rlinf.data.sample import Evaluation, Example, Learned, NotScored, Prompt
from rlinf.data.step import Step, works_ahead
from rlinf.engines.base import RequestRefused
from rlinf.flows.session import Running, RunSession
from rlinf.flows.warm_up import example_of, warm_up
from rlinf.metrics.alarms import (
    MEANS,
    FailureAlarm,
    MismatchAlarm,
    NothingLearnedAlarm,
    NoUpdateAlarm,
    RoundingAlarm,
    RouteDriftAlarm,
    ShapingAlarm,
    StalenessAlarm,
    default_reward,
    failures_text,
)
from rlinf.metrics.report import compare, in_words, rows
from rlinf.models.language.arrangement import Sharding
from rlinf.placement.seats import Placed
from rlinf.rewards.base import RewardSource, ScoreCounts
from rlinf.runs.callbacks import AlarmRule, Observer, RunState
from rlinf.runs.data import check_reward, load_data_of, no_end_token, reward_is_default, scores_alone
from rlinf.runs.dry_run.footprint import spread_of
from rlinf.runs.dry_run.transformer import saved_shape, share_tensors
from rlinf.runs.evaluation import (
    answers_of,
    compared_named,
    evaluate_named,
    evaluate_on,
    evaluation_of,
    named_in_words,
    numbers_of,
    with_benchmarks,
)
from rlinf.runs.loop import Described, Workload
from rlinf.runs.prepare import InMemory, RunPlan, default_correction, filled_in_limit
from rlinf.runs.roles import (
    CRITIC,
    REFERENCE,
    REWARD_MODEL,
    Role,
    Roles,
    RolloutKeeper,
    only,
    own_roles,
    running_of,
    spawn_roles,
)
from rlinf.runtime.base.errors import UserError
from rlinf.runtime.base.progress import work
from rlinf.runtime.streams.stream import Stream
from rlinf.storage.directory import Checkpoint
from rlinf.storage.files import JsonLines
from rlinf.training.pacing import Pacing
from rlinf.training.policy import HIDDEN, distribution_of, teaches
from rlinf.training.weight_sync import LoadTorn

_IN_TURNS = (
    "staleness.max={} saves next to no time here, as generating and learning take turns in one process: answers are "
    "only older. Start more processes (torchrun), or take the flow that begins nothing early, such as rlinf.flows.grpo"
)
"""A line about working ahead where nothing runs side by side."""
_OUR_FLOWS = "rlinf.flows."
"""Flows from here learn from everything that is drawn, once; others may do as they like."""


class TextAlarms(Observer):
    """Warnings of a run on text.

    Args:
        run: whose people are told.
        alarms: of its numbers alone.
        nothing_learned, default_reward: which also show answers.
    """

    def __init__(
        self,
        run: RunState,
        alarms: Sequence[AlarmRule],
        nothing_learned: NothingLearnedAlarm,
        *,
        default_reward: bool,
    ) -> None:
        self._run, self._alarms, self._nothing_learned = run, alarms, nothing_learned
        self._no_update = NoUpdateAlarm()
        self._default_reward = default_reward
        self._rows: Sequence[Mapping[str, Any]] = ()  # some answers of the newest step
        self.judged = 0
        """Answers that the judge was given in the newest step."""

    async def on_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        self._rows = samples

    async def on_record(self, step: int, metrics: Mapping[str, float], last: bool) -> None:
        warnings = [alarm.check(step, metrics) for alarm in self._alarms]
        if self._default_reward and self._rows and self.judged:
            self._default_reward = False  # said once
            warnings.append(default_reward(f"step {step}", self._rows))
        no_update = self._no_update.check(step, metrics)
        # both say of one thing why nothing was learned, and the first one shows answers
        warnings.append(self._nothing_learned.check(step, metrics, self._rows, last) or no_update)
        for warning in filter(None, warnings):
            self._run.alarm(warning)


class PaceObserver(Observer):
    """Has a run's trainer go the way that `Pacing` says, as long as it shares devices with the rollout.

    Args:
        run: whose trainer.
        placed: tells where the run's roles are now.
    """

    def __init__(self, run: RunState, placed: Callable[[], Placed]) -> None:
        self._run, self._placed = run, placed
        self._measured: Placed | None = None
        """The placement that the pacing is about: in another one the same steps take other seconds."""
        self._told: tuple[object, bool] | None = None

    async def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        trainer, sentence = self._run.roles["trainer"], None
        if self._placed() is not self._measured:
            self._measured, self._pacing = self._placed(), Pacing()
            seats = self._measured.seats  # where they share no device, nobody can lend any
            self._off = {*seats["trainer"].devices}.isdisjoint(seats["rollout"].devices)
        if not self._off:
            sentence = self._pacing.after(metrics["timing/step"], metrics.get("tokens", 0.0))
        now = (trainer, self._pacing.free)
        if now != (self._told or (trainer, False)):
            able = all(await trainer.let_copies_part(self._pacing.free))
            if not able:
                self._off, sentence = True, "trainer.order=auto is arrival: no copies of the model can part"
        self._told = now
        if sentence is not None:
            self._run.report.line(f"step {step}: {sentence}")


class TextWorkload(Workload[Evaluation]):
    """Learning from answers that are judged.

    Args:
        run: whose.
        program: state of the program that drives the run, as JSON values, which checkpoints keep; None without one.
    """

    generates = "rollout"
    kinds = KINDS
    headline = "evaluation/accuracy"
    failures = (FloatingPointError, RewardError, NotScored, LoadTorn, RequestRefused)
    config: RunConfig

    def __init__(self, run: RunState, program: dict[str, Any] | None = None) -> None:
        super().__init__(run)
        config, plan = self.config, self.plan
        assert plan.algorithm is not None  # of every run on text
        self.algorithm, self.program = plan.algorithm, program
        self.evaluates_every, self.patience = config.evaluation.every, config.evaluation.patience
        self.moving_reference, self.own_roles = config.reference.kind == "ema", tuple(config.roles)
        self.data = load_data_of(config, plan.objects)
        self._environment = adapting(plan.objects.agent)
        self._past = PastSelves(config.agent.past)
        past, own = past_adapters(config.agent.past.size), own_adapters(config.agent.own_weights)
        self._further = (*past, *own.values())
        """Adapters that the engine holds beside the policy's weights."""
        self.counters: dict[str, int] = {}
        """How much was drawn by sessions, for their randomness to go on after a checkpoint."""
        self.ledger = Ledger(own=not plan.flow.__module__.startswith(_OUR_FLOWS))
        """The account of every sample that was drawn."""
        self._session: RunSession | None = None
        self._endpoint = Endpoint(config.agent.endpoint)
        self.ahead = works_ahead(plan.flow)
        """The flow takes what is in flight, and draws its prompts itself."""
        if self.ahead:
            self.in_flight = self._work_ahead()
        no_end = no_end_token(config, self.data)
        in_turns = self.ahead and run.system.hosts == 1 and takes_turns(config, plan.objects)
        idle = _IN_TURNS.format(config.staleness.max) if in_turns else ""
        further = filter(None, (no_end, idle, beside_agent(config, plan.objects)))
        self.notes = (*plan.notes, *self.data.notes, *further)
        self._scoring = FailureAlarm()
        self._alarms = self._alarms_of(no_end)
        self.observers: list[Observer] = [self._alarms]
        self.placed = plan.placed
        """Where its roles are now."""
        if config.trainer.order == "auto":
            self.observers.append(PaceObserver(run, lambda: self.placed))
        self._unscored: Sequence[Mapping[str, Any]] = ()
        """Answers without a reward that the step's line tells of."""

    def _work_ahead(self) -> InFlight:
        stale, rollout = self.config.staleness, self.config.rollout
        rules = Rules(
            stale.max,
            self.config.algorithm.prompts_per_step,
            mode=stale.mode,
            carry=rollout.carry,
            extra=rollout.extra,
            partial=rollout.groups == "partial",
            sampling=self.algorithm.sampling,
            teaches=partial(teaches, self.algorithm),
        )
        keeper = RolloutKeeper(lambda: self.run.roles["rollout"], lambda: self._session)
        return InFlight(rules, draw=self.tasks, keeper=keeper, ledger=self.ledger, end=self.config.steps)

    def _alarms_of(self, no_end: str) -> TextAlarms:
        config, objects = self.config, self.plan.objects
        mean = config.metrics.mismatch_mean
        mismatch = MismatchAlarm(MEANS[config.rollout.weights] if mean == "auto" else mean, config.metrics.mismatch_max)
        too_old = (StalenessAlarm(config.staleness.max, "staleness.max"),) if self.ahead else ()
        alarms = (mismatch, RoundingAlarm(), RouteDriftAlarm(config.metrics.route_drift), *too_old, ShapingAlarm())
        longest = config.rollout.max_new_tokens
        nothing_learned = NothingLearnedAlarm(self._compares, longest, reward_path(config, objects), no_end)
        return TextAlarms(self.run, alarms, nothing_learned, default_reward=reward_is_default(config, objects))

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        try:
            with JsonLines(self.run.directory.ledger) as self._account:
                async with opened(self.plan.objects.agent):
                    yield
        finally:
            await self._endpoint.close()

    def files(self) -> Iterable[JsonLines]:
        return (self._account,)

    async def spawn(self, placed: Placed, names: Collection[str] | None = None) -> Roles:
        report, name, self.placed = self.run.report, self.config.name, placed
        spread = spread_of(self.config, self.plan.model_config, placed, self.plan.roles)
        if spread.words is not None:
            report.line(f"{name}: {spread.words}")
        for remark in (default_correction, filled_in_limit) if names is None else ():
            if (line := remark(self.config, self.algorithm)) is not None:
                report.line(f"{name}: {line}")
        directory = str(self.run.directory.path)
        roles = roles_to_start(self.config, self.data, self.plan, rescue=directory, sharding=spread.sharding)
        started = await spawn_roles(self.run.system, placed, only(roles, names), self.run.computes)
        further = names is None and bool(self._further)
        if further and not all(await started["rollout"].takes_adapters()):
            raise InputError(
                "agent.past.size, agent.own_weights: this engine holds no adapters of this model: they need "
                "rollout.engine=transformers, a model of Llama's kind and, on a GPU, rollout.engine_args={graphs: off}"
            )
        # engines read the base from its files, and the trainer's is rounded
        other_base = self.config.model.lora.base != "full"
        if share_tensors(self.config, self.plan.placed, self.plan.flow) or further or other_base:
            await self.publish(started)
        return started

    async def warm_up(self) -> bool:
        settings, roles = self.config.sft, self.run.roles
        if not settings.steps:
            return False
        if self.plan.objects.player is None:
            batches, source = self.data.worked_batches(settings.steps, settings.batch_size), "worked problems"
        else:
            batches, source = await self._played(self.plan.objects.player)
        learned = await warm_up(Stream.of(batches), roles["rollout"], roles["trainer"], lr=settings.lr)
        self.run.report.warmed_up(learned, source)
        for name in self._further:
            await roles["trainer"].keep_past(name)
        if self._further:
            await self.publish(roles)
        # critic and reference start from the policy that came of it, unless they have models of their own
        if CRITIC in roles and self.config.critic.model is None:
            await roles[CRITIC].load(roles["trainer"].weights(exact=True))
        if REFERENCE in roles and self.config.reference.model is None:
            await roles[REFERENCE].load(roles["trainer"].weights(exact=True))
            await roles[REFERENCE][0].save(str(self.run.directory.path / REFERENCE))
        return True

    async def _played(self, player: Player) -> tuple[AsyncIterator[list[Example]], str]:
        """Batches of what a player said in episodes of the run's agent, and words on them."""
        settings = self.config.sft
        tasks = await self._as_worked_on(await self.data.warm_up.draw(settings.episodes))
        with work("playing for the warm-up"):
            groups = await self.session.demonstrations(tasks, player)
        samples = [sample for group in groups for sample in group.samples]
        earned = [sample.reward for sample in samples if sample.reward is not None]
        if settings.least_reward is not None:
            least = settings.least_reward
            samples = [sample for sample in samples if sample.reward is not None and sample.reward >= least]
        mean = f", mean reward {statistics.fmean(earned):.3f}" if earned else ""
        source = f"{len(samples)} conversations of {len(tasks)} episodes of the player{mean}"
        if not samples:
            raise InputError(f"sft.least_reward={settings.least_reward:g}: none of {source}")
        return batches_of(list(map(example_of, samples)), settings, self.config.seed), source

    async def draw(self, index: int) -> Step:
        count = self.config.algorithm.prompts_per_step
        return self._step(index, () if self.ahead else await self._drawn(count))

    def _step(self, index: int, prompts: Sequence[Prompt]) -> Step:
        return Step(
            index,
            Stream.of(prompts),
            self.config.algorithm.group_size,
            deal=None if self.ahead or self.config.trainer.order != "prompt" else prompts,
            prompts_per_step=self.config.algorithm.prompts_per_step,
            sampling=None if self.ahead else self.algorithm.sampling,
            teaches=partial(teaches, self.algorithm),
            draw=self._drawn,
            critic_only=self._critic_only(index),
            moving_reference=REFERENCE in self.run.roles and self.moving_reference,
            in_flight=self.in_flight,
            ledger=self.ledger,
        )

    async def tasks(self, count: int) -> list[Prompt]:
        """The next prompts of the data, as the run's environment makes them."""
        return await self._as_worked_on(await self.data.train.draw(count))

    async def _as_worked_on(self, prompts: list[Prompt]) -> list[Prompt]:
        if (environment := self._environment) is None:
            return prompts
        return await asyncio.to_thread(lambda: [environment.draw(prompt) for prompt in prompts])

    async def _drawn(self, count: int) -> Sequence[Prompt]:
        """The next prompts, entered in the ledger."""
        prompts = await self.tasks(count)
        self.ledger.drawn((prompt.id for prompt in prompts), self.config.algorithm.group_size)
        return prompts

    def _critic_only(self, index: int) -> bool:
        return CRITIC in self.run.roles and index < self.config.critic.head_start

    @property
    def _compares(self) -> bool | None:
        """Advantages compare answers of a group; False: of a batch; None: they are not made of rewards."""
        algorithm = self.algorithm
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
        """Facts that a session on this run's roles has to know.

        Args:
            judges: the reward function was asked for, and is no mere default.
        """
        return running_of(
            self.config,
            lambda: self.run.roles,
            self.data.tokenizer,
            self.plan.model_config,
            self.plan.objects.agent,
            compares=self.algorithm.name if self._compares else None,
            judges=judges,
            reward_chosen=not reward_is_default(self.config, self.plan.objects),
            counters=self.counters,
            step=lambda: self._step(self.run.done, ()),
            say=self.run.report.line,
            dropped=(lambda *_: None) if self.ahead else self.ledger.dropped,  # what is in flight tells it itself
            endpoint=self._endpoint,
            past=self._past,
            own=own_adapters(self.config.agent.own_weights),
            learn=(lambda _: {}) if self._environment is None else self._environment.learn,
        )

    async def evaluate(self) -> Evaluation | None:
        evaluation = None
        if self.data.held_out and self.plan.objects.agent is not None:
            evaluation = await self.session.evaluate(self.data.held_out, n=self.config.evaluation.samples)
        elif self.data.held_out:
            evaluation = await evaluate_on(self.data, self.run.roles, self.config, self.plan.objects.reward)
        if self.data.named:
            named = await evaluate_named(self.data, self.run.roles, self.config, self.plan.model_config)
            evaluation = with_benchmarks(evaluation, named)
        if evaluation is not None:
            await self._hear_judges("evaluation")
        return evaluation

    def describe(self, evaluation: Evaluation) -> Described:
        first = [in_words(evaluation, self.config.evaluation.temperature)] if evaluation.groups else []
        sentence = "; ".join([*first, *named_in_words(evaluation)])
        return Described(numbers_of(evaluation), sentence, rows(evaluation, self.data.tokenizer))

    def conclude(self, before: Evaluation | None, after: Evaluation | None) -> Iterator[str]:
        if before and after:
            if after.groups:
                yield from compare(before, after, self.config.evaluation.temperature)
            yield from compared_named(before, after)
        if self._scoring.total.failed:
            yield failures_text(self._scoring.total)
        yield from left_out(self.data.train).values()

    async def finish(self, returned: Mapping[str, float]) -> Mapping[str, float]:
        step = self.run.done + 1
        learned = self.run.roles["trainer"].learned()  # asked now, and awaited once the judges have answered
        scored = await self._hear_judges(f"step {step}")
        judged = {"reward/failed": scored.failed} if scored.answers else {}
        if self.config.reward.join is not None:
            judged |= {"reward/joined_count": scored.joined, "reward/joined_answers": scored.away}
        row_counts = self.left_out(self.data.train)
        self._account_for(step, await learned)
        self._alarms.judged = scored.answers
        return {**returned, **judged, **row_counts, **await self._renew_past(step)}

    async def _renew_past(self, step: int) -> dict[str, float]:
        """Let the policy take the place of an earlier version of itself, if it is time to; metrics of the step."""
        past, roles = self._past, self.run.roles
        if (place := past.renewed(step)) is not None:
            await roles["trainer"].keep_past(f"{PAST}{place}")
            if not self.ahead:  # there the next publication brings it
                await self.publish(roles)
        return {f"{PAST}{place}/step": float(past.learned(place, step)) for place in range(past.config.size)}

    def _account_for(self, step: int, learned: Learned) -> None:
        """Write the step's line of the ledger."""
        self.in_flight.learned()
        ledger, pending = self.ledger, held_of(self.in_flight.entries)
        ledger.learned(learned)
        if self._critic_only(step - 1):
            for prompt_id in ledger.open.keys() - pending.keys():
                ledger.dropped(prompt_id, CRITIC_ONLY)
        self._account.add([ledger.close(step, pending)])

    async def writer(self) -> Callable[[Path], Awaitable[Any]]:
        await asyncio.to_thread(self._account.sync)  # before the checkpoint that goes on from there
        return await super().writer()

    async def _hear_judges(self, where: str) -> ScoreCounts:
        """Counts of the answers that were judged since this was last asked; an alarm if they are news."""
        scored = ScoreCounts.total(await self.run.roles["judge"].scored())
        news = self._scoring.check(where, scored)
        if news is not None:
            self.run.alarm(news, self.run.done + where.startswith("step"))  # of the step that is not counted yet
        self._unscored = scored.rows if news is not None else ()
        return scored

    async def samples(self) -> Sequence[Mapping[str, Any]]:
        wanted = self.config.metrics
        learned: Sequence[Mapping[str, Any]] = await self.run.roles["trainer"].samples(
            wanted.samples, wanted.token_rows
        )
        row_keys = {(row["prompt_id"], row["index"]) for row in learned}
        return [*learned, *(row for row in self._unscored if (row["prompt_id"], row["index"]) not in row_keys)]

    async def failed(self) -> Sequence[Mapping[str, Any]]:
        return ScoreCounts.total(await self.run.roles["judge"].scored()).rows

    def state(self) -> dict[str, Any]:
        before, after = answers_of(self.run.before), answers_of(self.run.after)
        return {**self.position(), **self._program_state(), "before": before, "after": after}

    def _program_state(self) -> dict[str, Any]:
        if self.program is None:
            return {}
        try:
            json.dumps(self.program)
        except (TypeError, ValueError) as error:
            raise UserError(f"session.state cannot be kept by a checkpoint: {error}; put JSON values into it") from None
        return {"state": self.program}

    def position(self) -> dict[str, Any]:
        position = {"problems": self.data.state_dict(), "session": self.counters, "ledger": self.ledger.state_dict()}
        return position if self._environment is None else {**position, "environment": self._environment.state_dict()}

    @property
    def restartable(self) -> bool:
        return not any("save" in self.run.roles[name].endpoints for name in self.own_roles)

    async def restore(self, checkpoint: Checkpoint) -> None:
        queue: Any = checkpoint.queue
        self.data.load_state_dict(queue["problems"])
        self.run.before, self.run.after = evaluation_of(queue["before"]), evaluation_of(queue["after"])
        self.counters |= queue.get("session", {})
        self.ledger.load_state_dict(queue.get("ledger", {}))
        if self._environment is not None:
            self._environment.load_state_dict(queue.get("environment", {}))
        if self.program is not None:
            self.program.update(queue.get("state", {}))


# Rewards and ends of answers ------------------------------------------------------------------------------------------


def beside_agent(config: RunConfig, objects: InMemory) -> str:
    """A line on who rewards what an agent did, where a reward function was chosen beside it; else ""."""
    own_reward = objects.reward is not None or config.reward.parts or config.reward.function != RewardConfig().function
    if objects.agent is None or not own_reward:
        return ""
    return (
        "The agent's return value is its reward; the reward function is asked only where it returns None and did not "
        "call llm.reward"
    )


def takes_turns(config: RunConfig, objects: InMemory) -> bool:
    """True where one process has nothing to do beside learning: its own engine, and no agents who wait for others."""
    own = config.rollout.own_engine and config.rollout.engine == "transformers"
    return config.staleness.max > 0 and own and objects.agent is None


def reward_path(config: RunConfig, objects: InMemory) -> str | None:
    """The dotted path of the one function that scores; None where it was passed, where there are several, or where an
    agent returns rewards of its own."""
    others = objects.reward is not None or objects.agent is not None or bool(config.reward.parts)
    return None if others else config.reward.function


async def batches_of(examples: Sequence[Example], settings: SftConfig, seed: int) -> AsyncIterator[list[Example]]:
    """The batches of a warm-up from examples that come round again, in another order each time.

    Args:
        examples: at least one.
        settings: how many batches, and of what size.
        seed: of the orders.
    """
    rounds = (permutation(len(examples), seed, turn) for turn in itertools.count())
    order = itertools.chain.from_iterable(rounds)
    for _ in range(settings.steps):
        yield [examples[place] for place in itertools.islice(order, settings.batch_size)]


# Roles ----------------------------------------------------------------------------------------------------------------

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
        "rollout": (Rollout, {**shared, "settings": rollout_settings(config, bool(prepared)), "directory": rescue}),
        "judge": (Judge, {**_judge(config, data, passed, bool(prepared)), "directory": rescue}),
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
            lends=share_tensors(config, prepared.placed, prepared.flow),
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
            roles[name] = _reference(config, name, prepared.algorithm, shared)
    # The rollout of a run that works ahead always has answers under way: it gives its devices away when there is enough
    # for its share of a step
    hosts = len(prepared.placed.seats["rollout"].hosts)
    grain = {"rollout": -(-config.algorithm.prompts_per_step // hosts)} if ahead else {}
    ours = {
        name: Role(actor, settings, prepared.held.get(name, (0, 0)), lease_items=grain.get(name))
        for name, (actor, settings) in roles.items()
    }
    return {**ours, **own_roles(config)}


def _judge(config: RunConfig, data: Data, passed: RewardSource | None, joined: bool) -> Settings:
    """How the judge of a run scores; others may join, but not in an evaluation: see `rollout_settings`."""
    benchmarks = benchmarks_of(config.evaluation.named)
    return {
        "settings": config.reward if joined else replace(config.reward, join=None),
        "reward": passed,
        "columns": data.columns or None,
        "named": {name: (each.reward, dict(each.args)) for name, each in benchmarks.items()},
    }


def _learning_steps(config: RunConfig, algorithm: AlgorithmSpec) -> int:
    """Steps in which the policy learns: all but those that the critic has for itself."""
    return config.steps - (0 if algorithm.critic is None else config.critic.head_start)


def rollout_settings(config: RunConfig, joined: bool = True) -> RolloutSettings:
    """How the rollout of a run samples answers.

    Args:
        config: of the run.
        joined: others may join; not in an evaluation, which may be made beside the run that has the address.
    """
    replays = config.trainer.backend != "megatron"  # which routes freely: nobody would read what the engine tells
    routes = config.trainer.router_replay if replays else False
    alone = {} if joined else {"join": None, "own_engine": True}
    return combine(
        RolloutSettings, config.rollout, kv=config.staleness.kv, routes=routes, delta=config.weights.delta, **alone
    )


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
        config.weights,
        saved_dtype=config.checkpoint.dtype,
        shown_samples=config.metrics.samples,
        total_steps=max(1, _learning_steps(config, algorithm) * passes.epochs * passes.minibatches),
        reference=config.reference.inside if algorithm.needs_reference else None,
        teacher=config.teacher.adapter if algorithm.needs_teacher else None,
        teacher_models=teacher_models(config, algorithm),
        past=config.agent.past.size,
        own_weights=tuple(config.agent.own_weights),
        # a moving mean that bfloat16 rounds at every step would not move
        publishes="float32" if config.reference.kind == "ema" else config.rollout.dtype,
        **more,
    )


def _critic_settings(config: RunConfig, sharding: Sharding) -> CriticSettings:
    constant = {"schedule": "constant", "min_lr_ratio": 0.0}
    sections = (config.algorithm, config.optimizer, config.trainer, config.critic)
    return combine(CriticSettings, *sections, saved_dtype=config.checkpoint.dtype, sharding=sharding, **constant)


def _reward_model(config: RunConfig, passed: RewardSource | None) -> Settings:
    order = {} if reward_model_class(config.reward_model) is GenerativeJudge else {"order": config.trainer.order}
    return {"settings": config.reward_model, **order, "alone": scores_alone(config, passed)}


def teacher_models(config: RunConfig, algorithm: AlgorithmSpec) -> tuple[str, ...]:
    """Saved models of teachers whose hidden states are learned from, in their order; none otherwise."""
    teachers: list[TeacherConfig | NamedTeacher] = [*config.named_teachers.values()] or [config.teacher]
    return tuple(str(each.model) for each in teachers) if distribution_of(algorithm) == HIDDEN else ()


def _reference(config: RunConfig, role: str, algorithm: AlgorithmSpec, shared: Settings) -> tuple[type[Any], Settings]:
    """The reference policy, or the teacher: log-probs by a model that does not learn, or that somebody else serves."""
    settings = config.frozen[role]
    moving = role == "reference" and config.reference.kind == "ema"
    changed: dict[str, Any] = {} if settings.model is None else {"model": settings.model}
    column = "ref_logprobs" if role == REFERENCE else "teacher_logprobs"
    if isinstance(settings, NamedTeacher):
        share = settings.weight / sum(each.weight for each in config.named_teachers.values())
        name = role.removeprefix("teacher_")
        width = max((saved_shape(model, None).hidden for model in teacher_models(config, algorithm)), default=0)
        changed["blend"] = Blend(name, tuple(config.teachers), share, config.teacher.route, width)
        column = f"{column}/{name}"
    more: dict[str, Any] = {"column": column, "decay": config.reference.decay if moving else None}
    if not isinstance(settings, ReferenceConfig):
        part = algorithm.loss if isinstance(algorithm.loss, Divergence) else None
        more["tokenizer"] = settings.tokenizer
        more["distribution"] = "none" if part is None else "hidden" if part.top_k is None else "top"
        more["top_k"] = 64 if part is None or part.top_k is None else part.top_k
    how = combine(ReferenceSettings, config.trainer, dtype=settings.dtype, **more)
    if not isinstance(settings, ReferenceConfig) and settings.server.url is not None:
        arguments = {"server": settings.server, "settings": how, "tokenizer": shared["tokenizer"]}
        return RemoteTeacher, {**arguments, **{name: changed[name] for name in changed if name == "blend"}}
    return Reference, {**shared, "settings": how, **changed}
