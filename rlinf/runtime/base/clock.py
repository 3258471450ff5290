"""Virtual time: an event loop whose clock jumps to the next timer as soon as nothing is left to do.

Flows in: a coroutine, and the announcements of what really runs outside the loop. Flows out: its result, at the
virtual time at which it ended. Who wakes whom: timers, as always, each at exactly the time it was set for; a thread,
through `call_soon_threadsafe`; and nobody is left waiting for nothing, because a loop that can never do anything
again raises `Deadlock` with the list of who waits where.

    result, seconds = run_virtual(main())          # seconds of virtual time; takes real milliseconds

    with virtual() as clock:
        clock.run(main())
        print(clock.time)

Real sockets, pipes and signals are not supported: the loop looks at them only while something outside is announced
(`VirtualLoop.external`), since virtual time cannot know how long the world will take to answer.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import gc
import heapq
import itertools
import math
import selectors
import threading
import traceback
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any, TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Deadlock(RuntimeError):
    """Nothing is ready, no timer is left and nothing runs outside: no pending task can ever go on.

    The text names every pending task with the chain of awaits that it waits in, innermost last.
    """


class VirtualLoop(asyncio.SelectorEventLoop):
    """The event loop of `virtual`; `Clock.run` and `run_virtual` make and close it.

    `time()` stands still while anything is ready to run and is then set to the `when` of the next timer, never to
    `now + timeout`, so it takes exactly the values that the callers of `call_at` computed: 1,000 sleeps of 0.01 s in
    a row end at `0.01 + 0.01 + ...` to the last bit. Timers set for the same time fire in one iteration.
    A timer set for `inf` never fires.
    """

    _check_closed: Callable[[], None]
    _ready: deque[asyncio.Handle]
    _scheduled: list[asyncio.TimerHandle]

    def __init__(self, start: float = 0.0) -> None:
        """Make a loop whose `time()` begins at `start` seconds."""
        self._now = start
        self._order = itertools.count()
        self._outside: dict[object, str] = {}
        self._executor: concurrent.futures.ThreadPoolExecutor | None = None
        self.deadlock_report: Callable[[], str] | None = None
        """Its text is appended to a `Deadlock`, for those who know more about what waits on what."""
        super().__init__(_Selector(self))

    def time(self) -> float:
        """The virtual now, in seconds."""
        return self._now

    def call_at(
        self,
        when: float,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        """Call `callback(*args)` at virtual time `when`, after those set earlier for the same time."""
        self._check_closed()
        timer = _Timer(when, callback, args, self, context)
        timer.order = next(self._order)
        heapq.heappush(self._scheduled, timer)
        timer._scheduled = True
        return timer

    @property
    def _clock_resolution(self) -> float:
        # The base loop runs a timer if `when < time() + resolution`. With one unit in the last place that means
        # `when <= time()` exactly; the usual nanosecond would run timers of the near future too early and, once
        # `time()` is large, be lost in rounding, so that due timers would never run.
        return math.ulp(self._now)

    @_clock_resolution.setter
    def _clock_resolution(self, _: float) -> None:
        """The base class sets the resolution of the real clock."""

    @contextlib.contextmanager
    def external(self, what: str = "external work") -> Iterator[None]:
        """Hold virtual time still while `what` really runs outside the loop: a thread, a child process.

        Enter it on the loop's thread, before the work starts; leave it on any thread, after whatever the work has
        to say has been handed to `call_soon_threadsafe`. Jobs of `run_in_executor` and `asyncio.to_thread` are
        announced by the loop itself.
        """
        token = self._enter(what)
        try:
            yield
        finally:
            self._leave(token)

    @property
    def outside(self) -> list[str]:
        """Return what holds virtual time still at the moment."""
        return list(self._outside.values())

    def run_in_executor(
        self,
        executor: concurrent.futures.Executor | None,
        func: Callable[[*Ts], T],
        *args: *Ts,
    ) -> asyncio.Future[T]:
        """Run as on any loop; virtual time stands still until the job has ended, even if its awaiter is cancelled."""
        if executor is None:
            if self._executor is None:
                self.set_default_executor(concurrent.futures.ThreadPoolExecutor(thread_name_prefix="asyncio"))
            executor = self._executor
        assert executor is not None
        job = executor.submit(func, *args)
        future = asyncio.wrap_future(job, loop=self)
        token = self._enter(f"a thread running {getattr(func, '__qualname__', func)}")
        # Added after wrap_future's own callback, so that the result is queued before time may move again.
        job.add_done_callback(lambda _: self._leave(token))
        return future

    def set_default_executor(self, executor: concurrent.futures.ThreadPoolExecutor) -> None:  # type: ignore[override]
        """Run the jobs of `run_in_executor(None, ...)` in `executor`."""
        self._executor = executor
        super().set_default_executor(executor)

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:  # noqa: ASYNC109
        """Wait until the threads of the default executor have ended, for however long; `timeout` has no meaning."""
        with self.external("the default executor's shutdown"):
            await super().shutdown_default_executor()

    def _enter(self, what: str) -> object:
        token = object()
        self._outside[token] = what
        return token

    def _leave(self, token: object) -> None:
        # From another thread it is queued behind the thread's last words, and wakes the loop up.
        if threading.get_ident() == getattr(self, "_thread_id", None) or self.is_closed():
            self._outside.pop(token, None)
        else:
            with contextlib.suppress(RuntimeError):  # the loop was closed in between: nobody counts any more
                self.call_soon_threadsafe(self._outside.pop, token, None)

    def _pass_time(self) -> None:
        """Move the clock to the next timer; called when the loop is idle and nothing runs outside."""
        if self._ready:  # a thread that nobody announced queued something after the base class had looked
            return
        when = self._scheduled[0].when() if self._scheduled else math.inf
        if when == math.inf:
            raise Deadlock(self._deadlock())
        self._now = when

    def _deadlock(self) -> str:
        tasks = sorted(asyncio.all_tasks(self), key=lambda task: (len(task.get_name()), task.get_name()))
        lines = [
            f"at {self._now:.6g} s of virtual time nothing is ready, no timer is left and nothing runs outside the "
            f"loop, but {len(tasks)} tasks are pending:"
        ]
        lines += [_describe(task) for task in tasks]
        if self.deadlock_report is not None:
            try:
                lines.append(self.deadlock_report())
            except Exception as error:  # a broken report must not hide the deadlock
                lines.append(f"(deadlock_report failed: {error!r})")
        return "\n".join(lines)


class _Timer(asyncio.TimerHandle):
    """Sorts by the order of setting within one time, which the base class leaves to the heap."""

    __slots__ = ("order",)
    order: int
    _scheduled: bool

    def __lt__(self, other: asyncio.TimerHandle) -> bool:
        return (self.when(), self.order) < (other.when(), getattr(other, "order", -1))


class _Selector(selectors.DefaultSelector):
    """Passes virtual time instead of waiting, unless something outside is outstanding."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        outside = bool(self._loop._outside)
        if timeout != 0 and not outside:
            self._loop._pass_time()
        if not outside:
            return []
        # No timeout but a wake-up ends a real wait: timers stand still as long as work outside is outstanding.
        return super().select(0 if timeout == 0 else None)


