"""`rlinf.run(main)`: one program, in one process or under torchrun.

Flows in: torchrun's environment. Flows out: the value of `main` on rank 0, and the process's exit code. Who wakes
whom: rank 0 runs `main`; the others serve until rank 0 says goodbye or is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import sys
import traceback
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from .actor import current_scope
from .context import SERVICE, enter_host
from .errors import ActorDied, StallError
from .host import Host
from .payload import Place
from .system import ActorSystem, here

if TYPE_CHECKING:
    from .rpc import RpcTransport

T = TypeVar("T")
Main = Callable[[ActorSystem], Awaitable[T]]

SWITCH_INTERVAL = 5e-4
"""Seconds of Python's thread switch interval. With the default of 5 ms a compute thread that runs Python keeps the
loop, and so every answer of this host, waiting that long."""
GRACE = 0.5
"""Seconds that `main` gets to fail by itself, with its own error, once a host was lost."""


def run(
    main: Main[T],
    *,
    hosts: int | None = None,
    trace: bool = True,
    device_memory: Mapping[int, int] | None = None,
    stall_after: float | None = None,
    interface: str | None = None,
) -> T | None:
    """Run an async program on the actor system and return its value.

    Under torchrun rank 0 runs `main(system)` and every rank is a host that serves actors; without torchrun all hosts
    live in this process. On ranks other than 0 it returns None once the system has ended.

    Args:
        main: `async def main(system: ActorSystem)`.
        hosts: without torchrun, how many hosts; default: as many as the program names.
        trace: record spans.
        device_memory: bytes per device, for leases; default: any number of roles fits.
        stall_after: seconds that a wait may last before the stall report ends the job; default: for ever.
        interface: network interface that RPC listens on. Default: `RLINF_INTERFACE`, or the loopback when all hosts
            are on this machine. See docs/security.md before naming one.

    Raises:
        Exception: what `main` raised, or `ActorDied` when a host was lost.
        SystemExit: on ranks other than 0, when rank 0 was lost.
    """
    import torch

    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # on shared cores a second OpenMP thread was measured to cost up to 40 times
    sys.setswitchinterval(SWITCH_INTERVAL)
    gc.freeze()  # what was imported lives for ever; scanning it at every full collection would stall the loop
    if world == 1:
        return _run_loop(
            _run_local(main, 1 if "TORCHELASTIC_RUN_ID" in os.environ else hosts, trace, device_memory, stall_after)
        )
    _bind_interface(interface, world)
    from .rpc import RpcTransport

    transport = RpcTransport(rank, world)
    if rank == 0:
        return _run_loop(_run_controller(main, transport, trace, device_memory, stall_after))
    if not _run_loop(_serve(transport, trace)):
        sys.exit(1)
    return None


def _run_loop(work: Any) -> Any:
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


def _bind_interface(interface: str | None, world: int) -> None:
    """Tell TensorPipe and gloo where to listen, before they start."""
    interface = interface or os.environ.get("RLINF_INTERFACE")
    if interface is None and int(os.environ.get("LOCAL_WORLD_SIZE", "0")) == world:
        interface = "lo0" if sys.platform == "darwin" else "lo"
    if interface is not None:
        os.environ["TP_SOCKET_IFNAME"] = interface
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


async def _run_local(
    main: Main[T], hosts: int | None, trace: bool, memory: Mapping[int, int] | None, stall_after: float | None
) -> T:
    async with ActorSystem.local(hosts, trace=trace, device_memory=memory, stall_after=stall_after) as system:
        task = asyncio.ensure_future(main(system))
        with _stop_on_signals(task.cancel):
            return await _first_cause(task, system)


async def _run_controller(
    main: Main[T],
    transport: RpcTransport,
    trace: bool,
    memory: Mapping[int, int] | None,
    stall_after: float | None,
) -> T:
    system = _open(transport, trace)
    host, service = system._host, system.service
    service.open_leases(dict(memory) if memory is not None else None)
    lost: asyncio.Future[None] = host.loop.create_future()

    def on_lost(number: int, reason: str) -> None:
        service.lease_forget(number)
        if not lost.done():
            lost.set_exception(_host_lost(host, number, reason))

    host.on_lost.append(on_lost)
    graceful = False
    try:
        for other in range(1, transport.hosts):
            host.link(other)  # from here on its loss is noticed
        await _race(asyncio.ensure_future(service.all_here.wait()), lost)
        task = asyncio.ensure_future(main(system))
        if stall_after is not None:
            host.own(_watch(system, stall_after, lost))
        with _stop_on_signals(task.cancel):
            result = await _race(task, lost)
        graceful = True
        return result
    except asyncio.CancelledError:
        raise SystemExit("rlinf: stopped by a signal") from None
    finally:
        await _end(system, graceful and not host.lost_hosts)
        if lost.done() and not lost.cancelled():
            lost.exception()


async def _end(system: ActorSystem, graceful: bool) -> None:
    """Close all actors, say goodbye to all hosts, and leave."""
    host = system._host
    with contextlib.suppress(ActorDied):  # whoever is lost has nothing left to close
        await system.root.close()
    await system.service.manager.close()
    for other in range(1, host.transport.hosts):
        if other not in host.lost_hosts:
            host.cast(other, SERVICE, "bye", graceful)
    for other in range(1, host.transport.hosts):
        if other not in host.lost_hosts:
            await host.link(other).drained()
    await host.close(graceful)


async def _first_cause(task: asyncio.Task[T], system: ActorSystem) -> T:
    try:
        return await task
    except asyncio.CancelledError:
        raise SystemExit("rlinf: stopped by a signal") from None


async def _race(task: asyncio.Task[T], lost: asyncio.Future[None]) -> T:
    """The task's value; or, when the system fails first, that failure, unless the task itself fails in time."""
    await asyncio.wait({task, lost}, return_when=asyncio.FIRST_COMPLETED)
    if not task.done():
        await asyncio.wait({task}, timeout=GRACE)
        if not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=GRACE)
    if task.done() and not task.cancelled():
        return task.result()
    if lost.done():
        lost.result()
    raise asyncio.CancelledError


