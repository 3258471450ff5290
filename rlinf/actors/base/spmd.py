"""Joint work: calls whose ranks compute together, in one order, and all or none of them.

Flows in: joint calls, which reach the ranks of a group in any order, and may be cancelled at any moment on each. Flows
out: the same calls, one after the other, in the same order on every rank. Who wakes whom: rank 0 asks its peers whether
they have come to a call; their answers let it give the word; the word starts them.

Collectives hang when ranks differ in what they call, or in whether they call it at all. So rank 0 decides on the order,
and from its word on nobody leaves: a cancelled rank first does its part to the end, which `stop` may bring nearer.

If a rank fails in the middle, its error is the call's at once, and ends the job unless somebody catches it. The others
may be in a collective that it never joins: gloo offers no way to end that, so their threads stay in it until the mesh's
deadline (300 s by default), or the end of the process, which waits for no such thread.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from torch.distributed.device_mesh import DeviceMesh

from rlinf.runtime.actor.actor import Actor, endpoint
from rlinf.runtime.base.calls import Gang, current_call, lease_here
from rlinf.runtime.base.errors import RuntimeFault, UserError
from rlinf.runtime.base.tasks import finish
from rlinf.runtime.gpu.own_device import own_device
from rlinf.runtime.observe.stalls import Lock

R = TypeVar("R")
Body = Callable[[Any], Coroutine[Any, Any, R]]
"""What a rank does in its turn, given what rank 0 has for it."""


class GroupBroken(RuntimeFault):
    """An earlier joint call failed on some rank in the middle of a collective, so ranks may differ in what they did."""


class _Part:
    """One rank's part of a joint call."""

    __slots__ = ("cancelled", "here", "over", "settled", "word")

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.here: asyncio.Future[None] = loop.create_future()
        """Done when the call has come to this rank."""
        self.word: asyncio.Future[tuple[bool, bool]] = loop.create_future()
        """Rank 0's: whether to begin, and whether it has something for this rank."""
        self.over: asyncio.Future[None] = loop.create_future()
        """Done when this rank's part has ended."""
        self.settled = False
        """Nobody leaves any more: rank 0 gives its word, or gave it."""
        self.cancelled = False
        """The call was cancelled here, and ends when it may."""


