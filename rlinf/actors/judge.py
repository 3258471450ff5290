"""The judge: gives every sample of a group its reward, or says why there is none.

Consumes groups without rewards, produces the same groups with them. A reward function that is not `trusted` runs in
child processes (`rlinf/rewards/pool.py`), so one that hangs, crashes or raises costs its sample, never the job; the
sample's `outcome` and `remark` tell. A reward that cannot work at all ends the job with the first cause.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rlinf.config.schema import configured
from rlinf.config.text import RewardConfig
from rlinf.data.datasets.benchmarks import SCORED_BY
from rlinf.data.face import face_of
from rlinf.data.sample import Group, Outcome, Prompt, Sample
from rlinf.joining.listener import fewest, listen_beside, listens_at
from rlinf.rewards.base import (
    MOST_ROWS,
    OFFERED,
    ON_REQUEST,
    RESPONSES,
    Arguments,
    Reward,
    RewardSource,
    ScoreCounts,
    Scorer,
    Verdict,
)
from rlinf.rewards.joined import JoinedWorkers
from rlinf.rewards.pool import NO_CHILDREN, RewardPool, runs_in_children
from rlinf.runtime.actor.actor import Actor, endpoint
from rlinf.runtime.base.errors import UserError, WrongSetting
from rlinf.training.batch_metrics import show_samples

_HOPELESS = 64
"""Samples in a row without a reward after which the job fails: a reward that fails half of the time does not come to
that in the age of the universe, and one that always fails comes to it in the first step."""


class RewardError(Exception):
    """The reward function cannot score anything; the text has the first cause."""


class FailureStreak:
    """Counts failures in a row, of one judge.

    Args:
        name: of what scores, for errors.
    """

    def __init__(self, name: str):
        self._name = name
        self._failed: list[Verdict] = []

    def notice(self, verdict: Verdict) -> None:
        """Count one sample.

        Raises:
            RewardError: there is no hope for the next.
        """
        if verdict.outcome == "ok":
            self._failed.clear()
            return
        self._failed.append(verdict)
        count = len(self._failed)
        if count >= _HOPELESS or verdict.hopeless:
            text = f"{self._name} cannot score anything: "
            if verdict.hopeless:  # something is not installed, which no trace makes plainer
                raise RewardError(f"{text}{verdict.remark}")
            first = self._failed[0]
            text += f"{count} answers in a row failed, the first with {first.remark}"
            raise RewardError(f"{text}\n\n{first.trace}" if first.trace else text)


class _Scoring:
    """A reward function, and where it runs.

    Args:
        source: the function, or several by name.
        settings: of the reward.
        owner: whose it is, for errors and names of processes.

    Raises:
        ValueError: the function is not found, or is given what it does not take.
    """

    def __init__(self, source: RewardSource, settings: RewardConfig, owner: str):
        args = settings.args
        isolated = runs_in_children(source, settings)
        self.reward = Reward.of(source, args, make=not isolated)
        self.timeout = settings.timeout
        self.failures = FailureStreak(f"reward {self.reward.name}")
        self.pool: RewardPool | None = None
        if isolated:
            self.pool = RewardPool(
                source,
                args,
                is_async=self.reward.is_async,
                name=f"reward of {owner}",
                workers=settings.workers,
                timeout=settings.timeout,
            )
        else:
            self.scorer = Scorer(source, args)

    async def start(self) -> None:
        """Start the child processes, if it has any."""
        if self.pool is not None:
            await self.pool.start()

    async def stop(self) -> None:
        """End them."""
        if self.pool is not None:
            await self.pool.stop()

    def of_group(self, group: Group) -> Arguments:
        """Arguments of a reward function that scores groups; see `arguments`."""
        answers = self.arguments(group)
        lists = ["truncated", *([ON_REQUEST] if ON_REQUEST in answers[0] else [])]
        together = {name: [answer[name] for answer in answers] for name in lists}
        shared = {name: value for name, value in answers[0].items() if name != "response"}
        return {**shared, **together, RESPONSES: [answer["response"] for answer in answers]}

    def arguments(self, group: Group) -> list[Arguments]:
        """Arguments of the reward function, for each sample: only those that it wants, since it may go to a child."""
        prompt = group.prompt
        shared = {**prompt.row, "answer": prompt.answer, "prompt": prompt.text}
        self.reward.check((*shared, *OFFERED))
        wanted = self.reward.wanted
        if wanted is not None:
            shared = {name: value for name, value in shared.items() if name in wanted}
        ids = any(ON_REQUEST in part.names for part in self.reward.parts)
        return [
            {
                **shared,
                "response": sample.text,
                "truncated": sample.truncated,
                **({ON_REQUEST: sample.response_ids.tolist()} if ids else {}),
            }
            for sample in group.samples
        ]

    async def try_answer(self, prompt: Prompt) -> Verdict:
        """The verdict on a prompt's own answer."""
        no_tokens = np.empty(0, np.int64)
        answer = Sample(prompt, 0, no_tokens, np.empty(0, np.float32), np.empty(0, np.int32), prompt.answer, False)
        group = Group(prompt, (answer,))
        offered = self.of_group(group) if self.reward.over_group else self.arguments(group)[0]
        if self.pool is not None:
            (verdict,) = await self.pool.score([offered])
        elif self.reward.is_async:
            (verdict,) = await self.scorer.together([offered], self.timeout)
        else:
            verdict = await asyncio.to_thread(self.scorer.one, offered)
        return next(iter(verdict.members), verdict)


