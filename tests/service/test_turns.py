"""Turns that several take together: fair by size, and never held up by who fails or leaves."""

import asyncio

import pytest

from rlinf.service.promises import FairTurns


class Work:
    """Notes who goes along in each turn, and lets one end when it is told to."""

    def __init__(self):
        self.turns = []
        self.ready = asyncio.Semaphore(0)

    async def __call__(self, items):
        self.turns.append(items)
        await self.ready.acquire()
        if "bad" in items:
            raise ValueError("bad")
        return [item.upper() for item in items]


async def begun(turns, *asked):
    tasks = []
    for item, size in asked:
        tasks.append(asyncio.create_task(turns.run(item, size)))
        await asyncio.sleep(0)
    for _ in range(5):
        await asyncio.sleep(0)
    return tasks


async def test_small_requests_go_along_in_every_turn_and_a_large_one_when_it_is_its_share():
    work = Work()
    turns = FairTurns(work, 10)
    tasks = await begun(turns, ("a", 1), ("large", 25), ("b", 3), ("c", 10))
    assert work.turns == [["a"]]  # at once: nobody else was there
    for late in "de":
        work.ready.release()
        tasks += await begun(turns, (late, 2))
    work.ready.release()
    work.ready.release()
    assert await asyncio.gather(*tasks) == ["A", "LARGE", "B", "C", "D", "E"]
    assert work.turns == [["a"], ["b", "c"], ["d"], ["large", "e"]]
    alone = asyncio.create_task(turns.run("huge", 1000))
    work.ready.release()
    assert await alone == "HUGE"


async def test_who_fails_or_leaves_holds_up_nobody():
    work = Work()
    turns = FairTurns(work, 10)
    first, bad, gone, good = await begun(turns, ("a", 1), ("bad", 1), ("gone", 1), ("good", 15))
    gone.cancel()
    for _ in range(3):
        work.ready.release()
    assert await first == "A"
    with pytest.raises(ValueError, match="bad"):
        await bad
    assert await good == "GOOD"
    assert work.turns == [["a"], ["bad"], ["good"]]
    await turns.close()
