"""Tasks and suites of Meta-World, and what each task asks for in words.

In: names. Out: what Meta-World has registered under them. Meta-World is imported when something is looked up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlinf.config.schema import nearest
from rlinf.envs.base import CannotSimulate, WrongOption

INSTRUCTIONS: Mapping[str, str] = {
    "assembly-v3": "Pick up a nut and place it onto a peg",
    "basketball-v3": "Dunk the basketball into the basket",
    "bin-picking-v3": "Grasp the puck from one bin and place it into another bin",
    "box-close-v3": "Grasp the cover and close the box with it",
    "button-press-topdown-v3": "Press a button from the top",
    "button-press-topdown-wall-v3": "Bypass a wall and press a button from the top",
    "button-press-v3": "Press a button",
    "button-press-wall-v3": "Bypass a wall and press a button",
    "coffee-button-v3": "Push a button on the coffee machine",
    "coffee-pull-v3": "Pull a mug from a coffee machine",
    "coffee-push-v3": "Push a mug under a coffee machine",
    "dial-turn-v3": "Rotate a dial 180 degrees",
    "disassemble-v3": "Pick a nut out of a peg",
    "door-close-v3": "Close a door with a revolving joint",
    "door-lock-v3": "Lock the door by rotating the lock clockwise",
    "door-open-v3": "Open a door with a revolving joint",
    "door-unlock-v3": "Unlock the door by rotating the lock counter-clockwise",
    "drawer-close-v3": "Push and close a drawer",
    "drawer-open-v3": "Open a drawer",
    "faucet-close-v3": "Rotate the faucet clockwise",
    "faucet-open-v3": "Rotate the faucet counter-clockwise",
    "hammer-v3": "Hammer a screw on the wall",
    "hand-insert-v3": "Insert the gripper into a hole",
    "handle-press-side-v3": "Press a handle down sideways",
    "handle-press-v3": "Press a handle down",
    "handle-pull-side-v3": "Pull a handle up sideways",
    "handle-pull-v3": "Pull a handle up",
    "lever-pull-v3": "Pull a lever down 90 degrees",
    "peg-insert-side-v3": "Insert a peg sideways",
    "peg-unplug-side-v3": "Unplug a peg sideways",
    "pick-out-of-hole-v3": "Pick up a puck from a hole",
    "pick-place-v3": "Pick and place a puck to a goal",
    "pick-place-wall-v3": "Pick a puck, bypass a wall and place the puck",
    "plate-slide-back-side-v3": "Get a plate from the cabinet sideways",
    "plate-slide-back-v3": "Get a plate from the cabinet",
    "plate-slide-side-v3": "Slide a plate into a cabinet sideways",
    "plate-slide-v3": "Slide a plate into a cabinet",
    "push-back-v3": "Pull a puck to a goal",
    "push-v3": "Push the puck to a goal",
    "push-wall-v3": "Bypass a wall and push a puck to a goal",
    "reach-v3": "Reach a goal position",
    "reach-wall-v3": "Bypass a wall and reach a goal",
    "shelf-place-v3": "Pick and place a puck onto a shelf",
    "soccer-v3": "Kick a soccer into the goal",
    "stick-pull-v3": "Grasp a stick and pull a box with the stick",
    "stick-push-v3": "Grasp a stick and push a box using the stick",
    "sweep-into-v3": "Sweep a puck into a hole",
    "sweep-v3": "Sweep a puck off the table",
    "window-close-v3": "Push and close a window",
    "window-open-v3": "Push and open a window",
}
"""The fifty tasks, and what each is to do in the words of Meta-World's paper (arXiv:1910.10897, appendix A)."""

SUITES: Mapping[str, tuple[str, str | None]] = {
    "MT10": ("MT10_V3", None),
    "MT25": ("MT25_V3", None),
    "MT50": ("MT50_V3", None),
    "ML10-train": ("ML10_V3", "train"),
    "ML10-test": ("ML10_V3", "test"),
    "ML25-train": ("ML25_V3", "train"),
    "ML25-test": ("ML25_V3", "test"),
    "ML45-train": ("ML45_V3", "train"),
    "ML45-test": ("ML45_V3", "test"),
}
"""Suites: the name of each in `metaworld.env_dict`, and its part. The goal is seen in those that begin with MT."""


class MissingMetaWorld(CannotSimulate):
    """Meta-World is not installed; the text names the command that brings it."""


def registry() -> Any:
    """Meta-World's module of tasks and suites.

    Raises:
        MissingMetaWorld: it is not installed.
    """
    try:
        from metaworld import env_dict
    except ModuleNotFoundError as error:
        if error.name not in ("metaworld", "mujoco"):
            raise
        raise MissingMetaWorld("Meta-World is not installed: pip install 'rlinf[metaworld]'") from error
    return env_dict


def chosen_tasks(suite: str | None, tasks: Sequence[str] | None) -> list[str]:
    """Names of the tasks that a configuration asks for, in Meta-World's order where it names a suite.

    Args:
        suite: one of `SUITES`, or None.
        tasks: names of tasks; with a suite, those of it that are taken.

    Raises:
        WrongOption: neither is given, or a name is unknown.
    """
    if suite is None and not tasks:
        raise WrongOption("tasks", f"name tasks, such as [reach-v3], or a suite: {', '.join(SUITES)}")
    if suite is None:
        known = list(INSTRUCTIONS)
    elif suite in SUITES:
        name, part = SUITES[suite]
        known = list(getattr(registry(), name) if part is None else getattr(registry(), name)[part])
    else:
        raise WrongOption("suite", f"suite={suite!r} is none of {', '.join(SUITES)}")
    if isinstance(tasks, str):
        raise WrongOption("tasks", f"it must be a list of names: [{tasks}]")
    for task in tasks or ():
        if task not in known:
            near = nearest(str(task), known)
            there = "Meta-World" if suite is None else suite
            raise WrongOption("tasks", f"{there} has no task {task!r}" + (f"; did you mean {near}?" if near else ""))
    return list(tasks) if tasks else known
