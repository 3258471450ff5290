"""What every policy promises to those who train it: one policy, whether it acts, learns, is published or is saved.

Instances are in `contract.py`, where a policy joins by one line.
"""

import pytest
import torch

from rlinf.actors.policy import PolicyActor
from rlinf.actors.policy_trainer import PolicyTrainer
from rlinf.envs.environment import EnvOutput
from rlinf.models.policy.build import load_policy
from rlinf.models.policy.published import matches
from rlinf.runtime.actor.actor import endpoint
from rlinf.runtime.system.system import ActorSystem
from tests.models.policy.cases import rough
from tests.models.policy.contract import INSTANCES, ROWS, instance

EQUAL = {"rtol": 1e-5, "atol": 1e-5}
SEEDS = torch.arange(ROWS) * 7919 + 13


class Deciding(PolicyActor):
    """Hands out what it keeps of a decision."""

    @endpoint
    async def decided(self, output):
        await self.act((0, 0), output)
        return self._histories.pop((0, 0)).acts[-1]


class Learning(PolicyTrainer):
    """Evaluates, with gradient, and moves without a reward."""

    @endpoint
    async def evaluated(self, stored):
        self.policy.zero_grad()
        found = self.policy(stored)
        total = found.logprobs.sum() + found.entropy.sum()
        (total if found.values is None else total + found.values.square().sum()).backward()
        learning = {name: each.grad for name, each in self.policy.named_parameters() if each.requires_grad}
        without = [name for name, each in learning.items() if each is None or not each.any()]
        values = None if found.values is None else found.values.detach()
        return found.logprobs.detach(), values, without

    @endpoint
    async def moved(self):
        rough(self.policy, only=lambda parameter: parameter.requires_grad)


async def agree(decider, trainer, shown):
    act = await decider.decided(shown)
    logprobs, values, without = await trainer.evaluated(act.stored)
    torch.testing.assert_close(logprobs, act.logprobs, **EQUAL)
    if act.values is not None:
        torch.testing.assert_close(values, act.values, **EQUAL)
    return act, without


@pytest.mark.parametrize("name", INSTANCES)
async def test_a_policy_is_the_same_when_it_acts_learns_is_published_and_is_saved(name, tmp_path):
    known = instance(name, tmp_path / "authors")
    made = {"policy": dict(known.config), "path": None if known.path is None else str(known.path)}
    texts = known.texts()
    shown = EnvOutput(known.observation(), None if texts is None else tuple(texts), None, SEEDS, 0)
    kept = {"algorithm": "ppo"} if known.config.get("value_level", "") is not None else {"algorithm": "grpo"}
    async with ActorSystem.local() as system:
        decider = (await system.spawn(Deciding, name="policy", **made))[0]
        trainer = await system.spawn(Learning, name="trainer", group_size=2, **kept, **made, **known.training)
        first, _ = await agree(decider, trainer[0], shown)
        for _ in range(2):  # the second time only what learns is published
            await trainer[0].moved()
            weights = await trainer.weights()
            await decider.load(weights)
            act, without = await agree(decider, trainer[0], shown)
        # log-probs may depend on the noise alone
        assert not torch.equal(act.stored["actions"], first.stored["actions"])
        assert [each for each in without if not matches(each, known.unused)] == []
        await trainer.save(str(tmp_path / "checkpoint"))
    loaded = load_policy(tmp_path / "checkpoint" / "policy")
    again = loaded.act(shown.observation, instructions=texts, generator=SEEDS)
    assert torch.equal(again.actions, act.actions)
    assert torch.equal(again.logprobs, act.logprobs)
