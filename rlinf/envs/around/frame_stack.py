"""A simulator whose observations are the last few of another one, so that a policy without memory sees motion.

In and out: what `Simulator` says; `Environment` makes it where `env.frame_stack` is more than 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from rlinf.envs.around.wrapper import Wrapper
from rlinf.envs.base import ArraySpec, Observation, Simulator, State, Transition


class FrameStack(Wrapper):
    """The last `frames` observations, the oldest first, one behind the other along the last axis.

    At the beginning of an episode the first observation stands in the place of those that there are not.

    Args:
        simulator: what is observed; this one owns it from now on.
        frames: how many observations are seen at once, K. "state" [N, S] becomes [N, K S], "rgb" [N, H, W, 3 k] becomes
            [N, H, W, K 3 k].
    """

    def __init__(self, simulator: Simulator, frames: int):
        super().__init__(simulator)
        self.frames = frames
        specs = simulator.observation_spec
        self.observation_spec = {
            name: ArraySpec((*spec.shape[:-1], frames * spec.shape[-1]), spec.dtype) for name, spec in specs.items()
        }
        self._seen = {
            name: torch.zeros(self.num_envs, frames, *spec.shape, dtype=spec.dtype, device=self.device)
            for name, spec in specs.items()
        }

    def reset(self, seeds: Tensor, env_ids: Tensor) -> Observation:
        first, rows = self.simulator.reset(seeds, env_ids), env_ids.to(self.device)
        for name, seen in self._seen.items():
            seen[rows] = first[name][:, None].to(self.device)
        return {name: _stacked(seen[rows]) for name, seen in self._seen.items()}

    def step(self, actions: Tensor, active: Tensor) -> Transition:
        moved = self.simulator.step(actions, active)
        for name, seen in self._seen.items():
            new = torch.cat([seen[:, 1:], moved.observation[name][:, None].to(self.device)], 1)
            self._seen[name] = torch.where(active.view(-1, *[1] * (seen.ndim - 1)), new, seen)
        return replace(moved, observation={name: _stacked(seen) for name, seen in self._seen.items()})

    def save(self) -> list[State]:
        inner = self.simulator.save()
        return [
            {"simulator": state, "frames": {name: seen[env].clone() for name, seen in self._seen.items()}}
            for env, state in enumerate(inner)
        ]

    def restore(self, states: Sequence[State], env_ids: Tensor) -> None:
        self.simulator.restore([state["simulator"] for state in states], env_ids)
        for env, state in zip(env_ids.tolist(), states, strict=True):
            for name, frames in state["frames"].items():
                self._seen[name][env] = frames.to(self.device)


def _stacked(seen: Tensor) -> Tensor:
    """[n, K, ..., C] as [n, ..., K C], a copy."""
    return seen.movedim(1, -2).flatten(-2).clone()
