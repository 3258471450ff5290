"""Receivers: all switch or none, by a deadline, and an error names who did not."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest
import torch

from rlinf.data.weights import Weights
from rlinf.runtime.actor.actor import endpoint
from rlinf.runtime.base.clock import run_virtual
from rlinf.runtime.system.system import ActorSystem
from rlinf.training.weight_sync import LoadError, LoadRefused, LoadTimeout, LoadTorn, Receiver

pytestmark = pytest.mark.filterwarnings("error")


def weights(version: int, value: float = 0.0) -> Weights:
    return Weights.pack([("a", torch.full((5,), value)), ("b", torch.ones(2, 2))], version)


class Toy(Receiver):
    """Takes its time, or fails, as it is told."""

    async def setup(self, check: float = 0.0, switch: float = 0.0) -> None:
        self.check, self.switch = check, switch
        self.fail: dict[str, str] = {}
        self.used: list[tuple[float, int]] = []

    async def check_weights(self, weights: Weights) -> None:
        await asyncio.sleep(self.check)
        if "quit" in self.fail:  # the call ends between its yes and rank 0 hearing of it
            asyncio.get_running_loop().call_soon(asyncio.current_task().cancel)
        if "check" in self.fail:
            raise ValueError(self.fail["check"])

    async def switch_weights(self, weights: Weights) -> None:
        await asyncio.sleep(self.switch / weights.version)
        if "switch" in self.fail:
            raise OSError(self.fail["switch"])
        self.used.append((asyncio.get_running_loop().time(), weights.version))
        self.buckets = weights.buckets

    @endpoint
    async def told(self, fail: dict[str, str] | None = None, check: float = 0.0, switch: float = 0.0) -> None:
        self.fail, self.check, self.switch = fail or {}, check, switch

    @endpoint
    async def versions(self) -> list[int]:
        return [version for _, version in self.used]

    @endpoint
    async def times(self) -> list[float]:
        return [time for time, _ in self.used]

    @endpoint
    async def holds(self, weights: Weights) -> bool:
        return all(mine is theirs for mine, theirs in zip(self.buckets, weights.buckets, strict=True))

    @endpoint
    async def hands_on(self) -> None:
        self.through_host = True

    @endpoint
    async def left(self) -> int:
        return len(self._offers)


def play(scene, ranks=3, *, serialize=False, **setup):
    """Run a scene with receivers in virtual time; returns what it returns and the seconds. Nothing may be left over."""

    async def main():
        async with ActorSystem.local(ranks, serialize=serialize) as system:
            toys = await system.spawn(Toy, hosts=list(range(ranks)), name="toys", **setup)
            result = await scene(toys)
            await asyncio.sleep(1.0)  # calls that were cancelled end when what they compute does
            assert await toys.left() == [0] * ranks
            return result

    return run_virtual(main())


@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize("serialize", [False, True], ids=["by reference", "serialized"])
def test_all_ranks_switch_and_the_call_comes_to_one_version(ranks, serialize):
    async def scene(toys):
        assert await toys.load(weights(7)) == 7
        assert await toys.load(weights(8)) == 8
        assert await toys.load(weights(3)) == 3  # resuming goes back
        assert await toys.load(weights(3)) == 3
        return await toys.versions()

    assert play(scene, ranks, serialize=serialize)[0] == [[7, 8, 3, 3]] * ranks


def test_in_one_process_receivers_get_the_very_tensors():
    async def scene(toys):
        sent = weights(1)
        await toys.load(sent)
        return await toys.holds(sent)

    assert play(scene)[0] == [True] * 3


def test_nobody_switches_before_the_slowest_is_ready():
    async def scene(toys):
        await toys[2].told(None, check=4.0)
        await toys.load(weights(1))
        return await toys.times()

    assert play(scene)[0] == [[4.0]] * 3


@pytest.mark.parametrize("who", [0, 1, 2])
@pytest.mark.parametrize("late", [0.0, 2.0])
def test_a_rank_that_finds_them_not_fitting_keeps_all_from_switching_and_is_named(who, late):
    async def scene(toys):
        await toys.load(weights(1))
        await toys[who].told({"check": "no c"}, check=late)
        with pytest.raises(LoadRefused, match=rf"rank {who} .*checking.*no c"):
            await toys.load(weights(2))
        assert await toys.versions() == [[1]] * 3
        await toys.told()
        await toys.load(weights(2))
        return await toys.versions()

    assert play(scene)[0] == [[1, 2]] * 3


def test_damaged_weights_are_refused_with_the_bucket():
    async def scene(toys):
        sent = weights(4)
        sent.buckets[0][0] = 9.0
        with pytest.raises(LoadRefused, match=r"verifying.*checksums:.*0.*1"):
            await toys.load(sent)
        return await toys.versions()

    assert play(scene)[0] == [[], [], []]


@pytest.mark.parametrize("who", [0, 2])
def test_a_rank_that_is_late_at_the_deadline_is_named_with_its_phase(who):
    async def scene(toys):
        await toys[who].told(None, check=1000.0)
        with pytest.raises(LoadTimeout, match=rf"rank {who} .*checking.*10 s|rank 0 "):
            await toys.load(weights(2), deadline=10.0)
        assert asyncio.get_running_loop().time() <= 10.0 + 5.0
        await asyncio.sleep(2000.0)  # the late one must not switch when it is done
        return await toys.versions()

    assert play(scene)[0] == [[], [], []]


def test_a_rank_that_is_not_called_is_named():
    async def scene(toys):
        calls = [toys[0].load(weights(2), deadline=10.0), toys[1].load(weights(2), deadline=10.0)]
        errors = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(errors[0], LoadTimeout)
        assert "rank 2 (host 2)" in str(errors[0])
        assert isinstance(errors[1], LoadError)
        with pytest.raises(LoadTimeout, match=r"1.*1\).*ready.*0.*called"):
            await toys[1].load(weights(2), deadline=3.0)
        return await toys.versions()

    assert play(scene)[0] == [[], [], []]


def test_a_late_rank_of_a_dropped_round_does_not_count_for_the_next():
    async def scene(toys):
        await toys[1].told(None, check=8.0)
        sent = weights(2)
        with pytest.raises(LoadTimeout):
            await toys.load(sent, deadline=5.0)
        await toys[1].told()
        await toys[2].told({"check": "not now"}, check=6.0)  # the second attempt fails after the late one was done
        with pytest.raises(LoadRefused, match="rank 2"):
            await toys.load(sent, deadline=50.0)
        return await toys.versions()

    assert play(scene)[0] == [[], [], []]


def test_cancelled_before_the_decision_nobody_switches():
    async def scene(toys):
        await toys[2].told(None, check=10.0)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(4.0):
                await toys.load(weights(2))
        await asyncio.sleep(100.0)
        assert await toys.versions() == [[], [], []]
        await toys.told()
        await toys.load(weights(2))
        return await toys.versions()

    assert play(scene)[0] == [[2], [2], [2]]


def test_cancelled_while_switching_everybody_switches():
    async def scene(toys):
        await toys[2].told(None, switch=20.0)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(4.0):
                await toys.load(weights(2))
        await asyncio.sleep(100.0)
        return await toys.versions()

    assert play(scene)[0] == [[2], [2], [2]]


def test_a_rank_that_said_yes_waits_for_the_decision_beyond_its_own_deadline():
    async def scene(toys):
        # Rank 1's ten seconds end while rank 0, which was called later, still waits for rank 2.
        begun = asyncio.get_running_loop().time()
        early = asyncio.ensure_future(toys[1].load(weights(3), deadline=10.0))
        await asyncio.sleep(5.0)
        await toys[2].told(None, check=8.0)
        others = asyncio.gather(*(toys[rank].load(weights(3), deadline=10.0) for rank in (0, 2)))
        assert (await early, await others) == (3, [3, 3])
        return [times[-1] - begun for times in await toys.times()]

    assert play(scene)[0] == [13.0] * 3


def test_a_call_that_ends_as_its_rank_gets_ready_keeps_all_from_switching():
    async def scene(toys):
        await toys[1].told({"quit": "now"}, check=1.0)
        calls = [toy.load(weights(2), deadline=10.0) for toy in toys]
        errors = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(errors[0], LoadError)
        assert not isinstance(errors[0], LoadTorn)
        return await toys.versions()

    assert play(scene)[0] == [[], [], []]


@pytest.mark.parametrize("who", [0, 1])
def test_a_failure_while_switching_says_which_ranks_have_what(who):
    async def scene(toys):
        await toys[who].told({"switch": "device lost"})
        with pytest.raises(LoadTorn) as caught:
            await toys.load(weights(2))
        assert f"rank {who} (host {who}) failed" in str(caught.value)
        assert "OSError: device lost" in str(caught.value)
        assert "rank 2 (host 2)" in str(caught.value)
        await toys.told()
        await toys.load(weights(2))  # trying again mends it
        return await toys.versions()

    after = [[2, 2], [2, 2], [2, 2]]
    after[who] = [2]
    assert play(scene)[0] == after


def test_a_switch_that_never_ends_is_an_error_at_the_deadline():
    async def scene(toys):
        await toys[1].told(None, switch=1000.0)
        with pytest.raises(LoadTorn, match=r"1.*1\).*still switching.*20"):
            await toys.load(weights(2), deadline=20.0)

    assert play(scene)[1] < 30.0


def test_two_versions_at_once_end_with_all_ranks_on_the_same():
    async def scene(toys):
        await toys[1].told(None, switch=5.0)  # where the second version takes half as long as the first
        await asyncio.gather(toys.load(weights(1)), toys.load(weights(2)), toys.load(weights(1)))
        return await toys.versions()

    first, *others = play(scene)[0]
    assert sorted(first) == [1, 1, 2]
    assert all(versions == first for versions in others)


def test_random_delays_and_failures_never_leave_ranks_on_different_versions():
    import random

    async def scene(toys):
        chance = random.Random(0)
        for version in range(1, 61):
            for toy in toys:
                fail = {"check": "chance"} if chance.random() < 0.1 else None
                await toy.told(fail, check=chance.random() * 12.0, switch=chance.random())
            try:
                async with asyncio.timeout(chance.random() * 20.0):
                    await toys.load(weights(version), deadline=10.0)
            except (LoadRefused, TimeoutError):
                pass
        await asyncio.sleep(100.0)
        return await toys.versions()

    first, *others = play(scene)[0]
    assert len(first) > 5
    assert all(versions == first for versions in others)


def test_something_else_than_weights_is_told_apart():
    async def scene(toys):
        with pytest.raises(TypeError, match=r"wants Weights"):
            await toys.load(None)

    play(scene)


def test_a_rank_that_hands_weights_on_through_the_host_keeps_them_there(monkeypatch):
    moved = {}

    def in_host_memory(self):
        copy = dataclasses.replace(self, buckets=tuple(bucket.clone() for bucket in self.buckets))
        return moved.setdefault(self.version, copy)

    monkeypatch.setattr(Weights, "in_host_memory", in_host_memory)

    async def scene(toys):
        await toys.load(weights(1))
        assert not moved
        for toy in toys:
            await toy.hands_on()
        await toys.load(weights(2))
        assert await toys.holds(moved[2]) == [True] * 3

    play(scene)
