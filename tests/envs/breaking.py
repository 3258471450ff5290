"""A simulator that breaks when a file says so, in the process where it runs."""

import os
import pickle
import time
from pathlib import Path
from typing import ClassVar

import torch

from rlinf.envs.base import SimulatorLost
from rlinf.envs.toy import Reach
from rlinf.envs.workers import Program


class Breaking(Reach):
    """Before a step it looks for `<directory>/crash` and `<directory>/hang`, takes the file away, and obeys."""

    def __init__(self, num_envs, *, directory, **options):
        super().__init__(num_envs, **options)
        self._directory = Path(directory)
        (self._directory / "made").mkdir(exist_ok=True)
        (self._directory / "made" / str(os.getpid())).touch()

    def step(self, actions, active):
        if self._taken("crash"):
            os._exit(3)
        if self._taken("hang"):
            time.sleep(1000)
        return super().step(actions, active)

    def _taken(self, name):
        try:
            (self._directory / name).unlink()
        except FileNotFoundError:
            return False
        return True


class Mortal:
    """A worker whose program lives here, and dies when a call is made that is in `fates`."""

    def __init__(self, target, arguments, *, name, **supervision):
        assert target == "rlinf.envs.workers:Program"
        self.name = name
        self.lives = 0
        self.fates = []  # (method, ChildDied or CallTimeout), in order
        self._arguments = arguments

    async def start(self):
        self._program = Program(**self._arguments)
        self.lives += 1

    async def stop(self):
        pass

    async def call(self, method, *args, timeout=None):
        if self.fates and self.fates[0][0] == method:
            await self.start()
            raise self.fates.pop(0)[1](f"{self.name} is gone")
        return pickle.loads(pickle.dumps(getattr(self._program, method)(*pickle.loads(pickle.dumps(args)))))


def processes(directory) -> int:
    """How many processes made a simulator."""
    return len(list((Path(directory) / "made").iterdir()))


def zeros(count, actions=2):
    return torch.zeros(count, actions, 1)


class Losing(Reach):
    """Is lost in its next calls, as many as `fates` says of each by name."""

    fates: ClassVar[dict[str, int]] = {}

    def reset(self, seeds, env_ids):
        self._lost("reset")
        return super().reset(seeds, env_ids)

    def step(self, actions, active):
        self._lost("step")
        return super().step(actions, active)

    def save(self):
        self._lost("save")
        return super().save()

    def restore(self, states, env_ids):
        self._lost("restore")
        super().restore(states, env_ids)

    def _lost(self, call):
        if self.fates.get(call, 0):
            self.fates[call] -= 1
            raise SimulatorLost(f"gone in {call}")


class NotFinite(Reach):
    """What it is told becomes NaN in environment 0, in its steps of these numbers, counted from 1 over all episodes."""

    def __init__(self, num_envs, *, spoils="reward", at=(), **options):
        super().__init__(num_envs, **options)
        self._spoils, self._at, self._done = spoils, at, 0

    def reset(self, seeds, env_ids):
        seen = super().reset(seeds, env_ids)
        if self._spoils == "start" and self._done in self._at:
            seen["state"][0, 0] = torch.nan
        self._done += self._spoils == "start"
        return seen

    def step(self, actions, active):
        moved = super().step(actions, active)
        self._done += self._spoils != "start"
        if self._spoils == "raise" and self._done in self._at:
            raise RuntimeError("the gripper is jammed")
        if self._done in self._at and self._spoils in ("reward", "observation"):
            (moved.reward if self._spoils == "reward" else moved.observation["state"])[0] = torch.nan
        return moved
