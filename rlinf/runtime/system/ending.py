"""Why a program ends before its time, and what is said about it: a signal, a lost host, a stall.

Flows in: signals; losses that the transport reports, or a heartbeat finds. Flows out: the program's value, or the first
cause of its end, said in one line. Who wakes whom: the first cause cancels the program.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from rlinf.runtime.actor.host import Host
from rlinf.runtime.base.errors import HostLost
from rlinf.runtime.base.tasks import ASKING
from rlinf.runtime.transport.network import Heartbeat

if TYPE_CHECKING:
    from rlinf.runtime.transport.link import Transport

T = TypeVar("T")
End = Callable[[BaseException], None]
"""Says why the program has to end early; the first reason counts."""

GRACE = 0.5
"""Seconds that `main` gets to fail by itself, with its own error, once a host was lost; and to end when cancelled."""
OVERTAKEN = 0.2
"""Seconds by which torchrun's signal, sent to all when one process has died, may be here before word of that death."""
REPEATED = 1.0
"""Seconds after a signal within which another one is the same: torchrun passes on what a terminal sends to all."""
GO_ON = "The job ends; --resume auto goes on from its last checkpoint, torchrun --max-restarts N does so by itself."
"""Advice to whoever lost a job."""
NAMED = 6
"""Hosts and actors that a message names; a lost machine may have had hundreds."""


RESUME_ME = os.EX_TEMPFAIL
"""Exit code 75 of a program that was preempted: start it again, and it goes on."""
AT_ONCE = (signal.SIGINT, signal.SIGQUIT)
"""Signals of somebody who does not want to wait: Ctrl-C and Ctrl-\\ of a terminal."""
LEAVING = 4.0
"""Seconds of the grace that are left for ending actors and saying goodbye."""


class Stopped(SystemExit):
    """The process was told to stop by a signal; exits with 128 + its number, as shells do, or with `RESUME_ME`."""

    def __init__(self, number: int, code: int | None = None):
        super().__init__(128 + number if code is None else code)
        self.number = number
        self.name = signal.Signals(number).name


class Preemption:
    """Time to end in, once a signal has announced that the process will be killed.

    Args:
        grace: seconds from the signal to the end of the process.
        end: ends a program that has not ended by itself a little before that.
    """

    def __init__(self, grace: float, end: End) -> None:
        self._grace, self._end = grace, end
        self.asked = asyncio.Event()
        """Set when the signal comes: the program saves what it has to save, and ends."""
        self.signal = ""
        """Its name."""
        self.deadline = float("inf")
        """By the event loop's clock, when the program has to have ended."""
        self.complete = False
        """The program has nothing left to do: it does not want to be started again."""

    def ask(self, number: int) -> None:
        """The signal is here."""
        if self.asked.is_set():
            return
        loop = asyncio.get_running_loop()
        self.signal = signal.Signals(number).name
        self.deadline = loop.time() + self._grace - min(LEAVING, self._grace / 4)
        loop.call_at(self.deadline, self._end, Stopped(number, RESUME_ME))
        self.asked.set()

    def check(self) -> None:
        """The program has ended by itself, and everything is closed.

        Raises:
            SystemExit: it was asked to, and was not complete.
        """
        if self.asked.is_set() and not self.complete:
            raise SystemExit(RESUME_ME)


def ending() -> tuple[asyncio.Future[BaseException], End]:
    """Why the program has to end early, once that is so; and how to say it."""
    ending: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()

    def end(reason: BaseException) -> None:
        if not ending.done():
            ending.set_result(reason)

    return ending, end


async def conduct(program: Coroutine[Any, Any, T], host: Host, ending: asyncio.Future[BaseException]) -> T:
    """The program's value; unless it has to end early: then, if it has not failed with an error of its own, why.

    Raises:
        HostLost: after a line that says so; what the program made of it is its cause.
    """
    host.flow = task = asyncio.create_task(program)
    both: set[asyncio.Future[Any]] = {task, ending}
    await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
    if isinstance(_error(task), Exception) and host.transport.hosts > 1:
        await asyncio.wait({ending}, timeout=GRACE)  # who computes with a lost host may hear of it before we do
    reason = ending.result() if ending.done() else None
    if not task.done() and not isinstance(reason, Stopped):
        await asyncio.wait({task}, timeout=GRACE)  # what it waits for is failing: its own error says where
    if not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=GRACE)
    error = _error(task)
    if isinstance(reason, Stopped) and host.transport.hosts > 1:
        await asyncio.sleep(OVERTAKEN)
    if host.lost_hosts and (error is None or isinstance(error, Exception)):
        loss = _hosts_lost(host)  # by now it is known of all hosts of a machine
        sys.stderr.write(f"error: {loss}\n")
        raise loss from error
    if isinstance(reason, Stopped):
        sys.stderr.write(f"rlinf: stopped by {reason.name}\n")
        if error is not None:
            host.complain("while the program was being stopped", error)
        raise reason
    if task.done() and not task.cancelled() and (error is not None or reason is None):
        return task.result()
    raise reason or asyncio.CancelledError("the program cancelled itself")


