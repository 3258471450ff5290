"""A run's model as its own flow calls it, and as a program does: conversations, episodes and training.

In: tasks, and functions that play one. Out: answers, groups of judged answers, metrics; for checkpoints, the tasks that
are open. Who wakes whom: the rollout's answers wake conversations and episodes; ends of episodes wake training. A flow
takes it as `session`; `rlinf.Session` is one that opens a run and closes it.

    async def game(step, session):
        groups = session.gather(step.prompts, episode, n=step.group_size)
        return await session.train(groups)
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import itertools
import math
from collections.abc import (
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Mapping,
    Sequence,
    Sized,
)
from contextlib import aclosing
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from rlinf.agents.agent import Agent, AgentLLM, Attempt, LastingAgent, is_agent, samples_of, worked_on
from rlinf.agents.arguments import Awaited, WrongType, WrongValue, at_least_one, coroutine_function, plainly, shown
from rlinf.agents.chat import ChatFormat, are_messages, prompt_of
from rlinf.agents.conversation import Conversation
from rlinf.agents.endpoint.endpoint import Endpoint, Served, serving_config
from rlinf.agents.episodes import Episodes, LoopWatch, OpenTask, Play
from rlinf.agents.llm import PastSelves, Reply, RolloutModel, Setting
from rlinf.agents.outcome import Episode, Gathered, KnownFailures, Tally, here
from rlinf.agents.player import Player, Seat
from rlinf.agents.tools.formats import call_format
from rlinf.algos.token_losses import MARKS, TokenLoss
from rlinf.config.learning import PAST
from rlinf.config.text import EndpointConfig
from rlinf.data.in_flight import Completed
from rlinf.data.ledger import FAILED
from rlinf.data.rng import mix
from rlinf.data.sample import Datum, Evaluation, Group, Prompt, Sample
from rlinf.data.step import Step
from rlinf.flows.evaluate import evaluate, measure
from rlinf.flows.grpo import grpo
from rlinf.flows.ppo import ppo
from rlinf.flows.text import publish_weights, with_one_teacher
from rlinf.runtime.base.errors import UserError
from rlinf.runtime.base.progress import work
from rlinf.runtime.streams.stream import Stream, each

TASKS, ANSWERS, TRIALS, SHOWN = 1, 2, 3, 4
"""Kinds of what is drawn: episodes to learn from, answers outside of them, episodes of evaluations, and those that a
player plays. Part of their seeds, so that none draws what another has drawn."""


@dataclass(frozen=True, slots=True)
class Running:
    """Facts that a session has to know of its run."""

    roles: Callable[[], Mapping[str, Any]]
    """The roles as they are now."""
    tokenizer: PreTrainedTokenizerBase
    """The model's."""
    seed: int
    """Seed of all that is drawn."""
    group_size: int
    """Episodes per task, answers per prompt."""
    temperature: float
    """Answers' default."""
    max_new_tokens: int
    """Answers' longest."""
    longest: int | None
    """Tokens of a whole conversation; None: nobody knows."""
    vocabulary: int | None
    """Token ids are below it."""
    at_once: int
    """Episodes that are played at the same time."""
    compares: str | None
    """Name of the algorithm, if it compares the samples of a group with each other."""
    judges: bool
    """The judge has a reward function that was asked for."""
    counters: dict[str, int]
    """How many tasks and single answers were asked for: what seeds depend on, kept by checkpoints."""
    reward_chosen: bool = True
    """Somebody chose that function: no other says how good an episode was."""
    chat_args: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the chat template."""
    evaluation: Mapping[str, Any] = field(default_factory=dict)
    """`temperature`, `max_new_tokens` and `top_p` of evaluations."""
    step: Callable[[], Step] = lambda: Step(0, (), 1)
    """The step that a call of `train` takes next, without its batch."""
    say: Callable[[str], None] = print
    """Prints a line for people."""
    dropped: Callable[[int, str, Sequence[int]], None] = lambda task, reason, attempts: None
    """Told of attempts that nothing will be learned from, by the number of their task."""
    agent: Agent | None = None
    """Works on a task, where the run names one."""
    timeout: float | None = None
    """Seconds of an episode, where a call does not say."""
    call_format: str | None = None
    """How the model writes calls of tools; None: as its chat template says."""
    past: PastSelves | None = None
    """Earlier versions of the policy that its engine holds; None: there are none."""
    own: Mapping[str, str] = field(default_factory=dict)
    """Names of the adapters of agents that have weights of their own."""
    endpoint: Endpoint | None = None
    """Where agents in other frameworks find the model."""
    learn: Callable[[Sequence[tuple[Prompt, float]]], Mapping[str, float]] = lambda outcomes: {}
    """Tells the run's environment what came of a step's tasks; returns its metrics."""
    no_forms: str | None = None
    """Why its engine keeps no answer to a schema; None: it does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Playing:
    """Settings of the episodes of one call."""

    n: int
    """Episodes per task."""
    kind: int = TASKS
    """Drawn from seeds of their own."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """For every answer in them."""
    timeout: float | None = None
    """Seconds of one; None: the run's."""
    at_once: int | None = None
    """So many are played at the same time; None: the run's."""
    tallies: Sequence[Tally] = ()
    """Count what becomes of them."""
    player: Player | None = None
    """Answers in the model's place."""


