"""Modelled actors of a rehearsal: endpoints of real ones, which sleep for the time that the work would take.

Endpoints of the roles of this package as a table, so that a rehearsal need not import torch.

Flows in: a role's name, or the class of an actor. Flows out: its endpoints as the runtime sees them.
`tests/placement/simulator/test_simulate.py` holds this table against the classes.

State that the modelled ranks of a role share: its cost, how a step divides over its endpoints, and a record of its
work.

Who wakes whom: an order of rank 0 wakes the ranks that work in step with it.

Modelled actors: they have the endpoints of real ones and sleep for the time that the work would take.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rlinf.placement.simulated_costs import Company, RoleCost, lengths
from rlinf.runtime.actor.actor import Actor, Endpoint, endpoint
from rlinf.runtime.base.calls import Gang, current_call, lease_here
from rlinf.runtime.base.tasks import cancel_all
from rlinf.runtime.streams.stream import Consumer, Stream

WEIGHTS = frozenset({"load", "follow"})
"""Endpoints that take new weights: their time is that of the weight synchronisation."""
FREE = frozenset(
    {"weights", "observe", "trajectory", "live", "remember", "version", "reset", "shapes", "save", "restore"}
)
"""Endpoints whose time is not worth telling apart from that of the others of their role."""
HEAVY = {"train": 3.0}
"""Work of an endpoint relative to others of its role: to learn is a forward and a backward pass, about three times a
forward pass (the backward pass computes two products where the forward pass computes one)."""


def _of(text: str) -> dict[str, Endpoint]:
    """Read `generate:stream,device load:joint`."""
    specs = {}
    for entry in text.split():
        name, _, marks = entry.partition(":")
        has = set(marks.split(","))
        streams = "stream" in has
        gang = "gang" in has if streams else True
        specs[name] = Endpoint(name, streams, "device" in has, gang, "joint" in has)
    return specs


ROLES: dict[str, dict[str, Endpoint]] = {
    "rollout": _of("generate:stream,device load:joint"),
    "judge": _of("score"),
    "reward_model": _of("score:stream,device"),
    "reference": _of("logprobs:stream,device load:joint follow:joint"),
    "teacher": _of("logprobs:stream,device load:joint follow:joint"),
    "critic": _of("values:stream,device,gang train:device,joint load:device,joint"),
    "trainer": _of("train:device,joint weights:device,joint"),
    "env": _of("reset:device observe:device step:device"),
    "policy": _of("act:device trajectory:device load:joint"),
    "world": _of("reset:device observe:device step:device load:joint"),
    "world_trainer": _of("fit:device,joint weights:device,joint"),
}
"""By the name under which flows take the role."""
LEARNER = _of("train:device,joint weights:device,joint learn:device,joint remember:device,joint")
"""Of a trainer that learns off-policy."""


class Unnamed(dict[str, Endpoint]):
    """Endpoints of a role of which nothing is known: whatever a flow calls is a joint call that uses devices."""

    def get(self, name: str, default: object = None) -> Endpoint:
        """Return the endpoint; there is every one."""
        return self.setdefault(name, Endpoint(name, False, True, True, True))


def endpoints_of(role: str, actors: Mapping[str, type[Actor]]) -> dict[str, Endpoint] | None:
    """Return the endpoints of a role: those of its class if that is given, else those of the role of this name."""
    if role in actors:
        return dict(actors[role].endpoints)
    if role == "trainer":
        return {**ROLES["trainer"], **LEARNER}
    return ROLES.get("teacher" if role.startswith("teacher_") else role)


@dataclass(frozen=True, slots=True)
class Item:
    """A unit of a rehearsal's flow; it stands for as many prompts, groups or trajectories as a step has per item of the
    rehearsal."""

    id: int
    """Which, from 0."""
    departure: float = 0.0
    """When it left the role that made it, in virtual seconds."""
    source: str = ""
    """The role that made it; empty for a prompt."""

    @property
    def prompt(self) -> Item:
        """The prompt that this answers, which has the same id."""
        return self


@dataclass(slots=True)
class Demand:
    """Calls and items that one role got in a step, by endpoint."""

    calls: Counter[str] = field(default_factory=Counter)
    """How often, over all ranks."""
    items: Counter[str] = field(default_factory=Counter)
    """How many items it took, over all ranks."""

    def shares(self) -> dict[str, float]:
        """Return which share of the role's time each endpoint takes; they add up to 1."""
        worked = [name for name in self.calls if name not in FREE | WEIGHTS]
        # environments that are only reset still simulate, so what is free otherwise counts where there is nothing else
        names = worked or [name for name in self.calls if name not in WEIGHTS]
        total = sum(HEAVY.get(name, 1.0) for name in names)
        return {name: HEAVY.get(name, 1.0) / total for name in names}


