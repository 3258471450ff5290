"""The job's end of one engine that joined: what it has under way, and whether its weights are the newest.

Flows in: requests, weights, questions; what the engine sends. Flows out: completions to the calls that asked. Who wakes
whom: what comes wakes the call that it is for, and `changed` of whoever shares work out.

An engine is given requests only while it has the newest weights, so that no answer begins with others; nobody waits for
it to have them. Answers that it has begun go on with the old ones until the new have come.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

from rlinf.data.weights import Weights
from rlinf.engines.base import Completion, Request, StepStats
from rlinf.joining.connection import Connection
from rlinf.joining.peer import Peer
from rlinf.runtime.base.errors import RuntimeFault


class MemberLost(RuntimeFault):
    """An engine that had joined is gone."""


class Asker(Protocol):
    """Whoever gave a request, and takes its answer or gets it back."""

    def took(self, completions: Sequence[Completion]) -> None:
        """Take answers."""
        ...

    def put_back(self, request: Request) -> None:
        """Take a request back that was not answered."""
        ...


class Member:
    """One engine that joined.

    Args:
        connection: to it.
        about: what it says of itself: `rows`, the answers that it decodes together, and its `name`.
        silence: seconds without a word, in which it was asked for one, after which it counts as lost.
        changed: called when it may take more, or less.
    """

    def __init__(
        self, connection: Connection, about: dict[str, Any], silence: float, changed: Callable[[], object]
    ) -> None:
        self.rows, self._peer = int(about["rows"]), Peer(connection, about["name"], silence)
        self.stats = StepStats()
        """How fast it is, as far as it has said."""
        self._connection, self._changed = connection, changed
        self._under_way: dict[int, tuple[Request, Asker]] = {}
        self._taken: set[int] = set()  # of those: asked back, so nobody else answers them when it is lost
        self._replies: dict[int, asyncio.Future[Any]] = {}
        self._over = False

    @property
    def current(self) -> bool:
        """It has the newest weights."""
        return self._peer.current

    @property
    def name(self) -> str:
        """Where it is."""
        return self._peer.name

    @property
    def version(self) -> int | None:
        """Version of its weights; None: those that the model came with."""
        return self._peer.version

    @property
    def load(self) -> float:
        """Share of its rows that are taken; above 1 where it has as many again waiting."""
        return len(self._under_way) / self.rows

    @property
    def ids(self) -> set[int]:
        """Ids of the requests that it has under way."""
        return {*self._under_way}

    def has(self, asker: Asker) -> bool:
        """It has requests of this asker under way."""
        return any(by is asker for _, by in self._under_way.values())

    def give(self, request: Request, asker: Asker) -> None:
        """Have it answer a request."""
        self._under_way[request.id] = (request, asker)
        self._connection.send("requests", [request])

    def outdate(self) -> None:
        """Give it no requests until newer weights have been published, and have come."""
        self._peer.outdate()

    def publish(self, weights: Weights) -> None:
        """Have it use these weights once they have come."""
        self._peer.publish(weights)

    def forget(self, asker: Asker) -> None:
        """Drop what this asker gave: it wants no answers any more."""
        if ids := {id for id, (_, by) in self._under_way.items() if by is asker}:
            for id in ids:
                del self._under_way[id]
            self._connection.send("abort", 0, ids)

    def forget_conversations(self, conversations: Collection[int] | None) -> None:
        """Have it keep nothing of these, None: of all."""
        self._connection.send("forget", 0, conversations)

    # Questions -------------------------------------------------------------------------------------------------------

    async def ask(self, what: str, ids: Collection[int] = ()) -> Any:
        """Its reply to a question.

        Raises:
            MemberLost: it was lost before it did.
        """
        if self._over:
            raise MemberLost(f"{self.name} is gone")
        number = next(self._peer.numbers)
        reply = self._replies[number] = asyncio.get_running_loop().create_future()
        self._connection.send(what, number, ids)
        try:
            return await reply
        finally:
            del self._replies[number]

    async def partial(self, ids: Collection[int]) -> list[Request]:
        """Those of these requests that it has under way, each with its tokens so far, as far as it says them."""
        mine = {id: self._under_way[id][0] for id in ids if id in self._under_way}
        if not mine:
            return []
        completed = set(mine)
        try:
            replies = {one.id: one for one in await self.ask("partial", set(mine))}
            completed -= self.ids
        except MemberLost:  # which has told nothing of them: they begin anew
            replies, completed = {}, set()
        return [replies.get(id, one) for id, one in mine.items() if id not in completed]

    async def take_out(self, ids: Collection[int]) -> list[Request]:
        """Drop requests, and return those that had not ended, each with its tokens so far."""
        mine = {id: self._under_way[id][0] for id in ids if id in self._under_way}
        if not mine:
            return []
        self._taken.update(mine)
        try:
            out: list[Request] = await self.ask("take_out", set(mine))
        except MemberLost:
            out = [one for id, one in mine.items() if id in self._taken]
        for one in out:
            self._under_way.pop(one.id, None)
        self._taken -= mine.keys()
        self._changed()
        return out

    # What comes ------------------------------------------------------------------------------------------------------

    def take(self, kind: str, *rest: Any) -> str | None:
        """Take a message; returns why it leaves, if it says that."""
        self._peer.heard(kind, *rest)
        if kind == "completions":
            self._completed(*rest)
        elif kind == "reply":
            if (reply := self._replies.get(rest[0])) is not None and not reply.done():
                reply.set_result(rest[1])
        elif kind == "leaving":
            for request in rest[0]:
                if (place := self._under_way.get(request.id)) is not None:
                    self._under_way[request.id] = (request, place[1])
            return "it leaves, and hands on what it had begun"
        elif kind == "failed":
            return f"its engine failed: {rest[0]}"
        self._changed()
        return None

    def _completed(self, completions: Sequence[Completion], stats: StepStats) -> None:
        self.stats = StepStats(*stats)
        answered: dict[Asker, list[Completion]] = {}
        for one in completions:
            if (place := self._under_way.pop(one.id, None)) is not None:
                self._taken.discard(one.id)
                answered.setdefault(place[1], []).append(one)
        for asker, its in answered.items():
            asker.took(its)

    def lost(self) -> int:
        """Give back what it had under way, and fail whoever waits for a reply; returns how many requests that were."""
        self._over = True
        self._peer.over()
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(MemberLost(f"{self.name} is gone"))
        under_way, self._under_way = self._under_way, {}
        for id, (request, asker) in under_way.items():
            if id not in self._taken:
                asker.put_back(request)
        return len(under_way)

    async def close(self) -> None:
        """Tell it that the job has ended."""
        await self._connection.close("end")
