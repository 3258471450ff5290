"""Handles to actors, and how calls on them address ranks.

Flows in: attribute access and arguments. Flows out: promises and streams. A handle is plain data: sent to another
host, it calls from there.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, cast

from rlinf.runtime.actor.actor import Actor, Endpoint
from rlinf.runtime.base.calls import SERVICE, ActorId, Gang
from rlinf.runtime.base.errors import UserError
from rlinf.runtime.streams.stages import drive
from rlinf.runtime.streams.stream import CAPACITY, Stream
from rlinf.runtime.values.codec import reading_codec
from rlinf.runtime.values.promise import Gathered, Promise

if TYPE_CHECKING:
    from rlinf.runtime.actor.host import Host


def find_endpoint(cls: type[Actor], name: str) -> Endpoint:
    """The endpoint of a class by name.

    Raises:
        AttributeError: there is none; the text says what is near, or that the method lacks its mark.
    """
    spec = cls.endpoints.get(name)
    if spec is not None:
        return spec
    if callable(getattr(cls, name, None)) and not name.startswith("_"):
        raise AttributeError(
            f"{cls.__name__}.{name} is not an endpoint: mark the method with @endpoint to call it from outside"
        )
    near = difflib.get_close_matches(name, cls.endpoints, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    raise AttributeError(
        f"{cls.__name__} has no endpoint {name!r}{hint} It has: {', '.join(sorted(cls.endpoints)) or 'none'}."
    )


class ActorRef:
    """One actor. `ref.method(...)` calls it: a Promise, or a Stream if the endpoint is an async generator."""

    def __init__(self, owner: Host, cls: type[Actor], name: str, host: int, actor: ActorId):
        self._owner = owner
        self._cls = cls
        self._host = host
        self._actor = actor
        self._name = name
        self._load = 0

    def __getattr__(self, name: str) -> EndpointOf:
        if name.startswith("__"):
            raise AttributeError(name)
        spec = find_endpoint(self._cls, name)
        endpoint = EndpointOf([self], spec, one=True) if spec.streams else EndpointOfOne(self, spec)
        self.__dict__[name] = endpoint  # the next call finds it without coming here
        return endpoint

    def __reduce__(self) -> Any:
        return _ref_arrived, (self._cls, self._name, self._host, self._actor)

    def __repr__(self) -> str:
        return f"<ActorRef {self._name} on host {self._host}>"

    def _call(
        self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], gang: Gang | None = None
    ) -> Promise[Any]:
        return self._counted(
            self._owner.call(self._host, self._actor, method, f"{self._name}.{method}", args, kwargs, gang)
        )

    def _serve_stage(self, stage: str, method: str, args: tuple[Any, ...], gang: Gang | None = None) -> Promise[Any]:
        """Start a stage next to the actor (see `stages.py`)."""
        name = f"{self._name}.{method}"
        return self._counted(self._owner.call(self._host, SERVICE, stage, name, (self._actor, method, *args), {}, gang))

    def _counted(self, promise: Promise[Any]) -> Promise[Any]:
        if not promise.done():
            self._load += 1
            promise.ref = self
        elif promise.gang is not None and self._host in self._owner.lost_hosts:  # it cannot say so itself
            self._owner.system.leases.rank_over(promise.gang, self._name)
        return promise


def _ref_arrived(cls: type[Actor], name: str, host: int, actor: ActorId) -> ActorRef:
    codec = reading_codec()
    if codec is None:
        raise RuntimeError(f"a handle to {name} can only be sent to actors, not unpickled by hand")
    return ActorRef(cast("Host", codec.host), cls, name, host, actor)


def _group_arrived(
    name: str, cls: type[Actor], names: Sequence[str], hosts: Sequence[int], actors: Sequence[ActorId]
) -> ActorGroup:
    return ActorGroup(name, [_ref_arrived(cls, *each) for each in zip(names, hosts, actors, strict=True)])


class EndpointOf:
    """An endpoint of one actor or of all actors of a group: call it, or `map` it over a stream."""

    __slots__ = ("_capacity", "_one", "_refs", "_spec")

    def __init__(self, refs: Sequence[ActorRef], spec: Endpoint, *, one: bool, capacity: int | None = CAPACITY):
        self._refs = refs
        self._spec = spec
        self._one = one
        self._capacity = capacity

    def bounded(self, capacity: int | None) -> EndpointOf:
        """Return the endpoint with a bound: streams from it hold at most so many items before their producers pause."""
        if capacity is not None and capacity < 1:
            raise ValueError(f"bounded needs a capacity >= 1, or None for no bound; got {capacity}")
        return EndpointOf(self._refs, self._spec, one=self._one, capacity=capacity)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._one and not self._spec.streams:
            return self._refs[0]._call(self._spec.name, args, kwargs)
        return self._call_all([(args, kwargs)] * len(self._refs))

    def each(self, *args: Sequence[Any], **kwargs: Sequence[Any]) -> Any:
        """Call every rank with its own arguments: each is a sequence with one entry per rank."""
        n = len(self._refs)
        for what, values in [*((f"argument {i}", a) for i, a in enumerate(args)), *kwargs.items()]:
            if not isinstance(values, Sequence) or len(values) != n:
                got = f"{len(values)} values" if isinstance(values, Sequence) else f"a {type(values).__name__}"
                raise UserError(
                    f"{self._refs[0]._name}.{self._spec.name}: each() needs one value per rank, so a list of {n} for "
                    f"{what}; got {got}"
                )
        per_rank = [
            (tuple(values[i] for values in args), {key: values[i] for key, values in kwargs.items()}) for i in range(n)
        ]
        return self._call_all(per_rank)

    def _call_all(self, per_rank: Sequence[tuple[tuple[Any, ...], dict[str, Any]]]) -> Any:
        if self._spec.streams:
            return self._stream(per_rank)
        owner = self._refs[0]._owner
        gang = (*owner.number(), len(self._refs)) if self._spec.device else None
        with owner.codec.one_copy() if len(self._refs) > 1 else nullcontext():
            calls = [ref._call(self._spec.name, a, k, gang) for ref, (a, k) in zip(self._refs, per_rank, strict=True)]
        return Gathered(calls, owner.loop, self._spec.joint)

    def any(self, *args: Any, **kwargs: Any) -> Any:
        """Call the rank with the fewest calls under way."""
        ref = min(self._refs, key=lambda ref: ref._load)
        return EndpointOf([ref], self._spec, one=True, capacity=self._capacity)(*args, **kwargs)

    def map(
        self, source: Any, *, batch: int | None = None, concurrency: int | None = None, **kwargs: Any
    ) -> Stream[Any]:
        """Call the endpoint for every item of a stream, on whichever rank is free; results in order of completion.

        Args:
            source: a Stream, or anything that `Stream.of` takes.
            batch: give the endpoint lists of so many items (fewer at the end); it returns as many results.
            concurrency: calls at a time on each rank. Default: 1 for device endpoints, else 16.
            kwargs: passed to every call.

        A rank that dies gives its items back to the others. An async-generator endpoint may make any number of items
        of each.
        """
        if batch is not None and batch < 1:
            raise ValueError(f"map needs batch >= 1, got {batch}")
        if concurrency is not None and concurrency < 1:
            raise ValueError(f"map needs concurrency >= 1, got {concurrency}")
        stream = source if isinstance(source, Stream) else Stream.of(source)
        sink = self._sink()
        shared: Stream[Any] = Stream(stream.handle)
        args = (shared, sink.handle, self._capacity, batch, concurrency, kwargs)
        calls = [ref._serve_stage("map", self._spec.name, args) for ref in self._refs]
        drive(sink.handle.host, sink, calls, stream)
        return sink

    def _stream(self, per_rank: Sequence[tuple[tuple[Any, ...], dict[str, Any]]]) -> Stream[Any]:
        sink = self._sink()
        owner = sink.handle.host
        gang = (*owner.number(), len(self._refs)) if self._spec.device and self._spec.gang and not self._one else None
        calls = [
            ref._serve_stage("generate", self._spec.name, (sink.handle, self._capacity, args, kwargs), gang)
            for ref, (args, kwargs) in zip(self._refs, per_rank, strict=True)
        ]
        drive(owner, sink, calls)
        return sink

    def _sink(self) -> Stream[Any]:
        ref = self._refs[0]
        group = ref._name if self._one else ref._name.partition("[")[0]
        origin = f"{ref._name.partition('[')[0]}.{self._spec.name}"
        return Stream.new(ref._owner, f"{group}.{self._spec.name}", self._capacity, origin)


class EndpointOfOne(EndpointOf):
    """An endpoint of one actor that is no stream: what most calls are made on, and so made quick to call."""

    __slots__ = ("_name", "_ref")

    def __init__(self, ref: ActorRef, spec: Endpoint):
        super().__init__([ref], spec, one=True)
        self._ref = ref
        self._name = f"{ref._name}.{spec.name}"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        ref = self._ref
        promise = ref._owner.call(ref._host, ref._actor, self._spec.name, self._name, args, kwargs)
        if not promise.done():  # its host is not lost
            ref._load += 1
            promise.ref = ref
        return promise


class _Addressed:
    """`group.each` and `group.any`: the same endpoints, addressed in another way."""

    def __init__(self, group: ActorGroup, how: str):
        self._group = group
        self._how = how

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(getattr(self._group, name), self._how)


class ActorGroup:
    """Actors of one class, one per rank.

    `group.m(x)` calls every rank and is awaited to a list in rank order (rank 0's value if the endpoint is joint);
    `group[i].m(x)` calls one; `group.each.m([…])` gives rank i its own argument; `group.any.m(x)` takes the least
    loaded; `group.m.map(stream)` feeds ranks as they become free. The first rank to fail cancels the call on the
    others.
    """

    def __init__(self, name: str, refs: Sequence[ActorRef]):
        self._group_name = name
        self._refs = list(refs)

    def __getattr__(self, name: str) -> EndpointOf:
        if name.startswith("__"):
            raise AttributeError(name)
        if not self._refs:
            raise UserError(f"{self._group_name}[...] selects no rank, so there is nobody to call {name}() on")
        return EndpointOf(self._refs, find_endpoint(self._refs[0]._cls, name), one=False)

    @property
    def each(self) -> Any:
        """Every rank with its own arguments."""
        return _Addressed(self, "each")

    @property
    def any(self) -> Any:
        """The least loaded rank."""
        return _Addressed(self, "any")

    @property
    def endpoints(self) -> Collection[str]:
        """Names of the endpoints that the actors have."""
        return self._refs[0]._cls.endpoints if self._refs else ()

    @property
    def names(self) -> list[str]:
        """The actors' names, in rank order."""
        return [ref._name for ref in self._refs]

    @property
    def hosts(self) -> list[int]:
        """The host of each rank."""
        return [ref._host for ref in self._refs]

    def __getitem__(self, rank: Any) -> Any:
        if isinstance(rank, slice):
            return ActorGroup(self._group_name, self._refs[rank])
        if not -len(self) <= rank < len(self):
            raise IndexError(f"{self._group_name} has {len(self)} ranks, so no rank {rank}")
        return self._refs[rank]

    def __len__(self) -> int:
        return len(self._refs)

    def __iter__(self) -> Iterator[ActorRef]:
        return iter(self._refs)

    def __reduce__(self) -> Any:
        """Pickle handles as columns: a spawn on n hosts sends n handles to n hosts, and handles one by one would cost
        n² of a call."""
        if not self._refs:
            return ActorGroup, (self._group_name, [])
        columns = [(ref._name, ref._host, ref._actor) for ref in self._refs]
        return _group_arrived, (self._group_name, self._refs[0]._cls, *zip(*columns, strict=True))

    def __repr__(self) -> str:
        return f"<ActorGroup {self._group_name} of {len(self)} on hosts {self.hosts}>"
