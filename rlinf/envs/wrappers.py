"""Simulators around other simulators: mixtures of tasks, and rewards and success by functions of one's own.

Every call that a wrapper does not change goes to the simulator inside. From the inside: the adapter; `Mixture`, which
has several; `Scored`, whose functions see single observations; `FrameStack`, in the `Environment`.
`runs/embodied_roles.py` names the first three by the configuration's keys.

`Mixture` mixes tasks: which of them an episode is of follows from its seed. Each task is a simulator of its own with a
place for every environment, of which those are stepped that are in that task.

`Scored` replaces the reward of single steps, and the word on success, in the processes where the simulator runs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rlinf.config.embodied import task_names
from rlinf.config.importing import resolve
from rlinf.data.rng import mix
from rlinf.envs.base import (
    Interventions,
    Observation,
    Simulator,
    State,
    Transition,
    rows_of,
    rows_where,
    with_rows,
)


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

    def load(self, weights: Mapping[str, Tensor]) -> None:
        self.simulator.load(weights)

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


_SALT = 0x7A5C
"""Keeps the choice of a task apart from what else follows from an episode's seed."""


class Mixture(Simulator):
    """N environments, each of whose episodes is of one of several tasks.

    Args:
        num_envs: how many.
        simulator: adapter of all tasks, by its dotted path or as the class.
        tasks: mappings with the `options` of each, besides the common ones, its `weight` (1 if not there) and `name`.
        options: that tasks have in common.

    Raises:
        ValueError: tasks differ in what they show or take, so that one policy could not act in both; or one resets all
            environments together.
    """

    def __init__(
        self,
        num_envs: int,
        *,
        simulator: str | type[Simulator],
        tasks: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any] | None = None,
    ):
        adapter: Any = resolve(simulator) if isinstance(simulator, str) else simulator
        self._names = task_names(tasks)
        self._weights = [float(task.get("weight", 1.0)) for task in tasks]
        self._parts: list[Simulator] = [
            adapter(num_envs=num_envs, **{**(options or {}), **task.get("options", {})}) for task in tasks
        ]
        first = self._parts[0]
        for name, part in zip(self._names, self._parts, strict=True):
            if part.observation_spec != first.observation_spec or part.action_spec.size != first.action_spec.size:
                raise ValueError(f"tasks {self._names[0]} and {name} differ in what they show or take: one policy acts")
            if not all(torch.equal(getattr(part.action_spec, end), getattr(first.action_spec, end)) for end in _ENDS):
                raise ValueError(f"tasks {self._names[0]} and {name} differ in the bounds of actions: one policy acts")
            if part.resets_together:
                raise ValueError(
                    f"task {name}: {type(part).__name__} resets all environments together, and a mixture some at a time"
                )
        self.num_envs, self.device = num_envs, first.device
        self.observation_spec, self.action_spec = first.observation_spec, first.action_spec
        limits = [part.max_steps for part in self._parts]
        self.max_steps = None if None in limits else max(limit or 0 for limit in limits)
        self._which = torch.zeros(num_envs, dtype=torch.int64)
        self._steps = torch.zeros(num_envs, dtype=torch.int64)

    def weigh(self, weights: Sequence[float]) -> None:
        """Choose the tasks of episodes to come by other weights.

        Args:
            weights: of each task, not all 0.
        """
        self._weights = list(weights)

    def task_of(self, seed: int) -> int:
        """Number of the task that an episode of a seed is of."""
        rest = mix(seed, _SALT) / 2**63 * sum(self._weights)
        for number, weight in enumerate(self._weights):
            rest -= weight
            if rest < 0:
                return number
        return max(number for number, weight in enumerate(self._weights) if weight > 0)

    def reset(self, seeds: Tensor, env_ids: Tensor) -> Observation:
        self._which[env_ids] = torch.tensor([self.task_of(seed) for seed in seeds.tolist()])
        self._steps[env_ids] = 0
        return self._gathered(env_ids, lambda part, rows, envs: part.reset(seeds[rows], envs))

    def step(self, actions: Tensor, active: Tensor) -> Transition:
        self._steps += active.cpu()
        moved: Transition | None = None
        for number, part in enumerate(self._parts):
            mine = active & (self._which == number).to(active.device)
            if bool(mine.any()):
                transition = part.step(actions, mine)
                if part.max_steps is not None:
                    late = (self._steps >= part.max_steps).to(active.device)
                    transition = replace(transition, truncated=transition.truncated | late)
                moved = transition if moved is None else _merged(mine, transition, moved)
        assert moved is not None  # nobody steps environments of which none is active
        return moved

    def instructions(self) -> Sequence[str] | None:
        texts = [part.instructions() for part in self._parts]
        if all(each is None for each in texts):
            return None
        rows = enumerate(self._which.tolist())
        return [self._names[number] if (words := texts[number]) is None else words[env] for env, number in rows]

    def tasks(self) -> Sequence[str]:
        return [self._names[number] for number in self._which.tolist()]

    def render(self, env_ids: Tensor) -> Tensor:
        return self._gathered(env_ids, lambda part, rows, envs: {"pictures": part.render(envs)})["pictures"]

    def save(self) -> list[State]:
        states = {number: self._parts[number].save() for number in sorted(set(self._which.tolist()))}
        rows = enumerate(zip(self._which.tolist(), self._steps.tolist(), strict=True))
        return [{"task": number, "steps": steps, "state": states[number][env]} for env, (number, steps) in rows]

    def restore(self, states: Sequence[State], env_ids: Tensor) -> None:
        self._which[env_ids] = torch.tensor([state["task"] for state in states])
        self._steps[env_ids] = torch.tensor([state["steps"] for state in states])
        for part, rows in self._divided(env_ids):
            part.restore([states[row]["state"] for row in rows.tolist()], env_ids[rows])

    def load(self, weights: Mapping[str, Tensor]) -> None:
        for part in self._parts:
            part.load(weights)

    def offload(self) -> None:
        for part in self._parts:
            part.offload()

    def onload(self) -> None:
        for part in self._parts:
            part.onload()

    def close(self) -> None:
        for part in self._parts:
            part.close()

    def _divided(self, env_ids: Tensor) -> Iterator[tuple[Simulator, Tensor]]:
        """Each simulator that some of these environments are in, with their rows of `env_ids`."""
        for number, part in enumerate(self._parts):
            rows = (self._which[env_ids] == number).nonzero().squeeze(1)
            if len(rows):
                yield part, rows

    def _gathered(
        self, env_ids: Tensor, ask: Callable[[Simulator, Tensor, Tensor], dict[str, Tensor]]
    ) -> dict[str, Tensor]:
        """Answers of the simulators for their environments, in the order of `env_ids`."""
        rows_so_far: dict[str, Tensor] = {}
        for part, rows in self._divided(env_ids):
            answer = ask(part, rows, env_ids[rows])
            if not rows_so_far:
                blank = {name: array[:1].expand(len(env_ids), *array.shape[1:]) for name, array in answer.items()}
                rows_so_far = rows_of(blank, torch.arange(len(env_ids)))
            rows_so_far = with_rows(rows_so_far, rows, answer)
        return rows_so_far


