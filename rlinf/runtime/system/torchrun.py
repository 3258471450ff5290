"""`rlinf.run(main)`: one program, in one process or under torchrun.

Flows in: torchrun's environment; signals; the loss of hosts. Flows out: the value of `main` on rank 0, and the
process's exit code. Who wakes whom: rank 0 runs `main`; the others serve until rank 0 says goodbye or is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from rlinf.runtime.actor.host import Host
from rlinf.runtime.base.calls import CONTROLLER, SERVICE, current_scope, enter_host
from rlinf.runtime.base.errors import ActorDied, HostLost, StallError, UserError
from rlinf.runtime.base.tasks import ASKING, Threads, cancel_all, ends_process
from rlinf.runtime.base.tensors import device_id, enter_device
from rlinf.runtime.system.ending import GO_ON, GRACE, End, Preemption, Stopped, conduct, ending, heartbeat, on_signals
from rlinf.runtime.system.system import ActorSystem, fail_when_stalled, here
from rlinf.runtime.transport.network import HOST_TIMEOUT, bind_interface
from rlinf.runtime.values.promise import Promise

if TYPE_CHECKING:
    from rlinf.runtime.transport.link import Transport

T = TypeVar("T")
Main = Callable[[ActorSystem], Awaitable[T]]

SWITCH_INTERVAL = 5e-4
"""Seconds of Python's thread switch interval. With the default of 5 ms a compute thread that runs Python keeps the
loop, and so every answer of this host, waiting that long."""
YOUNG_OBJECTS = 7000
"""Objects made, and not dropped, after which the garbage collector looks through the young ones. With the default of
700 it does so several times in a small training step, mostly over samples that live as long as the step."""
CLOSING = 20.0
"""Seconds until what does not end is left behind."""
CLOSING_SOON = 3.0
"""The same after Ctrl-C, which promises five seconds in all, and after the loss of a host, from which nothing is left
to wait for."""
FAREWELL = 3.5
"""Seconds that a host which got a signal waits for rank 0 to end the system in order."""
PR_SET_PDEATHSIG = 1


@ends_process
def run(
    main: Main[T],
    *,
    hosts: int | None = None,
    trace: bool = True,
    device_memory: Mapping[int, int] | None = None,
    stall_after: float | None = None,
    host_timeout: float | None = HOST_TIMEOUT,
    interface: str | None = None,
    grace: float = 0.0,
) -> T | None:
    """Run an async program on the actor system and return its value.

    Under torchrun rank 0 runs `main(system)` and every rank is a host that serves actors; without torchrun all hosts
    live in this process. On ranks other than 0 it returns None once the system has ended.

    Args:
        main: `async def main(system: ActorSystem)`.
        hosts: without torchrun, how many hosts; default: as many as the program names.
        trace: record spans.
        device_memory: bytes per device, for leases; default: any number of roles fits.
        stall_after: seconds after which the stall report ends the job if nothing that `main` waits for has moved: no
            call began or ended, no item came or went, no computing thread used the processor; default: never.
        host_timeout: seconds of silence after which a host counts as lost, which ends the job; None: never. Busy ones
            are not silent. To be given on every rank.
        interface: network interface to listen on. Default: `RLINF_INTERFACE`, or the loopback when all hosts are on
            this machine, or the way to MASTER_ADDR. See docs/multi-node.md.
        grace: seconds that `main` gets to end by itself after SIGTERM, SIGUSR1 or SIGHUP (`system.preemption.asked`);
            the process exits with 75 then. 0 ends it at once. To be given on every rank.

    Raises:
        Exception: what `main` raised; `HostLost` when a host was lost; `StallError`; `UserError` when the hosts could
            not meet.
        SystemExit: a signal told the process to stop; or on ranks other than 0, rank 0 was lost.
    """
    import torch

    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # on shared cores a second OpenMP thread was measured to cost up to 40 times
    sys.setswitchinterval(SWITCH_INTERVAL)
    gc.freeze()  # what was imported lives for ever; scanning it at every full collection would stall the loop
    gc.set_threshold(YOUNG_OBJECTS)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        hosts = 1
        _die_with_torchrun()
    if world == 1:
        return _run_loop(_run_local(main, hosts, trace, device_memory, stall_after, grace))
    bind_interface(interface, world)
    transport = _join(rank, world)
    if rank == 0:
        return _run_loop(_control(main, transport, trace, device_memory, stall_after, host_timeout, grace))
    if code := _run_loop(_serve(transport, trace, host_timeout, grace)):
        sys.exit(code)
    return None


@contextlib.contextmanager
def switching_often() -> Iterator[None]:
    """For a system in a program that is not ours to set up: the switch interval of `run`, and afterwards its own.

    What the program has dropped is collected before the system freezes what there is: a model lies in cycles.
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(before, SWITCH_INTERVAL))
    gc.collect()
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def _run_loop(work: Coroutine[Any, Any, T]) -> T:
    """Like `asyncio.run`, but nothing that refuses to end keeps the process."""
    import uvloop

    loop = uvloop.new_event_loop()
    loop.set_default_executor(threads := Threads())
    asyncio.set_event_loop(loop)
    try:
        task = loop.create_task(work)
        while True:
            try:
                return loop.run_until_complete(task)
            except SystemExit:  # leaves the loop from wherever it is raised; the system still ends in order
                if task.done():
                    raise
    finally:
        if not loop.run_until_complete(cancel_all(asyncio.all_tasks(loop), GRACE)):
            loop.run_until_complete(loop.shutdown_asyncgens())  # nobody may close what a task still advances
        threads.shutdown()
        asyncio.set_event_loop(None)
        loop.close()


