"""Simulators in child processes: what crashes or hangs costs its episodes and nothing else.

What happens after a loss is tested with a stand-in for the process, `Mortal`, since a real one takes seconds to begin.
"""

import asyncio
import threading

import pytest
import torch

from rlinf.algos.chunk_advantages import without_lost
from rlinf.envs import workers
from rlinf.envs.environment import Environment, Rules
from rlinf.envs.toy import Reach
from rlinf.envs.workers import EnvironmentLost, EnvironmentPool, Processes, Program, SliceRange
from rlinf.runtime.base.clock import run_virtual
from rlinf.runtime.base.errors import UserError
from rlinf.runtime.processes.supervisor import CallTimeout, ChildDied
from rlinf.runtime.system.host_service import CLOSE_DEADLINE
from tests.envs.breaking import Losing, Mortal, processes, zeros
from tests.envs.protocol import actions_for, same

FIELDS = ("rewards", "terminated", "truncated", "valid", "observation", "ended", "final", "episode", "next_episode")


def breaking(directory, **settings):
    settings = {"num_envs": 2, "workers": 1, "processes": Processes(step_timeout=30.0), **settings}
    return EnvironmentPool("tests.envs.breaking.Breaking", {"directory": str(directory)}, **settings)


def test_what_is_slow_to_close_is_killed_before_its_actor_is_given_up():
    assert workers._process({}, "slow", 1.0)._rules.stop_deadline < CLOSE_DEADLINE


@pytest.mark.parametrize(
    ("workers", "slices", "real"),
    [(0, 2, False), (2, 1, False), (2, 2, False), pytest.param(2, 2, True, marks=pytest.mark.repeated)],
)
async def test_workers_and_slices_do_not_change_what_happens(workers, slices, real, monkeypatch):
    """With real processes, the next test does a part of it."""
    if not real:
        monkeypatch.setattr("rlinf.envs.workers.Worker", Mortal)
    rules = Rules(seed=5, group_size=2)
    options = {"dims": 2, "pixels": 6, "wind": True, "words": True}
    environment = Environment(Reach(8, **options), rules)
    expected_start = environment.reset(3)
    chunks = [actions_for(environment.simulator, 8, 5, seed=seed) for seed in range(3)]
    expected = [environment.step(actions) for actions in chunks]
    async with EnvironmentPool(
        "rlinf.envs.toy.Reach", options, num_envs=8, workers=workers, slices=slices, rules=rules
    ) as pool:
        assert pool.action_spec.size == 2
        assert pool.observation_spec["rgb"].shape == (6, 6, 3)
        assert pool.max_steps == 12
        for part in pool.slices:
            rows = slice(part.first, part.first + part.num_envs)
            start = await part.reset(3)
            assert same(start.observation, {name: each[rows] for name, each in expected_start.observation.items()})
            for actions, wanted in zip(chunks, expected, strict=True):
                found = await part.step(actions[rows])
                for name in ("rewards", "terminated", "truncated", "valid", "episode", "next_episode", "running"):
                    assert same(getattr(found, name), getattr(wanted, name)[rows]), name
                inside = (wanted.ended >= rows.start) & (wanted.ended < rows.stop)
                assert found.ended.tolist() == (wanted.ended[inside] - rows.start).tolist()
                assert same(found.final, {name: each[inside] for name, each in wanted.final.items()})
                assert found.episodes == tuple(each for each in wanted.episodes if rows.start <= each.env < rows.stop)
                assert found.instructions == wanted.instructions[rows]


async def test_a_crash_and_a_hang_lose_the_episodes_of_their_worker_and_others_are_begun(tmp_path):
    async with breaking(tmp_path, num_envs=4, workers=2, processes=Processes(step_timeout=2.0)) as pool:
        (whole,) = pool.slices
        await whole.reset()
        await whole.step(zeros(4))
        (tmp_path / "crash").touch()
        chunk = await whole.step(zeros(4))  # one of the two takes the file away
        assert sorted(chunk.lost.tolist()) == [False, False, True, True]
        assert torch.equal(chunk.lost, ~chunk.valid.any(1))
        assert (chunk.rewards[chunk.lost] == 0).all()
        assert chunk.episode.tolist() == [0] * 4
        assert torch.equal(chunk.next_episode, chunk.lost.long())
        assert chunk.running.all()
        fresh = Environment(Reach(4), Rules()).reset(0, chunk.next_episode).observation["state"]
        assert torch.equal(chunk.observation["state"][chunk.lost], fresh[chunk.lost])
        after = await whole.step(zeros(4))
        assert after.valid.all()
        assert not after.lost.any()
        (tmp_path / "hang").touch()
        assert sorted((await whole.step(zeros(4))).lost.tolist()) == [False, False, True, True]
        assert (await whole.step(zeros(4))).valid.all()
    assert processes(tmp_path) == 4


