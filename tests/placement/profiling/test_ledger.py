"""A run's own steps say what is possible: medians without warm-up, pooled over the places that roles have had."""

import asyncio
import functools
from dataclasses import replace

import pytest

from rlinf import Actor, ActorSystem, endpoint
from rlinf.placement.bound import bound
from rlinf.placement.costs import PROFILE, WINDOW, Ledger, MeasuredRun
from rlinf.placement.hardware import Devices
from rlinf.placement.profile import Footprint, Release, StageProfile, load
from rlinf.placement.workload import workload
from rlinf.runtime.base.clock import run_virtual
from rlinf.runtime.observe.spans import Busy
from rlinf.runtime.system.observer import Flow, Lap, Watch
from tests.growth import in_one_pass

RUN = MeasuredRun("m", "x", "f")
TWO = {"rollout[0]": frozenset({0}), "trainer[0]": frozenset({1})}


def step(generation, training, *, start=0.0, released=()):
    """One after the other, and one second of nothing."""
    end = start + generation + training
    parts = (
        Busy("rollout[0]", "generate", ((start, start + generation),)),
        Busy("trainer[0]", "train", ((start + generation, end),)),
    )
    return Lap(start, end + 1.0, parts, (Flow("rollout.generate", "trainer.train", 4, released),))


def test_the_first_step_is_its_own_measure_and_later_forgotten():
    ledger = Ledger(TWO, 4, RUN)
    first = ledger.step(step(60, 20))
    assert (first["bound/seconds"], first["lost/interference"]) == (40.0, 0.0)
    for _ in range(3):
        usual = ledger.step(step(6, 2))
    assert usual["bound/seconds"] == pytest.approx(4.0)
    assert usual["lost/interference"] == pytest.approx(0.0)
    slow = ledger.step(step(9, 2))
    assert slow["lost/interference"] == pytest.approx(3 / 2)
    (timing,) = ledger.profile.stages["rollout"].timings
    assert (timing.seconds, timing.count) == (6.0, 4)


def test_a_device_that_nobody_has_idles_and_counts():
    alone = {"rollout[0]": frozenset({0}), "trainer[0]": frozenset({0})}
    metrics = Ledger(alone, 4, RUN, count=2).step(step(6, 2))
    assert (metrics["bound/devices"], metrics["bound/area"], metrics["lost/imbalance"]) == (2.0, 4.0, 4.0)
    assert Ledger(alone, 4, RUN).step(step(6, 2))["bound/devices"] == 1.0


def test_where_work_is_begun_early_no_stage_waits_for_another_of_the_same_step():
    both = [Ledger(TWO, 4, replace(RUN, staleness=staleness)) for staleness in (0, 1)]
    told = [ledger.step(step(6, 2))["bound/saturation"] for ledger in both]
    assert told == [(6.0 + 2.0) / 2, 6.0 / 2]
    assert [ledger.profile.staleness for ledger in both] == [0, 1]


def test_the_measure_follows_work_that_grows():
    ledger = Ledger(TWO, 4, RUN)
    for _ in range(WINDOW):
        ledger.step(step(6, 2))
    for _ in range(WINDOW):
        grown = ledger.step(step(12, 2))
    assert grown["lost/interference"] == pytest.approx(0.0)


def test_roles_that_move_are_measured_at_each_place():
    ledger = Ledger(TWO, 4, RUN)
    for _ in range(3):
        ledger.step(step(6, 2))
    ledger.devices = {"rollout[0]": frozenset({0, 1}), "trainer[0]": frozenset({0, 1})}
    for _ in range(3):
        ledger.step(step(4, 1))
    assert [one.devices for one in ledger.profile.stages["rollout"].timings] == [1, 2]
    metrics = ledger.step(step(4, 1))
    assert metrics["lost/scaling"] == pytest.approx((8 - 6) / 2)


