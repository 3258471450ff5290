"""Wrong use gives one clear error at the call that is wrong, and the error says what to do instead."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncIterator
from typing import Any

import pytest

from rlinf import Actor, ActorSystem, Stream, endpoint
from rlinf.runtime.base.errors import ActorDied, UserError

pytestmark = pytest.mark.worlds("local", "serialize", "lane")


class Worker(Actor):
    async def setup(self, *, size: int = 1, name: str = "") -> None:
        self.size = size

    @endpoint
    async def score(self, sample: Any) -> Any:
        return sample

    @endpoint
    async def generate(self, n: int) -> AsyncIterator[int]:
        for i in range(n):
            yield i

    async def forgotten(self) -> None:
        """Lacks its mark."""

    def helper(self) -> None:
        """Not for others either."""


class Reserved(Actor):
    @endpoint
    async def each(self) -> None:
        """A name that groups use."""


class Idle(Actor):
    pass


class FailsToSetUp(Actor):
    async def setup(self) -> None:
        if self.rank == 1:
            raise OSError("no such model")

    async def close(self) -> None:
        closed.append(self.rank)


closed: list[int] = []


async def _worker(system: ActorSystem, hosts: tuple[int, ...] = (0, 1)) -> Any:
    return await system.spawn(Worker, hosts=list(hosts), name="worker")


# Endpoints ---------------------------------------------------------------------------------------------------------


@pytest.mark.worlds("local")
async def test_an_unknown_endpoint_is_answered_with_the_nearest_name(system: ActorSystem) -> None:
    group = await _worker(system)
    for handle in (group, group[0], group.any, group.each):
        with pytest.raises(AttributeError, match=r"'scor'.*'score'\?"):
            handle.scor(1)
    with pytest.raises(AttributeError, match=r"endpoint 'xyz'\."):
        group.xyz(1)
    idle = await system.spawn(Idle, hosts=[0], name="idle")
    with pytest.raises(AttributeError, match="It has: none"):
        idle.work()


@pytest.mark.worlds("local")
async def test_a_method_without_its_mark_is_named(system: ActorSystem) -> None:
    group = await _worker(system)
    for name in ("forgotten", "helper"):
        with pytest.raises(AttributeError, match=rf"Worker\.{name}.*@endpoint"):
            getattr(group, name)()


def test_an_endpoint_must_be_async() -> None:
    def work(self: Any) -> None: ...

    with pytest.raises(TypeError, match=r"@endpoint.*`async"):
        endpoint(work)


@pytest.mark.worlds("local")
async def test_each_needs_one_value_per_rank(system: ActorSystem) -> None:
    group = await _worker(system)
    for call, what in [
        (lambda: group.each.score([1]), "list of 2 for argument 0; got 1 values"),
        (lambda: group.each.score([1, 2, 3]), "got 3 values"),
        (lambda: group.score.each(5), "got a int"),
        (lambda: group.each.score(sample=[1]), "list of 2 for sample; got 1 values"),
        (lambda: group.each.generate([1]), "got 1 values"),
    ]:
        with pytest.raises(UserError, match=f"needs.*value.*rank.*{what}"):
            call()


@pytest.mark.worlds("local")
async def test_a_rank_that_does_not_exist_is_an_index_error(system: ActorSystem) -> None:
    group = await _worker(system)
    for rank in (2, -3):
        with pytest.raises(IndexError, match=f"worker.*2 ranks.*{rank}"):
            group[rank]
    assert [ref._name for ref in group] == ["worker[0]", "worker[1]"]
    with pytest.raises(UserError, match=r"selects.*rank.*score\(\)"):
        group[5:].score(1)


@pytest.mark.worlds("local")
async def test_numbers_that_make_no_sense_are_refused_at_once(system: ActorSystem) -> None:
    group = await _worker(system)
    with pytest.raises(ValueError, match=r"needs batch >= 1.*0"):
        group.score.map([1], batch=0)
    with pytest.raises(ValueError, match=r"needs concurrency >= 1.*0"):
        group.score.map([1], concurrency=0)
    with pytest.raises(ValueError, match=r"bounded.*capacity >= 1"):
        group.generate.bounded(0)
    with pytest.raises(ValueError, match=r"capacity.*least 1"):
        await system.channel("c", capacity=0)
    with pytest.raises(TypeError, match="not iterable"):
        group.score.map(7)


@pytest.mark.worlds("local")
async def test_a_promise_is_not_a_stream(system: ActorSystem) -> None:
    group = await _worker(system)
    for promise in (group[0].score([1]), group.score([1])):
        with pytest.raises(TypeError, match="await it"):
            group.score.map(promise)
        await promise


# Spawning and names ------------------------------------------------------------------------------------------------


async def test_arguments_that_do_not_fit_setup_are_refused(system: ActorSystem) -> None:
    with pytest.raises(UserError, match=r"fit.*unexpected.*'sise'"):
        await system.spawn(Worker, hosts=[1], name="worker", sise=2)


async def test_only_actors_can_be_spawned(system: ActorSystem) -> None:
    for thing in (int, Worker(), "Worker"):
        with pytest.raises(UserError, match=r"subclass.*rlinf\.Actor"):
            await system.spawn(thing, hosts=[0])  # type: ignore[type-var, arg-type]
    with pytest.raises(UserError, match=r"called 'each'"):
        await system.spawn(Reserved, hosts=[0])


async def test_hosts_must_exist(system: ActorSystem) -> None:
    with pytest.raises(UserError, match=r"unknown.*7:.*system.*0.*1"):
        await system.spawn(Worker, hosts=[0, 7], name="worker")
    with pytest.raises(UserError, match=r"hosts.*empty"):
        await system.spawn(Worker, hosts=[], name="worker")


@pytest.mark.worlds("serialize", "rpc", "lane")
async def test_a_class_in_a_function_cannot_be_spawned_elsewhere(system: ActorSystem) -> None:
    class Local(Actor):
        pass

    await system.spawn(Local, hosts=[0], name="near")
    with pytest.raises(UserError, match=r"function.*1 cannot.*top"):
        await system.spawn(Local, hosts=[0, 1], name="far")


async def test_a_name_can_be_taken_once(system: ActorSystem) -> None:
    await _worker(system)
    with pytest.raises(UserError, match=r"'worker'.*taken"):
        await _worker(system)
    with pytest.raises(UserError, match=r"'worker'.*taken"):
        await system.channel("worker")


async def test_an_unknown_name_is_said_to_be_unknown(system: ActorSystem) -> None:
    with pytest.raises(UserError, match=r"channel.*'nobody'"):
        await system.get("nobody")


async def test_a_setup_that_fails_closes_the_other_ranks_and_frees_the_name(system: ActorSystem) -> None:
    for _ in range(2):
        closed.clear()
        with pytest.raises(OSError, match=r"such model") as caught:
            await system.spawn(FailsToSetUp, hosts=[0, 1], name="fails")
        assert any("fails[1].setup() on host 1" in note for note in caught.value.__notes__)
        assert closed == [0]


# Times and places --------------------------------------------------------------------------------------------------


def test_a_handle_used_after_the_system_was_closed_says_so() -> None:
    async def main() -> None:
        for serialize in (False, True):
            async with ActorSystem.local(2, serialize=serialize) as system:
                group = await _worker(system)
                early = group[1].score(1)
                await group[1].score(2)  # so the first has its value, on host 1
                stream = group.generate(5)
            for ref in group:
                with pytest.raises(ActorDied, match=r"worker\[.\]\.score.*called"):
                    await ref.score(1)
            with pytest.raises(ActorDied, match="closed"):
                await early
            with pytest.raises(Exception, match=r"closed|gone"):
                await stream.collect()
            with pytest.raises(ActorDied, match="closed"):
                await system.spawn(Worker, hosts=[0], name="late")

    asyncio.run(main())


def test_without_a_system_a_stream_says_how_to_open_one() -> None:
    async def main() -> None:
        with pytest.raises(RuntimeError, match=r"actor system.*open.*ActorSystem\.local\(\)"):
            Stream.of([1])

    asyncio.run(main())


@pytest.mark.worlds("local")
async def test_handles_are_not_for_pickling_by_hand(system: ActorSystem) -> None:
    group = await _worker(system)
    for handle in (group[0], await system.channel("c"), Stream.of([1])):
        with pytest.raises((RuntimeError, TypeError), match=r"sent.*actors"):
            pickle.loads(pickle.dumps(handle))
    with pytest.raises(TypeError, match=r"sent.*actors"):
        pickle.dumps(group[0].score(1))
