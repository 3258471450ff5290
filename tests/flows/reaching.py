"""Roles of a run on the toy, in one process, and a script that solves it."""

import torch

from rlinf.actors.env import EnvActor
from rlinf.actors.off_policy_trainer import SacTrainer
from rlinf.actors.policy import PolicyActor
from rlinf.data.step import EmbodiedStep
from rlinf.flows.sac import sac
from rlinf.models.policy.build import fitted
from rlinf.runtime.actor.actor import Actor, endpoint

TOY = {"simulator": "rlinf.envs.toy.Reach", "workers": 0}
SOFT = {"type": "rlinf.models.policy.sac.SoftPolicy", "hidden": [32, 32]}
LEARNING = {"batch": 32, "warmup": 32, "lr": 3e-3, "gamma": 0.8, "tau": 0.02, "alpha": 0.2, "seed": 5}


def policy_for(config, dims=1):
    """A policy's configuration, with the toy's sizes."""
    return fitted(config, {"state": (2 * dims,)}, dims)


async def environments(system, name="env", **settings):
    """Environments of the toy, without workers."""
    return await system.spawn(EnvActor, name=name, **{**TOY, "num_envs": 8, **settings})


class Expert(Actor):
    """Goes straight to the target, as far as one action reaches."""

    @endpoint
    async def act(self, key, seen, *, greedy=False, keep=True):
        state = seen.observation["state"]
        point, target = state.chunk(2, 1)
        return ((target - point) / 0.25).clamp(-1.0, 1.0)[:, None]


def equal(mine, theirs):
    """Whether two published weights are the same, to the last bit."""
    named = dict(theirs.named())
    return all(torch.equal(tensor, named[name]) for name, tensor in mine.named())


async def roles(system, *, name="", slices=1, env=None, policy=None, kind=SacTrainer, **trainer):
    """Roles of an off-policy run, with `trainer`'s settings changed."""
    config = policy_for({**SOFT, **(policy or {})})
    learning = {**LEARNING, **trainer}
    if trainer.get("algorithm") == "iql":
        del learning["alpha"]  # it has no temperature
    return {
        "env": await environments(system, f"env{name}", slices=slices, **(env or {})),
        "policy": await system.spawn(PolicyActor, keep_following=True, name=f"policy{name}", policy=config),
        "trainer": await system.spawn(kind, name=f"trainer{name}", policy=config, **learning),
    }


async def steps(group, count, *, flow=sac, first=0, horizon=4, slices=1):
    """What steps of a run return."""
    return [
        await flow(EmbodiedStep(number, horizon, slices, fresh=False), **group)
        for number in range(first, first + count)
    ]
