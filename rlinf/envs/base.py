"""`Simulator`, the interface of adapters: N environments of one task, stepped together by blocking code.

Seeds and actions in; observations, rewards, and how episodes end out. Adapters know no actor. All the rest is written
once, in `environment.py`: action chunks, time limits, resets, groups, seeds, success and returns, videos; `workers.py`
runs it in child processes.

Simulators on GPUs keep their states in dicts of tensors in dicts; functions here take rows of them and join them.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import NoneType, UnionType
from typing import Any, NamedTuple, TypeAlias, Union, get_args, get_origin, get_type_hints

import numpy as np
import torch
from torch import Tensor

from rlinf.config.schema import nearest


def tree_rows(tree: Any, rows: Tensor) -> Any:
    """Some rows of every tensor of a tree, copied; `rows` is int64 on the tensors' device."""
    return {name: tree_rows(part, rows) for name, part in tree.items()} if isinstance(tree, dict) else tree[rows]


def tree_on_cpu(tree: Any) -> Any:
    """A tree with its tensors on the CPU."""
    return {name: tree_on_cpu(part) for name, part in tree.items()} if isinstance(tree, dict) else tree.cpu()


def stacked_trees(trees: Sequence[Any], device: torch.device) -> Any:
    """The rows of several trees of one shape, one tree behind the other, on a device."""
    if isinstance(trees[0], dict):
        return {name: stacked_trees([tree[name] for tree in trees], device) for name in trees[0]}
    return torch.cat(list(trees)).to(device)


_PLAIN = {bool, int, float, str, NoneType}
"""Types of options that can be told from any other."""

Observation: TypeAlias = dict[str, Tensor]
"""Observations by name, one row per environment: "state" float32 [N, S]; "rgb" uint8 [N, H, W, 3 k] for k cameras;
"depth" float32 [N, H, W, k] in metres. An adapter may add names; the policy takes those that it knows."""

State: TypeAlias = Any
"""All of one environment between two steps: tensors, numbers, texts and bytes in dicts and lists. It pickles."""


def rows_of(observation: Observation, rows: Tensor) -> Observation:
    """The rows named by `rows`, int64 [n], as a copy."""
    return {name: array[rows.to(array.device)] for name, array in observation.items()}


def with_rows(observation: Observation, rows: Tensor, new: Observation) -> Observation:
    """A copy of `observation` whose `rows`, int64 [n], are those of `new`."""
    result = {}
    for name, array in observation.items():
        result[name] = array.clone()
        result[name][rows.to(array.device)] = new[name]
    return result


def rows_where(mask: Tensor, new: Observation, old: Observation) -> Observation:
    """Rows of `new` where `mask`, bool [N], is true, and of `old` elsewhere."""
    return {name: torch.where(mask.view(-1, *(1,) * (new[name].ndim - 1)), new[name], old[name]) for name in old}


class CannotSimulate(RuntimeError):
    """A simulator cannot run on this machine; the text says what is missing, and the command that brings it."""


_NO_PICTURES = "renders no pictures: set trials.videos=0, or write its method render"
"""Advice where videos are wanted of a simulator that has not this method."""


class CannotRender(NotImplementedError):
    """Pictures are asked for, and a simulator draws none; the text says what to set. It is no failure of its code."""


class SimulatorLost(RuntimeError):
    """The simulator has died or does not answer. Its episodes are lost; a reset of all environments begins others."""


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """One array of an observation."""

    shape: tuple[int, ...]
    """Shape of one environment's row, without the leading N."""
    dtype: torch.dtype
    """Dtype of its elements."""