_ENDS = ("low", "high")


def _merged(mine: Tensor, new: Transition, old: Transition) -> Transition:
    """Rows of `new` where `mine`, bool [N], is true, and of `old` elsewhere."""
    success = new.success
    if success is None or old.success is None:  # one of the tasks does not say: nobody is said to have solved it
        solved = success if success is not None else old.success
        success = None if solved is None else solved & (mine if old.success is None else ~mine)
    else:
        success = torch.where(mine, success, old.success)
    return Transition(
        observation=rows_where(mine, new.observation, old.observation),
        reward=torch.where(mine, new.reward, old.reward),
        terminated=torch.where(mine, new.terminated, old.terminated),
        truncated=torch.where(mine, new.truncated, old.truncated),
        success=success,
        interventions=_acted(mine, new.interventions, old.interventions),
    )


def _acted(mine: Tensor, new: Interventions | None, old: Interventions | None) -> Interventions | None:
    """Interventions of `new` where `mine`, and of `old` elsewhere; tasks in which nobody can intervene have none."""
    if new is None or old is None:
        acted, here = (new, mine) if new is not None else (old, ~mine)
        return None if acted is None else Interventions(acted.steps & here, acted.actions)
    steps = torch.where(mine, new.steps, old.steps)
    return Interventions(steps, torch.where(mine[:, None], new.actions, old.actions))


OFFERED = ("observation", "before", "action", "reward", "success", "terminated", "instructions", "tasks")
"""Arguments that a function of one's own may take, by name; all rows at once:

    observation     after the step, by name, [N, ...]
    before          the observation before it
    action          in the simulator's own bounds, float32 [N, A]
    reward          the simulator's, float32 [N]
    success         whether it takes the task for solved, bool [N]; None where it does not say
    terminated      whether it ended the task, bool [N]
    instructions    N texts, or None
    tasks           names of the tasks, N texts, or None
"""


