"""Common part of all contestants: what is measured, for how long, and how it is reported. Standard library only.

A contestant is a program that takes `--groups calls,tensors,…`, measures the rows of these groups and prints one line
of JSON, `{"name": …, "version": …, "rows": {row: number}}`. `benchmarks.runtime` runs contestants in turn, many times,
and compares medians. Times are in seconds, rates per second.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Awaitable, Callable

GROUPS = ("calls", "cold", "tensors", "queues", "overlap", "idle")
# Bytes of the tensors that are sent; float32. Everybody sends ones: zeros may be pages that were never written, all of
# them one page of zeros that stays in the cache, and copying those is up to three times faster than memory is.
SIZES = {
    "1KB": 1_000,
    "10KB": 10_000,
    "100KB": 100_000,
    "1MB": 1_000_000,
    "10MB": 10_000_000,
    "100MB": 100_000_000,
    "400MB": 400_000_000,
}
CONCURRENT = 256
PIPELINE_ITEMS = 200  # enough that filling and draining the pipeline weighs little
STAGE = 0.010

IDLE_SECONDS = 5.0
CALL_SECONDS = 1.0
RATE_SECONDS = 1.0
TENSOR_SECONDS = 0.4  # for one size; the large ones take their least number of sends instead
WARM_UP = 0.2  # of the time: first calls open connections, import code and touch fresh memory


def parse_groups() -> set[str]:
    """The groups that this process was asked to measure."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--groups", default=",".join(GROUPS))
    groups = set(parser.parse_args().groups.split(","))
    if unknown := groups - set(GROUPS):
        parser.error(f"unknown group {', '.join(sorted(unknown))}; there are {', '.join(GROUPS)}")
    return groups


def report(name: str, version: str, rows: dict[str, float]) -> None:
    """Prints the result as the last line of the output."""
    print(json.dumps({"name": name, "version": version, "rows": rows}), flush=True)


async def latencies(call: Callable[[], Awaitable[object]], seconds: float, least: int = 5) -> list[float]:
    """Times of single calls, one after another, for `seconds` and at least `least` calls, after a warm-up."""
    end = time.perf_counter() + seconds * WARM_UP
    await call()
    while time.perf_counter() < end:
        await call()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < least or time.perf_counter() < end:
        start = time.perf_counter()
        await call()
        times.append(time.perf_counter() - start)
    return times


async def first(call: Callable[[float], Awaitable[object]], count: int = 5) -> list[float]:
    """Times of the first calls of a process, which get the number of the call; nothing warms them up."""
    times = []
    for number in range(count):
        start = time.perf_counter()
        await call(float(number))
        times.append(time.perf_counter() - start)
    return times


def latencies_blocking(call: Callable[[], object], seconds: float, least: int = 5) -> list[float]:
    """`latencies` of a call that blocks."""

    async def blocking() -> None:
        call()

    running = latencies(blocking, seconds, least)
    try:
        while True:  # nothing in it suspends, so no event loop is needed and none disturbs
            running.send(None)
    except StopIteration as done:
        times: list[float] = done.value
        return times


async def rate(burst: Callable[[], Awaitable[object]], size: int, seconds: float = RATE_SECONDS) -> float:
    """Things per second when `burst` does `size` of them at once, burst after burst: the median burst."""
    return size / statistics.median(await latencies(burst, seconds))


def median(times: list[float]) -> float:
    return statistics.median(times)


def percentile(times: list[float], percent: float) -> float:
    ordered = sorted(times)
    return ordered[min(len(ordered) - 1, round(percent / 100 * (len(ordered) - 1)))]


def call_rows(times: list[float]) -> dict[str, float]:
    return {"call_p50": percentile(times, 50), "call_p99": percentile(times, 99)}
