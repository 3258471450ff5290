"""Simulators in supervised child processes: `EnvironmentPool`, and the `Slice`s of it that coroutines act on.

In: chunks of actions, one call per slice at a time. Out: `Chunk`s of all its environments. Who wakes whom: a slice
sends every worker its share and wakes when the last has answered; meanwhile other slices, and all else, go on. A worker
serves one slice at a time, so that while it steps one slice the policy can decide for another.

A worker that crashes or hangs is started anew, and every environment in it begins another episode. The chunk says which
were lost. Nothing else stops, and no other worker notices.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self, TypeVar

from torch import Tensor

from rlinf.envs.around.rules import Rules
from rlinf.envs.base import ActionSpec, ArraySpec, Simulator
from rlinf.envs.episodes import Chunk, Start, joined_chunks, joined_starts
from rlinf.envs.video import Recording
from rlinf.envs.worker import Program, SliceRange
from rlinf.envs.worker_slice import MOST_LOSSES, Caller, WorkerSlice
from rlinf.runtime.base.errors import UserError
from rlinf.runtime.gpu.own_device import device_of_threads, own_device, work_on
from rlinf.runtime.processes.worker import Worker

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
        name: workers are called name.0, name.1, …
        step_timeout: seconds that a worker has for one chunk; it is killed and replaced after that.
        reset_timeout: seconds for beginning, saving or restoring episodes.
        start_timeout: seconds from the start of a process until its simulators are made.
        variables: of the workers' environment, besides ours, such as MUJOCO_GL; None removes one.
        python: interpreter of the workers, for simulators whose requirements exclude ours; it needs rlinf, too.

    Raises:
        UserError: the environments cannot be divided evenly, groups would be cut, or a worker could not get the class.
    """

    observation_spec: Mapping[str, ArraySpec]
    """Arrays of an observation, once started."""
    action_spec: ActionSpec
    """Of the simulator, once started."""
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
        name: str = "env",
        step_timeout: float = 60.0,
        reset_timeout: float = 300.0,
        start_timeout: float = 300.0,
        variables: Mapping[str, str | None] | None = None,
        python: str = sys.executable,
    ):
        rules = Rules() if rules is None else rules
        _check(simulator, num_envs, workers, slices, rules)
        self.num_envs = num_envs
        self._workers: list[Caller] = []
        parts: list[list[WorkerSlice]] = [[] for _ in range(slices)]
        processes = max(workers, 1)
        share = num_envs // (slices * processes)
        for index in range(processes):
            ranges = tuple(SliceRange((part * processes + index) * share, share) for part in range(slices))
            arguments: dict[str, Any] = {
                "simulator": simulator,
                "options": dict(options or {}),
                "rules": rules,
                "ranges": ranges,
                "recording": recording,
            }
            if workers:
                arguments["device"] = own_device().index  # a child does not inherit which GPU is ours
                worker = _process(arguments, f"{name}.{index}", start_timeout, variables or {}, python)
            else:
                worker = _Thread(arguments, name=name)
            self._workers.append(worker)
            for part, span in enumerate(ranges):
                parts[part].append(WorkerSlice(worker, part, span, rules, step_timeout, reset_timeout))
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
        shares = actions.detach().cpu().split(self._parts[0].span.count)
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
        await _all([part.call("watch", tuple(envs)) for part in self._parts])

    async def weigh(self, weights: Sequence[float]) -> None:
        """Choose the tasks of episodes to come by other weights, also in processes that replace others."""
        await _all([part.weigh(weights) for part in self._parts])

    async def offload(self) -> None:
        """Give device memory back; `onload` before the next step."""
        await _all([part.call("offload") for part in self._parts])

    async def onload(self) -> None:
        """Be ready again after `offload`."""
        await _all([part.call("onload") for part in self._parts])


def _process(
    arguments: Mapping[str, Any], name: str, start_timeout: float, variables: Mapping[str, str | None], python: str
) -> Caller:
    """A program in a process of its own."""
    return Worker(
        "rlinf.envs.worker:Program",
        arguments,
        name=name,
        env={"OMP_NUM_THREADS": "1", **variables},
        max_restarts=MOST_LOSSES,
        start_deadline=start_timeout,
        python=python,
    )


class _Thread:
    """A program in a thread of this process, for simulators that cannot harm it."""

    def __init__(self, arguments: Mapping[str, Any], *, name: str):
        self.name = name
        self._arguments = arguments
        # one: simulators may be tied to their thread
        self._pool = ThreadPoolExecutor(1, name, initializer=work_on, initargs=(device_of_threads(),))
        self._program: Program | None = None

    async def start(self) -> None:
        self._program = await self._run(lambda: Program(**self._arguments))

    async def stop(self) -> None:
        program, self._program = self._program, None
        if program is not None:
            await self._run(program.close)
            self._pool.shutdown(wait=False)

    async def call(self, method: str, *args: Any, timeout: float | None = None) -> Any:  # noqa: ASYNC109
        if self._program is None:
            raise UserError(f"environments {self.name!r} were not started, or were stopped: await the pool's start()")
        function = getattr(self._program, method)
        return await self._run(lambda: function(*args))  # a thread cannot be ended, so the timeout means nothing

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


async def _all(calls: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Results of all calls; when one raised, that error, once the others have ended."""
    if len(calls) == 1:
        return [await calls[0]]
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]
