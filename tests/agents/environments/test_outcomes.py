"""An environment that raises, hangs, answers nonsense, dies or floods: its episode is an outcome with the cause, and
the next one goes well. Five faults of each of five kinds of environments."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import reasoning_gym
import textarena

from rlinf import ActorSystem
from rlinf.agents.agent import LastingAgent, lasts, opened, samples_of, worked_on
from rlinf.agents.environments import openenv, verifiers, worker
from rlinf.agents.environments.openenv import OpenEnv
from rlinf.agents.environments.reasoning_gym import ReasoningGym
from rlinf.agents.environments.textarena import TextArena
from rlinf.agents.environments.verifiers import Verifiers
from rlinf.agents.episodes import Episodes, LoopWatch
from rlinf.agents.outcome import Episode, Tally, here
from rlinf.data.sample import Prompt
from tests.agents.acting import begun

HERE = Path(__file__).parent
LONGEST = 4000
"""Tokens that the model reads at most."""


async def _played(environment, rows, *, timeout=30.0, generates=False):
    """Play an episode of each row, one after the other; return the rewards by row, and the tally."""
    tally, rewards = Tally(), {}

    async def episode(number):
        llm, _ = begun("7", "[7]", "7", longest=LONGEST)
        here.get().llm = llm
        given = llm
        if generates:  # where the episode is played elsewhere
            await llm.generate("Hi")
            given = SimpleNamespace(base_url="http://127.0.0.1:1/v1", api_key="its own")
        samples = samples_of(await worked_on(agent, SimpleNamespace(row=rows[number]), given), llm)
        rewards[number] = samples[0].reward
        return samples

    def begin(task, index):
        return Episode(task, index, (0,), Prompt(task, np.zeros(1, np.int64)), {})

    agent = LastingAgent(environment) if lasts(environment) else environment
    async with ActorSystem.local(), opened(agent):
        watch = LoopWatch(lambda line: None, lambda: None)
        episodes = Episodes(episode, 1, begin, (tally,), timeout=timeout, at_once=1, judge=None, watch=watch)
        async for _ in episodes.groups(range(len(rows))):
            pass
    return rewards, tally


def _ended_badly(rewards, tally, cause):
    """The first of two episodes was not drawn, for this cause; the second went well."""
    assert (tally.played, len(tally.failed)) == (2, 1)
    assert rewards.keys() == {1}
    assert cause in tally.remark


@pytest.mark.parametrize(
    ("what", "cause"),
    [
        ("error", "the tool is gone"),
        ("silence", "timeout=5 s"),
        ("nan", "nan"),
        ("death", "died: out of memory"),
        ("endless", "no result"),
    ],
)
async def test_of_verifiers(what, cause, monkeypatch):
    monkeypatch.setattr(verifiers, "_WORKER", ("-P", str(HERE / "stand_in_verifiers.py")))
    monkeypatch.setattr(worker, "_LONGEST", 100_000)
    made = Verifiers("all", python=sys.executable)
    rows = {row["name"]: row for row in made.tasks()}
    timeout = HANGS if what == "silence" else 30.0
    rewards, tally = await _played(made, [rows[what], rows["0.25"]], timeout=timeout, generates=True)
    _ended_badly(rewards, tally, cause)
    assert rewards[1] == 1.25


@pytest.mark.parametrize(
    ("what", "cause"),
    [
        (1, "the tool is gone"),
        (2, "timeout=5 s"),
        (3, "nonsense: '[7'"),
        (4, "hung up at reset"),
        (5, "hung up at reset: "),
    ],
)
async def test_of_openenv(what, cause, monkeypatch):
    monkeypatch.setattr(openenv, "_LONGEST", 100_000)
    made = OpenEnv([sys.executable, "-P", str(HERE / "stand_in_openenv.py"), "{port}"])
    rows = [{"seed": what}, {"seed": 0}]
    rewards, tally = await _played(made, rows, timeout=HANGS if what == 2 else 30.0)
    _ended_badly(rewards, tally, cause)
    assert rewards[1] == 1.0


def _raises():
    raise ZeroDivisionError("no such board")


def _leaves():
    raise SystemExit("the licence ended")


FAULTS = {"raises": _raises, "nonsense": lambda: "a lot", "dies": _leaves}
HANGS = 5.0
"""Seconds of an episode beside one that hangs: far more than it takes, even where others keep the machine busy."""
CAUSES = {"raises": "no such board", "hangs": "timeout=5 s", "nonsense": "a lot", "dies": "", "floods": "ContextFull"}


@pytest.fixture
def impatient(monkeypatch):
    """Code that blocks the event loop is looked at, and ended, soon."""
    monkeypatch.setattr("rlinf.agents.episodes._BLOCKED", 0.1)
    monkeypatch.setattr("rlinf.agents.episodes._LOOK", 0.05)


@pytest.mark.parametrize("fault", CAUSES)
async def test_of_reasoning_gym(fault, monkeypatch):
    made = ReasoningGym("chain_sum", size=2, held_out=0, instructions=None)
    rows, over = made.tasks(), threading.Event()
    generator = reasoning_gym.arithmetic.ChainSumDataset
    if fault == "floods":
        made._entries["chain_sum", 0, rows[0]["entry"]]["question"] = "x" * 2 * LONGEST
    else:
        by_itself = generator.score_answer

        def score(self, answer, entry):
            bad = entry["question"] == rows[0]["question"]
            return FAULTS.get(fault, over.wait)() if bad else by_itself(self, answer, entry)

        monkeypatch.setattr(generator, "score_answer", score)
    rewards, tally = await _played(made, rows, timeout=HANGS if fault == "hangs" else 30.0)
    over.set()
    _ended_badly(rewards, tally, CAUSES[fault])


def _endless():
    while True:
        time.sleep(0.01)  # it holds the loop, and leaves the processor to others


@pytest.mark.parametrize("fault", CAUSES)
async def test_of_textarena(fault, monkeypatch, impatient):
    made = TextArena("GuessTheNumber-v0", size=2, turns=2)
    rows = made.tasks()
    game = textarena.envs.GuessTheNumber.env.GuessTheNumberEnv
    by_itself, seeds = (game.reset, game.step), {}

    def reset(self, num_players, seed=None):
        seeds[id(self)] = seed
        return by_itself[0](self, num_players=num_players, seed=seed)

    def step(self, action):
        if seeds[id(self)] != rows[0]["seed"]:
            return by_itself[1](self, action)
        if fault == "floods":
            self.state.add_observation(
                message="x" * 2 * LONGEST, observation_type=textarena.ObservationType.GAME_MESSAGE
            )
            return False, {}
        self.state.rewards = {0: FAULTS.get(fault, _endless)()}
        return True, {}

    monkeypatch.setattr(game, "reset", reset)
    monkeypatch.setattr(game, "step", step)
    rewards, tally = await _played(made, rows, timeout=HANGS if fault == "hangs" else 30.0)
    _ended_badly(rewards, tally, CAUSES[fault])


@pytest.mark.parametrize("fault", CAUSES)
async def test_of_a_class_of_ones_own(fault):
    class Own:
        def tasks(self):
            return [{"bad": True}, {"bad": False}]

        async def __call__(self, task, llm):
            await llm.generate("x" * 2 * LONGEST if fault == "floods" and task.row["bad"] else "Hi")
            if not task.row["bad"]:
                return 1.0
            return await asyncio.Event().wait() if fault == "hangs" else FAULTS[fault]()

    made = Own()
    rewards, tally = await _played(made, made.tasks(), timeout=HANGS if fault == "hangs" else 30.0)
    _ended_badly(rewards, tally, CAUSES[fault])
    assert rewards[1] == 1.0
