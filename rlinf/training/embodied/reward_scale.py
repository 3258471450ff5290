"""The scale of rewards: they are divided by the running standard deviation of discounted returns.

In: a step's trajectory. Out: the same with other rewards. Every rank sees all trajectories, so that all have the same
scale. Nobody waits here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from rlinf.algos.chunk_advantages import Chunks
from rlinf.models.policy.layers import RunningNorm

_LEAST_VARIANCE = 1e-8  # of returns that differ by rounding alone


class RewardScale:
    """Divides rewards by a running standard deviation, and leaves their sign and their 0 where they are.

        R_t = gamma R_{t-1} + r_t        of each episode from its beginning on        r_t / sqrt(Var(R))

    (Engstrom et al., arXiv:2005.12729, section 3: reward scaling.) The variance is over all decisions up to and with
    the step that is scaled. A decision's reward is the sum over its chunk, and gamma is per decision.

    Args:
        gamma: discount.
        goes_on: environments go on with their episodes from one step to the next.
    """

    def __init__(self, gamma: float, *, goes_on: bool):
        self._gamma, self._goes_on = gamma, goes_on
        self._seen = RunningNorm(1)
        self._returns: torch.Tensor | None = None

    def scaled(self, chunks: Chunks) -> Chunks:
        """The same chunks with scaled rewards; their returns are taken into the variance first."""
        valid = chunks.valid.bool()
        rewards = torch.where(valid, chunks.rewards, 0.0).double().sum(-1)
        ended, there = chunks.ended.any(-1), valid.any(-1)
        running = self._returns if self._goes_on else None
        running = torch.zeros_like(rewards[0]) if running is None else running
        if len(running) != rewards.shape[1]:
            raise ValueError(f"rewards are of {rewards.shape[1]} environments, and were of {len(running)} before")
        returns = torch.empty_like(rewards)
        for time, reward in enumerate(rewards):
            returns[time] = running = torch.where(there[time], self._gamma * running + reward, 0.0)
            running = torch.where(ended[time], 0.0, running)
        self._returns = running
        self._seen.update(returns.reshape(-1, 1), there.reshape(-1))
        return replace(chunks, rewards=(chunks.rewards / self.deviation).to(chunks.rewards.dtype))

    @property
    def deviation(self) -> float:
        """What rewards are divided by; 1 as long as all returns are alike."""
        variance = float(self._seen.variance)
        return math.sqrt(variance) if variance > _LEAST_VARIANCE else 1.0

    def state(self) -> dict[str, Any]:
        """All that the next scales depend on, as JSON values."""
        numbers = {name: buffer.tolist() for name, buffer in self._seen.named_buffers()}
        return {**numbers, "returns": None if self._returns is None else self._returns.tolist()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` said."""
        for name, buffer in self._seen.named_buffers():
            buffer.copy_(torch.tensor(state[name], dtype=torch.float64))
        returns = state["returns"]
        self._returns = None if returns is None else torch.tensor(returns, dtype=torch.float64)