@dataclass(frozen=True, slots=True, eq=False)
class ActionSpec:
    """Bounds, and choices, of the numbers of one action."""

    low: Tensor
    """Least value of each number, float32 [A]; -inf where there is none."""
    high: Tensor
    """Greatest value of each number, float32 [A]; inf where there is none."""
    choices: tuple[int, ...] | None = None
    """Where an action is chosen among a few: how many choices each number stands for, A of them; the k-th of n is any
    number in the k-th of n equal parts of [-1, 1]. None where numbers are real."""
    _line: tuple[Tensor, Tensor, Tensor] = field(init=False, repr=False)
    """Middle and half of the bounds, and where there are bounds, [A] each."""
    _plain: bool = field(init=False, repr=False)
    """All bounds are -1 and 1."""

    def __post_init__(self) -> None:
        if self.low.ndim != 1 or self.low.shape != self.high.shape:
            raise ValueError(f"bounds of an action must both be [A], not {self.low.shape} and {self.high.shape}")
        if self.choices is not None and len(self.choices) != self.low.numel():
            raise ValueError(f"choices={self.choices} must be as many as the numbers of an action, {self.low.numel()}")
        bounded = torch.isfinite(self.low) & torch.isfinite(self.high)
        object.__setattr__(self, "_line", ((self.low + self.high) / 2, (self.high - self.low) / 2, bounded))
        object.__setattr__(self, "_plain", bool((self.low == -1).all() and (self.high == 1).all()))

    @property
    def size(self) -> int:
        """Numbers in one action, A."""
        return self.low.numel()

    def scaled(self, actions: Tensor) -> Tensor:
        """Map actions from [-1, 1], where policies act, to the simulator's bounds.

            middle + half * clip(a, -1, 1)         with middle = (low + high) / 2 and half = (high - low) / 2

        Bounds of -1 and 1 change nothing but the clipping, to the last bit; a number without bounds passes as it is.

        Args:
            actions: float32 [..., A].
        """
        if self._plain:
            return actions.clamp(-1.0, 1.0)
        middle, half, bounded = (each.to(actions.device) for each in self._line)
        return torch.where(bounded, middle + half * actions.clamp(-1.0, 1.0), actions)

    def unscaled(self, actions: Tensor) -> Tensor:
        """Map actions from the simulator's bounds to [-1, 1]: the inverse of `scaled`, cut off where they are outside.

        Args:
            actions: float32 [..., A].
        """
        if self._plain:
            return actions.clamp(-1.0, 1.0)
        middle, half, bounded = (each.to(actions.device) for each in self._line)
        wide = bounded & (half > 0)  # a number that can only be one value stands in the middle
        inside = ((actions - middle) / torch.where(wide, half, 1.0)).clamp(-1.0, 1.0)
        return torch.where(bounded, torch.where(wide, inside, 0.0), actions)


@dataclass(frozen=True, slots=True, eq=False)
class Interventions:
    """Actions that somebody else did in the place of those that were asked for: a person, or a script that stands in
    for one."""

    steps: Tensor
    """True where somebody did, bool [N] for one step and [N, C] for a chunk."""
    actions: Tensor
    """Actions that were done there, float32 [N, A] within the bounds of the `ActionSpec`; of a chunk [N, C, A] and in
    [-1, 1]. Elsewhere anything."""


@dataclass(frozen=True, slots=True, eq=False)
class Timing:
    """When a step was decided and done by what moves while nobody speaks, such as a robot."""

    age: float
    """Seconds from the observation to the arrival of the actions that it led to, by the robot's clock."""
    decision: float
    """Of these, from its arrival here until the actions left, by ours; the rest is the way there and back."""
    limited: Tensor
    """Actions that the robot cut to its limits, bool [N]."""
    holds: int
    """How often it held, since no action came in time, after the step before."""


@dataclass(frozen=True, slots=True, eq=False)
class Transition:
    """Results of one step, one row per environment; rows that were not active may hold anything."""

    observation: Observation
    """After the step, also where the episode ended: the simulator never resets by itself."""
    reward: Tensor
    """Reward of the step, float32 [N]."""
    terminated: Tensor
    """The task ended, well or badly: nothing can be earned after it, bool [N]."""
    truncated: Tensor
    """The simulator stopped for a reason outside the task, bool [N]; `max_steps` is seen to by the environment."""
    success: Tensor | None = None
    """True where the task is solved at this moment, bool [N]; None where the simulator does not say."""
    interventions: Interventions | None = None
    """Actions of somebody else in place of those asked for; None where nobody can."""
    timing: Timing | None = None
    """When it was decided and done; None where time stands still between steps."""


class WrongOption(ValueError):
    """An option that a simulator cannot be made with; `name` is its name."""

    def __init__(self, name: str, text: str):
        super().__init__(text)
        self.name = name


def check_arguments(who: str, kind: Any, options: Mapping[str, Any], *, supplied: Sequence[str] = ()) -> None:
    """Hold keyword arguments to the signature of a class: their names, and the types of those that are plain values.

    Args:
        who: takes the options, for errors.
        kind: the class.
        options: keyword arguments.
        supplied: parameters that somebody else supplies.

    Raises:
        WrongOption: the first that does not fit.
    """
    parameters = inspect.signature(kind).parameters
    open_ended = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    accepted = {
        name: each
        for name, each in parameters.items()
        if name not in supplied and each.kind in (each.KEYWORD_ONLY, each.POSITIONAL_OR_KEYWORD)
    }
    try:
        hints = get_type_hints(kind.__init__)
    except Exception:  # of annotations that name what is imported for type checkers only
        hints = {}
    for name, value in options.items():
        if name in supplied or (name not in accepted and not open_ended):
            near = nearest(str(name), accepted)
            raise WrongOption(
                name,
                f"{who} has no such option; " + (f"did you mean {near}?" if near else f"it has {', '.join(accepted)}"),
            )
        hint = hints.get(name)
        kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        if set(kinds) <= _PLAIN and type(value) not in kinds and not (type(value) is int and float in kinds):
            raise WrongOption(name, f"it must be {' or '.join('null' if k is NoneType else k.__name__ for k in kinds)}")
    for name, each in accepted.items():
        if each.default is each.empty and name not in options:
            raise WrongOption(name, f"{who} needs {name}")


