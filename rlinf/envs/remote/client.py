"""Our side of a remote simulator: a program that this process starts, or a server at an address.

`Remote` is a `Simulator`: tensors for us, arrays on the wire, in the protocol that `serve.py`, the other side,
describes. Each call waits for its answer, with a deadline. Where the other side dies, hangs or is cut off, the episodes
are lost (`SimulatorLost`), and the next reset or restored state starts the program anew, or waits until the server is
there again; environments that neither was for stay without an episode.
"""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlinf.envs.base import (
    ActionSpec,
    ArraySpec,
    CannotSimulate,
    Interventions,
    Observation,
    Simulator,
    SimulatorLost,
    State,
    Timing,
    Transition,
    WrongOption,
    check_arguments,
)
from rlinf.envs.remote import serve


class OfRlinf:
    """Has the attributes and methods that `serve.py` asks of what it serves.

    Args:
        simulator: what is served.
    """

    def __init__(self, simulator: Simulator):
        self._simulator = simulator
        self.observation_spec = {
            name: (spec.shape, str(spec.dtype).removeprefix("torch."))
            for name, spec in simulator.observation_spec.items()
        }
        self.action_low, self.action_high = simulator.action_spec.low.numpy(), simulator.action_spec.high.numpy()
        self.max_steps, self.resets_together = simulator.max_steps, simulator.resets_together

    def reset(self, seeds: np.ndarray, env_ids: np.ndarray) -> Any:
        """`Simulator.reset`."""
        return arrays(self._simulator.reset(torch.from_numpy(seeds), torch.from_numpy(env_ids)))

    def step(self, actions: np.ndarray, active: np.ndarray) -> Any:
        """`Simulator.step`."""
        device = self._simulator.device
        moved = self._simulator.step(torch.from_numpy(actions).to(device), torch.from_numpy(active).to(device))
        names = ("observation", "reward", "terminated", "truncated", "success")
        answer = {name: arrays(getattr(moved, name)) for name in names}
        if (acted := moved.interventions) is not None:
            answer |= {"intervened": arrays(acted.steps), "executed": arrays(acted.actions)}
        return answer

    def instructions(self) -> Any:
        """`Simulator.instructions`."""
        return self._simulator.instructions()

    def render(self, env_ids: np.ndarray) -> Any:
        """`Simulator.render`."""
        return arrays(self._simulator.render(torch.from_numpy(env_ids)))

    def save(self) -> Any:
        """`Simulator.save`."""
        return arrays(self._simulator.save())

    def restore(self, states: Any, env_ids: np.ndarray) -> None:
        """`Simulator.restore`."""
        self._simulator.restore(tensors(states), torch.from_numpy(env_ids))

    def close(self) -> None:
        """`Simulator.close`."""
        self._simulator.close()


def arrays(tree: Any) -> Any:
    """A tree of tensors as arrays."""
    if isinstance(tree, Tensor):
        return tree.detach().cpu().numpy()
    if isinstance(tree, dict):
        return {name: arrays(part) for name, part in tree.items()}
    return [arrays(part) for part in tree] if isinstance(tree, list | tuple) else tree


def tensors(tree: Any) -> Any:
    """A tree of arrays as tensors."""
    if isinstance(tree, np.ndarray):
        return torch.from_numpy(tree)
    if isinstance(tree, dict):
        return {name: tensors(part) for name, part in tree.items()}
    return [tensors(part) for part in tree] if isinstance(tree, list) else tree


_AGAIN_SECONDS = 0.2
"""Between two tries to reach a server that was lost: nobody tells when it has been started again, and a person or a
scheduler takes seconds to do so."""
_END_SECONDS = 5.0
"""How long a program may take to end by itself once nobody speaks to it."""
_BOOL = ArraySpec((), torch.bool)
_ROWS = {"reward": ArraySpec((), torch.float32), "terminated": _BOOL, "truncated": _BOOL}
"""Arrays in an answer to a step besides its observation, one row for each environment."""
_REFUSALS = ("PermissionError", "Garbled", "Busy")
"""Answers after which the other side has closed the connection."""


