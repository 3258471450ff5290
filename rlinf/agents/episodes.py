"""Plays episodes of the user's program, several per task, and gathers them into groups of samples.

In: tasks, and an `async def episode(task)` that returns a sample, a number or samples; tasks that an earlier process
has begun. Out: the outcome of each task, as soon as its last episode is over: a group, or where several agents work on
it one for each, or none where every episode failed; and at any moment the open tasks, which a checkpoint keeps and from
which a later process goes on. Episodes that raise, take too long or return something else count as not drawn, and are
reported. Who wakes whom: the end of an episode starts the next one, in the order of tasks; the end of a task's last one
wakes whoever waits for tasks.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
import socket
import sys
import threading
import time
import types
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Coroutine,
    Generator,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from rlinf.agents.arguments import WrongType
from rlinf.agents.chat import handed_out
from rlinf.agents.outcome import (
    Episode,
    OutOfTime,
    Stopped,
    Tally,
    blocking_line,
    groups_of,
    here,
    out_of_time,
    remark_on,
    samples_of,
    send_spans,
    unjudged,
)
from rlinf.agents.record import Asked, Call, Record
from rlinf.config.load import RunFailure
from rlinf.data.sample import Group, Prompt, Sample
from rlinf.engines.base import Completion, PartialAnswer, PartialGroup, Request, Sampling
from rlinf.metrics.tracing import spans_here
from rlinf.runtime.base.errors import RuntimeFault, UserError, defined_at
from rlinf.runtime.base.tasks import cancel_all, start_thread
from rlinf.runtime.observe.stalls import Work
from rlinf.runtime.streams.stream import each


@dataclass(frozen=True, slots=True, eq=False)
class OpenTask:
    """A task until all of its episodes are over; `gather` goes on with it in place of the prompt.

    An episode that had begun is run again, from its first line, and what it asks of the model is answered from the
    record as long as it asks what it asked then. So its tools run again.
    """

    prompt: Prompt
    """The task."""
    done: Mapping[int, Sequence[Sample]] = field(default_factory=dict)
    """Samples of the episodes that are over, by index, without rewards of a judge."""
    failed: Mapping[int, str] = field(default_factory=dict)
    """Why the others that are over count as not drawn, by index."""
    left: Mapping[int, Sequence[Call]] = field(default_factory=dict)
    """Calls to the model of the episodes that are not over, by index; none where an episode had not begun."""

    @property
    def tokens(self) -> int:
        """Generated tokens that it holds."""
        samples = (sample for own in self.done.values() for sample in own)
        calls = (call for record in self.left.values() for call in record)
        return sum(sample.learned_tokens for sample in samples) + sum(call.tokens for call in calls)

    @property
    def oldest(self) -> int | None:
        """Version of the weights that made its oldest token; None where it holds none."""
        versions_of = [sample.column("versions") for own in self.done.values() for sample in own]
        calls = (call for record in self.left.values() for call in record)
        versions_of += [part.versions for call in calls if (part := call.answer or call.begun) is not None]
        return min((int(versions.min()) for versions in versions_of if len(versions)), default=None)


_GRACE = 5.0
"""Seconds that an episode has to end once it is cancelled."""
_BLOCKING = 1.0
"""Seconds without an `await` that are told: meanwhile no other episode went on, and no answer came."""
_BLOCKED = 3.0
"""Seconds after which a line of code that blocks is told while it still does, and interrupted if it waits for us."""
_LOOK, _LOOK_AGAIN = 1.0, 0.2
"""Seconds between two looks at the event loop; the second once an agent was found to wait for what only it can give."""
_CURE = (
    "Take a client that does not block (AsyncOpenAI, AsyncAnthropic, httpx.AsyncClient), or `await "
    "asyncio.to_thread(function)`, or write the agent as a plain `def agent(task, llm)`, which works in a thread"
)
Play = Callable[[Any], Awaitable[Any]]
"""`async def episode(task)`: a `Sample`, a number, or several samples."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a task whose episodes are all over: its groups and its failures."""

    task: int
    """Its number: the prompt's id, if it is a prompt."""
    groups: tuple[Group, ...]
    """A group for each agent that said something; none where every episode failed."""
    failed: Mapping[int, str]
    """Why episodes count as not drawn, by index."""
    tally: Tally
    """Counts of the task's episodes, such as how many failed."""
    number: int = 0
    """Position of the task among those that were played."""


