"""Robots' actions and states, pictures and prompts between simulators and published models.

An `Embodiment` is what a published model expects of a simulator: prompt, cameras, pictures, state, statistics, gripper,
chunk. The table is data only; sources are the authors' evaluation code and RLinf's (arXiv:2510.06710).
Policies read their row by `embodiment`, and any setting of a policy overrides what stands there.

Numbers are mapped linearly between the robot's units and the scale that a model learned, by statistics as checkpoints
store them (`rlinf.data.demonstrations` computes them). A model that has more places than the robot has numbers pads:
what stands behind the statistics passes. Actions go through these steps, and back in the opposite order:

    model's numbers ─▶ robot's units ─▶ those that the simulator takes ─▶ its gripper ─▶ its bounds as -1 and 1

Grippers have one function each way per convention: `gripper_to_robot` for actions that a model chose,
`gripper_to_model` for demonstrated ones.

Pictures, uint8 as environments show them, on any device, are taken apart, turned, cropped and resized to uint8 of the
encoder's size, which is small to keep, and normalised to floats for the encoder. Only torch is needed; resizing agrees
with Pillow's antialiased filters up to rounding.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from rlinf.config.schema import nearest

logger = logging.getLogger(__name__)

Scale = Literal["q01_q99", "mean_std", "min_max"]
"""Statistics that become -1 and 1: the first and last percentile, or least and greatest; or mean 0 and deviation 1."""
_BOUNDS: Mapping[str, tuple[str, str]] = {"q01_q99": ("q01", "q99"), "min_max": ("min", "max")}


@dataclass(frozen=True, slots=True, eq=False)
class Scaling:
    """A linear map of D numbers: normalised = (x - centre) / half."""

    centre: Tensor
    """Number that becomes 0, float64 [D]."""
    half: Tensor
    """Distance from it that becomes 1, float64 [D]; 0 where a number never changes, which normalises to 0."""

    @classmethod
    def of(cls, statistics: Mapping[str, Any], scale: Scale, epsilon: float = 0.0) -> Scaling:
        """The map that statistics give.

            q01_q99, min_max    normalised = 2 (x - low) / (high - low + epsilon) - 1
            mean_std            normalised = (x - mean) / (std + epsilon)

        Args:
            statistics: lists of D numbers by name, such as "q01"; "mask", if there, says which are scaled at all.
            scale: which of them.
            epsilon: added to the width, as the checkpoint's authors do: 1e-8 OpenVLA-OFT, 1e-6 openpi.

        Raises:
            ValueError: the statistics lack what the scale needs, or lengths differ.
        """
        needed = _BOUNDS.get(scale, ("mean", "std"))
        if missing := [name for name in needed if statistics.get(name) is None]:
            raise ValueError(f"statistics lack {' and '.join(missing)}, which {scale} needs: they have {[*statistics]}")
        first, second = (torch.as_tensor(statistics[name], dtype=torch.float64) for name in needed)
        mask = torch.ones_like(first, dtype=torch.bool)
        if statistics.get("mask") is not None:
            mask = torch.as_tensor(statistics["mask"], dtype=torch.bool)
        if not first.shape == second.shape == mask.shape or first.ndim != 1:
            raise ValueError(
                f"statistics of {len(first)} numbers have {len(second)} {needed[1]} and a mask of {len(mask)}"
            )
        _check_spread(statistics, scale, first, second, mask)
        if scale == "mean_std":
            centre, half = first, second + epsilon
        else:
            half = (second - first + epsilon) / 2
            centre = first + half
        return cls(torch.where(mask, centre, 0.0), torch.where(mask, half, 1.0))

    def normalised(self, x: Tensor) -> Tensor:
        """Numbers in the robot's units, [..., P] with P >= D, on the model's scale; float32."""
        scaled = (x[..., : self._size(x)].double() - self.centre.to(x.device)) / self.half.to(x.device)
        scaled = torch.where(self.half.to(x.device) != 0, scaled, 0.0)
        return torch.cat([scaled.float(), x[..., len(self.centre) :].float()], -1)

    def unnormalised(self, x: Tensor) -> Tensor:
        """The inverse of `normalised`."""
        units = x[..., : self._size(x)].double() * self.half.to(x.device) + self.centre.to(x.device)
        return torch.cat([units.float(), x[..., len(self.centre) :].float()], -1)

    def _size(self, x: Tensor) -> int:
        if x.shape[-1] < len(self.centre):
            raise ValueError(
                f"there are statistics of {len(self.centre)} numbers, but only {x.shape[-1]} numbers: of another robot?"
            )
        return len(self.centre)


def _check_spread(statistics: Mapping[str, Any], scale: Scale, low: Tensor, high: Tensor, mask: Tensor) -> None:
    """Refuse bounds that leave no number any room though some move; tell of single numbers that have none.

    Raises:
        ValueError: low equals high in every number, and the standard deviation is above 0 or unknown.
    """
    if scale == "mean_std" or low.is_meta or not mask.any():  # on meta a policy is only measured
        return
    std = statistics.get("std")
    moves = torch.as_tensor(std, dtype=torch.float64) > 0 if std is not None and len(std) == len(low) else None
    narrow = (low == high) & mask
    if bool((narrow == mask).all()) and (moves is None or bool(moves[mask].any())):
        raise ValueError(
            f"statistics: {scale} leave no number any room (low equals high in all {len(low)}), though they move"
        )
    if moves is not None and (places := (narrow & moves).nonzero().flatten().tolist()):
        logger.warning(
            "statistics: number %s moves, but its %s are one value, so that it is scaled by millions; compute them "
            "anew with `rlinf convert DATA TO --statistics`",
            ", ".join(map(str, places)),
            scale.replace("_", " and "),
        )


def padded(x: Tensor, size: int) -> Tensor:
    """Numbers [..., D] with zeros behind them, [..., size].

    Raises:
        ValueError: there are more than that.
    """
    if x.shape[-1] > size:
        raise ValueError(f"{x.shape[-1]} numbers do not fit into the {size} that the model takes")
    return torch.nn.functional.pad(x, (0, size - x.shape[-1]))


def nearest_valid(real: Tensor) -> Tensor:
    """The place of the nearest action that was done, int64 [N, H], where those are neighbours; of bool [N, H]."""
    places = torch.arange(real.shape[1], device=real.device)
    first = real.int().argmax(1, keepdim=True)
    last = real.shape[1] - 1 - real.flip(1).int().argmax(1, keepdim=True)
    return torch.maximum(torch.minimum(places, last), first)


def to_unit(actions: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Actions in the robot's units as policies emit them: the simulator's bounds become -1 and 1.

    The inverse of the environment's own scaling, and cut to the bounds as that is. A number without bounds passes.

    Args:
        actions: float32 [..., A].
        low, high: bounds, float32 [A]; infinite where there are none.
    """
    bounded = torch.isfinite(low) & torch.isfinite(high)
    middle, half = _middle(low, high, bounded)
    return torch.where(bounded, ((actions - middle) / half).clamp(-1.0, 1.0), actions)