class RemoteError(RuntimeError):
    """The other side raised an exception; the text holds its own, and where it was raised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteSettings:
    """Settings of `Remote`: where the other side is, what it is told, and how long it may take."""

    address: str | None = None
    """ "host:port" or "unix:/path" of a server."""
    python: str | None = None
    """Program of a Python that has numpy and the simulator's packages."""
    make: str | None = None
    """With `python`, what makes the simulator there: "module:name", "file.py:name" or "package.module.name"."""
    command: Sequence[str] | None = None
    """Program and arguments."""
    options: Mapping[str, Any] | None = None
    """Arguments of the other side's simulator, besides `num_envs`."""
    token: str | None = None
    """Word that the server wants to hear; None takes it from the environment variable RLINF_REMOTE_TOKEN."""
    connect_seconds: float = 120.0
    """In which the other side must have made its simulator, and a server that was lost be there again."""
    reset_seconds: float = 120.0
    """In which it must have begun episodes, or saved or restored states."""
    step_seconds: float = 30.0
    """In which it must have done a step, or drawn pictures."""

    def __post_init__(self) -> None:
        ways = [name for name in ("address", "python", "command") if getattr(self, name)]
        if len(ways) != 1:
            raise WrongOption("address", f"name one of address, python (with make) and command, not {ways or 'none'}")
        if (self.make is None) == (ways == ["python"]):
            raise WrongOption("make", "python needs make, such as arm.py:Arm; what runs otherwise names its own")
        address = self.address
        if address and not address.startswith("unix:") and not address.rpartition(":")[2].isdigit():
            raise WrongOption("address", f"{address!r} is neither host:port nor unix:/path")

    @property
    def program(self) -> list[str] | None:
        """Program and arguments that this process starts; None where a server is there already."""
        if self.python is not None and self.make is not None:
            return [self.python, str(Path(serve.__file__)), "--stdio", "--make", self.make]
        return None if self.command is None else [str(part) for part in self.command]


