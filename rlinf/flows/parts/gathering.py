"""Episodes of a run: tasks that are played on its roles, group by group or task by task.

In: tasks, and a program that plays one. Out: groups; what became of each task; for checkpoints, the tasks that are
open. Who wakes whom: the rollout's answers wake episodes; their ends wake whoever waits for groups.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import AsyncIterable, AsyncIterator, Collection, Iterable, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from rlinf.agents.agent import Agent, LastingAgent, is_agent, samples_of, worked_on
from rlinf.agents.awaited import Awaited, plainly
from rlinf.agents.checks import WrongType, WrongValue, at_least_one, coroutine_function, shown
from rlinf.agents.episodes import Episode, Episodes, Gathered, LoopWatch, OpenTask, Play, Tally, here
from rlinf.data.in_flight import Made
from rlinf.data.sample import Group, Prompt, Sample
from rlinf.flows.parts.answering import TASKS, Answering, Running
from rlinf.runtime.base.errors import UserError
from rlinf.runtime.streams.stream import Stream


class Gathering(Answering):
    """Conversations and episodes on roles that run.

    Args:
        running: the run.
    """

    def _begin_with(self, running: Running) -> None:
        super()._begin_with(running)
        self._playing: list[Episodes] = []  # of `gather_tasks`
        endpoint = running.endpoint
        self._watch = LoopWatch(running.say, lambda: None if endpoint is None else endpoint.address)
        self._over = Tally()  # of their tasks that are over, until a step has told of them

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
        played = self._played("gather", tasks, episode, count, TASKS, {}, timeout, at_once, (tally,))
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
    ) -> Stream[Made]:
        """As `gather`, task by task: what became of each, also where every episode of it failed.

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
            played = self._played("gather_tasks", tasks, episode, count, TASKS, {}, timeout, at_once, ())
        return Stream.of(self._made(played, tasks, give_up), name="episodes")

    async def _made(self, played: Episodes, tasks: Any, give_up: int | None) -> AsyncIterator[Made]:
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
                    outcome.tally.failed.clear()  # who takes `Made` tells of those of which nothing came
                    self._over.add(outcome.tally)
                    yield Made(outcome.task, outcome.groups, "failed")
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
        """What became of these tasks of `gather_tasks` was kept: they are open no more.

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
        """As `gather`, all groups in a list; await it. A step that learns from this list tells of its episodes alone;
        one that learns from anything else tells of all that no step has told of."""
        tally = Tally()
        with plainly():
            groups = self._gathered(tasks, episode, n, timeout, at_once, tally)

        async def collected() -> list[Group]:
            try:
                return Gathered(await groups.collect(), tally)
            finally:
                self._untold.append(tally)

        return Awaited(collected(), "session.gather_groups(…)")

    def _played(
        self,
        call: str,
        tasks: Any,
        episode: Play | Agent | None,
        n: int,
        kind: int,
        sampling: Mapping[str, Any],
        timeout: float | None,
        at_once: int | None,
        tallies: Sequence[Tally],
    ) -> Episodes:
        running = self._open(call)
        play = running.agent if episode is None else episode
        if play is None:
            raise UserError(f"session.{call}: nothing says what is played; give it an episode, or set agent.function")
        coroutine_function(play, f"session.{call}")
        if isinstance(tasks, (str, Mapping)) or not isinstance(tasks, (Iterable, AsyncIterable)):
            raise WrongType(f"session.{call}: {shown(tasks)} is one task or none; give a list of them")
        if isinstance(tasks, (list, tuple)) and not tasks:
            raise WrongValue(f"session.{call}: the list of tasks is empty; give at least one")
        if timeout is not None and not (isinstance(timeout, (int, float)) and timeout > 0):
            raise WrongValue(f"session.{call}: timeout={timeout!r} must be seconds, more than 0")
        places = itertools.count()

        def begin(task: Any, index: int) -> Episode:
            place = next(places)
            if isinstance(task, Prompt):
                number = task.id
            elif kind == TASKS:
                number = self._counted("tasks")
            else:
                number = place
            prompt = task if isinstance(task, Prompt) else None
            return Episode(number, index, (running.seed, kind, number), prompt, sampling)

        async def judge(group: Group) -> Group:
            ranks = running.roles()["judge"]
            judged: Group = await ranks[group.prompt.id % len(ranks)].score(group)
            return judged

        return Episodes(
            self._by_agent(play) if is_agent(play) else play, n, begin, tallies,
            timeout=running.timeout if timeout is None else timeout,
            at_once=at_least_one(running.at_once if at_once is None else at_once, "at_once", f"session.{call}"),
            judge=judge if running.judges and running.reward_chosen else None, watch=self._watch,
        )  # fmt: skip

    def _by_agent(self, agent: Agent) -> Play:
        """An episode in which an agent works on the task."""

        own = agent.source if isinstance(agent, LastingAgent) else agent

        @functools.wraps(own, updated=())  # errors name the agent's own line
        async def play(task: Any) -> list[Sample]:
            llm = self.llm()
            if (episode := here.get()) is not None:
                episode.llm = llm
            return samples_of(await worked_on(agent, task, llm), llm)

        return play