@pytest.mark.parametrize("workers", [0, 2])
async def test_a_saved_slice_goes_on_bit_for_bit_in_another_pool(workers, monkeypatch):
    monkeypatch.setattr("rlinf.envs.workers.Worker", Mortal)
    rules = Rules(seed=2, max_steps=5)
    settings = {"num_envs": 4, "workers": workers, "rules": rules}
    options = {"dims": 2, "wind": True}
    actions = [actions_for(Reach(4, dims=2), 4, 3, seed=seed) for seed in range(4)]
    async with EnvironmentPool(Reach, options, **settings) as pool:
        (whole,) = pool.slices
        await whole.reset(1)
        await whole.step(actions[0])
        saved = await whole.state_dict()
        expected = [await whole.step(each) for each in actions[1:]]
    async with EnvironmentPool(Reach, options, **settings) as pool:
        (whole,) = pool.slices
        await whole.load_state_dict(saved)
        for each, wanted in zip(actions[1:], expected, strict=True):
            found = await whole.step(each)
            assert all(same(getattr(found, name), getattr(wanted, name)) for name in FIELDS)
            assert found.episodes == wanted.episodes


@pytest.fixture
def mortal(monkeypatch):
    """Makes started pools of `Mortal`s; what they are: (pool, their only slice or slices, the first worker)."""
    monkeypatch.setattr("rlinf.envs.workers.Worker", Mortal)

    async def made(num_envs=2, **settings):
        pool = EnvironmentPool(Reach, num_envs=num_envs, workers=1, **settings)
        await pool.start()
        return *pool.slices, pool._workers[0]

    return made


@pytest.mark.parametrize("how", [ChildDied, CallTimeout])
async def test_every_slice_hears_that_its_episodes_were_lost(mortal, how):
    one, other, worker = await mortal(slices=2)
    await one.reset()
    await other.reset()
    worker.fates = [("step", how)]
    assert (await one.step(zeros(1))).lost.all()
    assert (await other.step(zeros(1))).lost.all()
    assert (await other.step(zeros(1))).valid.all()
    assert worker.lives == 2


async def test_an_error_in_the_program_reaches_the_caller_and_loses_nothing(mortal):
    whole, worker = await mortal()
    await whole.reset()
    with pytest.raises(ValueError, match=r"\[2, C, 1\], not \[2, 1, 3\]"):
        await whole.step(torch.zeros(2, 1, 3))
    assert (await whole.step(zeros(2))).valid.all()
    assert worker.lives == 1


async def test_steps_under_way_when_the_pool_is_closed_say_that_it_was(mortal):
    whole, worker = await mortal()
    await whole.reset()
    worker.fates = [("step", ChildDied)]
    whole.closing()
    with pytest.raises(ChildDied, match=r"env\.0.*gone"):
        await whole.step(zeros(2))


def kept(chunks):
    """Steps to learn from, as trajectories have them."""
    valid, terminated, truncated, lost = (
        torch.stack([getattr(chunk, name) for chunk in chunks]) for name in ("valid", "terminated", "truncated", "lost")
    )
    return without_lost(valid, terminated | truncated, lost)


async def test_no_step_of_a_lost_episode_is_kept_and_all_others_are(mortal):
    whole, worker = await mortal(4, rules=Rules(max_steps=4))
    state = (await whole.reset()).observation["state"]
    toward = torch.sign(state[:, 1:] - state[:, :1])[:, None].expand(4, 3, 1)
    chunks = [await whole.step(toward), await whole.step(toward)]
    before = kept(chunks)
    assert torch.equal(before, torch.stack([chunk.valid for chunk in chunks]))
    worker.fates = [("step", ChildDied)]
    chunks += [await whole.step(toward), await whole.step(toward)]
    after = kept(chunks)
    assert not after[2].any()
    assert torch.equal(after[3], chunks[3].valid)
    for env in range(4):
        for time in range(2):
            of_lost = chunks[time].episode[env] == chunks[2].episode[env]
            assert torch.equal(after[time, env], before[time, env] & ~of_lost)
    assert after[:2].any()
    assert (before & ~after[:2]).any()


async def test_groups_stay_together_after_a_loss(mortal):
    """Members may have got to different numbers; the episodes that replace theirs begin alike all the same."""
    whole, worker = await mortal(4, rules=Rules(group_size=2, max_steps=4))
    state = (await whole.reset()).observation["state"]
    toward = torch.sign(state[:, 1:] - state[:, :1])[:, None].expand(4, 3, 1).clone()
    toward[1::2] *= -1  # of each group one goes to the target, and the other away from it
    before = await whole.step(toward)
    worker.fates = [("step", ChildDied)]
    chunk = await whole.step(zeros(4))
    assert chunk.lost.all()
    assert before.next_episode[0] != before.next_episode[1]
    assert (chunk.next_episode > before.next_episode).all()
    assert torch.equal(chunk.next_episode[0::2], chunk.next_episode[1::2])
    assert torch.equal(chunk.observation["state"][0::2], chunk.observation["state"][1::2])


