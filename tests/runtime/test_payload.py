"""Payloads: whatever is sent arrives, by the route that is cheapest, and what was held for it comes back."""

from __future__ import annotations

import collections
import enum
import gc
import warnings
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from rlinf import Actor, ActorGroup, ActorSystem, Channel, Stream, endpoint
from rlinf.runtime.base.errors import UserError
from rlinf.runtime.values.pickler import INLINE_BYTES, SEALED_BYTES
from rlinf.runtime.values.promise import holds_promise
from tests.runtime.worlds import DTYPES, until

SMALL, LARGE = 10, INLINE_BYTES // 2
"""Elements that ride in the message, and elements that do not (two bytes each, or more)."""


@dataclass(frozen=True, slots=True)
class Sample:
    tokens: torch.Tensor
    mask: np.ndarray[Any, Any]
    more: dict[str, Any] = field(default_factory=dict)


@dataclass
class Holder:
    """Holds a function where nobody expects one."""

    name: str
    inside: list[Any]


class Colour(enum.Enum):
    RED = 1


class Refuses:
    """Fails in its own way to be pickled."""

    def __reduce__(self) -> Any:
        raise OverflowError("too much of it")


class Unreadable:
    """Can be pickled, and not read again."""

    def __reduce__(self) -> Any:
        return _explode, ()


def _explode() -> None:
    raise LookupError("exploded while it was read")