# Joining ---------------------------------------------------------------------------------------------------------


def _join(rank: int, world: int) -> Transport:
    """Wait for all other processes. Signals end it at once: there is nothing yet to end in order.

    Raises:
        UserError: they did not meet.
    """
    from rlinf.runtime.transport.lane import lanes_over
    from rlinf.runtime.transport.torch_rpc import RpcTransport

    try:
        with _ended_by(signal.SIGINT, *ASKING):
            return lanes_over(RpcTransport(rank, world))
    except RuntimeError as error:
        at = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise UserError(
            f"rank {rank} of {world} could not join the others, who meet at {at}: {str(error).splitlines()[0][:300]}. "
            "Do all of them run, and can they reach each other by the interface of RLINF_INTERFACE?"
        ) from error


@contextlib.contextmanager
def _ended_by(*numbers: signal.Signals) -> Iterator[None]:
    """Signals end the process at once in this block, which is inside torch: a handler in Python would wait for that."""
    before: dict[signal.Signals, Any] = {}
    try:
        with contextlib.suppress(ValueError):  # not the main thread, where signals are none of our business
            for number in numbers:
                if callable(was := signal.getsignal(number)):
                    before[number] = signal.signal(number, signal.SIG_DFL) or was
        yield
    finally:
        for number, was in before.items():
            signal.signal(number, was)


