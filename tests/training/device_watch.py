"""What code does to the memory of devices, as far as torch's operations tell: for CUDA tensors without a GPU.

with pretended() as watch:
    ...                      # tensors may be on "cuda", have no memory, and every operation is seen
watch.peak["cuda"], watch.copied["cuda", "cpu"]
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from contextlib import contextmanager

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_COPIES = {torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default}


class Watch(TorchDispatchMode):
    """Counts bytes that are alive, and bytes that go from one kind of device to another."""

    def __init__(self):
        super().__init__()
        self.alive = defaultdict(int)
        """Bytes of storages that were made since the beginning, by kind of device."""
        self.peak = defaultdict(int)
        """The most of them."""
        self.copied = defaultdict(int)
        """Bytes, by where from and where to."""
        self._known = weakref.WeakKeyDictionary()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        for each in given:
            self._known.setdefault(each.untyped_storage(), None)
        made = func(*args, **(kwargs or {}))
        for each in tree_leaves(made):
            if isinstance(each, torch.Tensor):
                self._see(each)
        if func in _COPIES:
            source = given[-1]
            target = made if func is torch.ops.aten._to_copy.default else given[0]
            self.copied[source.device.type, target.device.type] += target.nbytes
        return made

    def _see(self, tensor):
        storage, kind = tensor.untyped_storage(), tensor.device.type
        if storage in self._known:
            return
        size = storage.nbytes()
        self._known[storage] = None
        self.alive[kind] += size
        self.peak[kind] = max(self.peak[kind], self.alive[kind])
        weakref.finalize(storage, self._gone, kind, size)

    def _gone(self, kind, size):
        self.alive[kind] -= size


class _Aten(TorchFunctionMode):
    """Has methods whose Python binding asks for a device's driver go to the operator itself (torch 2.13 for CPUs)."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.copy_:
            return torch.ops.aten.copy_.default(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


@contextmanager
def pretended():
    """In it tensors may be on "cuda", and have no memory anywhere; gives a `Watch`."""
    with FakeTensorMode(), _Aten(), Watch() as watch:
        yield watch