class Rounds:
    """Orders of rank 0 for one call of all ranks, which work on them in step."""

    def __init__(self) -> None:
        self._orders: list[float] = []
        self._over = False
        self._changed = asyncio.Event()

    def order(self, seconds: float) -> None:
        """Have all other ranks work for so long, now."""
        self._orders.append(seconds)
        self._wake()

    def close(self) -> None:
        """No more orders come."""
        self._over = True
        self._wake()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def order_number(self, number: int) -> float | None:
        """Wait for an order; None: there were fewer."""
        while len(self._orders) <= number:
            if self._over:
                return None
            await self._changed.wait()
        return self._orders[number]


class RoleModel:
    """One role of a rehearsal.

    Args:
        cost: what it costs.
        ranks: into how many processes its devices are divided.
        items: of a step of the rehearsal.
        asked: what a trial of the flow showed; None in the trial itself, which takes no time.
        asked_items: items of a step of that trial.
    """

    def __init__(self, cost: RoleCost, ranks: int, items: int, demand: Demand | None, asked_items: int = 1):
        self.cost, self.ranks, self.items = cost, ranks, items
        self.demand = Demand()
        self.at_a_time = max(1, round(cost.at_a_time * items))
        self.busy: dict[tuple[int, str], list[list[float]]] = defaultdict(list)
        self.moves: list[tuple[int, str, float, float]] = []
        """(rank, "onload" or "offload", start, end), of all steps, in the order of their ends."""
        self._shares = demand.shares() if demand is not None else {}
        self._trial = demand
        self._trial_items = asked_items
        self._rounds: dict[Gang | None, Rounds] = {}
        self._links = dict.fromkeys(cost.transfers, 0.0)

    def forget(self) -> None:
        """A new step begins: what was recorded is of an earlier one."""
        self.demand = Demand()
        self.busy.clear()
        self._rounds.clear()

    def took(self, endpoint: str, items: int = 0) -> None:
        """Note a call of an endpoint, or items that it took."""
        if items:
            self.demand.items[endpoint] += items
        else:
            self.demand.calls[endpoint] += 1

    def seconds(self, endpoint: str, count: int, chunk: int | None = None) -> float:
        """Seconds of an endpoint for items of the whole role.

        Args:
            endpoint: which.
            count: of items.
            chunk: they are part of a chunk of so many, whose time is divided evenly.
        """
        share = self._share(endpoint)
        if not share or self._trial is None:
            return 0.0
        times = self._trial.items[endpoint] / self._trial_items  # that each item comes to this endpoint in a step
        of = chunk or count
        return self.cost.seconds(of / self.items) * count / of * share / max(times, 1e-9)

    def call_seconds(self, endpoint: str) -> float:
        """Seconds of a call that takes no items: its part of the endpoint's time, the ranks working side by side."""
        if endpoint in WEIGHTS:
            return self.cost.sync_seconds
        share = self._share(endpoint)
        if not share or self._trial is None:
            return 0.0
        return self.cost.seconds(1.0) * share * self.ranks / self._trial.calls[endpoint]

    def company(self, endpoint: str, ranks: int) -> Company:
        """Return what one of so many ranks works on, with nothing on it."""
        release, seconds = self.cost.release, self.seconds(endpoint, self.items)
        assert release is not None
        longest = min(self.cost.longest, seconds)
        return Company(lengths(release, seconds, longest, -(-self.items // ranks)), seconds - longest, longest)

    def _share(self, endpoint: str) -> float:
        return self._shares.get(endpoint, 0.0)

    def rounds(self, gang: Gang | None) -> Rounds:
        """Return the orders of a call; the first who asks makes them."""
        return self._rounds.setdefault(gang, Rounds())

    def arrival(self, items: Sequence[Item]) -> float:
        """Return when these items, taken now, have come over the links from their sources, one at a time."""
        latest = 0.0
        for item in items:
            if item.source in self._links:
                each = self.cost.transfers[item.source] / self.items
                latest = self._links[item.source] = max(self._links[item.source], item.departure) + each
        return latest

    def worked(self, rank: int, endpoint: str, start: float, end: float) -> None:
        """Record work; what follows on at once is one piece."""
        pieces = self.busy[rank, endpoint]
        if pieces and pieces[-1][1] == start:
            pieces[-1][1] = end
        elif end > start:
            pieces.append([start, end])


async def orders(rounds: Rounds) -> AsyncIterator[float]:
    """The orders of a call, as they are given."""
    number = 0
    while (seconds := await rounds.order_number(number)) is not None:
        yield seconds
        number += 1


async def until(when: float) -> None:
    """Wait until a time of the loop's clock, to the last bit."""
    loop = asyncio.get_running_loop()
    if when > loop.time():
        reached = loop.create_future()
        timer = loop.call_at(when, reached.set_result, None)
        try:
            await reached
        finally:
            timer.cancel()


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
        """The company that it decodes."""
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

    async def _answer(self, spec: Endpoint, arguments: tuple[Any, ...]) -> Any:
        """A call that comes to one value."""
        model, name = self._model, spec.name
        model.took(name)
        stream, items = _inputs(arguments)
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
        single = isinstance(arguments[0], Item)
        if spec.joint and not single:  # every rank does its part of all of them at the same time
            await self._busy(name, model.seconds(name, len(items)))
            return {}
        # One of a map: the ranks take items side by side, each so much slower than all of them together.
        await self._busy(name, model.ranks * model.seconds(name, len(items), max(model.at_a_time, len(items))))
        outputs = self._leave(items)
        return outputs[0] if single else outputs

    async def _stream(self, spec: Endpoint, arguments: tuple[Any, ...]) -> AsyncGenerator[Item, None]:
        """A call that comes to a stream."""
        self._model.took(spec.name)
        stream, items = _inputs(arguments)
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
                    batch = [item for _, item in coming.result()]
                    model.took(name, len(batch))
                    items |= {item.id: item for item in batch}
                    company.add(loop.time(), [item.id for item in batch])
                    coming = asyncio.create_task(consumer.take(), name="items that come") if batch else None
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


def _inputs(arguments: tuple[Any, ...]) -> tuple[Stream[Any] | None, list[Item]]:
    """The stream among the arguments of a call, or the items."""
    for argument in arguments:
        if isinstance(argument, Stream):
            return argument, []
        if isinstance(argument, Item):
            return None, [argument]
        if isinstance(argument, (list, tuple)) and argument and all(isinstance(one, Item) for one in argument):
            return None, list(argument)
    return None, []


def model_class(role: str, specs: Mapping[str, Endpoint] | None, *, on_devices: bool) -> type[Modelled]:
    """Make the class of a modelled role.

    Args:
        role: its name.
        specs: its endpoints, as the real ones are; None: not known, it answers to everything.
        on_devices: the plan gives it devices, so that work takes a lease whether or not the real endpoint does.
    """
    if specs is None:
        actor: type[Modelled] = type(role, (Anything,), {})
        actor.endpoints = Unnamed()
        return actor
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