class Clock:
    """Runs coroutines in virtual time. Each `run` goes on at the time at which the one before it ended."""

    def __init__(self) -> None:
        self._time = 0.0
        self._loop: VirtualLoop | None = None

    @property
    def time(self) -> float:
        """The virtual now in seconds; 0.0 at first."""
        return self._time if self._loop is None else self._loop.time()

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        """Run `main` to its end on a loop of its own and return its result, as `asyncio.run` does.

        Tasks left over are cancelled, asynchronous generators closed, threads of the default executor awaited. The
        event loop policy is neither used nor changed. Whatever `main` raises comes out.

        Raises:
            Deadlock: nothing can ever happen any more, though `main` (or a task that was cancelled) is pending.
            RuntimeError: called while another loop runs in this thread.
        """
        runner = asyncio.Runner(loop_factory=self._new_loop)
        try:
            result = runner.run(main)
        except BaseException as first:
            try:
                self._close(runner)
            except Deadlock as second:
                first.add_note(f"then, while the tasks left over were cancelled: {second}")
            raise
        self._close(runner)
        return result

    def _new_loop(self) -> VirtualLoop:
        self._loop = VirtualLoop(self._time)
        return self._loop

    def _close(self, runner: asyncio.Runner) -> None:
        try:
            runner.close()
        finally:
            self._time, self._loop = self.time, None


@contextlib.contextmanager
def virtual() -> Iterator[Clock]:
    """Give a `Clock` at 0.0 s whose `run` runs coroutines in virtual time."""
    yield Clock()


def run_virtual(main: Coroutine[Any, Any, T]) -> tuple[T, float]:
    """Run `main` in virtual time; return its result and the virtual seconds that it took.

    The seconds end when `main` does; what tasks left over do while they are cancelled does not count.
    Raises what `Clock.run` raises.
    """

    async def timed() -> tuple[T, float]:
        return await main, asyncio.get_running_loop().time()

    return Clock().run(timed())


def is_virtual(loop: asyncio.AbstractEventLoop | None = None) -> bool:
    """Say whether `loop` (or the running loop, if any) runs in virtual time."""
    return isinstance(loop or asyncio._get_running_loop(), VirtualLoop)


def external(what: str = "external work") -> contextlib.AbstractContextManager[None]:
    """`VirtualLoop.external` of the running loop; does nothing if that is not virtual, or there is none."""
    loop = asyncio._get_running_loop()
    return loop.external(what) if isinstance(loop, VirtualLoop) else contextlib.nullcontext()


def _describe(task: asyncio.Task[Any]) -> str:
    """Say where a suspended task waits, down the chain of what it awaits, innermost frame last."""
    frames: list[traceback.FrameSummary] = []
    awaited: Any = task.get_coro()
    while awaited is not None and not isinstance(awaited, asyncio.Future):
        frame, awaited = _look_into(awaited)
        if frame is not None:
            frames.append(traceback.FrameSummary(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
    target = f" for task {awaited.get_name()!r}" if isinstance(awaited, asyncio.Task) else ""
    return f"task {task.get_name()!r} waits{target} at\n" + "".join(traceback.format_list(frames)).rstrip()


def _look_into(awaited: Any) -> tuple[Any, Any]:
    """Return the frame of a suspended awaitable (or None) and what it awaits in turn (or None)."""
    match awaited:
        case CoroutineType():
            return awaited.cr_frame, awaited.cr_await
        case GeneratorType():
            # a call that began without a task goes on in one that holds its coroutine by this name: `FirstSteps`
            return awaited.gi_frame, awaited.gi_yieldfrom or (
                awaited.gi_frame and awaited.gi_frame.f_locals.get("work")
            )
        case AsyncGeneratorType():
            return awaited.ag_frame, awaited.ag_await
    # The objects between (a step of an async generator, the iterator of a future) have no attribute that says what
    # they stand for, but the garbage collector knows.
    awaitables = (CoroutineType, GeneratorType, AsyncGeneratorType, asyncio.Future)
    return None, next((one for one in gc.get_referents(awaited) if isinstance(one, awaitables)), None)
