"""The flows make models learn: the recipe of the quickstart, and a smaller one in seconds."""

import pytest

from rlinf import ActorSystem, Stream
from rlinf.actors.judge import Judge
from rlinf.actors.rollout import Rollout
from rlinf.actors.trainer import Trainer
from rlinf.data.datasets.toy_tasks import PromptStream, examples, make_task, prompts
from rlinf.data.step import Step
from rlinf.data.tokenizer import load_tokenizer
from rlinf.flows.evaluate import evaluate
from rlinf.flows.grpo import grpo
from rlinf.flows.warm_up import warm_up as sft

MODEL = {
    "model_type": "qwen2",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 192,
    "tie_word_embeddings": True,
}


class Run:
    """A task, its roles in one process, and what is needed to take steps."""

    def __init__(self, task, seed):
        self.task, self.seed = task, seed
        self.tokenizer = load_tokenizer(task.tokenizer)
        self.supply = PromptStream(task.train, self.tokenizer, seed)
        self.held_out = prompts(task.held_out, self.tokenizer)

    async def spawn(self, system, *, lr, max_new_tokens):
        shared = {"model": MODEL, "tokenizer": self.task.tokenizer, "seed": self.seed}
        self.rollout = await system.spawn(Rollout, name="rollout", **shared, max_new_tokens=max_new_tokens)
        self.judge = await system.spawn(Judge, name="judge")
        trainers = await system.spawn(
            Trainer, name="trainer", **shared, lr=lr, warmup_steps=5, epochs=2, algorithm="grpo_clip_higher"
        )
        self.trainer = trainers[0]

    async def warm_up(self, steps):
        batches = (examples(self.supply.take(128), self.tokenizer) for _ in range(steps))
        return await sft(Stream.of(batches), self.rollout, self.trainer, lr=2e-3)

    async def train(self, steps):
        for index in range(steps):
            step = Step(index, Stream.of(self.supply.take(64)), 8)
            metrics = await grpo(step, self.rollout, self.judge, self.trainer)
        return metrics

    async def accuracy(self):
        return (await evaluate(Stream.of(self.held_out), self.rollout, self.judge)).accuracy


@pytest.mark.repeated  # with the quickstart's model in examples/ and tests/runs
async def test_copying_a_digit_is_learned_from_nothing():
    run = Run(make_task("copy", digits=1), seed=0)
    async with ActorSystem.local() as system:
        await run.spawn(system, lr=1e-3, max_new_tokens=2)
        assert await run.accuracy() <= 0.3
        metrics = await run.train(60)
        assert await run.accuracy() == 1.0
    assert metrics["reward/mean"] > 0.9
    assert metrics["mismatch/max"] < 1e-4  # the rollout had the trainer's weights


async def test_evaluation_gives_accuracy_and_answers_in_order():
    run = Run(make_task("sort", digits=2), seed=0)
    async with ActorSystem.local() as system:
        await run.spawn(system, lr=1e-3, max_new_tokens=3)
        outcome = await evaluate(run.held_out, run.rollout, run.judge, n=3, temperature=1.0)
        assert [group.prompt.id for group in outcome.groups] == list(range(len(run.held_out)))
        rewards = [reward for group in outcome.groups for reward in group.rewards]
        assert len(rewards) == 3 * len(run.held_out)
        assert outcome.accuracy == sum(rewards) / len(rewards)
        with pytest.raises(ValueError, match="no prompt"):
            await evaluate([], run.rollout, run.judge)
