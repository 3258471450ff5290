"""Gymnasium's environments as simulators: by id, N of them in one process, or as a vector environment.

`observations_of` and `actions_of` turn a space into a specification, and a function from its elements, or to them.
gymnasium's own time limit is taken off, and its number of steps becomes `max_steps`, so that whoever owns the simulator
may change it. `SuccessEntry` reads from `info` whether a task is solved, and warns of a name that no `info` has.

A vector environment is a registered id, or one's own `gymnasium.vector.VectorEnv`. It fits if it takes a seed for each
of its environments, and resets some of them alone (`options={"reset_mask": ...}`), as `SyncVectorEnv` and
`AsyncVectorEnv` do; both are tried when it is made. Those that draw all starts from one seed do not: no episode of
theirs follows from a seed of its own.

It must not reset by itself. Made by id it does not; one's own may do so in the step after an end ("NextStep"), which
never comes: where an episode is over, the next one is begun here before anything is stepped.

Nobody can step one of its environments alone. So those that wait for their reset are stepped along in an episode that
nobody looks at, and a state, which is the seed of an episode and the actions since, is restored in all at once.
"""

from __future__ import annotations

import difflib
import importlib
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import concatenate, create_empty_array, iterate
from torch import Tensor

from rlinf.config.importing import resolve
from rlinf.envs.base import (
    ActionSpec,
    ArraySpec,
    CannotRender,
    Moved,
    Observation,
    ReplayedSimulator,
    SerialSimulator,
    State,
    Transition,
    WrongOption,
    check_arguments,
)

Read = Callable[[Any], dict[str, np.ndarray]]
"""Makes one row of an observation from an element of an observation space."""
Write = Callable[[np.ndarray], Any]
"""Makes an element of an action space from numbers within the bounds of the `ActionSpec`, float32 [A]."""

_LEAST_SIDE = 16
"""Least side of a picture of floats, in pixels."""
_FLAT = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
"""Spaces whose elements become numbers by `gymnasium.spaces.flatten`: choices become one-hot."""


def observations_of(space: spaces.Space[Any], name: str) -> tuple[dict[str, ArraySpec], Read]:
    """Return the specification of an observation space, and the function that reads its elements.

    Pictures (uint8 or floats from 0 to 1 or to 255; [H, W], [H, W, C] or [C, H, W], with one channel or 3 k), wherever
    they are in the space, become "rgb", one behind the other along the channels; all else becomes "state", flat, in the
    order of the space.

    Args:
        space: of the observations.
        name: of the environment, for messages.

    Raises:
        ValueError: a part is neither a picture nor of fixed length, or pictures differ in size or have odd channels.
    """
    numbers: list[tuple[tuple[str | int, ...], spaces.Space[Any]]] = []
    pictures: list[tuple[tuple[str | int, ...], _Picture]] = []
    for path, leaf in _leaves(space):
        if (picture := _Picture.of(leaf, name)) is not None:
            pictures.append((path, picture))
        elif isinstance(leaf, _FLAT):
            numbers.append((path, leaf))
        else:
            raise ValueError(
                f"{name} observes {'.'.join(map(str, path)) or 'it'} as {leaf}, which is neither a picture nor numbers "
                f"of a fixed count: name a wrapper in `wrappers` that turns it into one"
            )
    sizes = [picture.shape for _, picture in pictures]
    if len({size[:2] for size in sizes}) > 1:
        raise ValueError(f"{name} observes pictures of sizes {sizes}, not of one: name a wrapper in `wrappers`")
    spec = {}
    if numbers:
        spec["state"] = ArraySpec((sum(spaces.flatdim(leaf) for _, leaf in numbers),), torch.float32)
    if pictures:
        spec["rgb"] = ArraySpec((*sizes[0][:2], sum(size[2] for size in sizes)), torch.uint8)

    if isinstance(space, spaces.Box) and space.dtype.kind == "f" and not pictures:  # sooner than by `flatten`

        def read_box(observed: Any) -> dict[str, np.ndarray]:
            return {"state": np.array(observed, np.float32).ravel()}

        return spec, read_box

    def read(observed: Any) -> dict[str, np.ndarray]:
        row = {}
        if numbers:
            flat: list[Any] = [spaces.flatten(leaf, _at(observed, path)) for path, leaf in numbers]
            alone = len(flat) == 1 and isinstance(flat[0], np.ndarray) and flat[0].dtype == np.float32
            row["state"] = flat[0] if alone else np.concatenate(flat, dtype=np.float32, casting="same_kind")
        if pictures:
            row["rgb"] = np.concatenate([picture.read(_at(observed, path)) for path, picture in pictures], axis=2)
        return row

    return spec, read


