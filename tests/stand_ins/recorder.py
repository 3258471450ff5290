"""Recordings without a GPU, as strict as CUDA graphs, by `graphs: tests.stand_ins.recorder.Recorder` of an engine.

Flows in: a function, run once. Flows out: a recording, which repeats the tensor operations that were seen, on the same
tensors and with the same numbers, and asks Python nothing. What lies in no tensor is as it was when it was recorded,
and what the work made in between is spoiled after each replay, so that whoever relies on either finds out.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_WAITS = ("aten::_local_scalar_dense", "aten::item", "aten::nonzero", "aten::masked_select", "aten::is_nonzero")
"""Operations whose results Python needs: a device that records has none."""


class Recorder:
    """Records on a CPU."""

    def __init__(self) -> None:
        self.recorded: list[Hashable] = []
        """Names of all recordings so far."""

    def record(self, name: Hashable, work: Callable[[], Tensor]) -> _Recording:
        self.recorded.append(name)
        return _Recording(work)

    def clear(self) -> None:
        """Nothing to do: memory goes with the recordings."""


class _Recording:
    def __init__(self, work: Callable[[], Tensor]):
        self._seen = _Seen()
        with self._seen:
            self.output = work()
        self._spoil(every=True)

    def replay(self) -> None:
        for function, args, kwargs, results, addresses in self._seen.operations:
            if _addresses(args, kwargs) != addresses:
                raise RuntimeError(f"{function} was recorded with tensors that lie elsewhere now")
            for old, new in zip(results, _tensors(function(*args, **kwargs)), strict=True):
                if new.data_ptr() != old.data_ptr():
                    old.copy_(new)
        self._spoil()

    def _spoil(self, *, every: bool = False) -> None:
        kept = None if every else self.output.untyped_storage().data_ptr()
        for tensor in self._seen.made:
            if tensor.untyped_storage().data_ptr() != kept:
                tensor.fill_(
                    torch.nan if tensor.is_floating_point() else 1 if tensor.dtype == torch.bool else -(1 << 20)
                )


class _Seen(TorchDispatchMode):
    """Writes down every operation."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, list[Tensor], list[int]]] = []
        self.made: list[Tensor] = []
        """Tensors in memory that was not there before, one for each."""
        self._memory: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.name in _WAITS:
            raise RuntimeError(f"{func} waits for the device, which a recording cannot")
        self._memory.update(tensor.untyped_storage().data_ptr() for tensor in _tensors((args, kwargs)))
        found = func(*args, **kwargs)
        results = _tensors(found)
        self.operations.append((func, args, kwargs, results, _addresses(args, kwargs)))
        for tensor in results:
            if tensor.numel() and tensor.untyped_storage().data_ptr() not in self._memory:
                self._memory.add(tensor.untyped_storage().data_ptr())
                self.made.append(tensor)
        return found


def _addresses(*trees: Any) -> list[int]:
    return [tensor.data_ptr() for tensor in _tensors(trees)]


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