class Simulator(ABC):
    """N environments of one task. An adapter derives from it and fills in the abstract methods.

    It is made as `Adapter(num_envs=N, **options)` by its dotted path, in the process where it runs. What it returns it
    does not write again later: observations are kept. Everything in an episode follows from the seed of its reset and
    from its actions; what is drawn during the episode is drawn from generators that the reset seeded.

    Attributes:
        num_envs: how many environments, N.
        observation_spec: arrays of an observation by name.
        action_spec: bounds of an action.
        max_steps: steps after which an episode is cut off; None for no limit.
        device: where its tensors are.
        resets_together: `reset` takes all environments or none. Episodes that have ended then wait for the slowest.
        deferring: while True, what steps observe may have pictures of earlier steps, since nobody looks; `look` has the
            present ones. None where that is not provided for; an `Environment` sets it otherwise.
    """

    num_envs: int
    observation_spec: Mapping[str, ArraySpec]
    action_spec: ActionSpec
    max_steps: int | None = None
    device: torch.device = torch.device("cpu")
    resets_together: bool = False
    deferring: bool | None = None

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> None:
        """Refuse options that this simulator could not be made with; nothing is made.

        An adapter adds what it can say at once, such as whether a name is registered.

        Args:
            options: keyword arguments besides `num_envs`.

        Raises:
            WrongOption: one is unknown, missing, or of the wrong type.
            Exception: what else an adapter says of them.
        """
        check_arguments(cls.__name__, cls, options, supplied=("num_envs",))

    @classmethod
    def check_pictures(cls, options: Mapping[str, Any]) -> None:
        """Refuse videos of a simulator that is known to draw nothing; nothing is made.

        Args:
            options: as of `check_options`, which they have passed.

        Raises:
            CannotRender: `render` would raise it, too.
        """
        if cls.render is Simulator.render:
            raise CannotRender(f"{cls.__name__} {_NO_PICTURES}")

    @abstractmethod
    def reset(self, seeds: Tensor, env_ids: Tensor) -> Observation:
        """Begin a new episode in some environments; the others do not notice.

        Args:
            seeds: one per environment, from 0 to 2^31 - 1, int64 [n] on the CPU. Equal seeds give equal starts, bit for
                bit, in any environment and at any time.
            env_ids: which environments, ascending, int64 [n] on the CPU.

        Returns:
            First observation of those environments, n rows in the order of `env_ids`.
        """

    @abstractmethod
    def step(self, actions: Tensor, active: Tensor) -> Transition:
        """Do one step in every active environment.

        Args:
            actions: within the bounds of `action_spec`, float32 [N, A].
            active: bool [N]. The others have ended and wait for their reset: they need not be simulated, and must not
                fail if they are; their rows of the result are not looked at.
        """

    def instructions(self) -> Sequence[str] | None:
        """Instruction of each environment, in words, N texts; None if the task has none. May change with a reset."""
        return None

    def tasks(self) -> Sequence[str] | None:
        """Name of each environment's task, N texts, by which success is counted: its instruction, unless an adapter
        knows better; None where all have the same. May change with a reset."""
        return self.instructions()

    def weigh(self, weights: Sequence[float]) -> None:
        """Choose the tasks of episodes to come by other weights.

        Args:
            weights: of each task.

        Raises:
            NotImplementedError: this simulator has one task alone, or chooses them by itself.
        """
        raise NotImplementedError(f"{type(self).__name__} mixes no tasks: name them in env.tasks")

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Simulate by other weights from now on; episodes that are under way go on.

        Args:
            weights: by name, as they were published; read before this returns, and not kept.

        Raises:
            NotImplementedError: nothing of this simulator was learned.
        """
        raise NotImplementedError(f"{type(self).__name__} has no weights: take rlinf.envs.learned.Learned")

    def render(self, env_ids: Tensor) -> Tensor:
        """Pictures for people, uint8 [n, H, W, 3].

        Args:
            env_ids: which environments, int64 [n] on the CPU.

        Raises:
            CannotRender: this simulator draws nothing.
        """
        raise CannotRender(f"{type(self).__name__} {_NO_PICTURES}")

    @abstractmethod
    def save(self) -> list[State]:
        """The state of each environment, N of them. Steps from a restored state equal those from the saved one, bit
        for bit."""

    @abstractmethod
    def restore(self, states: Sequence[State], env_ids: Tensor) -> None:
        """Put environments back to saved states.

        Args:
            states: n of those that `save` returned, from this simulator or from one made alike.
            env_ids: which environments take them, int64 [n] on the CPU.
        """

    def look(self) -> Observation:
        """The arrays that `deferring` may leave behind, as they are after the last step of each environment."""
        raise NotImplementedError(f"{type(self).__name__} defers nothing")

    def offload(self) -> None:  # noqa: B027  (most hold none)
        """Give device memory back, keeping all states; nothing to do where none is held."""

    def onload(self) -> None:  # noqa: B027
        """Be ready again after `offload`."""

    def close(self) -> None:  # noqa: B027
        """Give everything back; the simulator is not used again."""


class ReplayedSimulator(Simulator):
    """Keeps of each environment its observation, the seed of its episode and the actions since.

    A saved state is that seed and those actions, to be restored by doing them again: exact wherever an episode follows
    from them, and without help from the simulation. `_track` is called once the specs are known.
    """

    def _track(self, num_envs: int) -> None:
        self.num_envs = num_envs
        self._rows: list[dict[str, np.ndarray]] = [
            {name: torch.zeros(spec.shape, dtype=spec.dtype).numpy() for name, spec in self.observation_spec.items()}
            for _ in range(num_envs)
        ]
        self._seeds = [0] * num_envs
        self._history: list[list[np.ndarray]] = [[] for _ in range(num_envs)]

    def save(self) -> list[State]:
        size = self.action_spec.size
        return [
            {"seed": seed, "actions": torch.from_numpy(np.array(history, np.float32).reshape(-1, size))}
            for seed, history in zip(self._seeds, self._history, strict=True)
        ]

    def _stacked(self, envs: Iterable[int]) -> Observation:
        rows = [self._rows[env] for env in envs]
        return {
            name: torch.from_numpy(np.concatenate([row[name][None] for row in rows])) for name in self.observation_spec
        }


class Moved(NamedTuple):
    """Results of one step of a single environment."""

    row: dict[str, np.ndarray]
    """Its observation after the step, one row."""
    reward: float
    """Reward of the step."""
    terminated: bool
    """The task ended."""
    truncated: bool
    """The simulation stopped for a reason outside the task."""
    success: bool | None
    """True if the task is solved; None where that is not said."""


_STAYED = Moved({}, 0.0, False, False, None)
"""Of an environment that waits for its reset."""


class SerialSimulator(ReplayedSimulator):
    """N simulations in one process, stepped one after the other. An adapter fills in `_begin` and `_move`."""

    @abstractmethod
    def _begin(self, env: int, seed: int) -> dict[str, np.ndarray]:
        """Begin an episode in one environment; its first observation, one row."""

    @abstractmethod
    def _move(self, env: int, action: np.ndarray) -> Moved:
        """Do one action, float32 [A], in one environment."""

    def reset(self, seeds: Tensor, env_ids: Tensor) -> Observation:
        for env, seed in zip(env_ids.tolist(), seeds.tolist(), strict=True):
            self._restart(env, seed)
        return self._stacked(env_ids.tolist())

    def step(self, actions: Tensor, active: Tensor) -> Transition:
        each = enumerate(zip(active.tolist(), actions.numpy().copy(), strict=True))  # histories keep the actions
        done = [self._advance(env, action) if moves else _STAYED for env, (moves, action) in each]
        _, reward, terminated, truncated, solved = zip(*done, strict=True)
        tells = any(success is not None for success in solved)
        return Transition(
            observation=self._stacked(range(self.num_envs)),
            reward=torch.from_numpy(np.array(reward, np.float32)),
            terminated=torch.from_numpy(np.array(terminated, np.bool_)),
            truncated=torch.from_numpy(np.array(truncated, np.bool_)),
            success=torch.from_numpy(np.array(solved, np.bool_)) if tells else None,
        )

    def restore(self, states: Sequence[State], env_ids: Tensor) -> None:
        for env, state in zip(env_ids.tolist(), states, strict=True):
            self._restart(env, state["seed"])
            for action in state["actions"].numpy().copy():
                self._advance(env, action)

    def _restart(self, env: int, seed: int) -> None:
        self._rows[env] = self._begin(env, seed)
        self._seeds[env], self._history[env] = seed, []

    def _advance(self, env: int, action: np.ndarray) -> Moved:
        moved = self._move(env, action)
        self._rows[env] = moved.row
        self._history[env].append(action)
        return moved