class Remote(Simulator):
    """Environments that are simulated in another process, with a Python and packages of its own.

    Name either where a server listens (`address`), or what this process starts: a Python (`python`), which runs
    `serve.py`, or any `command` that speaks the protocol over its standard input and output, such as
    [ssh, robot, python3, serve.py, --stdio, --make, arm.py:Arm].

    Args:
        num_envs: how many.
        settings: the fields of `RemoteSettings`, such as address="robot:7100".

    Raises:
        WrongOption: none or several of `address`, `python` and `command` are given.
        CannotSimulate: the other side is not there, refuses, or cannot make its simulator; the text says which.
    """

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> None:
        """See `Simulator.check_options`."""
        check_arguments(cls.__name__, RemoteSettings, options)
        RemoteSettings(**options)

    def __init__(self, num_envs: int, **settings: Any):
        self.check_options(settings)
        how = RemoteSettings(**settings)
        self.num_envs = num_envs
        self._address, self._command = how.address, how.program
        self._who = how.address or " ".join(self._command or ())
        self._options = dict(how.options or {})
        self._token = os.environ.get(serve.TOKEN, "") if how.token is None else how.token
        self._connect_seconds = how.connect_seconds
        self._seconds = {"step": how.step_seconds, "render": how.step_seconds}
        self._reset_seconds = how.reset_seconds
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._words: list[str] | None = None
        self._seen: int | None = None  # number of the newest observation, if the other side numbers them
        self._came = 0.0
        self._begun = torch.zeros(num_envs, dtype=torch.bool)  # environments that the other side has an episode of
        specs = self._connect()
        try:
            self.max_steps = specs["max_steps"]
            self.action_spec = ActionSpec(torch.from_numpy(specs["action_low"]), torch.from_numpy(specs["action_high"]))
            self.observation_spec = _observations(specs)
            self._can = frozenset(specs["can"])
            self.resets_together = bool(specs.get("resets_together", False))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            self._leave()
            raise CannotSimulate(f"{self._who} says of its simulator what means nothing: {error}") from error

    def reset(self, seeds: Tensor, env_ids: Tensor) -> Observation:
        self._come_back()
        reply = self._call("reset", seeds=seeds.numpy(), env_ids=env_ids.numpy())
        self._words = self._instructions_in(reply)
        observation = self._observation(reply, len(env_ids))
        self._begun[env_ids] = True
        self._note(reply)
        return observation

    def step(self, actions: Tensor, active: Tensor) -> Transition:
        if bool((active & ~self._begun).any()):
            lost = (active & ~self._begun).nonzero().flatten().tolist()
            raise SimulatorLost(f"{self._who} is gone, and with it the episodes of environments {lost}")
        decision = time.monotonic() - self._came
        about = {} if self._seen is None else {"number": self._seen}
        reply = self._call("step", actions=actions.numpy(), active=active.numpy(), **about)
        self._note(reply)
        observation = self._observation(reply, self.num_envs)
        reward, terminated, truncated = (self._array(reply, name, self.num_envs, _ROWS[name]) for name in _ROWS)
        success = None
        if reply.get("success") is not None:
            success = self._array(reply, "success", self.num_envs, _BOOL)
        acted, timing = self._interventions(reply), self._timing(reply, decision)
        return Transition(observation, reward, terminated, truncated, success, acted, timing)

    def _note(self, reply: Any) -> None:
        """Note that something was seen now, and which of all observations it was."""
        timing = reply.get("timing") if isinstance(reply, dict) else None
        self._seen, self._came = None if timing is None else int(timing["seen"]), time.monotonic()

    def _timing(self, reply: Any, decision: float) -> Timing | None:
        """When the actions of a step came there, as the other side says; None if it does not."""
        if (timing := reply.get("timing")) is None:
            return None
        limited = self._array(timing, "limited", self.num_envs, _BOOL)
        return Timing(float(timing["age"]), decision, limited, int(timing["holds"]))

    def _interventions(self, reply: Any) -> Interventions | None:
        """Interventions of somebody on the other side, who acts there without being asked for."""
        if reply.get("intervened") is None:
            return None
        steps = self._array(reply, "intervened", self.num_envs, _BOOL)
        spec = ArraySpec((self.action_spec.size,), torch.float32)
        return Interventions(steps, self._array(reply, "executed", self.num_envs, spec))

    def instructions(self) -> list[str] | None:
        return self._words

    def render(self, env_ids: Tensor) -> Tensor:
        if "render" not in self._can:
            return super().render(env_ids)
        return torch.from_numpy(self._call("render", env_ids=env_ids.numpy()))

    def save(self) -> list[State]:
        if "save" not in self._can:
            raise NotImplementedError(f"what {self._who} simulates cannot be saved: set env.fresh=true")
        states: list[State] = tensors(self._call("save"))
        return states

    def restore(self, states: Sequence[State], env_ids: Tensor) -> None:
        self._come_back()
        reply = self._call("restore", states=arrays(list(states)), env_ids=env_ids.numpy())
        self._words = self._instructions_in(reply)
        self._begun[env_ids] = True
        self._note(reply)

    def close(self) -> None:
        self._leave()

    def _observation(self, reply: Any, rows: int) -> Observation:
        arrays = reply.get("observation") if isinstance(reply, dict) else None
        return {name: self._array(arrays, name, rows, spec) for name, spec in self.observation_spec.items()}

    def _array(self, reply: Any, name: str, rows: int, spec: ArraySpec) -> Tensor:
        """An array of an answer, held to what it must be.

        Raises:
            RemoteError: it is not there, of another shape, or of numbers that would not mean the same.
        """
        if not isinstance(reply, dict) or name not in reply:
            raise RemoteError(f"{self._who} did not tell {name!r}")
        array = np.array(reply[name])
        wanted, kind = [rows, *spec.shape], str(spec.dtype).removeprefix("torch.")
        if list(array.shape) != wanted:
            raise RemoteError(f"{self._who} told {name!r} as {list(array.shape)}, not {wanted}")
        if array.dtype.kind not in ("biuf" if spec.dtype.is_floating_point else "biu"):  # NaN would be true, 0.5 be 0
            raise RemoteError(f"{self._who} told {name!r} as {array.dtype}, not {kind}")
        return torch.from_numpy(array).to(spec.dtype)

    def _instructions_in(self, reply: Any) -> list[str] | None:
        """Instructions in an answer, one for each environment; None where it has none.

        Raises:
            RemoteError: not one text for each of them.
        """
        words: list[str] | None = reply.get("instructions") if isinstance(reply, dict) else None
        if words is not None and len(words) != self.num_envs:
            raise RemoteError(f"{self._who} told {len(words)} instructions for {self.num_envs} environments")
        return words

    def _come_back(self) -> None:
        """Connect, or start the program, anew if it is gone.

        Raises:
            CannotSimulate: it is not there, or not what it was.
        """
        if self._socket is None and _observations(self._connect(again=True)) != self.observation_spec:
            self._leave()
            raise CannotSimulate(f"{self._who} came back with other observations than it had before")

    # The connection ---------------------------------------------------------------------------------------------------

    def _connect(self, again: bool = False) -> dict[str, Any]:
        """Say hello; what the other side says of its simulator.

        Args:
            again: a server was there before, so that it may be on its way up.
        """
        deadline = time.monotonic() + self._connect_seconds
        try:
            self._socket = self._started() if self._command is not None else self._reached(deadline if again else 0.0)
            reply = self._ask(
                {
                    "call": "hello",
                    "version": serve.VERSION,
                    "token": self._token,
                    "num_envs": self.num_envs,
                    "options": self._options,
                },
                deadline,
            )
        except (OSError, serve.Closed, serve.Garbled, TypeError) as error:
            ended = self._leave(0.0 if isinstance(error, TimeoutError) else _END_SECONDS)
            raise CannotSimulate(f"{self._who}: {error or type(error).__name__}{ended}") from error
        if "error" in reply:
            self._leave()
            raise CannotSimulate(f"{self._who}: {reply['kind']}: {reply['error']}")
        value: dict[str, Any] = reply["value"]
        return value

    def _reached(self, until: float) -> socket.socket:
        """A connection to the server, which is tried for again until then."""
        while True:
            try:
                return self._dial()
            except OSError:
                if time.monotonic() + _AGAIN_SECONDS > until:
                    raise
                time.sleep(_AGAIN_SECONDS)

    def _dial(self) -> socket.socket:
        assert self._address is not None
        if self._address.startswith("unix:"):
            connection = socket.socket(socket.AF_UNIX)
            connection.settimeout(self._connect_seconds)
            try:
                connection.connect(self._address[5:])
            except OSError:
                connection.close()
                raise
            return connection
        connection = socket.create_connection(serve.split_address(self._address), self._connect_seconds)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    def _started(self) -> socket.socket:
        assert self._command is not None
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = subprocess.Popen(
                    self._command, stdin=theirs.fileno(), stdout=theirs.fileno(), start_new_session=True
                )
            except OSError:
                ours.close()
                raise
        return ours

    def _call(self, name: str, **arguments: Any) -> Any:
        seconds = self._seconds.get(name, self._reset_seconds)
        try:
            if self._socket is None:
                raise serve.Closed("there is no connection")
            reply = self._ask({"call": name, **arguments}, time.monotonic() + seconds)
        except TimeoutError as error:
            self._leave(patience=0.0)  # it hangs
            raise SimulatorLost(f"{self._who} has not answered {name!r} within {seconds:g} s") from error
        except (OSError, serve.Closed, serve.Garbled) as error:
            ended = self._leave()
            raise SimulatorLost(f"{self._who} was lost in {name!r}: {error or type(error).__name__}{ended}") from error
        if "error" not in reply:
            return reply["value"]
        if reply["kind"] == "Stale":
            self._begun[:] = False
            text = reply["error"].splitlines()[0]
            raise SimulatorLost(f"{self._who} refused actions that came too late: {text}; see its hold_after")
        if reply["kind"] in _REFUSALS:
            self._leave()
        raise RemoteError(f"{self._who} could not {name}: {reply['kind']}: {reply['error']}")

    def _ask(self, call: dict[str, Any], deadline: float) -> dict[str, Any]:
        connection = self._socket
        assert connection is not None

        def left() -> float:
            if (seconds := deadline - time.monotonic()) <= 0:
                raise TimeoutError("it took too long")
            return seconds

        def read(size: int) -> bytes:
            connection.settimeout(left())
            return connection.recv(size)

        lost: OSError | None = None
        try:
            for part in serve.pack(call):
                connection.settimeout(left())
                connection.sendall(part)
        except (BrokenPipeError, ConnectionResetError) as error:  # it may have said why, before it went
            lost = error
        try:
            reply = serve.receive(read)
        except (OSError, serve.Closed) as error:
            raise lost or error from None
        if not isinstance(reply, dict) or not ({"error", "kind"} <= reply.keys() or "value" in reply):
            raise serve.Garbled("an answer that is neither a value nor an error")
        return reply

    def _leave(self, patience: float = _END_SECONDS) -> str:
        """Give the connection up, and end what was started, by force after some seconds; how it ended, for messages."""
        self._begun[:] = False
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        process, self._process = self._process, None
        if process is None:
            return ""
        try:
            code = process.wait(patience)  # it ends by itself when nobody speaks to it
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return " (it was killed)"
        return f" (it ended with exit code {code})"


def _observations(specs: dict[str, Any]) -> dict[str, ArraySpec]:
    return {
        name: ArraySpec(tuple(shape), getattr(torch, dtype)) for name, (shape, dtype) in specs["observation"].items()
    }
