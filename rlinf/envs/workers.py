"""Simulators in supervised child processes: a pool, its slices, which coroutines act on, and the program of a process.

A slice takes chunks of actions, one call at a time, and returns `Chunk`s of all its environments: it sends every worker
its share and wakes when the last has answered; meanwhile other slices, and all else, go on. A worker serves one slice
at a time, so that while it steps one slice the policy can decide for another.

A worker that crashes or hangs is started anew, and every environment in it begins another episode; the chunk says which
were lost. A call waits for the worker's answer, its death or the deadline; after a death it waits until the worker's
next life has begun new episodes. Nothing else stops, and no other worker notices.

The program of a worker has an environment for each slice. It answers calls by name, one at a time, with what an
`Environment` returns, as arrays instead of tensors: an array crosses to another process in a tenth of the time. In a
process that was started anew environments have no episodes: it says so instead of failing, and new ones are begun.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import threading
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, NamedTuple, Protocol, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from rlinf.config.importing import resolve
from rlinf.envs.base import ActionSpec, ArraySpec, CannotRender, CannotSimulate, Simulator, SimulatorLost
from rlinf.envs.environment import Chunk, Environment, Rules, Start, joined_chunks, joined_starts, lost_chunk, of_steps
from rlinf.envs.video import Recorder, Recording
from rlinf.runtime.base.errors import RuntimeFault, UserError
from rlinf.runtime.base.tensors import choose_device, device_of_threads, own_device, work_on
from rlinf.runtime.processes.supervisor import CallTimeout, ChildDied, Worker

logger = logging.getLogger(__name__)

_STOP = 1.5
"""Seconds in which a process may close its simulators before it is killed. They have nothing to save, and some take
longer: within `CLOSE_DEADLINE`, or the actor that waits for it is given up."""
MOST_LOSSES = 5
"""Losses of a worker's environments, with no episode finished between, after which it is given up: a simulator that
cannot finish one episode in so many processes needs a person."""


class EnvironmentLost(RuntimeFault):
    """A worker's simulator died, hung or gave numbers that are not finite again and again, and finished no episode
    between; or it raised."""


_FRAMES = 4
"""Number of innermost frames of a traceback within this process that an error shows: the simulator's own."""


def told_by(name: str, error: Exception) -> EnvironmentLost:
    """Error for what a simulator raised, with the one traceback that leads into it; of pictures that it cannot draw, or
    a remote one that is gone, the line.

    Args:
        name: of the actor.
        error: from the worker's process, with its traceback as a note, or from a thread of this one.
    """
    if isinstance(error, CannotRender | CannotSimulate):
        return EnvironmentLost(f"{name}: {error}")
    notes: list[str] = getattr(error, "__notes__", [])
    remote = next((note for note in notes if note.startswith("raised in ")), None)
    where = remote or "".join(traceback.format_exception(error, limit=-_FRAMES))
    return EnvironmentLost(f"{name}: the simulator raised {type(error).__name__}: {error}\n{where.rstrip()}")


@dataclasses.dataclass(frozen=True, slots=True)
class SliceRange:
    """Environments of one worker in one slice."""

    first: int
    """Number of the first, over all workers and slices."""
    count: int
    """How many."""


class Steps(NamedTuple):
    """An uneventful chunk on its way: what `of_steps` takes, but for numbers of episodes, which both sides know."""

    rewards: np.ndarray
    """float32 [N, C]"""
    observation: dict[str, np.ndarray]
    """N rows."""
    instructions: tuple[str, ...] | None
    """N texts."""


