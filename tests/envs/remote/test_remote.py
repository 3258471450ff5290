"""Simulators on the other side of a socket: as if they were here, and lost where they are lost."""

import logging
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch

from rlinf.envs.base import CannotSimulate, SimulatorLost, WrongOption
from rlinf.envs.environment import Environment, Rules
from rlinf.envs.remote import Remote, client, serve
from rlinf.envs.remote.client import RemoteError
from rlinf.envs.toy import Reach
from rlinf.envs.workers import EnvironmentPool
from rlinf.envs.wrappers import Mixture
from rlinf.training.embodied.trajectories import summary
from tests.envs.protocol import ProtocolSuite, begin, everyone, same
from tests.envs.remote.arm import Arm
from tests.envs.remote.test_serve import Robot, Timer

ARM = str(Path(__file__).with_name("arm.py")) + ":Arm"


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """Where toys are served, by a thread of this process."""
    where, ready = f"unix:{tmp_path_factory.mktemp('socket') / 's'}", threading.Event()
    threading.Thread(target=serve.listen, args=(Reach, "word", where, 64, lambda _: ready.set()), daemon=True).start()
    assert ready.wait(60)
    return where


class TestServedToy(ProtocolSuite):
    @pytest.fixture(autouse=True)
    def _at(self, address):
        self.address = address

    def make(self, num_envs):
        return Remote(num_envs, address=self.address, token="word", options={"dims": 2, "pixels": 8})


@pytest.fixture
def arm():
    made = []

    def make(num_envs=2, **about):
        made.append(Remote(num_envs, python=sys.executable, make=ARM, **about))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_what_numpy_alone_simulates_in_a_program_of_its_own_is_acted_on(arm):
    simulator = arm(options={"reach": 0.5})
    assert {name: spec.shape for name, spec in simulator.observation_spec.items()} == {"state": (2,), "rgb": (2, 2, 3)}
    assert simulator.action_spec.high.tolist() == [1, 2]
    first = begin(simulator, [8, 9])
    assert first["state"].tolist() == [[1, 3], [2, 4]]
    assert simulator.instructions() == ["do 8", "do 9"]
    states = simulator.save()
    moved = simulator.step(torch.tensor([[1.0, 2.0], [50.0, 0.0]]), torch.tensor([True, True]))
    assert moved.observation["state"].tolist() == [[2, 5], [52, 4]]
    assert moved.reward.tolist() == [-2, -52]
    assert moved.success.tolist() == moved.terminated.tolist() == [False, True]
    simulator.restore(states[:1], torch.tensor([1]))
    assert simulator.instructions() == ["do 8", "do 8"]
    still = simulator.step(torch.zeros(2, 2), torch.tensor([False, False]))
    assert still.observation["state"].tolist() == [[2, 5], [1, 3]]
    with pytest.raises(NotImplementedError, match=r"renders.*pictures"):
        simulator.render(torch.tensor([0]))


def test_an_exception_of_the_other_side_arrives_with_its_place_and_others_may_follow(arm):
    simulator = arm(1, options={"wrong": "raises"})
    begin(simulator, [3])
    with pytest.raises(RemoteError, match=r"RuntimeError: .*hot\n(.|\n)*arm\.py"):
        simulator.step(torch.zeros(1, 2), everyone(simulator))
    assert same(begin(simulator, [3]), begin(simulator, [3]))


class Wrong(Arm):
    """Answers with something else than it should; the test says with what."""

    answer: ClassVar[dict] = {}
    words: ClassVar[list] = ["a", "b"]

    def step(self, actions, active):
        observation = {**self.seen(self.place), **self.answer.get("observation", {})}
        told = {**super().step(actions, active), **self.answer, "observation": observation}
        return {name: each for name, each in told.items() if each is not None}

    def instructions(self):
        return self.words


@pytest.fixture(scope="module")
def wrong(tmp_path_factory):
    """Where they are served."""
    where, ready = f"unix:{tmp_path_factory.mktemp('wrong') / 's'}", threading.Event()
    threading.Thread(target=serve.listen, args=(Wrong, "", where, 64, lambda _: ready.set()), daemon=True).start()
    assert ready.wait(60)
    return where


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ({"observation": {"state": np.zeros((2, 1), np.float32)}}, r"'state' as \[2, 1\], not \[2, 2\]"),
        ({"observation": {"rgb": np.full((2, 2, 2, 3), 0.5)}}, r"told 'rgb'.*float64.*uint8"),
        ({"reward": np.zeros(3)}, r"told 'reward'.*\[3\].*\[2\]"),
        ({"reward": None}, r"tell 'reward'"),
        ({"terminated": np.array([0.0, np.nan])}, r"told 'terminated'.*float64"),
        ({"success": ["yes", "no"]}, r"told 'success'.*<U3"),
        ({"intervened": np.array([True, False])}, r"not tell 'executed'"),
        (
            {"intervened": np.array([True, False]), "executed": np.zeros((2, 1))},
            r"'executed' as \[2, 1\], not \[2, 2\]",
        ),
    ],
)
def test_wrong_answers_are_told_by_name(wrong, monkeypatch, answer, said):
    monkeypatch.setattr(Wrong, "answer", answer)
    simulator = Remote(2, address=wrong)
    begin(simulator, [3, 4])
    with pytest.raises(RemoteError, match=said):
        simulator.step(torch.zeros(2, 2), everyone(simulator))
    simulator.close()


