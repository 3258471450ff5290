"""How well the embodied flow overlaps simulation with inference: modelled stages under the virtual clock.

The flow and the runtime are the real ones; simulation and policy only sleep, for as long as a real one would take. Of
B environments in p slices, a slice takes e to simulate and g to decide, and either role does one slice at a time. A
loop of H decisions cannot end before

    max( g + p H e,        the first decision, then the simulation without a pause
         p H g + e,        the policy without a pause, then the last simulation
         H (e + g) )       one slice after itself

In: a case. Out: bound / time, in virtual seconds, so free of what else the machine does.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from rlinf.data.step import EmbodiedStep
from rlinf.flows.embodied import embodied
from rlinf.runtime.actor.actor import Actor, endpoint
from rlinf.runtime.base.clock import run_virtual
from rlinf.runtime.system.system import ActorSystem

HORIZON = 50
SIMULATION = 0.04
"""Seconds to simulate all environments once."""
FIXED = {"simulation": 0.25, "inference": 0.5}
"""Share of a stage's time that does not shrink with the slice: kernels and messages cost the same for fewer rows."""
RATIOS = (0.1, 0.25, 0.5, 1.0, 2.0)
"""Seconds of inference per second of simulation, for all environments at once."""
SLICES = (1, 2, 4)


@dataclass(frozen=True, slots=True)
class Case:
    """One slice's stages, in seconds."""

    slices: int
    """p"""
    simulation: float
    """e"""
    inference: float
    """g"""

    @staticmethod
    def of(ratio: float, slices: int) -> Case:
        """Stages of a slice, from those of all environments."""

        def part(whole: float, fixed: float) -> float:
            return whole * (fixed + (1.0 - fixed) / slices)

        inference = part(ratio * SIMULATION, FIXED["inference"])
        return Case(slices, part(SIMULATION, FIXED["simulation"]), inference)

    def bound(self, horizon: int) -> float:
        """Least seconds of a loop."""
        e, g, p = self.simulation, self.inference, self.slices
        return max(g + p * horizon * e, p * horizon * g + e, horizon * (e + g))

    def took(self, horizon: int) -> float:
        """Virtual seconds of the flow."""
        return run_virtual(_loop(self, horizon))[0]


class Simulated(Actor):
    """Environments that only take time; their workers serve one slice at a time."""

    async def setup(self, *, seconds: float) -> None:  # type: ignore[override]
        self._seconds, self._turn = seconds, asyncio.Lock()

    @endpoint
    async def reset(self, number: int, epoch: int) -> int:
        return 0

    @endpoint
    async def step(self, number: int, actions: int) -> int:
        async with self._turn:
            await asyncio.sleep(self._seconds)
        return actions


class Deciding(Simulated):
    """A policy that only takes time."""

    @endpoint
    async def act(self, key: tuple[int, int], seen: int) -> int:
        async with self._turn:
            await asyncio.sleep(self._seconds)
        return seen + 1

    @endpoint
    async def trajectory(self, key: tuple[int, int], seen: int) -> int:
        return seen

    @endpoint(joint=True)
    async def load(self, weights: None) -> None:
        """Nothing to load."""


class Learning(Actor):
    """A trainer that looks how much it got."""

    @endpoint(joint=True)
    async def train(self, trajectories: list[int]) -> dict[str, float]:
        return {"decisions": float(sum(trajectories))}

    @endpoint(joint=True)
    async def weights(self) -> None:
        """Nothing to publish."""


async def _loop(case: Case, horizon: int) -> float:
    async with ActorSystem.local() as system:
        roles: dict[str, Any] = {
            "env": await system.spawn(Simulated, name="env", seconds=case.simulation),
            "policy": await system.spawn(Deciding, name="policy", seconds=case.inference),
            "trainer": await system.spawn(Learning, name="trainer"),
        }
        began = asyncio.get_running_loop().time()
        found = await embodied(EmbodiedStep(0, horizon, case.slices), **roles)
        took = asyncio.get_running_loop().time() - began
    if found["decisions"] != case.slices * horizon:
        raise RuntimeError(f"{found['decisions']:.0f} decisions came of {case.slices} slices x {horizon}")
    return took


def overlap(ratio: float, slices: int, horizon: int = HORIZON) -> float:
    """Bound over time of one case: 1 is perfect."""
    case = Case.of(ratio, slices)
    return case.bound(horizon) / case.took(horizon)