def mistake_in_function(function: Any, arguments: Mapping[str, Any], offered: Sequence[str] = OFFERED) -> str | None:
    """Return the reason why a function cannot be called with what is offered and its own arguments; None if it can."""
    if not callable(function):
        return "it is no function"
    parameters = inspect.signature(function).parameters.values()
    names = {each.name for each in parameters}
    needed = {each.name for each in parameters if each.default is each.empty and each.kind not in _OPEN}
    open_ended = any(each.kind is each.VAR_KEYWORD for each in parameters)
    if lacking := sorted(needed - {*offered, *arguments}):
        return f"it takes {', '.join(lacking)}; there is {', '.join(offered)}, and its own arguments"
    if not open_ended and (unknown := sorted(arguments.keys() - names)):
        return f"it takes no {', '.join(unknown)}"
    return None


_OPEN = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)


class Remembering(Wrapper):
    """A simulator whose last observation is known, for functions of what is seen before a step."""

    def __init__(self, simulator: Simulator):
        super().__init__(simulator)
        self._seen: Observation = {
            name: torch.zeros(self.num_envs, *spec.shape, dtype=spec.dtype, device=self.device)
            for name, spec in self.observation_spec.items()
        }

    def reset(self, seeds: Tensor, env_ids: Tensor) -> Observation:
        observation = self.simulator.reset(seeds, env_ids)
        self._seen = with_rows(self._seen, env_ids, observation)
        return observation

    def save(self) -> list[State]:
        rows = [rows_of(self._seen, torch.tensor([env])) for env in range(self.num_envs)]
        return [{"inner": state, "seen": row} for state, row in zip(self.simulator.save(), rows, strict=True)]

    def restore(self, states: Sequence[State], env_ids: Tensor) -> None:
        self.simulator.restore([state["inner"] for state in states], env_ids)
        rows = {name: torch.cat([state["seen"][name] for state in states]).to(self.device) for name in self._seen}
        self._seen = with_rows(self._seen, env_ids, rows)

    @staticmethod
    def _told(key: str, path: str, function: Callable[..., Any], offered: Mapping[str, Any]) -> Any:
        """Result of a function for all rows.

        Raises:
            RuntimeError: it raised; the text names the key.
        """
        parameters = inspect.signature(function).parameters
        open_ended = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
        arguments = {name: value for name, value in offered.items() if open_ended or name in parameters}
        try:
            return function(**arguments)
        except Exception as error:  # of code that users write
            raise RuntimeError(f"{key} = {path}: {type(error).__name__}: {error}") from error


class Scored(Remembering):
    """A simulator whose rewards, or whose word on success, come from functions.

    Args:
        num_envs: how many environments.
        simulator: adapter, by its dotted path or as the class.
        options: its keyword arguments.
        reward: dotted path of a function of some of `OFFERED`, which returns the rewards of all rows, [N]; None keeps
            the simulator's.
        success: the same of which tasks are solved, bool [N].
        arguments: further keyword arguments of `reward`; `success` gets those of them that it takes.
        scale: rewards are multiplied by it.
        ends: an episode ends where `success` says that its task is solved.
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
        ends: bool = False,
    ):
        adapter: Any = resolve(simulator) if isinstance(simulator, str) else simulator
        super().__init__(adapter(num_envs=num_envs, **(options or {})))
        self._reward, self._success, self._arguments, self._scale = reward, success, dict(arguments or {}), scale
        self._ends = ends
        self._functions: dict[str, Callable[..., Any]] = {
            path: resolve(path) for path in (reward, success) if path is not None
        }

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
            reward = self._rows_told("env.reward", self._reward, {**offered, **self._arguments}).float()
        if self._success is not None:
            success = self._rows_told("env.success", self._success, {**offered, **self._arguments}).bool()
        self._seen = moved.observation
        terminated = moved.terminated | success if self._ends and success is not None else moved.terminated
        return replace(moved, reward=reward * self._scale, success=success, terminated=terminated)

    def _rows_told(self, key: str, path: str, offered: Mapping[str, Any]) -> Tensor:
        """Result of a function for all rows, a number each.

        Raises:
            RuntimeError: it raised, or returned something else; the text names the key.
        """
        answer = self._told(key, path, self._functions[path], offered)
        try:
            values = torch.as_tensor(answer, device=self.device)
        except Exception as error:  # of what users' code returns
            raise RuntimeError(f"{key} = {path}: {type(error).__name__}: {error}") from error
        if tuple(values.shape) != (self.num_envs,):
            raise RuntimeError(
                f"{key} = {path}: it returned {list(values.shape)} instead of a row's each, [{self.num_envs}]"
            )
        return values