class Program:
    """The environments of one worker.

    Args:
        simulator: dotted path of the adapter, or the class itself.
        options: its keyword arguments besides `num_envs`.
        rules: how episodes begin and end.
        ranges: one per slice.
        recording: which episodes become videos.
        device: number of the GPU that its simulators take, if they take one; None: that of this process, as here.
        travels: what it returns goes to another process.
    """

    def __init__(
        self,
        simulator: str | type[Simulator],
        options: Mapping[str, Any],
        rules: Rules,
        ranges: tuple[SliceRange, ...],
        recording: Recording | None,
        device: int | None = None,
        travels: bool = True,
    ):
        if device is not None:
            choose_device(device)  # a simulator that computes on it enters it: others must not take memory of it
        adapter: Any = resolve(simulator) if isinstance(simulator, str) else simulator
        self._environments = [
            Environment(
                adapter(num_envs=span.count, **options),
                rules,
                first=span.first,
                recorder=None if recording is None else Recorder(recording),
            )
            for span in ranges
        ]
        self._begun = [False for _ in ranges]
        self._travels = travels or self._environments[0].simulator.device.type != "cpu"

    def pauses(self, tell: Callable[[bool], None]) -> None:
        """Have `tell` called around the resets within a step: they count against no deadline of steps."""
        for environment in self._environments:
            environment.pause = tell

    def specs(self) -> tuple[dict[str, ArraySpec], ActionSpec, int | None]:
        """Specifications of the simulator: observations, actions, and steps in an episode at most."""
        environment = self._environments[0]
        simulator = environment.simulator
        return dict(simulator.observation_spec), simulator.action_spec, environment.max_steps

    def reset(self, part: int, epoch: int, episode: np.ndarray | None) -> Any:
        """`Environment.reset` of one slice; a text says why it has no episodes."""
        numbers = None if episode is None else torch.from_numpy(episode)
        return self._started(part, lambda: self._environments[part].reset(epoch, numbers))

    def step(self, part: int, actions: np.ndarray) -> Any:
        """`Environment.step` of one slice; a text says why it has no episodes."""

        def step() -> Any:
            chunk = self._environments[part].step(torch.from_numpy(actions))
            return _packed_chunk(chunk) if self._travels else chunk

        return self._or_lost(part, step)

    def save(self, part: int) -> Any:
        """`Environment.state_dict` of one slice; a text says why it has no episodes."""
        return self._or_lost(part, self._environments[part].state_dict)

    def load(self, part: int, state: dict[str, Any]) -> Any:
        """`Environment.load_state_dict` of one slice; a text says why it has no episodes."""
        return self._started(part, lambda: self._environments[part].load_state_dict(state))

    def tell(self, part: int, method: str, *args: Any) -> None:
        """A method of one slice's `Environment` that returns nothing."""
        getattr(self._environments[part], method)(*args)

    def _started(self, part: int, call: Callable[[], Start]) -> Any:
        self._begun[part] = True
        return self._or_lost(part, lambda: packed(call()))

    def _or_lost(self, part: int, call: Callable[[], Any]) -> Any:
        if not self._begun[part]:
            return "its process is new"
        try:
            return call()
        except SimulatorLost as error:
            self._begun[part] = False
            return str(error)

    def close(self) -> None:
        """Close all simulators."""
        for environment in self._environments:
            environment.close()


def _packed_chunk(chunk: Chunk) -> Any:
    if chunk.uneventful and chunk.interventions is None:
        return Steps(packed(chunk.rewards), packed(chunk.observation), chunk.instructions)
    return packed(chunk)