@dataclass(slots=True, eq=False)
class _Played:
    """A task, from when it is read until what became of it is settled."""

    source: Any
    """To the program."""
    first: Episode
    """The task's first episode, whose siblings the others are."""
    number: int
    """Among the tasks that are played, in order."""
    waiting: dict[int, Sequence[Call]]
    """Episodes that have not begun, by index, with what an earlier process has recorded of them."""
    done: dict[int, Sequence[Sample]] = field(default_factory=dict)
    """Samples of the episodes that went well, by index."""
    failed: dict[int, str] = field(default_factory=dict)
    """Why others count as not drawn."""
    playing: dict[Episode, asyncio.Task[None]] = field(default_factory=dict)
    """Those that are under way."""
    tally: Tally = field(default_factory=Tally)
    """Counts of its episodes, such as how many failed."""

    def open(self, partial: Mapping[str, PartialAnswer]) -> OpenTask:
        """Return the part of the task that a checkpoint keeps."""
        records = {episode.index: episode.record.state(partial) for episode in self.playing} | self.waiting
        assert self.first.prompt is not None
        return OpenTask(self.first.prompt, dict(self.done), dict(self.failed), dict(sorted(records.items())))


class LoopWatch:
    """A thread that sees when code of an episode keeps the event loop from going on, says where, and ends it.

    Consumes nothing; produces a line for people, and `Stopped` in the code that blocks: at once where it waits for an
    answer of our own endpoint, which the loop would have to give; after an episode's time elsewhere. It is told by the
    loop, which it asks to answer. Code in another thread than the main one cannot be ended, only told of.

    Args:
        say: prints a line for people.
        address: where the endpoint listens; None: it does not.
    """

    def __init__(self, say: Callable[[str], None], address: Callable[[], tuple[str, int] | None]) -> None:
        self._say, self._address = say, address
        self._playing: list[float | None] = []  # seconds of an episode, of all that are played
        self._told: set[str] = set()
        self._hopeless = False  # an agent was found that waits for what only the loop can give
        self._asked: tuple[threading.Event, float] = (threading.Event(), 0.0)  # of the loop, and since when
        self._over = threading.Event()
        self._before: Any = None

    @contextlib.contextmanager
    def over(self, timeout: float | None) -> Iterator[None]:
        """Watch while episodes are played that have so many seconds each."""
        self._playing.append(timeout)
        if len(self._playing) == 1:
            self._begin()
        try:
            yield
        finally:
            self._playing.remove(timeout)
            if not self._playing:
                self._over.set()
                if self._before is not None:
                    signal.signal(signal.SIGURG, self._before)

    def _begin(self) -> None:
        loop, thread, self._over = asyncio.get_running_loop(), threading.get_ident(), threading.Event()
        main = threading.current_thread() is threading.main_thread()
        self._before = signal.signal(signal.SIGURG, self._interrupted) if main else None
        over = self._over

        def watch() -> None:
            while not over.wait(_LOOK):
                reply = threading.Event()
                self._asked = reply, time.monotonic()
                try:
                    loop.call_soon_threadsafe(reply.set)
                except RuntimeError:  # it is closed
                    return
                while not reply.wait(_LOOK_AGAIN if self._hopeless else _LOOK) and not over.is_set():
                    self._look(thread, main)

        start_thread(watch, "watches the event loop")

    def _stands(self) -> float | None:
        """Seconds for which the loop has not answered; None: it has."""
        reply, since = self._asked
        return None if reply.is_set() else time.monotonic() - since

    def _look(self, thread: int, main: bool) -> None:
        """The loop stands still: say where, once for each line, and interrupt what it waits for."""
        seconds, where = self._stands(), blocking_line(sys._current_frames().get(thread))
        if seconds is None or not where:
            return
        if seconds > _BLOCKED and where not in self._told:
            self._told.add(where)
            self._say(
                f"warning: {where} keeps the event loop from going on, for {seconds:.0f} s now: no other episode "
                f"works, and what waits there for an answer of the model waits for ever. {_CURE}"
            )
        if main and (self._hopeless or seconds > _BLOCKED):
            signal.pthread_kill(thread, signal.SIGURG)

    def _interrupted(self, _: int, frame: FrameType | None) -> None:
        """Runs in the loop's thread, inside of what blocks."""
        seconds, where = self._stands(), blocking_line(frame)
        if seconds is None or not where or here.get() is None:
            return
        if self._waits_for_us(frame):
            self._hopeless = True
            raise Stopped(UserError(f"it waits for llm.base_url by a client that blocks the event loop. {_CURE}"))
        timeout = min((each for each in self._playing if each is not None), default=None)
        if timeout is not None and seconds > timeout:
            raise Stopped(
                OutOfTime(f"it took longer than timeout={timeout:g} s, and blocked the event loop at {where}")
            )

    def _waits_for_us(self, frame: FrameType | None) -> bool:
        """Some function of a stack has a connection to our endpoint."""
        if (address := self._address()) is None:
            return False
        while frame is not None and not frame.f_code.co_filename.startswith(__file__):
            for value in frame.f_locals.values():
                connection = getattr(value, "_sock", value)
                if isinstance(connection, socket.socket):
                    with contextlib.suppress(OSError):
                        if connection.getpeername()[1] == address[1]:
                            return True
            frame = frame.f_back
        return False