def actions_of(space: spaces.Space[Any], name: str) -> tuple[ActionSpec, Write]:
    """Return the specification of an action space, and the function that writes its elements.

    Each choice (Discrete, MultiDiscrete, MultiBinary) is one number from -1 to 1, whose range is cut into as many equal
    parts, so that any policy can act; one that knows of `ActionSpec.choices` has a probability for each.

    Args:
        space: of the actions.
        name: of the environment, for messages.

    Raises:
        ValueError: it is another kind of space.
    """
    if isinstance(space, spaces.Box):
        low, high = (torch.from_numpy(np.ravel(bound).astype(np.float32)) for bound in (space.low, space.high))
        shape, dtype = space.shape, space.dtype
        return ActionSpec(low, high), lambda numbers: numbers.reshape(shape).astype(dtype)
    if isinstance(space, spaces.Discrete):
        least, options = np.array(space.start), np.array(space.n)
        shape = ()
    elif isinstance(space, spaces.MultiDiscrete):
        least, options, shape = np.ravel(space.start), np.ravel(space.nvec), space.shape
    elif isinstance(space, spaces.MultiBinary):
        shape = space.shape
        least, options = np.array(0), np.full(int(np.prod(shape)), 2)
    else:
        raise ValueError(f"{name} acts by {space}, which is neither numbers nor choices: name a wrapper in `wrappers`")
    ones = torch.ones(max(1, options.size))
    choices = tuple(np.ravel(options).tolist())

    def write(numbers: np.ndarray) -> Any:
        part = np.floor((numbers.astype(np.float64) + 1) / 2 * options).astype(np.int64)
        number = least + np.clip(part, 0, options - 1)
        return number.reshape(shape).astype(space.dtype)

    if isinstance(space, spaces.Discrete):  # in plain numbers, a tenth of the time
        count = int(space.n)
        elements = [space.start + np.int64(number) for number in range(count)]

        def write_one(numbers: np.ndarray) -> np.int64:
            part = math.floor((numbers.item(0) + 1) / 2 * count)
            return elements[min(max(part, 0), count - 1)]

        return ActionSpec(-ones, ones, choices), write_one
    return ActionSpec(-ones, ones, choices), write


def _leaves(
    space: gymnasium.Space[Any], path: tuple[str | int, ...] = ()
) -> Iterator[tuple[tuple[str | int, ...], spaces.Space[Any]]]:
    """Parts of a space that are no collections, each with the keys that lead to it."""
    if isinstance(space, spaces.Dict):
        for key, inner in space.spaces.items():
            yield from _leaves(inner, (*path, key))
    elif isinstance(space, spaces.Tuple):
        for index, inner in enumerate(space.spaces):
            yield from _leaves(inner, (*path, index))
    else:
        yield path, space


def _at(observed: Any, path: tuple[str | int, ...]) -> Any:
    for key in path:
        observed = observed[key]
    return observed


