"""What each published model expects of each simulator: prompt, cameras, pictures, state, statistics, gripper, chunk.

Data only; sources are the authors' evaluation code and RLinf's (arXiv:2510.06710). Policies read their row by
`embodiment`, and any setting of a policy overrides what stands here.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlinf.config.schema import nearest
from rlinf.models.policy.vla.embodiment.statistics import Scale

OPENVLA_PROMPT = "In: What action should the robot take to {instruction}?\nOut: "
"""Of OpenVLA and OpenVLA-OFT; the instruction is in lower case, and the space at the end is a token of its own."""
PI0_PROMPT = "{instruction}\n"
"""Of pi0, and of pi0.5 where its state is not written out; `_` and line breaks of the instruction become spaces."""
PI05_PROMPT = "Task: {instruction}, State: {state};\nAction: "
"""Of pi0.5 with the state in words: integers from 0 to 255."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Embodiment:
    """How one model meets one simulator."""

    prompt: str
    """Text with {instruction}."""
    prompt_length: int
    """Tokens that prompts are padded to."""
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
    """What the model's numbers from -1 to 1 mean."""
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
    # a robot without a row: what there is of its state is read, and the gripper is as it is
    ("gr00t", "plain"): Embodiment(
        prompt="{instruction}", prompt_length=570, crop=0.9025, state_size=64, statistics=("new_embodiment",),
        scale="min_max", chunk=16,
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
        known = [other for kind, other in TABLE if kind == model]
        near = nearest(simulator, known)
        raise ValueError(
            f"policy {model}: embodiment={simulator!r} is none of {', '.join(known)}"
            + (f"; did you mean {near}?" if near else "")
        )
    return TABLE[model, simulator]
