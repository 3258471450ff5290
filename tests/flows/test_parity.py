"""Evaluation and training are the same code: the policy that trains succeeds as often in trials that draw its actions.

Both are held against a rate that is worked out by hand. An action is drawn from N(±SKILL, 1), toward the side that is
shown, and solves the task where it reaches REACHED on that side; there are STEPS attempts.
"""

from __future__ import annotations

import asyncio
import math

import pytest
import torch

from rlinf.actors.env import EnvActor
from rlinf.actors.policy import PolicyActor
from rlinf.actors.policy_trainer import PolicyTrainer
from rlinf.data.rng import mix
from rlinf.data.step import EmbodiedStep
from rlinf.envs.base import ActionSpec, ArraySpec, Simulator, Transition
from rlinf.flows.evaluate import trials
from rlinf.flows.interact import interactions
from rlinf.models.policy.build import build_policy_model, save_policy
from rlinf.runtime.system.system import ActorSystem

SKILL, REACHED, STEPS = 0.5, 0.9, 3
POLICY = {"type": "mlp", "state_size": 1, "action_size": 1, "hidden": [1], "log_std": 0.0, "normalise": False}
ENVS, EPOCHS = 64, 8
SIGMAS = 4.0
"""Of the noise that is let pass: a right program fails once in 16,000 seeds, and these seeds are fixed."""


class Sides(Simulator):
    """Shows a side in each step, -1 or 1, and is solved by an action far enough to that side.

    Args:
        shown: what a wrong adapter would make of the side: 1 shows it, -1 the other one, 0 none.
    """

    def __init__(self, num_envs, *, shown=1):
        self.num_envs, self.max_steps, self._shown = num_envs, STEPS, shown
        self.observation_spec = {"state": ArraySpec((1,), torch.float32)}
        self.action_spec = ActionSpec(-torch.ones(1), torch.ones(1))
        self._seed = torch.zeros(num_envs, dtype=torch.int64)
        self._step = torch.zeros(num_envs, dtype=torch.int64)

    def reset(self, seeds, env_ids):
        self._seed[env_ids], self._step[env_ids] = seeds, 0
        return {"state": self._shown * self._sides()[env_ids]}

    def step(self, actions, active):
        solved = (actions * self._sides())[:, 0] >= REACHED
        self._step += active
        never = torch.zeros_like(solved)
        return Transition({"state": self._shown * self._sides()}, solved.float(), solved, never, solved)

    def save(self):
        return list(zip(self._seed.tolist(), self._step.tolist(), strict=True))

    def restore(self, states, env_ids):
        for env, state in zip(env_ids.tolist(), states, strict=True):
            self._seed[env], self._step[env] = state

    def _sides(self):
        return torch.tensor(
            [[1.0 - 2.0 * (mix(*key) % 2)] for key in zip(self._seed.tolist(), self._step.tolist(), strict=True)]
        )


def known(shown=1):
    """How often the task is solved, if the policy is shown this."""
    missed = 0.5 * math.erfc((SKILL * shown - REACHED) / math.sqrt(2))
    return 1 - missed**STEPS


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    """Directory of a policy whose mean is SKILL to the side that it sees."""
    made = build_policy_model(POLICY)
    with torch.no_grad():
        for tensor in made.parameters():
            tensor.zero_()
        made.actor[0].weight.fill_(1.0)
        made.actor[-1].weight.fill_(SKILL / math.tanh(1.0))
    path = tmp_path_factory.mktemp("policy")
    save_policy(made, path)
    return str(path)


async def played(policy, shown=1, *, greedy=False):
    """Whether each environment's first episode of each step of training was solved; and each trial."""
    task = {"simulator": Sides, "workers": 0, "num_envs": ENVS}
    async with ActorSystem.local() as system:
        env = await system.spawn(EnvActor, name="env", slices=2, **task)
        tested = await system.spawn(EnvActor, name="t", seed=1, auto_reset=False, options={"shown": shown}, **task)
        acting = await system.spawn(PolicyActor, name="policy", policy=POLICY, path=policy)
        training = []
        for index in range(EPOCHS):
            promised = await asyncio.gather(*interactions(EmbodiedStep(index, STEPS, 2), env, acting))
            training += [success for lived in await asyncio.gather(*promised) for success in lived.success.tolist()]
        found = await trials(tested, acting, ENVS * EPOCHS, greedy=greedy)
    return training, [episode.success_once for episode in found]


def apart(one, other):
    """Difference of two rates in standard deviations; a rate that is given, not counted, has none of its own."""
    rates, spread = [], 0.0
    for each in (one, other):
        rates.append(each if isinstance(each, float) else sum(each) / len(each))
        spread += 0.0 if isinstance(each, float) else rates[-1] * (1 - rates[-1]) / len(each)
    return abs(rates[0] - rates[1]) / math.sqrt(spread)


async def test_training_and_trials_with_drawn_actions_succeed_equally_often_and_as_often_as_they_must(policy):
    training, tried = await played(policy)
    assert len(training) == len(tried) == ENVS * EPOCHS
    assert apart(training, known()) < SIGMAS
    assert apart(tried, known()) < SIGMAS
    assert apart(training, tried) < SIGMAS


async def test_the_success_that_training_tells_is_that_of_whole_episodes_though_short_ones_are_more(policy):
    """An early success leaves time for a second episode, which ends within the step only if it succeeds early too."""
    async with ActorSystem.local() as system:
        env = await system.spawn(EnvActor, name="env", slices=2, simulator=Sides, workers=0, num_envs=16 * ENVS)
        acting = await system.spawn(PolicyActor, name="policy", policy=POLICY, path=policy)
        trainer = await system.spawn(PolicyTrainer, name="trainer", policy=POLICY, path=policy, epochs=1)
        lived = await asyncio.gather(*await asyncio.gather(*interactions(EmbodiedStep(0, STEPS, 2), env, acting)))
        metrics = await trainer.train(lived)
    ended = [episode.success_once for part in lived for episode in part.episodes]
    assert apart(ended, known()) > SIGMAS  # all that ended would say too much
    assert metrics["episodes"] == 16 * ENVS
    told = round(metrics["success_once"] * 16 * ENVS)
    assert apart([True] * told + [False] * (16 * ENVS - told), known()) < SIGMAS


@pytest.mark.parametrize("shown", [-1, 0])
async def test_it_is_seen_when_trials_show_the_policy_something_else(policy, shown):
    training, tried = await played(policy, shown)
    assert apart(training, tried) > 2 * SIGMAS
    assert apart(tried, known(shown)) < SIGMAS


async def test_it_is_seen_when_trials_do_not_draw(policy):
    """The likeliest action falls short of what solves the task."""
    training, tried = await played(policy, greedy=True)
    assert not any(tried)
    assert any(training)
