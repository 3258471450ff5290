"""Learned models as simulators: a step is what a network predicts, for all environments at once, on its device.

Seeds and actions in; observations, rewards and ends out, as of any simulator: so policies learn inside by every flow,
and a role of such simulators is leased, parked and planned as others are. Which network it is, is behind `WorldModel`:
an ensemble over states, or one that draws the next frames of a video. Other weights come through `load`.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from rlinf.config.importing import resolve
from rlinf.data.rng import mixed
from rlinf.data.safetensors_io import write_tensors, write_text
from rlinf.envs import base
from rlinf.runtime.base.tensors import enter_device

ENSEMBLE = "rlinf.models.world.EnsembleWorld"
"""The world model of small states."""
CONFIG, WEIGHTS = "world.json", "world.safetensors"
"""Files of a saved world model."""


class WorldModel(Protocol):
    """A network that an environment can be. A `torch.nn.Module`, made by keyword arguments.

    What it returns it does not write again, and a row of it follows from that row of its arguments alone: what else is
    random in a step is drawn from the step's seeds.
    """

    shows: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    """Arrays that it shows: the shape of a row and the dtype of each, such as {"rgb": ((256, 256, 3), torch.uint8)}."""
    action_size: int
    """Numbers in an action, A."""

    def begin(self, seeds: Tensor) -> tuple[dict[str, Tensor], base.Observation]:
        """Begin episodes: what it knows of each from here on (a state, the last frames, a cache), n rows in every
        tensor, and their first observations. `seeds` are int64 [n], on its device."""

    def advance(
        self, latent: dict[str, Tensor], actions: Tensor, seeds: Tensor
    ) -> tuple[dict[str, Tensor], base.Observation, Tensor, Tensor, Tensor | None]:
        """Predict one step of N episodes, by actions in [-1, 1], float32 [N, A]: what it knows then, what is seen,
        rewards float32 [N], where the task ended, bool [N], and where it is solved, bool [N], or None. `seeds` are
        int64 [N], others in every step."""

    def to(self, device: torch.device) -> Self: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> Any: ...


def make_world(model: str, settings: Mapping[str, Any]) -> Any:
    """A world model with its first weights, a `WorldModel`.

    Args:
        model: dotted path of its class.
        settings: its keyword arguments.

    Raises:
        ValueError: an argument that there is not, or cannot be.
    """
    try:
        return resolve(model)(**settings)
    except TypeError as error:
        raise ValueError(f"world: {model} cannot be made: {error}") from error


def fitted_world(
    model: str | None, settings: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], action_size: int
) -> tuple[str, dict[str, Any]]:
    """The dotted path of a world model, and its arguments completed by what the environments are like.

    Args:
        model: the path, or `ensemble`.
        settings: arguments; those that are there stay.
        shapes: of a row of each array that the environments show; what the model takes of `shapes` and `state_size`.
        action_size: numbers in an action.

    Raises:
        ValueError: the ensemble, and what they show is more than a state.
    """
    path = ENSEMBLE if model in (None, "ensemble") else str(model)
    if path == ENSEMBLE and set(shapes) != {"state"}:
        raise ValueError(f"an ensemble predicts the state alone, and these environments show {', '.join(shapes)}")
    sizes = {"shapes": dict(shapes), "action_size": action_size, "state_size": shapes.get("state", (0,))[0]}
    takes = inspect.signature(resolve(path)).parameters
    return path, {**{name: size for name, size in sizes.items() if name in takes}, **settings}


def read_world(directory: Path) -> Any:
    """The world model that a run has saved.

    Raises:
        FileNotFoundError: there is none.
    """
    from safetensors.torch import load_file

    if not (directory / CONFIG).is_file():
        raise FileNotFoundError(f"{directory} holds no {CONFIG}: it is not the directory of a saved world model")
    about = json.loads((directory / CONFIG).read_text(encoding="utf-8"))
    world = make_world(about["model"], about["settings"])
    world.load_state_dict(load_file(directory / WEIGHTS))
    return world


def write_world(directory: Path, about: Mapping[str, Any], state: Mapping[str, Tensor]) -> None:
    """Write a world model into a directory, which is made if it is not there.

    Args:
        directory: takes `world.json` and `world.safetensors`.
        about: `model` and `settings` that make it.
        state: its tensors, in host memory.
    """
    directory.mkdir(parents=True, exist_ok=True)
    write_tensors(directory / WEIGHTS, {name: tensor.contiguous() for name, tensor in state.items()})
    write_text(directory / CONFIG, json.dumps(about, indent=2) + "\n")


class Learned(base.Simulator):
    """N episodes in a world model.

    Args:
        num_envs: how many.
        path: directory of a saved world model; None makes a new one.
        model: dotted path of its class, where it is new.
        settings: its keyword arguments, then.
        choices: of each number of an action, see `ActionSpec`; None where they are real.
        max_steps: time limit; models are wrong sooner or later, and short episodes keep clear of that.

    Raises:
        ValueError: an argument that cannot be.
        FileNotFoundError: the directory holds no world model.
    """

    def __init__(
        self,
        num_envs: int,
        *,
        path: str | None = None,
        model: str = ENSEMBLE,
        settings: Mapping[str, Any] | None = None,
        choices: Sequence[int] | None = None,
        max_steps: int | None = None,
    ):
        self.num_envs, self.max_steps, self.device = num_envs, max_steps, enter_device()
        world = read_world(Path(path).expanduser()) if path is not None else make_world(model, settings or {})
        self._world: Any = world.to(self.device)
        self.observation_spec = {name: base.ArraySpec(shape, dtype) for name, (shape, dtype) in world.shows.items()}
        bound = torch.ones(world.action_size)  # of what policies do, which is what it has learned from
        self.action_spec = base.ActionSpec(-bound, bound, None if choices is None else tuple(choices))
        self._seeds = [0] * num_envs
        self._steps = [0] * num_envs
        self._latent: dict[str, Tensor] = {}
        self._observation: base.Observation = {}

    @torch.no_grad()
    def reset(self, seeds: Tensor, env_ids: Tensor) -> base.Observation:
        for env, seed in zip(env_ids.tolist(), seeds.tolist(), strict=True):
            self._seeds[env], self._steps[env] = seed, 0
        latent, observation = self._world.begin(mixed(seeds.tolist(), 0).to(self.device))
        rows = env_ids.to(self.device)
        self._latent, self._observation = (
            self._put(self._latent, rows, latent),
            self._put(self._observation, rows, observation),
        )
        return {name: array.clone() for name, array in observation.items()}

    @torch.no_grad()
    def step(self, actions: Tensor, active: Tensor) -> base.Transition:
        for env, moves in enumerate(active.tolist()):
            self._steps[env] += moves
        seeds = mixed(self._seeds, self._steps).to(self.device)
        latent, observation, reward, ended, solved = self._world.advance(self._latent, actions, seeds)
        self._latent = base.rows_where(active, latent, self._latent)
        self._observation = base.rows_where(active, observation, self._observation)
        return base.Transition(self._observation, reward, ended, torch.zeros_like(ended), solved)

    def load(self, weights: Mapping[str, Tensor]) -> None:
        self._world.load_state_dict(weights)

    def render(self, env_ids: Tensor) -> Tensor:
        if "rgb" not in self._observation:
            raise base.CannotRender(
                f"this world model shows {', '.join(self.observation_spec)} alone: set trials.videos=0"
            )
        pictures: Tensor = self._observation["rgb"][env_ids.to(self.device)][..., :3]
        return pictures.cpu()

    def save(self) -> list[base.State]:
        everything = {"latent": self._latent, "observation": self._observation}
        rows = (torch.tensor([env], device=self.device) for env in range(self.num_envs))
        each = zip(self._seeds, self._steps, rows, strict=True)
        return [
            {"seed": seed, "step": step, **base.tree_on_cpu(base.tree_rows(everything, row))}
            for seed, step, row in each
        ]

    def restore(self, states: Sequence[base.State], env_ids: Tensor) -> None:
        for env, state in zip(env_ids.tolist(), states, strict=True):
            self._seeds[env], self._steps[env] = state["seed"], state["step"]
        rows = env_ids.to(self.device)
        for name in ("latent", "observation"):
            joined = base.stacked_trees([state[name] for state in states], self.device)
            setattr(self, f"_{name}", self._put(getattr(self, f"_{name}"), rows, joined))

    def offload(self) -> None:
        self._move(torch.device("cpu"))

    def onload(self) -> None:
        self._move(self.device)

    def _move(self, device: torch.device) -> None:
        self._world.to(device)
        self._latent, self._observation = (
            {name: rows.to(device) for name, rows in tree.items()} for tree in (self._latent, self._observation)
        )

    def _put(self, tree: dict[str, Tensor], rows: Tensor, new: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A copy of N rows of which some are new; before the first reset there are none, and the others stay 0."""
        put = {}
        for name, values in new.items():
            whole = tree[name].clone() if name in tree else values.new_zeros(self.num_envs, *values.shape[1:])
            whole[rows] = values
            put[name] = whole
        return put
