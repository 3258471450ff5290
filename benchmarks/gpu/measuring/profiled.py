"""The host's requests to the device while work goes on: launches, waits, bytes that cross; read off torch's profiler.

On a CPU nothing is launched: there operations of torch stand for launches, and reads of single numbers for waits, so
that the same lines run.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.measuring.clock import settled

LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch", "cudaLaunchCooperativeKernel")
"""Beginnings of names of what the host calls to have something computed; a graph is one."""
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
GAP_US = 20.0
"""A device that has nothing to do for longer waits for its host."""
LARGEST = 10
KINDS = ("launches", "graphs", "syncs", "kernels", "to_host", "to_host_bytes")


def watched(device: torch.device) -> profile:
    """A profiler of all threads; use it as a context, then ask for its events."""
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    settled(device)
    return profile(activities=activities, experimental_config=_ExperimentalConfig(profile_all_threads=True))


def counts(events: Sequence[dict[str, Any]], device: torch.device) -> Counter[str]:
    """Count the events of a profiler, by `KINDS`: calls of the host that launch something, those among them
    that launch a graph, waits for the device, kernels that it ran, copies to the host, and their bytes."""
    found: Counter[str] = Counter(dict.fromkeys(KINDS, 0))
    for event in events:
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
    return counts(events_of(seen), device)


def each(one: Counter[str], many: Counter[str], more: int) -> dict[str, float]:
    """Counts of each of `more` steps by which the second piece of work is longer than the first: what only beginning
    and ending asks for is in both."""
    return {kind: round((many[kind] - one[kind]) / more, 2) for kind in KINDS}


def timeline(events: Sequence[dict[str, Any]], device: torch.device) -> dict[str, float | int | str]:
    """The device's work by the events of a profiler: its time, the share of it in which it worked, its kernels, the
    gaps above `GAP_US`, and the names on which it spent the most. On a CPU operators that no other calls stand for
    kernels."""
    spans = sorted((float(one["ts"]), float(one["dur"]), str(one["name"])) for one in _work(events, device))
    if not spans:
        return {"kernels": 0}
    ends = list(accumulate((start + lasting for start, lasting, _ in spans), max))
    gaps = [start - end for (start, *_), end in zip(spans[1:], ends, strict=False) if start > end]
    whole = ends[-1] - spans[0][0]
    figures: dict[str, float | int | str] = {
        "ms": whole / 1e3,
        "busy_share": 1.0 - sum(gaps) / whole if whole else 1.0,
        "kernels": len(spans),
        "gaps": sum(gap > GAP_US for gap in gaps),
        "gaps_ms": sum(gap for gap in gaps if gap > GAP_US) / 1e3,
        "largest_gap_us": max(gaps, default=0.0),
    }
    lasting, often = Counter[str](), Counter[str]()
    for _, duration, name in spans:
        lasting[name] += duration  # type: ignore[assignment]  # microseconds are no integers
        often[name] += 1
    for place, (name, duration) in enumerate(lasting.most_common(LARGEST), 1):
        figures[f"top{place}"] = f"{duration / 1e3:.2f} ms, {often[name]} x {name[:60]}"
    return figures


def _work(events: Sequence[dict[str, Any]], device: torch.device) -> Iterator[dict[str, Any]]:
    """Kernels and copies of the device; on a CPU, operators that no other calls."""
    if device.type == "cuda":
        yield from (one for one in events if one.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"))
        return
    operators = [one for one in events if one.get("cat") == "cpu_op" and one["name"].startswith("aten::")]
    ends: dict[Any, float] = {}
    for one in sorted(operators, key=lambda one: (float(one["ts"]), -float(one["dur"]))):
        if float(one["ts"]) >= ends.get(one["tid"], 0.0):
            ends[one["tid"]] = float(one["ts"]) + float(one["dur"])
            yield one


def events_of(seen: profile) -> list[dict[str, Any]]:
    """All events of a profiler that has ended; to be asked for once."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        seen.export_chrome_trace(str(path))
        found: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return found
