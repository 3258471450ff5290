"""A replay buffer: a ring of transitions in host memory. No actor: its owner calls it from its compute thread.

In: new rows, which replace the oldest. Out: rows drawn at random, where what is drawn follows from a key alone, so that
a resumed run draws what it would have drawn. Pictures (uint8, [R, H, W, channels]) are kept once each (`pictures.py`);
the ring holds the numbers of their slots.
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
from rlinf.training.embodied.off_policy.pictures import PictureStore

Rows = dict[str, Tensor]
"""Named tensors with as many rows each."""

_TENSORS, _ABOUT = "replay.safetensors", "replay.json"
_PICTURES, _PLACES = "pictures.", "places."
_TAKEN = 4096
"""Rows that are taken at a time from another buffer."""


class ReplayBuffer:
    """A ring of rows; its memory is allocated with the first of them, that of pictures as they come.

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
        self._shapes: dict[str, torch.Size] = {}
        self._stores: dict[str, PictureStore] = {}  # by the name of the rows whose pictures they keep

    def __len__(self) -> int:
        return min(self.added, self.capacity)

    @property
    def pictures(self) -> int:
        """Pictures that are kept."""
        return sum(len(store) for store in set(self._stores.values()))

    def add(self, rows: Mapping[str, Tensor]) -> None:
        """Add rows; row k of all that ever came is at k modulo the capacity.

        Raises:
            ValueError: they have other names or shapes than those before.
        """
        count = len(next(iter(rows.values())))
        if not self._rows:
            self._allocate(rows)
        for name in {*rows, *self._shapes}:
            mine, theirs = self._shapes.get(name), rows.get(name)
            if mine is None or theirs is None or mine != theirs.shape[1:] or len(theirs) != count:
                raise ValueError(
                    f"replay: {name!r} is {None if theirs is None else list(theirs.shape)}, but the buffer has "
                    f"{None if mine is None else list(mine)} in each row; rows must stay alike"
                )
        kept = min(count, self.capacity)
        places = (self.added + torch.arange(count - kept, count)) % self.capacity
        for name, row in rows.items():
            ring, new = self._rows[name], row[count - kept :]
            if (store := self._stores.get(name)) is None:
                ring[places] = new.to("cpu", ring.dtype)
            else:
                slots, old = store.keep(new), ring[places]
                ring[places] = slots
                store.release(old[old >= 0])
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
        return self._looked_at(chosen)

    def tensors(self) -> Rows:
        """All that it holds: `rows.NAME` each, as they are and not copied; `counts`, its capacity and `added`; and of
        pictures, which are copied, `pictures.SHAPE` with their places in it, `places.SHAPE.NAME`."""
        found: Rows = {"counts": torch.tensor([self.capacity, self.added])}
        groups: dict[PictureStore, dict[str, Tensor]] = {}
        for name, ring in self._rows.items():
            if (store := self._stores.get(name)) is None:
                found[f"rows.{name}"] = ring[: len(self)]
            else:
                groups.setdefault(store, {})[name] = ring[: len(self)]
        for store, rows in groups.items():
            shape = "x".join(map(str, store.shape))
            slots, places = torch.cat(list(rows.values())).unique(return_inverse=True)
            found[f"{_PICTURES}{shape}"] = store.look(slots)
            parts = places.split(len(self))
            found |= {f"{_PLACES}{shape}.{name}": part.clone() for name, part in zip(rows, parts, strict=True)}
        return found

    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace all rows by those of another buffer's `tensors`. With the same capacity, draws go on as they would
        have."""
        capacity, added = tensors["counts"].tolist()
        there = min(added, capacity)
        ages = torch.arange(added - there, added) % capacity
        self._rows, self._shapes, self._stores, self.added = {}, {}, {}, added - there
        if not there:
            return
        for part in ages.split(_TAKEN):  # not all at once: pictures are apart from each other until they are kept
            rows = {name.removeprefix("rows."): row[part] for name, row in tensors.items() if name.startswith("rows.")}
            for name, places in tensors.items():
                if name.startswith(_PLACES):
                    shape, _, row = name.removeprefix(_PLACES).partition(".")
                    rows[row] = tensors[f"{_PICTURES}{shape}"][places[part]]
            self.add(rows)

    def _allocate(self, rows: Mapping[str, Tensor]) -> None:
        stores: dict[torch.Size, PictureStore] = {}
        for name, row in rows.items():
            shape = self._shapes[name] = row.shape[1:]
            if row.dtype == torch.uint8 and len(shape) == 3:  # height, width, channels
                self._stores[name] = stores.setdefault(shape, PictureStore(shape))
                self._rows[name] = torch.full((self.capacity,), -1)  # no slot yet
            else:
                self._rows[name] = row.new_empty(self.capacity, *shape, device="cpu")

    def _looked_at(self, chosen: Tensor) -> Rows:
        found = {name: ring[chosen] for name, ring in self._rows.items()}
        return {name: self._stores[name].look(row) if name in self._stores else row for name, row in found.items()}

    def write(self, directory: Path) -> None:
        """Write all rows into a directory, which is made if it is not there. Blocking.

        Raises:
            OSError: it cannot be written.
        """
        directory.mkdir(parents=True, exist_ok=True)
        rows = {name.removeprefix("rows."): tensor for name, tensor in self.tensors().items() if name != "counts"}
        write_tensors(directory / _TENSORS, rows)
        write_text(directory / _ABOUT, json.dumps({"capacity": self.capacity, "added": self.added}) + "\n")

    def read(self, directory: Path) -> None:
        """Replace all rows by those that were written. With the same capacity, draws go on as they would have.

        Raises:
            FileNotFoundError: the directory holds none.
        """
        if not (directory / _ABOUT).is_file():
            raise FileNotFoundError(f"{directory} holds no {_ABOUT}: no replay buffer was saved there")
        about = json.loads((directory / _ABOUT).read_text(encoding="utf-8"))
        found = {"counts": torch.tensor([about["capacity"], about["added"]])}
        for name, tensor in load_file(directory / _TENSORS).items() if about["added"] else ():
            found[name if name.startswith((_PICTURES, _PLACES)) else f"rows.{name}"] = tensor
        self.take(found)
