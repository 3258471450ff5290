"""Base classes of roles with a model: settings, ranks that compute together, devices, weights and checkpoints.

`SpmdActor` has ranks compute together: calls reach
them in any order, and may be cancelled at any moment on each; they are carried out one after the other, in the same
order on every rank. `ModelActor` has a model that leaves its device while other roles have it. `BaseTrainer` is both,
and owns weights that learn: a subclass makes its module and optimizer in `setup` and hands them to `_own`; it says how
its weights are published (`_published`), and adds to its state what else it has (`_extra`, `_state`, `_take`), and to
checkpoints what has files of its own there (`_copies`, `_read`).

Collectives hang when ranks differ in what they call, or in whether they call it at all. So rank 0 decides on the order:
it asks its peers whether a call has come to them, and gives the start signal when it has come to all. From then on
nobody leaves: a cancelled rank first does its part to the end, which `stop` may bring nearer.

If a rank fails in the middle, its error is the call's at once, and ends the job unless somebody catches it. The others
may be in a collective that it never joins: gloo offers no way to end that, so their threads stay in it until the mesh's
deadline (300 s by default), or the end of the process, which waits for no such thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from rlinf.config.common import Delta as Delta  # of roles
from rlinf.config.schema import configured  # noqa: F401  # of roles
from rlinf.data.differences import Differences
from rlinf.data.safetensors_io import settle
from rlinf.data.weights import Weights
from rlinf.models.offload import Parking
from rlinf.runtime.actor.actor import Actor, endpoint
from rlinf.runtime.base.calls import Gang, current_call, lease_here
from rlinf.runtime.base.errors import RuntimeFault, UserError
from rlinf.runtime.base.tasks import finish, mark_seen
from rlinf.runtime.base.tensors import own_device
from rlinf.runtime.observe.stalls import Lock
from rlinf.training.checkpoint import (
    STATE,
    HostCopy,
    OpenState,
    ParkedState,
    Restored,
    Source,
    StateCopy,
    copy_state,
    held,
    load_state,
    write_checkpoint,
)
from rlinf.training.optimizer import hyperparameters, set_hyperparameters
from rlinf.training.weight_sync import has_room

P = ParamSpec("P")
R = TypeVar("R")


Body = Callable[[Any], Coroutine[Any, Any, R]]
"""A rank's part of a call, given what rank 0 has for it."""


class GroupBroken(RuntimeFault):
    """An earlier joint call failed on some rank in the middle of a collective, so ranks may differ in what they did."""


class _Part:
    """One rank's part of a joint call."""

    __slots__ = ("cancelled", "here", "over", "settled", "start")

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.here: asyncio.Future[None] = loop.create_future()
        """Done when the call has come to this rank."""
        self.start: asyncio.Future[tuple[bool, bool]] = loop.create_future()
        """Rank 0's: whether to begin, and whether it has something for this rank."""
        self.over: asyncio.Future[None] = loop.create_future()
        """Done when this rank's part has ended."""
        self.settled = False
        """Nobody leaves any more: rank 0 gives the start signal, or gave it."""
        self.cancelled = False
        """The call was cancelled here, and ends when it may."""