def _error(task: asyncio.Task[Any]) -> BaseException | None:
    return task.exception() if task.done() and not task.cancelled() else None


# Lost hosts ------------------------------------------------------------------------------------------------------


def heartbeat(host: Host, transport: Transport, timeout: float | None, end: End, watched: Iterable[int] = ()) -> None:
    """Notice, until the host closes, which others fall silent; and end the program when one of `watched` is lost.

    Asked are those, and all that a call made here waits for.

    Args:
        timeout: seconds of silence; None asks nobody.
    """
    watched = frozenset(watched)

    def on_lost(number: int, reason: str) -> None:
        if number in watched:
            end(HostLost(reason))

    def silent(number: int, reason: str) -> None:
        _fence(host, number)
        host.lost(number, reason)

    host.on_lost.append(on_lost)
    for number in watched:
        host.link(number)  # from here on its end is noticed
    if timeout is not None:
        wanted = lambda: (watched | {sent.target for sent in host.sent.values()}) - host.lost_hosts.keys()  # noqa: E731
        host.own(Heartbeat(timeout, wanted, transport.probe, silent, host.now).run())


def _fence(host: Host, number: int) -> None:
    """Kill a silent process of this machine: woken up later it would go on, and while it sleeps torchrun waits for it.

    What computes with it in a collective then fails, instead of waiting as well.
    """
    place = host.places.get(number)
    if place is not None and place.machine == host.places[host.rank].machine and place.pid != os.getpid():
        with contextlib.suppress(OSError):
            os.kill(place.pid, signal.SIGKILL)


def _hosts_lost(host: Host) -> HostLost:
    """Return an error that says which hosts were lost, with which actors, why; and how to go on."""
    lost = [where(host, number) for number in sorted(host.lost_hosts)]
    actors = [ref._name for group in host.system.service.groups() for ref in group if ref._host in host.lost_hosts]
    when = f"{'were' if len(lost) > 1 else 'was'} lost at {time.strftime('%H:%M:%S')}"
    first = next(iter(host.lost_hosts.values())).rstrip(".")[:200]
    return HostLost(f"{_listed(lost)} {when}, and with it {_listed(actors) or 'no actor'}: {first}. {GO_ON}")


def where(host: Host, number: int) -> str:
    """A host's number, process and machine."""
    place = host.places.get(number)
    return f"host {number}" + (f" (pid {place.pid} on {place.node})" if place is not None else "")


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


# Signals ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def on_signals(end: End, ask: Callable[[int], None] | None = None) -> Iterator[None]:
    """Signals end the program in order; a second one, somewhat later, has its usual effect.

    One of `ASKING` that was ignored when the program began stays ignored: `nohup` does that with SIGHUP.

    Args:
        end: does so.
        ask: does in its place what the signals of `ASKING` want. Not once torchrun is gone, which they come from then.
    """
    parent = os.getppid()
    loop = asyncio.get_running_loop()
    first: float | None = None
    before: dict[int, Any] = {}

    def handle(number: int) -> None:
        nonlocal first
        if first is None:
            first = loop.time()
            orphaned = "TORCHELASTIC_RUN_ID" in os.environ and os.getppid() != parent
            if ask is not None and number in ASKING and not orphaned:
                ask(number)
            else:
                end(Stopped(number))
        elif loop.time() - first > REPEATED:
            give_up()
            signal.raise_signal(number)

    def give_up() -> None:
        for number in before:
            loop.remove_signal_handler(number)

    asking = [each for each in ASKING if ask is not None or each != signal.SIGUSR1]  # which has another use elsewhere
    for number in (*AT_ONCE, *(each for each in asking if signal.getsignal(each) != signal.SIG_IGN)):
        was = signal.getsignal(number)
        with contextlib.suppress(ValueError, NotImplementedError, RuntimeError):  # not the main thread
            loop.add_signal_handler(number, handle, number)
            before[number] = was
    try:
        yield
    finally:
        for each, was in before.items():  # each at once: meanwhile it would end the process as if nobody listened
            loop.remove_signal_handler(each)
            signal.signal(each, signal.SIG_DFL if was is None else was)
