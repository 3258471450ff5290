"""Finds actions, observations and rewards that are NaN or infinite, and says in which episode they came.

In: the arrays of single steps. Out: the environments whose episode cannot be used, and a remark on each. Nobody waits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor


def not_finite(arrays: Mapping[str, Tensor]) -> Tensor | None:
    """Rows in which some number is NaN or infinite, bool [N]; None if there is none.

    Args:
        arrays: N rows each.
    """
    floats = [array for array in arrays.values() if array.is_floating_point()]
    if all(math.isfinite(array.sum().item()) for array in floats):  # a sum tells of any, at a fraction of the price
        return None
    rows = torch.stack([~torch.isfinite(array).reshape(len(array), -1).all(1) for array in floats]).any(0)
    return rows if bool(rows.any()) else None


class Spoiled:
    """The episodes of one chunk that cannot be used, and the remarks on them.

    Args:
        describe: names the episode that an environment is in, and its next step.
    """

    def __init__(self, describe: Callable[[int], str]):
        self._describe = describe
        self._remarks: list[str] = []
        self.rows = torch.zeros(0, dtype=torch.bool)
        """Environments whose episode was spoiled in this chunk, bool [N]."""

    def begin(self, running: Tensor) -> None:
        """A chunk begins; `running`, bool [N], are the environments that have an episode."""
        self.rows = torch.zeros_like(running)

    def left(self, active: Tensor, arrays: Mapping[str, Tensor]) -> Tensor:
        """The active environments, bool [N], whose numbers are finite; the others are noted.

        Args:
            active: bool [N].
            arrays: N rows each, by name; rows that are not active may hold anything.
        """
        found = not_finite(arrays)
        if found is None or not bool((found := found & active).any()):
            return active
        self.rows |= found
        rows = found.nonzero().squeeze(1)
        self.note({name: array[rows] for name, array in arrays.items()}, rows.cpu())
        return active & ~found

    def note(self, arrays: Mapping[str, Tensor], envs: Tensor) -> str:
        """Remark on environments which of their rows is not finite; the last remark.

        Args:
            arrays: n rows each, by name.
            envs: of the rows, int64 [n], at least one.
        """
        for row, env in enumerate(envs.tolist()):
            names = [name for name, array in arrays.items() if not_finite({name: array[row : row + 1]}) is not None]
            self._remarks.append(f"{self._describe(env)}: its {' and '.join(names)} is not finite")
        return self._remarks[-1]

    def told(self) -> tuple[str, ...]:
        """The remarks since the last call."""
        remarks, self._remarks = tuple(self._remarks), []
        return remarks