class Echo(Actor):
    async def setup(self) -> None:
        self.held: list[Any] = []

    @endpoint
    async def echo(self, value: Any) -> Any:
        return value

    @endpoint
    async def hold(self, value: Any) -> None:
        self.held.append(value)

    @endpoint
    async def drop(self) -> None:
        self.held.clear()
        gc.collect()

    @endpoint
    async def sums(self) -> list[float]:
        return [float(value.sum()) for value in self.held]

    @endpoint
    async def make(self, n: int) -> torch.Tensor:
        return torch.arange(n)

    @endpoint
    async def shared(self, n: int) -> torch.Tensor:
        made = self.empty_shared((n,), torch.int64)
        torch.arange(n, out=made)
        return made

    @endpoint
    async def describe(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        return (tensor.dtype, tuple(tensor.shape), tensor.requires_grad, tensor.is_contiguous())

    @endpoint
    async def slots(self) -> int:
        arena = self._cell.host.values.arena
        return arena.statistics().slots if arena is not None else 0

    @endpoint
    async def unreadable(self) -> Any:
        return [torch.zeros(LARGE), Unreadable()]

    @endpoint
    async def use(self, ref: Any, n: int) -> int:
        """Calls an actor that it was handed."""
        result: int = await ref.echo(n)
        return result

    @endpoint
    async def use_all(self, group: ActorGroup, n: int) -> Any:
        return await group.echo(n)

    @endpoint
    async def read(self, stream: Stream[int]) -> list[int]:
        return [item async for item in stream]

    @endpoint
    async def drain(self, channel: Channel) -> list[int]:
        return [item async for item in channel]

    @endpoint
    async def my_group(self) -> ActorGroup:
        return self.group

    @endpoint
    async def my_stream(self, n: int) -> Stream[int]:
        return Stream.of(range(n))

    @endpoint
    async def my_channel(self, n: int) -> Channel:
        channel = await self.system.channel(f"made by {self.rank}")
        for i in range(n):
            await channel.put(i)
        channel.close()
        return channel


async def _pair(system: ActorSystem) -> Any:
    return await system.spawn(Echo, hosts=[0, 1], name="echo")


def _bits(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return plain.view(torch.uint8).numpy().tobytes()


# What arrives ------------------------------------------------------------------------------------------------------


async def test_tensors_of_every_type_and_size_arrive_bit_by_bit(system: ActorSystem) -> None:
    _, far = await _pair(system)
    for dtype in DTYPES[:-1]:
        for n in (SMALL, LARGE):
            tensor = torch.arange(n * dtype.itemsize, dtype=torch.int64).to(torch.uint8).remainder(2).view(dtype)
            got = await far.echo(tensor)
            assert (got.dtype, got.shape) == (dtype, tensor.shape)
            assert _bits(got) == _bits(tensor), dtype


async def test_tensors_of_every_shape_arrive(system: ActorSystem) -> None:
    _, far = await _pair(system)
    base = torch.arange(4 * LARGE).reshape(4, LARGE)
    for tensor in [
        torch.tensor(3.5),
        torch.zeros(0),
        torch.zeros(3, 0, 2),
        base,
        base.T,
        base[:, ::2],
        base[1:3, 5:9],
        base[2].expand(3, -1),
        torch.ones(1).expand(100_000),
        torch.complex(torch.ones(LARGE), torch.ones(LARGE)).conj(),
        torch.ones(3, dtype=torch.complex64).conj(),
        torch.complex(torch.ones(LARGE), torch.ones(LARGE)).conj().imag,
    ]:
        got = await far.echo(tensor)
        assert got.shape == tensor.shape
        assert torch.equal(got, tensor)


@pytest.mark.worlds("serialize", "rpc", "lane")
async def test_a_tensor_travels_as_data_without_its_graph(system: ActorSystem) -> None:
    _, far = await _pair(system)
    for n in (SMALL, LARGE):
        leaf = torch.ones(n, requires_grad=True)
        for tensor in (leaf, leaf * 2, torch.nn.Parameter(torch.ones(n))):
            assert await far.describe(tensor) == (torch.float32, (n,), False, True)


async def test_unusual_tensors_arrive_as_pickle_sends_them(system: ActorSystem) -> None:
    _, far = await _pair(system)
    sparse = torch.eye(5).to_sparse()
    assert torch.equal((await far.echo(sparse)).to_dense(), torch.eye(5))
    with warnings.catch_warnings(action="ignore"):  # quantized tensors are on their way out
        quantized = torch.quantize_per_tensor(torch.ones(4 * LARGE), 0.5, 0, torch.quint8)
        assert torch.equal((await far.echo(quantized)).dequantize(), torch.ones(4 * LARGE))
    state = torch.nn.Linear(100, 100).state_dict()
    got = await far.echo(state)
    assert list(got) == list(state)
    assert all(torch.equal(got[key], state[key]) for key in state)


async def test_numpy_arrays_arrive_with_type_shape_and_values(system: ActorSystem) -> None:
    _, far = await _pair(system)
    for array in [
        np.float32(2.5),
        np.array(7),
        np.arange(5, dtype=">i4"),
        np.arange(LARGE * 4, dtype=">i4"),
        np.arange(LARGE * 2, dtype=np.float64).reshape(2, -1),
        np.asfortranarray(np.arange(LARGE * 4, dtype=np.int16).reshape(4, -1)),
        np.arange(LARGE * 4)[::2],
        np.zeros((0, 3)),
        np.array(["text", "more text"]),
        np.array([{"a": 1}, None], dtype=object),
        np.zeros(LARGE, dtype=[("x", "i4"), ("y", "f8")]),
        np.arange(LARGE, dtype=np.complex128),
        np.arange(LARGE).astype("datetime64[s]"),
        np.ma.masked_array(np.arange(LARGE), mask=np.arange(LARGE) % 2),
    ]:
        got = await far.echo(array)
        assert type(got) is type(array)
        assert (got.dtype, got.shape) == (array.dtype, array.shape)
        assert np.array_equal(got, array)
    frozen = np.arange(LARGE * 4)
    frozen.flags.writeable = False
    assert np.array_equal(await far.echo(frozen), frozen)


async def test_any_nesting_arrives(system: ActorSystem) -> None:
    _, far = await _pair(system)
    shared = torch.arange(LARGE)
    value = {
        "samples": [Sample(torch.arange(3), np.arange(LARGE * 2), {"n": (1, 2.5, None, "s", b"b")})],
        ("a", 1): {1, 2},
        "same": [shared, shared],
        "kinds": collections.OrderedDict(c=Colour.RED, t=torch.float16, s=slice(1, 2), r=range(3)),
        "deep": [[[[[{"x": torch.tensor([1.5])}]]]]],
    }
    got = await far.echo(value)
    (sample,) = got["samples"]
    assert type(sample) is Sample
    assert torch.equal(sample.tokens, torch.arange(3))
    assert np.array_equal(sample.mask, np.arange(LARGE * 2))
    assert sample.more == {"n": (1, 2.5, None, "s", b"b")}
    assert got["same"][0] is got["same"][1]
    assert got["kinds"] == value["kinds"]
    assert got["deep"][0][0][0][0][0]["x"].item() == 1.5


async def test_classes_and_functions_of_a_module_arrive_by_name(system: ActorSystem) -> None:
    _, far = await _pair(system)
    assert await far.echo(Sample) is Sample
    assert await far.echo(_bits) is _bits


# How it travels ----------------------------------------------------------------------------------------------------


@pytest.mark.worlds("serialize", "rpc", "lane")
async def test_small_tensors_ride_in_the_message_and_large_ones_through_shared_memory(system: ActorSystem) -> None:
    codec = system._host.codec
    assert codec.route(torch.zeros(SMALL), 1) == "inline"
    assert codec.route(torch.zeros(LARGE), 1) == "arena"


async def test_the_sender_may_forget_a_tensor_at_once(system: ActorSystem) -> None:
    _, far = await _pair(system)
    for n in range(20):
        await far.hold(torch.full((LARGE,), float(n)))
    gc.collect()
    assert await far.sums() == [float(n * LARGE) for n in range(20)]


async def test_views_of_what_arrived_keep_its_memory_and_the_last_gives_it_back(system: ActorSystem) -> None:
    near, far = await _pair(system)
    got = await far.make(LARGE)
    view = got[10:20].reshape(2, 5)
    array = got.numpy()[100:110]
    del got
    gc.collect()
    await far.make(LARGE)  # would overwrite a slot that was free
    assert view.flatten().tolist() == list(range(10, 20))
    del view
    gc.collect()
    await far.make(LARGE)
    assert array.tolist() == list(range(100, 110))
    del array
    gc.collect()
    await until(lambda: _none_left(far))
    await near.drop()


async def _none_left(ref: Any) -> bool:
    return await ref.slots() == 0


async def test_slots_return_when_the_receiver_is_done(system: ActorSystem) -> None:
    near, far = await _pair(system)
    for _ in range(5):
        await far.hold([torch.zeros(LARGE), np.zeros(LARGE)])
        await far.drop()
    await until(lambda: _none_left(near))


@pytest.mark.worlds("serialize", "rpc", "lane")
async def test_a_tensor_goes_to_all_ranks_of_a_call_in_one_copy(system: ActorSystem) -> None:
    host = system._host
    codec, arena = host.codec, host.codec.arena
    assert arena is not None
    before = arena.statistics().slots
    for count in (LARGE, 2 << 20):  # the second is copied by other threads
        tensor, other = torch.arange(float(count)), torch.ones(count)
        with codec.one_copy():
            _, _, (first, second) = codec.encode((tensor, other), 1)
            _, _, (again,) = codec.encode({"the same": tensor}, 1)
            _, _, (part,) = codec.encode(tensor[1:], 1)
        assert first.slot == again.slot
        assert len({first.slot, second.slot, part.slot}) == 3
        _, _, (later,) = codec.encode(tensor, 1)
        assert later.slot != first.slot  # the tensor may have been written to since
        await host.link(1).drained()
        arena.release(1, [each.slot for each in (first, again, second, part, later)])
    assert arena.statistics().slots == before


async def test_a_tensor_made_in_shared_memory_is_handed_over_without_a_copy(system: ActorSystem) -> None:
    near, far = await _pair(system)
    if not await _has_arena(system):
        return
    got = await far.shared(LARGE)
    again = await far.echo(got)
    assert torch.equal(got, torch.arange(LARGE))
    assert torch.equal(again, got)
    del got, again
    await until(lambda: _none_left(far))
    await near.drop()


async def _has_arena(system: ActorSystem) -> bool:
    return system._host.values.arena is not None


async def test_slots_return_when_nobody_reads_the_message(system: ActorSystem) -> None:
    near, far = await _pair(system)
    call = far.hold(torch.zeros(LARGE))
    call.cancel()
    reply = far.make(LARGE)
    reply.want()
    reply.cancel()
    await far.drop()
    await until(lambda: _none_left(far))
    await until(lambda: _none_left(near))


@pytest.mark.worlds("serialize", "rpc", "lane")
async def test_slots_return_when_part_of_a_message_cannot_be_made(system: ActorSystem) -> None:
    near, far = await _pair(system)
    with pytest.raises(UserError, match="lambda"):
        far.hold([torch.zeros(LARGE), lambda: 0, torch.zeros(LARGE)])
    await until(lambda: _none_left(near))


@pytest.mark.worlds("serialize", "rpc", "lane")
async def test_slots_return_when_a_message_cannot_be_read(system: ActorSystem) -> None:
    near, far = await _pair(system)
    with pytest.raises(LookupError, match="exploded"):
        await far.echo([torch.zeros(LARGE), Unreadable(), torch.zeros(LARGE)])
    with pytest.raises(LookupError, match="exploded"):
        await far.unreadable()
    assert await far.echo(1) == 1
    await until(lambda: _none_left(near))
    await until(lambda: _none_left(far))


# Handles -----------------------------------------------------------------------------------------------------------


async def test_handles_to_actors_work_wherever_they_arrive(system: ActorSystem) -> None:
    near, far = group = await _pair(system)
    for user in group:
        for used in group:
            assert await user.use(used, 3) == 3
            assert await user.use({"ref": used}["ref"], 4) == 4
        assert await user.use_all(group, 5) == [5, 5]
    assert await (await far.my_group()).echo(6) == [6, 6]
    assert await (await far.echo([near]))[0].echo(7) == 7


async def test_streams_and_channels_work_wherever_they_arrive(system: ActorSystem) -> None:
    pair = await _pair(system)
    for ref in pair:
        assert [await reader.read(ref.my_stream(4)) for reader in pair] == [[0, 1, 2, 3]] * 2
        assert await ref.read(Stream.of(range(5))) == [0, 1, 2, 3, 4]
        assert [item async for item in await ref.my_stream(5)] == [0, 1, 2, 3, 4]
        assert [item async for item in await ref.my_channel(5)] == [0, 1, 2, 3, 4]
        channel = await system.channel(f"mine {ref._host}")
        await channel.put(1)
        channel.close()
        assert await ref.drain(channel) == [1]


# Bad values --------------------------------------------------------------------------------------------------------


@pytest.mark.worlds("serialize", "rpc", "lane")
async def test_what_cannot_be_sent_is_named_with_its_place(system: ActorSystem) -> None:
    _, far = await _pair(system)
    tensor, ref = torch.zeros(3), far
    for value, place in [
        (lambda: 0, r"\[0\]\[0\]: a builtins.function"),
        ({"a": [1, {"f": lambda: 0}]}, r"\['a'\]\[1\]\['f'\]: a builtins.function"),
        (Holder("x", [tensor, lambda: 0]), r"\.inside\[1\]: a builtins.function"),
        ([tensor, far.make(3), (i for i in range(3))], r"\[2\]: a builtins.generator"),
        ([ref, Refuses()], r"\[1\]: a tests.runtime.test_payload.Refuses.*too much of it"),
    ]:
        with pytest.raises(UserError, match=place) as caught:
            far.echo(value)
        assert "top level" in str(caught.value)


def test_promises_are_looked_for_in_containers_only() -> None:
    assert not holds_promise([1, "a", {"b": (torch.zeros(2), np.zeros(2))}, Sample(torch.zeros(1), np.zeros(1))])
    assert not holds_promise(SEALED_BYTES)
