"""Work in flight in the files of a checkpoint: plain values as JSON, arrays as safetensors, and nothing that runs code
when it is read.

    in_flight.json          versions, prompts, counters, and where each array lies
    in_flight.safetensors   all arrays of one dtype, one after the other
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file

from rlinf.config.reading import parse_json
from rlinf.data.in_flight.admission import Kept
from rlinf.data.ledger import Entry
from rlinf.data.safetensors_io import write_tensors, write_text
from rlinf.data.sample import Group, ImageRef, Prompt, Sample, TurnTrace

PLAIN, ARRAYS = "in_flight.json", "in_flight.safetensors"
"""The two files."""
KINDS: tuple[type[Any], ...] = (Kept, Entry, Prompt, ImageRef, Sample, TurnTrace, Group)
"""Dataclasses that may be kept, besides those that the caller names."""


def write_kept(directory: Path, snapshot: Kept, kinds: Sequence[type[Any]] = ()) -> None:
    """Write what is in flight; blocking.

    Args:
        directory: of the checkpoint.
        snapshot: what.
        kinds: further dataclasses in it.

    Raises:
        TypeError: something in it is of another kind; the text says where.
        OSError: it cannot be written.
    """
    writer = _Writer({kind.__name__ for kind in (*KINDS, *kinds)})
    root = writer.node(snapshot, "in flight")
    write_text(directory / PLAIN, json.dumps({"root": root, "objects": writer.objects}, separators=(",", ":")))
    joined = {name: np.concatenate(arrays) for name, arrays in writer.arrays.items()}
    write_tensors(directory / ARRAYS, {name: torch.from_numpy(array) for name, array in joined.items()})


def read_kept(directory: Path, kinds: Sequence[type[Any]] = ()) -> Kept | None:
    """Read what `write_kept` wrote; None if nothing was in flight.

    Raises:
        ValueError: the files are damaged.
    """
    if not (directory / PLAIN).exists():
        return None
    try:
        plain = parse_json((directory / PLAIN).read_text(encoding="utf-8"))
        reader = _Reader({kind.__name__: kind for kind in (*KINDS, *kinds)}, load_file(directory / ARRAYS))
        for described in plain["objects"]:
            reader.read(described)
        snapshot = reader.value(plain["root"])
    except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise ValueError(f"{directory / PLAIN} is damaged: {type(error).__name__}: {error}") from error
    if not isinstance(snapshot, Kept):
        raise ValueError(f"{directory / PLAIN} is damaged: it holds no work in flight")
    return snapshot


class _Writer:
    """Turns values into JSON. A dataclass is written once, however often it is met: samples share their prompt."""

    def __init__(self, kinds: set[str]) -> None:
        self.objects: list[Any] = []
        self.arrays: dict[str, list[np.ndarray]] = {}
        self._kinds = kinds
        self._ends: dict[str, int] = {}
        self._seen: dict[int, tuple[int, Any]] = {}  # the object too, or its id might come again

    def node(self, value: Any, where: str) -> Any:
        if value is None or isinstance(value, bool | str) or type(value) in (int, float):
            return value
        if isinstance(value, list):
            return [self.node(one, where) for one in value]
        if isinstance(value, tuple):
            return {"t": [self.node(one, where) for one in value]}
        if isinstance(value, Mapping):
            pairs = [[self.node(key, where), self.node(one, f"{where}: {key}")] for key, one in value.items()]
            return {"d": pairs}
        if isinstance(value, bytes):
            return {"b": base64.b64encode(value).decode()}
        if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
            return {"a": self._array(value)}
        if isinstance(value, np.generic):
            return self.node(value.item(), where)
        if is_dataclass(value) and type(value).__name__ in self._kinds:
            return {"o": self._object(value, where)}
        raise TypeError(
            f"{where}: a {type(value).__name__} cannot be kept in a checkpoint: keep to texts, numbers, lists, "
            "dictionaries and arrays, or leave the column out (data.columns)"
        )

    def _object(self, value: Any, where: str) -> int:
        if id(value) not in self._seen:
            name = type(value).__name__
            parts = {each.name: self.node(getattr(value, each.name), f"{where}: {each.name}") for each in fields(value)}
            self._seen[id(value)] = (len(self.objects), value)
            self.objects.append([name, parts])
        return self._seen[id(value)][0]

    def _array(self, array: np.ndarray) -> list[Any]:
        name = array.dtype.name
        start = self._ends.get(name, 0)
        self.arrays.setdefault(name, []).append(np.ascontiguousarray(array).reshape(-1))
        self._ends[name] = start + array.size
        return [name, start, list(array.shape)]


class _Reader:
    """Turns JSON into values again."""

    def __init__(self, kinds: Mapping[str, type[Any]], arrays: Mapping[str, np.ndarray]) -> None:
        self._kinds, self._arrays = kinds, arrays
        self._objects: list[Any] = []

    def read(self, described: Any) -> None:
        name, parts = described
        kind = self._kinds[name]
        names = {each.name for each in fields(kind)}
        self._objects.append(kind(**{key: self.value(node) for key, node in parts.items() if key in names}))

    def value(self, node: Any) -> Any:
        if isinstance(node, list):
            return [self.value(one) for one in node]
        if not isinstance(node, dict):
            return node
        ((kind, content),) = node.items()
        return getattr(self, f"_{kind}")(content)

    def _t(self, content: Any) -> tuple[Any, ...]:
        return tuple(map(self.value, content))

    def _d(self, content: Any) -> dict[Any, Any]:
        return {self.value(key): self.value(one) for key, one in content}

    def _b(self, content: str) -> bytes:
        return base64.b64decode(content)

    def _a(self, content: Any) -> np.ndarray:
        name, start, shape = content
        size = int(np.prod(shape, dtype=np.int64))
        return self._arrays[name][start : start + size].reshape(shape)

    def _o(self, content: int) -> Any:
        return self._objects[content]
