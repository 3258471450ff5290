"""What a configuration says of demonstrations: data sets to open, and what they show.

In: the section `imitation`. Out: a `Shown`, the shapes of what it shows, and its statistics as a policy takes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlinf.config.embodied import ImitationConfig
from rlinf.data.demonstrations import Shown, Window, open_parts
from rlinf.data.demonstrations.source import ACTIONS, STATE
from rlinf.data.demonstrations.statistics import Accumulator, tell_rare
from rlinf.data.demonstrations.stream import Part
from rlinf.models.policy.base import Policy
from rlinf.models.policy.build import CONFIG, configured, policy_class, policy_config
from rlinf.models.policy.vla.embodiment.actions import RobotActions
from rlinf.models.policy.vla.embodiment.statistics import Scaling

_GB = 1 << 30


def shown_of(settings: ImitationConfig) -> Shown | None:
    """The demonstrations that are learned from; None where none are named."""
    one = {"path": settings.path, "format": settings.format, "names": settings.names, "bounds": settings.bounds}
    sets = settings.mixture or ({} if settings.path is None else {"data": one})
    if not sets:
        return None
    memory = int(settings.memory_gb * _GB)
    return Shown(sets=sets, solved=settings.solved, broken=settings.broken, held_out=settings.held_out, memory=memory)


def shapes_of(settings: ImitationConfig) -> dict[str, Any]:
    """What a policy must fit that learns from demonstrations without a simulator; as `EnvActor.shapes` has it.

    Raises:
        ValueError: they are broken, or none are named.
    """
    if (shown := shown_of(settings)) is None:
        raise ValueError("no demonstrations are named")
    parts = open_parts(shown)[0]
    part = parts[0]
    first = part.read(part.places[0])
    shapes = {name: tuple(rows.shape[1:]) for name, rows in first.observation.items()}
    size = first.actions.shape[-1]
    known = {"shapes": shapes, "action_size": size, "max_steps": None, "choices": None}
    return {**known, "bounds": _bounds(parts) or ((-1.0,) * size, (1.0,) * size)}


def measured(settings: ImitationConfig, seed: int, policy: Mapping[str, Any], path: str | None) -> dict[str, Any]:
    """Settings of a policy that make it act on the scale of what is learned from. Blocking: it reads all of it.

    Args:
        settings: with `statistics`.
        seed: of which episodes are held out.
        policy: its configuration, fitted to the simulator, whose bounds are the robot's units of actions.
        path: of its directory.

    Raises:
        ValueError: the demonstrations are broken, or the policy keeps no statistics of its own.
    """
    name, shown = settings.statistics, shown_of(settings)
    if name is None or shown is None:
        return {}
    kind = policy_class(policy)
    unmeasured(kind, name, path)
    config = policy_config(policy if path is None else configured(policy, Path(path).expanduser()))
    nothing = torch.zeros(0, dtype=torch.float64)
    robot = kind.actions_of(config, Scaling(nothing, nothing))  # what it predicts is in the robot's units
    found: dict[str, Accumulator] = {}
    parts = open_parts(shown, seed)[0]
    for part in parts:
        for feature, rows in _features(part, robot, config.chunk):
            found.setdefault(feature, Accumulator()).add(rows)
    episodes = sum(len(part.places) for part in parts)
    statistics = {feature: each.done() for feature, each in found.items()}
    for feature, each in statistics.items():
        tell_rare(f"imitation.statistics: {feature}", each)
    return kind.with_statistics(name, statistics, episodes)


def unmeasured(kind: type[Policy], name: str, path: str | None) -> dict[str, Any]:
    """What `measured` gives, of a robot with one number that is always 0.

    Raises:
        ValueError: such a policy keeps no statistics, or that of the directory keeps those that it has.
    """
    if path is not None and (Path(path).expanduser() / CONFIG).is_file():
        raise ValueError(f"{path} is a policy that was saved with its statistics, and goes on with them: remove it")
    number = Accumulator()
    number.add(torch.zeros(1, 1))
    return kind.with_statistics(name, {ACTIONS: number.done(), STATE: number.done()}, 1)


def _features(part: Part, robot: RobotActions, chunk: int) -> Iterator[tuple[str, Tensor]]:
    """The actions of each episode in the robot's units, and the states before them, [n, D].

    Actions that are relative to the state before their chunk count once in each chunk that they can lie in.
    """
    for place in part.places:
        shown = part.read(place, pictures=False)
        state = shown.observation.get(STATE)
        if state is not None:
            yield STATE, state[:-1]
        if robot.relative and state is not None:
            rows = Window([shown], chunk).between(0, len(shown.actions))
            yield ACTIONS, robot.to_model(rows.actions, rows.observation[STATE])[rows.valid]
        else:
            yield ACTIONS, robot.to_model(shown.actions[shown.valid])


def _bounds(parts: Sequence[Part]) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    """What is -1 and 1 in the robot's units, where all data sets agree."""
    found = {
        None if part.low is None or part.high is None else (tuple(part.low.tolist()), tuple(part.high.tolist()))
        for part in parts
    }
    return found.pop() if len(found) == 1 else None