def from_unit(actions: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """The inverse of `to_unit`: the robot's units of actions in [-1, 1]."""
    bounded = torch.isfinite(low) & torch.isfinite(high)
    middle, half = _middle(low, high, bounded)
    return torch.where(bounded, middle + half * actions.clamp(-1.0, 1.0), actions)


def _middle(low: Tensor, high: Tensor, bounded: Tensor) -> tuple[Tensor, Tensor]:
    low, high = torch.where(bounded, low, -1.0), torch.where(bounded, high, 1.0)
    half = (high - low) / 2
    return (low + high) / 2, torch.where(half > 0, half, 1.0)


OPENVLA_PROMPT = "In: What action should the robot take to {instruction}?\nOut: "
"""Prompt of OpenVLA and OpenVLA-OFT; the instruction is in lower case, and the space at the end is a token of its
own."""
PI0_PROMPT = "{instruction}\n"
"""Prompt of pi0, and of pi0.5 where its state is not written out; `_` and line breaks of the instruction become
spaces."""
PI05_PROMPT = "Task: {instruction}, State: {state};\nAction: "
"""Prompt of pi0.5 with the state in words: integers from 0 to 255."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Embodiment:
    """Requirements of one model in one simulator."""

    prompt: str
    """Text with {instruction}."""
    prompt_length: int
    """Tokens that prompts are padded to."""
    reads_padding: bool = True
    """The model looks at that padding (GR00T alone), so that its length changes what it does."""
    cameras: int = 1
    """Pictures that the model looks at, the first ones of the observation."""
    crop: float = 1.0
    """Share of a picture's area that is kept in the middle; models that trained with random crops need 0.9."""
    state_size: int = 0
    """Numbers of the robot's own state that the model looks at; 0 for none."""
    statistics: tuple[str, ...] = ()
    """Keys (or asset ids) of the statistics that may be meant. One that is given wins, a checkpoint with a single one
    needs none, and where it has several of these one must be given."""
    scale: Scale = "q01_q99"
    """Meaning of the model's numbers from -1 to 1."""
    gripper: str = "same"
    """A name of `grippers.GRIPPERS`."""
    action_size: int = 7
    """Numbers of an action that the model predicts."""
    picked: tuple[int, ...] | None = None
    """Which of them the simulator takes, in its order; None for all."""
    chunk: int = 1
    """Actions that are done of each prediction."""


_LIBERO = tuple(f"libero_{suite}_no_noops" for suite in ("spatial", "object", "goal", "10", "90", "130"))
_LIBERO_STATE = 8  # position of the gripper, its axis and angle, both fingers


def _openvla(prompt_length: int, **rest: object) -> Embodiment:
    return Embodiment(prompt=OPENVLA_PROMPT, prompt_length=prompt_length, **rest)  # type: ignore[arg-type]


def _pi0(**rest: object) -> Embodiment:
    return Embodiment(**{"prompt": PI0_PROMPT, "prompt_length": 48, "scale": "mean_std", **rest})  # type: ignore[arg-type]


def _pi05(**rest: object) -> Embodiment:
    return Embodiment(**{"prompt": PI0_PROMPT, "prompt_length": 200, **rest})  # type: ignore[arg-type]


TABLE = {
    # a robot without a row: its checkpoint's only statistics, nothing cropped, the gripper as it is
    ("openvla", "plain"): _openvla(64),
    ("openvla-oft", "plain"): _openvla(64),
    # RLinf pads to 128 tokens; the original evaluation crops, since fine-tuning drew crops
    ("openvla", "libero"): _openvla(128, crop=0.9, statistics=_LIBERO, gripper="libero"),
    ("openvla", "maniskill"): _openvla(30, statistics=("bridge_orig",), gripper="maniskill"),
    ("openvla-oft", "libero"): _openvla(
        128, crop=0.9, state_size=_LIBERO_STATE, statistics=_LIBERO, gripper="libero", chunk=8
    ),
    ("openvla-oft", "maniskill"): _openvla(30, statistics=("bridge_orig",), gripper="maniskill", chunk=8),
    ("openvla-oft", "bridge"): _openvla(
        30, state_size=7, statistics=("bridge_orig",), gripper="maniskill", chunk=5
    ),
    ("openvla-oft", "robotwin"): _openvla(512, crop=0.9, state_size=14, scale="min_max", action_size=14, chunk=25),
    # RLinf takes these four numbers, the gripper as it is; guesses: tokens of the prompt, and the chunk
    ("openvla-oft", "metaworld"): _openvla(128, picked=(0, 1, 2, 6), chunk=8),
    ("pi0", "libero"): _pi0(
        cameras=2, state_size=_LIBERO_STATE, statistics=("physical-intelligence/libero",), chunk=5
    ),
    # the WidowX opens and closes as for all models (RLinf's action_utils). A guess: which 8 numbers its state is
    ("pi0", "maniskill"): _pi0(
        state_size=8, statistics=("physical-intelligence/maniskill",), gripper="maniskill", chunk=5
    ),
    ("pi0", "metaworld"): _pi0(state_size=4, statistics=("lerobot/metaworld_mt50",), action_size=4, chunk=5),
    ("pi0", "calvin"): _pi0(
        cameras=2, state_size=7, statistics=("InternRobotics/InternData-Calvin_ABC",), gripper="sign", chunk=5,
    ),
    # RLinf fine-tuned all of these without a state: with the prompt of pi0, which does not say it
    ("pi05", "libero"): _pi05(cameras=2, statistics=("physical-intelligence/libero",), chunk=5),
    ("pi05", "maniskill"): _pi05(
        statistics=("physical-intelligence/maniskill",), gripper="maniskill", chunk=5
    ),
    ("pi05", "metaworld"): _pi05(statistics=("lerobot/metaworld_mt50",), action_size=4, chunk=5),
    ("pi05", "calvin"): _pi05(
        cameras=2, statistics=("InternRobotics/InternData-Calvin_ABC",), gripper="sign", chunk=5
    ),
    # Crops keep 0.95 of each side. The padded length changes what the model says, since it reads the pads
    ("gr00t", "libero"): Embodiment(
        prompt="{instruction}", prompt_length=570, cameras=2, crop=0.9025, state_size=_LIBERO_STATE,
        statistics=("libero_franka",), scale="min_max", gripper="libero", chunk=5,
    ),
    # a robot without a row: what there is of its state is read, and the gripper is as it is. NVIDIA pads nothing
    ("gr00t", "plain"): Embodiment(
        prompt="{instruction}", prompt_length=570, reads_padding=False, crop=0.9025, state_size=64,
        statistics=("new_embodiment",), scale="min_max", chunk=16,
    ),
    # without a state; a guess: the chunk
    ("gr00t", "maniskill"): Embodiment(
        prompt="{instruction}", prompt_length=570, crop=0.9025, statistics=("maniskill_widowx",), scale="min_max",
        gripper="maniskill", chunk=5,
    ),
}  # fmt: skip
"""By model (`policy.type`) and simulator."""


def embodiment(model: str, simulator: str) -> Embodiment:
    """The row of a model and a simulator.

    Raises:
        ValueError: there is none; the text says which simulators the model has rows for.
    """
    if (model, simulator) not in TABLE:
        others = [other for kind, other in TABLE if kind == model]
        near = nearest(simulator, others)
        raise ValueError(
            f"policy {model}: embodiment={simulator!r} is none of {', '.join(others)}"
            + (f"; did you mean {near}?" if near else "")
        )
    return TABLE[model, simulator]


Filter = Literal["bicubic", "bilinear"]

IMAGENET_MEAN, IMAGENET_STD = (0.484375, 0.455078125, 0.40625), (0.228515625, 0.2236328125, 0.224609375)
"""Mean and deviation by which DINOv2 normalises pictures in 0..1, in the bfloat16 in which OpenVLA's preprocessor
stores them."""
HALF = (0.5, 0.5, 0.5)
"""Mean and deviation alike of SigLIP, which maps 0..1 to -1..1."""


def cameras(rgb: Tensor) -> Tensor:
    """An observation's "rgb", [N, H, W, 3 k], as pictures [N, k, 3, H, W].

    Raises:
        ValueError: the channels are not 3 for each camera.
    """
    if rgb.ndim != 4 or rgb.shape[3] % 3 or not rgb.shape[3]:
        raise ValueError(f"pictures {list(rgb.shape)} must be [N, height, width, 3 k]: 3 channels for each camera")
    rows, height, width, channels = rgb.shape
    return rgb.reshape(rows, height, width, channels // 3, 3).permute(0, 3, 4, 1, 2)


def resized(
    pictures: Tensor, size: int | tuple[int, int], filter: Filter = "bicubic", *, rounded: bool = True
) -> Tensor:
    """Pictures of another size, with antialiasing; the same pictures where they have that size already.

    Args:
        pictures: uint8 [..., 3, H, W].
        size: height and width, or one number for both.
        filter: of the interpolation.
        rounded: to the nearest of 256 levels; otherwise fractions are cut off, as some authors do.

    Returns:
        uint8 [..., 3, height, width].
    """
    height, width = (size, size) if isinstance(size, int) else size
    if tuple(pictures.shape[-2:]) == (height, width):
        return pictures
    flat = pictures.reshape(-1, *pictures.shape[-3:]).float()
    pixels = functional.interpolate(flat, (height, width), mode=filter, antialias=True, align_corners=False)
    return _bytes(pixels if rounded else pixels.floor()).view(*pictures.shape[:-2], height, width)


def resized_with_padding(pictures: Tensor, size: int) -> Tensor:
    """Pictures scaled to fit into a square, whatever their shape, with black bars on both sides (openpi's way).

    Args:
        pictures: uint8 [..., 3, H, W].
        size: side of the square, pixels.

    Returns:
        uint8 [..., 3, size, size].
    """
    height, width = pictures.shape[-2:]
    ratio = max(height, width) / size
    inner = (int(height / ratio), int(width / ratio))
    inside = resized(pictures, inner, "bilinear")
    above, beside_it = (size - inner[0]) // 2, (size - inner[1]) // 2
    return functional.pad(inside, (beside_it, size - inner[1] - beside_it, above, size - inner[0] - above))


def centre_crop(pictures: Tensor, area: float) -> Tensor:
    """The middle of pictures, enlarged to their size: what a model that trained with random crops is shown.

    Each side keeps sqrt(area) of its length. Samples lie evenly from one edge of the crop to the other, edges
    included, and are interpolated linearly, as the evaluation of OpenVLA has it.

    Args:
        pictures: uint8 [..., 3, H, W].
        area: share of the picture that stays, in (0, 1]; 1 changes nothing.

    Raises:
        ValueError: the share is none.
    """
    if not 0.0 < area <= 1.0:
        raise ValueError(f"crop={area} must be more than 0 and at most 1: the share of a picture's area that is kept")
    if area == 1.0:
        return pictures
    height, width = pictures.shape[-2:]
    flat = pictures.reshape(-1, *pictures.shape[-3:]).float()
    side = math.sqrt(area)
    rows, columns = (torch.linspace(-side, side, count, device=flat.device) for count in (height, width))
    grid = torch.stack(torch.meshgrid(columns, rows, indexing="xy"), -1).expand(len(flat), -1, -1, -1)
    return _bytes(functional.grid_sample(flat, grid, align_corners=True)).view(pictures.shape)


def normalised(
    pictures: Tensor, mean: tuple[float, ...], std: tuple[float, ...], dtype: torch.dtype = torch.float32
) -> Tensor:
    """Numbers for an encoder: (picture / 255 - mean) / std in each channel.

    Args:
        pictures: uint8 [..., 3, H, W].
        mean, std: of pictures in 0..1, a number for each channel.
        dtype: of the result; computed in float32.
    """
    centre, scale = (torch.tensor(each, device=pictures.device).view(-1, 1, 1) for each in (mean, std))
    return ((pictures.float() / 255.0 - centre) / scale).to(dtype)


def _bytes(pictures: Tensor) -> Tensor:
    return pictures.round_().clamp_(0, 255).to(torch.uint8)


@dataclass(frozen=True, slots=True)
class Gripper:
    """One convention, for the last number of an action."""

    to_robot: Callable[[Tensor], Tensor]
    """The model's number, in its data's units, as the simulator takes it."""
    to_model: Callable[[Tensor], Tensor]
    """The simulator's number as the model's data have it."""


GRIPPERS = {
    "same": Gripper(lambda g: g, lambda a: a),
    # the data say 0 closed, 1 open; robosuite opens at -1 and closes at 1. GR00T's are the same
    "libero": Gripper(lambda g: -torch.sign(2 * g - 1), lambda a: (1 - a) / 2),
    # the same data; the WidowX of PutOnPlate opens at 1
    "maniskill": Gripper(lambda g: torch.where(g > 0.5, 1.0, -1.0), lambda a: (a + 1) / 2),
    # the data have -1 and 1 already; CALVIN takes nothing between
    "sign": Gripper(torch.sign, lambda a: a),
}
"""By name, as `ROBOTS` names them."""


def gripper_to_robot(actions: Tensor, name: str) -> Tensor:
    """Actions [..., A] with their last number as the simulator takes it.

    Raises:
        ValueError: there is no such convention.
    """
    return torch.cat([actions[..., :-1], gripper(name).to_robot(actions[..., -1:])], -1)


def gripper_to_model(actions: Tensor, name: str) -> Tensor:
    """The inverse of `gripper_to_robot`, for demonstrated actions that open or close."""
    return torch.cat([actions[..., :-1], gripper(name).to_model(actions[..., -1:])], -1)


def gripper(name: str) -> Gripper:
    """A convention by its name.

    Raises:
        ValueError: there is none.
    """
    if name not in GRIPPERS:
        raise ValueError(f"gripper={name!r} must be one of {', '.join(GRIPPERS)}")
    return GRIPPERS[name]


class RobotActions:
    """The way from a model's numbers to a simulator's actions, and back.

    Args:
        row: of the model and the simulator.
        scaling: of the model's data; None for a model without statistics, whose -1 and 1 are the simulator's bounds.
        low, high: the simulator's bounds, in its own units; empty for -1 and 1.
        relative: the model predicts so many of an action's first numbers relative to the robot's state.
    """

    def __init__(
        self,
        row: Embodiment,
        scaling: Scaling | None,
        low: Sequence[float] = (),
        high: Sequence[float] = (),
        relative: int = 0,
    ):
        gripper(row.gripper)
        self.row, self.scaling, self.relative = row, scaling, 0 if scaling is None else relative
        self._bounds = (torch.tensor(low), torch.tensor(high)) if low and scaling is not None else None

    def to_simulator(self, numbers: Tensor, state: Tensor | None = None) -> Tensor:
        """The model's numbers as a policy's actions in [-1, 1], [..., A].

        Args:
            numbers: [..., D], or [N, C, D] where actions are relative.
            state: before the chunk, in the robot's units, [N, S]; needed where actions are relative.
        """
        actions = numbers if self.scaling is None else self.scaling.unnormalised(numbers)
        actions = actions + self._start(actions, state) if self.relative else actions
        if self.row.picked is not None:
            actions = actions[..., list(self.row.picked)]
        actions = gripper_to_robot(actions, self.row.gripper)
        return actions.clamp(-1.0, 1.0) if self._bounds is None else to_unit(actions, *self._on(actions))

    def to_model(self, actions: Tensor, state: Tensor | None = None) -> Tensor:
        """The inverse; what the simulator does not take is 0 in the robot's units."""
        actions = actions if self._bounds is None else from_unit(actions, *self._on(actions))
        actions = gripper_to_model(actions, self.row.gripper)
        if self.row.picked is not None:
            whole = actions.new_zeros(*actions.shape[:-1], self.row.action_size)
            whole[..., list(self.row.picked)] = actions
            actions = whole
        actions = actions - self._start(actions, state) if self.relative else actions
        return actions if self.scaling is None else self.scaling.normalised(actions)

    def _start(self, actions: Tensor, state: Tensor | None) -> Tensor:
        """Numbers that actions [N, C, D] are relative to, [N, 1, D]: the state, and 0 for the numbers that are
        absolute."""
        size = min(self.relative, actions.shape[-1])
        if state is None or state.shape[-1] < size:
            had = 0 if state is None else state.shape[-1]
            raise ValueError(f"relative actions start from {size} numbers of the robot's state, and it has {had}")
        return torch.nn.functional.pad(state[:, None, :size].to(actions), (0, actions.shape[-1] - size))

    def _on(self, actions: Tensor) -> tuple[Tensor, Tensor]:
        low, high = self._bounds or (torch.empty(0),) * 2
        if low.shape[-1] != actions.shape[-1]:
            raise ValueError(
                f"the model has {actions.shape[-1]} numbers in an action, and the simulator takes {low.shape[-1]}: "
                "another embodiment, or another checkpoint?"
            )
        return low.to(actions.device), high.to(actions.device)


def chosen_statistics(
    stats: Mapping[str, Any], row: Embodiment, wanted: str | None, key: str = "policy.settings.statistics"
) -> str | None:
    """Choose one of a checkpoint's statistics.

    Args:
        stats: of the checkpoint, by data set.
        row: whose `statistics` are taken where nothing is wanted.
        wanted: name of a data set, with or without `_no_noops` behind it; None to choose.
        key: of the configuration, for errors.

    Returns:
        A key of `stats`; None if there are no statistics.

    Raises:
        ValueError: the one that is wanted is not there, or several, or none, could be meant.
    """
    if not stats and wanted is None:
        return None
    listing = ", ".join(list(stats)[:12]) + (f" and {len(stats) - 12} more" if len(stats) > 12 else "")
    if wanted is not None:
        for name in (wanted, f"{wanted}_no_noops"):
            if name in stats:
                return name
        raise ValueError(f"{key}={wanted!r} is none of the checkpoint's: {listing or 'it has no statistics'}")
    names = [*row.statistics, *(name.removesuffix("_no_noops") for name in row.statistics)]
    candidates = [name for name in dict.fromkeys(names) if name in stats] or list(stats)
    if len(candidates) == 1:
        return candidates[0]
    raise ValueError(f"the checkpoint has statistics of several data sets: set {key} to one of {listing}")
