"""Ranks that cannot communicate on their GPUs say so at once, and do not wait for each other for ever."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlinf import ActorSystem
from rlinf.actors.base import SpmdActor
from rlinf.runtime.base.errors import UserError
from tests.cards import pretend


class Trainer(SpmdActor):
    """Opens its mesh, which is one in name only."""

    async def setup(self):
        await self._open_mesh()

    async def mesh_of(self, ranks, purpose):
        return f"a mesh of {len(ranks)}"


async def opened(monkeypatch, cards, *groups):
    """Start two hosts on these GPUs, and groups on both, each with devices or without."""
    pretend(monkeypatch, rank=0)
    async with ActorSystem.local(2) as system:
        places = system._host.places
        for number, card in enumerate(cards):
            places[number] = replace(places[number], device=card)
        for name, devices in groups:
            group = await system.spawn(Trainer, name=name, devices=devices)
            assert group.hosts == [0, 1]


async def test_two_ranks_on_one_gpu_are_refused_with_what_to_do(monkeypatch):
    with pytest.raises(UserError, match=r"0.*1.*GPU uuid-7.*NCCL.*no"):
        await opened(monkeypatch, ["uuid-7", "uuid-7"], ("trainer", None))
    await opened(monkeypatch, ["uuid-7", "uuid-8"], ("trainer", None))
    await opened(monkeypatch, ["cpu", "cpu"], ("trainer", None))


@pytest.mark.parametrize("devices", [[None, None], [[0, 1], None], [None, [0, 1]]])
async def test_two_groups_on_the_same_gpus_that_do_not_take_turns_are_refused(monkeypatch, devices):
    with pytest.raises(UserError, match=r"communicate.*do.*turns.*`devices`"):
        await opened(monkeypatch, ["uuid-0", "uuid-1"], ("trainer", devices[0]), ("critic", devices[1]))


async def test_two_groups_that_take_turns_start(monkeypatch):
    await opened(monkeypatch, ["uuid-0", "uuid-1"], ("trainer", [0, 1]), ("critic", [0, 1]))