def test_a_person_on_the_other_side_is_told_of_with_what_was_done_there(wrong, monkeypatch):
    acted = {"intervened": np.array([False, True]), "executed": np.array([[9.0, 9.0], [-0.5, 1.0]])}
    monkeypatch.setattr(Wrong, "answer", acted)
    environment = Environment(Remote(2, address=wrong), Rules())
    environment.reset(0)
    chunk = environment.step(torch.zeros(2, 1, 2))
    assert chunk.interventions.steps.tolist() == [[False], [True]]
    assert chunk.interventions.actions[1, 0].tolist() == [-0.5, 0.5]  # where the second number goes from -2 to 2
    environment.close()


def test_instructions_of_another_number_are_told(wrong, monkeypatch):
    monkeypatch.setattr(Wrong, "words", ["one for all"])
    simulator = Remote(2, address=wrong)
    with pytest.raises(RemoteError, match=r"1 instructions.*2 environments"):
        begin(simulator, [3, 4])
    simulator.close()


def test_a_number_that_is_not_finite_costs_the_episode_of_its_environment_alone(wrong, monkeypatch):
    monkeypatch.setattr(Wrong, "answer", {"reward": np.array([np.nan, 1.0])})
    environment = Environment(Remote(2, address=wrong))
    environment.reset()
    chunk = environment.step(torch.zeros(2, 1, 2))
    assert chunk.lost.tolist() == [True, False]
    assert "its reward " in chunk.remarks[0]
    environment.close()


def test_a_mixture_goes_on_where_its_servers_were_lost(address):
    """Each part is asked to begin only the environments that are in its task."""
    mixture = Mixture(
        6,
        simulator=Remote,
        tasks=[{"name": "one"}, {"name": "other"}],
        options={"address": address, "token": "word", "options": {"dims": 2}},
    )
    environment = Environment(mixture, Rules(max_steps=9))
    environment.reset()
    for part in mixture._parts:
        part._socket.shutdown(socket.SHUT_RDWR)
    for _ in range(2):  # each finds out by itself
        with pytest.raises(SimulatorLost):
            environment.step(torch.zeros(6, 1, 2))
        with suppress(SimulatorLost):
            environment.reset(episode=torch.ones(6, dtype=torch.int64))
    environment.reset(episode=torch.ones(6, dtype=torch.int64))
    assert set(mixture.tasks()) == {"one", "other"}
    assert environment.step(torch.zeros(6, 1, 2)).valid.all()
    environment.close()


def test_one_that_hangs_is_lost_at_its_deadline_and_ended(arm):
    simulator = arm(1, options={"wrong": "hangs"}, step_seconds=0.2)
    process = simulator._process
    begin(simulator, [3])
    with pytest.raises(SimulatorLost, match=r"answered 'step'.*0\.2"):
        simulator.step(torch.zeros(1, 2), everyone(simulator))
    assert process.poll() is not None


def test_one_that_died_is_lost_and_the_next_reset_starts_it_anew(arm):
    simulator = arm(2, options={"wrong": "dies"})
    begin(simulator, [1, 2])
    simulator.step(torch.full((2, 2), 95.0), everyone(simulator))
    with pytest.raises(SimulatorLost, match=r"'step':.*connection.*7\)"):
        simulator.step(torch.zeros(2, 2), everyone(simulator))
    assert simulator.reset(torch.tensor([9]), torch.tensor([1]))["state"].tolist() == [[2, 4]]
    simulator.step(torch.zeros(2, 2), torch.tensor([False, True]))
    with pytest.raises(SimulatorLost, match=r"episodes.*environments \[0\]"):
        simulator.step(torch.zeros(2, 2), everyone(simulator))
    assert begin(simulator, [8, 9])["state"].tolist() == [[1, 3], [2, 4]]
    states, expected = simulator.save(), simulator.step(torch.ones(2, 2), everyone(simulator))
    simulator._process.kill()
    with pytest.raises(SimulatorLost, match=r"lost.*'restore'"):
        simulator.restore(states, torch.arange(2))
    simulator.restore(states, torch.arange(2))  # in a program that was started for it
    again = simulator.step(torch.ones(2, 2), everyone(simulator))
    assert same(again.observation, expected.observation)