class SpmdActor(Actor):
    """An actor whose ranks compute together over a mesh. Subclasses wrap such work in `run_spmd`."""

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
            other_group = cell.actor if cell is not self._cell and isinstance(cell.actor, SpmdActor) else None
            if other_group is not None and other_group.world_size > 1 and not (cell.leased and self._cell.leased):
                raise UserError(
                    f"{self._role} and {other_group._role} both communicate between GPUs and do not take turns on that "
                    f"of host {host.rank}, so that they may wait for each other for ever: give both their `devices` in "
                    "spawn, as runs from a configuration do"
                )

    @property
    def machines(self) -> list[str]:
        """The machine of each rank."""
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

    async def run_spmd(
        self, body: Body[R], inputs: Callable[[], Sequence[Any]] | None = None, stop: Callable[[], None] | None = None
    ) -> R:
        """Run `body` when it is this call's turn on all ranks; to be called in a joint device endpoint, on every rank.

        Args:
            body: called with what rank 0 gives this rank.
            inputs: on rank 0, makes what each rank is given, once all have come; None gives None.
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
        task = asyncio.create_task(self._in_turn(part, gang, body, inputs), name="turn")
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
        self, part: _Part, gang: Gang | None, body: Body[R], inputs: Callable[[], Sequence[Any]] | None
    ) -> R:
        turn, lease = self._turn, lease_here()
        assert turn is not None
        async with contextlib.AsyncExitStack() as stack:
            # while it waits for its turn, others may have the devices: they may be whom it waits for
            async with lease.waiting() if lease is not None else contextlib.nullcontext():
                if self.rank == 0:
                    await stack.enter_async_context(turn)
                    mine = await self._begin(part, gang, inputs)
                else:
                    part.here.set_result(None)
                    begins, has = await part.start
                    if not begins:
                        await self._end_with_rank_0(part)
                    await stack.enter_async_context(turn)  # at once: turns are in the order of the signals
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

    async def _begin(self, part: _Part, gang: Gang | None, inputs: Callable[[], Sequence[Any]] | None) -> Any:
        """On rank 0: wait for all ranks, and give the start signal; returns what rank 0 itself is given."""
        peers = list(self.group)[1:]
        try:
            if peers:
                await asyncio.gather(*(peer.joint_ready(gang) for peer in peers))
            things = inputs() if inputs is not None else [None] * self.world_size
        except BaseException:
            for peer in peers:
                peer.joint_start(gang, False, False).add_done_callback(mark_seen)
            raise
        part.settled = True
        if gang is not None and inputs is not None:
            self._given.update({(gang, rank): thing for rank, thing in enumerate(things) if rank})
        for peer in peers:
            # a rank that has died is told of by what waits for it
            peer.joint_start(gang, True, inputs is not None).add_done_callback(mark_seen)
        return things[0]

    @endpoint
    async def joint_ready(self, gang: Gang) -> None:
        """Rank 0 asks: answered once the call has come here, which binds this rank to wait for the start signal."""
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
    async def joint_start(self, gang: Gang, begins: bool, has: bool) -> None:
        """Rank 0 gives the start signal, or calls the start off."""
        part = self._parts.get(gang)
        if part is not None and not part.start.done():
            part.start.set_result((begins, has))

    @endpoint
    async def joint_given(self, gang: Gang, rank: int) -> Any:
        """Something that rank 0 has for a rank: fetched, since a stream lives as long as its result is kept."""
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


class ModelActor(Actor):
    """Base class of actors that have a model on the device of their process."""

    device: torch.device
    """Where the model is, unless it is parked."""

    def __init__(self) -> None:
        super().__init__()
        self.device = own_device()
        self._parking: Parking | None = None
        """Made when the model first leaves its device; most have theirs to themselves."""

    def _held(self) -> Iterable[Tensor]:
        """All tensors that `offload` moves, as they are now."""
        raise NotImplementedError(f"{type(self).__name__} does not say which tensors it has: define _held")

    async def on_model(self, fn: Callable[..., R], *args: Any, **kwargs: Any) -> R:
        """`compute` for work that needs the model.

        Raises:
            RuntimeError: the model is parked.
        """
        return await self.compute(self._needing(fn), *args, **kwargs)

    def _needing(self, fn: Callable[P, R]) -> Callable[P, R]:
        """`fn`, which refuses to run while the model is parked."""
        return fn if self._parking is None else self._parking.needed(fn)

    async def offload(self) -> None:
        """Keep the model, and all that belongs to it, in host memory until `onload`."""
        await self.compute(self._park)

    async def onload(self) -> None:
        """Bring back what `offload` moved."""
        if self._parking is not None:
            await self.compute(self._parking.unpark)

    def _park(self) -> None:
        settle()
        self._parking = self._parking or Parking(self._held)
        self._parking.park()


def settings_of(keys: Mapping[str, Any], *kinds: type[Any]) -> list[Any]:
    """Dataclasses of settings from keyword arguments, each from those of its own fields.

    Raises:
        ValueError: none of them has a field of some name.
    """
    names = [{each.name for each in fields(kind)} for kind in kinds]
    if unknown := sorted(keys.keys() - set().union(*names)):
        there = ", ".join(sorted(set().union(*names)))
        raise ValueError(f"trainer: there is no setting {unknown[0]!r}; there are {there}")
    return [kind(**{name: keys[name] for name in own & keys.keys()}) for kind, own in zip(kinds, names, strict=True)]


def at_least_one(role: str, **counts: int) -> None:
    """Check settings that count something.

    Raises:
        ValueError: one is less than 1.
    """
    if wrong := [f"{name}={count}" for name, count in counts.items() if count < 1]:
        raise ValueError(f"{role}: {' and '.join(wrong)} must be at least 1")


class BaseTrainer(ModelActor, SpmdActor):
    """Owns a module, its optimizer, and the version of its weights."""

    trained: nn.Module
    """The module that checkpoints hold, under its own names; spread over the ranks, or the same on each."""
    optimizer: Optimizer
    """The optimizer of its parameters, or of some of them."""
    schedule: LRScheduler | None
    """The schedule of the optimizer's learning rate; None if that stays."""
    version: int
    """How often the weights were changed."""
    _delta: Delta = "auto"
    """`weights.delta`."""

    def _own(self, trained: nn.Module, optimizer: Optimizer, schedule: LRScheduler | None = None) -> None:
        """Take over what was made; the end of `setup`."""
        self.trained, self.optimizer, self.schedule, self.version = trained, optimizer, schedule, 0
        self._hyperparameters = hyperparameters(optimizer)

    def _held(self) -> Iterable[Tensor]:
        return held(self.trained, self.optimizer)

    async def computed(self, fn: Callable[..., R], *args: Any, **kwargs: Any) -> R:
        """`compute` for work on weights, of all ranks together."""
        return await super().computed(self._needing(fn), *args, **kwargs)

    async def compute_spmd(self, fn: Callable[..., R], *args: Any) -> R:
        """`computed`, when it is this call's turn on all ranks."""

        async def work(_: None) -> R:
            return await self.computed(fn, *args)

        return await self.run_spmd(work)

    # Weights -----------------------------------------------------------------------------------------------------

    @functools.cached_property
    def _differences(self) -> Differences | None:
        """Differences between published weights, if there are other machines."""
        several = len({place.machine for place in self._cell.host.places.values()}) > 1
        return Differences(f"{self._cell.name}[{self.rank}]", self.note) if several and self._delta != "off" else None

    def _published_how(self, numel: int, dtype: torch.dtype | None, *, exact: bool) -> dict[str, Any]:
        """Arguments of `publish`: where so many elements of a dtype are collected, and whether by differences."""
        differences = None if exact else self._differences
        in_host = differences is not None and self._delta == "always"
        in_host |= not has_room(self.device, numel * (dtype or torch.float32).itemsize)
        return {"dtype": dtype, "in_host_memory": in_host, "differences": differences}

    @endpoint(device=True, joint=True)
    async def weights(self, *, exact: bool = False, whole: bool = False) -> Weights | None:
        """The weights as they are between two batches; a copy, so that training may go on. None but on rank 0.

        Args:
            exact: as they are kept here; otherwise in the precision in which those compute who take them over, if the
                trainer was told.
            whole: with what never changes, too, which trainers may otherwise leave out after the first time: for
                receivers that are new.
        """

        async def published(_: None) -> Weights | None:
            return await self._published(exact, whole)

        return await self.run_spmd(published)

    async def _published(self, exact: bool, whole: bool) -> Weights | None:
        """The result of `weights`; called on all ranks in turn."""
        raise NotImplementedError(f"{type(self).__name__} publishes no weights: define _published")

    # Checkpoints -------------------------------------------------------------------------------------------------

    @endpoint(device=True, joint=True)
    async def save(self, path: str | Path) -> str:
        """Write a checkpoint: `path`/state to go on from, and beside it the weights for everybody else.

        Training can go on as soon as everything was copied, while the files are still being written. Cancelled, it
        stops writing and leaves what is there.

        Args:
            path: a directory that nobody reads yet, on a disk that all ranks see; the caller renames it.

        Returns:
            The path.

        Raises:
            OSError: it cannot be written; the text says what is missing.
        """
        directory = Path(path)
        copies = await self.compute_spmd(self._copies, directory)
        if (lease := lease_here()) is not None:
            lease.give()  # the writing needs no device, and other roles may be waiting for it

        await write_checkpoint(directory, copies, lead=self.rank == 0)
        return str(path)

    def _copies(self, directory: Path) -> Mapping[str, HostCopy]:
        """Copies of all that this rank writes, by the directory in the checkpoint; blocking, on all ranks together.

        Args:
            directory: the checkpoint, for what can be written at once.
        """
        return {STATE: self._state()}

    def _state(self) -> StateCopy:
        """A copy of what this rank knows; blocking, on all ranks together."""
        state = copy_state(
            self.trained,
            self.optimizer,
            self.schedule,
            self.version,
            rank=self.rank,
            ranks=self.world_size,
            extra=self._extra(),
        )
        return state.whole()  # policies change otherwise than by their optimizer, too

    def _extra(self) -> Mapping[str, Any]:
        """JSON values that belong to the state; `_take` finds them in `Restored.extra`."""
        return {}

    @endpoint(device=True, joint=True)
    async def restore(self, path: str | Path) -> int:
        """Go on from a checkpoint that any number of ranks saved; returns the weights' version.

        Args:
            path: as given to `save`, or its `state`.

        Raises:
            FileNotFoundError: there is no complete state.
            ValueError: it does not fit what learns here, or is damaged.
        """
        directory = Path(path).parent if Path(path).name == STATE else Path(path)
        return (await self.compute_spmd(self._read, directory)).version

    def _read(self, directory: Path) -> Restored:
        """Take over a checkpoint; blocking, on all ranks together."""
        return self._take(directory / STATE)

    # Moving ------------------------------------------------------------------------------------------------------

    @endpoint(device=True, joint=True)
    async def export_state(self) -> StateCopy:
        """A copy of what this rank knows, in host memory, for ranks that go on elsewhere; see `parked_state.park`."""
        return await self.compute_spmd(lambda: self._exported().whole())

    @endpoint(device=True, joint=True)
    async def import_state(self, parked: ParkedState) -> int:
        """Go on from what other ranks exported, however many they were; returns the weights' version.

        Raises:
            ValueError: it does not fit what learns here.
        """
        return (await self.compute_spmd(self._take_parked, parked.open())).version

    def _exported(self) -> StateCopy:
        """`_state`, and what checkpoints have in files of its own; blocking, on all ranks together."""
        return self._state()

    def _take_parked(self, source: OpenState) -> Restored:
        """Take over what `_exported` gave; blocking, on all ranks together."""
        return self._take(source)

    def _take(self, source: Path | Source) -> Restored:
        """Take over a state, all but the optimizer's hyperparameters; blocking, on all ranks together."""
        restored = load_state(self.trained, self.optimizer, self.schedule, source, rank=self.rank)
        if self.schedule is None:  # a schedule's learning rate may follow from the last one
            set_hyperparameters(self.optimizer, self._hyperparameters)
        self.version = restored.version
        return restored
