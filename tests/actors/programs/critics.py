"""A critic over all ranks of a job, alone and beside a trainer; and what a plain loop makes of the same samples."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForTokenClassification

import rlinf
from rlinf import Actor, Stream, endpoint
from rlinf.actors.critic import Critic
from rlinf.actors.trainer import Trainer
from rlinf.data.sample import Group, Prompt
from rlinf.data.step import Step
from rlinf.data.weights import Weights
from rlinf.flows.ppo import ppo
from tests.actors import toys
from tests.actors.watched import Watched

GAMMA, LAM, CLIP, DELTA = 0.9, 0.8, 0.2, 0.3
ALGORITHM = {
    "name": "ppo",
    "overrides": {"advantage": {"gamma": GAMMA, "lam": LAM}, "critic": {"clip": CLIP, "delta": DELTA}},
}
SETTINGS: dict[str, Any] = {
    "tokenizer": toys.ALPHABET, "algorithm": ALGORITHM, "lr": 0.01, "grad_clip": 1e9, "micro_batch_tokens": 30,
}  # fmt: skip
SHUFFLED = (2, 0, 1, 5, 6, 3, 4)

# By hand -------------------------------------------------------------------------------------------------------------


def plain_model(weights: dict[str, torch.Tensor], kind: str = "qwen2") -> Any:
    """A model of transformers' own with these weights."""
    settings = toys.configuration(kind, vocab_size=toys.VOCABULARY, pad_token_id=0, num_labels=1)
    net = AutoModelForTokenClassification.from_config(AutoConfig.for_model(**settings), attn_implementation="eager")
    net.load_state_dict(weights)
    return net.eval()


def plain_values(net: Any, prompt: Sequence[int], response: Sequence[int]) -> torch.Tensor:
    """Before each token of a response, [response]."""
    whole = net(torch.tensor([[*prompt, *response]])).logits[0, :, 0]
    return whole[len(prompt) - 1 : len(prompt) + len(response) - 1]


def returns_by_hand(reward: float, values: Sequence[float]) -> list[float]:
    """Token by token, from the last."""
    found: list[float] = []
    advantage = ahead = 0.0
    for step, value in enumerate(reversed(values)):
        surprise = (reward if step == 0 else 0.0) + GAMMA * ahead - value
        advantage = surprise + GAMMA * LAM * advantage
        found.insert(0, advantage + value)
        ahead = value
    return found


def by_a_plain_loop(net: Any, batch: list[Group]) -> torch.Tensor:
    """One sample after the other, one learned token after the other; the mean loss."""

    def huber(error: torch.Tensor) -> torch.Tensor:
        return error**2 / 2 if abs(error) <= DELTA else DELTA * (error.abs() - DELTA / 2)

    total, count = torch.zeros(()), 0
    for group in batch:
        for sample in group.scored:
            mask = np.ones(len(sample.response_ids), bool) if sample.loss_mask is None else sample.loss_mask
            said = sample.per_token["values"][mask].tolist()
            came = returns_by_hand(float(sample.reward or 0.0), said)
            found = plain_values(net, sample.prompt.token_ids, sample.response_ids)[torch.tensor(mask)]
            for new, old, target in zip(found, said, came, strict=True):
                held = old + (new - old).clamp(-CLIP, CLIP)
                total = total + torch.maximum(huber(new - target), huber(held - target))
                count += 1
    return total / count


def told(batch: Sequence[Group], seed: int = 0) -> list[Group]:
    """The groups with made-up values, some far from what a critic would say."""
    rng = np.random.default_rng(seed)
    return [
        group.with_column(
            "values", [rng.normal(0.4, 0.4, len(s.response_ids)).astype(np.float32) for s in group.samples]
        )
        for group in batch
    ]


# Over ranks ----------------------------------------------------------------------------------------------------------


class WatchedCritic(Watched, Critic):
    """A critic that is watched."""


class WatchedTrainer(Watched, Trainer):
    """The trainer beside it."""


CASES: dict[str, dict[str, Any]] = {
    "qwen2": {"model": toys.configuration("qwen2")},
    "llama": {"model": toys.configuration("llama"), "gradient_checkpointing": True},
    "minibatches": {"model": toys.configuration("qwen2"), "minibatches": 2, "epochs": 2},
}


async def learned(system: rlinf.ActorSystem, out: str) -> None:
    """What critics of all kinds say and learn, for a test to look at."""
    results = {}
    batch = toys.groups(7)
    for name, case in CASES.items():
        critic = await system.spawn(WatchedCritic, name=name, precise=True, **{**SETTINGS, **case})
        await critic.train(told(batch, seed=1))  # so that the head says something, and the layers have a gradient
        began = await critic.inspect()
        steps = len(began["gradients"])
        valued = await critic.values(Stream.of([batch[i] for i in SHUFFLED])).collect()
        metrics = await critic.train(told(batch))
        results[name] = {
            "began": began["weights"],
            "order": [group.prompt.id for group in valued],
            "values": [[sample.per_token["values"] for sample in group.samples] for group in valued],
            "metrics": metrics,
            "steps": steps,
            **await critic.inspect(),
        }
    torch.save(results, out)


