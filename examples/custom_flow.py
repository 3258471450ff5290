"""A flow of your own: best-of-n distillation. Only the best answer to each prompt is learned from.

    python examples/custom_flow.py                 # a quarter of a minute on a CPU
    python launch.py --config configs/quickstart.yaml flow=examples.custom_flow.best_of_n steps=40

A flow is an async function that takes what it names of `step`, `rollout`, `judge` and `trainer`, and returns the step's
metrics: `step.prompts` are this step's, `step.group_size` is how many answers each gets. You will see the reward rise.
"""

import dataclasses
import itertools

import rlinf

MODEL = {
    "model_type": "qwen2",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


async def best_of_n(step, rollout, judge, trainer):
    samples = rollout.generate(step.prompts, n=step.group_size)  # a Stream: groups appear as they finish
    scored = judge.score.map(samples)  # a Stream: scored while others still decode
    chosen = rlinf.Stream.of(
        against_the_best(scored)
    )  # any async iterator is a stream: this one runs where the flow does
    metrics = await trainer.train(chosen)  # trains as groups arrive
    await rollout.load(trainer.weights())
    return metrics


async def against_the_best(scored):
    """Groups in which every answer but the best has the group's lowest reward, so that only the best stands out."""
    async for group in scored:
        best, lowest = max(group.rewards), min(group.rewards)
        first = group.rewards.index(best)
        samples = [
            dataclasses.replace(sample, reward=best if i == first else lowest) for i, sample in enumerate(group.scored)
        ]
        yield dataclasses.replace(group, samples=tuple(samples))


def rising(response):
    """The share of neighbours that go up: 1.0 for 2479."""
    digits = [each for each in response if each in "0123456789"]
    return sum(a < b for a, b in itertools.pairwise(digits)) / 3


if __name__ == "__main__":
    result = rlinf.train(
        MODEL,
        rising,
        [{"prompt": f"{n}:", "answer": ""} for n in range(10)],
        flow=best_of_n,
        tokenizer={"characters": "0123456789:"},
        steps=60,
        prompts_per_step=10,
        group_size=16,
        max_new_tokens=4,
        lr=3e-3,
        run_dir="outputs/custom_flow",
        log_every=20,
    )
    print(result)
