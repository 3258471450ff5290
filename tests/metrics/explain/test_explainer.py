"""The sentence of a step names what was made to happen: each cause once, by actors that do it, in virtual time."""

import asyncio

import pytest

from rlinf import Actor, ActorSystem, endpoint
from rlinf.config.embodied import EmbodiedConfig
from rlinf.config.text import RunConfig
from rlinf.metrics.explain import MICRO_BATCH, Cause, Explainer, in_short
from rlinf.placement.costs import Ledger, MeasuredRun
from rlinf.placement.hardware import Fleet
from rlinf.placement.seats import Placed
from rlinf.runs import placement_manager
from rlinf.runs.placement_manager import Changes
from rlinf.runtime.base.clock import run_virtual
from rlinf.runtime.system.observer import Moved, Watch


class Role(Actor):
    """Any role: its endpoints take as long as they are told to."""

    @endpoint
    async def generate(self, seconds, gaps=()):
        for gap in gaps or [seconds]:
            await asyncio.sleep(gap)
            yield gap

    @endpoint
    async def score(self, seconds):
        await asyncio.sleep(seconds)
        return seconds

    @endpoint
    async def train(self, seconds, micro_batches=()):
        for tokens, took in micro_batches:
            await asyncio.sleep(took)
            self.note(MICRO_BATCH, took, tokens)
        if not micro_batches:
            await asyncio.sleep(seconds)
        return seconds

    @endpoint
    async def step(self, seconds):
        await asyncio.sleep(seconds)

    @endpoint
    async def load(self, seconds):
        await asyncio.sleep(seconds)

    @endpoint
    async def search(self, seconds):
        await asyncio.sleep(seconds)


SPREAD = {"rollout[0]": {0}, "rollout[1]": {1}, "trainer[0]": {2}}
SHARED = {"rollout[0]": {0}, "trainer[0]": {0}}


async def taken(stream):
    return [item async for item in stream]


async def explained(flow, *, devices, steps=4, metrics=lambda number: {}, advice=None, staleness=0, moves=()):
    """The sentences of some steps of a flow, which is given the roles and the step's number."""
    where = {actor: frozenset(on) for actor, on in devices.items()}
    counts = {}
    for actor in where:
        counts[actor.partition("[")[0]] = counts.get(actor.partition("[")[0], 0) + 1
    found = []
    async with ActorSystem.local(hosts=3) as system:
        roles = {}
        for name in {*counts, "judge", "env", "tool"}:
            number = counts.get(name, 1)
            roles[name] = await system.spawn(Role, hosts=[*range(number)], name=name)
        watch = await Watch.start(system)
        ledger = Ledger(where, 4, MeasuredRun("m", "x", "f", staleness=staleness))
        explainer = Explainer(advice(ledger) if advice else None, staleness)
        for number in range(steps):
            watch.begins()
            await flow(number, **roles)
            lap = await watch.ends(f"step {number}")
            for actor, what, begin, end in moves:
                moved = Moved(actor, what, lap.start + begin, lap.start + end)
                lap = type(lap)(lap.start, lap.end, lap.busy, lap.flows, (*lap.moves, moved), lap.parts)
            told = {**metrics(number), **ledger.step(lap)}
            found.append(explainer.step(lap, where, ledger.measured_step, told))
    return found


def last(flow, **given):
    return run_virtual(explained(flow, **given))[0][-1]


async def one_after_the_other(number, *, rollout, trainer, **others):
    await asyncio.gather(*(taken(rollout[rank].generate(1.0)) for rank in range(len(rollout.hosts))))
    await trainer.train(1.0)


def test_a_slow_reward():
    async def flow(number, *, rollout, judge, trainer, **others):
        await taken(rollout[0].generate(1.0))
        await judge.score(4.0)
        await trainer.train(1.0)

    found = last(flow, devices=SHARED)
    assert (found.cause, found.seconds) == ("reward", pytest.approx(4.0, abs=0.1))
    assert "for 4 s" in found.text


def test_answers_that_could_not_be_scored_are_told_with_it():
    async def flow(number, *, judge, trainer, **others):
        await judge.score(4.0)
        await trainer.train(1.0)

    assert "(25% of them failed)" in last(flow, devices=SHARED, metrics=lambda number: {"reward/failed": 0.25}).text


