"""What several keys of another framework say only together: engines over several devices, simulators by their file.

In: a conversion whose keys are written. Out: the same with keys that follow from the others, and, by our key, what
whoever runs it must still write. Nothing is guessed: what a file's name does not say is asked for.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlinf.cli.conversion.tables.shared import DEVICES, NODES

_MODE, _ROLLOUT, _TRAINER = "placement.mode", "placement.rollout", "placement.trainer"
_SPLIT = "rollout.engine_args.tensor_parallel"
_RANGE = re.compile(r"(\d+)-(\d+)")
_LIBERO_CLASS = "rlinf.envs.adapters.libero.Libero"
_LIBERO = re.compile(r"libero_(?:spatial|object|goal|10|90)")


def engine_devices(ours: Mapping[str, Any]) -> dict[str, Any] | None:
    """Placement of an engine that splits its model: a process for each part of the devices, `0-7:0-3` by twos.

    Args:
        ours: what is written so far, by dotted key.

    Returns:
        Keys in place of `placement.mode` (or of `placement.rollout`); None where nothing is to be changed.
    """
    split, devices = ours.get(_SPLIT, 1), ours.get(DEVICES, 8) * ours.get(NODES, 1)
    if not isinstance(split, int) or split < 2:
        return None
    together = ours.get(_MODE) == "collocated"
    place = "all" if together else str(ours.get(_ROLLOUT))
    found = _RANGE.fullmatch(f"0-{devices - 1}" if place == "all" else place)
    if found is None or (count := int(found[2]) - int(found[1]) + 1) % split:
        return None
    rollout = f"{found[0]}:0" if count == split else f"{found[0]}:0-{count // split - 1}"
    return {_ROLLOUT: rollout, **({_TRAINER: "all"} if together else {})}


def acting(ours: Mapping[str, Any], missing: Sequence[str]) -> dict[str, Any]:
    """Keys of a policy that acts which follow from other keys, and from the names of files that are not at hand.

    Args:
        ours: what is written so far, by dotted key.
        missing: what `defaults` names and was not found, such as `env/libero_10`.
    """
    found: dict[str, Any] = {}
    suite = next((suite for suite in map(_trained_on, missing) if _LIBERO.fullmatch(suite)), None)
    if suite is not None:
        found |= {"env.simulator": _LIBERO_CLASS, "env.options.suite": suite}
    libero = (
        suite is not None
        or ours.get("env.simulator") == _LIBERO_CLASS
        or str(ours.get("policy.settings.statistics")).startswith("libero")
    )
    if libero and str(ours.get("policy.type")).startswith("openvla"):
        found["policy.settings.embodiment"] = "libero"  # theirs has `widowx_bridge`, and goes by the simulator
    steps, chunk = ours.get("env.max_steps"), ours.get("policy.settings.chunk")
    if "policy.horizon" not in ours and isinstance(steps, int) and isinstance(chunk, int) and chunk > 0:
        found["policy.horizon"] = math.ceil(steps / chunk)
    return found


def to_be_written(ours: Mapping[str, Any], missing: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Keys of ours that a run of a policy that acts needs and that theirs do not say, with how to find them."""
    if "env.simulator" not in ours:
        named = ", ".join(name for name in missing if _trained_on(name))
        where = f" (theirs: {named})" if named else ""
        yield "env.simulator", f"which simulator, and env.options{where}: docs/environments.md has a row for each"
    if "policy.horizon" not in ours:
        yield "policy.horizon", "decisions in a step: steps of an episode, divided by actions in a chunk"


def _trained_on(name: str) -> str:
    """What a file of the simulator is called, `env/train/NAME` or `env/NAME`; of any other file, and of one for
    evaluations, nothing."""
    kind, _, rest = name.partition("/")
    return rest.removeprefix("train/") if kind == "env" and not rest.startswith("eval/") else ""
