import ctypes
import subprocess
import sys
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


KEEPING = """
from rlinf.__main__ import share_heap
share_heap()

import resource, threading
import torch
from rlinf.runtime.base.tensors import keep_freed

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(12):
        torch.ones(10 << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def both():
    given_back = faults()
    keep_freed()
    faults()  # until freed neighbours are one block
    print(given_back, faults())

thread = threading.Thread(target=both)
thread.start()
thread.join()
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="the C library is not glibc")
def test_a_thread_gets_large_tensors_from_memory_that_others_have_left():
    printed = subprocess.run([sys.executable, "-c", KEEPING], capture_output=True, text=True, check=True).stdout
    given_back, again = map(int, printed.split())
    assert again < given_back / 5  # pages that the kernel had to clear