class Judge(Actor):
    """Scores samples with a reward function."""

    _joined: JoinedWorkers | None = None
    """Workers of other processes, where they may join."""

    @configured(RewardConfig)
    async def setup(
        self,
        *,
        settings: RewardConfig,
        reward: RewardSource | None = None,
        columns: Iterable[str] | None = None,
        named: Mapping[str, tuple[str, Mapping[str, Any]]] | None = None,
        directory: str | None = None,
    ) -> None:
        """Find the reward function and start its child processes.

        Args:
            settings: how answers are scored; or any of its keys, such as timeout=60.0. Functions that are marked
                `trusted` run in this process unless isolate="always"; in this process, plain functions have no
                deadline.
            reward: `reward(response, answer, **row) -> float | Score`, plain or async, or its dotted path; or several
                by name, each a function or a mapping with `function`, `weight` and `args`, which are summed. None takes
                what `function` and `parts` of the settings say.
            columns: of the data set, to see at once whether the function's arguments are there.
            named: further functions, each a dotted path and its arguments, by the name that a prompt's row has in the
                column "scored_by".
            directory: of the run, where those who may join (`settings.join`) read how.

        Raises:
            ValueError: the function is not found, is given what it does not take, takes what is not there, or cannot be
                sent to a child process.
            ChildDied: a child cannot be started; the text has what it printed.
            UserError: others are to join, and it cannot listen there, or none of the functions runs in children.
        """
        own = _Scoring(reward or settings.source, settings, self._cell.name)
        if columns is not None:
            own.reward.check({*OFFERED, "messages", *columns})
        self._scorings: dict[str | None, _Scoring] = {None: own}
        for name, (path, args) in (named or {}).items():
            spec = replace(settings, function=path, parts={}, args=dict(args))
            same = reward is None and (spec.source, spec.args) == (settings.source, settings.args)
            self._scorings[name] = own if same else _Scoring(spec.source, spec, f"{self._cell.name}, {name}")
        self._scored = ScoreCounts()
        for scoring in dict.fromkeys(self._scorings.values()):
            await scoring.start()
        self._join = settings.join
        if settings.join is not None:
            try:
                self._joined = await self._open(settings, directory)
            except UserError:
                await self.close()
                raise

    async def _open(self, settings: RewardConfig, directory: str | None) -> JoinedWorkers:
        """Let workers of other processes join."""
        pools = [each.pool for each in dict.fromkeys(self._scorings.values()) if each.pool is not None]
        if not pools:
            raise WrongSetting(f"reward.join={settings.join}: {NO_CHILDREN}")
        leads = self._fewest if self.rank == 0 and self.world_size > 1 else None
        joined = JoinedWorkers(pools, self._cell.name, settings.workers, elsewhere=leads)
        if self.rank == 0:
            await joined.listen(listens_at(str(settings.join)), directory)
        return joined

    @endpoint
    async def joinable(self, token: str, one_more: bool = False) -> tuple[int, str]:
        """How many have joined this rank to score or are about to, and where one more may: rank 0 sends those who come
        to whoever has fewest.

        Args:
            token: that one who joins must know.
            one_more: another one is sent here.

        Raises:
            UserError: it cannot listen.
        """
        assert self._joined is not None
        if self._joined.where is None:
            await listen_beside(self._joined.listen, str(self._join), token)
        return self._joined.coming(one_more=one_more), str(self._joined.where)

    async def _fewest(self, token: str, here: int) -> str | None:
        return await fewest(lambda rank, sent: self.group[rank].joinable(token, sent), range(1, self.world_size), here)

    async def close(self) -> None:
        """End with those who joined, and end the child processes."""
        if self._joined is not None:
            await self._joined.close()
        for scoring in dict.fromkeys(self._scorings.values()):
            await scoring.stop()

    @endpoint(stays=face_of)
    async def score(self, group: Group) -> Group:
        """The group with every sample's reward and outcome filled in; those that failed have a remark instead.

        Raises:
            ValueError: the reward function takes a column that there is not.
            RewardError: not one of the last 64 samples could be scored, or a module that the function needs is missing.
        """
        scoring = self._scorings[group.prompt.row.get(SCORED_BY) if len(self._scorings) > 1 else None]
        if scoring.reward.over_group:
            (verdict_of_all,) = await self._judge(scoring, [scoring.of_group(group)])
            verdicts = list(verdict_of_all.members) or [verdict_of_all] * len(group.samples)
        else:
            verdicts = await self._judge(scoring, scoring.arguments(group))
        judged = Group(group.prompt, tuple(_judged(*each) for each in zip(group.samples, verdicts, strict=True)))
        self._scored += _counted(judged)
        for verdict in verdicts:
            scoring.failures.notice(verdict)
        return judged

    @endpoint
    async def scored(self) -> ScoreCounts:
        """Counts of the answers that were judged here since this was last called."""
        scored, self._scored = self._scored, ScoreCounts()
        if self._joined is not None:
            scored += ScoreCounts(joined=len(self._joined.there), away=self._joined.answered())
        return scored

    async def _judge(self, scoring: _Scoring, batch: Sequence[Arguments]) -> list[Verdict]:
        if scoring.pool is not None:
            return await scoring.pool.score(batch)
        if scoring.reward.is_async:
            return await scoring.scorer.together(batch, scoring.timeout)
        if scoring.reward.trusted:  # takes microseconds: less than the way to another thread
            return [scoring.scorer.one(offered) for offered in batch]
        return await self.compute(_all, scoring.scorer, batch)