def _die_with_torchrun() -> None:
    """Be told to stop when torchrun is killed: nobody else would end this process then."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _open(transport: Transport, trace: bool) -> ActorSystem:
    enter_device()
    place = here(transport.host, device=device_id())
    host = Host(transport, {transport.host: place}, trace=trace)
    system = ActorSystem(host)
    enter_host(host)
    current_scope.set(system.root)
    return system


# Rank 0 ----------------------------------------------------------------------------------------------------------


async def _run_local(
    main: Main[T],
    hosts: int | None,
    trace: bool,
    memory: Mapping[int, int] | None,
    stall_after: float | None,
    grace: float,
) -> T:
    early, end = ending()
    preemption = Preemption(grace, end) if grace else None
    with on_signals(end, None if preemption is None else preemption.ask):
        async with ActorSystem.local(hosts, trace=trace, device_memory=memory) as system:
            system.preemption = preemption
            _watch(system, stall_after, end)
            result = await conduct(_program(main, system), system._host, early)
    if preemption is not None:
        preemption.check()
    return result


async def _control(
    main: Main[T],
    transport: Transport,
    trace: bool,
    memory: Mapping[int, int] | None,
    stall_after: float | None,
    host_timeout: float | None,
    grace: float,
) -> T:
    system = _open(transport, trace)
    host, service = system._host, system.service
    service.open_leases(dict(memory) if memory is not None else None)
    early, end = ending()
    system.preemption = preemption = Preemption(grace, end) if grace else None

    async def program() -> T:
        await service.all_here.wait()
        _watch(system, stall_after, end)
        return await main(system)

    def interrupted(number: int) -> None:
        if preemption is not None and number in ASKING:
            preemption.ask(number)
        else:
            end(Stopped(number))

    service.on_interrupt = interrupted
    heartbeat(host, transport, host_timeout, end, watched=range(1, transport.hosts))
    with on_signals(end, None if preemption is None else preemption.ask):
        try:
            result = await conduct(program(), host, early)
        except BaseException as error:
            with _left_behind(host):  # what went wrong first is what the user gets to see
                await _end(system, CLOSING_SOON if isinstance(error, Stopped | HostLost) else CLOSING)
            raise
        await _end(system, CLOSING)
    if preemption is not None:
        preemption.check()
    return result


async def _program(main: Main[T], system: ActorSystem) -> T:
    return await main(system)


def _watch(system: ActorSystem, stall_after: float | None, end: End) -> None:
    async def watch(patience: float) -> None:
        try:
            await fail_when_stalled(system, patience)
        except StallError as error:
            end(error)

    if stall_after is not None:
        system._host.own(watch(stall_after))


async def _end(system: ActorSystem, seconds: float) -> None:
    """Close all actors, say goodbye to all hosts, and leave."""
    host = system._host
    error: Exception | None = None
    try:
        async with asyncio.timeout(seconds):
            await system.root.close()
    except TimeoutError:
        host.complain(f"the actors did not all end within {seconds} s")
    except Exception as first:  # the hosts must be told all the same
        error = first
    await system.service.manager.close()
    others = [other for other in range(1, host.transport.hosts) if other not in host.lost_hosts]
    retired = await system.answers({other: _on(host, other, "retire") for other in others}, seconds / 4)
    for silent in set(others) - retired.keys():
        host.complain(f"host {silent} does not answer: something blocks its event loop; it is left behind")
    graceful = not host.lost_hosts and len(retired) == len(others)
    for other in others:
        host.cast(other, SERVICE, "bye", graceful)
    if retired:
        await asyncio.wait([host.own(host.link(other).drained()) for other in retired], timeout=seconds / 4)
    await host.close(graceful)
    if error is not None and not isinstance(error, ActorDied):  # whoever is lost has nothing left to close
        raise error


def _on(host: Host, other: int, what: str) -> Promise[Any]:
    return host.call(other, SERVICE, what, f"host.{what}", (), {})


# The other ranks -------------------------------------------------------------------------------------------------


async def _serve(transport: Transport, trace: bool, host_timeout: float | None, grace: float) -> int:
    """Serve actors until the controller says goodbye or is lost; returns the exit code."""
    system = _open(transport, trace)
    host, service = system._host, system.service
    early, end = ending()
    heartbeat(host, transport, host_timeout, end, watched=[CONTROLLER])
    host.cast(CONTROLLER, SERVICE, "hello", host.places[host.rank])
    preemption = Preemption(grace, end)

    def ask(number: int) -> None:
        host.cast(CONTROLLER, SERVICE, "interrupted", number)  # its program ends by itself, and then the system
        preemption.ask(number)

    with on_signals(end, ask if grace else None):
        both: set[asyncio.Future[Any]] = {service.farewell, early}
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if not service.farewell.done() and isinstance(stopped := early.result(), Stopped):
            host.cast(CONTROLLER, SERVICE, "interrupted", stopped.number)  # it ends the system in order
            await asyncio.wait({service.farewell}, timeout=FAREWELL)
        if service.farewell.done():
            await host.close(service.farewell.result())
            return 0
        reason = early.result()
        sys.stderr.write(f"rlinf: host {host.rank} stops: {_why(reason)}\n")
        await asyncio.wait({host.own(service.retire())}, timeout=CLOSING_SOON)
        await host.close(False)
        return int(str(reason.code)) if isinstance(reason, Stopped) else 1


def _why(reason: BaseException) -> str:
    if isinstance(reason, Stopped):
        return reason.name
    return f"the controller (host 0) is gone: {str(reason).rstrip('.')}. {GO_ON}"


@contextlib.contextmanager
def _left_behind(host: Host) -> Iterator[None]:
    """Errors while ending are shown, and nothing more: something else is the reason for ending."""
    try:
        yield
    except Exception as error:
        host.complain("while ending", error)