@dataclass(frozen=True, slots=True)
class _Picture:
    """A space of pictures, and how its elements become [H, W, 3 k], uint8."""

    shape: tuple[int, int, int]
    """Shape of the observation as a policy sees it: height, width, channels."""
    first: bool
    """Channels stand first in the space."""
    scale: float
    """By which values become 0 to 255."""

    @classmethod
    def of(cls, space: spaces.Space[Any], name: str) -> _Picture | None:
        """The pictures of a space; None if it holds numbers.

        Raises:
            ValueError: they have channels that are neither grey nor colours.
        """
        scale = _scale_of(space)
        if scale is None or not isinstance(space, spaces.Box) or len(space.shape) not in (2, 3):
            return None
        # channels are fewer than either side
        first = len(space.shape) == 3 and space.shape[0] < min(space.shape[1:])
        height, width, channels = (*space.shape, 1) if len(space.shape) == 2 else space.shape
        if first:
            channels, height, width = space.shape
        if len(space.shape) == 3 and channels > min(height, width):
            return None
        if channels != 1 and channels % 3:
            raise ValueError(
                f"{name} observes pictures of {channels} channels, {list(space.shape)}, which are neither grey nor "
                "colours: name a wrapper in `wrappers` that makes RGB of them, or of stacked grey frames"
            )
        return cls((height, width, 3 if channels == 1 else channels), first, scale)

    def read(self, observed: np.ndarray) -> np.ndarray:
        """[H, W, 3 k], uint8, of an element of the space."""
        picture = (
            observed[:, :, None] if observed.ndim == 2 else observed.transpose(1, 2, 0) if self.first else observed
        )
        if picture.dtype != np.uint8:
            picture = np.clip(np.rint(picture * self.scale), 0, 255).astype(np.uint8)
        return np.repeat(picture, 3, axis=2) if picture.shape[2] == 1 else picture


def _scale_of(space: spaces.Space[Any]) -> float | None:
    """The factor by which a space's values become 0 to 255; None if they are no brightness.

    Floats from 0 to 1 or to 255 are taken for it only where the shape is a picture's, with one or three channels and
    sides of at least `_LEAST_SIDE`: much else is from 0 to 1.
    """
    if not isinstance(space, spaces.Box):
        return None
    if space.dtype == np.uint8:
        return 1.0
    shaped = len(space.shape) == 3 and 1 <= min(space.shape) <= 3 and sorted(space.shape)[1] >= _LEAST_SIDE
    if not shaped or np.dtype(space.dtype).kind != "f" or (space.low != 0).any():
        return None
    return next((255.0 / most for most in (1.0, 255.0) if (space.high == most).all()), None)


logger = logging.getLogger(__name__)

USUAL = ("success", "is_success")
"""Names under which `info` says that the task is solved: Meta-World's and ManiSkill's, gymnasium-robotics'."""


class SuccessEntry:
    """The entry of `info` that says whether the task is solved.

    Args:
        name: of the entry; None looks for those of `USUAL`, and misses nothing where there is none.
    """

    def __init__(self, name: str | None):
        self._name = name
        self._looked_for = USUAL if name is None else (name,)
        self._others: set[str] = set()
        """Names that came instead, while ours never did."""
        self._missing = name is not None
        self._moved = False

    def of(self, info: Mapping[str, Any]) -> Any:
        """Return the entry's value after a step; None where it is not there."""
        self._moved = True
        for name in self._looked_for:
            if name in info:
                self._missing = False
                return info[name]
        if self._missing:
            self._others.update(name for name in info if not name.startswith("_"))
        return None

    def begin(self) -> None:
        """Episodes begin. Those before may have lacked the entry, which is said once; not as an error, since some
        environments say it only where the task was solved."""
        if not (self._missing and self._moved):
            return
        self._missing = False
        near = difflib.get_close_matches(str(self._name), self._others, 1)
        had = ", ".join(sorted(self._others)) or "nothing"
        advice = f": did you mean {near[0]}?" if near else "; unless it comes only where a task is solved, correct it"
        logger.warning("env.options.success=%s: no info had that entry so far; it had %s%s", self._name, had, advice)


NO_PICTURES = "made without pictures: set trials.options={pictures: true}, or trials.videos=0"
"""Advice where videos are wanted and gymnasium was not told so."""


def check_registered(id: str) -> None:
    """Look a name up in gymnasium's registry, making nothing.

    Raises:
        WrongOption: it is not there, or the module that would register it is not.
    """
    module, _, name = id.rpartition(":")
    try:
        if module:
            importlib.import_module(module)
        gymnasium.spec(name)
    except (ImportError, gymnasium.error.Error) as error:
        raise WrongOption("id", str(error)) from error