async def try_reward(
    source: RewardSource, settings: RewardConfig, prompts: Sequence[Prompt]
) -> list[tuple[str, Verdict]]:
    """Score the data's own answers, before a run: each as if a model had given it.

    Args:
        source: the function, or several by name.
        settings: of the reward.
        prompts: whose answers are scored; a prompt without one is answered by nothing.

    Returns:
        The answers, with what became of judging them; all are of one group where the reward scores groups.

    Raises:
        ValueError: the function takes what is not there, or cannot be sent to a child process.
        ChildDied: the child in which it runs cannot be started.
    """
    scoring = _Scoring(source, replace(settings, workers=1), "the check")
    await scoring.start()
    try:
        return [(prompt.answer, await scoring.try_answer(prompt)) for prompt in prompts]
    finally:
        await scoring.stop()


def _all(scorer: Scorer, batch: Sequence[Arguments]) -> list[Verdict]:
    return [scorer.one(offered) for offered in batch]


def _judged(sample: Sample, verdict: Verdict) -> Sample:
    if verdict.outcome != "ok":
        return sample.judged(None, verdict.outcome, scores={}, remark=verdict.remark)
    cut: Outcome = "truncated" if sample.truncated else "ok"
    return sample.judged(verdict.value, cut, scores=verdict.scores, extracted=verdict.extracted)


def _counted(group: Group) -> ScoreCounts:
    failed = [sample for sample in group.samples if sample.reward is None]
    if not failed:
        return ScoreCounts(len(group.samples))
    timeouts = sum(sample.outcome == "timeout" for sample in failed)
    rows = [
        row | {"group": len(group.samples)} for row in show_samples([Group(group.prompt, tuple(failed))], [], MOST_ROWS)
    ]
    return ScoreCounts(len(group.samples), timeouts, len(failed) - timeouts, failed[0].remark, tuple(rows))