async def flat(actor: Any) -> torch.Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in (await actor.inspect())["weights"].values()])


# Beside a trainer ----------------------------------------------------------------------------------------------------

STEPS = 3
PER_STEP = 5
ANSWERS = toys.groups(PER_STEP * STEPS, seed=3)
EACH = {
    "tokenizer": toys.ALPHABET, "model": toys.configuration(), "lr": 0.01, "micro_batch_tokens": 40, "precise": True,
}  # fmt: skip


class Rollout(Actor):
    """Answers prompts by heart, on the learners' own devices where they share them."""

    @endpoint(device=True)
    async def generate(self, prompts: Any, n: int) -> AsyncIterator[Group]:
        async for prompt in prompts:
            await self.compute(torch.randn(100, 100).mm, torch.randn(100, 100))
            yield ANSWERS[prompt.id]

    @endpoint(joint=True)
    async def load(self, weights: Weights) -> int:
        return weights.version


class Judge(Actor):
    """Finds every answer judged."""

    @endpoint
    async def score(self, group: Group) -> Group:
        return group


def prompts(step: int) -> list[Prompt]:
    return [group.prompt for group in ANSWERS[step * PER_STEP : (step + 1) * PER_STEP]]


def placed(hosts: Sequence[int]) -> dict[str, Any]:
    return {"hosts": list(hosts), "devices": [[host] for host in hosts]}


def alike(where: dict[str, Any]) -> dict[str, Any]:
    return dict.fromkeys(("rollout", "critic", "trainer"), where)  # shared and never changed


async def spawned(system: rlinf.ActorSystem, where: dict[str, Any]) -> dict[str, Any]:
    """The roles of a PPO run."""
    return {
        "rollout": await system.spawn(Rollout, name="rollout", **where["rollout"]),
        "judge": await system.spawn(Judge, name="judge", hosts=[0]),
        "critic": await system.spawn(WatchedCritic, name="critic", algorithm=ALGORITHM, **EACH, **where["critic"]),
        "trainer": await system.spawn(WatchedTrainer, name="trainer", algorithm=ALGORITHM, **EACH, **where["trainer"]),
    }


async def run(roles: dict[str, Any]) -> tuple[list[dict[str, float]], torch.Tensor]:
    """All steps, of which the first warms the critic up; their metrics, and the critic's weights afterwards."""
    metrics = []
    for index in range(STEPS):
        step = Step(index, Stream.of(prompts(index)), 4, critic_only=index == 0)
        metrics.append(await ppo(step, **roles))
    return metrics, await flat(roles["critic"])


async def flows(system: rlinf.ActorSystem, out: str) -> None:
    """The same run with all roles in one process without devices, on the same devices, and on devices of their own."""
    learners = {"rollout": placed([0, 1]), "critic": placed([0, 1]), "trainer": placed([2, 3])}
    layouts = {"alone": alike({"hosts": [0]}), "together": alike(placed([0, 1])), "apart": learners}
    results = {}
    for name, where in layouts.items():
        async with system.scope():
            results[name] = await run(await spawned(system, where))
            print("ran", name, flush=True)
    torch.save(results, out)


async def cancelled(system: rlinf.ActorSystem, out: str) -> None:
    """A step of PPO that is cancelled at any moment leaves critic and trainer as they were, and able to go on."""
    async with system.scope():
        roles = await spawned(system, alike(placed(range(system.hosts))))
        times = await disturbed(roles)
        results = await run(roles)
    async with system.scope():
        other = await run(await spawned(system, alike({})))
    torch.save({"times": times, "disturbed": results, "undisturbed": other}, out)


async def disturbed(roles: dict[str, Any]) -> int:
    """Cancels a step at one moment after the other, then gives the critic what it cannot learn from; how often."""
    before, times = await flat(roles["critic"]), 0

    async def endless() -> AsyncIterator[Prompt]:
        for prompt in prompts(0):
            yield prompt
            await asyncio.sleep(0.002)
        await asyncio.Event().wait()

    for moment in range(5):
        stepping = asyncio.ensure_future(ppo(Step(0, Stream.of(endless()), 4), **roles))
        await asyncio.sleep(0.02 * moment)
        stepping.cancel()
        try:
            await stepping
        except asyncio.CancelledError:
            times += 1
        assert torch.equal(await flat(roles["critic"]), before), "a step that was cancelled changed the critic"
    for bad in ([], ANSWERS[:2]):
        try:
            await roles["critic"].train(bad)
        except ValueError:
            times += 1
    return times


SCENARIOS = {f.__name__: f for f in (learned, flows, cancelled)}


async def main(system: rlinf.ActorSystem) -> None:
    """The scenario named on the command line."""
    out, name = sys.argv[1:]
    await SCENARIOS[name](system, out)


if __name__ == "__main__":
    rlinf.run(main, stall_after=60.0)
