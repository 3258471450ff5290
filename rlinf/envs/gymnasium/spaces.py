"""Spaces of gymnasium as ours: what becomes of observations and actions.

In: a space. Out: the specification, and a function from its elements, or to them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces

from rlinf.envs.base import ActionSpec, ArraySpec

Read = Callable[[Any], dict[str, np.ndarray]]
"""Makes one row of an observation from an element of an observation space."""
Write = Callable[[np.ndarray], Any]
"""Makes an element of an action space from numbers within the bounds of the `ActionSpec`, float32 [A]."""

_LEAST_SIDE = 16
"""Of a picture of floats, in pixels."""
_FLAT = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
"""Spaces whose elements become numbers by `gymnasium.spaces.flatten`: choices become one-hot."""


def observations_of(space: spaces.Space[Any], name: str) -> tuple[dict[str, ArraySpec], Read]:
    """How observations are read.

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
    """How actions are written.

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
        chosen = least + np.clip(part, 0, options - 1)
        return chosen.reshape(shape).astype(space.dtype)

    if isinstance(space, spaces.Discrete):  # in plain numbers, a tenth of the time
        start, count = np.int64(space.start), int(space.n)

        def write_one(numbers: np.ndarray) -> np.int64:
            part = math.floor((float(numbers[0]) + 1) / 2 * count)
            return start + np.int64(min(max(part, 0), count - 1))

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
    """As we have them: height, width, channels."""
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
