"""Somebody acts in the policy's place: what is executed, what is told of it, and who may be asked."""

import os
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlinf.envs.base import ActionSpec, CannotSimulate
from rlinf.envs.environment import Environment, Rules, joined_chunks, lost_chunk
from rlinf.envs.interventions import (
    DeviceLost,
    Gamepad,
    Keyboard,
    Overridable,
    mistake_in_intervener,
)
from rlinf.envs.toy import Reach
from rlinf.envs.workers import EnvironmentPool
from rlinf.flows.record import demonstrated
from tests.envs.protocol import ProtocolSuite, begin, everyone


def late(observation, steps, *, after=1):
    """Goes left, as far as it can, in the second step of an episode and after."""
    return -torch.ones(len(steps), 1), steps >= after


def nobody(observation):
    return None


def nan(observation):
    return torch.full((len(observation["state"]), 1), torch.nan), torch.ones(len(observation["state"]), dtype=bool)


def shapeless(observation):
    return torch.zeros(1), torch.ones(1)


class Hand:
    """A device that is moved as a script says: one reading for each step."""

    def __init__(self, readings):
        self.readings = list(readings)
        self.closed = False

    async def read(self):
        return self.readings.pop(0)

    def close(self):
        self.closed = True


def overridable(count=2, intervener=f"{__name__}.late", simulator=Reach, **arguments):
    return Overridable(count, simulator=simulator, intervener=intervener, arguments=arguments)


class TestOverridable(ProtocolSuite):
    def make(self, num_envs):
        return Overridable(num_envs, simulator=Reach, intervener=f"{__name__}.late", options={"wind": True})

    steps = 1


@given(st.lists(st.tuples(st.floats(-3, 3, width=32), st.floats(0, 4, width=32)), min_size=1, max_size=4), st.data())
def test_actions_come_back_from_the_simulators_bounds(bounds, data):
    low = torch.tensor([low for low, _ in bounds])
    spec = ActionSpec(low, low + torch.tensor([width for _, width in bounds]))
    action = torch.tensor(data.draw(st.lists(st.floats(-1, 1, width=32), min_size=len(bounds), max_size=len(bounds))))
    back = spec.scaled(spec.unscaled(spec.scaled(action)))
    assert torch.allclose(back, spec.scaled(action), atol=1e-5)  # 3 + 4 with float32's 6e-8 a few times over
    wide = (spec.high - spec.low) > 0.1
    assert torch.allclose(spec.unscaled(spec.scaled(action))[wide], action[wide], atol=1e-4)


def test_what_somebody_does_is_executed_and_told_step_by_step_within_a_chunk():
    environment = Environment(overridable(), Rules(auto_reset=False, max_steps=3))
    first = environment.reset(0).observation["state"]
    chunk = environment.step(torch.tensor([[[0.5], [0.5], [0.5], [0.5]]] * 2))
    left = [first[:, 0] + 0.125]
    left += [(left[-1] - 0.25).clamp(-1.0)]
    done = chunk.valid.sum(1)
    assert torch.equal(chunk.interventions.steps & ~chunk.valid, torch.zeros(2, 4, dtype=bool))
    for env in range(2):
        assert chunk.interventions.steps[env, : done[env]].tolist() == [False, True, True][: done[env]]
        assert chunk.interventions.actions[env, 1 : done[env]].flatten().tolist() == [-1.0] * int(done[env] - 1)
    assert [episode.intervened for episode in chunk.episodes] == [int(count) - 1 for count in done]


def test_a_person_acts_in_one_environment_and_lets_go():
    simulator = overridable(1, f"{__name__}.Hand", readings=[None, [0.5], None])
    begin(simulator)
    moved = [simulator.step(torch.full((1, 1), -0.25), everyone(simulator)) for _ in range(3)]
    assert [bool(each.interventions.steps) for each in moved] == [False, True, False]
    assert torch.equal(moved[1].interventions.actions, torch.tensor([[0.125]]))  # in the simulator's bounds
    places = [each.observation["state"][:, 0] for each in moved]
    assert torch.equal(places[1], (places[0] + 0.125).clamp(-1.0, 1.0))
    hand = simulator._intervener
    simulator.close()
    assert hand.closed


@pytest.mark.parametrize(
    ("intervener", "arguments", "count", "said"),
    [
        (late, {"speed": 1}, 2, "takes no speed"),
        (lambda reward: None, {}, 2, "it takes reward"),
        (Hand, {"readings": []}, 2, "one environment: set env.num_envs=1, not 2"),
        (Hand, {"reading": []}, 1, "readings"),
        (Rules, {}, 1, "neither devices nor called"),
        (3, {}, 1, "no function"),
    ],
)
def test_who_cannot_intervene_is_told_why(intervener, arguments, count, said):
    assert said in mistake_in_intervener(intervener, arguments, count)
    with pytest.raises(CannotSimulate, match=r"env\.intervener"):
        Overridable(count, simulator=Reach, intervener=intervener, arguments=arguments)


