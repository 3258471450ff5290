"""Modelled actors: they have the endpoints of real ones and sleep for the time that the work would take.

Flows in: calls and items from the real flow, over the real runtime. Flows out: the same items, later. Who wakes whom:
items and leases, as for a real actor; the ranks of a gang work on what rank 0 orders.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rlinf.runtime.actor.actor import Actor, Endpoint, endpoint
from rlinf.runtime.base.calls import current_call, lease_here
from rlinf.runtime.base.tasks import cancel_all
from rlinf.runtime.streams.consumer import Consumer
from rlinf.runtime.streams.stream import Stream

from .decoding import Company
from .endpoints import FREE, WEIGHTS, Unnamed
from .models import Item, RoleModel, Rounds, orders, until


class Modelled(Actor):
    """Base of all modelled roles; `modelled` gives it endpoints."""

    async def setup(self, *, model: RoleModel, parks: bool, company: bool) -> None:  # type: ignore[override]
        """Take part in a rehearsal.

        Args:
            model: what all ranks of the role share.
            parks: it has to make room for others; if not, that it is loaded once takes no time.
            company: items of several steps may be at work at once.
        """
        self._model, self._parks, self._company = model, parks, company
        self._turn = asyncio.Lock()
        self._at_work: Company | None = None
        """What it decodes."""
        self._paused = 0.0
        """Seconds by which the piece of work in hand is held up."""

    async def onload(self) -> None:
        """Take the seconds that loading takes."""
        await self._moving("onload", self._model.cost.onload_seconds)

    async def offload(self) -> None:
        """Take the seconds that parking takes."""
        await self._moving("offload", self._model.cost.offload_seconds)

    async def _moving(self, what: str, seconds: float) -> None:
        start = asyncio.get_running_loop().time()
        end = start + (seconds if self._parks else 0.0)
        await until(end)
        self._model.moves.append((self.rank, what, start, end))

    # Answers -----------------------------------------------------------------------------------------------------

    async def _answer(self, spec: Endpoint, given: tuple[Any, ...]) -> Any:
        """A call that comes to one value."""
        model, name = self._model, spec.name
        model.took(name)
        stream, items = _inputs(given)
        if stream is not None:
            passed = [item async for item in self._through(spec, stream)]
            return {} if spec.joint else passed
        if not items and self._company and name in WEIGHTS:
            await self._taking_weights(model.call_seconds(name))
            return {} if spec.joint else None
        if not items:
            await self._busy(name, model.call_seconds(name))
            return {} if spec.joint else None
        model.took(name, len(items))
        await self._arrived(items)
        single = isinstance(given[0], Item)
        if spec.joint and not single:  # every rank does its part of all of them at the same time
            await self._busy(name, model.seconds(name, len(items)))
            return {}
        # One of a map: the ranks take items side by side, each so much slower than all of them together.
        await self._busy(name, model.ranks * model.seconds(name, len(items), max(model.at_a_time, len(items))))
        made = self._leave(items)
        return made[0] if single else made

    async def _stream(self, spec: Endpoint, given: tuple[Any, ...]) -> AsyncGenerator[Item, None]:
        """A call that comes to a stream."""
        self._model.took(spec.name)
        stream, items = _inputs(given)
        if stream is None:
            stream = Stream.of(items, name="given")
        async with contextlib.aclosing(self._through(spec, stream)) as through:
            async for item in through:
                yield item

    async def _through(self, spec: Endpoint, stream: Stream[Any]) -> AsyncGenerator[Item, None]:
        if spec.gang and self.world_size > 1:
            call = current_call.get()
            rounds = self._model.rounds(call.gang if call is not None else None)
            if self.rank:
                await self._follow(spec.name, rounds)
                return
            try:
                async for item in self._chunks(spec.name, stream, 1, rounds):
                    yield item
            finally:
                rounds.close()
        elif self._model.cost.release is not None and spec.streams:
            released = self._decoded if self._company and self._model.cost.longest else self._released
            async for item in released(spec.name, stream):
                yield item
        else:
            async for item in self._chunks(spec.name, stream, 1 if spec.joint else self.world_size, None):
                yield item

    # Work --------------------------------------------------------------------------------------------------------

    async def _chunks(
        self, name: str, stream: Stream[Any], ranks: int, rounds: Rounds | None
    ) -> AsyncGenerator[Item, None]:
        """Take so many items at a time, and let them go together.

        Args:
            ranks: that take items side by side.
            rounds: of the ranks that work in step with this one.
        """
        model = self._model
        most = max(1, model.at_a_time // ranks)
        consumer: Consumer[Item] = Consumer(stream, prefetch=False, most=most)
        while True:
            async with self._waiting():
                with _without_lease():  # the others ask for the devices again only once they have their orders
                    items = [item for _, item in await consumer.take()]
                    await self._arrived(items)
                seconds = model.seconds(name, len(items) * ranks) if items else 0.0
                if rounds is not None and items:
                    rounds.order(seconds)
                elif rounds is not None:
                    rounds.close()
            if not items:
                return
            model.took(name, len(items))
            await self._busy(name, seconds)
            for item in self._leave(items):
                yield item

    async def _follow(self, name: str, rounds: Rounds) -> None:
        """Work in step with rank 0."""
        coming = orders(rounds)
        while True:
            async with self._waiting():
                seconds = await anext(coming, None)
            if seconds is None:
                return
            await self._busy(name, seconds)

    async def _released(self, name: str, stream: Stream[Any]) -> AsyncGenerator[Item, None]:
        """Take this rank's part of all items of a step, and let each go when the release curve says.

        The k-th item of rank r of R is the (k R + r)-th of all: every engine has its part of the tail.
        """
        model = self._model
        part = -(-model.items // self.world_size)
        consumer: Consumer[Item] = Consumer(stream, prefetch=False, most=part)
        while items := [item for _, item in await consumer.take()]:
            model.took(name, len(items))
            await self._arrived(items)
            everywhere = model.items if len(items) == part else len(items) * self.world_size
            makespan, release = model.seconds(name, everywhere), model.cost.release
            assert release is not None
            async with self._holding():
                start = asyncio.get_running_loop().time()
                for k, item in enumerate(items):
                    number = min(k * self.world_size + self.rank + 1, everywhere)
                    await until(start + makespan * release.at(number / everywhere))
                    yield self._leave([item])[0]
                await until(start + makespan)
            model.worked(self.rank, name, start, asyncio.get_running_loop().time())

    async def _decoded(self, name: str, stream: Stream[Any]) -> AsyncGenerator[Item, None]:
        """Work on all items at once, as they come, in each other's company; on devices that nobody else has."""
        model, loop = self._model, asyncio.get_running_loop()
        company = self._at_work = model.company(name, self.world_size)
        consumer: Consumer[Item] = Consumer(stream, prefetch=False, most=-(-model.items // self.world_size))
        items: dict[int, Item] = {}
        coming: asyncio.Task[Any] | None = asyncio.create_task(consumer.take(), name="items that come")
        try:
            while coming is not None or company.next is not None:
                start, next_end = loop.time(), company.next
                if coming is not None:
                    await asyncio.wait([coming], timeout=None if next_end is None else max(0.0, next_end - start))
                else:
                    await until(next_end or start)
                now = loop.time()
                if next_end is not None and company.since <= now:
                    model.worked(self.rank, name, max(start, company.since), now)
                for id in company.leave(now):
                    yield self._leave([items.pop(id)])[0]
                if coming is not None and coming.done():
                    taken = [item for _, item in coming.result()]
                    model.took(name, len(taken))
                    items |= {item.id: item for item in taken}
                    company.add(loop.time(), [item.id for item in taken])
                    coming = asyncio.create_task(consumer.take(), name="items that come") if taken else None
        finally:
            self._at_work = None
            if coming is not None:
                await cancel_all([coming])

    async def _taking_weights(self, seconds: float) -> None:
        """Pause what is under way for so long, and let it go on."""
        now = asyncio.get_running_loop().time()
        if self._at_work is not None:
            self._at_work.pause(now, seconds)
        elif self._turn.locked():
            self._paused += seconds
        await until(now + seconds)

    async def _busy(self, name: str, seconds: float) -> None:
        """Use the devices for so long; one piece of work at a time."""
        if not seconds and name in FREE:
            return
        async with self._turn, self._holding():
            start = asyncio.get_running_loop().time()
            await until(start + seconds)
            self._model.worked(self.rank, name, start, start + seconds)
            while self._paused:
                paused, self._paused = self._paused, 0.0
                await asyncio.sleep(paused)

    async def _arrived(self, items: Sequence[Item]) -> None:
        await until(self._model.arrival(items))

    def _leave(self, items: Sequence[Item]) -> list[Item]:
        now, name = asyncio.get_running_loop().time(), self._model.cost.name
        return [Item(item.id, now, name) for item in items]

    def _holding(self) -> contextlib.AbstractAsyncContextManager[None]:
        """In it the devices are kept, as while a real actor computes."""
        lease = lease_here()
        return lease.computing() if lease is not None else contextlib.nullcontext()

    def _waiting(self) -> contextlib.AbstractAsyncContextManager[None]:
        """In it others may have the devices."""
        lease = lease_here()
        return lease.waiting() if lease is not None else contextlib.nullcontext()


@contextlib.contextmanager
def _without_lease() -> Any:
    """In it a stream is read as by somebody who holds no devices."""
    token = current_call.set(None)
    try:
        yield
    finally:
        current_call.reset(token)


def _inputs(given: tuple[Any, ...]) -> tuple[Stream[Any] | None, list[Item]]:
    """The stream among the arguments of a call, or the items."""
    for argument in given:
        if isinstance(argument, Stream):
            return argument, []
        if isinstance(argument, Item):
            return None, [argument]
        if isinstance(argument, (list, tuple)) and argument and all(isinstance(one, Item) for one in argument):
            return None, list(argument)
    return None, []


def modelled(role: str, specs: Mapping[str, Endpoint] | None, *, on_devices: bool) -> type[Modelled]:
    """Make the class of a modelled role.

    Args:
        role: its name.
        specs: its endpoints, as the real ones are; None: not known, it answers to everything.
        on_devices: the plan gives it devices, so that work takes a lease whether or not the real endpoint does.
    """
    if specs is None:
        made: type[Modelled] = type(role, (Anything,), {})
        made.endpoints = Unnamed()
        return made
    return type(role, (Modelled,), {name: _method(_placed(spec, on_devices)) for name, spec in specs.items()})


class Anything(Modelled):
    """A role of which nothing is known but its name."""

    def __getattr__(self, name: str) -> Any:
        """The method of an endpoint that a flow called."""
        spec = self.endpoints.get(name) if not name.startswith("_") else None
        if spec is None:
            raise AttributeError(name)
        return functools.partial(_method(spec), self)


def _placed(spec: Endpoint, on_devices: bool) -> Endpoint:
    device = on_devices and (spec.device or spec.name not in FREE | WEIGHTS)
    return replace(spec, device=device)


def _method(spec: Endpoint) -> Any:
    if spec.streams:

        async def method(self: Modelled, *args: Any, **kwargs: Any) -> Any:
            async with contextlib.aclosing(self._stream(spec, (*args, *kwargs.values()))) as items:
                async for item in items:
                    yield item

    else:

        async def method(self: Modelled, *args: Any, **kwargs: Any) -> Any:  # type: ignore[misc]
            return await self._answer(spec, (*args, *kwargs.values()))

    method.__name__ = method.__qualname__ = spec.name
    return endpoint(device=spec.device, gang=spec.gang, joint=spec.joint)(method)
