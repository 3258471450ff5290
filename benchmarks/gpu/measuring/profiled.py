"""What the host asks of the device while work goes on: launches, waits, bytes that cross; read off torch's profiler.

On a CPU nothing is launched: there operations of torch stand for launches, and reads of single numbers for waits, so
that the same lines run.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.measuring.clock import settled

LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch", "cudaLaunchCooperativeKernel")
"""Beginnings of names of what the host calls to have something computed; a graph is one."""
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
KINDS = ("launches", "graphs", "syncs", "kernels", "to_host", "to_host_bytes")


def watched(device: torch.device) -> profile:
    """A profiler of all threads; use it as a context, and give it to `counts`."""
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    settled(device)
    return profile(activities=activities, experimental_config=_ExperimentalConfig(profile_all_threads=True))


def counts(seen: profile, device: torch.device) -> Counter[str]:
    """What went on under a profiler that has ended, by `KINDS`: calls of the host that launch something, those among
    them that launch a graph, waits for the device, kernels that it ran, copies to the host, and their bytes."""
    found: Counter[str] = Counter(dict.fromkeys(KINDS, 0))
    for event in _events(seen):
        name, category = event.get("name", ""), event.get("cat", "")
        if device.type != "cuda":
            found["launches"] += category == "cpu_op" and name.startswith("aten::")
            found["syncs"] += name == "aten::_local_scalar_dense"
            continue
        found["graphs"] += name == "cudaGraphLaunch"
        found["launches"] += category.startswith("cuda_") and name.startswith(LAUNCHES)
        found["syncs"] += category.startswith("cuda_") and name.startswith(WAITS)
        found["kernels"] += category == "kernel"
        if category == "gpu_memcpy" and "DtoH" in name:
            found["to_host"] += 1
            found["to_host_bytes"] += int(event.get("args", {}).get("bytes", 0))
    return found


def counted(work: Callable[[], Any], device: torch.device) -> Counter[str]:
    """`counts` of some work, after a first time without looking."""
    work()
    with watched(device) as seen:
        work()
        settled(device)
    return counts(seen, device)


def each(one: Counter[str], many: Counter[str], more: int) -> dict[str, float]:
    """Of each of `more` steps by which the second piece of work is longer than the first: what only beginning and
    ending asks for is in both."""
    return {kind: round((many[kind] - one[kind]) / more, 2) for kind in KINDS}


def _events(seen: profile) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        seen.export_chrome_trace(str(path))
        found: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return found