class RunSession:
    """Conversations, episodes and training on roles that run.

    Args:
        running: the run.
    """

    def __init__(self, running: Running) -> None:
        self._attach(running)

    def _attach(self, running: Running) -> None:
        self._running = running
        self._chat = ChatFormat(running.tokenizer, running.chat_args, running.say)
        self._model = RolloutModel(lambda: running.roles()["rollout"])
        self._setting = Setting(
            self._model,
            running.temperature,
            running.max_new_tokens,
            running.longest,
            running.vocabulary,
            running.no_forms,
        )
        self._calls = call_format(running.call_format, running.tokenizer)
        self._numbers = itertools.count()
        self._playing: list[Episodes] = []  # of `gather_tasks`
        endpoint = running.endpoint
        self._watch = LoopWatch(running.say, lambda: None if endpoint is None else endpoint.address)
        # what became of episodes, until a step has told of them:
        self._tally = Tally()  # those of `gather`
        self._unreported: list[Tally] = []  # those of each `gather_groups`
        self._settled_tasks = Tally()  # those of `gather_tasks` whose tasks are over
        self._known_failures = KnownFailures()

    # The run and its roles --------------------------------------------------------------------------------------------

    def _open(self, call: str) -> Running:
        """The run, if there is one now.

        Raises:
            UserError: the session is not open.
        """
        return self._running

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's, with its chat template: `session.tokenizer.apply_chat_template(…)`."""
        return self._open("tokenizer").tokenizer

    @property
    def limits(self) -> tuple[int | None, int | None]:
        """Token ids are below the first; a text may have as many tokens as the second. None: nobody knows."""
        running = self._open("limits")
        return running.vocabulary, running.longest

    @property
    def rollout(self) -> Any:
        """The role that generates, for calls that the session does not have."""
        return self._open("rollout").roles()["rollout"]

    @property
    def trainer(self) -> Any:
        """The role that owns the weights."""
        return self._open("trainer").roles()["trainer"]

    @property
    def judge(self) -> Any:
        """The role that scores."""
        return self._open("judge").roles()["judge"]

    # Answers ----------------------------------------------------------------------------------------------------

    def llm(self, **sampling: Any) -> AgentLLM:
        """The model as agents call it, its calls recorded: `await session.llm().chat(messages)`.

        Args:
            sampling: for every call, such as temperature=0.7.
        """
        running, episode = self._open("llm"), here.get()
        setting = self._setting if episode is None else episode.recorded(self._setting)
        if episode is None:
            key: tuple[int, ...] = (running.seed, ANSWERS, self._counted("answers"))
            task, index = None, 0
        else:
            key, index = (*episode.seed, episode.index), episode.index
            task = episode.prompt or Prompt(episode.task, self._chat.ids(""))
            sampling = {**episode.sampling, **sampling}
        opening = None if running.endpoint is None else running.endpoint.session
        place = None if episode is None or running.past is None else running.past.drawn(*episode.seed)
        past = None if place is None else f"{PAST}{place}"
        attempt = Attempt(setting, self._calls, lambda: next(self._numbers), task, index, past, running.own, opening)
        if episode is not None and episode.player is not None:
            attempt.seat = Seat(episode.player, running.tokenizer)
        return AgentLLM(attempt, self._chat, key, sampling)

    def serve(self, *, idle: float = 3600.0, **settings: Any) -> Served:
        """Serve the model to any client: `async with session.serve(port=8000) as served:`, see `Served`.

        Args:
            idle: seconds after which a conversation that nobody goes on with or judges is forgotten.
            settings: over those of `agent.endpoint`: host, port, token and the limits.

        Raises:
            UserError: there is no such setting; when it is entered: the address cannot be had.
        """
        running = self._open("serve")
        config = EndpointConfig() if running.endpoint is None else running.endpoint.config
        return Served(serving_config(config, settings), self.llm, idle=idle)

    def conversation(
        self,
        system: str | None = None,
        *,
        prompt: Any = None,
        tools: Sequence[Any] | None = None,
        seed: int | None = None,
        **sampling: Any,
    ) -> Conversation:
        """Begin a conversation: `async with session.conversation(system="…") as c:`.

        Args:
            system: what the system says first.
            prompt: what was said before: a text or token ids, as they are, messages, or a `Prompt`.
            tools: for the chat template.
            seed: of its randomness. None: within an episode, of (the session's seed, task, episode); elsewhere another
                one each time, the same for the same session seed and order of calls.
            sampling: for every `generate` in it, such as temperature=0.7.

        Raises:
            UserError, TypeError, ValueError: something that cannot be said.
        """
        return self._begin("conversation", system, prompt, tools, seed, next(self._numbers), sampling)

    def _begin(
        self,
        call: str,
        system: str | None,
        prompt: Any,
        tools: Sequence[Any] | None,
        seed: int | None,
        number: int | None,
        sampling: Mapping[str, Any],
    ) -> Conversation:
        """A conversation for a call of that name; arguments as of `conversation`, and its number among those of several
        turns."""
        running, episode = self._open(call), here.get()
        setting = self._setting if episode is None else episode.recorded(self._setting)
        if episode is not None:
            key = (*episode.seed, episode.index, len(episode.conversations))
            sampling = {**episode.sampling, **sampling}
        else:
            key = (running.seed, ANSWERS, self._counted("answers"))
        if seed is not None:
            if isinstance(seed, bool) or not isinstance(seed, int):
                raise WrongType(f"session.{call}: seed={shown(seed)} must be a whole number")
            key = (seed,)
        chat = self._chat if tools is None else self._chat.with_arguments(tools=tools)
        task = None if episode is None else episode.prompt or Prompt(episode.task, self._chat.ids(""))
        conversation = Conversation(
            setting,
            chat,
            key,
            number,
            sampling,
            task,
            0 if episode is None else episode.index,
            lambda: next(self._numbers),
        )
        if system is not None:
            conversation.system(system)
        if are_messages(prompt, f"session.{call}"):
            conversation.begin(prompt)
        elif prompt is not None:
            prompt_made = prompt_of(prompt, 0, chat, self._setting.vocabulary, f"session.{call}")
            if task is None and isinstance(prompt, Prompt):
                conversation.prompt = prompt_made
            conversation.append(prompt_made.token_ids)
        if episode is not None:
            episode.conversations.append(conversation)
        return conversation

    def complete(
        self, prompt: Any, *, max_new_tokens: int | None = None, seed: int | None = None, **sampling: Any
    ) -> Awaited[Reply]:
        """One answer; await it. Many may be asked for at the same time.

        Args:
            prompt: a text, which stands as it is; messages, which get the chat template; token ids; or a `Prompt`.
            max_new_tokens: default: the run's.
            seed: the same seed gives the same answer; None: see `conversation`.
            sampling: temperature, top_p, top_k, min_p, min_new_tokens, stop; default: the run's.

        Raises:
            TypeError, ValueError, UserError: something that cannot be answered; by what and why.
        """
        settings = sampling if max_new_tokens is None else {"max_new_tokens": max_new_tokens, **sampling}

        async def answer() -> Reply:
            async with self._begin("complete", None, prompt, None, seed, None, {}) as conversation:
                return await conversation.generate(**settings)

        return Awaited(answer(), "session.complete(…)")

    def generate(
        self, prompts: Iterable[Any] | AsyncIterable[Any], n: int | None = None, **sampling: Any
    ) -> Stream[Group]:
        """Answer every prompt `n` times, and score the answers if the session has a reward function.

        Args:
            prompts: a list or a stream; each as in `complete`, or a mapping with `prompt`, `answer` and other columns.
            n: answers per prompt; default: the run's group size.
            sampling: temperature, max_new_tokens and the like; default: the run's.

        Returns:
            Groups as they are complete: `async for group in session.generate(…)`.

        Raises:
            TypeError, ValueError, UserError: at once for a list, otherwise when the prompt comes.
        """
        running = self._open("generate")
        count = at_least_one(running.group_size if n is None else n, "n", "session.generate")
        if isinstance(prompts, (str, Mapping, Prompt)) or not isinstance(prompts, (Iterable, AsyncIterable)):
            raise WrongType(f"session.generate: {shown(prompts)} is one prompt or none; give a list of them")
        made_prompts: Any
        if isinstance(prompts, (list, tuple)):
            made_prompts = [self._prompt(each_prompt) for each_prompt in prompts]
        else:
            made_prompts = self._prompts(prompts)
        answers = running.roles()["rollout"].generate(
            Stream.of(made_prompts, name="prompts"), n=count, listed=False, **sampling
        )
        scored: Stream[Group] = running.roles()["judge"].score.map(answers) if running.judges else answers
        return scored

    async def _prompts(self, prompts: Any) -> AsyncIterator[Prompt]:
        async for prompt in each(prompts):
            yield self._prompt(prompt)

    def _prompt(self, prompt: Any) -> Prompt:
        if isinstance(prompt, Prompt):
            return prompt_of(prompt, prompt.id, self._chat, self._setting.vocabulary, "session.generate")
        return prompt_of(prompt, self._counted("tasks"), self._chat, self._setting.vocabulary, "session.generate")

    def _counted(self, what: str) -> int:
        """How many of these there were before this one."""
        counters = self._running.counters
        counters[what] = counters.get(what, 0) + 1
        return counters[what] - 1

    # Episodes -----------------------------------------------------------------------------------------------------

    def gather(
        self,
        tasks: Iterable[Any] | AsyncIterable[Any],
        episode: Play | Agent | None = None,
        n: int | None = None,
        *,
        timeout: float | None = None,
        at_once: int | None = None,
    ) -> Stream[Group]:
        """Play every task `n` times: a group per task, as soon as its last episode is over.

        An episode that raises, takes too long or returns no sample counts as not drawn, never as 0, and is told.

        Args:
            tasks: a list or a stream of anything; prompts keep their ids, answers and columns.
            episode: `async def agent(task, llm)`, see `agents.agent`; or `async def episode(task)` that returns
                `c.trajectory(reward=…)`, a list of those (which then weigh as one), or a number: the reward of the one
                conversation in it. None: the run's own, `agent.function`.
            n: episodes per task; default: the run's group size.
            timeout: seconds of one episode; default: the run's.
            at_once: how many episodes are played at the same time; default: as many answers as the engine decodes.

        Raises:
            TypeError, ValueError: wrong arguments; at once.
            UserError: not one episode went well; when groups are taken.
        """
        with plainly():
            return self._gathered(tasks, episode, n, timeout, at_once, self._tally)

    def _gathered(
        self,
        tasks: Any,
        episode: Play | Agent | None,
        n: int | None,
        timeout: float | None,
        at_once: int | None,
        tally: Tally,
    ) -> Stream[Group]:
        count = self._episodes_per_task("gather", n)
        how = _Playing(n=count, timeout=timeout, at_once=at_once, tallies=(tally,))
        played = self._played("gather", tasks, episode, how)
        return Stream.of(played.groups(tasks), name="episodes")

    def _episodes_per_task(self, call: str, n: int | None) -> int:
        running = self._open(call)
        count = at_least_one(running.group_size if n is None else n, "n", f"session.{call}")
        if count < 2 and running.compares is not None:
            raise WrongValue(
                f"session.{call}: n={count}, and {running.compares} compares the episodes of one task with each other: "
                "it needs at least 2"
            )
        return count

    def gather_tasks(
        self,
        tasks: Iterable[Any] | AsyncIterable[Any],
        episode: Play | Agent | None = None,
        n: int | None = None,
        *,
        timeout: float | None = None,
        at_once: int | None = None,
        give_up: int | None = None,
    ) -> Stream[Completed]:
        """Play tasks as `gather` does, one by one: what became of each, also where every episode of it failed.

        It is for a stream of tasks that stays open while the run learns. A step tells of the episodes whose tasks are
        over by its end. A task counts as open, see `in_flight`, until it is `settled`.

        Args:
            tasks: a list or a stream of them; an `OpenTask` among them goes on.
            episode, n, timeout, at_once: as of `gather`.
            give_up: after so many tasks in a row of which every episode failed, the first one's exception is raised.
                None: never.

        Raises:
            TypeError, ValueError: wrong arguments; at once.
            UserError: `give_up`; when tasks are taken.
        """
        with plainly():
            count = self._episodes_per_task("gather_tasks", n)
            how = _Playing(n=count, timeout=timeout, at_once=at_once)
            played = self._played("gather_tasks", tasks, episode, how)
        return Stream.of(self._made(played, tasks, give_up), name="episodes")

    async def demonstrations(self, tasks: Sequence[Prompt], player: Player) -> list[Group]:
        """Have the run's agent work on tasks, once each, with a player that answers in the model's place.

        Args:
            tasks: at least one.
            player: see `agents.player`.

        Returns:
            What was said, as if the model had said it: groups of one episode each, in the order of the tasks.

        Raises:
            UserError: not one episode went well; the first one's exception is its cause.
        """
        tally = Tally()
        how = _Playing(n=1, kind=SHOWN, tallies=(tally,), player=player)
        groups = [group async for group in self._played("demonstrations", tasks, None, how).groups(tasks)]
        for warning in tally.warnings(KnownFailures()):
            self._running.say(f"warning: {warning}")
        return sorted(groups, key=lambda group: group.prompt.id)

    async def _made(self, played: Episodes, tasks: Any, give_up: int | None) -> AsyncIterator[Completed]:
        self._playing.append(played)
        failing = Tally()  # in a row
        lost = 0
        try:
            async with aclosing(played.outcomes(tasks)) as outcomes:
                async for outcome in outcomes:
                    failing.add(outcome.tally)
                    lost += 1
                    if outcome.groups:
                        failing, lost = Tally(), 0
                    elif lost == give_up:
                        raise failing.nothing_to_learn()
                    outcome.tally.failed.clear()  # who takes `Completed` tells of those of which nothing came
                    self._settled_tasks.add(outcome.tally)
                    yield Completed(outcome.task, outcome.groups, "failed")
        finally:
            self._playing.remove(played)

    async def in_flight(self) -> list[OpenTask]:
        """The tasks of `gather_tasks` that are open, with all that was said in their episodes so far: what a checkpoint
        keeps. They go on here; `gather_tasks` of another process goes on from there."""
        if not self._playing:
            return []
        partial = await self._model.answering()
        return [task for episodes in self._playing for task in episodes.open(partial)]

    def settled(self, ids: Collection[int]) -> None:
        """Close these tasks of `gather_tasks`: what became of them was kept.

        Args:
            ids: of prompts.
        """
        for episodes in self._playing:
            episodes.settled(ids)

    async def drop(self, ids: Collection[int]) -> int:
        """Give up tasks of `gather_tasks`, by ids of prompts; nothing more comes of them.

        Returns:
            How many generated tokens were thrown away.
        """
        tokens = sum(task.tokens for task in await self.in_flight() if task.prompt.id in ids)
        for episodes in list(self._playing):
            await episodes.drop(ids)
        return tokens

    def gather_groups(
        self,
        tasks: Any,
        episode: Play | Agent | None = None,
        n: int | None = None,
        *,
        timeout: float | None = None,
        at_once: int | None = None,
    ) -> Awaited[list[Group]]:
        """Gather all groups in a list; await it. A step that learns from this list tells of its episodes alone;
        one that learns from anything else tells of all that no step has told of."""
        tally = Tally()
        with plainly():
            groups = self._gathered(tasks, episode, n, timeout, at_once, tally)

        async def collected() -> list[Group]:
            try:
                return Gathered(await groups.collect(), tally)
            finally:
                self._unreported.append(tally)

        return Awaited(collected(), "session.gather_groups(…)")

    def _played(self, call: str, tasks: Any, episode: Play | Agent | None, how: _Playing) -> Episodes:
        """Episodes of a call of that name, once its arguments are checked."""
        running = self._open(call)
        play = running.agent if episode is None else episode
        if play is None:
            raise UserError(f"session.{call}: nothing says what is played; give it an episode, or set agent.function")
        coroutine_function(play, f"session.{call}")
        if isinstance(tasks, (str, Mapping)) or not isinstance(tasks, (Iterable, AsyncIterable)):
            raise WrongType(f"session.{call}: {shown(tasks)} is one task or none; give a list of them")
        if isinstance(tasks, (list, tuple)) and not tasks:
            raise WrongValue(f"session.{call}: the list of tasks is empty; give at least one")
        if how.timeout is not None and not (isinstance(how.timeout, (int, float)) and how.timeout > 0):
            raise WrongValue(f"session.{call}: timeout={how.timeout!r} must be seconds, more than 0")
        places = itertools.count()

        def begin(task: Any, index: int) -> Episode:
            place = next(places)
            if isinstance(task, Prompt):
                number = task.id
            elif how.kind == TASKS:
                number = self._counted("tasks")
            else:
                number = place
            prompt = task if isinstance(task, Prompt) else None
            seed = (running.seed, how.kind, number)
            return Episode(number, index, seed, prompt, how.sampling, player=how.player)

        async def judge(group: Group) -> Group:
            ranks = running.roles()["judge"]
            judged: Group = await ranks[group.prompt.id % len(ranks)].score(group)
            return judged

        at_once = running.at_once if how.at_once is None else how.at_once
        return Episodes(
            self._by_agent(play) if is_agent(play) else play,
            how.n,
            begin,
            how.tallies,
            timeout=running.timeout if how.timeout is None else how.timeout,
            at_once=at_least_one(at_once, "at_once", f"session.{call}"),
            judge=judge if running.judges and running.reward_chosen else None,
            watch=self._watch,
        )

    def _by_agent(self, agent: Agent) -> Play:
        """An episode in which an agent works on the task."""

        own = agent.source if isinstance(agent, LastingAgent) else agent

        @functools.wraps(own, updated=())  # errors name the agent's own line
        async def play(task: Any) -> list[Sample]:
            if (endpoint := self._running.endpoint) is not None:
                await endpoint.prepare()  # the agent may ask for `llm.base_url`
            llm = self.llm()
            if (episode := here.get()) is not None:
                episode.llm = llm
            return samples_of(await worked_on(agent, task, llm), llm)

        return play

    # Learning -----------------------------------------------------------------------------------------------------

    async def _learn(self, groups: Any, publish: bool) -> dict[str, float]:
        """One step of the run's algorithm on these groups, by its flow."""
        running, tally = self._open("train"), self._take_tally(groups)
        roles = with_one_teacher(running.roles())
        flow = ppo if "critic" in roles else grpo
        step = replace(running.step(), batch=Stream.of(self._checked(groups), name="groups"), publishes=publish)
        takes = inspect.signature(flow).parameters
        metrics = await flow(step, **{name: role for name, role in roles.items() if name in takes})
        return {**metrics, **self._report(tally)}

    def _take_tally(self, groups: Any) -> Tally:
        """Take the tally of the episodes of a batch; of all that were not reported, if it has none. A stream's are
        still played."""
        if isinstance(groups, Gathered):
            self._unreported = [tally for tally in self._unreported if tally is not groups.tally]
            return groups.tally
        tally, self._tally = self._tally, Tally()
        for each_tally in self._unreported:
            tally.add(each_tally)
        self._unreported = []
        return tally

    def _report(self, tally: Tally) -> dict[str, float]:
        """Metrics of episodes; failures are said aloud where they are news."""
        settled, self._settled_tasks = self._settled_tasks, Tally()
        tally.add(settled)
        for warning in tally.warnings(self._known_failures):
            self._running.say(f"warning: {warning}")
        for task, attempt in tally.failed:
            self._running.dropped(task, FAILED, (attempt,))
        for note in tally.notes():
            self._running.say(note)
        outcomes = sorted(tally.rewarded, key=lambda outcome: outcome[0].id)
        return {**tally.metrics(), **self._running.learn(outcomes)}

    async def _checked(self, groups: Any) -> AsyncIterator[Group]:
        """Groups of a batch, judged and in reach of the algorithm.

        Raises:
            TypeError, UserError: it is no batch, or there is nothing in it to learn from.
        """
        if isinstance(groups, Awaitable) and not isinstance(groups, AsyncIterable):
            groups = await groups
        count = 0
        async for group in each(groups):
            _check(group)
            count += 1
            yield group
        if not count:
            raise UserError("session.train: there is no group to learn from; give at least one")

    def train(
        self, groups: Any, *, publish: bool = True, metrics: Mapping[str, float] | None = None
    ) -> Awaited[Mapping[str, float]]:
        """Learn from groups, one step; await it.

        Args:
            groups: a list, or the stream of `gather` or `generate`: then learning begins while others are played.
            publish: let the rollout have the new weights, so that the next answers come from them.
            metrics: numbers of the program's own, that are recorded with the step's.

        Returns:
            The step's metrics.

        Raises:
            TypeError, UserError: no groups, or samples without a reward.
            RunFailure: the loss is no number.
        """
        if isinstance(groups, (Group, str, Mapping)) or groups is None:
            raise WrongType(
                f"session.train: {shown(type(groups).__name__)} is no list of groups; give a list or a stream"
            )
        self._open("train")
        if isinstance(groups, (list, tuple)):
            if not groups:
                raise UserError("session.train: the list of groups is empty; give at least one")
            for group in groups:
                _check(group)
        return Awaited(self._train(groups, publish, metrics or {}), "session.train(…)")

    async def _train(self, groups: Any, publish: bool, extra: Mapping[str, float]) -> Mapping[str, float]:
        """Take the step of a call of `train`; the program's own metrics are `extra`."""
        return {**await self._learn(groups, publish), **extra}

    async def forward_backward(
        self, data: Sequence[Datum | Sample], loss: str = "cross_entropy", **settings: float
    ) -> TokenLosses:
        """Add the gradient of a sum over tokens to what the next `optim_step` takes.

        Args:
            data: tokens with what the loss needs of them; samples, too, for cross_entropy: what was learned of them.
            loss: cross_entropy, importance_sampling, ppo, cispo, gspo or dro, see `algos.token_losses`.
            settings: of the loss, such as clip_high_threshold=1.28 or beta=0.1.

        Returns:
            Log-probs and losses, under the weights as they are.

        Raises:
            TypeError, ValueError: no data, or what is wrong with them; nothing was added.
        """
        return await self._token_losses("forward_backward", data, loss, settings)

    async def forward(
        self, data: Sequence[Datum | Sample], loss: str = "cross_entropy", **settings: float
    ) -> TokenLosses:
        """Log-probs and losses without a gradient; as `forward_backward` otherwise."""
        return await self._token_losses("forward", data, loss, settings)

    async def _token_losses(self, call: str, data: Any, loss: str, settings: Mapping[str, float]) -> TokenLosses:
        running, trainer = self._open(call), self.trainer
        if isinstance(data, Datum | Sample | Group | str | Mapping) or not isinstance(data, Iterable):
            raise WrongType(f"session.{call}: {shown(type(data).__name__)} is no list of Datum; give a list")
        with plainly():
            try:
                token_loss = TokenLoss.of(loss, settings)
                checked = checked_data(data, token_loss, running.vocabulary, running.longest)
            except ValueError as error:
                raise WrongValue(f"session.{call}: {error}") from None
        logprobs = await (
            trainer.forward_backward(checked, token_loss) if call == "forward_backward" else trainer.forward(checked)
        )
        return TokenLosses.of(checked, token_loss, logprobs)

    def optim_step(self, learning_rate: float = 1e-4, **adam: float) -> Awaited[Mapping[str, float]]:
        """Take a step of AdamW with what `forward_backward` gathered, of which nothing is divided; await it. The
        rollout has the new weights after `publish`.

        Args:
            learning_rate: of this step.
            adam: beta1 (0.9), beta2 (0.95), eps (1e-12), weight_decay (0) and grad_clip_norm (0: no bound).

        Returns:
            The step's metrics: `loss` (the sum), `grad_norm`, `lr`.

        Raises:
            TypeError, ValueError, UserError: a setting that cannot be, or no gradient gathered.
            RunFailure: the loss or the gradient is no number.
        """
        from rlinf.training.optimizer import Adam  # what trains takes a second to import

        self._open("optim_step")
        if unknown := sorted(adam.keys() - {each.name for each in fields(Adam)}):
            there = ", ".join(each.name for each in fields(Adam))
            raise WrongType(f"session.optim_step: there is no setting {', '.join(unknown)}; there are {there}")
        try:
            step = Adam(learning_rate, **adam)
        except ValueError as error:
            raise WrongValue(f"session.{error}") from None
        return Awaited(self._optim_step(step), "session.optim_step(…)")

    async def _optim_step(self, adam: Any) -> Mapping[str, float]:
        """Take the step of a call of `optim_step`."""
        metrics: Mapping[str, float] = await self.trainer.optim_step(adam)
        return metrics

    async def sample(self, prompt: Any, n: int = 1, *, seed: int | None = None, **sampling: Any) -> list[Reply]:
        """Several answers to one prompt, by the weights that were published last.

        Args:
            prompt: as in `complete`.
            n: how many.
            seed: the same seed gives the same answers.
            sampling: temperature, max_new_tokens and the like; default: the run's.

        Raises:
            TypeError, ValueError, UserError: something that cannot be answered.
        """
        count = at_least_one(n, "n", "session.sample")
        seeds = [None if seed is None else mix(seed, index) for index in range(count)]
        return list(await asyncio.gather(*(self.complete(prompt, seed=each, **sampling) for each in seeds)))

    async def publish(self) -> None:
        """Let the rollout have the trainer's weights, where `train(…, publish=False)` did not."""
        running = self._open("publish")
        roles = running.roles()
        await publish_weights(running.step(), roles["trainer"], roles["rollout"], roles.get("reference"))

    def evaluate(
        self, tasks: Any, episode: Play | Agent | None = None, n: int = 1, **sampling: Any
    ) -> Awaited[Evaluation]:
        """How good the model is on tasks that it does not learn from; await it.

        Args:
            tasks: prompts, as in `generate`, which are answered and scored; or with an episode, anything.
            episode: plays a task, as in `gather`; None: the run's agent or, where there is none, one answer.
            n: answers or episodes of each.
            sampling: temperature (default: the run's for evaluations, 0 unless said otherwise) and the like.

        Returns:
            `accuracy`, the mean reward; `groups`; `metrics`.

        Raises:
            TypeError, ValueError, UserError: wrong arguments, or not one answer could be scored.
        """
        running = self._open("evaluate")
        count = at_least_one(n, "n", "session.evaluate")
        settings = {**{name: value for name, value in running.evaluation.items() if value is not None}, **sampling}
        if episode is None and running.agent is None:
            if not running.judges:
                raise UserError(
                    "session.evaluate: answers need a reward function: give the session rewards=…, or an episode"
                )
            roles, problems = running.roles(), [self._trial(task, number) for number, task in enumerate(tasks)]

            async def answered() -> Evaluation:
                with work("evaluating", len(problems), "problems") as evaluating:

                    async def on_group(group: Group) -> None:
                        evaluating.advance()

                    settings_of_call = {"on_group": on_group, **settings}
                    return await evaluate(
                        Stream.of(problems), roles["rollout"], roles["judge"], n=count, **settings_of_call
                    )

            return Awaited(answered(), "session.evaluate(…)")
        trials = self._played("evaluate", tasks, episode, _Playing(n=count, kind=TRIALS, sampling=settings))
        groups = Stream.of(trials.groups(tasks), name="episodes")

        async def played() -> Evaluation:
            groups_played = []
            with work("evaluating", len(tasks) if isinstance(tasks, Sized) else None, "tasks") as evaluating:
                async for group in groups:
                    groups_played.append(group)
                    evaluating.advance()
            groups_played.sort(key=lambda group: group.prompt.id)
            metrics = measure(groups_played)
            return Evaluation(metrics["accuracy"], tuple(groups_played), metrics)

        return Awaited(played(), "session.evaluate(…)")

    def _trial(self, task: Any, number: int) -> Prompt:
        return prompt_of(task, number, self._chat, self._setting.vocabulary, "session.evaluate")