class JointActor(Actor):
    """An actor whose ranks compute together over a mesh. Subclasses wrap such work in `jointly`."""

    mesh: DeviceMesh | None = None
    """The ranks, one device each; None where one rank works alone."""

    def __init__(self) -> None:
        super().__init__()
        self._parts: dict[Gang, _Part] = {}
        """This rank's parts of the calls that are under way or expected."""
        self._given: dict[tuple[Gang, int], Any] = {}
        """On rank 0, what other ranks have still to fetch."""
        self._turn: Lock | None = None
        self._meshes: list[str] = []
        self._broken: str | None = None
        """Why ranks may differ in what they did."""

    @property
    def _role(self) -> str:
        """Name of the group, such as "trainer"."""
        return self.group.names[0].partition("[")[0]

    async def _open_mesh(self) -> None:
        """Make the device mesh of all ranks; part of `setup`.

        Raises:
            ValueError: two ranks are on one host.
        """
        hosts = self.group.hosts
        if len(set(hosts)) < len(hosts):
            raise ValueError(
                f"{self._role}: two ranks on one host, {hosts}: each needs a process of its own, so name every host "
                "once"
            )
        if self.world_size > 1:
            self._check_gpus()
            self.mesh = await self.mesh_of(range(self.world_size), "all")

    def _check_gpus(self) -> None:
        """See that ranks can communicate on their GPUs.

        Raises:
            UserError: two ranks have one GPU, which NCCL refuses; or another group communicates on this rank's and they
                do not take turns, so that each may begin first on some GPU and wait for the other for ever.
        """
        host, ranks = self._cell.host, dict[str, int]()
        for rank, number in enumerate(self.group.hosts):
            place = host.places[number]
            if place.device != "cpu" and (other := ranks.setdefault(place.device, rank)) != rank:
                raise UserError(
                    f"{self._role}: ranks {other} and {rank} are both on GPU {place.device} of {place.node}, where "
                    "NCCL refuses to let them communicate: start no more processes on a machine than it has GPUs, or "
                    f"give {self._role} one process of each"
                )
        for cell in host.cells.values() if own_device().type == "cuda" else ():
            other_group = cell.actor if cell is not self._cell and isinstance(cell.actor, JointActor) else None
            if other_group is not None and other_group.world_size > 1 and not (cell.leased and self._cell.leased):
                raise UserError(
                    f"{self._role} and {other_group._role} both communicate between GPUs and do not take turns on that "
                    f"of host {host.rank}, so that they may wait for each other for ever: give both their `devices` in "
                    "spawn, as runs from a configuration do"
                )

    @property
    def machines(self) -> list[str]:
        """Of each rank, the machine that it is on."""
        places = self._cell.host.places
        return [places[host].machine for host in self.group.hosts]

    async def mesh_of(self, ranks: Sequence[int], purpose: str, rows: int | None = None) -> DeviceMesh:
        """A device mesh of some ranks; each of them calls this, with a purpose that no other mesh of theirs has.

        Args:
            ranks: row by row.
            purpose: part of its name.
            rows: of a mesh of two dimensions; None for one dimension.
        """
        name = "{}.{}.{}".format(self.group.names[0], *self.group[0]._actor)  # of this spawn, and no other
        name = f"{name}.{purpose}.{ranks[0]}"
        hosts = [self.group.hosts[rank] for rank in ranks]
        self._meshes.append(name)
        shape = {} if rows is None else {"shape": (rows, len(ranks) // rows), "dims": ("alike", "parts")}
        mesh: DeviceMesh = await self.system.collectives.mesh(name, hosts, own_device().type, **shape)
        return mesh

    async def jointly(
        self, body: Body[R], given: Callable[[], Sequence[Any]] | None = None, stop: Callable[[], None] | None = None
    ) -> R:
        """Run `body` when it is this call's turn on all ranks; to be called in a joint device endpoint, on every rank.

        Args:
            body: called with what rank 0 gives this rank.
            given: on rank 0, makes what each rank is given, once all have come; None gives None.
            stop: called when this call is cancelled after it began: `body` may end early, if it does on all ranks.

        Raises:
            UserError: the call was not made on the whole group.
            GroupBroken: an earlier one failed half way.
        """
        call = current_call.get()
        gang = call.gang if call is not None else None
        if self.world_size > 1 and gang is None:
            raise UserError(
                f"{self.group} computes on all its ranks together: call the endpoint on the group, not on one rank"
            )
        if self._turn is None:
            self._turn = Lock(f"turn of {self.group.names[self.rank]}")
        part = self._parts.setdefault(gang, _Part()) if gang is not None else _Part()
        task = asyncio.create_task(self._in_turn(part, gang, body, given), name="turn")
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # seen, whoever still waits for it
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if not task.done():
                part.cancelled = True
                if not part.settled:
                    task.cancel()
                elif stop is not None:
                    stop()
                await finish(task)
                if not task.cancelled():
                    task.exception()  # seen: whoever cancelled has no use for it
            raise
        finally:
            if gang is not None:
                self._parts.pop(gang, None)
            part.over.set_result(None)

    async def _in_turn(
        self, part: _Part, gang: Gang | None, body: Body[R], given: Callable[[], Sequence[Any]] | None
    ) -> R:
        turn, lease = self._turn, lease_here()
        assert turn is not None
        async with contextlib.AsyncExitStack() as held:
            # while it waits for its turn, others may have the devices: they may be whom it waits for
            async with lease.waiting() if lease is not None else contextlib.nullcontext():
                if self.rank == 0:
                    await held.enter_async_context(turn)
                    mine = await self._begin(part, gang, given)
                else:
                    part.here.set_result(None)
                    begins, has = await part.word
                    if not begins:
                        await self._end_with_rank_0(part)
                    await held.enter_async_context(turn)  # at once: turns are in the order of the words
                    mine = await self.group[0].joint_given(gang, self.rank) if has else None
            self._check_whole()
            result = await body(mine)
            if self.rank == 0 and gang is not None:
                # A rank that is behind may still need its devices, which the next call would keep from it.
                await asyncio.gather(*(peer.joint_over(gang) for peer in list(self.group)[1:]))
            return result

    async def _end_with_rank_0(self, part: _Part) -> None:
        """Rank 0 was cancelled, as this rank was or will be; or it failed, and its error, which ends this call, must be
        what the caller sees."""
        part.settled = False
        if not part.cancelled:
            await asyncio.get_running_loop().create_future()
        raise asyncio.CancelledError

    async def _begin(self, part: _Part, gang: Gang | None, given: Callable[[], Sequence[Any]] | None) -> Any:
        """On rank 0: wait for all ranks, and give the word; returns what rank 0 itself is given."""
        peers = list(self.group)[1:]
        try:
            if peers:
                await asyncio.gather(*(peer.joint_ready(gang) for peer in peers))
            things = given() if given is not None else [None] * self.world_size
        except BaseException:
            for peer in peers:
                peer.joint_word(gang, False, False)
            raise
        part.settled = True
        if gang is not None and given is not None:
            self._given.update({(gang, rank): thing for rank, thing in enumerate(things) if rank})
        for peer in peers:
            peer.joint_word(gang, True, given is not None)
        return things[0]

    @endpoint
    async def joint_ready(self, gang: Gang) -> None:
        """Rank 0 asks: answered once the call has come here, which binds this rank to wait for the word."""
        self._check_whole()
        part = self._parts.setdefault(gang, _Part())
        try:
            await asyncio.shield(part.here)
        except asyncio.CancelledError:
            if not part.here.done():
                self._parts.pop(gang, None)
            raise
        part.settled = True

    @endpoint
    async def joint_over(self, gang: Gang) -> None:
        """Rank 0 asks: answered once this rank's part has ended."""
        part = self._parts.get(gang)
        if part is not None:
            await asyncio.shield(part.over)

    @endpoint
    async def joint_word(self, gang: Gang, begins: bool, has: bool) -> None:
        """Rank 0's word."""
        part = self._parts.get(gang)
        if part is not None and not part.word.done():
            part.word.set_result((begins, has))

    @endpoint
    async def joint_given(self, gang: Gang, rank: int) -> Any:
        """What rank 0 has for a rank: fetched, since a stream lives as long as whoever got it as a result keeps it."""
        return self._given.pop((gang, rank))

    async def computed(self, fn: Callable[..., R], *args: Any, **kwargs: Any) -> R:
        """`compute` for work with collectives: a failure here leaves other ranks waiting, so it is remembered.

        `FloatingPointError` breaks nothing: all ranks come to it together, from sums that all have.
        """
        try:
            return await self.compute(fn, *args, **kwargs)
        except FloatingPointError:
            raise
        except Exception as error:
            if self.mesh is not None and self.mesh.size() > 1:
                self._broken = f"rank {self.rank} failed in {getattr(fn, '__name__', fn)} with {error!r}"
                for name in self._meshes:  # whose other ranks would wait for this one on their devices
                    self.system.collectives.failed(name, f"{self._role}: {self._broken}")
            raise

    def _check_whole(self) -> None:
        if self._broken is not None:
            raise GroupBroken(
                f"{self.group.names[self.rank]} cannot go on: {self._broken}; its ranks may differ in what they did, "
                "so start the job again from its last checkpoint"
            )
