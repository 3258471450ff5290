"""Leases as the hosts see them: the devices of a running call or map stage, held while it works, given away while it
waits and others want them.

Flows in: what the call or stage does: work, waits, items. Flows out: acquire and release of its actor's devices, which
the manager on the controller grants. Who wakes whom: word that the devices are wanted makes a holder that waits give
them, or one that has had its share of items or seconds; what it waited for, or enough `items`, makes it take them again
(see `base/calls.py`).

A call uses its devices from its first line to its last, except while it waits for a stream, or its own task for another
call; a late one only while it computes. A map stage uses them while it works on items. So a consumer never starves its
own producer, and a call may await another one that needs the same devices.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from rlinf.runtime.actor.actor import SHOWN_WAIT, Cell
from rlinf.runtime.base.calls import CONTROLLER, SERVICE, Call, Gang, Key, current_task
from rlinf.runtime.base.errors import ActorDied
from rlinf.runtime.base.tasks import cancel_all
from rlinf.runtime.observe.spans import DEVICES

if TYPE_CHECKING:
    from rlinf.runtime.actor.host import Host
    from rlinf.runtime.base.calls import Readable

LINGER = 0.01
"""Seconds for which devices that others want are kept without using them: what is waited for may be a message away,
and a switch costs more than this."""
QUANTUM = 0.5
"""Seconds for which a map with work at hand keeps its devices at least, though others wait."""
WORTH = 10.0
"""The same as a multiple of the time that the switch to it took: switching then costs at most a tenth or two."""


class DeviceLease:
    """State of a call of a device endpoint, or a map stage over one: whether it holds its actor's devices right now.

    Args:
        gang: a group call, with all ranks of which it takes its devices; None takes them alone.
        late: the call takes its devices when it computes, and gives them to others whenever it does not.
        stage: it is a map's, so work is what is done in `use`; otherwise, all that the call does.
        wanted: told when others wait for them.
    """

    def __init__(
        self,
        client: LeaseClient,
        cell: Cell,
        call: Call,
        *,
        gang: Gang | None = None,
        late: bool = False,
        stage: bool = False,
        wanted: Callable[[], None] | None = None,
    ):
        self._client, self._cell, self._call, self._gang = client, cell, call, gang
        self._late = late
        self.stage = stage
        self.role = call.role
        """The endpoint, without the rank."""
        self.puts = False
        """Its items are those that it puts out, not those that it takes."""
        self._tell = wanted
        self._ticket: Key | None = None
        self._since = 0.0
        self._share = math.inf  # seconds that a stage with work at hand may keep them, if others want them
        self._wanted = False
        self._over = False
        self._taking = asyncio.Lock()
        self._working: set[asyncio.Task[Any] | None] = set() if stage else {current_task()}
        self._computing = 0
        self._waiting = 0
        self._moves = 0  # waits that are over, and work begun
        self._offering: asyncio.Future[None] | None = None
        self._items = 0  # done since the devices were taken
        self._hand = 0  # items of those who wait for more
        self._more: asyncio.Future[None] | None = None
        self._worth = False  # there were enough items since the devices were given away

    # Taking and giving -------------------------------------------------------------------------------------------

    @property
    def released(self) -> bool:
        """It does not hold the devices, and is not over."""
        return self._ticket is None and not self._over

    async def ensure(self) -> None:
        """Hold the devices, waiting for them if they were given away."""
        if self._ticket is None:
            async with self._taking:
                if self._over:
                    raise ActorDied(f"{self._call.name} is over: what it began can use its devices no more")
                if self._ticket is None:
                    self._wanted = False
                    acquired = self._client.acquire(self._cell, self._call, gang=self._gang, wanted=self._now_wanted)
                    self._ticket, loading = await acquired
                    self._since, self._items, self._worth = self._client.now(), 0, False
                    self._share = max(QUANTUM, WORTH * loading) if self.stage else math.inf
                if self._over:
                    self._release()

    async def resume(self) -> None:
        """Hold the devices, unless they are taken when something is computed."""
        if not self._late:
            await self.ensure()

    def take_among(self, gang: Gang | None) -> None:
        """From now on take the devices together with other ranks, or alone, and late; what is held is given back.

        Args:
            gang: a group call, or a part of one, each rank of which asks before any of them has its devices; None asks
                for this rank's alone.
        """
        self._release()
        self._gang, self._late = gang, True

    def give(self) -> None:
        """Give the devices back, unless others of the same stage use them."""
        if len(self._working) < 2:
            self._release()

    def close(self) -> None:
        """The call is over: give the devices back for good."""
        self._over = True
        self._release()
        self._call.lease = None

    def _release(self) -> None:
        if self._ticket is not None:
            ticket, self._ticket = self._ticket, None
            self._client.release(ticket)
            self._client.span(self._cell, self._call, self._since)
        if self._offering is not None:
            self._offering.set_result(None)
            self._offering = None

    def _now_wanted(self) -> None:
        self._wanted = True
        if self._tell is not None:
            self._tell()
        self._rest()

    # Items -------------------------------------------------------------------------------------------------------

    async def enough(self, items: int, look: Callable[[int], Coroutine[Any, Any, None]]) -> None:
        """If the devices were given away, wait until the items at hand are worth taking them again.

        Args:
            items: that the caller has in hand. Those of all who wait here count together.
            look: waits until so many more are at hand, or all that will ever be.
        """
        self._hand += items
        self._stir()
        try:
            while self.released and not self._worth and (missing := self._cell.granularity.items - self._hand) > 0:
                self._more = self._more or asyncio.get_running_loop().create_future()
                looking = asyncio.ensure_future(look(missing))
                try:
                    await asyncio.wait([looking, self._more], return_when=asyncio.FIRST_COMPLETED)
                    if looking.done():
                        looking.result()
                        break
                finally:
                    await cancel_all([looking])
            self._worth = self.released
            self._stir()
        finally:
            self._hand -= items

    def _stir(self) -> None:
        if self._more is not None:
            self._more.set_result(None)
            self._more = None

    def done(self, items: int) -> None:
        """So many items were worked off."""
        self._items += items

    async def offer(self) -> None:
        """If others wait and it has had its share, give them the devices: at once, or when what is done beside this
        is done."""
        if self._due and self._used:
            if self._offering is None:
                self._offering = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._offering)
        elif self._due:
            self._release()

    @property
    def _due(self) -> bool:
        if not self._wanted or self._ticket is None:
            return False
        # Ranks that work in step cannot leave one by one: who stays may need the others to come to its own turn.
        if self._gang is not None and self._gang[2] > 1:
            return False
        most = self._cell.granularity.lease_items
        return self._client.now() - self._since >= self._share if most is None else self._items >= most

    # Working and waiting -----------------------------------------------------------------------------------------

    @asynccontextmanager
    async def use(self, items: int, look: Callable[[int], Coroutine[Any, Any, None]]) -> AsyncIterator[None]:
        """In it a stage works on so many items, with its devices; see `enough` for `look`."""
        await self.offer()
        await self.enough(items, look)
        await self.ensure()
        task = current_task()
        self._working.add(task)
        self._moves += 1
        try:
            yield
        finally:
            self._working.discard(task)
            self.done(items)
            self._rest()

    @asynccontextmanager
    async def computing(self) -> AsyncIterator[None]:
        """In it the devices are held, whoever wants them."""
        await self.ensure()
        self._computing += 1
        self._moves += 1
        try:
            yield
        finally:
            self._computing -= 1
            self._rest()

    @asynccontextmanager
    async def waiting(self) -> AsyncIterator[None]:
        """In it the running code waits for others: they may have the devices meanwhile, unless it computes beside."""
        task = current_task()
        works = task in self._working
        if self.stage and not works:  # between items, when it needs no devices
            yield
            return
        self._working.discard(task)
        self._waiting += 1
        self._rest()
        try:
            yield
        finally:
            self._waiting -= 1
            self._moves += 1
            if works:
                self._working.add(task)
        await self.resume()

    @property
    def blocked(self) -> bool:
        """The devices are held for the running code, which is about to wait for something else than a stream."""
        return self._ticket is not None and current_task() in self._working

    @property
    def _used(self) -> bool:
        """Somebody beside the running code works with them."""
        return self._computing > 0 or (self.stage and len(self._working) > 0)

    def _rest(self) -> None:
        """Give the devices to those who want them if nobody uses them now, unless the work goes on soon."""
        if not self._wanted or self._ticket is None or self._used:
            return
        idle = self._idle
        if self._offering is not None or (idle and self._due):
            self._release()
        elif idle:
            moves = self._moves
            asyncio.get_running_loop().call_later(LINGER, lambda: self._release_if_unmoved(moves))

    def _release_if_unmoved(self, moves: int) -> None:
        if self._moves == moves and self._wanted and not self._used and self._idle:
            self._release()

    @property
    def _idle(self) -> bool:
        """True if it need not hold devices now: what does not compute needs no devices."""
        return self.stage or self._late or self._waiting > 0


class LeaseClient:
    """Takes leases for the actors of one host."""

    def __init__(self, host: Host):
        self._host = host
        self._wanted: dict[Key, Callable[[], None]] = {}

    @asynccontextmanager
    async def hold(
        self,
        cell: Cell,
        call: Call,
        *,
        gang: bool,
        late: bool = False,
        inputs: Iterable[Any] = (),
        wanted: Callable[[], None] | None = None,
    ) -> AsyncIterator[None]:
        """Hold the devices of an actor; of its whole group if the call is part of a gang.

        Args:
            gang: with those of its whole group.
            late: see `DeviceLease`.
            inputs: the call's arguments. If there are streams among them, the devices are asked for when the first of
                these has as many items as the actor's `Granularity` says, or has ended: before that there is nothing,
                or too little, to do with them.
            wanted: called when others wait for these devices.
        """
        lease = DeviceLease(self, cell, call, gang=call.gang if gang else None, late=late, wanted=wanted)
        try:
            await self._work_at_hand(cell, call, inputs)
            await lease.resume()
            call.lease = lease
            yield
        finally:
            lease.close()
            if gang:
                self.over(call)

    def over(self, call: Call) -> None:
        """A rank's part of a group call has ended, however far it came: the others need not wait for it."""
        if call.gang is not None:
            gang, call.gang = call.gang, None
            self.rank_over(gang, call.name.rpartition(".")[0])

    def rank_over(self, gang: Gang, rank: str) -> None:
        """A rank of a group call needs its devices no more."""
        self._host.cast(CONTROLLER, SERVICE, "lease_over", gang, rank)

    async def _work_at_hand(self, cell: Cell, call: Call, inputs: Iterable[Any]) -> None:
        streams: list[Readable] = [each.handle for each in inputs if getattr(type(each), "__readable__", False)]
        if not streams:
            return
        call.doing = "waiting for work"
        items, host = cell.granularity.items, self._host
        looks = [asyncio.ensure_future(stream.rebind(host).at_hand(host.number(), items)) for stream in streams]
        try:
            await asyncio.wait(looks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            call.doing = None
            await cancel_all(looks)

    async def acquire(
        self, cell: Cell, call: Call, *, gang: Gang | None = None, wanted: Callable[[], None] | None = None
    ) -> tuple[Key, float]:
        """Wait for the devices; returns a ticket for `release`, and the seconds that loading the actor took."""
        host = self._host
        ticket = host.number()
        if wanted is not None:
            self._wanted[ticket] = wanted
        since = host.now()
        call.doing = "waiting for a lease"
        try:
            args = (ticket, cell.name, call.label, gang, wanted is not None)
            loading: float = await host.call(CONTROLLER, SERVICE, "lease_acquire", "lease", args, {})
        except BaseException:
            self.release(ticket)
            raise
        finally:
            call.doing = None
            if host.now() - since > SHOWN_WAIT:
                endpoint = call.name.rpartition(".")[2]
                host.tracer.span("wait", cell.name, endpoint, DEVICES, since, host.now())
        return ticket, loading

    def release(self, ticket: Key) -> None:
        """Give the devices back."""
        self._wanted.pop(ticket, None)
        self._host.cast(CONTROLLER, SERVICE, "lease_release", ticket)

    def now(self) -> float:
        """The host's clock."""
        return self._host.now()

    def span(self, cell: Cell, call: Call, since: float) -> None:
        """Record that the call held its actor's devices until now."""
        endpoint = call.name.rpartition(".")[2]
        self._host.tracer.span("lease", cell.name, endpoint, call.name, since, self._host.now())

    def wanted(self, ticket: Key) -> None:
        """Somebody waits for the devices of this lease."""
        if (tell := self._wanted.get(ticket)) is not None:
            tell()
