"""Big values that hosts elsewhere want: each machine gets one copy, and hands it on to others, in a tree.

Flows in: fetches of a value that is kept on another machine, or by a host with another GPU. Flows out: from the owner
the value, or the name of a host that has it or is getting it; from there the same value, through shared memory to hosts
of its machine. Who wakes whom: a copy's arrival wakes all who wait for it on its host, and those who have asked that
host for it.

The owner decides. The first host of a machine to ask becomes the keeper there; the first `FAN_OUT` machines get the
value from the owner, the next ones from the keepers before them. Of a value that lies on a GPU each GPU gets one copy:
the first of a machine as above, the others from those of their own machine, in a tree as well, so that no GPU sends
more than a few. A keeper keeps its copy until the owner drops the value. Who is sent to a keeper that has nothing (its
fetch failed, it died) asks the owner again.

A value may be one version of many, such as weights: it has a `lineage` then (see `data/differences.py`) and a `key`.
Who asks from another machine says which versions it has, and is sent what makes this one of one of them (a `Change`),
if whoever gives it knows that, or the whole.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import numpy as np
import torch

from rlinf.runtime.base.calls import SERVICE, Key
from rlinf.runtime.base.clock import external
from rlinf.runtime.base.tasks import mark_seen
from rlinf.runtime.values.codec import Codec
from rlinf.runtime.values.pickler import Place, ValueRef

if TYPE_CHECKING:
    from rlinf.runtime.base.calls import Host

RELAY_BYTES = 1 << 20
"""A value with fewer bytes in tensors goes straight from its owner to all: one more question costs about as much."""
FAN_OUT = 2
"""Machines that a machine sends a value to, and GPUs of its own that a GPU does. Each waits until it has all of it, so
more would take longer."""

Versions = Mapping[str, Any]
"""By the name of a lineage: a version of it, or that version's key."""
Site = tuple[str, str]
"""Where one copy is enough: a machine and, for what lies on GPUs, a device of it."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer of an owner to a host that asked for a value."""

    value: Any = None
    """The value, unless another host gives it."""
    host: int | None = None
    """That host."""
    keep: bool = False
    """Others will ask for it: keep it until its owner drops it."""


@dataclass(frozen=True, slots=True)
class Missing:
    """Answer of a host that was asked for a copy and has none."""


class Change:
    """Base class of what makes a new version of a value of an older one."""

    __slots__ = ()

    name: str
    """The lineage's."""

    def applied(self, base: Any, empty: Any, passes_on: bool) -> Any:
        """Make the new version; blocking.

        Args:
            base: the older one, which stays as it is.
            empty: allocates tensors.
            passes_on: other machines may ask for the new one, so that it keeps this with it.
        """
        raise NotImplementedError


@dataclass(slots=True)
class _Tree:
    """Hosts that have a value, as its owner knows it."""

    on_gpu: bool
    """Each GPU wants a copy."""
    machines: list[str] = field(default_factory=list)
    """In the order in which they first asked."""
    sites: dict[str, list[Site]] = field(default_factory=dict)
    """Of each machine, in that order."""
    keepers: dict[Site, int] = field(default_factory=dict)

    def site(self, place: Place) -> Site:
        """Where a host's copy would be."""
        return place.machine, place.device if self.on_gpu else ""


@dataclass(slots=True, eq=False)
class _Copy:
    """A value of another host, here or on its way."""

    owner: int
    task: asyncio.Task[Any] | None = None
    users: int = 0
    """Number of those who wait for it, or have."""
    keep: bool = False


