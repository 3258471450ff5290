"""Environments in an actor, in slices that are acted on independently.

Consumes actions, produces what the environments show; unblocked by its worker processes. Slices wait for each other
only where they share a worker, so while one is simulated the policy can decide for another. `WorldActor` has them in a
world model, whose weights come through `load`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import torch
from torch import Tensor

from rlinf.actors.base import configured
from rlinf.data.rng import mix, mixed
from rlinf.data.weights import Weights, misfits
from rlinf.envs.base import Observation
from rlinf.envs.environment import Decision, EnvOutput, Rules, remembered
from rlinf.envs.learned import ENSEMBLE, Learned, make_world
from rlinf.envs.video import Recording
from rlinf.envs.workers import EnvironmentPool, Processes, SimulatorThread, told_by
from rlinf.runtime.actor.actor import Actor, endpoint
from rlinf.runtime.base.errors import RuntimeFault
from rlinf.runtime.base.tensors import own_device
from rlinf.training.weight_sync import Receiver

T = TypeVar("T")
_TIMES = 64
"""Times for which seeds are made at once."""


@dataclass(frozen=True, slots=True)
class EnvSettings(Rules):
    """How an actor simulates; `system.spawn(EnvActor, simulator=..., num_envs=8)` is short for settings that say so."""

    num_envs: int = 1
    """Environments on this rank."""
    workers: int = 1
    """Child processes that they are divided over; 0 simulates in a thread of this process."""
    slices: int = 1
    """Parts that are acted on independently."""
    step_timeout: float = 60.0
    """Seconds that a worker has for the steps of one chunk, see `EnvironmentPool`."""
    start_timeout: float = 300.0
    """Seconds from the start of a worker until its simulators are made, and for its episodes to begin."""

    def rules(self, seed: int) -> Rules:
        """How episodes begin and end, with another seed of their starts."""
        return Rules(**{field.name: getattr(self, field.name) for field in fields(Rules)} | {"seed": seed})


class EnvActor(Actor):
    """Environments of one simulator on each rank."""

    @configured(EnvSettings)
    async def setup(
        self,
        *,
        simulator: str,
        settings: EnvSettings,
        options: Mapping[str, Any] | None = None,
        recording: Recording | None = None,
    ) -> None:
        """Start the workers; returns when their simulators are made.

        Args:
            simulator: dotted path of the adapter's class.
            settings: how it simulates; or any of its keys, such as num_envs=8. Each rank draws by another seed.
            options: keyword arguments of the simulator.
            recording: which episodes become videos; None for none.

        Raises:
            ValueError: a setting that there is not, or cannot be.
            UserError: the environments cannot be divided evenly.
            ChildDied: a worker cannot be started; with its last output.
        """
        self._seed = mix(settings.seed, self.rank)
        self._pool = EnvironmentPool(
            simulator,
            options,
            num_envs=settings.num_envs,
            workers=settings.workers,
            slices=settings.slices,
            rules=settings.rules(self._seed >> 33),
            recording=recording,
            processes=Processes(
                f"{self.group.names[self.rank]} simulator",
                step_timeout=settings.step_timeout,
                reset_timeout=settings.start_timeout,
                start_timeout=settings.start_timeout,
            ),
        )
        await self._pool.start()
        self._epochs = [0] * settings.slices
        self._times = [0] * settings.slices
        self._drawn: list[tuple[tuple[int, int] | None, Tensor]] = [(None, torch.empty(0))] * settings.slices
        self._now: list[tuple[Observation, tuple[str, ...] | None] | None] = [None] * settings.slices
        self._ahead: list[int | None] = [None] * settings.slices
        """Epoch whose episodes were begun before anybody asked for them, and in which nothing was done yet."""

    @property
    def thread(self) -> SimulatorThread | None:
        """Where it simulates, if that is a thread of this process: its endpoints wait for nothing there."""
        return self._pool.thread

    async def close(self) -> None:
        """End the workers."""
        await self._pool.stop()

    @endpoint
    async def shapes(self) -> dict[str, Any]:
        """The shapes and limits that a policy must fit: `shapes` of a row of each observed array by name,
        `action_size`; `choices` of each of its numbers (None where they are real), and their `bounds` (least and
        greatest, in the simulator's units); and `max_steps` of an episode (None for no limit)."""
        pool = self._pool
        bounds = pool.action_spec.low.tolist(), pool.action_spec.high.tolist()
        return {
            "shapes": {name: tuple(spec.shape) for name, spec in pool.observation_spec.items()},
            "action_size": pool.action_spec.size,
            "choices": pool.action_spec.choices,
            "bounds": bounds,
            "max_steps": pool.max_steps,
        }

    @endpoint(device=True)
    async def reset(self, number: int, epoch: int) -> EnvOutput:
        """Begin new episodes in a slice.

        Args:
            number: of the slice.
            epoch: what the starts follow from, together with the seed.
        """
        ahead, self._ahead[number] = self._ahead[number], None
        if ahead == epoch and (now := self._now[number]) is not None:
            return self._output(number, *now, None)
        start = await self._said(self._pool.slices[number].reset(epoch))
        self._epochs[number], self._times[number] = epoch, 0
        return self._output(number, start.observation, start.instructions, None)

    @endpoint
    async def prepare(self, number: int, epoch: int, after: EnvOutput | None = None) -> None:
        """Begin the episodes of a `reset` that is to come, while others compute: where simulators have processes of
        their own, and need no device that somebody else may be using. Elsewhere nothing is done.

        Args:
            number: of the slice.
            epoch: see `reset`.
            after: what the last step of the slice returns, for which this waits; None: it was done.
        """
        if self.thread is None and own_device().type == "cpu":
            await self.reset(number, epoch)
            self._ahead[number] = epoch

    @endpoint(device=True)
    async def observe(self, number: int, epoch: int) -> EnvOutput:
        """Return what a slice shows where it stands; start new episodes of that epoch, if it has none yet.

        Args:
            number: of the slice.
            epoch: see `reset`.
        """
        now = self._now[number]
        if now is None:
            return await self.reset(number, epoch)
        return self._output(number, *now, None)

    @endpoint(device=True)
    async def step(self, number: int, actions: Tensor | Decision) -> EnvOutput:
        """Do a chunk of actions in a slice.

        Args:
            number: of the slice.
            actions: in [-1, 1], float32 [N, C, A]; of a policy with a memory together with that.

        Raises:
            EnvironmentLost: a worker's simulator died or hung too often, dropped every episode, or raised.
        """
        self._ahead[number] = None
        actions, memory = (actions.actions, actions.memory) if isinstance(actions, Decision) else (actions, None)
        chunk = await self._said(self._pool.slices[number].step(actions))
        chunk = chunk if memory is None else remembered(chunk, memory)
        self._times[number] += 1
        return self._output(number, chunk.observation, chunk.instructions, chunk)

    @endpoint
    async def weigh(self, weights: Sequence[float]) -> None:
        """Choose the tasks of episodes to come by other weights.

        Args:
            weights: of each task of the mixture.
        """
        self._ahead = [None] * len(self._ahead)  # episodes that were begun by other weights are not to be had
        for part in self._pool.slices:
            await part.weigh(weights)

    @endpoint
    async def watch(self, number: int, envs: Sequence[int]) -> None:
        """Keep videos of some environments of a slice alone from now on.

        Args:
            number: of the slice.
            envs: counted over all slices; () for none.
        """
        await self._pool.slices[number].watch(envs)

    @endpoint(device=True)
    async def state(self) -> list[dict[str, Any]]:
        """All that the next steps depend on, one part per slice, for `restore`."""
        return [
            {
                "epoch": epoch,
                "time": time,
                "environments": None if now is None else await part.state_dict(),
                "memory": None if now is None else now[0].get("memory"),
            }
            for epoch, time, now, part in zip(self._epochs, self._times, self._now, self._pool.slices, strict=True)
        ]

    @endpoint(device=True)
    async def restore(self, state: list[dict[str, Any]]) -> None:
        """Go on from a saved state.

        Raises:
            ValueError: it was saved from other environments.
        """
        if len(state) != len(self._pool.slices):
            raise ValueError(f"{len(state)} slices of environments were saved, and there are {len(self._pool.slices)}")
        self._ahead = [None] * len(state)
        for number, part in enumerate(state):
            self._epochs[number], self._times[number] = part["epoch"], part["time"]
            if part["environments"] is not None:
                start = await self._pool.slices[number].load_state_dict(part["environments"])
                memory = {} if part.get("memory") is None else {"memory": part["memory"]}
                self._now[number] = ({**start.observation, **memory}, start.instructions)

    async def offload(self) -> None:
        """Give device memory back, keeping all episodes."""
        for part in self._pool.slices:
            await part.offload()

    async def onload(self) -> None:
        """Be ready again after `offload`."""
        for part in self._pool.slices:
            await part.onload()

    async def _said(self, call: Awaitable[T]) -> T:
        """The result of a call of a slice.

        Raises:
            EnvironmentLost: what the simulator raised, by the name of this actor and with one traceback.
        """
        try:
            return await call
        except RuntimeFault:
            raise
        except Exception as error:  # of code that users write
            raise told_by(self.group.names[self.rank], error) from error

    def _output(self, number: int, observation: Observation, instructions: Any, chunk: Any) -> EnvOutput:
        self._now[number] = (observation, instructions)
        part = self._pool.slices[number]
        return EnvOutput(observation, instructions, chunk, self._seeds(number), part.first)

    def _seeds(self, number: int) -> Tensor:
        """Seeds of a slice's next draw of actions, by epoch, environment and time; made for many times at once."""
        part, epoch = self._pool.slices[number], self._epochs[number]
        block, index = divmod(self._times[number], _TIMES)
        which, seeds = self._drawn[number]
        if which != (epoch, block):
            envs, first = range(part.first, part.first + part.num_envs), block * _TIMES
            times = [time for time in range(first, first + _TIMES) for _ in envs]
            seeds = mixed(self._seed, epoch, [*envs] * _TIMES, times).view(_TIMES, -1)
            self._drawn[number] = (epoch, block), seeds
        return seeds[index]


class WorldActor(EnvActor, Receiver):
    """Environments inside a world model, on the device of each rank."""

    async def setup(  # type: ignore[override]
        self, *, model: str = ENSEMBLE, world: Mapping[str, Any], choices: Sequence[int] | None = None, **settings: Any
    ) -> None:
        """Make the model with its first weights.

        Args:
            model: dotted path of its class, a `WorldModel`.
            world: its keyword arguments.
            choices: of each number of an action; None where they are real.
            settings: of `EnvSettings`; all is simulated in a thread of this process, which has the device.

        Raises:
            ValueError: an argument or a setting that there is not, or cannot be.
        """
        with torch.device("meta"):
            own = make_world(model, world).state_dict()
        self._shapes = {name: tuple(tensor.shape) for name, tensor in own.items()}
        options = {"model": model, "settings": dict(world), "choices": choices}
        simulator = f"{Learned.__module__}.{Learned.__qualname__}"
        await super().setup(simulator=simulator, options=options, **settings, workers=0)

    async def check_weights(self, weights: Weights) -> None:
        if problems := misfits(self._shapes, weights.shapes):
            raise ValueError(f"published weights are not those of this world model: {problems}")

    async def switch_weights(self, weights: Weights) -> None:
        for part in self._pool.slices:
            await part.load(dict(weights.named()))
