"""One suite, four worlds: what the behaviour tests share, and the program that runs them under torchrun.

`local` hands values over by reference, `serialize` pickles all that goes between its hosts; `rpc` and `lane` are two
processes started by torchrun, which talk by torch RPC alone or by the lane beside it. A behaviour test is an
`async def` with the one argument `system`. In the first two worlds pytest runs it; in the others it is run, with all
others of its kind, by one torchrun of this file, and pytest reports the outcome (see `conftest.py`). After each,
nothing may be left over on any host.

What is built upon calls, values and streams, such as scopes and leases, runs in `lane` alone of the last two: it cannot
tell which of them carries its frames.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import json
import logging
import os
import sys
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import rlinf
from rlinf import Actor, ActorSystem, endpoint
from rlinf.runtime.actor.host import Host
from rlinf.runtime.base.calls import current_scope
from rlinf.runtime.base.clock import is_virtual

WORLDS = ("local", "serialize", "rpc", "lane")
PROCESSES = ("rpc", "lane")
"""Worlds of real processes; each is also the value of `RLINF_TRANSPORT` in it."""
DEADLINE = 30.0
"""Seconds for one test; a hanging one must not hold the others of its session, nor a busy machine fail one."""

DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64),
    *(torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.complex32, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
    torch.float4_e2m1fn_x2,
]


@contextlib.asynccontextmanager
async def opened(world: str, hosts: int = 2) -> AsyncIterator[ActorSystem]:
    """A system of the kind that runs in this process."""
    async with ActorSystem.local(hosts, serialize=world == "serialize") as system:
        yield system


async def run_behaviour(test: Callable[[ActorSystem], Awaitable[None]], system: ActorSystem) -> None:
    """Run a test, and see that it leaves nothing behind and nothing unsaid."""
    complaints: list[str] = []
    loop = asyncio.get_running_loop()
    previous = loop.get_exception_handler()
    loop.set_exception_handler(lambda _, told: complaints.append(f"{told['message']}: {told.get('exception')!r}"))
    try:
        async with asyncio.timeout(DEADLINE):
            async with system.scope() as scope:
                token = current_scope.set(scope)
                gc.disable()  # what is dropped must go without the collector's help, which may come late
                try:
                    await test(system)
                finally:
                    gc.enable()
                    current_scope.reset(token)
            await nothing_left(system)
    finally:
        loop.set_exception_handler(previous)
    assert complaints == [], "the loop was told of errors that nobody has seen"


def left_on(host: Host) -> dict[str, Any]:
    """What a host still has in hand."""
    found = {
        "sent": [sent.name for sent in host.sent.values()],
        "serving": [task.get_name() for task in host.serving.values()],
        "running": [promise.name for promise in host.running],
        "kept": list(host.values.kept),
        "copies": list(host.values.relay.copies),
        "queues": [queue.name for queue in host.system.queues.all()],
        "held": [queue.name for queue in host.system.queues.held],
        "tasks": [str(task) for task in host._tasks if task.get_coro().__qualname__ != "Heartbeat.run"],  # type: ignore[union-attr]
        "cells": [cell.name for cell in host.cells.values() if cell.name not in ("host", "probe[0]")],
        "arena": host.values.arena.statistics().slots if host.values.arena is not None else 0,
    }
    return {what: value for what, value in found.items() if value}


class Probe(Actor):
    """Looks at the host it lives on."""

    @endpoint
    async def left(self) -> dict[str, str]:
        gc.collect()
        left = left_on(self._cell.host)
        for where in ("serving", "running"):
            if len(left.get(where, ())) == 1:  # this call
                del left[where]
        return {what: repr(value) for what, value in left.items()}

    @endpoint
    async def kept(self) -> int:
        return len(self._cell.host.values.kept)


_probes: dict[int, Any] = {}


async def nothing_left(system: ActorSystem, seconds: float = 20.0) -> None:
    """Wait until no host has anything in hand: so many seconds of the loop's own time, which may be virtual.

    By any other clock, how far messages get meanwhile would depend on how fast garbage is collected.
    """
    loop = asyncio.get_running_loop()
    deadline, pause = loop.time() + seconds, 0.25 if is_virtual(loop) else 0.005
    while True:
        gc.collect()
        left = await _left(system)
        if not any(left.values()):
            return
        if loop.time() > deadline:
            raise AssertionError("left over: " + json.dumps(left, indent=2))
        await asyncio.sleep(pause)  # word of collected handles is on its way


async def _left(system: ActorSystem) -> dict[int, Any]:
    if system._network is not None:
        return {n: {k: repr(v) for k, v in left_on(s._host).items()} for n, s in system._network.systems.items()}
    there = {n: await probe.left() for n, probe in _probes.items()}  # first: its own traces are on this host
    return {0: {k: repr(v) for k, v in left_on(system._host).items()}, **there}


async def kept_on(system: ActorSystem, host: int) -> int:
    """How many values a host keeps for others."""
    if system._network is not None:
        return len(system._network.system(host)._host.values.kept)
    if host == system.host:
        return len(system._host.values.kept)
    count: int = await _probes[host].kept()
    return count


async def until(condition: Callable[[], Any]) -> None:
    """Wait until `condition()`, awaited if need be, is true; the test's deadline ends it."""
    while True:
        value = condition()
        if value if not asyncio.iscoroutine(value) else await value:
            return
        await asyncio.sleep(0.002)


# Under torchrun --------------------------------------------------------------------------------------------------


async def session(system: ActorSystem) -> None:
    """Run the tests named on the command line as module:function, and write an outcome for each as a line of JSON."""
    out, *names = sys.argv[1:]
    gc.freeze()
    lanes = getattr(system._host.transport, "_lanes", {})
    async with asyncio.timeout(DEADLINE):
        while os.environ["RLINF_TRANSPORT"] == "lane" and len(lanes) < system.hosts - 1:
            await asyncio.sleep(0.001)  # so that the tests run over what they are to run over
    for host in range(1, system.hosts):
        _probes[host] = (await system.spawn(Probe, hosts=[host], name="probe"))[0]
    with Path(out).open("w") as file:
        for name in names:
            module, _, function = name.partition(":")
            start = time.perf_counter()
            error = ""
            try:
                await run_behaviour(getattr(importlib.import_module(module), function), system)
            except pytest.skip.Exception as skipped:
                error = f"skipped: {skipped}"
            except BaseException as failure:
                error = "".join(traceback.format_exception(failure))
                if not isinstance(failure, Exception | pytest.fail.Exception):
                    raise
            print(json.dumps([name, error, time.perf_counter() - start]), file=file, flush=True)


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    from tests.runtime import worlds  # under its own name, so that what it defines can be sent

    rlinf.run(worlds.session)
