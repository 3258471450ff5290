"""A pool of containers: how many there are at once, who waits, and that every one of them ends."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter
from dataclasses import replace

import pytest

from rlinf.sandbox.containers.namespaces import Namespaces
from rlinf.sandbox.containers.pool import Kind, Pool
from rlinf.sandbox.containers.protocol import LIMITS, ContainerEnded, ContainersError


class Box:
    def __init__(self, provider, image):
        self.provider, self.image, self.name = provider, image, f"box-{len(provider.started)}"
        provider.alive.add(self)

    async def snapshot(self):
        return f"{self.image}, prepared"

    async def end(self):
        await asyncio.sleep(0)
        self.provider.alive.discard(self)


class Provider:
    """Containers that hold nothing."""

    def __init__(self):
        self.started, self.alive, self.most, self.failing = [], set(), 0, 0

    async def start(self, image, **_):
        await asyncio.sleep(0)
        if self.failing:
            self.failing -= 1
            raise ContainersError("the daemon is away")
        self.started.append(image)
        box = Box(self, image)
        self.most = max(self.most, len(self.alive))
        return box

    async def close(self):
        self.alive.clear()


async def test_no_more_than_its_size_are_alive_and_the_first_come_are_first():
    provider, order = Provider(), []
    async with Pool(provider, size=3) as pool:
        kind = Kind("image")

        async def episode(number):
            async with pool.container(kind):
                order.append(number)
                await asyncio.sleep(0)

        await asyncio.gather(*map(episode, range(50)))
        assert (provider.most, order, len(provider.started), provider.alive) == (3, [*range(50)], 50, set())


async def test_an_episode_has_a_deadline_and_so_has_waiting_for_a_place():
    provider = Provider()
    async with Pool(provider, size=1) as pool:
        with pytest.raises(TimeoutError, match="box-1"):
            async with pool.container(Kind(), seconds=0.01):
                await asyncio.sleep(60)
        async with pool.container(Kind()):
            with pytest.raises(ContainersError, match="size="):
                async with pool.container(Kind(), wait=0.01):
                    pass
        async with pool.container(Kind(), wait=5):
            pass
        assert not provider.alive


async def test_what_an_episode_raises_or_its_cancellation_ends_its_container():
    provider = Provider()
    async with Pool(provider, size=2) as pool:

        async def episode():
            async with pool.container(Kind()):
                await asyncio.sleep(60)

        for _ in range(5):
            with pytest.raises(ZeroDivisionError):
                async with pool.container(Kind()):
                    raise ZeroDivisionError
            for turns in range(6):  # cancelled while it starts, runs and ends
                task = asyncio.create_task(episode())
                for _ in range(turns):
                    await asyncio.sleep(0)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
        for _ in range(5):
            await asyncio.sleep(0)
        assert not provider.alive
        async with pool.container(Kind(), wait=1), pool.container(Kind(), wait=1):  # no place was lost
            assert len(provider.alive) == 2


async def test_what_a_kind_has_in_common_is_prepared_once_and_again_where_that_failed():
    provider, prepared = Provider(), []

    async def prepare(box):
        prepared.append(box.image)
        await asyncio.sleep(0)

    async with Pool(provider, size=4) as pool:
        kind = Kind("image", prepare=prepare)

        async def episode():
            async with pool.container(kind) as box:
                return box.image

        provider.failing = 1
        with pytest.raises(ContainersError, match="away"):
            await episode()
        assert Counter(await asyncio.gather(*(episode() for _ in range(10)))) == {"image, prepared": 10}
        assert prepared == ["image"]


async def test_containers_are_started_ahead_of_the_kinds_last_asked_for():
    provider = Provider()
    async with Pool(provider, size=2, ahead=1) as pool:
        one, other = Kind("one"), Kind("other")
        for kind in (one, one, other, other):
            async with pool.container(kind):
                for _ in range(4):
                    await asyncio.sleep(0)
        assert Counter(provider.started) == {"one": 3, "other": 3}
        assert [box.image for box in provider.alive] == ["other"]
    assert not provider.alive


EPISODES = """
import asyncio, os, random, sys
from dataclasses import replace
from rlinf.sandbox.containers.namespaces import Namespaces
from rlinf.sandbox.containers.pool import Kind, Pool
from rlinf.sandbox.containers.protocol import LIMITS

async def main():
    async with Pool(Namespaces(sys.argv[1]), size=8) as pool:
        kind = Kind(workdir="/repo", limits=replace(LIMITS, file_bytes=4 << 20))
        done = 0

        async def episode(number):
            nonlocal done
            async with pool.container(kind) as box:
                await box.run("(setsid sleep 31415 &) ; echo $$ > file")
                if number >= 104:
                    await box.run("setsid sleep 31415")
                done += 1
                print(done, flush=True)

        await asyncio.gather(*map(episode, range(200)))

asyncio.run(main())
"""


def left(directory):
    """Processes of containers of a directory, and what its runs have on the disk."""
    lines = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout.splitlines()
    runs = [*(directory / "runs").glob("*")]
    return [line for line in lines if str(directory) in line or "sleep 31415" in line] + runs


async def test_a_run_that_is_killed_leaves_no_process_and_no_directory(tmp_path):
    script = textwrap.dedent(EPISODES)
    process = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        for line in process.stdout:
            if int(line) == 100:
                break
        else:
            pytest.skip("no namespaces here")
        assert left(tmp_path)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    end = time.monotonic() + 30
    while still := left(tmp_path):
        assert time.monotonic() < end, still
        await asyncio.sleep(0.05)


async def test_episodes_of_every_kind_of_fault_leave_nothing(tmp_path):
    limits = replace(LIMITS, file_bytes=2 << 20, output_bytes=5_000, processes=30)
    seen = Counter()

    async def episode(pool, kind, number):
        fault = number % 8
        async with pool.container(kind, seconds=0.5 if fault == 6 else 60) as box:
            commands = {
                0: "echo fine",
                1: "yes",
                2: "cat /dev/zero > /big; sleep 9",
                3: "b() { b | b & }; b",
                4: "sleep 99",
            }
            if fault in commands:
                result = await box.run(commands[fault], seconds=0.3 if fault in (3, 4) else 30)
                seen[fault, result.outcome] += 1
            elif fault == 5:
                raise ZeroDivisionError
            elif fault == 6:
                await box.run("sleep 99")
            else:
                await box.end()
                await box.run("true")

    async with Pool(Namespaces(tmp_path), size=8) as pool:
        kind = Kind(limits=limits)
        try:
            async with pool.container(kind):
                pass
        except ContainersError as error:
            pytest.skip(str(error))
        outcomes = await asyncio.gather(*(episode(pool, kind, n) for n in range(40)), return_exceptions=True)
        raised = Counter(type(outcome) for outcome in outcomes if outcome is not None)
        assert (raised[ZeroDivisionError], raised[TimeoutError]) == (5, 5)
        assert (raised[ContainerEnded] - 5) + sum(count for (fault, _), count in seen.items() if fault == 3) == 5
        assert [seen[0, "ok"], seen[1, "output"], seen[2, "disk"], seen[4, "timeout"]] == [5, 5, 5, 5]
    assert left(tmp_path) == []
