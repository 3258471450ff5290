"""A flow of your own: best-of-n distillation. Only the best answer to each prompt is learned from.

    python launch.py --config configs/quickstart.yaml flow=examples.custom_flow.best_of_n steps=40

A flow is an async function. It takes what it names of `step`, `rollout`, `judge` and `trainer`, and returns the step's
metrics. `step.prompts` are the prompts of this step and `step.group_size` is how many answers each gets.
"""

import dataclasses

from rlinf import Stream


async def best_of_n(step, rollout, judge, trainer):
    samples = rollout.generate(step.prompts, n=step.group_size)  # a Stream: groups appear as they finish
    scored = judge.score.map(samples)  # a Stream: scored while others still decode
    chosen = Stream.of(against_the_best(scored))  # any async iterator is a stream: this one runs where the flow does
    metrics = await trainer.train(chosen)  # trains as groups arrive
    await rollout.load(trainer.weights())
    return metrics


async def against_the_best(scored):
    """Groups in which every answer but the best has the group's lowest reward, so that only the best stands out."""
    async for group in scored:
        rewards = group.rewards
        best, lowest = max(rewards), min(rewards)
        first = rewards.index(best)
        samples = [
            dataclasses.replace(sample, reward=best if i == first else lowest) for i, sample in enumerate(group.scored)
        ]
        yield dataclasses.replace(group, samples=tuple(samples))
