"""Meta-World's own scripts, one for each of its tasks: what records demonstrations, and answers to DAgger.

In: states and instructions. Out: actions. Meta-World is imported with the first question.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlinf.envs.metaworld.simulator import STATE
from rlinf.envs.metaworld.tasks import INSTRUCTIONS, registry


def scripted(observation: Mapping[str, Tensor], instructions: Sequence[str] | None = None) -> Tensor:
    """Does what an instruction asks for, by Meta-World's script for that task.

    Args:
        observation: "state", float32 [N, S]: it begins with Meta-World's 39 numbers, the goal among them.
        instructions: N of `tasks.INSTRUCTIONS`, which say whose script is asked.

    Returns:
        Actions in [-1, 1], float32 [N, 1, 4].

    Raises:
        ValueError: there are no instructions, or the state lacks numbers that scripts look at.
    """
    state = observation["state"]
    if instructions is None or state.shape[1] < STATE:
        raise ValueError(
            f"Meta-World's scripts look at {STATE} numbers of the state and at instructions, but there are "
            f"{state.shape[1]} and {'none' if instructions is None else len(instructions)}: set env.options.observe "
            "to state or state+rgb"
        )
    rows = state[:, :STATE].double().cpu().numpy()
    actions = [_script(words).get_action(row) for words, row in zip(instructions, rows, strict=True)]
    return torch.from_numpy(np.stack(actions)).float().clamp(-1.0, 1.0)[:, None]


@cache
def _script(words: str) -> Any:
    """The script for an instruction; it remembers nothing from one question to the next."""
    registry()  # says what to install, if need be
    from metaworld.policies import ENV_POLICY_MAP

    made: Callable[[], Any] = ENV_POLICY_MAP[_TASKS[words]]
    return made()


_TASKS = {words: task for task, words in INSTRUCTIONS.items()}
