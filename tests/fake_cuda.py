"""CUDA tensors without a card: their shapes, strides and devices are real, their contents are not there.

A torch without CUDA refuses to index fake CUDA tensors, to `copy_` into them and to lay them out anew, since these ask
for the device's own code first. `fake_cuda` does the same by the operations that they stand for: the code under test is
written as it is.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode

DEVICE = torch.device("cuda", 0)


class _Indexing(TorchFunctionMode):
    """Indexing of fake tensors, by views and by `index`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__ and isinstance(args[0], FakeTensor):
            return _got(*args)
        if func is Tensor.__setitem__ and isinstance(args[0], FakeTensor):
            target, key, value = args
            _copied(_got(target, key), value) if isinstance(value, Tensor) else _got(target, key).fill_(value)
            return None
        if func is Tensor.copy_ and isinstance(args[0], FakeTensor):
            return _copied(*args, **(kwargs or {}))
        if func is Tensor.contiguous and isinstance(args[0], FakeTensor):
            (own,) = args
            whole = torch.ops.aten.is_contiguous(own)
            return own if whole else torch.ops.aten.clone(own, memory_format=torch.contiguous_format)
        return func(*args, **(kwargs or {}))


def _copied(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    return torch.ops.aten.copy_(target, source, non_blocking)


def _got(tensor: Tensor, key: Any) -> Tensor:
    keys = list(key) if isinstance(key, tuple) else [key]
    if Ellipsis in [each for each in keys if not isinstance(each, Tensor)]:
        at = next(number for number, each in enumerate(keys) if each is Ellipsis)
        there = sum(each is not None for each in keys) - 1
        keys[at : at + 1] = [slice(None)] * (tensor.ndim - there)
    dim, indices = 0, {}
    for each in keys:
        if each is None:
            tensor, dim = tensor.unsqueeze(dim), dim + 1
        elif isinstance(each, slice):
            start, stop, step = each.indices(tensor.shape[dim])
            assert step == 1
            tensor, dim = tensor.narrow(dim, start, max(0, stop - start)), dim + 1
        elif isinstance(each, Tensor):
            indices[dim] = each
            dim += 1
        else:
            tensor = tensor.select(dim, int(each))
    if not indices:
        return tensor
    return torch.ops.aten.index(tensor, [indices.get(number) for number in range(max(indices) + 1)])


@contextmanager
def fake_cuda() -> Iterator[torch.device]:
    """In it, tensors of `cuda:0` can be made and computed with; gives the device."""
    with FakeTensorMode(allow_non_fake_inputs=True), _Indexing():
        yield DEVICE
