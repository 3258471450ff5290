"""How many bytes the tensors take that are made meanwhile: counted by what torch makes, on any device."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Alive(TorchDispatchMode):
    """While it is entered, counts storages that this thread's operations give; each once, as long as it lives.

    Args:
        there: what was there before, which does not count.
    """

    def __init__(self, there: Iterable[Tensor]):
        super().__init__()
        self.most = 0
        """Bytes alive at once."""
        self._aside = [_reference(tensor) for tensor in there]
        self._there = {reference.cdata for reference in self._aside}
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def apart(self, make: Callable[..., Tensor]) -> Callable[[Any, torch.dtype], Tensor]:
        """Makes tensors that do not count."""

        def made(shape: Any, dtype: torch.dtype) -> Tensor:
            with torch.utils._python_dispatch._disable_current_modes():
                tensor = make(shape, dtype=dtype)
            self._aside.append(_reference(tensor))
            self._there.add(self._aside[-1].cdata)
            return tensor

        return made

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if isinstance(tensor, Tensor) and tensor.device.type != "meta":
                reference = _reference(tensor)
                if reference.cdata not in self._there:
                    self._alive[reference.cdata] = reference, tensor.untyped_storage().nbytes()
        self._alive = {key: kept for key, kept in self._alive.items() if not kept[0].expired()}
        self.most = max(self.most, sum(size for _, size in self._alive.values()))
        return found


def _reference(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())