def test_a_long_tail():
    async def flow(number, *, rollout, trainer, **others):
        items = rollout[0].generate(0.0, [0.05] * 38 + [0.5, 3.0])

        async def each():
            async for _ in items:
                await trainer.train(0.01)

        await each()

    devices = {"rollout[0]": {0}, "trainer[0]": {1}}
    found = last(flow, devices=devices)
    assert found.cause == "tail"
    assert "of 40 items" in found.text


def test_one_slow_host_is_told_from_long_answers_by_its_being_the_same_each_time():
    async def always(number, *, rollout, trainer, **others):
        await asyncio.gather(taken(rollout[0].generate(1.0)), taken(rollout[1].generate(3.0)))
        await trainer.train(1.0)

    async def in_turns(number, *, rollout, trainer, **others):
        slow = number % 2
        await asyncio.gather(taken(rollout[slow].generate(3.0)), taken(rollout[1 - slow].generate(1.0)))
        await trainer.train(1.0)

    found = last(always, devices=SPREAD)
    assert (found.cause, "rollout[1] took 2 s" in found.text) == ("slow host", True)
    assert last(in_turns, devices=SPREAD).cause == "waiting"


def test_devices_that_wait_for_others():
    found = last(one_after_the_other, devices={"rollout[0]": {0}, "trainer[0]": {1}})
    assert found.cause == "waiting"
    assert "idled" in found.text


def test_a_bound_on_staleness():
    async def flow(number, *, rollout, trainer, **others):
        await asyncio.gather(taken(rollout[0].generate(1.0)), trainer.train(4.0))

    found = last(flow, devices={"rollout[0]": {0}, "trainer[0]": {1}}, staleness=1)
    assert found.cause == "bound on staleness"
    assert "rollout idled 1.5 s" in found.text


def test_switching():
    async def flow(number, *, rollout, trainer, **others):
        await taken(rollout[0].generate(1.0))
        await asyncio.sleep(3.0)
        await trainer.train(1.0)

    moves = [("rollout[0]", "offload", 1.0, 2.0), ("trainer[0]", "onload", 2.0, 4.0)]
    found = last(flow, devices=SHARED, moves=moves)
    assert (found.cause, found.seconds) == ("switching", pytest.approx(3.0, abs=0.1))
    assert "(trainer 2 s, rollout 1 s)" in found.text


def test_publishing_weights():
    async def flow(number, *, rollout, trainer, **others):
        await one_after_the_other(number, rollout=rollout, trainer=trainer)
        await rollout.load(3.0)

    assert last(flow, devices=SHARED).cause == "weights"


def test_small_micro_batches():
    async def flow(number, *, trainer, **others):
        sizes = [20, 30, 40, 50, 60, 30, 20, 50, 60, 40]
        await trainer.train(0.0, [(tokens, 0.1 + 0.001 * tokens) for tokens in sizes])
        await asyncio.sleep(0.001)  # what ends with a step is read by the next one, too

    found = last(flow, devices={"trainer[0]": {0}})
    assert found.cause == "small micro-batches"
    assert "10 micro-batches of 40 tokens cost 100 ms" in found.text


def test_environments_that_step_slowly():
    async def flow(number, *, env, trainer, **others):
        await env.step(3.0)
        await trainer.train(1.0)

    assert last(flow, devices=SHARED).cause == "environment"


def test_a_role_of_ones_own():
    async def flow(number, *, tool, trainer, **others):
        await tool.search(3.0)
        await trainer.train(1.0)

    found = last(flow, devices=SHARED)
    assert (found.cause, "while tool did" in found.text) == ("beside", True)


def test_the_flow_itself():
    async def flow(number, *, trainer, **others):
        await asyncio.sleep(3.0)
        await trainer.train(1.0)

    assert last(flow, devices=SHARED).cause == "flow"


@pytest.mark.parametrize(("tokens", "cause"), [(400.0, "longer answers"), (100.0, "busy machine")])
def test_work_that_took_longer_than_usual(tokens, cause):
    async def flow(number, *, rollout, trainer, **others):
        await taken(rollout[0].generate(4.0 if number == 5 else 1.0))
        await trainer.train(1.0)

    told = lambda number: {"response_tokens": tokens if number == 5 else 100.0}  # noqa: E731
    assert last(flow, devices=SHARED, steps=6, metrics=told).cause == cause