async def test_an_ended_episode_is_not_lost_with_its_worker(mortal):
    whole, worker = await mortal(rules=Rules(auto_reset=False, max_steps=2))
    await whole.reset()
    assert not (await whole.step(zeros(2))).running.any()
    worker.fates = [("step", ChildDied)]
    chunk = await whole.step(zeros(2))
    assert not chunk.lost.any()
    assert chunk.running.all()


async def test_what_cannot_finish_an_episode_is_given_up(mortal, monkeypatch):
    monkeypatch.setattr("rlinf.envs.workers.MOST_LOSSES", 1)
    whole, worker = await mortal()
    await whole.reset()
    worker.fates = [("step", ChildDied), ("step", CallTimeout)]
    assert (await whole.step(zeros(2))).lost.all()
    with pytest.raises(EnvironmentLost, match=r"environments 0-1 \(env.0\).*2 times") as caught:
        await whole.step(zeros(2))
    assert isinstance(caught.value.__cause__, CallTimeout)


async def test_a_finished_episode_makes_losses_forgotten(mortal, monkeypatch):
    monkeypatch.setattr("rlinf.envs.workers.MOST_LOSSES", 1)
    whole, worker = await mortal(rules=Rules(max_steps=2))
    await whole.reset()
    for _ in range(2):
        worker.fates = [("step", ChildDied)]
        assert (await whole.step(zeros(2))).lost.all()
        assert len((await whole.step(zeros(2))).episodes) == 2


async def test_a_death_while_beginning_begins_others(mortal):
    whole, worker = await mortal()
    worker.fates = [("reset", CallTimeout)]
    assert (await whole.reset()).episode.tolist() == [1, 1]
    worker.fates = [("step", ChildDied), ("reset", ChildDied)]
    chunk = await whole.step(zeros(2))
    assert chunk.lost.all()
    assert (chunk.episode.tolist(), chunk.next_episode.tolist()) == ([1, 1], [3, 3])


@pytest.mark.parametrize("fates", [[("save", ChildDied)], [("step", ChildDied)]])
async def test_a_loss_before_a_save_is_told_after_it_also_in_another_pool(mortal, fates):
    """It dies in the save, or in a step of the other slice, of which this one has not heard."""
    whole, other, worker = await mortal(slices=2)
    await whole.reset()
    await whole.step(zeros(1))
    await other.reset()
    worker.fates = fates
    if fates[0][0] == "step":
        await other.step(zeros(1))
    saved = await whole.state_dict()
    told = await whole.step(zeros(1))
    again, _, _ = await mortal(slices=2)
    await again.load_state_dict(saved)
    for chunk in (told, await again.step(zeros(1))):
        assert chunk.lost.all()
        assert (chunk.episode.tolist(), chunk.next_episode.tolist()) == ([0], [1])
        assert same(told.observation, chunk.observation)


@pytest.mark.parametrize("fate", [{"step": 1, "reset": 2}, {"save": 3, "reset": 1}, {"restore": 2}, {"reset": 3}])
async def test_a_simulator_that_is_lost_in_any_call_begins_other_episodes(fate, monkeypatch):
    monkeypatch.setattr(Losing, "fates", {})
    async with EnvironmentPool(Losing, num_envs=2, workers=0, rules=Rules(max_steps=4)) as pool:
        (whole,) = pool.slices
        await whole.reset()
        Losing.fates.update(fate)
        if list(fate) == ["reset"]:
            await whole.reset(1)
        lost = [(await whole.step(zeros(2))).lost.all()]
        saved = await whole.state_dict()
        await whole.load_state_dict(saved)
        lost += [(await whole.step(zeros(2))).lost.all()]
        assert not any(Losing.fates.values())
        assert lost == ["step" in fate, "save" in fate]
        assert (await whole.step(zeros(2))).valid.all()


@pytest.mark.parametrize("call", ["reset", "save", "restore"])
async def test_a_simulator_that_is_lost_in_every_call_is_given_up(call, monkeypatch):
    monkeypatch.setattr(Losing, "fates", {})
    async with EnvironmentPool(Losing, num_envs=2, workers=0) as pool:
        (whole,) = pool.slices
        await whole.reset()
        saved = await whole.state_dict()
        Losing.fates[call] = 99
        calls = {"reset": whole.reset, "save": whole.state_dict, "restore": lambda: whole.load_state_dict(saved)}
        with pytest.raises(EnvironmentLost, match="environments 0-1"):
            await calls[call]()


