"""Tail migration: towards the end of a `generate`, ranks with little left hand it over, so that their devices are free.

Flows in: from every rank that has read its last prompt, what it has left, whenever that changes (`rescale_tell`, to
rank 0). Flows out: partial groups, from rank to rank. Who wakes whom: a report wakes rank 0, which decides
(`placement/tail_migration.py`) and has ranks hand over (`rescale_hand_over`); a rank that does stops its answers where
they are and gives them to others (`rescale_take`), which continue them. What another rank does not take, its own rank
answers. A rank with nothing left ends its `generate`, and with it its lease.

No sample is changed by that: its random numbers are counted by token. Its tokens so far are read again, so log-probs
are the same up to rounding, as they are whenever other rows share a batch. (Where weights changed since it began, the
tokens that the old ones made are then read with the new ones; without a migration they are not, unless the engine
rereads.) `python -m benchmarks.rescale` measures what it gains.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlinf.actors.in_flight import Generation, InFlight, PartialGroup
from rlinf.engines.base import Engine, StepStats
from rlinf.placement.rescale import DecodeCost, Load, Move, consolidate, fit
from rlinf.runtime.actor.actor import Actor, endpoint
from rlinf.runtime.base.calls import current_call
from rlinf.runtime.streams.stream import Stream

logger = logging.getLogger(__name__)

Key = tuple[Any, ...]
"""Names one call of `generate` on the group, the same on all its ranks."""


@dataclass(frozen=True, slots=True)
class Report:
    """What one rank has left of one `generate`."""

    rank: int
    """Whose."""
    number: int
    """Counts the reports of a rank: one that was overtaken is not believed."""
    load: Load | None
    """None: it has ended."""
    stays: bool
    """It neither gives nor takes any more."""
    version: int
    """Of its weights."""
    stats: StepStats
    """How fast its engine is."""


@dataclass(slots=True, eq=False)
class Table:
    """What rank 0 knows of one `generate`."""

    reports: dict[int, Report] = field(default_factory=dict)
    """The newest of each rank that has read its last prompt."""
    moving: bool = False
    """Ranks are handing over."""

    def note(self, report: Report) -> None:
        """Believe it, if it is the newest of its rank."""
        known = self.reports.get(report.rank)
        if known is None or known.number < report.number:
            self.reports[report.rank] = report

    @property
    def over(self) -> bool:
        """All ranks that are known have ended."""
        return all(report.load is None for report in self.reports.values())

    @property
    def law(self) -> DecodeCost | None:
        """How fast all engines together are."""
        return fit([sum(each) for each in zip(*(report.stats for report in self.reports.values()), strict=True)])

    def loads(self) -> list[Load]:
        """Of ranks that may give and take: those with the newest weights, since an answer's versions never fall."""
        newest = max(report.version for report in self.reports.values())
        able = [one for one in self.reports.values() if one.version == newest and not one.stays]
        return [report.load for report in able if report.load is not None and report.load.bundles]


class TailMigration(Actor):
    """Base class of rollouts whose ranks hand answers over to each other."""

    _engine: Engine

    def __init__(self) -> None:
        super().__init__()
        self._in_flight = InFlight()
        self._tables: dict[Key, Table] = {}
        self._reports = itertools.count()

    # What every rank does ----------------------------------------------------------------------------------------

    def _key(self, prompts: Any) -> Key | None:
        """The name of the running `generate`; None if its ranks have no stream of prompts in common, or it is alone.

        The calls of a group are made in one go, so their numbers follow one another; those of two groups never do.
        """
        call = current_call.get()
        if self.world_size == 1 or call is None or not isinstance(prompts, Stream):
            return None
        return (prompts.handle.owner, prompts.handle.id, call.caller, call.number - self.rank)

    def _tell(self, key: Key | None) -> None:
        """Tell rank 0 what is left, once the prompts have come to their end; a message that nobody has to wait for."""
        call = None if key is None else self._in_flight.calls.get(key)
        if call is not None and call.exhausted:
            self.group[0].rescale_tell(key, self._report(call))

    def _report(self, call: Generation | None) -> Report:
        load = None if call is None or call.over else call.load(self.rank)
        stays = call is None or call.stays or call.aborted
        return Report(self.rank, next(self._reports), load, stays, self._engine.version, self._engine.stats)

    @endpoint
    async def rescale_hand_over(self, key: Key, moves: Sequence[Move]) -> list[Report]:
        """Rank 0 has decided: give groups to others. Returns what each rank concerned has left then."""
        call = self._in_flight.calls.get(key)
        if call is None or call.over:
            return [self._report(call)]
        reports: list[Report] = []
        await asyncio.wait([call.run(self._hand_over(key, call, moves, reports))])
        return [self._report(call), *reports]

    async def _hand_over(self, key: Key, call: Generation, moves: Sequence[Move], reports: list[Report]) -> None:
        taken = await call.take_out({id for move in moves for id in move.bundles})
        for move in moves:
            groups = [taken[id] for id in move.bundles if id in taken]
            try:
                report = await self.group[move.target].rescale_take(key, groups, self._engine.version)
            except Exception as error:
                # It goes on here, so that nothing is lost; what is wrong there will end the call, if anything is.
                logger.warning(
                    "rollout rank %d (host %d) keeps %d groups: rank %d (host %d) did not take them: %s: %s",
                    self.rank, self.host, len(groups), move.target, self.group.hosts[move.target],
                    type(error).__name__, error,
                )  # fmt: skip
                report = None
            if report is None:
                call.stays = True
                call.take_in(groups)
            else:
                reports.append(report)

    @endpoint
    async def rescale_take(self, key: Key, groups: Sequence[PartialGroup], version: int) -> Report | None:
        """Go on with groups of another rank, whose weights are of this version; None if that is too late.

        An older version than those would have to make newer tokens.
        """
        call = self._in_flight.calls.get(key)
        if call is None or call.over or self._engine.version < version:
            return None
        call.take_in(groups)
        return self._report(call)

    # What rank 0 does --------------------------------------------------------------------------------------------

    @endpoint
    async def rescale_tell(self, key: Key, report: Report) -> None:
        """A rank says what it has left; decide who is to hand over, until nobody is."""
        table = self._tables.setdefault(key, Table())
        table.note(report)
        if table.moving:
            return
        table.moving = True
        try:
            while moves := self._decide(table):
                orders = [self.group[source].rescale_hand_over(key, own) for source, own in moves.items()]
                for told in await asyncio.gather(*orders):
                    for each in told:
                        table.note(each)
        finally:
            table.moving = False
            if table.over:
                self._tables.pop(key, None)

    def _decide(self, table: Table) -> Mapping[int, Sequence[Move]]:
        """Moves by their source."""
        law, loads = table.law, table.loads()
        if law is None or len(loads) < 2:
            return {}
        moves: dict[int, list[Move]] = {}
        for move in consolidate(loads, law):
            moves.setdefault(move.source, []).append(move)
        return moves