class Gymnasium(SerialSimulator):
    """Environments that `gymnasium.make` makes.

    Args:
        num_envs: how many.
        id: registered name, such as "CartPole-v1"; "module:Name-v0" imports a module that registers it.
        make: further arguments of `gymnasium.make`.
        wrappers: applied to each environment, first one first: classes or functions, or their dotted paths.
        pictures: make them able to `render`; some need pygame or OpenGL for that.
        success: name in `info` that says whether the task is solved; None looks for "success" and "is_success".

    Raises:
        ValueError: a space is of a kind that policies cannot use; the text says which.
    """

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> None:
        """See `Simulator.check_options`; the environment must be registered, too."""
        super().check_options(options)
        check_registered(options["id"])

    @classmethod
    def check_pictures(cls, options: Mapping[str, Any]) -> None:
        """See `Simulator.check_pictures`: only one that is made so draws."""
        if not options.get("pictures") and (options.get("make") or {}).get("render_mode") is None:
            raise CannotRender(NO_PICTURES)

    def __init__(
        self,
        num_envs: int,
        *,
        id: str,
        make: Mapping[str, Any] | None = None,
        wrappers: Sequence[Any] = (),
        pictures: bool = False,
        success: str | None = None,
    ):
        settings: dict[str, Any] = {"disable_env_checker": True, **(make or {})}
        if pictures:
            settings["render_mode"] = "rgb_array"
        wrapper_classes = [resolve(wrapper) if isinstance(wrapper, str) else wrapper for wrapper in wrappers]
        self._envs = []
        for _ in range(num_envs):
            env = gymnasium.make(id, max_episode_steps=-1, **settings)
            for wrapper in wrapper_classes:
                env = wrapper(env)
            self._envs.append(env)
        self.max_steps = gymnasium.spec(id.rpartition(":")[2]).max_episode_steps
        self.observation_spec, self._read = observations_of(self._envs[0].observation_space, id)
        self.action_spec, self._write = actions_of(self._envs[0].action_space, id)
        self._success = SuccessEntry(success)
        self._track(num_envs)

    def render(self, env_ids: Tensor) -> Tensor:
        if self._envs[0].render_mode is None:
            raise CannotRender(NO_PICTURES)
        pictures: list[Any] = [self._envs[env].render() for env in env_ids.tolist()]
        return torch.from_numpy(np.stack(pictures))

    def close(self) -> None:
        for env in self._envs:
            env.close()

    def _begin(self, env: int, seed: int) -> dict[str, np.ndarray]:
        self._success.begin()
        return self._read(self._envs[env].reset(seed=seed)[0])

    def _move(self, env: int, action: np.ndarray) -> Moved:
        observed, reward, terminated, truncated, info = self._envs[env].step(self._write(action))
        solved = self._success.of(info)
        return Moved(
            self._read(observed), float(reward), terminated, truncated, None if solved is None else bool(solved)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorSettings:
    """Settings by which a vector environment is made."""

    id: str | None = None
    """Registered name, such as "CartPole-v1", for `gymnasium.make_vec`."""
    env: Any = None
    """Instead of `id`, what makes a vector environment of one's own: called with `num_envs` and `make`; or its dotted
    path."""
    make: Mapping[str, Any] | None = None
    """Further arguments, of each environment where there is an `id`."""
    asynchronous: bool = False
    """With `id`, each environment in a process of its own; pays for slow ones only."""
    wrappers: Sequence[Any] = ()
    """With `id`, applied to each environment, first one first: classes or functions, or their dotted paths."""
    max_steps: int | None = None
    """Steps after which an episode of `env` is cut off; with `id` its registered limit counts."""
    pictures: bool = False
    """Able to `render`."""
    success: str | None = None
    """Name in `info` that says whether the task is solved; None looks for "success" and "is_success"."""

    def __post_init__(self) -> None:
        if (self.id is None) == (self.env is None):
            raise ValueError("name either the `id` of a registered environment or an `env` that makes one of your own")

    @property
    def name(self) -> str:
        """The environment's name for people."""
        return self.id if self.id is not None else str(getattr(self.env, "__name__", self.env))

    def of_each(self) -> dict[str, Any]:
        """Keyword arguments of each environment."""
        return {**({"render_mode": "rgb_array"} if self.pictures else {}), **(self.make or {})}


class GymnasiumVector(ReplayedSimulator):
    """The environments of one vector environment.

    Args:
        num_envs: how many.
        settings: the fields of `VectorSettings`, such as id="CartPole-v1".

    Raises:
        ValueError: the vector environment does not fit, or a space is of a kind that policies cannot use.
    """

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> None:
        """See `Simulator.check_options`; the environment must be registered, or there, too."""
        check_arguments(cls.__name__, VectorSettings, options)
        settings = VectorSettings(**options)
        if settings.id is not None:
            check_registered(settings.id)
        elif isinstance(settings.env, str):
            resolve(settings.env)

    @classmethod
    def check_pictures(cls, options: Mapping[str, Any]) -> None:
        """See `Simulator.check_pictures`: only one that is made so draws."""
        settings = VectorSettings(**options)
        if settings.env is None and settings.of_each().get("render_mode") is None:
            raise CannotRender(NO_PICTURES)

    def __init__(self, num_envs: int, **settings: Any):
        how = VectorSettings(**settings)
        self._name = how.name
        self._envs: Any  # a VectorEnv, whose annotations know no seeds of single environments
        if how.id is not None:
            self._envs = _registered(how.id, num_envs, how)
            self.max_steps = gymnasium.spec(how.id.rpartition(":")[2]).max_episode_steps
        else:
            self._envs = (resolve(how.env) if isinstance(how.env, str) else how.env)(num_envs=num_envs, **how.of_each())
            self.max_steps = how.max_steps
        self.observation_spec, self._read = observations_of(self._envs.single_observation_space, self._name)
        self.action_spec, self._write = actions_of(self._envs.single_action_space, self._name)
        self._success = SuccessEntry(how.success)
        self._track(num_envs)
        self._over = np.zeros(num_envs, np.bool_)  # the episode has ended, and no other was begun
        self._see_that_it_fits()

    def reset(self, seeds: Tensor, env_ids: Tensor) -> Observation:
        envs = env_ids.tolist()
        self._success.begin()
        self._begin(envs, seeds.tolist())
        return self._stacked(envs)

    def step(self, actions: Tensor, active: Tensor) -> Transition:
        reward, terminated, truncated, info = self._move(actions.numpy(), active.numpy())
        solved = self._success.of(info)
        return Transition(
            observation=self._stacked(range(self.num_envs)),
            reward=torch.from_numpy(np.array(reward, np.float32)),
            terminated=torch.from_numpy(np.array(terminated, np.bool_)),
            truncated=torch.from_numpy(np.array(truncated, np.bool_)),
            success=None if solved is None else torch.from_numpy(np.array(solved).astype(np.bool_)),
        )

    def render(self, env_ids: Tensor) -> Tensor:
        if self._envs.render_mode is None:
            raise CannotRender(NO_PICTURES)
        pictures: Any = self._envs.render()
        return torch.from_numpy(np.stack([pictures[env] for env in env_ids.tolist()]))

    def restore(self, states: Sequence[State], env_ids: Tensor) -> None:
        wanted = self.save()
        for env, state in zip(env_ids.tolist(), states, strict=True):
            wanted[env] = state
        lengths = [len(state["actions"]) for state in wanted]
        longest, going = max(lengths), np.zeros(self.num_envs, np.bool_)
        self._begin(range(self.num_envs), [state["seed"] for state in wanted])
        for time in range(longest + 1):  # all come to where they were saved at the same time: shorter ones begin later
            late = [env for env, length in enumerate(lengths) if length == longest - time]
            if late:
                self._begin(late, [wanted[env]["seed"] for env in late])
                going[late] = True
            if time < longest:
                self._move(np.stack([_action(state, time - longest, self.action_spec.size) for state in wanted]), going)

    def close(self) -> None:
        self._envs.close()

    def _begin(self, envs: Iterable[int], seeds: Iterable[int]) -> None:
        """Begin episodes in some environments; the others do not notice."""
        seed_of = dict(zip(envs, seeds, strict=True))
        self._look(self._reset(seed_of), seed_of)
        for env, seed in seed_of.items():
            self._seeds[env], self._history[env] = seed, []

    def _reset(self, seeds: Mapping[int, int]) -> Any:
        mask = np.zeros(self.num_envs, np.bool_)
        mask[list(seeds)] = True
        observed, _ = self._envs.reset(
            seed=[seeds.get(env, 0) for env in range(self.num_envs)], options={"reset_mask": mask}
        )
        self._over[mask] = False
        return observed

    def _move(self, numbers: np.ndarray, active: np.ndarray) -> tuple[Any, Any, Any, dict[str, Any]]:
        """Do a step in all; rows, accounts and histories are kept for those that are active."""
        if (self._over & active).any():
            raise ValueError(
                f"{self._name} ended episodes in environments {np.flatnonzero(self._over & active).tolist()}, and a "
                f"vector environment cannot go on behind an end: set ignore_terminations=false, or take "
                f"rlinf.envs.gymnasium.Gymnasium"
            )
        if self._over.any():
            self._reset(dict.fromkeys(np.flatnonzero(self._over).tolist(), 0))
        space = self._envs.single_action_space
        written = [self._write(row) for row in numbers]
        empty: Any = create_empty_array(space, self.num_envs)
        actions = concatenate(space, written, empty)
        observed, reward, terminated, truncated, info = self._envs.step(actions)
        moved = np.flatnonzero(active).tolist()
        self._look(observed, moved)
        self._over = np.logical_or(terminated, truncated)
        for env in moved:
            self._history[env].append(numbers[env].copy())
        return reward, terminated, truncated, info

    def _look(self, observed: Any, envs: Iterable[int]) -> None:
        elements = list(iterate(self._envs.observation_space, observed))
        for env in envs:
            self._rows[env] = self._read(elements[env])

    def _see_that_it_fits(self) -> None:
        """Refuse a vector environment with which no episode would follow from its seed."""
        mode = self._envs.metadata.get("autoreset_mode")
        if mode not in (AutoresetMode.DISABLED, AutoresetMode.NEXT_STEP):
            raise ValueError(
                f"{self._name} says metadata['autoreset_mode'] = {mode}: it must be AutoresetMode.DISABLED or "
                f"NEXT_STEP, so that the last observation of an episode can be seen, and the next one begun by a seed"
            )
        fits = "a vector environment must take a seed for each environment, and options={'reset_mask': ...}"
        advice = "take rlinf.envs.gymnasium.Gymnasium, or name the environment by `id`"
        everyone = range(self.num_envs)
        try:
            self._look(self._reset(dict.fromkeys(everyone, 1)), everyone)
            before = list(self._rows)
            self._look(self._reset({0: 2}), everyone)
        except (gymnasium.error.Error, TypeError, ValueError) as error:
            raise ValueError(f"{self._name} cannot be reset as it must be ({error}): {fits}; {advice}") from error
        if not all(_same(before[0], row) for row in before):
            raise ValueError(f"{self._name} begins differently in environments with equal seeds: {fits}; {advice}")
        if not all(_same(before[env], self._rows[env]) for env in everyone[1:]):
            raise ValueError(f"{self._name} resets environments that it was not to reset: {fits}; {advice}")


def _registered(id: str, num_envs: int, how: VectorSettings) -> VectorEnv[Any, Any, Any]:
    """Without resets of its own, and without gymnasium's time limit: whoever owns the simulator sets that."""
    wrapper_classes: list[Any] = [resolve(wrapper) if isinstance(wrapper, str) else wrapper for wrapper in how.wrappers]
    return gymnasium.make_vec(
        id,
        num_envs,
        "async" if how.asynchronous else "sync",
        {"autoreset_mode": AutoresetMode.DISABLED},
        wrapper_classes,
        **{"disable_env_checker": True, **how.of_each(), "max_episode_steps": -1},
    )


def _action(state: State, time: int, size: int) -> np.ndarray:
    """The action before the saved moment by so many steps, float32 [A]; any where the episode was not so long."""
    done: np.ndarray = state["actions"].numpy()
    return done[time] if -time <= len(done) else np.zeros(size, np.float32)


def _same(one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]) -> bool:
    return all(np.array_equal(one[name], other[name]) for name in one)
