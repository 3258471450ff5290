"""The program in a simulator's process: the environments of one worker, one for each slice.

It answers calls by name, one at a time, with what an `Environment` returns, as arrays instead of tensors: an array
crosses to another process in a tenth of the time. Whoever calls waits.

A process that was started anew has environments without episodes. It says so instead of failing, and the side that
calls begins new ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rlinf.config.importing import resolve
from rlinf.envs.base import ActionSpec, ArraySpec, Simulator, SimulatorLost
from rlinf.envs.environment import Environment, Rules
from rlinf.envs.episodes import Chunk, Start
from rlinf.envs.video import Recorder, Recording
from rlinf.runtime.base.tensors import choose_device


@dataclasses.dataclass(frozen=True, slots=True)
class SliceRange:
    """Environments of one worker in one slice."""

    first: int
    """Number of the first, over all workers and slices."""
    count: int
    """How many."""


class Steps(NamedTuple):
    """An uneventful chunk on its way: what `of_steps` takes, but for numbers of episodes, which both sides know."""

    rewards: np.ndarray
    """float32 [N, C]"""
    observation: dict[str, np.ndarray]
    """N rows."""
    instructions: tuple[str, ...] | None
    """N texts."""


class Program:
    """The environments of one worker.

    Args:
        simulator: dotted path of the adapter, or the class itself.
        options: its keyword arguments besides `num_envs`.
        rules: how episodes begin and end.
        ranges: one per slice.
        recording: which episodes become videos.
        device: number of the GPU that its simulators take, if they take one; None: that of this process, as here.
    """

    def __init__(
        self,
        simulator: str | type[Simulator],
        options: Mapping[str, Any],
        rules: Rules,
        ranges: tuple[SliceRange, ...],
        recording: Recording | None,
        device: int | None = None,
    ):
        if device is not None:
            choose_device(device)  # a simulator that computes on it enters it: others must not take memory of it
        adapter: Any = resolve(simulator) if isinstance(simulator, str) else simulator
        self._environments = [
            Environment(
                adapter(num_envs=span.count, **options),
                rules,
                first=span.first,
                recorder=None if recording is None else Recorder(recording),
            )
            for span in ranges
        ]
        self._begun = [False for _ in ranges]

    def specs(self) -> tuple[dict[str, ArraySpec], ActionSpec, int | None]:
        """Specifications of the simulator: observations, actions, and steps in an episode at most."""
        environment = self._environments[0]
        simulator = environment.simulator
        return dict(simulator.observation_spec), simulator.action_spec, environment.max_steps

    def reset(self, part: int, epoch: int, episode: np.ndarray | None) -> Any:
        """`Environment.reset` of one slice; a text says why it has no episodes."""
        numbers = None if episode is None else torch.from_numpy(episode)
        return self._started(part, lambda: self._environments[part].reset(epoch, numbers))

    def step(self, part: int, actions: np.ndarray) -> Any:
        """`Environment.step` of one slice; a text says why it has no episodes."""
        return self._or_lost(part, lambda: _packed_chunk(self._environments[part].step(torch.from_numpy(actions))))

    def save(self, part: int) -> Any:
        """`Environment.state_dict` of one slice; a text says why it has no episodes."""
        return self._or_lost(part, self._environments[part].state_dict)

    def load(self, part: int, state: dict[str, Any]) -> Any:
        """`Environment.load_state_dict` of one slice; a text says why it has no episodes."""
        return self._started(part, lambda: self._environments[part].load_state_dict(state))

    def watch(self, part: int, envs: tuple[int, ...]) -> None:
        """`Environment.watch` of one slice."""
        self._environments[part].watch(envs)

    def _started(self, part: int, call: Callable[[], Start]) -> Any:
        self._begun[part] = True
        return self._or_lost(part, lambda: packed(call()))

    def _or_lost(self, part: int, call: Callable[[], Any]) -> Any:
        if not self._begun[part]:
            return "its process is new"
        try:
            return call()
        except SimulatorLost as error:
            self._begun[part] = False
            return str(error)

    def weigh(self, part: int, weights: tuple[float, ...]) -> None:
        """`Environment.weigh` of one slice."""
        self._environments[part].weigh(weights)

    def offload(self, part: int) -> None:
        """`Environment.offload` of one slice."""
        self._environments[part].offload()

    def onload(self, part: int) -> None:
        """`Environment.onload` of one slice."""
        self._environments[part].onload()

    def close(self) -> None:
        """Close all simulators."""
        for environment in self._environments:
            environment.close()


def _packed_chunk(chunk: Chunk) -> Any:
    if chunk.uneventful:
        return Steps(packed(chunk.rewards), packed(chunk.observation), chunk.instructions)
    return packed(chunk)


def packed(value: Any) -> Any:
    """A `Start` or `Chunk` with arrays in the place of tensors."""
    if isinstance(value, Tensor):
        return value.cpu().numpy()
    if isinstance(value, dict):
        return {name: packed(each) for name, each in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return type(value)(*(packed(getattr(value, field.name)) for field in dataclasses.fields(value)))
    return value


def unpacked(value: Any) -> Any:
    """The inverse of `packed`."""
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    if isinstance(value, dict):
        return {name: unpacked(each) for name, each in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return type(value)(*(unpacked(getattr(value, field.name)) for field in dataclasses.fields(value)))
    return value
