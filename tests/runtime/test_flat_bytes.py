"""Every tensor has bytes, whatever its strides."""

import pytest
import torch

from rlinf.runtime.base.tensors import flat_bytes


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(3).expand(2, 3),
        torch.tensor([7]).expand(1, 1),
        torch.tensor(7).expand(1),
        torch.full((1,), -1)[::2],
        torch.arange(12.0).reshape(3, 4).t(),
        torch.arange(6, dtype=torch.bfloat16)[1::2],
        torch.zeros(0, 3),
        torch.tensor(True),
        torch.ones(2, 2, requires_grad=True),
    ],
)
def test_bytes_make_the_same_tensor_again(tensor):
    raw = flat_bytes(tensor).numpy().tobytes()
    assert len(raw) == tensor.nbytes
    again = torch.frombuffer(bytearray(raw), dtype=tensor.dtype).reshape(tensor.shape) if raw else torch.zeros(0, 3)
    assert torch.equal(again, tensor)


def test_contiguous_memory_is_not_copied():
    tensor = torch.zeros(4, dtype=torch.int16)
    flat_bytes(tensor)[0] = 5
    assert tensor[0] == 5