class Episodes:
    """Plays tasks.

    Args:
        play: the user's program.
        n: episodes per task.
        begin: makes the record of an episode, from (task, index).
        tallies: are told what became of every episode.
        timeout: seconds of one episode; None for no limit.
        at_once: how many are played at the same time.
        judge: gives rewards to a group whose samples have none; None where they must have one.
        watch: sees when one blocks the event loop.
    """

    def __init__(
        self,
        play: Play,
        n: int,
        begin: Callable[[Any, int], Episode],
        tallies: Sequence[Tally],
        *,
        timeout: float | None,
        at_once: int,
        judge: Callable[[Group], Awaitable[Group]] | None,
        watch: LoopWatch | None = None,
    ) -> None:
        self._spans = spans_here.get()
        self._watch = watch
        self._play, self._n, self._begin, self._timeout, self._judge = play, n, begin, timeout, judge
        self._program = defined_at(play)
        self._own = Tally()  # counts alone: it lasts as long as tasks come
        self._callers = tuple(tallies)
        self._tallies = (self._own, *tallies)
        self._room = asyncio.Semaphore(at_once)
        self._holding: set[Episode] = set()  # a place in the room
        self._numbers = itertools.count()
        self._open: dict[int, _Played] = {}  # by number
        self._news: asyncio.Queue[Outcome | BaseException | None] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._left_behind: set[asyncio.Task[Any]] = set()

    async def groups(self, tasks: Any) -> AsyncIterator[Group]:
        """The groups, in order of completion.

        Args:
            tasks: as of `outcomes`.

        Raises:
            UserError: not one episode went well; the first one's exception is its cause.
        """
        count = 0
        async with contextlib.aclosing(self.outcomes(tasks)) as outcomes:
            async for outcome in outcomes:
                self._open.pop(outcome.number, None)
                for group in outcome.groups:
                    count += 1
                    yield group
        if self._own.played and not count:
            raise self._own.nothing_to_learn()

    async def outcomes(self, tasks: Any) -> AsyncGenerator[Outcome]:
        """Play tasks and yield the outcome of each, in order of completion. It counts as open until it is settled.

        Args:
            tasks: a list or a stream of them; an `OpenTask` among them goes on.
        """
        watching = contextlib.nullcontext() if self._watch is None else self._watch.over(self._timeout)
        loop = asyncio.get_running_loop()
        if not isinstance(loop.get_task_factory(), _Tasks):
            loop.set_task_factory(_Tasks(loop.get_task_factory()))
        self._start(self._read(tasks))
        try:
            with watching:
                while self._tasks or not self._news.empty():
                    news = await self._news.get()
                    if isinstance(news, BaseException):
                        raise news
                    if news is not None:
                        yield news
        finally:
            await cancel_all(self._tasks)
            await cancel_all(self._left_behind, _GRACE)
            self._open.clear()

    # What is open -----------------------------------------------------------------------------------------------

    def open(self, partial: Mapping[str, PartialAnswer]) -> list[OpenTask]:
        """The tasks that were read and are not settled, in the order in which they came; those that are no prompts are
        left out.

        Args:
            partial: how far answers of the model are that have not ended, by the names of their calls.
        """
        return [task.open(partial) for task in self._open.values() if task.first.prompt is not None]

    def settled(self, ids: Collection[int]) -> None:
        """Whoever reads `outcomes` has kept what became of these tasks."""
        for number in [number for number, task in self._open.items() if task.first.task in ids and not _left(task)]:
            del self._open[number]

    async def drop(self, ids: Collection[int]) -> None:
        """End what is left of these tasks, and say nothing of them."""
        dropped = [self._open.pop(number) for number, task in [*self._open.items()] if task.first.task in ids]
        for task in dropped:
            task.waiting.clear()
        await cancel_all([playing for task in dropped for playing in task.playing.values()])

    # Playing ----------------------------------------------------------------------------------------------------

    async def _read(self, tasks: Any) -> None:
        async for value in each(tasks):
            task = self._begin_task(value)
            if not task.waiting:  # all of it was over when the checkpoint was written
                self._start(self._over(task))
            while task.waiting:
                await self._room.acquire()
                if not task.waiting:  # it was dropped meanwhile
                    self._room.release()
                    break
                index = min(task.waiting)
                calls = task.waiting.pop(index)
                episode = task.first.sibling(index, Record(calls))
                self._holding.add(episode)
                playing = task.playing[episode] = self._start(self._one(task, episode))
                playing.add_done_callback(lambda _, task=task, episode=episode: self._ended(task, episode))  # type: ignore[misc]

    def _begin_task(self, value: Any) -> _Played:
        """A task that is to be played."""
        number = next(self._numbers)
        if isinstance(value, OpenTask):
            task = _Played(
                value.prompt,
                self._begin(value.prompt, 0),
                number,
                dict(value.left),
                dict(value.done),
                dict(value.failed),
            )
        else:
            task = _Played(value, self._begin(value, 0), number, dict.fromkeys(range(self._n), ()))
        self._open[number] = task
        return task

    def _start(self, work: Any) -> asyncio.Task[None]:
        """Run it as a task of ours, whose end is news."""
        task = asyncio.create_task(work, name="episode")
        self._tasks.add(task)

        def ended(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            error = None if task.cancelled() else task.exception()
            self._news.put_nowait(error)

        task.add_done_callback(ended)
        return task

    async def _one(self, task: _Played, episode: Episode) -> None:
        here.set(episode)
        tallies = (task.tally, *self._tallies)
        try:
            returned = await self._within(task, episode)
            task.done[episode.index] = samples_of(returned, episode, self._judge is not None)
        except Exception as error:
            if isinstance(error, (RunFailure, RuntimeFault)) and not isinstance(error, UserError):
                raise  # a lost actor, or an environment that cannot be kept up, is not the episode's own failure
            task.failed[episode.index] = remark = remark_on(error, self._program)
            for tally in tallies:
                tally.failure(episode, error, remark)
        finally:
            self._ended(task, episode)
        for tally in tallies:
            tally.ended(episode)
        if not _left(task):
            await self._over(task)

    def _ended(self, task: _Played, episode: Episode) -> None:
        """An episode is over, or was cancelled, perhaps before its first line."""
        if episode in self._holding:
            self._holding.remove(episode)
            self._room.release()
            del task.playing[episode]
            episode.end()
            if self._spans is not None:
                send_spans(episode, task.failed.get(episode.index), self._spans)

    async def _over(self, task: _Played) -> None:
        """All episodes of a task are over."""
        groups = groups_of(task.done) if task.done else []
        if self._judge is not None:
            groups = [await self._judge(group) if any(map(unjudged, group.samples)) else group for group in groups]
        rewards = [reward for group in groups for reward in group.rewards]
        if rewards and task.first.prompt is not None:
            for tally in (task.tally, *self._callers):
                tally.rewarded.append((task.first.prompt, sum(rewards) / len(rewards)))
        if task.number in self._open:
            failed = dict(sorted(task.failed.items()))
            self._news.put_nowait(Outcome(task.first.task, tuple(groups), failed, task.tally, task.number))

    async def _within(self, played: _Played, episode: Episode) -> Any:
        """Run an episode within its time limit and return its result. One that does not end when it is cancelled is
        left behind: it is cancelled once more with everything else."""

        def blocked(seconds: float) -> None:
            for tally in (played.tally, *self._tallies):
                tally.blocked = max(tally.blocked, seconds)

        playing = self._play(handed_out(played.source))
        if not isinstance(playing, Awaitable):
            raise WrongType("episode: it is no `async def` function; it returned without being awaited")
        task = asyncio.create_task(_awaited(playing, blocked))
        try:
            with Work(f"episode {episode.index} of task {episode.task}", playing, episode.progress):
                await asyncio.wait([task], timeout=self._timeout)
            if task.cancelled():
                raise UserError("CancelledError: it cancelled itself, or what it awaited was cancelled")
            if task.done():
                return task.result()
            raise out_of_time(playing, self._timeout or 0.0)
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait([task], timeout=_GRACE)
            if not task.done():
                self._left_behind.add(task)
                task.add_done_callback(self._left_behind.discard)


def _left(task: _Played) -> bool:
    """Some of its episodes are not over."""
    return bool(task.waiting or task.playing)


async def _awaited(playing: Awaitable[Any], blocked: Callable[[float], None]) -> Any:
    """Await an episode's result; `blocked` is called with long times between its awaits."""
    return await _timed(playing, blocked)


@types.coroutine
def _timed(playing: Awaitable[Any], blocked: Callable[[float], None]) -> Generator[Any, Any, Any]:
    """Awaits, step by step, and looks at the clock before and after each."""
    steps: Any = playing.__await__()
    thrown: BaseException | None = None
    while True:
        began = time.monotonic()
        try:
            waits_for = steps.send(None) if thrown is None else steps.throw(thrown)
        except StopIteration as end:
            return end.value
        except (SystemExit, GeneratorExit, Stopped) as error:
            if error is thrown and isinstance(error, GeneratorExit):
                raise
            raise _ended_by(error).with_traceback(error.__traceback__) from None
        finally:
            if (seconds := time.monotonic() - began) > _BLOCKING:
                blocked(seconds)
        thrown = None
        try:
            yield waits_for
        except BaseException as error:  # of whoever waits, such as a cancellation: it is the play's
            thrown = error


class _Surviving(Coroutine[Any, Any, Any]):
    """A coroutine of an episode's own task, in which `sys.exit` ends the task: asyncio lets it end the event loop."""

    def __init__(self, work: Coroutine[Any, Any, Any]) -> None:
        self._work = work

    def send(self, value: Any) -> Any:
        try:
            return self._work.send(value)
        except SystemExit as error:
            raise _ended_by(error).with_traceback(error.__traceback__) from None

    def throw(self, *error: Any) -> Any:
        try:
            return self._work.throw(*error)
        except SystemExit as caught:
            raise _ended_by(caught).with_traceback(caught.__traceback__) from None

    def close(self) -> None:
        self._work.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        return (yield from self._work.__await__())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


@dataclass(frozen=True, slots=True)
class _Tasks:
    """Makes the tasks of an event loop as before, and those of episodes so that they survive."""

    before: Any

    def __call__(self, loop: asyncio.AbstractEventLoop, work: Any, **more: Any) -> Any:
        if here.get() is not None:
            work = _Surviving(work)
        return asyncio.Task(work, loop=loop, **more) if self.before is None else self.before(loop, work, **more)


def _ended_by(error: SystemExit | GeneratorExit | Stopped) -> Exception:
    """Return the error of an episode that raised an exception meant to end programs, event loops or generators."""
    if isinstance(error, Stopped):
        return error.why
    return UserError(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)


KINDS: tuple[type[Any], ...] = (PartialGroup, Completion, PartialAnswer, Request, Sampling, OpenTask, Call, Asked)
"""Dataclasses of which half answers and open tasks are made, for checkpoints."""
