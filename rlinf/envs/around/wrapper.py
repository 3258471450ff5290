"""A simulator around another one: what wrappers have in common.

In and out: what `Simulator` says; every call that a wrapper does not change goes to the simulator inside. From the
inside: the adapter; `Mixture`, which has several; `Scored`, whose functions see single observations; `FrameStack`, in
the `Environment`. `job/embodied/roles.py` names the first three by the configuration's keys.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from rlinf.envs.base import Observation, Simulator, State, Transition


class Wrapper(Simulator):
    """A simulator that does and shows what another one does.

    Args:
        simulator: the one inside; this one owns it from now on.
    """

    def __init__(self, simulator: Simulator):
        self.simulator = simulator
        self.num_envs, self.device, self.max_steps = simulator.num_envs, simulator.device, simulator.max_steps
        self.observation_spec, self.action_spec = simulator.observation_spec, simulator.action_spec
        self.resets_together = simulator.resets_together

    def reset(self, seeds: Tensor, env_ids: Tensor) -> Observation:
        return self.simulator.reset(seeds, env_ids)

    def step(self, actions: Tensor, active: Tensor) -> Transition:
        return self.simulator.step(actions, active)

    def instructions(self) -> Sequence[str] | None:
        return self.simulator.instructions()

    def tasks(self) -> Sequence[str] | None:
        return self.simulator.tasks()

    def weigh(self, weights: Sequence[float]) -> None:
        self.simulator.weigh(weights)

    def render(self, env_ids: Tensor) -> Tensor:
        return self.simulator.render(env_ids)

    def save(self) -> list[State]:
        return self.simulator.save()

    def restore(self, states: Sequence[State], env_ids: Tensor) -> None:
        self.simulator.restore(states, env_ids)

    def offload(self) -> None:
        self.simulator.offload()

    def onload(self) -> None:
        self.simulator.onload()

    def close(self) -> None:
        self.simulator.close()
