"""A replay buffer: a ring of transitions in host memory. No actor: its owner calls it from its compute thread.

In: new rows, which replace the oldest. Out: rows drawn at random, where what is drawn follows from a key alone, so that
a resumed run draws what it would have drawn.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from rlinf.data.safetensors_io import write_tensors, write_text

Rows = dict[str, Tensor]
"""Named tensors with as many rows each."""

_TENSORS, _ABOUT = "replay.safetensors", "replay.json"


class ReplayBuffer:
    """A ring of rows; all of its memory is allocated with the first of them.

    Args:
        capacity: rows that it holds.

    Attributes:
        added: rows that ever came.
    """

    def __init__(self, capacity: int):
        if capacity < 1:
            raise ValueError(f"replay: capacity={capacity} must be at least 1")
        self.capacity, self.added = capacity, 0
        self._rows: Rows = {}

    def __len__(self) -> int:
        return min(self.added, self.capacity)

    def add(self, rows: Mapping[str, Tensor]) -> None:
        """Add rows; row k of all that ever came is at k modulo the capacity.

        Raises:
            ValueError: they have other names or shapes than those before.
        """
        count = len(next(iter(rows.values())))
        if not self._rows:
            self._rows = {
                name: row.new_empty(self.capacity, *row.shape[1:], device="cpu") for name, row in rows.items()
            }
        for name in {*rows, *self._rows}:
            mine, theirs = self._rows.get(name), rows.get(name)
            if mine is None or theirs is None or mine.shape[1:] != theirs.shape[1:] or len(theirs) != count:
                raise ValueError(
                    f"replay: {name!r} is {None if theirs is None else list(theirs.shape)}, but the buffer has "
                    f"{None if mine is None else list(mine.shape[1:])} in each row; rows must stay alike"
                )
        kept = min(count, self.capacity)
        places = (self.added + torch.arange(count - kept, count)) % self.capacity
        for name, row in rows.items():
            self._rows[name][places] = row[count - kept :].to("cpu", self._rows[name].dtype)
        self.added += count

    def draw(self, count: int, *key: int) -> Rows:
        """Rows drawn evenly, with replacement.

        Args:
            count: how many.
            key: what the draw follows from, whole numbers from 0.

        Raises:
            ValueError: the buffer is empty.
        """
        if not self.added:
            raise ValueError("replay: it is empty, so nothing can be drawn")
        chosen = torch.from_numpy(np.random.default_rng(key).integers(0, len(self), count))
        return {name: rows[chosen] for name, rows in self._rows.items()}

    def tensors(self) -> Rows:
        """All that it holds, as it is and not copied: `rows.NAME` each, and `counts`, its capacity and `added`."""
        rows = {f"rows.{name}": rows[: len(self)] for name, rows in self._rows.items()}
        return {**rows, "counts": torch.tensor([self.capacity, self.added])}

    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace all rows by those of another buffer's `tensors`. With the same capacity, draws go on as they would
        have."""
        capacity, added = tensors["counts"].tolist()
        there = min(added, capacity)
        ages = torch.arange(added - there, added) % capacity
        self._rows, self.added = {}, added - there
        if there:
            rows = {name.removeprefix("rows."): row for name, row in tensors.items() if name != "counts"}
            self.add({name: row[ages] for name, row in rows.items()})

    def write(self, directory: Path) -> None:
        """Write all rows into a directory, which is made if it is not there. Blocking.

        Raises:
            OSError: it cannot be written.
        """
        directory.mkdir(parents=True, exist_ok=True)
        write_tensors(directory / _TENSORS, {name: rows[: len(self)] for name, rows in self._rows.items()})
        write_text(directory / _ABOUT, json.dumps({"capacity": self.capacity, "added": self.added}) + "\n")

    def read(self, directory: Path) -> None:
        """Replace all rows by those that were written. With the same capacity, draws go on as they would have.

        Raises:
            FileNotFoundError: the directory holds none.
        """
        if not (directory / _ABOUT).is_file():
            raise FileNotFoundError(f"{directory} holds no {_ABOUT}: no replay buffer was saved there")
        about = json.loads((directory / _ABOUT).read_text(encoding="utf-8"))
        rows = {f"rows.{name}": row for name, row in load_file(directory / _TENSORS).items()}
        self.take({**rows, "counts": torch.tensor([about["capacity"], about["added"]])})
