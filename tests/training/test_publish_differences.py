"""Weights that go to other machines as differences: always those that were published, whatever was missed or lost."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter

import pytest
import torch

from rlinf import Actor, ActorSystem, endpoint
from rlinf.actors import base
from rlinf.data import differences
from rlinf.data.differences import Differences
from rlinf.data.weights import Weights, checksums
from rlinf.runs.embodied_roles import learners_of
from rlinf.runs.roles import spawn_roles
from rlinf.runs.rules import load_config, load_embodied
from rlinf.runs.start import prepare
from rlinf.runs.text import trainer_settings
from rlinf.runtime.values import relay
from rlinf.training.weight_sync import LoadRefused, Receiver, publish
from tests.launching import ROOT
from tests.runtime.test_relay import Net
from tests.runtime.worlds import nothing_left

SHAPES = {"head": (40, 64), "norm": (64,), "blocks": (3, 30, 30)}


class Publisher(Actor):
    """Changes some elements before each publish."""

    async def setup(self, dtype: torch.dtype = torch.bfloat16) -> None:
        self.random = torch.Generator().manual_seed(33)
        self.named = {name: torch.randn(shape).to(dtype) for name, shape in SHAPES.items()}
        await self.restart()

    @endpoint
    async def restart(self) -> None:
        self.differences = Differences("publisher[0]", self.note)

    @endpoint
    async def weights(self, version: int, share: float) -> Weights | None:
        for tensor in self.named.values():
            here = torch.rand(tensor.shape, generator=self.random) < share
            tensor[here] = torch.randn(int(here.sum()), generator=self.random).to(tensor.dtype)
        return await publish(
            self, lambda _: self.named.items(), version, bucket_bytes=1 << 12, differences=self.differences
        )

    @endpoint
    async def sums(self) -> tuple[int, ...]:
        """Checksums of the whole, packed anew."""
        return Weights.pack(self.named.items(), 0, bucket_bytes=1 << 12).checksums


class Engine(Receiver):
    """Keeps what it is sent; refuses what it is told to."""

    async def setup(self) -> None:
        self.weights, self.refuses = None, False

    async def check_weights(self, weights: Weights) -> None:
        if self.refuses:
            raise ValueError("not this one")

    async def switch_weights(self, weights: Weights) -> None:
        self.weights = weights

    @endpoint
    async def refuse(self, refuses: bool) -> None:
        self.refuses = refuses

    @endpoint
    async def sums(self) -> tuple[int, ...]:
        return checksums(self.weights.buckets)


MACHINES = [0, 0, 1, 1, 2, 3]
"""The publisher is on host 1; the third of the others is given its weights by one of them."""


@contextlib.asynccontextmanager
async def published(monkeypatch):
    monkeypatch.setattr(relay, "RELAY_BYTES", 1)
    monkeypatch.setattr(differences, "LEAST_BYTES", 0)
    async with ActorSystem.local(len(MACHINES), serialize=True) as system:
        net = Net(system, MACHINES)
        async with system.scope():
            (publisher,) = await system.spawn(Publisher, hosts=[1], name="publisher")
            engines = [
                await system.spawn(Engine, hosts=hosts, name=f"e{hosts[0]}") for hosts in ([2, 3], [4], [5], [0])
            ]
            yield net, publisher, engines
        await nothing_left(system)


async def crossing(net, publisher, engines, version, share):
    """Publish to all; bytes that came to each machine."""
    net.bytes.clear()
    weights = publisher.weights(version, share)
    await asyncio.gather(*[engine.load(weights) for engine in engines])
    del weights
    for engine in engines:
        assert {await publisher.sums()} == set(await engine.sums())
    return net.received()


async def test_machines_get_the_whole_once_and_then_what_changed_also_those_that_get_it_from_another(monkeypatch):
    async with published(monkeypatch) as (net, publisher, engines):
        whole = 2 * sum(torch.Size(shape).numel() for shape in SHAPES.values())
        first = await crossing(net, publisher, engines, 1, 0.0)
        assert all(first[machine] == whole for machine in (1, 2, 3))
        for version in (2, 3):
            received = await crossing(net, publisher, engines, version, 0.02)
            assert received.keys() == {1, 2, 3}
            assert all(size < whole / 8 for size in received.values())
        net.hosts[5].values.relay._versions.clear()  # restarted
        received = await crossing(net, publisher, engines, 4, 0.02)
        assert received[3] == whole
        assert received[1] < whole / 8
        assert not net.hosts[0].values.relay._versions, "the publisher's machine keeps what needs no difference"


async def test_a_thousand_random_publishes_with_losses_and_restarts_are_those_of_the_whole(monkeypatch):
    draw = random.Random(33)
    async with published(monkeypatch) as (net, publisher, engines):
        version, counts = 0, Counter()
        for _ in range(1000):
            version += 1
            event = draw.choice(["", "", "", "missed", "engine", "trainer", "back", "refused", "cancelled"])
            share = draw.choice([0.0, 0.001, 0.01, 0.05, 0.3, 1.0])
            some = draw.sample(engines, draw.randint(1, 4)) if event == "missed" else engines
            if event == "engine":
                net.hosts[draw.randint(2, 5)].values.relay._versions.clear()
            elif event == "trainer":
                await publisher.restart()
            elif event == "back":
                version = draw.randint(1, version)
            elif event in ("refused", "cancelled"):
                await disturbed(publisher, engines, version, share, event, draw)
                version += draw.randint(0, 1)
            net.bytes.clear()
            weights = publisher.weights(version, 0.0 if event in ("refused", "cancelled") else share)
            await asyncio.gather(*[engine.load(weights) for engine in some])
            counts["differences"] += sum(size < 5000 for size in net.received().values())
            counts["wholes"] += sum(size > 5000 for size in net.received().values())
            del weights
            expected = await publisher.sums()
            for engine in some:
                assert set(await engine.sums()) == {expected}, (version, event, share)
        assert min(counts.values()) > 300, counts


async def disturbed(publisher, engines, version, share, event, draw):
    """A publish that one rank refuses, or that is given up somewhere on its way."""
    weights, unlucky = publisher.weights(version, share), draw.choice(engines)
    if event == "refused":
        await unlucky[0].refuse(True)
        with pytest.raises(LoadRefused, match="not this one"):
            await unlucky.load(weights)
        await unlucky[0].refuse(False)
        return
    call = unlucky.load(weights)
    for _ in range(draw.randint(0, 40)):
        await asyncio.sleep(0)
    call.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await call


class Told(base.BaseTrainer):
    async def setup(self, delta: str) -> None:
        self._delta = delta

    @endpoint
    async def publishes(self, exact: bool) -> tuple[bool, bool]:
        """By differences, and in host memory."""
        how = self._published_how(1000, torch.bfloat16, exact=exact)
        return how["differences"] is not None, how["in_host_memory"]


@pytest.mark.parametrize(
    ("machines", "delta", "exact", "by_differences", "in_host"),
    [
        pytest.param(2, "auto", False, True, False, id="other machines"),
        pytest.param(2, "always", False, True, True, id="on a GPU that has room, too"),
        pytest.param(2, "off", False, False, False, id="off"),
        pytest.param(2, "always", True, False, False, id="exact ones go whole"),
        pytest.param(1, "always", False, False, False, id="one machine"),
    ],
)
async def test_trainers_make_differences_where_there_are_other_machines(
    machines, delta, exact, by_differences, in_host, monkeypatch
):
    monkeypatch.setattr(base, "has_room", lambda device, size: True)
    async with ActorSystem.local(2, serialize=True) as system:
        Net(system, [0, machines - 1])
        (trainer,) = await system.spawn(Told, delta=delta, hosts=[0], name="trainer")
        assert await trainer.publishes(exact) == (by_differences, in_host)


@pytest.mark.parametrize("delta", ["auto", "off"])
def test_the_trainer_of_a_run_on_text_publishes_as_the_configuration_says(delta):
    plan = prepare(load_config(None, [f"weights.delta={delta}"], 1), 1)
    assert trainer_settings(plan.config, plan.algorithm, sharding="shard").delta == delta


class Shown:
    """A simulator that only says what it shows."""

    async def shapes(self):
        return {"shapes": {"state": (3,)}, "action_size": 1, "choices": None, "bounds": ([-1.0], [1.0]), "max_steps": 9}


@pytest.mark.parametrize("name", ["toy", "pendulum_sac", "pendulum_dagger"])
async def test_the_trainer_of_a_run_that_acts_publishes_as_the_configuration_says(name):
    config = load_embodied(ROOT / f"configs/embodied/{name}.yaml", ["weights.delta=off", "trials.episodes=0"])
    plan = prepare(config, 1)
    learners = await learners_of(config, plan, {"env": [Shown()]})
    async with ActorSystem.local() as system:
        roles = await spawn_roles(system, plan.placed, {"trainer": learners["trainer"]})
        (cell,) = [cell for cell in system._host.cells.values() if isinstance(cell.actor, base.BaseTrainer)]
        assert cell.actor._delta == "off"
        del roles