async def _watch(system: ActorSystem, stall_after: float, lost: asyncio.Future[None]) -> None:
    try:
        await system.watch(stall_after, lambda: None)
    except StallError as error:
        if not lost.done():
            lost.set_exception(error)


def _host_lost(host: Host, number: int, reason: str) -> ActorDied:
    place = host.places.get(number)
    where = f" (pid {place.pid} on {place.node})" if place is not None else ""
    actors = sorted(
        ref_name
        for what in host.system.service._names.values()
        for ref_name, where_it_is in zip(getattr(what, "names", ()), getattr(what, "hosts", ()), strict=False)
        if where_it_is == number
    )
    return ActorDied(
        f"host {number}{where} died, and with it {', '.join(actors) or 'no actor'}: {reason[:200]}. "
        "The job ends; torchrun --max-restarts starts it again from the last checkpoint."
    )


async def _serve(transport: RpcTransport, trace: bool) -> bool:
    """Serve actors until the controller says goodbye; False if it was lost instead."""
    system = _open(transport, trace)
    host, service = system._host, system.service

    def on_lost(number: int, reason: str) -> None:
        if number == 0 and not service.farewell.done():
            service.farewell.set_exception(ActorDied(reason))

    host.on_lost.append(on_lost)
    host.link(0)
    host.cast(0, SERVICE, "hello", host.places[host.rank])
    stopped = asyncio.ensure_future(_wait_for(service.farewell))
    with _stop_on_signals(stopped.cancel):
        try:
            graceful = await stopped
        except asyncio.CancelledError:
            # torchrun signals every rank, and rank 0 ends the system in order; it gets a moment for that
            graceful = await _moment(service.farewell)
        except ActorDied as error:
            print(f"rlinf: host {host.rank} stops: the controller (host 0) is gone: {error}", file=sys.stderr)
            graceful = None
    await _close_all(system)
    await host.close(bool(graceful))
    return graceful is not None


async def _wait_for(future: asyncio.Future[bool]) -> bool | None:
    return await asyncio.shield(future)


async def _moment(farewell: asyncio.Future[bool]) -> bool | None:
    await asyncio.wait({farewell}, timeout=4.0)
    if farewell.done() and farewell.exception() is None:
        return farewell.result()
    return None


async def _close_all(system: ActorSystem) -> None:
    """End the actors that are still here: the controller is gone, or did not get to it."""
    service = system.service
    for actor in [id for id in system._host.cells if id != service._cell.id]:
        try:
            await service.kill(actor)
        except Exception:  # one actor's close must not keep the others from theirs
            traceback.print_exc()


def _open(transport: RpcTransport, trace: bool) -> ActorSystem:
    places: dict[int, Place] = {transport.host: here(transport.host, device=_device())}
    host = Host(transport, places, trace=trace)
    system = ActorSystem(host)
    enter_host(host)
    current_scope.set(system.root)
    return system


def _device() -> str:
    """The unique id of this process's GPU, or "cpu"."""
    import torch

    if not torch.cuda.is_available():
        return "cpu"
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


@contextlib.contextmanager
def _stop_on_signals(stop: Callable[[], object]) -> Any:
    """SIGINT and SIGTERM call `stop` once; a second one has its usual effect."""
    loop = asyncio.get_running_loop()

    def handle(number: int) -> None:
        loop.remove_signal_handler(number)
        stop()

    handled = []
    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(ValueError, NotImplementedError, RuntimeError):  # not the main thread
            loop.add_signal_handler(number, handle, number)
            handled.append(number)
    try:
        yield
    finally:
        for number in handled:
            loop.remove_signal_handler(number)
