"""Joint endpoints: the ranks of a group answer as one. In every world."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rlinf import Actor, ActorSystem, endpoint

pytestmark = pytest.mark.worlds("local", "serialize", "lane")


class Choir(Actor):
    """Ranks that answer as one."""

    @endpoint(joint=True)
    async def sing(self, voice: str) -> str:
        return f"{voice}{self.rank}"

    @endpoint(joint=True)
    async def falter(self, rank: int) -> None:
        if self.rank == rank:
            raise RuntimeError(f"rank {rank} falters")
        if rank > 0:
            await asyncio.Event().wait()

    @endpoint
    async def hear(self, sung: str) -> str:
        return f"heard {sung}"


async def test_a_joint_endpoint_answers_for_the_group_with_the_value_of_rank_0(system: ActorSystem) -> None:
    choir = await system.spawn(Choir, hosts=[1, 0, 1], name="choir")
    assert await choir.sing("la") == "la0"
    assert await choir.each.sing(["do", "re", "mi"]) == "do0"
    assert await choir[2].sing("la") == "la2"
    assert await choir[1].hear(choir.sing("la")) == "heard la0"  # un-awaited: the value goes straight to host 0
    assert await choir.hear(choir.sing("la")) == ["heard la0"] * 3


async def test_a_joint_call_fails_with_whichever_rank_fails(system: ActorSystem) -> None:
    choir = await system.spawn(Choir, hosts=[0, 1], name="choir")
    for rank in (0, 1):
        with pytest.raises(RuntimeError, match=f"rank {rank} falters"):
            await choir.falter(rank)
        with pytest.raises(RuntimeError, match=f"rank {rank} falters"):
            await choir[0].hear(choir.falter(rank))


def test_an_async_generator_cannot_be_joint() -> None:
    with pytest.raises(TypeError, match="cannot be joint"):

        class Wrong(Actor):
            @endpoint(joint=True)
            async def count(self) -> Any:
                yield 1
