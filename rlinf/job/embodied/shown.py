"""What a configuration says of demonstrations: data sets to open, and what they show.

In: the section `imitation`. Out: a `Shown`, and the shapes of what it shows.
"""

from __future__ import annotations

from typing import Any

from rlinf.config.embodied import ImitationConfig
from rlinf.data.demonstrations import Shown, open_parts

_GB = 1 << 30


def shown_of(settings: ImitationConfig) -> Shown | None:
    """The demonstrations that are learned from; None where none are named."""
    one = {"path": settings.path, "format": settings.format, "names": settings.names, "bounds": settings.bounds}
    sets = settings.mixture or ({} if settings.path is None else {"data": one})
    if not sets:
        return None
    memory = int(settings.memory_gb * _GB)
    return Shown(sets=sets, solved=settings.solved, held_out=settings.held_out, memory=memory)


def shapes_of(settings: ImitationConfig) -> dict[str, Any]:
    """What a policy must fit that learns from demonstrations without a simulator; as `EnvActor.shapes` has it.

    Raises:
        ValueError: they are broken, or none are named.
    """
    if (shown := shown_of(settings)) is None:
        raise ValueError("no demonstrations are named")
    part = open_parts(shown)[0][0]
    first = part.read(part.places[0])
    shapes = {name: tuple(rows.shape[1:]) for name, rows in first.observation.items()}
    size = first.actions.shape[-1]
    known = {"shapes": shapes, "action_size": size, "max_steps": None, "choices": None}
    return {**known, "bounds": ((-1.0,) * size, (1.0,) * size)}
