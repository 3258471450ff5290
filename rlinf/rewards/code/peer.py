"""The protocol between an answer's code and its tests, the same from either side: requests, answered while one waits.

In: requests and replies over a channel, whose other end is the judge's; he carries them on unread. Who wakes whom: one
message is under way at any time, and whoever sent it waits for the reply or for a request of the other side.
"""

from __future__ import annotations

import builtins
import functools
import json
import operator
import os
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from rlinf.rewards.code.values import BASES, Reader, Writer

_LENGTH = 8
"""Bytes of the length that goes before a message."""


class Link:
    """Messages to and from the judge, as JSON, each after its length."""

    def __init__(self, descriptor: int = 3):
        self._descriptor = descriptor

    def send(self, message: list[Any]) -> None:
        """Send a message."""
        text = json.dumps(message).encode()
        data = len(text).to_bytes(_LENGTH, "big") + text
        while data:
            data = data[os.write(self._descriptor, data) :]

    def receive(self) -> Any:
        """The next message; ends this program when there is none."""
        return json.loads(self._exactly(int.from_bytes(self._exactly(_LENGTH), "big")))

    def _exactly(self, size: int) -> bytes:
        parts = []
        while size:
            part = os.read(self._descriptor, min(size, 1 << 20))
            if not part:
                os._exit(0)
            parts.append(part)
            size -= len(part)
        return b"".join(parts)


