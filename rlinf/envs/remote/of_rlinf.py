"""A simulator of rlinf's own kind, served to another process: tensors inside, arrays outside."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlinf.envs.base import Simulator


class OfRlinf:
    """Has the attributes and methods that `serve.py` asks of what it serves.

    Args:
        simulator: what is served.
    """

    def __init__(self, simulator: Simulator):
        self._simulator = simulator
        self.observation_spec = {
            name: (spec.shape, str(spec.dtype).removeprefix("torch."))
            for name, spec in simulator.observation_spec.items()
        }
        self.action_low, self.action_high = simulator.action_spec.low.numpy(), simulator.action_spec.high.numpy()
        self.max_steps, self.resets_together = simulator.max_steps, simulator.resets_together

    def reset(self, seeds: np.ndarray, env_ids: np.ndarray) -> Any:
        """`Simulator.reset`."""
        return arrays(self._simulator.reset(torch.from_numpy(seeds), torch.from_numpy(env_ids)))

    def step(self, actions: np.ndarray, active: np.ndarray) -> Any:
        """`Simulator.step`."""
        device = self._simulator.device
        moved = self._simulator.step(torch.from_numpy(actions).to(device), torch.from_numpy(active).to(device))
        names = ("observation", "reward", "terminated", "truncated", "success")
        return {name: arrays(getattr(moved, name)) for name in names}

    def instructions(self) -> Any:
        """`Simulator.instructions`."""
        return self._simulator.instructions()

    def render(self, env_ids: np.ndarray) -> Any:
        """`Simulator.render`."""
        return arrays(self._simulator.render(torch.from_numpy(env_ids)))

    def save(self) -> Any:
        """`Simulator.save`."""
        return arrays(self._simulator.save())

    def restore(self, states: Any, env_ids: np.ndarray) -> None:
        """`Simulator.restore`."""
        self._simulator.restore(tensors(states), torch.from_numpy(env_ids))

    def close(self) -> None:
        """`Simulator.close`."""
        self._simulator.close()


def arrays(tree: Any) -> Any:
    """A tree of tensors as arrays."""
    if isinstance(tree, Tensor):
        return tree.detach().cpu().numpy()
    if isinstance(tree, dict):
        return {name: arrays(part) for name, part in tree.items()}
    return [arrays(part) for part in tree] if isinstance(tree, list | tuple) else tree


def tensors(tree: Any) -> Any:
    """A tree of arrays as tensors."""
    if isinstance(tree, np.ndarray):
        return torch.from_numpy(tree)
    if isinstance(tree, dict):
        return {name: tensors(part) for name, part in tree.items()}
    return [tensors(part) for part in tree] if isinstance(tree, list) else tree