@pytest.mark.parametrize(("function", "said"), [(nan, "not finite"), (shapeless, r"instead of actions \[2, 1\]")])
def test_an_answer_that_is_no_action_ends_with_the_name_of_who_gave_it(function, said):
    simulator = overridable(2, f"{__name__}.{function.__name__}")
    begin(simulator)
    with pytest.raises(RuntimeError, match=rf"env.intervener = .*{function.__name__}: .*{said}"):
        simulator.step(torch.zeros(2, 1), everyone(simulator))


async def test_processes_tell_of_it_as_threads_do_and_what_was_lost_has_none():
    chunks = []
    for workers in (0, 2):
        options = {"simulator": "rlinf.envs.toy.Reach", "intervener": f"{__name__}.late", "options": {"sparse": True}}
        async with EnvironmentPool(Overridable, options, num_envs=4, workers=workers) as pool:
            await pool.slices[0].reset(0)
            chunks.append(await pool.slices[0].step(torch.zeros(4, 2, 1)))
            start = await pool.slices[0].reset(1)
    here, there = (chunk.interventions for chunk in chunks)
    assert torch.equal(here.steps, there.steps)
    assert torch.equal(here.actions, there.actions)
    both = joined_chunks([chunks[0], lost_chunk(start, start.episode, here.steps[:, 0], 2)])
    assert torch.equal(both.interventions.steps, torch.cat([here.steps, torch.zeros_like(here.steps)]))


def test_a_recording_holds_what_was_executed_and_who_did_it():
    environment = Environment(overridable(), Rules(auto_reset=False, max_steps=2))
    outputs, actions = [environment.reset(0)], torch.zeros(2, 1, 1)
    told = [type("Seen", (), {"observation": outputs[0].observation, "chunk": None, "first": 0, "instructions": None})]
    for _ in range(2):
        chunk = environment.step(actions)
        told.append(type("Seen", (), {"observation": chunk.observation, "chunk": chunk, "first": 0}))
    for demo in demonstrated(told, [actions, actions]):
        assert demo.actions.flatten().tolist() == [0.0, -1.0]
        assert demo.intervened.flatten().tolist() == [False, True]


@pytest.fixture
def pipe(tmp_path):
    """A file that gives events as a device's does, and the end into which they are written."""
    path = str(tmp_path / "device")
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe can be opened for writing once somebody reads it
    writer = os.open(path, os.O_WRONLY)
    yield path, writer
    os.close(reader)


def joystick(*events):
    return b"".join(struct.pack("=IhBB", 0, value, kind, number) for kind, number, value in events)


async def test_a_gamepad_is_read_as_the_kernel_tells_of_it(pipe):
    path, writer = pipe
    pad = Gamepad(path=path, axes={0: [1, 0, 0], 1: [0, -1, 0]}, buttons={5: [0, 0, 2]}, rest=[0, 0, -1])
    assert await pad.read() is None
    os.write(writer, joystick((0x82, 0, 0), (0x81, 5, 0), (0x02, 0, 32767), (0x02, 1, 3000)))
    assert await pad.read() == [1.0, 0.0, -1.0]  # an axis that is hardly pushed is not
    os.write(writer, joystick((0x02, 1, -32768), (0x01, 5, 1)))
    assert await pad.read() == [1.0, 1.0, 1.0]
    os.write(writer, joystick((0x02, 0, 0), (0x02, 1, 0), (0x01, 5, 0), (0x01, 9, 1)))
    assert await pad.read() is None  # a button that does nothing
    os.close(writer)


async def test_without_the_button_that_must_be_held_nothing_counts(pipe):
    path, writer = pipe
    pad = Gamepad(path=path, axes={"0": [1.0]}, hold=4)
    os.write(writer, joystick((0x02, 0, 32767)))
    assert await pad.read() is None
    os.write(writer, joystick((0x01, 4, 1)))
    assert await pad.read() == [1.0]
    os.close(writer)  # as where the device is pulled out
    with pytest.raises(DeviceLost, match="device: it has ended"):
        await pad.read()


async def test_a_keyboard_acts_while_keys_are_down_and_forgets_them_when_events_were_dropped(pipe):
    path, writer = pipe
    keys = Keyboard(path=path, keys={"w": [1, 0], "s": [-1, 0], "space": [0, 1]})

    def press(*events):
        os.write(writer, b"".join(struct.pack("llHHi", 0, 0, kind, code, value) for kind, code, value in events))

    press((1, 17, 1), (0, 0, 0))
    assert await keys.read() == [1.0, 0.0]
    press((1, 17, 2), (1, 57, 1), (1, 31, 1))
    assert await keys.read() == [0.0, 1.0]  # forwards and backwards at once
    press((0, 3, 0))
    assert await keys.read() is None
    os.close(writer)


def test_devices_that_are_not_there_and_keys_that_nobody_has_are_named(tmp_path):
    with pytest.raises(CannotSimulate, match=r"env.intervener_args: .*js7: No such file.*`path`"):
        Gamepad(path=str(tmp_path / "js7"), axes={0: [1.0]})
    with pytest.raises(CannotSimulate, match=r"env.intervener_args.keys: no such key hyper"):
        Keyboard(path="/dev/null", keys={"hyper": [1.0]})
    with pytest.raises(ValueError, match=r"as many numbers as an action, not \[1, 2\]"):
        Gamepad(path="/dev/null", axes={0: [1.0], 1: [1.0, 2.0]})