class Peer:
    """One of the two programs as the other sees it: asks, and answers what it is asked meanwhile.

    A request is a verb, the number of a thing (0 is the answer's code as a whole), a name and arguments; the reply says
    what came of it, what the arguments hold now, and what was printed.

    Args:
        link: to the judge, who carries messages on.
    """

    def __init__(self, link: Link):
        self.link = link
        self._process = os.getpid()
        self._kept: list[Any] = [None]
        self._numbers: dict[int, int] = {}
        self.things: dict[int, Any] = {}
        self.asked = 0
        """How many requests were sent."""
        self.raised: BaseException | None = None
        """Exception of the last request that raised one."""

    def ask(self, verb: str, number: int, name: str = "", args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """Send a request to the other side, and return its result; raises what it raises."""
        self.asked += 1
        writer = Writer(self)
        self.link.send([verb, number, name, writer.write([*args]), writer.write(dict(kwargs or {}))])
        while (message := self.link.receive())[0] not in ("value", "raised"):
            self.answer(message)
        status, data, changes, printed = message
        reader = Reader(self, writer.containers)
        value = reader.read(data)
        for place, content in changes:
            reader.change(place, content)
        sys.stdout.write(printed)
        if status == "value":
            return value
        self.raised = value if isinstance(value, BaseException) else RuntimeError(f"{value!r:.100} was raised")
        if isinstance(value, StopIteration | StopAsyncIteration) and name not in ("next", "anext"):
            raise RuntimeError("StopIteration was raised") from value  # `all(map(...))` would take it for the end
        raise self.raised

    def answer(self, message: Any) -> None:
        """Do what a request asks for, and reply."""
        reader = Reader(self)
        before: list[Any] = []
        try:
            verb, number, name, *data = message
            args, kwargs = map(reader.read, data)
            before = [*map(_shallow, reader.containers)]
            status, value = "value", self.perform(verb, number, name, args, kwargs)
        except BaseException as error:
            status, value = "raised", error
        if os.getpid() != self._process:
            os._exit(0)  # a copy that the answer forked has no part in the conversation
        try:
            reply = self._reply(status, value, reader, before)
        except BaseException as error:
            reply = self._reply("raised", error, reader, before)
        self.link.send(reply)

    def _reply(self, status: str, value: Any, reader: Reader, before: list[Any]) -> list[Any]:
        writer = Writer(self, reader.containers)
        data = writer.write(value)
        pairs = enumerate(zip(reader.containers, before, strict=False))
        changed = [(place, each) for place, (each, was) in pairs if not _equal(_shallow(each), was)]
        return [status, data, [[place, writer.content(each)] for place, each in changed], self.printed()]

    def perform(self, verb: str, number: int, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Do what a request asks for."""
        raise NotImplementedError

    def printed(self) -> str:
        """The text that was printed since the last reply, for the other side."""
        return ""

    def keep(self, value: Any) -> int:
        """The number of a thing that stays here."""
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._kept)
            self._kept.append(value)
        return self._numbers[id(value)]

    def mine(self, number: int) -> Any:
        """The thing that has a number."""
        if not 0 < number < len(self._kept):
            raise ValueError(f"there is no thing {number}")
        return self._kept[number]

    def refer(self, value: Any, writer: Writer) -> Any:
        """The reference that is written for a thing that is no plain data."""
        far = value.__dict__.get("_far") if isinstance(value, BaseException | type) else self.number_of(value)
        if far is not None:
            return ["y", far]
        if isinstance(value, BaseException):
            return ["E", self._family(type(value)), writer.write(value.args), str(value), self.keep(value)]
        if isinstance(value, type) and issubclass(value, BaseException):
            return ["e", self._family(value)]
        named = self.name_of(value)
        return ["T", *named] if named else ["k", self.keep(value), self.facts(value)]

    def resolve(self, tag: str, items: list[Any], reader: Reader) -> Any:
        """The thing here that a reference of the other side stands for."""
        if tag == "y":
            return self.mine(int(items[0]))
        if tag == "e":
            return self._class(items[0])
        if tag == "E":
            family, args, text, number = items
            return self._exception(self._class(family), reader.read(args), text, number)
        if tag == "T":
            return self.named(*items)
        if tag == "k":
            number, facts = items
            if number not in self.things:
                self.things[number] = self.standing(number, facts)
            return self.things[number]
        raise ValueError(f"{tag!r} is no value")

    def number_of(self, value: Any) -> int | None:
        """The number of the thing that a value stands for, if it stands for one."""
        raise NotImplementedError

    def name_of(self, value: Any) -> tuple[str, str] | None:
        """Module and name of what both sides have."""
        raise NotImplementedError

    def named(self, module: str, name: str) -> Any:
        """The thing that both sides have by a name."""
        raise NotImplementedError

    def facts(self, value: Any) -> dict[str, Any]:
        """Facts that the other side is to know of a thing."""
        raise NotImplementedError

    def standing(self, number: int, facts: dict[str, Any]) -> Any:
        """Make the stand-in for a thing of the other side."""
        raise NotImplementedError

    def _family(self, kind: type) -> list[Any]:
        """A class of exceptions: by name if it is the library's, else with its bases."""
        if _shared(kind):
            return [0, kind.__module__, kind.__qualname__]
        bases = [self._family(base) for base in kind.__bases__ if issubclass(base, BaseException)]
        return [self.keep(kind), kind.__name__, bases]

    def _class(self, family: list[Any]) -> Any:
        """A class of exceptions that can be raised and caught here."""
        number, name, rest = family
        if not number:
            kind = functools.reduce(getattr, rest.split("."), sys.modules[name])
            if not (isinstance(kind, type) and issubclass(kind, BaseException)):
                raise ValueError(f"{rest} is no exception")
            return kind
        if number not in self.things:
            bases = tuple(map(self._class, rest))
            space = {"_far": number, "_peer": self, "__getattr__": _attribute_of_exception, "__module__": "solution"}
            self.things[number] = _Far(name, bases, space)
        return self.things[number]

    def _exception(self, kind: Any, args: tuple[Any, ...], text: str, number: int) -> BaseException:
        """An exception of the other side; `raise` and `except` take it as one of here."""
        error: BaseException
        if isinstance(kind, _Far):
            error = kind.__new__(kind, *args)  # type: ignore[arg-type]
            error.__dict__.update(_far=number, _text=text)
        else:
            try:
                error = kind(*args)
            except TypeError:
                error = kind.__new__(kind, *args)
        error.args = args
        return error


class _Far(type):
    """A class of exceptions that the other side defines: making one asks there."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls._peer.ask("call", cls._far, "", args, kwargs)  # type: ignore[attr-defined]

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls._peer.ask("get", cls._far, name)  # type: ignore[attr-defined]


def _attribute_of_exception(self: Any, name: str) -> Any:
    if name.startswith("__") or "_far" not in self.__dict__:
        raise AttributeError(name)
    return self._peer.ask("get", self.__dict__["_far"], name)


def _shared(kind: type) -> bool:
    """True if a class is Python's own, or its library's, by the name that it has."""
    module = kind.__module__.partition(".")[0]
    try:
        there = functools.reduce(getattr, kind.__qualname__.split("."), sys.modules[kind.__module__])
    except (KeyError, AttributeError):
        return False
    return module in sys.stdlib_module_names and module != "__main__" and there is kind


def _shallow(container: Any) -> Any:
    """Shallow copy of a container's items, to see later whether it still holds the same things."""
    if isinstance(container, dict):
        return [each for pair in container.items() for each in pair]
    if isinstance(container, bytearray):
        return bytes(container)
    return container.copy() if type(container).__module__ == "numpy" else [*container]


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, list):
        return len(one) == len(other) and all(map(operator.is_, one, other))
    return bool((one == other).all()) if type(one).__module__ == "numpy" else bool(one == other)


def awaited(value: Any) -> Any:
    """Wait for an awaitable and return its result, also where a loop runs already, in a thread of its own then."""

    import asyncio  # takes longer to load than most answers take

    async def wait() -> Any:
        return await value

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return _loop().run_until_complete(wait())
    outcomes: list[Any] = []

    def run() -> None:
        try:
            outcomes.append((asyncio.run(wait()), None))
        except BaseException as error:
            outcomes.append((None, error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    value, error = outcomes[0]
    if error is not None:
        raise error
    return value


@functools.lru_cache(maxsize=1)  # one for all calls, so that locks and queues of the answer's own live on
def _loop() -> Any:
    import asyncio

    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    return loop


_ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul")
BINARY = (*_ARITHMETIC, "and_", "or_", "xor", "lshift", "rshift")
UNARY, ITEMS = ("neg", "pos", "abs", "invert", "index"), ("getitem", "setitem", "delitem")
CONVERSIONS = ("str", "repr", "format", "int", "float", "complex")
_COMPARISONS, _IN_PLACE = ("eq", "ne", "lt", "le", "gt", "ge"), ("iadd", "isub", "imul", "ior")
_OPERATORS = (*BINARY, *UNARY, *ITEMS, *_COMPARISONS, *_IN_PLACE, "contains")
_BUILT_IN = (*CONVERSIONS, "bool", "len", "hash", "iter", "next", "round", "reversed", "divmod", "dir")
DEEDS: dict[str, Callable[..., Any]] = {
    **{name: getattr(operator, name) for name in _OPERATORS},
    **{name: getattr(builtins, name) for name in (*_BUILT_IN, "isinstance", "issubclass")},
    "await": awaited,
    "anext": lambda value: awaited(anext(value)),
    "aiter": aiter,
    "enter": lambda value: type(value).__enter__(value),
    "exit": lambda value, *error: type(value).__exit__(value, *error),
    "aenter": lambda value: awaited(type(value).__aenter__(value)),
    "aexit": lambda value, *error: awaited(type(value).__aexit__(value, *error)),
    "plain": lambda value: next(plain(value) for kind, plain in BASES.items() if isinstance(value, kind)),
    "input": input,
}
"""Operations that a thing can be asked for besides calling it, getting and setting its attributes."""
