"""Base class of benchmarks that simulate one environment at a time, and their helpers.

`Benchmark` has what `SerialSimulator` asks for besides simulations and their steps: words, pictures for people,
closing. Helpers import a package, bring pictures to one size, and check names against those that are.
"""

from __future__ import annotations

import importlib
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlinf.config.schema import nearest
from rlinf.envs.base import ActionSpec, ArraySpec, CannotSimulate, SerialSimulator, WrongOption


class Benchmark(SerialSimulator):
    """N simulations, each made when its first episode begins, with words for the task of each episode.

    A saved state is the seed and the actions since, which a restore does again. An adapter calls `_shape`, fills in
    `_make`, `_begin` and `_move`, and writes the words of an episode to `_words`.
    """

    _words: list[str]
    """Instruction of each environment."""

    def instructions(self) -> list[str]:
        return list(self._words)

    def render(self, env_ids: Tensor) -> Tensor:
        return torch.from_numpy(np.stack([self._rows[env]["rgb"][..., :3] for env in env_ids.tolist()]))

    def close(self) -> None:
        for simulation in self._simulations.values():
            simulation.close()
        self._simulations.clear()

    def _shape(
        self, num_envs: int, cameras: int, size: int, state: int, low: Sequence[float], high: Sequence[float]
    ) -> None:
        """Set what is observed and done.

        Args:
            num_envs: how many environments.
            cameras: how many there are.
            size: height and width of their pictures.
            state: numbers of the state.
            low: least value of each number of an action.
            high: greatest value of each.
        """
        self.observation_spec = {
            "state": ArraySpec((state,), torch.float32),
            "rgb": ArraySpec((size, size, 3 * cameras), torch.uint8),
        }
        self.action_spec = ActionSpec(torch.tensor(low), torch.tensor(high))
        self._words = [""] * num_envs
        self._simulations: dict[int, Any] = {}
        self._track(num_envs)

    def _simulation(self, env: int) -> Any:
        """The simulation of an environment."""
        if env not in self._simulations:
            self._simulations[env] = self._make(env)
        return self._simulations[env]

    @abstractmethod
    def _make(self, env: int) -> Any:
        """Make the simulation of an environment; it has a method `close`."""

    def _row(self, pictures: Sequence[np.ndarray], felt: Sequence[Any]) -> dict[str, np.ndarray]:
        """One row of an observation, of pictures [h, w, 3] of any size and numbers of the state in their order."""
        size = self.observation_spec["rgb"].shape[0]
        return {
            "rgb": np.concatenate([resized(picture, size) for picture in pictures], axis=2),
            "state": np.concatenate([np.ravel(part) for part in felt]).astype(np.float32),
        }


def imported(name: str, install: str) -> Any:
    """A module of a benchmark.

    Args:
        name: of the module, with dots.
        install: the command that installs it.

    Raises:
        CannotSimulate: it, or something that it imports, is not installed.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        package = (error.name or name).partition(".")[0]
        raise CannotSimulate(f"{name} needs the package {package}, which is not installed: {install}") from error


def resized(picture: np.ndarray, size: int) -> np.ndarray:
    """A picture [h, w, 3] as uint8 [size, size, 3]: interpolated bilinearly, with antialiasing, if its size differs."""
    picture = np.ascontiguousarray(np.asarray(picture)[..., :3], np.uint8)
    if picture.shape[:2] == (size, size):
        return picture
    planes = torch.from_numpy(picture).permute(2, 0, 1)[None].float()
    planes = torch.nn.functional.interpolate(planes, (size, size), mode="bilinear", antialias=True, align_corners=False)
    return planes[0].round().clamp(0, 255).to(torch.uint8).permute(1, 2, 0).contiguous().numpy()


def check_name(options: Mapping[str, Any], option: str, names: Sequence[str], what: str) -> None:
    """Hold an option to names that are known.

    Raises:
        WrongOption: it is none of them; the text has the nearest.
    """
    if (name := options[option]) not in names:
        near = nearest(str(name), names)
        hint = f"did you mean {near}?" if near else f"there are {', '.join(names)}"
        raise WrongOption(option, f"{what} has no {option} {name!r}; {hint}")
