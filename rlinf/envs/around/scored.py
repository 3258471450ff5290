"""Rewards and success by functions of one's own, around any simulator, in the processes where it runs.

In: what single steps did. Out: the same with another reward, and another word on success.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rlinf.config.importing import resolve
from rlinf.envs.around.wrapper import Wrapper
from rlinf.envs.base import Observation, Simulator, State, Transition
from rlinf.envs.episodes import rows_of, with_rows

OFFERED = ("observation", "before", "action", "reward", "success", "terminated", "instructions", "tasks")
"""What a function of one's own may take, by name; all rows at once:

    observation     after the step, by name, [N, ...]
    before          the observation before it
    action          in the simulator's own bounds, float32 [N, A]
    reward          the simulator's, float32 [N]
    success         whether it takes the task for solved, bool [N]; None where it does not say
    terminated      whether it ended the task, bool [N]
    instructions    N texts, or None
    tasks           names of the tasks, N texts, or None
"""


def mistake_in_function(function: Any, arguments: Mapping[str, Any]) -> str | None:
    """What keeps a function from being called with what is offered, and with arguments of its own; None if nothing."""
    if not callable(function):
        return "it is no function"
    parameters = inspect.signature(function).parameters.values()
    names = {each.name for each in parameters}
    needed = {each.name for each in parameters if each.default is each.empty and each.kind not in _OPEN}
    open_ended = any(each.kind is each.VAR_KEYWORD for each in parameters)
    if lacking := sorted(needed - {*OFFERED, *arguments}):
        return f"it takes {', '.join(lacking)}; there is {', '.join(OFFERED)}, and its own arguments"
    if not open_ended and (unknown := sorted(arguments.keys() - names)):
        return f"it takes no {', '.join(unknown)}"
    return None


_OPEN = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)


class Scored(Wrapper):
    """A simulator whose rewards, or whose word on success, come from functions.

    Args:
        num_envs: how many environments.
        simulator: adapter, by its dotted path or as the class.
        options: its keyword arguments.
        reward: dotted path of a function of some of `OFFERED`, which returns the rewards of all rows, [N]; None keeps
            the simulator's.
        success: the same of which tasks are solved, bool [N].
        arguments: further keyword arguments of `reward`.
        scale: rewards are multiplied by it.
    """

    def __init__(
        self,
        num_envs: int,
        *,
        simulator: str | type[Simulator],
        options: Mapping[str, Any] | None = None,
        reward: str | None = None,
        success: str | None = None,
        arguments: Mapping[str, Any] | None = None,
        scale: float = 1.0,
    ):
        adapter: Any = resolve(simulator) if isinstance(simulator, str) else simulator
        super().__init__(adapter(num_envs=num_envs, **(options or {})))
        self._reward, self._success, self._arguments, self._scale = reward, success, dict(arguments or {}), scale
        self._functions: dict[str, Callable[..., Any]] = {
            path: resolve(path) for path in (reward, success) if path is not None
        }
        self._seen: Observation = {
            name: torch.zeros(num_envs, *spec.shape, dtype=spec.dtype, device=self.device)
            for name, spec in self.observation_spec.items()
        }

    def reset(self, seeds: Tensor, env_ids: Tensor) -> Observation:
        found = self.simulator.reset(seeds, env_ids)
        self._seen = with_rows(self._seen, env_ids, found)
        return found

    def step(self, actions: Tensor, active: Tensor) -> Transition:
        moved = self.simulator.step(actions, active)
        offered = {
            "observation": moved.observation,
            "before": self._seen,
            "action": actions,
            "reward": moved.reward,
            "success": moved.success,
            "terminated": moved.terminated,
            "instructions": self.simulator.instructions(),
            "tasks": self.simulator.tasks(),
        }
        reward, success = moved.reward, moved.success
        if self._reward is not None:
            reward = self._told("env.reward", self._reward, {**offered, **self._arguments}).float()
        if self._success is not None:
            success = self._told("env.success", self._success, offered).bool()
        self._seen = moved.observation
        return replace(moved, reward=reward * self._scale, success=success)

    def _told(self, key: str, path: str, offered: Mapping[str, Any]) -> Tensor:
        """What a function says of all rows.

        Raises:
            RuntimeError: it raised, or returned something else; the text names the key.
        """
        function = self._functions[path]
        parameters = inspect.signature(function).parameters
        open_ended = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
        taken = {name: value for name, value in offered.items() if open_ended or name in parameters}
        try:
            found = torch.as_tensor(function(**taken), device=self.device)
        except Exception as error:  # of code that users write
            raise RuntimeError(f"{key} = {path}: {type(error).__name__}: {error}") from error
        if tuple(found.shape) != (self.num_envs,):
            raise RuntimeError(
                f"{key} = {path}: it returned {list(found.shape)} instead of a row's each, [{self.num_envs}]"
            )
        return found

    def save(self) -> list[State]:
        rows = [rows_of(self._seen, torch.tensor([env])) for env in range(self.num_envs)]
        return [{"inner": state, "seen": seen} for state, seen in zip(self.simulator.save(), rows, strict=True)]

    def restore(self, states: Sequence[State], env_ids: Tensor) -> None:
        self.simulator.restore([state["inner"] for state in states], env_ids)
        seen = {name: torch.cat([state["seen"][name] for state in states]).to(self.device) for name in self._seen}
        self._seen = with_rows(self._seen, env_ids, seen)
