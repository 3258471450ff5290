"""Environments, policy and trainer in turns on a device that has room for one of them: what is learned is the same."""

import pytest
import torch

from rlinf import ActorSystem
from rlinf.actors.env import EnvActor
from rlinf.actors.off_policy_trainer import SacTrainer
from rlinf.actors.policy import PolicyActor
from rlinf.actors.policy_trainer import PolicyTrainer
from rlinf.data.step import EmbodiedStep
from rlinf.data.weights import Weights
from rlinf.envs.toy import Reach
from rlinf.flows.embodied import embodied
from rlinf.flows.sac import sac
from rlinf.models.offload import Parking, bytes_of
from rlinf.models.policy.build import build_policy_model
from rlinf.runs.dry_run.footprint import control_footprints
from rlinf.runtime.actor.actor import endpoint
from tests.actors.programs.control import MLP
from tests.actors.programs.sharing import of_module

MOVES: list[str] = []
SOFT = {"type": "soft", "state_size": 2, "action_size": 1, "hidden": [8], "seed": 3}


class Parks:
    """Says when it moves, and sees that nothing stays."""

    async def offload(self):
        await super().offload()
        assert bytes_of(self.there()) == 0
        MOVES.append(f"-{self._cell.name}")

    async def onload(self):
        await super().onload()
        assert bytes_of(self.there()) > 0
        MOVES.append(f"+{self._cell.name}")


class Actress(Parks, PolicyActor):
    def there(self):
        return of_module(self._policy)


class OffPolicyActress(Actress):
    async def setup(self, **settings):
        await super().setup(keep_following=True, **settings)


class Coach(Parks, PolicyTrainer):
    def there(self):
        return of_module(self.policy, self._learner.optimizer)


class OffPolicyCoach(Parks, SacTrainer):
    def there(self):
        return of_module(self._sac.module, self._sac.optimizer)


class OnDevice(Reach):
    """Holds its points on a device, as simulators on GPUs do."""

    def __init__(self, num_envs, **options):
        super().__init__(num_envs, wind=True, **options)
        self._parking = Parking(lambda: (self._point, self._target, self._seed, self._step))

    def offload(self):
        self._parking.park()
        MOVES.append("-simulator")

    def onload(self):
        self._parking.unpark()


async def learned(flow, policy, kinds, settings, shared):
    """Weights after a few steps, and the state of the simulation."""
    MOVES.clear()
    sizes = control_footprints(build_policy_model(policy), targets=flow is sac)
    sizes = {name: size.active_bytes for name, size in sizes.items()} | {"env": 4096}
    memory = max(sizes.values())

    def on(role):
        return {"hosts": [0], **({"devices": [0], "resident_bytes": sizes[role]} if shared else {})}

    env = {"simulator": OnDevice, "workers": 0, "num_envs": 4, "max_steps": 5, "slices": 2}
    async with ActorSystem.local(1, device_memory={0: memory} if shared else None) as system:
        roles = {
            "env": await system.spawn(EnvActor, name="env", **on("env"), **env),
            "policy": await system.spawn(kinds[0], name="policy", **on("policy"), policy=policy),
            "trainer": await system.spawn(kinds[1], name="trainer", **on("trainer"), policy=policy, **settings),
        }
        metrics = [await flow(EmbodiedStep(number, 3, 2, fresh=False), **roles) for number in range(3)]
        weights = {name: tensor.clone() for name, tensor in (await roles["trainer"].weights()).named()}
        where = [part["environments"] for part in (await roles["env"].state())[0]]
    return metrics, weights, where


CASES = {
    "ppo": (embodied, MLP, (Actress, Coach), {"lr": 0.03, "epochs": 2, "minibatch": 8}),
    "sac": (sac, SOFT, (OffPolicyActress, OffPolicyCoach), {"batch": 7, "warmup": 4, "lr": 0.01, "capacity": 40}),
}


@pytest.mark.parametrize("name", CASES)
async def test_taking_turns_on_a_device_changes_nothing_that_is_learned_or_simulated(name):
    expected = await learned(*CASES[name], shared=False)
    assert MOVES == []
    found = await learned(*CASES[name], shared=True)
    assert {"-simulator", "+policy[0]", "-policy[0]", "+trainer[0]", "-trainer[0]"} <= {*MOVES}
    assert found[0] == expected[0]
    assert all(torch.equal(found[1][key], tensor) for key, tensor in expected[1].items())
    assert str(found[2]) == str(expected[2])


class Shown(PolicyActor):
    @endpoint(device=True)
    async def state(self):
        return {name: tensor.clone() for name, tensor in self._policy.state_dict().items()}


async def test_a_parked_policy_takes_new_weights_in_place_of_the_old_ones(monkeypatch):
    unpark, seen = Parking.unpark, []

    def watched(self, *, without=()):
        tensors = list(without)
        seen.append(len(tensors))
        unpark(self, without=tensors)

    monkeypatch.setattr(Parking, "unpark", watched)
    states = [build_policy_model({**MLP, "seed": seed}).state_dict() for seed in (7, 8)]
    weights = [Weights.pack(state.items(), version) for version, state in enumerate(states, start=1)]
    async with ActorSystem.local(1, device_memory={0: 100}) as system:
        on_one = {"hosts": [0], "devices": [0], "resident_bytes": 80, "policy": MLP}
        one, other = [await system.spawn(Shown, name=name, **on_one) for name in ("one", "other")]
        for each, state in zip(weights, states, strict=True):
            await other.load(each)
            seen.clear()
            await one.load(each)
            assert seen == [len(state)]
            assert await one.version() == [each.version]
            (found,) = await one.state()
            assert all(torch.equal(found[name], tensor) for name, tensor in state.items())
