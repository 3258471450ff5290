"""What the modelled ranks of a role share: its cost, how a step divides over its endpoints, and a record of its work.

Flows in: the role's cost, and what a trial of the flow showed that the role is asked. Flows out: seconds for each piece
of work; when who worked and moved. Who wakes whom: an order of rank 0 wakes the ranks that work in step with it.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from rlinf.runtime.base.calls import Gang

from .costs import RoleCost
from .decoding import Company, lengths
from .endpoints import FREE, HEAVY, WEIGHTS


@dataclass(frozen=True, slots=True)
class Item:
    """What flows: it stands for as many prompts, groups or trajectories as a step has per item of the rehearsal."""

    id: int
    """Which, from 0."""
    left: float = 0.0
    """When it left the role that made it, in virtual seconds."""
    source: str = ""
    """The role that made it; empty for a prompt."""

    @property
    def prompt(self) -> Item:
        """What it is an answer to, which has the same id."""
        return self


@dataclass(slots=True)
class Asked:
    """What one role was asked in a step, by endpoint."""

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

    def __init__(self, cost: RoleCost, ranks: int, items: int, asked: Asked | None, asked_items: int = 1):
        self.cost, self.ranks, self.items = cost, ranks, items
        self.asked = Asked()
        self.at_a_time = max(1, round(cost.at_a_time * items))
        self.busy: dict[tuple[int, str], list[list[float]]] = defaultdict(list)
        self.moves: list[tuple[int, str, float, float]] = []
        """(rank, "onload" or "offload", start, end), of all steps, in the order of their ends."""
        self._shares = asked.shares() if asked is not None else {}
        self._trial = asked
        self._trial_items = asked_items
        self._rounds: dict[Gang | None, Rounds] = {}
        self._links = dict.fromkeys(cost.transfers, 0.0)

    def forget(self) -> None:
        """A new step begins: what was recorded is of an earlier one."""
        self.asked = Asked()
        self.busy.clear()
        self._rounds.clear()

    def took(self, endpoint: str, items: int = 0) -> None:
        """Note a call of an endpoint, or items that it took."""
        if items:
            self.asked.items[endpoint] += items
        else:
            self.asked.calls[endpoint] += 1

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
                latest = self._links[item.source] = max(self._links[item.source], item.left) + each
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