def test_nothing_is_made_of_nothing():
    async def flow(number, *, trainer, **others):
        await trainer.train(1.0)

    found = last(flow, devices={"trainer[0]": {0}})
    assert found.cause == "none"


class TestChanges:
    def advice(self, **keys):
        config = RunConfig()
        for name, value in keys.items():
            section, _, key = name.partition("__")
            setattr(getattr(config, section), key, value)
        placed = Placed({}, 2, True, None, None, (), Fleet(("gpu", "gpu")))
        return lambda ledger: Changes(config, lambda: ledger.profile, lambda: placed)

    def test_a_slow_reward_wants_more_workers(self):
        async def flow(number, *, judge, trainer, **others):
            await judge.score(2.0)
            await trainer.train(2.0)

        found = last(flow, devices=SHARED, advice=self.advice(reward__workers=3))
        assert found.change == "set `reward.workers=6`"
        assert found.text.endswith("25 %")
        assert (found.change, found.saves) == ("set `reward.workers=6`", pytest.approx(1.0, abs=0.05))

    @pytest.mark.parametrize(
        ("cause", "kind", "told"),
        [
            (Cause("reward", 2.0, "", "judge"), "cpu", "reward.workers"),
            (Cause("reward", 2.0, "", "judge", failed=0.9), "cpu", "not scored"),
            (Cause("reward", 0.02, "", "judge"), "cpu", None),  # too little for another key
            (Cause("weights", 2.0, ""), "cuda", "rollout.dtype=bfloat16"),
            (Cause("weights", 2.0, ""), "cpu", None),  # slower on most
            (Cause("weights", 0.028, ""), "cuda", None),
        ],
    )
    def test_a_change_is_told_where_it_can_help(self, cause, kind, told):
        config = RunConfig()
        config.rollout.dtype, config.placement.device_kind = "float32", kind
        change = Changes(config, lambda: None, lambda: Placed({}, 1, True)).change(cause, 4.0)
        assert change is None if told is None else told in change.text

    @pytest.mark.parametrize(
        ("keys", "cores", "told"),
        [
            ({"workers": 2}, 4, "`env.workers=4`, which would save 38 %"),
            ({"workers": 2}, 2, "`env.slices=2` ("),
            ({"workers": 1, "num_envs": 1}, 1, None),  # one environment has no halves
            ({"workers": 2, "num_envs": 6}, 2, None),
            ({"workers": 2, "group_size": 4}, 2, None),
            ({"workers": 2, "slices": 2}, 2, None),  # two more would take turns with these
            ({"workers": 0}, 4, None),
        ],
    )
    def test_more_workers_are_promised_where_there_are_cores_for_them(self, keys, cores, told, monkeypatch):
        async def flow(number, *, env, trainer, **others):
            await env.step(3.0)
            await trainer.train(1.0)

        monkeypatch.setattr(placement_manager, "_CORES", cores)
        config = EmbodiedConfig()
        for key, value in {"num_envs": 8, **keys}.items():
            setattr(config.env, key, value)
        placed = Placed({}, 2, True, None, None, (), Fleet(("gpu", "gpu")))
        advice = lambda ledger: Changes(config, lambda: ledger.profile, lambda: placed)  # noqa: E731
        found = last(flow, devices=SHARED, advice=advice)
        advice = found.text.partition("; ")[2]
        assert (told or "") in advice
        assert bool(told) == bool(advice)

    def test_the_planner_says_what_staleness_saves(self):
        """Two roles on a device each, one after the other: begun one step early, both work all the time."""
        devices = {"rollout[0]": {0}, "trainer[0]": {1}}
        found = last(one_after_the_other, devices=devices, steps=8, advice=self.advice())
        assert found.cause == "waiting"
        assert found.change is not None
        assert found.saves > 0
        assert "which would save" in found.text


def test_a_run_in_short():
    async def flow(number, *, judge, trainer, **others):
        await judge.score(3.0)
        await trainer.train(1.0)

    steps, _ = run_virtual(explained(flow, devices=SHARED))
    (line,) = in_short(steps)
    assert line.startswith("3 of 4 steps")
    assert "reward" in line
    assert in_short([]) == []
    assert in_short(steps[:2]) == [], "one step is no habit"
