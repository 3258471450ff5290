"""Modelled roles: they take virtual time on devices, and a book of who used which device when."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from rlinf import Actor, ActorSystem, Stream, endpoint
from rlinf.runtime.base.clock import run_virtual


class Book:
    """What happened when, on which device; checks that no two actors use one at a time."""

    def __init__(self) -> None:
        self.uses: list[tuple[float, float, int, str]] = []
        self.moves: list[str] = []

    def used(self, start: float, role: Role) -> None:
        now = asyncio.get_running_loop().time()
        self.uses += [(start, now, device, role._cell.name) for device in role.devices]

    def check(self) -> None:
        for device in {use[2] for use in self.uses}:
            mine = sorted((start, end, name) for start, end, at, name in self.uses if at == device)
            for (_, end, name), (start, _, other) in itertools.pairwise(mine):
                assert name == other or end <= start, f"{name} and {other} both used device {device} at {start}"

    def order(self) -> list[str]:
        """Who used a device, in order, each turn once."""
        names = [name.partition("[")[0] for _, _, _, name in sorted(self.uses)]
        return [name for name, _ in itertools.groupby(names)]


book = Book()


class Role(Actor):
    """Works for a while on its devices; takes a second to move on or off them."""

    async def setup(self, seconds: float = 1.0, move: float = 0.0) -> None:
        tenants = self.system._network.system(0).service.manager._residency
        name = self._cell.name
        self.devices = sorted(tenants.tenant(name).devices) if name in tenants else []
        self.seconds, self.move = seconds, move

    async def onload(self) -> None:
        await asyncio.sleep(self.move)
        book.moves.append(f"+{self._cell.name}")

    async def offload(self) -> None:
        await asyncio.sleep(self.move)
        book.moves.append(f"-{self._cell.name}")

    async def work(self, seconds: float | None = None) -> None:
        start = asyncio.get_running_loop().time()
        await asyncio.sleep(self.seconds if seconds is None else seconds)
        book.used(start, self)

    @endpoint(device=True)
    async def compute_on(self, value: Any = None) -> Any:
        await self.work()
        return value

    @endpoint(device=True)
    async def batch(self, values: list[Any]) -> list[Any]:
        await self.work(0.1 * len(values))
        return values

    @endpoint
    async def aside(self, value: Any = None) -> Any:
        await asyncio.sleep(self.seconds)
        return value

    @endpoint(device=True)
    async def generate(self, items: Any) -> AsyncIterator[Any]:
        async for item in each(items):
            await self.work()
            yield item

    @endpoint(device=True)
    async def consume(self, items: Any) -> list[Any]:
        got = []
        async for item in each(items):
            await self.work()
            got.append(item)
        return got

    @endpoint(device=True)
    async def fail(self) -> None:
        await self.work()
        raise ValueError("device work went wrong")


async def each(items: Any) -> AsyncIterator[Any]:
    if isinstance(items, Stream):
        async for item in items:
            yield item
    else:
        for item in items:
            yield item


def run(
    main: Callable[[ActorSystem], Coroutine[Any, Any, None]],
    *,
    hosts: int = 2,
    memory: dict[int, int] | None = None,
    serialize: bool = False,
) -> float:
    """Run a program in virtual time; returns its seconds. No lease may be left, and no device used by two at a time."""
    book.uses.clear()
    book.moves.clear()

    async def whole() -> None:
        async with ActorSystem.local(hosts, device_memory=memory, serialize=serialize) as system:
            await main(system)
            await nothing_held(system)

    _, seconds = run_virtual(whole())
    book.check()
    return seconds


async def nothing_held(system: ActorSystem) -> None:
    service = system.service
    for _ in range(20):
        await asyncio.sleep(0)
    assert (service.manager.waiting(), service.manager.holders()) == ([], [])
    assert (service._tickets, service._groups) == ({}, {})


async def role(
    system: ActorSystem, name: str, devices: Any, *, hosts: Any = None, seconds: float = 1.0, **more: Any
) -> Any:
    """Spawn a role with one rank per entry of `devices`."""
    hosts = [rank % system.hosts for rank in range(len(devices))] if hosts is None else hosts
    return await system.spawn(Role, hosts=hosts, name=name, devices=devices, seconds=seconds, **more)
