import ctypes
from pathlib import Path

import pytest
import torch

from rlinf.runtime.base.tensors import give_back_freed


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="the C library is not glibc")
def test_memory_of_freed_tensors_goes_back_though_a_later_tensor_lives_on():
    freed = [torch.ones(1 << 14) for _ in range(1000)]
    kept = torch.ones(1 << 14)
    freed.clear()
    before = resident()
    give_back_freed()
    assert before - resident() > 32 << 20
    assert kept.sum() == 1 << 14
