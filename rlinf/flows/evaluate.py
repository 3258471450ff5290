"""Evaluations: of a language model on held-out problems, and of a policy that acts over whole episodes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from rlinf.algos.evaluation import majority_at_k, pass_at_k
from rlinf.data.sample import Evaluation, Group, NotScored, Prompt, Sample
from rlinf.envs.environment import Episode
from rlinf.flows.text import annotate
from rlinf.models.policy.base import Greedy
from rlinf.runtime.base.progress import Work, work
from rlinf.training.batch_metrics import rewards_by_agent


async def evaluate(
    prompts: Iterable[Prompt] | AsyncIterable[Prompt],
    rollout: Any,
    judge: Any,
    reward_model: Any = None,
    *,
    n: int = 1,
    temperature: float = 0.0,
    ks: Sequence[int] = (),
    on_group: Callable[[Group], Awaitable[None]] | None = None,
    **sampling: Any,
) -> Evaluation:
    """Answer the prompts and score the answers.

    Args:
        prompts: what to answer, at least one.
        rollout, judge: the roles.
        reward_model: a model that scores too, where there is one.
        n: answers per prompt.
        temperature: 0 takes the likeliest token.
        ks: for which k, up to n, to tell pass@k and maj@k.
        on_group: told of each group as soon as it is judged; the next one waits until it has returned.
        sampling: further settings of `rollout.generate`, such as max_new_tokens.

    Raises:
        NotScored: not one answer could be scored.
        ValueError: there was no prompt.
    """
    answers = rollout.generate(prompts, n=n, temperature=temperature, listed=False, **sampling)
    groups: list[Group] = []
    async for group in annotate(judge.score.map(answers), reward_model=reward_model):
        groups.append(group)
        if on_group is not None:
            await on_group(group)
    if not groups:
        raise ValueError("evaluate: there was no prompt to answer")
    groups.sort(key=lambda group: group.prompt.id)
    metrics = measure(groups, ks)
    return Evaluation(metrics["accuracy"], tuple(groups), metrics)


def measure(groups: Sequence[Group], ks: Sequence[int] = ()) -> dict[str, float]:
    """The numbers of `Evaluation.metrics`.

    An answer is right if its reward is more than 0.5. Answers vote together whose rewards were given to the same text;
    of answers as frequent as each other the first one drawn is taken, so maj@1 is pass@1.

    Args:
        groups: judged answers, at least one group.
        ks: for which k to tell pass@k and maj@k; a problem with fewer scored answers is left out of them.

    Raises:
        NotScored: not one answer could be scored.
    """
    samples = [sample for group in groups for sample in group.samples]
    rewards = [reward for group in groups for reward in group.rewards]
    if not rewards:
        raise NotScored(f"evaluate: not one of {len(samples)} answers could be scored: {samples[0].remark}")
    metrics = {
        "accuracy": sum(rewards) / len(rewards),
        "failed": 1 - len(rewards) / len(samples),
        "truncated": sum(sample.truncated for sample in samples) / len(samples),
        "response_length/mean": sum(sample.learned_tokens for sample in samples) / len(samples),
        **rewards_by_agent(samples),
    }
    if graded := sum(reward not in (0, 1) for reward in rewards):
        metrics["graded"] = graded / len(rewards)
    for k in ks:
        voting = [group.scored for group in groups if len(group.scored) >= k]
        if voting:
            metrics[f"pass@{k}"] = _mean([pass_at_k(list(map(_right, those)), k) for those in voting])
            metrics[f"maj@{k}"] = _mean(
                [majority_at_k(list(map(_vote, those)), list(map(_right, those)), k) for those in voting]
            )
    return metrics


def is_right(reward: float) -> bool:
    """True if an answer of this reward counts as right, in pass@k and maj@k alike."""
    return reward > 0.5


def _right(sample: Sample) -> bool:
    assert sample.reward is not None  # only scored samples are asked
    return is_right(sample.reward)


def _vote(sample: Sample) -> str:
    return (sample.text if sample.extracted is None else sample.extracted).strip()


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


@dataclass(slots=True, eq=False)
class _Round:
    """One episode of every environment of an actor."""

    rank: int
    """The actor's rank."""
    epoch: int
    """That its episodes began with."""
    actions: list[Tensor] = field(default_factory=list)
    """In order, float32 [N, C, A] each; kept where videos are wanted."""
    episodes: list[Episode] = field(default_factory=list)
    """By environment."""


async def trials(
    env: Any, policy: Any, episodes: int, *, greedy: Greedy = True, videos: int = 0
) -> tuple[Episode, ...]:
    """Act in environments without automatic resets until enough episodes have ended.

    Args:
        env: simulations with one slice each and without automatic resets; their starts are the same each time.
        policy: the role.
        episodes: how many, at least 1.
        greedy: take the likeliest actions, or from_noise those of the ODE from random starts; otherwise sample them.
        videos: of so many of them a video is recorded: failures first, those with the smallest returns. Starts and
            actions repeat, so they are played again for it, and only they are drawn. `env` needs a `Recording`.

    Returns:
        The episodes, in the order of their rounds and environments, without those that were lost with their simulator.

    Raises:
        RuntimeError: every episode of a round was lost.
    """

    async def play(rank: int, epoch: int, trying: Work) -> _Round:
        simulation, decider, key = env[rank], policy[rank % len(policy)], (rank, 0)
        played = _Round(rank, epoch)
        output = await simulation.reset(0, epoch)
        while output.chunk is None or bool(output.chunk.running.any()):
            actions = decider.act(key, output, greedy=greedy, keep=False)
            output = await simulation.step(0, actions)
            played.episodes += output.chunk.episodes
            trying.advance(len(output.chunk.episodes))
            if videos:
                played.actions.append(await actions)
        played.episodes.sort(key=lambda episode: episode.env)
        return played

    rounds: list[_Round] = []
    results: list[tuple[_Round, Episode]] = []
    with work("trying the policy", episodes, "episodes") as trying:
        while len(results) < episodes:
            epoch = len(rounds) // len(env)
            played = await asyncio.gather(*(play(rank, epoch, trying) for rank in range(len(env))))
            if not any(each.episodes for each in played):
                raise RuntimeError("not one trial ended in a whole round: the simulators lose every episode")
            rounds += played
            results += [(each, episode) for each in played for episode in each.episodes]
    results = results[:episodes]
    if videos:
        await _record(env, failures_first(results)[:videos])
    return tuple(episode for _, episode in results)


def failures_first(episodes: Sequence[tuple[Any, Episode]]) -> list[tuple[Any, Episode]]:
    """Episodes in the order in which they are worth looking at: failures, then by their returns, the smallest first.

    Args:
        episodes: each with what it comes from.
    """
    return sorted(episodes, key=lambda pair: (bool(pair[1].success_once), pair[1].total))


async def _record(env: Any, wanted: Sequence[tuple[_Round, Episode]]) -> None:
    """Play the rounds of some episodes again, by the same actions, and record those."""
    rows_of_rounds: dict[int, tuple[_Round, list[int]]] = {}
    for played, episode in wanted:
        rows_of_rounds.setdefault(id(played), (played, []))[1].append(episode.env)
    for played, numbers in rows_of_rounds.values():
        simulation = env[played.rank]
        await simulation.watch(0, numbers)
        await simulation.reset(0, played.epoch)
        for actions in played.actions:
            await simulation.step(0, actions)
        await simulation.watch(0, ())