def packed(value: Any) -> Any:
    """A `Start` or `Chunk` with arrays in the place of tensors."""
    if isinstance(value, Tensor):
        return value.cpu().numpy()
    if isinstance(value, dict):
        return {name: packed(each) for name, each in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return type(value)(*(packed(getattr(value, field.name)) for field in dataclasses.fields(value)))
    return value


def unpacked(value: Any) -> Any:
    """The inverse of `packed`."""
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    if isinstance(value, dict):
        return {name: unpacked(each) for name, each in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return type(value)(*(unpacked(getattr(value, field.name)) for field in dataclasses.fields(value)))
    return value


@dataclasses.dataclass(frozen=True, slots=True)
class Processes:
    """Worker processes: how they are called, and how long they may take."""

    name: str = "env"
    """They are name.0, name.1, …"""
    step_timeout: float = 60.0
    """Seconds that one has for the steps of a chunk; it is killed and replaced after that."""
    reset_timeout: float = 300.0
    """Seconds for beginning, saving or restoring episodes."""
    start_timeout: float = 300.0
    """Seconds from the start of a process until its simulators are made, and for the episodes begun in one chunk."""


class Caller(Protocol):
    """Interface to the place where a `Program` runs: a `Worker`, or a thread."""

    name: str

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    def call(self, method: str, *args: Any, timeout: float | None = None) -> Awaitable[Any]: ...


class WorkerSlice:
    """The environments that one worker has in one slice, and what must be known to begin anew if it dies."""

    def __init__(self, worker: Caller, part: int, span: SliceRange, rules: Rules, processes: Processes):
        self.span = span
        self.closing = False
        self._worker = worker
        self._part = part
        self._group = rules.group_size
        self._processes = processes
        self._epoch: int | None = None
        self._episode = torch.zeros(span.count, dtype=torch.int64)
        self._running = torch.zeros(span.count, dtype=torch.bool)
        self._losses = 0
        self._weights: tuple[float, ...] | None = None  # of tasks
        self._dropped = np.zeros(span.count, np.int64)  # episodes since one of the environment was finished
        self._owed: Start | None = None  # begun after a loss that no chunk has told of yet

    async def call(self, method: str, *args: Any) -> Any:
        """Call the program for this slice; not made up for if the worker dies."""
        return await self._worker.call(method, self._part, *args, timeout=self._processes.reset_timeout)

    async def weigh(self, weights: Sequence[float]) -> None:
        """`Environment.weigh`, now and whenever the process is replaced."""
        self._weights = tuple(weights)
        with suppress(ChildDied, CallTimeout):  # the next step finds it out, and what follows on it weighs
            await self.call("tell", "weigh", self._weights)

    async def reset(self, epoch: int) -> Start:
        """`Environment.reset`; a death meanwhile costs the episodes of the lowest numbers."""
        self._epoch = epoch
        return self._started(await self._begin(torch.full((self.span.count,), -1), None))

    async def step(self, actions: Tensor) -> Chunk:
        """`Environment.step`, or the chunk of a loss."""
        self._check_begun()
        died: Exception | None = None
        packed: Any = "a loss was told of before"
        if self._owed is None:
            try:
                packed = await self._worker.call(
                    "step",
                    self._part,
                    actions.detach().cpu().contiguous().numpy(),
                    timeout=self._processes.step_timeout,
                )
            except (ChildDied, CallTimeout) as error:
                packed, died = str(error), error
        if isinstance(packed, str):  # why there are no episodes
            start = self._owed or await self._redraw(packed, died)
            chunk = lost_chunk(start, self._episode, self._running, actions.shape[1])
        elif isinstance(packed, Steps):
            observation = unpacked(packed.observation)
            chunk = of_steps(unpacked(packed.rewards), observation, self._episode, packed.instructions)
        else:
            chunk = packed if isinstance(packed.rewards, Tensor) else unpacked(packed)
            if not chunk.uneventful:
                self._count_dropped(chunk)
        self._owed = None
        self._episode, self._running = chunk.next_episode, chunk.running
        if chunk.episodes:
            self._losses = 0
        return chunk

    def _count_dropped(self, chunk: Chunk) -> None:
        """Warn of episodes that were dropped.

        Raises:
            EnvironmentLost: an environment drops all of its episodes.
        """
        for remark in chunk.remarks:
            logger.warning("an episode is dropped: %s, in %s", remark, self._worker.name)
        self._dropped += chunk.lost.numpy()
        for episode in chunk.episodes:
            self._dropped[episode.env - self.span.first] = 0
        if int(self._dropped.max()) > MOST_LOSSES:
            raise EnvironmentLost(
                f"environment {self.span.first + int(self._dropped.argmax())} ({self._worker.name}) dropped "
                f"{int(self._dropped.max())} episodes and finished none between: {chunk.remarks[-1]}"
            )

    async def save(self) -> dict[str, Any]:
        """`Environment.state_dict`, and what this side knows."""
        self._check_begun()
        while isinstance(saved := await self._saved(), str | Exception):
            died = saved if isinstance(saved, Exception) else None
            self._owed = await self._redraw(str(saved), died)
        owed = self._owed is not None
        counters = {"episode": self._episode, "running": self._running, "epoch": self._epoch, "owed": owed}
        return {"environment": saved, "told": counters}

    async def load(self, state: dict[str, Any]) -> Start:
        """`Environment.load_state_dict`, and what this side knew."""
        counters = state["told"]
        while isinstance(reply := await self.call("load", state["environment"]), str):
            self._count_loss(reply)
            if self._losses > MOST_LOSSES:
                raise EnvironmentLost(f"environments {self._numbers()} cannot go on from what was saved: {reply}")
        start = unpacked(reply)
        self._epoch = counters["epoch"]
        self._started(start)
        if counters["owed"]:
            self._owed = start
        self._episode, self._running = counters["episode"], counters["running"]
        return start

    async def _saved(self) -> dict[str, Any] | str | Exception:
        """Return the program's saved state, or why it could not save."""
        try:
            saved: dict[str, Any] | str = await self.call("save")
        except (ChildDied, CallTimeout) as error:
            return error
        return saved

    def _started(self, start: Start) -> Start:
        self._owed = None
        self._episode = start.episode
        self._running = torch.ones_like(start.episode, dtype=torch.bool)
        return start

    async def _redraw(self, why: str, died: Exception | None) -> Start:
        """Begin new episodes after a loss, unless the pool is being closed."""
        if self.closing and died is not None:
            raise died
        self._count_loss(why)
        return await self._begin(self._episode, died)

    def _count_loss(self, why: str) -> None:
        self._losses += 1
        who, reason = self._worker.name, why.splitlines()[0]
        logger.warning("episodes of environments %s (%s) are lost: %s", self._numbers(), who, reason)

    async def _begin(self, episode: Tensor, died: Exception | None) -> Start:
        """Begin the episodes that follow on `episode`, int64 [n], in equal numbers within a group; after a death, the
        ones that follow on those."""
        while self._losses <= MOST_LOSSES:
            highest = episode.view(-1, self._group).amax(1) + 1
            episode = highest.repeat_interleave(self._group)
            try:
                if self._weights is not None:  # the process may be new
                    await self.call("tell", "weigh", self._weights)
                started = await self.call("reset", self._epoch, episode.numpy())
                if not isinstance(started, str):  # why it has none
                    start: Start = unpacked(started)
                    return start
                self._count_loss(started)
            except (ChildDied, CallTimeout) as error:
                died = error
                self._losses += 1
        step, reset = self._processes.step_timeout, self._processes.reset_timeout
        raise EnvironmentLost(
            f"environments {self._numbers()} ({self._worker.name}) were lost {self._losses} times and finished no "
            f"episode between: see the last death above; the simulator crashes, or step_timeout={step:g} s or "
            f"reset_timeout={reset:g} s (in a configuration, start_timeout) is too short for it"
        ) from died

    def _check_begun(self) -> None:
        if self._epoch is None:
            raise RuntimeError(f"environments {self._numbers()} have no episodes yet: await the slice's reset() first")

    def _numbers(self) -> str:
        return f"{self.span.first}-{self.span.first + self.span.count - 1}"


T = TypeVar("T")


class EnvironmentPool:
    """Environments of one simulator, spread over worker processes and divided into slices.

        async with EnvironmentPool("rlinf.envs.toy.Reach", num_envs=8, workers=2) as pool:
            (whole,) = pool.slices
            start = await whole.reset()
            chunk = await whole.step(torch.zeros(8, 4, pool.action_spec.size))

    Slice s holds environments s N / S up to (s + 1) N / S, and every worker has an equal part of each slice.

    Args:
        simulator: adapter, by its dotted path or as the class; workers must be able to import it.
        options: its keyword arguments besides `num_envs`; they must pickle.
        num_envs: environments in all, N.
        workers: processes; 0 runs the simulator in a thread of this one, where a crash or hang is the job's.
        slices: parts that are acted on independently, S.
        rules: how episodes begin and end.
        recording: which episodes become videos; None for none.
        processes: how workers are called, and how long they may take.

    Raises:
        UserError: the environments cannot be divided evenly, groups would be cut, or a worker could not get the class.
    """

    observation_spec: Mapping[str, ArraySpec]
    """Arrays of an observation, once started."""
    action_spec: ActionSpec
    """Action specification of the simulator, once started."""
    max_steps: int | None
    """Steps in an episode at most, once started; None for no limit."""

    def __init__(
        self,
        simulator: str | type[Simulator],
        options: Mapping[str, Any] | None = None,
        *,
        num_envs: int,
        workers: int = 1,
        slices: int = 1,
        rules: Rules | None = None,
        recording: Recording | None = None,
        processes: Processes | None = None,
    ):
        rules, how = rules or Rules(), processes or Processes()
        _check(simulator, num_envs, workers, slices, rules)
        self.num_envs = num_envs
        self.thread: SimulatorThread | None = None
        """Where all is simulated, if that is a thread of this process."""
        self._workers: list[Caller] = []
        parts: list[list[WorkerSlice]] = [[] for _ in range(slices)]
        count = max(workers, 1)
        share = num_envs // (slices * count)
        for index in range(count):
            ranges = tuple(SliceRange((part * count + index) * share, share) for part in range(slices))
            arguments: dict[str, Any] = {
                "simulator": simulator,
                "options": dict(options or {}),
                "rules": rules,
                "ranges": ranges,
                "recording": recording,
            }
            if workers:
                arguments["device"] = own_device().index  # a child does not inherit which GPU is ours
                worker = _process(arguments, f"{how.name}.{index}", how.start_timeout)
            else:
                worker = self.thread = SimulatorThread({**arguments, "travels": False}, name=how.name)
            self._workers.append(worker)
            for part, span in enumerate(ranges):
                parts[part].append(WorkerSlice(worker, part, span, rules, how))
        self.slices = tuple(Slice(each) for each in parts)

    async def start(self) -> None:
        """Start all workers at once, and wait until their simulators are made.

        Raises:
            ChildDied: one could not be started; its last words are in the text.
        """
        try:
            await _all([worker.start() for worker in self._workers])
            specs = await self._workers[0].call("specs")
        except BaseException:
            await self.stop()
            raise
        self.observation_spec, self.action_spec, self.max_steps = specs

    async def stop(self) -> None:
        """Close the simulators and end their processes; steps under way raise `ChildDied`. May be called repeatedly."""
        for part in self.slices:
            part.closing()
        await asyncio.gather(*(worker.stop() for worker in self._workers))

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()


class Slice:
    """Some environments of a pool, which act together. Its calls come one after the other; slices do not wait for each
    other, except for a turn of their common workers.

    What a call means, and what it takes and returns, is said at `Environment`. Any call but `reset` and
    `load_state_dict` needs one of these before.
    """

    def __init__(self, parts: Sequence[WorkerSlice]):
        self._parts = parts
        self.first = parts[0].span.first
        """Number of its first environment, over all slices."""
        self.num_envs = sum(part.span.count for part in parts)
        """How many it has."""

    async def reset(self, epoch: int = 0) -> Start:
        """Begin new episodes everywhere; see `Environment.reset`."""
        return joined_starts(await _all([part.reset(epoch) for part in self._parts]))

    async def step(self, actions: Tensor) -> Chunk:
        """Do a chunk of actions, [N, C, A]; see `Environment.step`.

        Raises:
            EnvironmentLost: a worker's simulator died or hung too often.
            Exception: what the simulator raised, with its traceback as a note.
        """
        if len(actions) != self.num_envs:
            raise ValueError(f"actions are for {len(actions)} environments, and this slice has {self.num_envs}")
        shares = actions.split(self._parts[0].span.count) if len(self._parts) > 1 else (actions,)
        pairs = zip(self._parts, shares, strict=True)
        return joined_chunks(await _all([part.step(share) for part, share in pairs]))

    async def state_dict(self) -> list[dict[str, Any]]:
        """All that the next steps depend on, one part per worker; see `Environment.state_dict`."""
        return await _all([part.save() for part in self._parts])

    async def load_state_dict(self, state: Sequence[dict[str, Any]]) -> Start:
        """Go on from a saved state; see `Environment.load_state_dict`.

        Raises:
            ValueError: it was saved from other environments, by other rules, or with another number of workers.
        """
        if len(state) != len(self._parts):
            raise ValueError(
                f"environments were saved with {len(state)} workers, and there are {len(self._parts)} now: "
                f"resume with as many"
            )
        pairs = zip(self._parts, state, strict=True)
        return joined_starts(await _all([part.load(saved) for part, saved in pairs]))

    def closing(self) -> None:
        """From now on the death of a worker is meant, and nothing is begun anew."""
        for part in self._parts:
            part.closing = True

    async def watch(self, envs: Sequence[int]) -> None:
        """Keep videos of these environments alone from now on; see `Environment.watch`."""
        await _all([part.call("tell", "watch", tuple(envs)) for part in self._parts])

    async def weigh(self, weights: Sequence[float]) -> None:
        """Choose the tasks of episodes to come by other weights, also in processes that replace others."""
        await _all([part.weigh(weights) for part in self._parts])

    async def load(self, weights: Mapping[str, Tensor]) -> None:
        """Simulate by other weights from now on, where all is simulated in a thread of this process."""
        await _all([part.call("tell", "load", weights) for part in self._parts])

    async def offload(self) -> None:
        """Give device memory back; `onload` before the next step."""
        await _all([part.call("tell", "offload") for part in self._parts])

    async def onload(self) -> None:
        """Be ready again after `offload`."""
        await _all([part.call("tell", "onload") for part in self._parts])


def _process(arguments: Mapping[str, Any], name: str, start_timeout: float) -> Caller:
    """A program in a process of its own."""
    return Worker(
        "rlinf.envs.workers:Program",
        arguments,
        name=name,
        env={"OMP_NUM_THREADS": "1"},
        max_restarts=MOST_LOSSES,
        start_deadline=start_timeout,
        stop_deadline=_STOP,
    )


class SimulatorThread:
    """A program in a thread of this process, for simulators that cannot harm it."""

    def __init__(self, arguments: Mapping[str, Any], *, name: str):
        self.name = name
        self._arguments = arguments
        # one: simulators may be tied to their thread
        self._pool = ThreadPoolExecutor(1, name, initializer=work_on, initargs=(device_of_threads(),))
        self._program: Program | None = None
        self._thread: int | None = None

    async def start(self) -> None:
        self._program, self._thread = await self._run(lambda: (Program(**self._arguments), threading.get_ident()))

    async def stop(self) -> None:
        program, self._program = self._program, None
        if program is not None:
            await self._run(program.close)
            self._pool.shutdown(wait=False)

    async def call(self, method: str, *args: Any, timeout: float | None = None) -> Any:  # noqa: ASYNC109
        if self._program is None:
            raise UserError(f"environments {self.name!r} were not started, or were stopped: await the pool's start()")
        function = getattr(self._program, method)
        if threading.get_ident() == self._thread:
            return function(*args)
        return await self._run(lambda: function(*args))  # a thread cannot be ended, so the timeout means nothing

    def within(self, function: Callable[[], T]) -> T:
        """Run a function in the thread, and wait for it: what it calls of the program is done at once."""
        return self._pool.submit(function).result()

    async def _run(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, function)


def _check(simulator: str | type[Simulator], num_envs: int, workers: int, slices: int, rules: Rules) -> None:
    if workers < 0 or slices < 1 or num_envs < 1:
        raise UserError(f"num_envs={num_envs} and slices={slices} must be at least 1, and workers={workers} at least 0")
    parts = max(workers, 1) * slices
    if num_envs % (parts * rules.group_size):
        raise UserError(
            f"num_envs={num_envs} must be a multiple of workers x slices x group_size = {max(workers, 1)} x {slices} x "
            f"{rules.group_size} = {parts * rules.group_size}, so that shares are equal and no group is divided"
        )
    if workers and getattr(simulator, "__module__", None) == "__main__":
        raise UserError(
            f"simulator {getattr(simulator, '__name__', simulator)} of the main program cannot be run in a child "
            f"process: define it at the top of a module file and name it by its dotted path, or set workers to 0"
        )


def at_once(work: Coroutine[Any, Any, T]) -> T:
    """Result of a coroutine that has nothing to wait for, such as a call of a slice in its `SimulatorThread`."""
    try:
        work.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    work.close()
    raise RuntimeError(f"{work} waits for something, and there is no loop here that would go on with it")


async def _all(calls: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Results of all calls; when one raised, that error, once the others have ended."""
    if len(calls) == 1:
        return [await calls[0]]
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]
