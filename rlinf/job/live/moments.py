"""What is measured for watchers, once a second: who does what, queues, memory, and lanes since the last time.

In: a `Watch`, which asks all hosts. Out: the messages `moment` and `lanes`. Who wakes whom: nobody; a host that does
not answer in time is told of as it was last seen, and asked again once it has answered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

from rlinf.metrics.html.lanes import LOADING, PARKING, WAITING
from rlinf.metrics.timing import activity_of
from rlinf.runtime.base.errors import ActorDied
from rlinf.runtime.base.tasks import cancel_all
from rlinf.runtime.observe.busy import Busy
from rlinf.runtime.observe.intervals import Interval, union, without
from rlinf.runtime.observe.recent import CALLED, closed
from rlinf.runtime.system.introspection import LookBack
from rlinf.runtime.system.observer import Watch

PATIENCE = 0.5
"""Seconds that a host has to answer: its event loop may be held up by what it does."""
FIRST = 1.0
"""Seconds that the first increment reaches back."""
MOST_ASKED = 32
"""Hosts that are asked at a time: of more, those that were asked longest ago. So a look costs the same on any number of
hosts, and of 64 each is seen every two seconds."""
DIGITS = 4
"""Of times in messages: a tenth of a millisecond."""
SHORTEST = 0.001
"""Seconds; shorter stretches are not told of: a minute is some thousand dots wide."""
_MOVES = {"onload": LOADING, "offload": PARKING}


class Moments:
    """Looks at a system, again and again, for as long as anybody watches.

    Args:
        watch: of the run's system.
    """

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._asked: dict[int, asyncio.Task[LookBack]] = {}
        self._seen: dict[int, LookBack] = {}
        self._lost: set[int] = set()
        self._since: dict[int, float] = {}

    def begin(self) -> None:
        """Somebody begins to watch: what was before concerns nobody."""
        self._since.clear()

    async def next(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The messages `moment` and `lanes` of now."""
        now = self._watch.now()
        free = [number for number in self._watch.machines if number not in self._asked and number not in self._lost]
        free.sort(key=lambda number: self._since.get(number, -1.0))  # stable: else in the order of their numbers
        for number in free[: max(0, MOST_ASKED - len(self._asked))]:
            since = self._since.setdefault(number, now - FIRST)
            self._asked[number] = asyncio.create_task(self._watch.look_back(number, since), name="live look")
        if self._asked:
            await asyncio.wait([*self._asked.values()], timeout=PATIENCE)
        answered = [self._take(number) for number, asked in [*self._asked.items()] if asked.done()]
        found = [each for each in answered if each is not None]
        start = min((back.start for _, back in found), default=now)
        end = max((back.end for _, back in found), default=now)
        lanes = [lane for number, back in found for lane in lanes_of(number, back.busy)]
        time = round(self._watch.now(), DIGITS)
        moment = {"kind": "moment", "time": time, **self._told()}
        return moment, {"kind": "lanes", "start": round(start, DIGITS), "end": round(end, DIGITS), "lanes": lanes}

    async def close(self) -> None:
        """Ask no more."""
        await cancel_all([*self._asked.values()])
        self._asked.clear()

    def _take(self, number: int) -> tuple[int, LookBack] | None:
        try:
            back = self._asked.pop(number).result()
        except ActorDied:  # the run itself fails by that, with its cause
            self._lost.add(number)
            self._seen.pop(number, None)
            return None
        self._since[number] = back.end
        self._seen[number] = back
        return number, back

    def _told(self) -> dict[str, Any]:
        actors, queues = [], []
        memory: dict[str, dict[str, Any]] = {}
        for number, back in sorted(self._seen.items()):
            for state in back.actors:
                since = None if state.since is None else round(state.since, 2)
                actors.append({"actor": state.actor, "host": state.host, "doing": state.doing, "since": since})
            for queue in back.queues:
                queues.append(
                    {
                        "name": queue.name,
                        "host": number,
                        "ready": queue.ready,
                        "taken": queue.taken,
                        "put": queue.put,
                        "capacity": queue.capacity,
                        "waiting_to_take": queue.waiting_to_take,
                        "waiting_to_put": queue.waiting_to_put,
                    }
                )
            filled = back.memory
            one = {"host": number, "device": filled.device, "used": filled.used, "total": filled.total}
            memory.setdefault(filled.owner, one)
        return {"actors": actors, "queues": queues, "memory": [*memory.values()]}


def lanes_of(host: int, parts: Sequence[Busy]) -> Iterable[dict[str, Any]]:
    """What each actor of a host did, as activities with their times.

    Args:
        host: its number.
        parts: of `recent`.
    """
    by_actor: dict[str, dict[str, list[Interval]]] = {}
    called: dict[str, list[Interval]] = {}
    for part in parts:
        own = by_actor.setdefault(part.actor, {})
        if part.endpoint == CALLED:
            called[part.actor] = [*part.intervals]
        elif (activity := _MOVES.get(part.endpoint) or activity_of(part.actor, part.endpoint)) is not None:
            own.setdefault(activity, []).extend(part.intervals)
    for actor, own in by_actor.items():
        did = {activity: closed(times) for activity, times in own.items()}
        worked = union(interval for times in did.values() for interval in times)
        did[WAITING] = [*without(union(called.get(actor, ())), worked)]
        stretches = sorted(
            (round(start, DIGITS), round(end, DIGITS), activity)
            for activity, times in did.items()
            for start, end in times
            if end - start >= SHORTEST
        )
        yield {"host": host, "actor": actor, "stretches": [[name, start, end] for start, end, name in stretches]}