def test_what_was_learned_is_saved(tmp_path):
    ledger = Ledger(TWO, 4, RUN)
    ledger.save(tmp_path)
    assert not (tmp_path / PROFILE).exists(), "no step, no profile"
    ledger.step(step(6, 2, released=(1.0, 2.0, 3.0, 6.0)))
    ledger.step(step(6, 2, released=(2.0, 3.0, 4.0, 6.0)))
    ledger.save(tmp_path)
    saved = load(tmp_path / PROFILE)
    assert set(saved.stages) == {"rollout", "trainer"}
    assert [one.devices for one in saved.stages["rollout"].timings] == [1]
    release = saved.stages["rollout"].release
    assert isinstance(release, Release)
    assert release.chunks(4) == pytest.approx((1.5 / 6, 2.5 / 6, 3.5 / 6, 1.0))
    assert saved.edges == (("rollout", "trainer", False),)


def test_a_step_that_nobody_traced_leaves_no_metrics():
    assert Ledger(TWO, 4, RUN).step(Lap(0.0, 1.0, ())) == {}


def test_a_long_trace_is_read_in_one_pass():
    """80,000 stretches: far more than a step has."""

    def step(count):
        parts = tuple(
            Busy(actor, "train", tuple((k * 1e-3 + at, k * 1e-3 + at + 5e-4) for k in range(count)))
            for actor, at in (("rollout[0]", 0.0), ("trainer[0]", 3e-4))
        )
        return functools.partial(Ledger(TWO, 4, RUN).step, Lap(0.0, 60.0, parts))

    assert in_one_pass(step, 5000)


class Big(Actor):
    """Half of what the device holds and a bit more, so that two of them take turns."""

    @endpoint(device=True)
    async def work(self, before: float = 0.0) -> float:
        await asyncio.sleep(4.0)
        return 1.0

    async def offload(self) -> None:
        await asyncio.sleep(2.0)

    async def onload(self) -> None:
        await asyncio.sleep(3.0)


def test_of_roles_that_take_turns_the_switches_are_what_is_lost():
    async def main():
        async with ActorSystem.local(1, device_memory={0: 100}) as system:
            rollout = await system.spawn(Big, name="rollout", devices=[0], resident_bytes=60)
            trainer = await system.spawn(Big, name="trainer", devices=[0], resident_bytes=60)
            watch = await Watch.start(system)
            on_one = dict.fromkeys(("rollout[0]", "trainer[0]"), frozenset({0}))
            ledger = Ledger(on_one, 4, replace(RUN, memory={"rollout": (60, 0), "trainer": (60, 5)}))
            for number in (1, 2, 3):
                watch.begins()
                await trainer[0].work(rollout[0].work())
                metrics = ledger.step(await watch.ends(f"step {number}"))
            return metrics, ledger.profile

    (metrics, profile), _ = run_virtual(main())
    assert metrics["bound/seconds"] == pytest.approx(8.0)
    assert {
        name: value for name, value in metrics.items() if name.startswith("lost/") and value > 1e-9
    } == pytest.approx({"lost/switching": 10.0})
    assert profile.edges == (("rollout", "trainer", True),)
    assert profile.stages["trainer"].timings[0].seconds == pytest.approx(4.0)
    assert profile.stages["trainer"].footprints == (Footprint(1, 60, 5, pytest.approx(3.0), pytest.approx(2.0)),)


def test_a_profile_keeps_what_a_step_would_take_at_its_devices_own_limit(tmp_path):
    """What roles were seen to cost says nothing of devices that waited meanwhile."""
    ledger = Ledger(TWO, 4, RUN)
    for _ in range(3):
        ledger.step(step(6, 2))
        ledger.add_limits({"rollout": 0.5, "trainer": 0.1})
    ledger.save(tmp_path)
    profile = load(tmp_path / PROFILE)
    assert [one.least for one in profile.stages["rollout"].timings] == [0.5]
    limit = bound(workload(profile, Devices({"gpu": 2}), items=4))
    assert (limit.device, limit.floor) == (pytest.approx(0.3), pytest.approx(0.3))
    assert limit.seconds > 4.0
    half = profile.stages["rollout"].timings[0].slowed(0.5)
    assert (half.least, half.merged(half).least, StageProfile().least(4)) == (0.25, 0.25, None)
    assert profile.stages["rollout"].least(8) == 1.0
