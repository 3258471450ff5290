"""Roles that move: the same bits and the same future on other hosts, through memory, and nothing left there."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from rlinf import Actor, ActorSystem
from rlinf.actors.critic import Critic
from rlinf.actors.off_policy_trainer import SacTrainer
from rlinf.actors.policy import PolicyActor
from rlinf.actors.policy_trainer import PolicyTrainer
from rlinf.actors.reference import Reference
from rlinf.actors.trainer import Trainer
from rlinf.data.step import EmbodiedStep
from rlinf.flows.sac import sac
from rlinf.runtime.base.errors import ActorDied, UserError
from rlinf.runtime.system.handles import ActorGroup
from rlinf.training import checkpoint
from rlinf.training.checkpoint import park
from tests.actors import toys
from tests.actors.programs.control import MLP, collected
from tests.actors.test_reference import Seen, weights
from tests.flows.reaching import SOFT, environments, policy_for
from tests.runtime.worlds import until
from tests.training.programs.sharded import Learner

TEXT: dict[str, Any] = {"model": toys.configuration(), "tokenizer": toys.ALPHABET}


@pytest.fixture
async def system():
    """Three hosts that send each other bytes, as processes do."""
    async with ActorSystem.local(3, serialize=True) as system:
        yield system


async def moved(
    system: ActorSystem, cls: type[Actor], before: ActorGroup, name: str = "after", **settings: Any
) -> ActorGroup:
    """The actor on host 1, as a new one on host 2."""
    parked = await park(system, name, before)
    await system.kill(before)
    after = await system.spawn(cls, hosts=[2], name=name, **settings)
    await after.import_state(parked)
    await system.kill(parked.keepers)
    return after


async def published(trainer: ActorGroup) -> tuple[int, dict[str, torch.Tensor]]:
    found = await trainer.weights()
    return found.version, {name: tensor.clone() for name, tensor in found.named()}


def assert_same(found, expected):
    assert found[0] == expected[0]
    assert found[1].keys() == expected[1].keys()
    assert not [name for name in expected[1] if not torch.equal(found[1][name], expected[1][name])]


@pytest.mark.parametrize(("cls", "more"), [(Trainer, {"algorithm": "grpo"}), (Critic, {"algorithm": "ppo"})])
@pytest.mark.parametrize("pieces", [1 << 28, 5000], ids=["at once", "in pieces"])
async def test_what_learns_from_text_goes_on_as_if_it_had_not_moved(system, monkeypatch, cls, more, pieces):
    """By the loss and the gradient of the next two steps, which weights, moments and schedule lead to."""
    monkeypatch.setattr(checkpoint, "READ_BYTES", pieces)
    settings = {**TEXT, "lr": 0.01, "warmup_steps": 3, **more}

    async def learned(learner, steps):
        found = []
        for seed in steps:
            groups = toys.groups(4, seed=seed)
            if cls is Critic:
                groups = [group async for group in learner.values(groups)]
            found.append(await learner.train(groups))
        return found

    staying = await system.spawn(cls, hosts=[0], name="staying", seed=1, **settings)
    leaving = await system.spawn(cls, hosts=[1], name="leaving", seed=1, **settings)
    first = await learned(staying, (0, 1))
    assert first == await learned(leaving, (0, 1))
    assert {"loss", "grad_norm"} < {name.rpartition("/")[2] for name in first[0]}
    arrived = await moved(system, cls, leaving, seed=2, **settings)
    assert await learned(staying, (2, 3)) == await learned(arrived, (2, 3))


async def test_a_policy_that_acts_goes_on_as_if_it_had_not_moved(system):
    trajectories = await collected(system, MLP, 4)
    settings = {"policy": MLP, "lr": 0.03, "epochs": 2, "minibatch": 8, "seed": 4}
    staying = await system.spawn(PolicyTrainer, hosts=[0], name="staying", **settings)
    leaving = await system.spawn(PolicyTrainer, hosts=[1], name="leaving", **settings)
    for trainer in (staying, leaving):
        await trainer.train(trajectories)
    arrived = await moved(system, PolicyTrainer, leaving, **settings)
    assert await arrived.train(trajectories) == await staying.train(trajectories)
    assert_same(await published(arrived), await published(staying))


@pytest.mark.parametrize("capacity", [1000, 20], ids=["room left", "full ring"])
async def test_a_replay_buffer_moves_with_its_trainer(system, capacity):
    policy = policy_for(SOFT)
    settings = {"policy": policy, "batch": 7, "warmup": 4, "lr": 1e-2, "utd": 0.5, "capacity": capacity}
    found = []
    for moves in (False, True):
        name = f"moves {moves}"
        env = await environments(system, f"env {name}", hosts=[0], slices=2)
        acting = await system.spawn(PolicyActor, keep_following=True, hosts=[0], name=f"policy {name}", policy=policy)
        trainer = await system.spawn(SacTrainer, hosts=[1], name=f"trainer {name}", **settings)
        for number in range(4):
            if number == 2 and moves:
                trainer = await moved(system, SacTrainer, trainer, **settings)
            told = await sac(EmbodiedStep(number, 3, 2, fresh=False), env, acting, trainer)
        found.append((told["replay/rows"], await published(trainer)))
    assert found[0][0] == found[1][0] > 0
    assert_same(found[1][1], found[0][1])


async def test_a_reference_takes_along_what_it_was_given(system):
    leaving = await system.spawn(Seen, hosts=[1], name="reference", **TEXT)
    await leaving.load(weights(7, seed=5))
    want = (await leaving.shown())[0]
    arrived = await moved(system, Seen, leaving, seed=3, **TEXT)
    assert await arrived.load(weights(7, seed=5)) == 7
    assert_same((7, (await arrived.shown())[0]), (7, want))


async def test_a_reference_that_nobody_changed_is_made_again_and_not_copied(system):
    leaving = await system.spawn(Reference, hosts=[1], name="reference", **TEXT)
    parked = await park(system, "reference", leaving)
    assert parked.shards == ({},)
    arrived = await system.spawn(Reference, hosts=[2], name="again", **TEXT)
    assert await arrived.import_state(parked) == 0


async def test_a_state_that_does_not_fit_says_whose_it_is_and_what_differs(system):
    leaving = await system.spawn(Learner, hosts=[1], name="before", plain=True)
    other = await system.spawn(Trainer, hosts=[2], name="other", algorithm="grpo", **TEXT)
    parked = await park(system, "trainer", leaving)
    with pytest.raises(ValueError, match=r"trainer.*optimizer"):
        await other.import_state(parked)


class Silent(Learner):
    """Cannot say what it knows."""

    def _exported(self) -> Any:
        raise MemoryError("no room for a copy")


async def test_a_role_that_cannot_be_copied_says_why_goes_on_and_leaves_nothing(system):
    leaving = await system.spawn(Silent, hosts=[1], name="before", plain=True)
    with pytest.raises(MemoryError, match=r"room.*copy"):
        await park(system, "trainer", leaving)
    with pytest.raises(UserError, match=r"trainer\.parked"):
        await system.get("trainer.parked")
    await leaving.learn(1)


async def test_what_is_gone_with_its_host_is_an_error_and_no_wait(system):
    leaving = await system.spawn(Learner, hosts=[1], name="before", plain=True)
    parked = await park(system, "trainer", leaving)
    await system.kill(parked.keepers)
    arrived = await system.spawn(Learner, hosts=[2], name="after", plain=True)
    with pytest.raises(ActorDied, match=r"trainer\.parked\[0\]"):
        await arrived.import_state(parked)


def kept(system: ActorSystem) -> list[tuple[int, int]]:
    """What each host keeps for others: values, and tensors in shared memory."""
    gc.collect()
    stores = [system._network.system(host)._host.values for host in range(3)]
    return [(len(store.kept), store.arena.statistics().slots) for store in stores]


async def test_nothing_is_left_in_memory(system):
    large = {**TEXT, "model": toys.configuration(intermediate_size=3000), "algorithm": "grpo"}
    leaving = await system.spawn(Trainer, hosts=[1], name="before", **large)
    await leaving.train(toys.groups(4))
    arrived = await moved(system, Trainer, leaving, **large)
    spans = [span for host in range(3) for span in system._network.system(host)._host.tracer.dump()]
    assert "arena" in {span.what for span in spans if span.kind == "payload"}, "large tensors went through the arena"
    await system.kill(arrived)
    await until(lambda: kept(system) == [(0, 0)] * 3)