class Relay:
    """One host's part: the trees of what it owns, its copies of what others own."""

    def __init__(self, host: Host, codec: Codec):
        self._host = host
        self._codec = codec
        self._trees: dict[Key, _Tree] = {}
        self.copies: dict[Key, _Copy] = {}
        self._versions: WeakValueDictionary[str, Any] = WeakValueDictionary()  # of which the next one can be made

    # At the owner ------------------------------------------------------------------------------------------------

    def answer(self, key: Key, value: Any, asker: int, without: int | None, versions: Versions) -> Answer:
        """Say which host gives a kept value to `asker`, which is on another machine or has another GPU.

        Args:
            without: the host that was named before, and had nothing.
            versions: keys of those that `asker` has.
        """
        places = self._host.places
        tree = self._trees.get(key) or self._tree(key, value)
        if tree is None or tree.site(places[asker]) == tree.site(places[self._host.rank]):
            return Answer(self._changed(value, asker, versions))
        if without is not None and tree.keepers.get(tree.site(places[without])) == without:
            del tree.keepers[tree.site(places[without])]
        site = tree.site(places[asker])
        keeper = tree.keepers.setdefault(site, asker)
        if keeper != asker:
            return Answer(host=keeper)
        giver = self._giver(tree, site)
        if giver is not None:
            return Answer(host=giver, keep=True)
        return Answer(self._changed(value, asker, versions), keep=True)

    def _changed(self, value: Any, asker: int, versions: Versions) -> Any:
        """A value as a host gets it: on another machine, if that will do, as what makes it of a version there."""
        lineage = getattr(value, "lineage", None)
        if lineage is None or not self._is_far(asker):
            return value
        return lineage.since(value, versions.get(lineage.name))

    def _is_far(self, host: int) -> bool:
        """True if a host is on another machine."""
        places = self._host.places
        return bool(places[host].machine != places[self._host.rank].machine)

    def _tree(self, key: Key, value: Any) -> _Tree | None:
        """A new tree for a value; None if its owner gives it to all."""
        if key not in self._host.values.kept or not is_big(value):
            return None
        tree = _Tree(any(isinstance(each, torch.Tensor) and on_gpu(each) for each in arrays(value)))
        mine = tree.site(self._host.places[self._host.rank])
        if sum(tree.site(place) != mine for place in self._host.places.values()) < 2:
            return None
        tree.sites[mine[0]] = [mine]
        self._trees[key] = tree
        return tree

    def _giver(self, tree: _Tree, site: Site) -> int | None:
        """The keeper that is to give a site its copy; None for the owner."""
        machine = site[0]
        row = tree.sites.setdefault(machine, [])
        if site not in row:
            row.append(site)
        if place := row.index(site):
            return tree.keepers.get(row[(place - 1) // FAN_OUT])
        if machine not in tree.machines:
            tree.machines.append(machine)
        above = tree.machines.index(machine) // FAN_OUT - 1
        return tree.keepers.get(tree.sites[tree.machines[above]][0]) if above >= 0 else None

    def drop(self, key: Key) -> None:
        """A value is not wanted any more; here is its owner, or a copy."""
        self.copies.pop(key, None)
        tree = self._trees.pop(key, None)
        for keeper in tree.keepers.values() if tree is not None else ():
            self._host.drop(keeper, key)

    def forget(self, host: int) -> None:
        """A host is lost: it keeps nothing, and what it owned will not be dropped by it."""
        for tree in self._trees.values():
            for site in [site for site, keeper in tree.keepers.items() if keeper == host]:
                del tree.keepers[site]
        for key in [key for key, copy in self.copies.items() if copy.owner == host]:
            del self.copies[key]

    # At who asks -------------------------------------------------------------------------------------------------

    async def fetch(self, ref: ValueRef) -> Any:
        """A value that is kept elsewhere. Its tensors may be shared with other calls on this machine."""
        copy = self.copies.get(ref.key)
        if copy is None:
            copy = self.copies[ref.key] = _Copy(ref.owner)
            copy.task = self._host.own(self._get(ref, copy))
            copy.task.add_done_callback(mark_seen)  # it may be that nobody waits for the copy
        assert copy.task is not None
        copy.users += 1
        try:
            value = await asyncio.shield(copy.task)
        except asyncio.CancelledError:
            copy.users -= 1
            if not copy.users and not copy.keep:
                self._remove(ref.key, copy)
                copy.task.cancel()
            raise
        return self._codec.duplicate(value) if copy.keep or copy.users > 1 else value

    async def copy_of(self, key: Key, asker: int, versions: Versions) -> Any:
        """The copy that this host was named for, when it is here; see `answer`."""
        copy = self.copies.get(key)
        if copy is None or copy.task is None:
            return Missing()
        await asyncio.wait([copy.task])
        failed = copy.task.cancelled() or copy.task.exception() is not None
        return Missing() if failed else self._changed(copy.task.result(), asker, versions)

    def use_version(self, value: Any) -> bool:
        """See `Actor.use_version`."""
        lineage = value.lineage
        if lineage is None or not (lineage.far and lineage.stays):
            return False
        self._versions[lineage.name] = value
        return True

    async def _get(self, ref: ValueRef, copy: _Copy) -> Any:
        versions = dict(self._versions)  # what is sent may be made of these
        try:
            value = await self._ask(ref, copy, {name: each.key for name, each in versions.items()})
            if isinstance(value, Change):
                with external():
                    value = await asyncio.to_thread(value.applied, versions[value.name], self._codec.empty, copy.keep)
            elif copy.keep:
                value = await self._codec.into_arena(value)
            if getattr(value, "lineage", None) is not None:
                value.lineage.far = self._is_far(ref.owner)
            return value
        except BaseException:
            copy.keep = False
            raise
        finally:
            if not copy.keep:
                self._remove(ref.key, copy)

    async def _ask(self, ref: ValueRef, copy: _Copy, versions: Versions) -> Any:
        without = None
        while True:
            answer: Answer = await self._call(ref.owner, "fetch_shared", ref.key, without, versions)
            copy.keep = answer.keep
            if answer.host is None:
                return answer.value
            try:
                value = await self._call(answer.host, "copy_of", ref.key, versions)
            except Exception:  # whatever keeps that host from giving it, the owner can
                value = Missing()
            if type(value) is not Missing:
                return value
            without = answer.host

    def _call(self, host: int, method: str, *args: Any) -> Any:
        return self._host.call(host, SERVICE, method, "value", args, {})

    def _remove(self, key: Key, copy: _Copy) -> None:
        if self.copies.get(key) is copy:
            del self.copies[key]


def is_big(value: Any) -> bool:
    """True if there are `RELAY_BYTES` in the tensors and arrays of plain containers and dataclasses."""
    size = 0
    for each in arrays(value):
        size += each.nbytes
        if size >= RELAY_BYTES:
            return True
    return False


def on_gpu(tensor: torch.Tensor) -> bool:
    """True if it lies in the memory of a GPU."""
    return tensor.is_cuda


def arrays(value: Any) -> Iterator[torch.Tensor | np.ndarray[Any, Any]]:
    """The tensors and arrays in plain containers and dataclasses."""
    rest = [value]
    while rest:
        each = rest.pop()
        if isinstance(each, (torch.Tensor, np.ndarray)):
            yield each
        elif isinstance(each, Mapping):
            rest.extend(each.values())
        elif isinstance(each, (list, tuple, set, frozenset)):
            rest.extend(each)
        elif dataclasses.is_dataclass(each):
            rest.extend(getattr(each, name, None) for name in each.__dataclass_fields__)
