"""A simulator that breaks when a file says so, in the process where it runs."""

import os
import time
from pathlib import Path

import torch

from rlinf.envs.toy import Reach


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


def processes(directory) -> int:
    """How many processes made a simulator."""
    return len(list((Path(directory) / "made").iterdir()))


def zeros(count, actions=2):
    return torch.zeros(count, actions, 1)