async def test_weights_that_a_dead_process_did_not_hear_are_told_to_the_next(mortal, monkeypatch):
    heard = []
    monkeypatch.setattr(Reach, "weigh", lambda self, weights: heard.append(weights))
    whole, worker = await mortal()
    await whole.reset()
    worker.fates = [("tell", ChildDied)]
    await whole.weigh([2.0])
    assert heard == []
    assert (await whole.step(zeros(2))).lost.all()
    assert heard == [(2.0,)]


def test_the_deadline_of_a_step_stands_still_while_episodes_begin_within_it(monkeypatch):
    done = []
    begin = Reach.reset
    monkeypatch.setattr(Reach, "reset", lambda *args: (done.append("reset"), begin(*args))[1])
    program = Program(Reach, {}, Rules(max_steps=3), (SliceRange(0, 2),), None)
    program.pauses(done.append)
    program.reset(0, 0, None)
    program.step(0, zeros(2).numpy())
    assert done == ["reset"]  # a call of its own, with a limit of its own
    program.step(0, zeros(2).numpy())
    assert done == ["reset", True, "reset", False]
    monkeypatch.setattr(Reach, "reset", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        program.step(0, zeros(2, 3).numpy())
    assert done[4:] == [True, False]


async def test_what_was_never_reset_says_so(mortal):
    whole, _ = await mortal()
    with pytest.raises(RuntimeError, match=r"environments 0-1.*slice's"):
        await whole.step(zeros(2))
    with pytest.raises(RuntimeError, match=r"episodes yet"):
        await whole.state_dict()


async def test_states_of_another_number_of_workers_are_refused():
    async with EnvironmentPool(Reach, num_envs=4, workers=0) as pool:
        with pytest.raises(ValueError, match=r"saved.*2 workers.*1"):
            await pool.slices[0].load_state_dict([{}, {}])


def test_shares_that_are_not_equal_and_groups_that_would_be_cut_are_refused():
    with pytest.raises(UserError, match=r"workers.*slices.*group_size = 2.*2.*3 = 12"):
        EnvironmentPool(Reach, num_envs=18, workers=2, slices=2, rules=Rules(group_size=3))
    with pytest.raises(UserError, match="workers=-1 at least 0"):
        EnvironmentPool(Reach, num_envs=1, workers=-1)


def test_a_class_of_the_main_program_is_refused_for_processes():
    class Own(Reach):
        __module__ = "__main__"

    with pytest.raises(UserError, match=r"main program"):
        EnvironmentPool(Own, num_envs=1)
    EnvironmentPool(Own, num_envs=1, workers=0)


async def test_the_loop_is_free_while_a_simulator_works():
    """It waits in its step until the loop says something, which a loop that waited for it never would."""
    said = threading.Event()

    class Waiting(Reach):
        def step(self, actions, active):
            assert said.wait(30)
            return super().step(actions, active)

    async with EnvironmentPool(Waiting, num_envs=2, workers=0) as pool:
        (whole,) = pool.slices
        await whole.reset()
        step = asyncio.create_task(whole.step(zeros(2)))
        asyncio.get_running_loop().call_later(0.01, said.set)
        assert (await step).valid.all()


def test_a_pool_without_processes_runs_in_virtual_time():
    async def episodes():
        async with EnvironmentPool(Reach, num_envs=2, workers=0, rules=Rules(max_steps=2)) as pool:
            (whole,) = pool.slices
            await whole.reset()
            await asyncio.sleep(100)
            return (await whole.step(zeros(2))).episodes

    found, seconds = run_virtual(episodes())
    assert (len(found), seconds) == (2, 100)


async def test_a_chunk_without_events_says_so_and_is_the_same_through_workers(monkeypatch):
    monkeypatch.setattr("rlinf.envs.workers.Worker", Mortal)
    rules = Rules(seed=3, max_steps=4, ignore_terminations=True)
    alone = Environment(Reach(4), rules)
    chunks = [actions_for(alone.simulator, 4, 2, seed=seed) for seed in range(4)]
    alone.reset(1)
    expected = [alone.step(actions) for actions in chunks]
    assert [chunk.uneventful for chunk in expected] == [True, False] * 2  # every second one has the end of all episodes
    async with EnvironmentPool("rlinf.envs.toy.Reach", num_envs=4, workers=2, rules=rules) as pool:
        await pool.slices[0].reset(1)
        found = [await pool.slices[0].step(actions) for actions in chunks]
    for ours, wanted in zip(found, expected, strict=True):
        assert ours.uneventful == wanted.uneventful
        for name in (*FIELDS, "running", "lost", "episodes", "instructions", "final_instructions", "remarks"):
            assert same(getattr(ours, name), getattr(wanted, name)), name