@dataclass(frozen=True, slots=True, eq=False)
class TokenLosses:
    """Results of a forward pass over data."""

    logprobs: list[np.ndarray]
    """Of each datum's targets, nats, float32 [tokens]."""
    sums: list[float]
    """Of each datum, its tokens' losses added up."""

    @property
    def loss(self) -> float:
        """All losses added up: the sum whose gradient is taken."""
        return math.fsum(self.sums)

    @staticmethod
    def of(data: Sequence[Datum], loss: TokenLoss, logprobs: Sequence[np.ndarray]) -> TokenLosses:
        """The losses of log-probs, which do not depend on how the data were cut into micro-batches."""
        sums = []
        for datum, numbers in zip(data, logprobs, strict=True):
            inputs = {name: torch.from_numpy(datum.inputs[name]) for name in loss.inputs}
            sums.append(float(loss(torch.from_numpy(numbers).double(), inputs).total))
        return TokenLosses(list(logprobs), sums)


def checked_data(data: Iterable[Any], loss: TokenLoss, vocabulary: int | None, longest: int | None) -> list[Datum]:
    """Data of which a loss can be computed.

    Args:
        data: data or, for cross_entropy, samples.
        loss: to be computed.
        vocabulary, longest: see `Datum.check`.

    Raises:
        WrongType, ValueError: there are none, or something is wrong with one; the text says which.
    """
    checked = []
    for number, each_datum in enumerate(data):
        if isinstance(each_datum, Sample) and loss.name == "cross_entropy":
            each_datum = Datum.of(each_datum)
        if not isinstance(each_datum, Datum):
            raise WrongType(
                f"datum {number} is a {type(each_datum).__name__}: give a Datum; one of a sample, with its advantage, "
                "makes Datum.of(sample, advantage)"
            )
        try:
            each_datum.check(loss.inputs, vocabulary, longest)
            if MARKS in loss.inputs and not each_datum.inputs[MARKS].any():
                raise ValueError(f"{MARKS} marks no token, and a sequence's ratio is the mean of those it marks")
        except ValueError as error:
            raise ValueError(f"datum {number}: {error}") from None
        checked.append(each_datum)
    if not checked:
        raise ValueError("there is no datum; give at least one")
    return checked


def _check(group: Any) -> None:
    """See that something can be learned from.

    Raises:
        WrongType, UserError: it is no group, or was not judged.
    """
    if not isinstance(group, Group):
        raise WrongType(f"session.train: {shown(group)} is no Group; give what gather or generate returned")
    if any(sample.reward is None and sample.outcome is None for sample in group.samples):
        raise UserError(
            f"session.train: the group of prompt {group.prompt.id} has samples without a reward: give the session a "
            "reward function (rewards=…), or return c.trajectory(reward=…) from the episode"
        )
