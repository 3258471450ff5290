"""The far side of a remote simulator: makes what is simulated, and answers calls on it over a socket.

This file needs numpy and Python 3.8 and nothing else, so that it can be copied to a robot or into any environment:

    python serve.py --make my_robot.py:Arm --listen 0.0.0.0:7000

`Arm(num_envs, **options)` has the attributes `observation_spec`, {name: (shape of one row, dtype)}, `action_low` and
`action_high`, [A], and `max_steps`, a number or None; and the methods

    reset(seeds, env_ids)   -> observation: {name: array [n, ...]} of those environments
    step(actions, active)   -> {"observation": {name: [N, ...]}, "reward": [N], "terminated": [N], "truncated": [N],
                                "success": [N] or None}; where a person there may take over, also "intervened": bool [N]
                                and "executed": [N, A], the actions that were done instead, within the bounds
    instructions()          -> N texts, or None                         (may be missing)
    render(env_ids)         -> uint8 [n, H, W, 3]                       (may be missing)
    save()                  -> N states; restore(states, env_ids)       (may be missing)
    close()                                                             (may be missing)

Of a robot, which goes on moving while nobody speaks, these may be there, too:

    hold_after, hold()      seconds from an observation in which the next action must have come; otherwise hold() is
                            called, which does what is safe there, and no action is done before the next reset
    taken                   when the newest observation was taken, seconds by time.monotonic(): of cameras that show
                            what was a while ago; otherwise it is when reset or step returned
    most_change             [A]: how much each number of an action may differ from that of the action before; what is
                            more is cut, and counted

With `resets_together = True`, `reset` is called for all environments at once only. Where rlinf is installed, classes of
its own kind (`rlinf.envs.base.Simulator`) are served, too.

A frame is, in network order, the four bytes RLR1, the length of a header (4 bytes) and of a body (8 bytes), the header,
which is JSON in UTF-8, and the body, the numbers of all arrays one after the other. The header is one value, in which
{"#array": [dtype, shape]} stands for the next array, {"#bytes": length} for the next bytes and {"#dict": [[key, value],
...]} for a dictionary whose keys begin with "#". A call is {"call": name, ...arguments}, and its answer {"value": ...}
or {"error": text, "kind": name}. The first call of a connection is "hello" with "version", "token", "num_envs" and
"options"; its answer has "version" and the specs. Answers to "reset", "restore" and "step" number what is seen
("timing": {"seen": ...}), and "step" may say which of them its actions are for ("number"): others are refused as Stale.
After a step "timing" also has "age", seconds from the observation to the arrival of the actions, "limited", bool [N],
and "holds" since the answer before. Each connection has a simulator of its own; calls come one at a time.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hmac
import importlib.util
import json
import math
import os
import secrets
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np

VERSION = 1  # of the protocol; both sides must have the same
TOKEN = "RLINF_REMOTE_TOKEN"
"""Environment variable with the word that a connection must know."""
_MAGIC = b"RLR1"
_PREFIX = struct.Struct(">4sIQ")
_MOST_HEADER, _MOST_BODY, _MOST_UNKNOWN = 1 << 26, 1 << 32, 1 << 16
"""Bytes of a header, of a body, and of either before the token is said; more is a mistake, or fills the memory."""
_DEEPEST = 64
"""Collections in one another."""
_say = functools.partial(print, flush=True)


class Garbled(Exception):
    """The bytes that came are no frame of this protocol."""


class Closed(Exception):
    """The other side has closed the connection."""


def pack(value: Any) -> list[Any]:
    """A frame, as a list of buffers to send one after the other.

    Args:
        value: arrays, bytes, texts, numbers, booleans and None, in lists, tuples and dictionaries with texts as keys.
    """
    parts: list[Any] = []
    header = json.dumps(_told(value, parts), separators=(",", ":")).encode()
    return [_PREFIX.pack(_MAGIC, len(header), sum(len(part) for part in parts)) + header, *parts]


def unpack(header: bytes, body: bytes) -> Any:
    """The value of a frame.

    Raises:
        Garbled: it is none.
    """
    try:
        place = [0]
        value = _understood(json.loads(header.decode()), body, place, 0)
    except (ValueError, TypeError, KeyError, IndexError, RecursionError, OverflowError, AttributeError) as error:
        raise Garbled(f"a frame that means nothing: {error}") from error
    if place[0] != len(body):
        raise Garbled("a frame whose body is longer than its arrays")
    return value


def _told(value: Any, parts: list[Any]) -> Any:
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in "biuf":
            raise TypeError(f"arrays of {value.dtype} cannot be sent")
        whole = np.ascontiguousarray(value, value.dtype.newbyteorder("<"))
        flat: Any = whole.reshape(-1).view(np.uint8)
        parts.append(memoryview(flat))
        return {"#array": [whole.dtype.str, list(value.shape)]}
    if isinstance(value, np.generic):
        return _told(value.item(), parts)
    if isinstance(value, (bytes, bytearray)):
        parts.append(memoryview(value))
        return {"#bytes": len(value)}
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            raise TypeError(f"keys must be texts: {list(value)[:5]}")
        if any(key.startswith("#") for key in value):
            return {"#dict": [[key, _told(each, parts)] for key, each in value.items()]}
        return {key: _told(each, parts) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_told(each, parts) for each in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"{type(value).__name__} cannot be sent: {value!r}")


def _understood(value: Any, body: bytes, place: list[int], depth: int) -> Any:
    if depth > _DEEPEST:
        raise ValueError("collections too deep in one another")
    if isinstance(value, list):
        return [_understood(each, body, place, depth + 1) for each in value]
    if not isinstance(value, dict):
        return value
    if "#array" in value:
        dtype, shape = np.dtype(value["#array"][0]), value["#array"][1]
        if dtype.kind not in "biuf" or not all(type(side) is int and side >= 0 for side in shape):
            raise ValueError(f"no array: {value}")
        raw = _next(body, place, math.prod(shape) * dtype.itemsize)
        return np.frombuffer(raw, dtype).reshape(shape).copy()
    if "#bytes" in value:
        return bytes(_next(body, place, int(value["#bytes"])))
    if "#dict" in value:
        return {str(key): _understood(each, body, place, depth + 1) for key, each in value["#dict"]}
    return {key: _understood(each, body, place, depth + 1) for key, each in value.items()}


def _next(body: bytes, place: list[int], size: int) -> memoryview:
    if not 0 <= size <= len(body) - place[0]:
        raise ValueError("arrays longer than the body")
    place[0] += size
    return memoryview(body)[place[0] - size : place[0]]


def receive(recv: Callable[[int], bytes], trusted: bool = True) -> Any:
    """The value of the next frame.

    Args:
        recv: `read(n)` returns from 1 to n bytes, or none at the end.
        trusted: whether the other side has said the token; otherwise only small frames are taken.

    Raises:
        Closed: the connection has ended.
        Garbled: what comes is no frame.
    """
    magic, header, body = _PREFIX.unpack(_exactly(recv, _PREFIX.size))
    if magic != _MAGIC:
        raise Garbled(f"this is not rlinf's protocol for remote simulators (it begins with {magic!r})")
    most_header, most_body = (_MOST_HEADER, _MOST_BODY) if trusted else (_MOST_UNKNOWN, _MOST_UNKNOWN)
    if header > most_header or body > most_body:
        raise Garbled(f"a frame of {header} and {body} bytes is too long")
    return unpack(_exactly(recv, header), _exactly(recv, body))


def _exactly(recv: Callable[[int], bytes], size: int) -> bytes:
    content = bytearray()
    while len(content) < size:
        part = recv(min(size - len(content), 1 << 20))
        if not part:
            raise Closed("the connection has ended")
        content += part
    return bytes(content)


def found(make: str) -> Any:
    """Return the object that "module:name", "file.py:name" or "package.module.name" names.

    Raises:
        ImportError: there is none.
    """
    where, _, name = make.rpartition(":") if ":" in make else make.rpartition(".")
    if where.endswith(".py"):
        spec: Any = importlib.util.spec_from_file_location("served", where)
        module = importlib.util.module_from_spec(spec)
        sys.path.insert(0, os.path.dirname(os.path.abspath(where)))
        spec.loader.exec_module(module)
    else:
        sys.path.insert(0, os.getcwd())
        module = importlib.import_module(where)
    if not hasattr(module, name):
        raise ImportError(f"{where} has no {name}")
    return getattr(module, name)


class Stale(Exception):
    """The actions are for an observation that is not the newest, or the robot has held since."""


class Guard:
    """Watches over what moves while nobody speaks: holds, limits, and when things were seen and done.

    Args:
        simulator: what is served.
        clock: tells seconds.
        timer: makes a timer of seconds and a function, with `start` and `cancel`.

    Raises:
        ValueError: its `hold_after` or `most_change` cannot be done.
    """

    def __init__(self, simulator: Any, clock: Callable[[], float] = time.monotonic, timer: Any = threading.Timer):
        self._simulator, self._clock, self._timer = simulator, clock, timer
        self._after, self._change = getattr(simulator, "hold_after", None), getattr(simulator, "most_change", None)
        if self._after is not None and not (self._after > 0 and hasattr(simulator, "hold")):
            raise ValueError("hold_after must be more than 0, and needs hold(), which does what is safe")
        if self._change is not None and (np.asarray(self._change) < 0).any():
            raise ValueError("most_change must be at least 0")
        self._lock = threading.Lock()  # a timer's thread holds
        self._running: Any = None
        self._before: Any = None  # actions that were done last, NaN where there were none
        self._held, self._holds, self._seen, self._taken = False, 0, 0, clock()

    def reset(self, seeds: Any, env_ids: Any) -> Any:
        """Begin episodes."""
        return self._begun(env_ids, lambda: self._simulator.reset(seeds, env_ids))

    def restore(self, states: Any, env_ids: Any) -> Any:
        """Go on from states."""
        return self._begun(env_ids, lambda: self._simulator.restore(states, env_ids))

    def step(self, actions: Any, active: Any, number: Any = None) -> Any:
        """Do actions.

        Args:
            actions, active: see the top of the file.
            number: of the observation that they are for; None: not known.

        Raises:
            Stale: it is not the newest, or the robot has held since.
        """
        age = self._clock() - self._taken
        with self._lock:
            self._rest()
            if self._held or (number is not None and number != self._seen):
                raise Stale("it holds" if self._held else f"actions for {number}, and {self._seen} is the newest")
            actions, limited = self._within(actions, active)
            answer = dict(self._simulator.step(actions, active))
            self._look()
            answer["timing"] = {"seen": self._seen, "age": age, "limited": limited, "holds": self._told_holds()}
            over = np.asarray(answer["terminated"], bool) | np.asarray(answer["truncated"], bool)
            if self._after is not None and (np.asarray(active, bool) & ~over).any():
                self._running = self._timer(self._after, functools.partial(self._late, self._seen))
                self._running.daemon = True
                self._running.start()
            return answer

    def timing(self) -> Any:
        """Number of the newest observation."""
        return {"seen": self._seen}

    def close(self) -> None:
        """Hold, if it moves, and give the simulator back."""
        with self._lock:
            if self._rest() and not self._held:
                self._hold("the connection has ended")
            if hasattr(self._simulator, "close"):
                self._simulator.close()

    def _begun(self, env_ids: Any, begin: Callable[[], Any]) -> Any:
        with self._lock:
            self._rest()
            value = begin()
            self._held = False
            if self._before is not None:
                self._before[env_ids] = np.nan
            self._look()
            return value

    def _look(self) -> None:
        moment = getattr(self._simulator, "taken", None)
        self._seen, self._taken = self._seen + 1, self._clock() if moment is None else float(moment)

    def _within(self, actions: Any, active: Any) -> Any:
        """Actions within the limits, and where they were changed, [N]."""
        if self._change is None:
            return actions, np.zeros(len(actions), bool)
        before = np.full_like(actions, np.nan) if self._before is None else self._before
        most = np.asarray(self._change, actions.dtype)
        within = np.where(np.isnan(before), actions, np.clip(actions, before - most, before + most))
        active = np.asarray(active, bool)
        self._before = np.where(active[:, None], within, before)
        return within, (within != actions).any(1) & active

    def _late(self, number: int) -> None:
        with self._lock:
            if number == self._seen and self._running is not None:
                self._running = None
                self._hold(f"no action within {self._after:g} s")

    def _hold(self, why: str) -> None:
        self._held, self._holds = True, self._holds + 1
        _say(f"{why}: it holds")
        try:
            self._simulator.hold()
        except Exception:  # of a robot: whoever stands beside it must know
            _say(f"it could not hold:\n{traceback.format_exc()}")

    def _rest(self) -> bool:
        """No timer runs any more; true if one did."""
        running, self._running = self._running, None
        if running is not None:
            running.cancel()
        return running is not None

    def _told_holds(self) -> int:
        holds, self._holds = self._holds, 0
        return holds


class Session:
    """One connection: its simulator, once it has said hello.

    Args:
        make: what makes the simulator, called with `num_envs` and the options.
        token: what "hello" must say; "" for nothing.
    """

    def __init__(self, make: Callable[..., Any], token: str):
        self._make = make
        self._token = token
        self._simulator: Any = None
        self._guard: Any = None

    @property
    def known(self) -> bool:
        """True once the other side has said hello."""
        return self._simulator is not None

    def answer(self, request: Any) -> Any:
        """The value of a call.

        Args:
            request: the call, as it came.
        """
        if not isinstance(request, dict):
            raise Garbled("a call must be a dictionary")
        name = request.pop("call", None)
        if name == "hello" and not self.known:
            return self._hello(**request)
        if not self.known:
            raise PermissionError(f"the first call must be hello, not {name!r}")
        if name not in ("reset", "step", "render", "save", "restore"):
            raise ValueError(f"there is no call {name!r}")
        value = getattr(self._simulator if name in ("render", "save") else self._guard, name)(**request)
        if name in ("reset", "restore"):  # the two after which others may be meant to do other things
            return {"observation": value, "instructions": self._words(), "timing": self._guard.timing()}
        return value

    def close(self) -> None:
        """Give the simulator back."""
        if self._guard is not None:
            self._guard.close()
        self._simulator = self._guard = None

    def _hello(self, version: Any = None, token: str = "", num_envs: int = 1, options: Any = None) -> Any:
        if version != VERSION:
            raise PermissionError(f"this side speaks version {VERSION} of the protocol, and the other {version!r}")
        secret = str(token).encode("utf-8", "surrogatepass")  # JSON may hold half a pair
        if self._token and not hmac.compare_digest(secret, self._token.encode()):
            raise PermissionError("the token is wrong")
        simulator = self._make(num_envs=num_envs, **(options or {}))
        if hasattr(simulator, "action_spec"):  # of rlinf's own kind, which is here then
            simulator = importlib.import_module("rlinf.envs.remote.client").OfRlinf(simulator)
        self._guard, self._simulator = Guard(simulator), simulator
        spec = simulator.observation_spec.items()
        specs = {name: [list(shape), np.dtype(dtype).name] for name, (shape, dtype) in spec}
        return {
            "version": VERSION,
            "observation": specs,
            "action_low": np.asarray(self._simulator.action_low, np.float32),
            "action_high": np.asarray(self._simulator.action_high, np.float32),
            "max_steps": self._simulator.max_steps,
            "instructions": self._words(),
            "resets_together": bool(getattr(self._simulator, "resets_together", False)),
            "timed": True,
            "can": [name for name in ("render", "save", "restore") if hasattr(self._simulator, name)],
        }

    def _words(self) -> Any:
        texts = self._simulator.instructions() if hasattr(self._simulator, "instructions") else None
        return None if texts is None else [str(text) for text in texts]


def converse(session: Session, recv: Callable[[int], bytes], write: Callable[[Any], Any], turn: threading.Lock) -> None:
    """Answer calls until the connection ends.

    Args:
        session: what answers.
        recv: see `receive`.
        write: sends a buffer whole.
        turn: a lock: simulators of one process are called one at a time.
    """
    try:
        while True:
            try:
                request = receive(recv, session.known)
            except Garbled as error:  # where the next frame begins is not known any more
                _send(write, {"error": str(error), "kind": "Garbled"})
                return
            try:
                with turn:
                    reply = {"value": session.answer(request)}
                frame = pack(reply)
            except Exception as error:  # of a simulator, which may raise anything
                lines = traceback.format_exc().strip().splitlines()
                text = f"{error}\n" + "\n".join(lines[-7:-1]) if session.known else str(error)
                _send(write, {"error": text, "kind": type(error).__name__})
                if not session.known:
                    return
                continue
            for part in frame:
                write(part)
    except (Closed, OSError):
        pass
    finally:
        with turn:
            session.close()


def _send(write: Callable[[Any], Any], value: Any) -> None:
    for part in pack(value):
        write(part)


def over_stdio(make: Callable[..., Any], token: str) -> None:
    """Serve whoever started this process, over its standard input and output; what is printed goes to the errors."""
    come, go = os.dup(0), os.dup(1)
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)

    def write(part: Any) -> None:
        while len(part):
            part = memoryview(part)[os.write(go, part) :]

    converse(Session(make, token), lambda size: os.read(come, size), write, threading.Lock())


def split_address(address: str) -> tuple[str, int]:
    """Host and port of "host:port", ":port" (this machine) or "[::1]:port"."""
    host, _, port = address.rpartition(":")
    return host.strip("[]") or "127.0.0.1", int(port)


def listen(make: Callable[..., Any], token: str, address: str, most: int, ready: Callable[[str], Any]) -> None:
    """Serve at an address until the process is told to end.

    Args:
        make: makes simulators.
        token: what connections must know; "" for nothing.
        address: "host:port", "[::1]:port" or "unix:/path".
        most: connections at a time; others are told to wait.
        ready: called with a line that says where, once connections are taken.
    """
    if address.startswith("unix:"):
        server, where = socket.socket(socket.AF_UNIX), address
        server.bind(address[5:])
    else:
        host, port = split_address(address)
        server = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        host, port = server.getsockname()[:2]
        where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    server.listen()
    ready(f"listening at {where}")
    turn, places = threading.Lock(), threading.BoundedSemaphore(most)

    def one(connection: socket.socket) -> None:
        with connection:
            if not address.startswith("unix:"):
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if not places.acquire(blocking=False):
                text = f"all {most} places are taken: start more servers, or this one with --connections"
                _send(connection.sendall, {"error": text, "kind": "Busy"})
            else:
                try:
                    converse(Session(make, token), connection.recv, connection.sendall, turn)
                finally:
                    places.release()
            _part_from(connection)

    with server:
        while True:
            connection, _ = server.accept()
            threading.Thread(target=one, args=(connection,), daemon=True).start()


def _part_from(connection: socket.socket) -> None:
    """Let the last answer arrive: closing a connection while something that came is unread takes it back."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_WR)
        connection.settimeout(1.0)
        any(not connection.recv(1 << 16) for _ in range(64))


def main(arguments: list[str] | None = None) -> None:
    """See `--help`."""
    parser = argparse.ArgumentParser(description="Serves a simulator or a robot to rlinf.envs.remote.Remote.")
    parser.add_argument("--make", required=True, help="what makes it: module:name, file.py:name or package.module.name")
    parser.add_argument("--listen", help="host:port (port 0: any that is free) or unix:/path")
    parser.add_argument("--stdio", action="store_true", help="serve whoever started this process")
    parser.add_argument("--connections", type=int, default=16, help="at a time, each with a simulator of its own")
    parser.add_argument("--no-token", action="store_true", help="take connections of anybody")
    options = parser.parse_args(arguments)
    if options.stdio == (options.listen is not None):
        parser.error("name either --listen or --stdio")
    if options.stdio:  # who started this hears of mistakes as answers
        over_stdio(lambda **about: found(options.make)(**about), os.environ.get(TOKEN, ""))
        return
    make = found(options.make)
    token = "" if options.no_token else os.environ.get(TOKEN) or secrets.token_urlsafe(24)
    if token and TOKEN not in os.environ:
        _say(f"{TOKEN}={token}")
    listen(make, token, options.listen, options.connections, _say)


if __name__ == "__main__":
    main()
