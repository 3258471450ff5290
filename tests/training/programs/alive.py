"""How many bytes the tensors take that are made meanwhile: counted by what torch makes, on any device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
        self._aside = [*there]
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor that does not count, nor does what shares its memory."""
        self._aside.append(torch.empty(tuple(shape), dtype=dtype))
        self._alive.pop(StorageWeakRef(self._aside[-1].untyped_storage()).cdata, None)
        return self._aside[-1]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self._alive = {key: kept for key, kept in self._alive.items() if not kept[0].expired()}
        self.most = max(self.most, sum(size for _, size in self._alive.values()))
        for tensor in tree_leaves(found):
            if isinstance(tensor, Tensor) and tensor.device.type != "meta" and not self._known(tensor):
                reference = StorageWeakRef(tensor.untyped_storage())
                self._alive[reference.cdata] = reference, tensor.untyped_storage().nbytes()
        return found

    def _known(self, tensor: Tensor) -> bool:
        storages = (known.untyped_storage() for known in self._aside)
        begun = tensor.untyped_storage().data_ptr()
        return any(known.data_ptr() <= begun < known.data_ptr() + known.nbytes() for known in storages)
