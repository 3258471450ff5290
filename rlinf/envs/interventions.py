"""Somebody acts in the policy's place: a person with a gamepad or a keyboard, or a script that stands in for one.

`Overridable` is a simulator in which an intervener is asked before every step, action by action within a chunk too.
What it says is executed instead of what the policy wanted, and the transition tells so (`Interventions`); whoever is at
the other end of `envs.remote` tells it by that protocol. An intervener is named by its dotted path:

* a class with `async read() -> action or None`, a `Device` in one person's hands, for one environment alone;
* a function of what `ASKED` names, or a class whose instances are called so, for all environments at once. It returns
  actions in [-1, 1], float32 [N, A], and in which environments it acts, bool [N]; or None where it lets all be.

The devices are read as Linux tells of them, without any library: `/dev/input/js0` and `/dev/input/event0`.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from rlinf.config.importing import resolve
from rlinf.envs import base
from rlinf.envs.wrappers import Remembering, mistake_in_function

ASKED = ("observation", "action", "steps", "instructions", "tasks")
"""Arguments that a function may take, by name; all rows at once:

    observation     before the step, by name, [N, ...]
    action          of the policy, in [-1, 1], float32 [N, A]
    steps           done in the episode so far, int64 [N]
    instructions    N texts, or None
    tasks           names of the tasks, N texts, or None
"""


class Device(Protocol):
    """A control in a person's hands. It may have `close()`, too."""

    async def read(self) -> Sequence[float] | None:
        """The action that the person wants now, A numbers in [-1, 1]; None: let the policy act."""


def mistake_in_intervener(intervener: Any, arguments: Mapping[str, Any], num_envs: int) -> str | None:
    """Return the reason why nobody could intervene by this; None if somebody can.

    Args:
        intervener: what a dotted path named.
        arguments: its own.
        num_envs: environments in which it is to act.
    """
    if not inspect.isclass(intervener):
        return mistake_in_function(intervener, arguments, ASKED)
    try:
        base.check_arguments(intervener.__name__, intervener, arguments)
    except base.WrongOption as error:
        return f"{error.name}: {error}"
    if hasattr(intervener, "read"):
        one = f"a person acts in one environment: set env.num_envs=1, not {num_envs}, and env.workers to 0 or 1"
        return None if num_envs == 1 else one
    return None if "__call__" in dir(intervener) else "its instances are neither devices nor called"