def test_a_server_that_was_lost_is_waited_for_until_it_is_there_again(tmp_path, monkeypatch):
    path, away, ready, waits = tmp_path / "s", tmp_path / "away", threading.Event(), []

    def wait(seconds):
        waits.append(seconds)
        if len(waits) == 3:
            away.rename(path)

    told = (Reach, "word", f"unix:{path}", 64, lambda _: ready.set())
    threading.Thread(target=serve.listen, args=told, daemon=True).start()
    assert ready.wait(60)
    simulator = Remote(2, address=f"unix:{path}", token="word", options={"dims": 2})
    begin(simulator, [1, 2])
    monkeypatch.setattr(client, "time", SimpleNamespace(monotonic=time.monotonic, sleep=wait))
    for _ in range(2):
        simulator._socket.shutdown(socket.SHUT_RDWR)
        path.rename(away)
        with pytest.raises(SimulatorLost):
            simulator.step(torch.zeros(2, 2), everyone(simulator))
        if len(waits) == 3:
            break
        begin(simulator, [3, 4])
        assert simulator.step(torch.zeros(2, 2), everyone(simulator)).observation
    simulator._connect_seconds = 0.0
    with pytest.raises(CannotSimulate, match="such file"):
        begin(simulator, [5, 6])
    assert len(waits) == 3
    simulator.close()


async def test_a_pool_goes_on_with_other_episodes_where_the_other_side_died(caplog):
    options = {"python": sys.executable, "make": ARM, "options": {"wrong": "dies"}}
    rules, name = Rules(max_steps=200), "rlinf.envs.remote.Remote"
    async with EnvironmentPool(name, options, num_envs=2, workers=0, rules=rules) as pool:
        (part,) = pool.slices
        await part.reset()
        far = torch.ones(2, 100, 2)  # a point that is moved a hundred times is where the arm dies
        with caplog.at_level(logging.WARNING):
            chunk = await part.step(far)
        assert chunk.lost.all()
        assert not chunk.valid.any()
        assert "lost in 'step'" in caplog.text
        after = await part.step(far[:, :3])
        assert after.valid.all()
        assert not after.lost.any()


@pytest.mark.parametrize(
    ("about", "said"),
    [
        ({"token": "guess"}, r"PermissionError:.*token.*wrong"),
        ({"token": "word", "options": {"dim": 2}}, r"unexpected.*'dim'"),
        ({"address": "unix:/nowhere/at/all"}, r"such file"),
        ({"address": "127.0.0.1:1"}, "refused"),
    ],
)
def test_servers_that_refuse_or_are_not_there_are_said_so(address, about, said):
    with pytest.raises(CannotSimulate, match=said):
        Remote(1, **{"address": address, **about})


def test_programs_that_cannot_be_started_or_say_other_things_are_said_so(tmp_path):
    with pytest.raises(CannotSimulate, match=r"such file"):
        Remote(1, python=str(tmp_path / "python"), make=ARM)
    with pytest.raises(CannotSimulate, match=r"ImportError:.*Leg"):
        Remote(1, python=sys.executable, make=ARM.replace("Arm", "Leg"))
    with pytest.raises(CannotSimulate, match=r"rlinf's protocol"):
        Remote(1, command=["echo", "hello, here is no robot whatsoever"])


def test_a_slow_server_is_given_up_at_the_deadline():
    with pytest.raises(CannotSimulate, match=r"sleep 30.*(time|long)"):
        Remote(1, command=["sleep", "30"], connect_seconds=0.2)


@pytest.mark.parametrize(
    ("options", "key", "said"),
    [
        ({}, "address", r"address, python"),
        ({"address": "a:1", "command": ["b"]}, "address", r"not \['address', 'command'\]"),
        ({"python": "python3"}, "make", r"python needs"),
        ({"address": "a:1", "make": "b:c"}, "make", r"names.*own"),
        ({"address": "robot"}, "address", r"neither.*unix:/path"),
        ({"adress": "a:1"}, "adress", r"mean address"),
    ],
)
def test_wrong_options_are_told_by_key(options, key, said):
    with pytest.raises(WrongOption, match=said) as caught:
        Remote.check_options(options)
    assert caught.value.name == key


def test_a_robot_that_held_costs_the_episode_and_tells_its_times_with_the_next(tmp_path, monkeypatch):
    guards, guard = [], serve.Guard

    def watched(simulator):
        guards.append(guard(simulator, timer=lambda *about: Timer(*about)))
        return guards[-1]

    monkeypatch.setattr(serve, "Guard", watched)
    where, ready = f"unix:{tmp_path / 's'}", threading.Event()
    threading.Thread(target=serve.listen, args=(Robot, "", where, 1, lambda _: ready.set()), daemon=True).start()
    assert ready.wait(60)
    simulator = Remote(1, address=where)
    environment = Environment(simulator, Rules(max_steps=2))
    environment.reset(0)
    environment.step(torch.zeros(1, 1, 2))
    guards[0]._running.call()
    with pytest.raises(SimulatorLost, match=r"too late.*hold_after"):
        environment.step(torch.zeros(1, 1, 2))
    environment.reset(1)
    (episode,) = environment.step(torch.tensor([[[0.0, 0.0], [1.0, 0.0]]])).episodes
    told = summary([episode])
    assert told["robot/holds"] == 1.0
    assert told["robot/limited"] == 0.5
    assert told["robot/age_max"] >= told["robot/age"] >= 0.0
    assert told["robot/age"] == pytest.approx(told["robot/decision"] + told["robot/link"])
    simulator.close()
