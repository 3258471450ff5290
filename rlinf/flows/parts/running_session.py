"""What a flow takes as `session`: conversations, episodes and training on the roles of its run.

In: tasks and episodes of the user's. Out: single answers, groups, metrics. `rlinf.Session` is the same with a life of
its own. Who wakes whom: the rollout's answers wake conversations; the ends of episodes wake training.

    async def game(step, session):
        groups = session.gather(step.prompts, episode, n=step.group_size)
        return await session.train(groups)
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Iterable, Mapping, Sequence
from typing import Any

from rlinf.agents.agent import Agent, is_agent, samples_of
from rlinf.agents.awaited import Awaited, plainly
from rlinf.agents.checks import WrongType, WrongValue, at_least_one, coroutine_function, shown
from rlinf.agents.episodes import Episode, Episodes, Gathered, Play, Tally, here
from rlinf.agents.prompts import prompt_of
from rlinf.data.sample import Evaluation, Group, Prompt, Sample
from rlinf.flows.evaluation.answers import evaluate, measure
from rlinf.flows.parts.answering import TASKS, TRIALS, Answering
from rlinf.runtime.base.errors import UserError
from rlinf.runtime.streams.stream import Stream, each


class RunningSession(Answering):
    """Conversations, episodes and training on roles that run.

    Args:
        running: the run.
    """

    # Episodes ---------------------------------------------------------------------------------------------------

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
        running = self._open("gather")
        count = at_least_one(running.group_size if n is None else n, "n", "session.gather")
        if count < 2 and running.compares is not None:
            raise WrongValue(
                f"session.gather: n={count}, and {running.compares} compares the episodes of one task with each other: "
                "it needs at least 2"
            )
        return self._played("gather", tasks, episode, count, TASKS, {}, timeout, at_once, (tally,))

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
    ) -> Stream[Group]:
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

        played = Episodes(
            self._by_agent(play) if is_agent(play) else play, n, begin, tallies,
            timeout=running.timeout if timeout is None else timeout,
            at_once=at_least_one(running.at_once if at_once is None else at_once, "at_once", f"session.{call}"),
            judge=judge if running.judges else None,
        )  # fmt: skip
        return Stream.of(played.groups(tasks), name="episodes")

    def _by_agent(self, agent: Agent) -> Play:
        """An episode in which an agent works on the task."""

        async def play(task: Any) -> list[Sample]:
            llm = self.llm()
            if (episode := here.get()) is not None:
                episode.llm = llm
            working = agent(task, llm)
            if not isinstance(working, Awaitable):
                raise WrongType("agent: it is no `async def` function; it returned without being awaited")
            return samples_of(await working, llm)

        return play

    # Learning ---------------------------------------------------------------------------------------------------

    async def _learn(self, groups: Any, publish: bool) -> dict[str, float]:
        """One step: what the roles make of groups, and of episodes."""
        running, tally = self._open("train"), self._tally_of(groups)
        roles = running.roles()
        rollout, trainer, reference = roles["rollout"], roles["trainer"], roles.get("reference")
        found: Any = Stream.of(self._checked(groups), name="groups")
        if reference is not None:
            found = reference.logprobs(found)
        if (teacher := roles.get("teacher")) is not None:
            found = teacher.logprobs(found)
        metrics: dict[str, float] = {}
        if (critic := roles.get("critic")) is not None:
            found = critic.values(found)
            if running.critic_only():
                return {**await critic.train(found), **self._told(tally)}
            for_critic, found = found.tee()
            told, learned = await asyncio.gather(critic.train(for_critic), trainer.train(found))
            metrics |= {**told, **learned}
        else:
            metrics |= await trainer.train(found)
        if publish:
            await self._publish(rollout, trainer, reference)
        return {**metrics, **self._told(tally)}

    async def _publish(self, rollout: Any, trainer: Any, reference: Any) -> None:
        weights = trainer.weights()  # they do not pass through here
        await rollout.load(weights)
        if reference is not None and self._running.moving_reference:
            await reference.follow(weights)

    def _tally_of(self, groups: Any) -> Tally:
        """What became of the episodes of a batch; of all that were not told of, if it does not say. A stream's are
        still played."""
        if isinstance(groups, Gathered):
            self._untold = [tally for tally in self._untold if tally is not groups.tally]
            return groups.tally
        tally, self._tally = self._tally, Tally()
        for untold in self._untold:
            tally.add(untold)
        self._untold = []
        return tally

    def _told(self, tally: Tally) -> dict[str, float]:
        """Metrics of episodes; failures are said aloud."""
        for warning in tally.warnings():
            self._running.say(f"warning: {warning}")
        return tally.metrics()

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

    async def _train(self, groups: Any, publish: bool, told: Mapping[str, float]) -> Mapping[str, float]:
        return {**await self._learn(groups, publish), **told}

    async def publish(self) -> None:
        """Let the rollout have the trainer's weights, where `train(…, publish=False)` did not."""
        roles = self._open("publish").roles()
        await self._publish(roles["rollout"], roles["trainer"], roles.get("reference"))

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
        chosen = {**{name: value for name, value in running.evaluation.items() if value is not None}, **sampling}
        if episode is None and running.agent is None:
            if not running.judges:
                raise UserError(
                    "session.evaluate: answers need a reward function: give the session rewards=…, or an episode"
                )
            roles, made = running.roles(), [self._trial(given, number) for number, given in enumerate(tasks)]
            return Awaited(
                evaluate(Stream.of(made), roles["rollout"], roles["judge"], n=count, **chosen), "session.evaluate(…)"
            )
        groups = self._played("evaluate", tasks, episode, count, TRIALS, chosen, None, None, ())

        async def played() -> Evaluation:
            found = sorted(await groups.collect(), key=lambda group: group.prompt.id)
            metrics = measure(found)
            return Evaluation(metrics["accuracy"], tuple(found), metrics)

        return Awaited(played(), "session.evaluate(…)")

    def _trial(self, given: Any, number: int) -> Prompt:
        return prompt_of(given, number, self._chat, self._setting.vocabulary, "session.evaluate")


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