class Overridable(Remembering):
    """A simulator in which somebody can act in the policy's place.

    Args:
        num_envs: how many environments.
        simulator: adapter, by its dotted path or as the class.
        intervener: who acts: a dotted path, or what it would name.
        options: keyword arguments of the simulator.
        arguments: keyword arguments of the intervener.

    Raises:
        CannotSimulate: the intervener cannot act here.
    """

    def __init__(
        self,
        num_envs: int,
        *,
        simulator: str | type[base.Simulator],
        intervener: Any,
        options: Mapping[str, Any] | None = None,
        arguments: Mapping[str, Any] | None = None,
    ):
        self._name = str(intervener)
        named, own = resolve(intervener) if isinstance(intervener, str) else intervener, dict(arguments or {})
        if (mistake := mistake_in_intervener(named, own, num_envs)) is not None:
            raise base.CannotSimulate(f"env.intervener = {self._name}: {mistake}")
        adapter: Any = resolve(simulator) if isinstance(simulator, str) else simulator
        super().__init__(adapter(num_envs=num_envs, **(options or {})))
        self._arguments = {} if inspect.isclass(named) else own
        self._intervener: Any = named(**own) if inspect.isclass(named) else named
        self._runner = asyncio.Runner() if hasattr(self._intervener, "read") else None
        self._steps = torch.zeros(num_envs, dtype=torch.int64)

    def reset(self, seeds: Tensor, env_ids: Tensor) -> base.Observation:
        self._steps[env_ids] = 0
        return super().reset(seeds, env_ids)

    def step(self, actions: Tensor, active: Tensor) -> base.Transition:
        acted = self._asked(actions)
        executed = torch.where(acted.steps[:, None], acted.actions, actions)
        moved = self.simulator.step(executed, active)
        self._seen = moved.observation
        self._steps += active.cpu()
        if (inner := moved.interventions) is not None:  # whoever is nearer to the robot has the last word
            steps = acted.steps | inner.steps
            acted = base.Interventions(steps, torch.where(inner.steps[:, None], inner.actions, executed))
        return replace(moved, interventions=acted)

    def save(self) -> list[base.State]:
        return [{**state, "steps": steps} for state, steps in zip(super().save(), self._steps.tolist(), strict=True)]

    def restore(self, states: Sequence[base.State], env_ids: Tensor) -> None:
        super().restore(states, env_ids)
        self._steps[env_ids] = torch.tensor([state["steps"] for state in states])

    def close(self) -> None:
        super().close()
        if self._runner is not None:
            self._runner.close()
        if hasattr(self._intervener, "close"):
            self._intervener.close()

    def _asked(self, actions: Tensor) -> base.Interventions:
        """Interventions in these actions, within the simulator's bounds."""
        spec = self.action_spec
        answer = self._from_device() if self._runner is not None else self._from_script(spec.unscaled(actions))
        if answer is None:
            return base.Interventions(torch.zeros(self.num_envs, dtype=torch.bool, device=self.device), actions)
        wanted, steps = (torch.as_tensor(each, device=self.device) for each in answer)
        if wanted.shape != actions.shape or steps.shape != actions.shape[:1] or steps.dtype != torch.bool:
            raise RuntimeError(
                f"env.intervener = {self._name}: it gave {wanted.dtype} {list(wanted.shape)} and {steps.dtype} "
                f"{list(steps.shape)}, instead of actions {list(actions.shape)} and bool {list(actions.shape[:1])}"
            )
        wanted = wanted.float()
        if not bool(wanted[steps].isfinite().all()):
            raise RuntimeError(f"env.intervener = {self._name}: numbers of its action are not finite")
        return base.Interventions(steps, spec.scaled(torch.where(steps[:, None], wanted, 0.0)))

    def _from_device(self) -> tuple[Tensor, Tensor] | None:
        assert self._runner is not None
        action = self._runner.run(self._intervener.read())
        return None if action is None else (torch.tensor([list(action)]), torch.tensor([True]))

    def _from_script(self, actions: Tensor) -> Any:
        offered = {
            "observation": self._seen,
            "action": actions,
            "steps": self._steps,
            "instructions": self.simulator.instructions(),
            "tasks": self.simulator.tasks(),
        }
        return self._told("env.intervener", self._name, self._intervener, {**offered, **self._arguments})


class DeviceLost(RuntimeError):
    """A device is not there any more, in the middle of an episode."""


class Controls:
    """Keys, buttons and axes, each of which moves an action some way: what a person wants is their sum.

    Args:
        vectors: by control, what it adds to the action when it is pressed or pushed all the way, A numbers.
        rest: what the action is where nothing is touched, such as a gripper that stays open; zeros if None.

    Raises:
        ValueError: they are of different lengths.
    """

    def __init__(self, vectors: Mapping[Any, Sequence[float]], rest: Sequence[float] | None = None):
        lengths = {len(vector) for vector in [*vectors.values(), *([] if rest is None else [rest])]}
        if len(lengths) != 1:
            raise ValueError(f"controls must all have as many numbers as an action, not {sorted(lengths)}")
        self._vectors = {control: [*map(float, vector)] for control, vector in vectors.items()}
        self._rest = [0.0] * lengths.pop() if rest is None else [*map(float, rest)]
        self.values: dict[Any, float] = {}
        """How far each is pressed or pushed now, from -1 to 1."""

    def action(self) -> list[float] | None:
        """The action, within [-1, 1]; None where nothing is touched."""
        touched = {control: value for control, value in self.values.items() if value and control in self._vectors}
        if not touched:
            return None
        parts = zip(*([value * each for each in self._vectors[key]] for key, value in touched.items()), strict=True)
        return [max(-1.0, min(1.0, sum(part) + rest)) for part, rest in zip(parts, self._rest, strict=True)]


class EventFile:
    """Events of an input device, one after the other, without ever waiting for one.

    Args:
        path: the device's file.
        layout: of one event.

    Raises:
        CannotSimulate: it cannot be read.
    """

    def __init__(self, path: str, layout: str):
        self._path, self._layout = path, struct.Struct(layout)
        try:
            self._file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        except OSError as error:
            raise base.CannotSimulate(
                f"env.intervener_args: {path}: {error.strerror}; name the device's file in `path`, and let this user "
                "read it (of the group input)"
            ) from error

    def events(self) -> Iterator[tuple[Any, ...]]:
        """The events since the last call.

        Raises:
            DeviceLost: the device is gone.
        """
        while True:
            try:
                content = os.read(self._file, self._layout.size * _AT_ONCE)
            except BlockingIOError:
                return
            except OSError as error:
                raise DeviceLost(f"{self._path}: {error.strerror}") from error
            if not content:
                raise DeviceLost(f"{self._path}: it has ended")
            yield from self._layout.iter_unpack(content)  # the kernel gives whole events alone

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


