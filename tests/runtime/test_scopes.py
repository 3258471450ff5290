"""A scope ends what was made in it: all of it, in order, however it is left."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from rlinf import Actor, ActorSystem, endpoint
from rlinf.runtime.base.errors import ActorDied, UserError
from tests.runtime.worlds import until

pytestmark = pytest.mark.worlds("local", "serialize", "lane")


class Log(Actor):
    """Remembers what the others tell it."""

    async def setup(self) -> None:
        self.lines: list[str] = []

    @endpoint
    async def note(self, line: str) -> None:
        self.lines.append(line)

    @endpoint
    async def read(self) -> list[str]:
        return self.lines


class Worker(Actor):
    """Tells a log what happens to it."""

    async def setup(self, log: Any = None, fail: int | None = None, slow: float = 0.0) -> None:
        self.log, self.slow = log, slow
        await asyncio.sleep(slow)
        if self.rank == fail:
            raise ValueError("setup went wrong")

    @endpoint
    async def echo(self, value: Any) -> Any:
        return value

    @endpoint
    async def wait(self) -> None:
        try:  # it is read of there before the answer is here: a cancellation may come between
            await self.log.note(f"{self._cell.name} waits")
            await asyncio.Event().wait()
        finally:
            await self.log.note(f"{self._cell.name} was cancelled")

    @endpoint
    async def helper(self, hosts: list[int], name: str) -> Any:
        return await self.system.spawn(Worker, hosts=hosts, name=name, log=self.log)

    @endpoint
    async def end_myself(self) -> None:
        await self.system.kill(self.group)

    async def close(self) -> None:
        await asyncio.sleep(self.slow)
        if self.log is not None:
            await self.log.note(f"closed {self._cell.name}")


class Sour(Worker):
    async def close(self) -> None:
        await super().close()
        raise OSError(f"{self._cell.name} did not close")


async def the_log(system: ActorSystem) -> Any:
    return (await system.spawn(Log, hosts=[0], name="log"))[0]


async def closings(log: Any) -> list[str]:
    return [line.removeprefix("closed ") for line in await log.read() if line.startswith("closed ")]


async def test_leaving_closes_the_actors_youngest_first(system: ActorSystem) -> None:
    log = await the_log(system)
    async with system.scope():
        for name in ("a", "b", "c"):
            await system.spawn(Worker, hosts=[1], name=name, log=log)
    assert await closings(log) == ["c[0]", "b[0]", "a[0]"]


async def test_names_are_free_again(system: ActorSystem) -> None:
    for _ in range(2):
        async with system.scope():
            group = await system.spawn(Worker, hosts=[0, 1], name="worker")
            await system.channel("mail")
            assert await group.echo(1) == [1, 1]
            with pytest.raises(UserError, match=r"'worker'.*taken"):
                await system.spawn(Worker, hosts=[1], name="worker")
            with pytest.raises(UserError, match=r"'mail'.*taken"):
                await system.channel("mail")
        with pytest.raises(UserError, match=r"channel.*'worker'"):
            await system.get("worker")


async def test_calls_to_actors_of_a_left_scope_fail_with_their_name(system: ActorSystem) -> None:
    async with system.scope():
        group = await system.spawn(Worker, hosts=[0, 1], name="worker")
    for rank in (0, 1):
        with pytest.raises(ActorDied, match=rf"worker\[{rank}\]"):
            await group[rank].echo(1)


async def test_what_runs_is_cancelled_before_anything_is_closed(system: ActorSystem) -> None:
    log = await the_log(system)
    calls = []
    async with system.scope():
        for name in ("a", "b"):
            group = await system.spawn(Worker, hosts=[0, 1], name=name, log=log)
            calls.append(asyncio.ensure_future(group.wait()))
        await until(lambda: _waiting(log, 4))
    ends = [line for line in await log.read() if "waits" not in line]
    assert sorted(ends[:4]) == [f"{name}[{rank}] was cancelled" for name in ("a", "b") for rank in (0, 1)]
    assert all(line.startswith("closed") for line in ends[4:])
    for call in calls:
        with pytest.raises((ActorDied, asyncio.CancelledError)):
            await call


async def _waiting(log: Any, count: int) -> bool:
    return sum("waits" in line for line in await log.read()) == count


async def test_a_body_that_raises_leaves_nothing(system: ActorSystem) -> None:
    log = await the_log(system)
    with pytest.raises(ZeroDivisionError):  # noqa: PT012
        async with system.scope():
            await system.spawn(Worker, hosts=[1], name="worker", log=log)
            raise ZeroDivisionError
    assert await closings(log) == ["worker[0]"]


async def test_a_cancelled_body_leaves_nothing(system: ActorSystem) -> None:
    log = await the_log(system)
    ready = asyncio.Event()

    async def body() -> None:
        async with system.scope():
            await system.spawn(Worker, hosts=[0, 1], name="worker", log=log)
            ready.set()
            await asyncio.Event().wait()

    task = asyncio.ensure_future(body())
    await ready.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert sorted(await closings(log)) == ["worker[0]", "worker[1]"]


async def test_being_cancelled_while_leaving_does_not_stop_the_leaving(system: ActorSystem) -> None:
    log = await the_log(system)
    leaving = asyncio.Event()

    async def body() -> None:
        async with system.scope():
            for name in ("a", "b"):
                await system.spawn(Worker, hosts=[1], name=name, log=log, slow=0.3)
            leaving.set()

    task = asyncio.ensure_future(body())
    await leaving.wait()
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await closings(log) == ["b[0]", "a[0]"]


async def test_an_actor_that_does_not_close_keeps_no_other_from_closing(system: ActorSystem) -> None:
    log = await the_log(system)
    with pytest.raises(OSError, match=r"c\[0\].*close"):  # noqa: PT012
        async with system.scope():
            await system.spawn(Worker, hosts=[1], name="a", log=log)
            await system.spawn(Sour, hosts=[0], name="b", log=log)
            await system.spawn(Sour, hosts=[1], name="c", log=log)
    assert await closings(log) == ["c[0]", "b[0]", "a[0]"]


async def test_what_an_actor_spawned_ends_with_it_and_before_it(system: ActorSystem) -> None:
    log = await the_log(system)
    async with system.scope():
        parent = await system.spawn(Worker, hosts=[1], name="parent", log=log)
        helper = await parent[0].helper([0, 1], "helper")
        assert await helper.echo(1) == [1, 1]
        grandchild = await helper[0].helper([1], "grandchild")
        assert await grandchild.echo(2) == [2]
    closed = await closings(log)
    assert sorted(closed) == ["grandchild[0]", "helper[0]", "helper[1]", "parent[0]"]
    assert closed.index("grandchild[0]") < closed.index("helper[0]") < closed.index("parent[0]")


async def test_killing_an_actor_ends_what_it_spawned(system: ActorSystem) -> None:
    log = await the_log(system)
    parent = await system.spawn(Worker, hosts=[1], name="parent", log=log)
    await parent[0].helper([0], "helper")
    await system.kill(parent)
    assert await closings(log) == ["helper[0]", "parent[0]"]
    assert await (await system.spawn(Worker, hosts=[0], name="helper")).echo(1) == [1]


async def test_scopes_nest(system: ActorSystem) -> None:
    log = await the_log(system)
    async with system.scope():
        await system.spawn(Worker, hosts=[0], name="outer", log=log)
        async with system.scope():
            await system.spawn(Worker, hosts=[1], name="inner", log=log)
        assert await closings(log) == ["inner[0]"]
        await system.spawn(Worker, hosts=[1], name="later", log=log)
    assert await closings(log) == ["inner[0]", "later[0]", "outer[0]"]


async def test_a_scope_that_another_task_keeps_open_ends_with_the_one_around_it(system: ActorSystem) -> None:
    log = await the_log(system)
    ready = asyncio.Event()

    async def background() -> None:
        async with system.scope():
            await system.spawn(Worker, hosts=[1], name="inner", log=log)
            ready.set()
            await asyncio.Event().wait()

    async with system.scope():
        task = asyncio.ensure_future(background())
        await ready.wait()
    assert await closings(log) == ["inner[0]"]
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def test_a_spawn_that_fails_on_one_rank_leaves_nothing(system: ActorSystem) -> None:
    log = await the_log(system)
    with pytest.raises(ValueError, match=r"setup.*wrong"):
        await system.spawn(Worker, hosts=[0, 1], name="worker", log=log, fail=1)
    assert await closings(log) in ([], ["worker[0]"])  # rank 0 is closed if it was set up, and else cancelled
    assert await (await system.spawn(Worker, hosts=[0, 1], name="worker")).echo(1) == [1, 1]


async def test_a_cancelled_spawn_leaves_nothing(system: ActorSystem) -> None:
    log = await the_log(system)
    for turns in [*range(8), 50]:
        task = asyncio.ensure_future(system.spawn(Worker, hosts=[0, 1], name="worker", log=log, slow=0.2))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert await closings(log) == []  # nothing was set up
    assert await (await system.spawn(Worker, hosts=[0, 1], name="worker")).echo(1) == [1, 1]


async def test_a_killed_group_leaves_its_name_to_the_next_for_good(system: ActorSystem) -> None:
    async with system.scope():
        first = await system.spawn(Worker, hosts=[0, 1], name="worker")
        again = await system.get("worker")
        await system.kill(again)
        second = await system.spawn(Worker, hosts=[0, 1], name="worker")
        await system.kill(first)  # a second time
        assert await (await system.get("worker")).echo(1) == [1, 1]
        assert await second.echo(2) == [2, 2]


async def test_an_actor_may_end_itself(system: ActorSystem) -> None:
    log = await the_log(system)
    worker = await system.spawn(Worker, hosts=[1], name="worker", log=log)
    with pytest.raises((ActorDied, asyncio.CancelledError)):
        await worker[0].end_myself()
    await until(lambda: closings(log))
    assert await closings(log) == ["worker[0]"]


class _Collector:
    """Stands in for `gc`: how many objects are frozen."""

    def __init__(self, frozen: int):
        self.frozen = frozen

    def get_freeze_count(self) -> int:
        return self.frozen

    def freeze(self) -> None:
        self.frozen += 1000

    def unfreeze(self) -> None:
        self.frozen = 0


@pytest.mark.parametrize(("before", "within"), [(0, 1000), (7, 7)])
async def test_what_lives_before_a_system_is_frozen_until_the_last_one_closes_unless_the_program_froze(
    monkeypatch: pytest.MonkeyPatch, before: int, within: int
) -> None:
    monkeypatch.setattr("rlinf.runtime.system.system._left_alone", False)
    monkeypatch.setattr("rlinf.runtime.system.system.gc", collector := _Collector(before))
    async with ActorSystem.local():
        assert collector.frozen == within
        async with ActorSystem.local():
            assert collector.frozen == within
        assert collector.frozen == within
    assert collector.frozen == before
    with pytest.raises(RuntimeError, match="stop"):
        async with ActorSystem.local():
            raise RuntimeError("stop")
    assert collector.frozen == before