_AT_ONCE = 64
"""Events that are read at once: a hand makes fewer in the time of a step."""
_BUTTON, _AXIS, _FIRST = 0x01, 0x02, 0x80
"""Kinds of a joystick's events; the last bit is set where the kernel tells of the state that it finds."""
_MOST_AXIS = 32767
"""Number by which the kernel tells of an axis that is pushed all the way."""


class Gamepad:
    """A gamepad or a SpaceMouse that is a joystick, `/dev/input/js0` (linux/joystick.h).

    Args:
        axes: by the number of an axis, what it adds to the action when it is pushed all the way, A numbers.
        buttons: the same of buttons.
        path: the device's file.
        hold: number of a button without which nothing counts; None: the person acts as soon as something is touched.
        dead: an axis that is pushed no further than this counts as untouched.
        rest: see `Controls`.
    """

    def __init__(
        self,
        *,
        axes: Mapping[Any, Sequence[float]],
        buttons: Mapping[Any, Sequence[float]] | None = None,
        path: str = "/dev/input/js0",
        hold: int | None = None,
        dead: float = 0.1,
        rest: Sequence[float] | None = None,
    ):
        vectors = {("axis", int(number)): vector for number, vector in axes.items()}
        vectors |= {("button", int(number)): vector for number, vector in (buttons or {}).items()}
        self._controls, self._hold, self._dead = Controls(vectors, rest), hold, dead
        self._file = EventFile(path, "=IhBB")  # milliseconds, value, kind, number

    async def read(self) -> Sequence[float] | None:
        """See `Device.read`."""
        for _, value, kind, number in self._file.events():
            if kind & ~_FIRST == _BUTTON:
                self._controls.values["button", number] = float(value)
            elif kind & ~_FIRST == _AXIS:
                pushed = max(-1.0, value / _MOST_AXIS)
                self._controls.values["axis", number] = pushed if abs(pushed) > self._dead else 0.0
        if self._hold is not None and not self._controls.values.get(("button", self._hold)):
            return None
        return self._controls.action()

    def close(self) -> None:
        """Close the device's file."""
        self._file.close()


_SYNCHRONISE, _KEY, _DROPPED = 0, 1, 3
"""Types of events, and the code of one that says that some were dropped (linux/input-event-codes.h)."""
_ROWS = {2: "1234567890", 16: "qwertyuiop", 30: "asdfghjkl", 44: "zxcvbnm"}
_CODES = {
    **{name: first + index for first, names in _ROWS.items() for index, name in enumerate(names)},
    "space": 57,
    "up": 103,
    "left": 105,
    "right": 106,
    "down": 108,
}
"""Codes of keys by what stands on them, on a keyboard of the usual layout (linux/input-event-codes.h)."""


class Keyboard:
    """A keyboard, `/dev/input/event3` (linux/input.h): the person acts while one of these keys is down.

    Args:
        keys: by the letter or digit on a key, or space, up, left, right or down: what it adds to the action.
        path: the device's file.
        rest: see `Controls`.
    """

    def __init__(self, *, keys: Mapping[str, Sequence[float]], path: str, rest: Sequence[float] | None = None):
        if unknown := sorted({*map(str, keys)} - {*_CODES}):
            raise base.CannotSimulate(
                f"env.intervener_args.keys: no such key {unknown[0]}; there are {', '.join(_CODES)}"
            )
        self._controls = Controls({_CODES[str(name)]: vector for name, vector in keys.items()}, rest)
        self._file = EventFile(path, "llHHi")  # seconds, microseconds, type, code, value

    async def read(self) -> Sequence[float] | None:
        """See `Device.read`."""
        for _, _, kind, code, value in self._file.events():
            if kind == _KEY:
                self._controls.values[code] = float(value > 0)  # 2: it is held, and repeats
            elif (kind, code) == (_SYNCHRONISE, _DROPPED):  # what is down now is not known: nothing is
                self._controls.values.clear()
        return self._controls.action()

    def close(self) -> None:
        """Close the device's file."""
        self._file.close()
