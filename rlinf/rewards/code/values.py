"""JSON form of values that go between an answer's code and its tests.

In: a value of Python or its library. Out: JSON. Containers of one message are numbered in the order in which they come,
on both sides alike, so that one which comes twice is one again, and what a call changed in it can be told. Imports the
standard library alone: the judge uses it, and both programs of `far_side.py`.
"""

from __future__ import annotations

import builtins
import collections
import datetime
import decimal
import fractions
import importlib
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

_LONGEST_RANGE = 1 << 20
"""Items of a range that the judge makes a list of."""
_FROZEN: dict[str, Callable[[Any], Any]] = {"t": tuple, "f": frozenset}
_MUTABLE: dict[str, Callable[[], Any]] = {
    "l": list,
    "s": set,
    "d": dict,
    "B": bytearray,
    "q": collections.deque,
    "o": collections.OrderedDict,
    "C": collections.Counter,
    "D": collections.defaultdict,
}
_TAGS: dict[Any, str] = {kind: tag for tag, kind in (*_FROZEN.items(), *_MUTABLE.items())}
_MAPPINGS = (dict, collections.OrderedDict, collections.Counter, collections.defaultdict)
_VIEWS: dict[str, Callable[[Any], Any]] = {
    "keys": lambda items: dict.fromkeys(items).keys(),
    "values": lambda items: dict(enumerate(items)).values(),
    "items": lambda items: dict(items).items(),
}
_RICH: dict[type, Callable[[Any], Sequence[Any]]] = {
    complex: lambda value: (value.real, value.imag),
    range: lambda value: (value.start, value.stop, value.step),
    slice: lambda value: (value.start, value.stop, value.step),
    fractions.Fraction: lambda value: (value.numerator, value.denominator),
    decimal.Decimal: lambda value: (str(value),),
    datetime.date: lambda value: (value.year, value.month, value.day),
    datetime.time: lambda value: (value.hour, value.minute, value.second, value.microsecond, value.tzinfo),
    datetime.datetime: lambda value: (*value.timetuple()[:6], value.microsecond, value.tzinfo),
    datetime.timedelta: lambda value: (value.days, value.seconds, value.microseconds),
    datetime.timezone: lambda value: (value.utcoffset(None),),
    pathlib.PosixPath: lambda value: (str(value),),
    pathlib.PurePosixPath: lambda value: (str(value),),
}
"""Values of the library that do not change: arguments of which each is made again."""
_RICH_NAMES = {kind.__name__: kind for kind in _RICH}
BASES: dict[type, Callable[[Any], Any]] = {
    int: int.__index__, float: float.__pos__, str: lambda value: str.__getitem__(value, slice(None)),
    bytes: lambda value: bytes.__getitem__(value, slice(None)), tuple: lambda value: (*tuple.__iter__(value),),
    list: lambda value: [*list.__iter__(value)], dict: lambda value: dict(dict.items(value)),
    set: lambda value: {*set.__iter__(value)}, frozenset: lambda value: frozenset(frozenset.__iter__(value)),
    collections.deque: lambda value: collections.deque(collections.deque.__iter__(value)),
}  # fmt: skip
"""Types that classes of an answer may be made of, and what an object of such a class is without the class."""
_CLASSES = {name: kind for name, kind in vars(builtins).items() if isinstance(kind, type)}
_PLAIN = {*_TAGS, *BASES, bool, complex, bytes}
SHARED_NAMES = {name: kind for name, kind in _CLASSES.items() if kind in _PLAIN or issubclass(kind, BaseException)}
"""Classes that an answer's code may send by their names; all others of the library could compare as they like."""


class Things(Protocol):
    """A side's handling of things that are no plain data, and stay where they are."""

    def refer(self, value: Any, writer: Writer) -> Any:
        """The reference that is written for a thing."""

    def resolve(self, tag: str, items: list[Any], reader: Reader) -> Any:
        """The thing here that a reference of the other side stands for."""


class Writer:
    """Writes the values of one message as JSON: scalars as they are, all else as a list with a tag.

    Args:
        peer: keeps what is no plain data; None: there must be no such thing.
        known: containers that the reader has already.
    """

    def __init__(self, peer: Things | None = None, containers: Sequence[Any] = ()):
        self._peer, self.containers = peer, [*containers]
        self._places = {id(each): place for place, each in enumerate(containers)}

    def write(self, value: Any) -> Any:
        """A value as JSON.

        Raises:
            TypeError: there is something that is no plain data, and no peer.
        """
        kind = type(value)
        if value is None or kind in (bool, float, str):
            return value
        if kind is int:
            return value if -(1 << 63) < value < 1 << 63 else ["i", hex(value)]
        if kind in (tuple, frozenset):
            return [_TAGS[kind], *map(self.write, value)]
        if id(value) in self._places:
            return ["=", self._places[id(value)]]
        if kind in _TAGS:
            self._remember(value)
            return [_TAGS[kind], *self.content(value)]
        if kind is bytes:
            return ["b", value.hex()]
        if kind in _RICH:
            return ["x", kind.__name__, *map(self.write, _RICH[kind](value))]
        if kind.__module__ == "numpy" and (data := self._of_numpy(value)) is not None:
            return data
        if kind.__name__ in ("dict_keys", "dict_values", "dict_items", "odict_keys", "odict_values", "odict_items"):
            return ["v", kind.__name__.partition("_")[2], *map(self.write, value)]
        if self._peer is None:
            raise TypeError(f"a {kind.__name__} cannot be sent")
        return self._peer.refer(value, self)

    def content(self, value: Any) -> list[Any]:
        """The items of a container that can be changed, written."""
        if isinstance(value, _MAPPINGS):
            items = [self.write(getattr(value, "default_factory", None))] if type(value) is _MUTABLE["D"] else []
            return [*items, *([self.write(key), self.write(item)] for key, item in value.items())]
        if isinstance(value, collections.deque):
            return [value.maxlen, *map(self.write, value)]
        if isinstance(value, bytearray):
            return [value.hex()]
        if type(value).__module__ == "numpy":
            return [value.dtype.str, list(value.shape), self.write(value.tolist())]
        return [*map(self.write, value)]

    def _of_numpy(self, value: Any) -> Any:
        kind = type(value).__name__
        if not hasattr(value, "dtype") or value.dtype.kind not in "biufcUS":
            return self.write(value.tolist()) if kind == "ndarray" else None
        if kind != "ndarray":
            return ["N", value.dtype.str, self.write(value.item())]
        self._remember(value)
        return ["n", *self.content(value)]

    def _remember(self, value: Any) -> None:
        self._places[id(value)] = len(self.containers)
        self.containers.append(value)


class Reader:
    """Reads the values of one message.

    Args:
        peer: has what stands for things of the other side; None: there are none, and values are read as they would be
            written in JSON, so that nothing of theirs can take long.
        known: containers that the writer has already.
    """

    def __init__(self, peer: Things | None = None, containers: Sequence[Any] = ()):
        self._peer, self.containers = peer, [*containers]

    def read(self, data: Any) -> Any:
        """The value.

        Raises:
            ValueError: it is none.
        """
        if not isinstance(data, list):
            return data
        tag, *items = data or [None]
        if tag in _FROZEN:
            return _FROZEN[tag](map(self.read, items))
        if tag in _MUTABLE or tag == "n":
            return self._container(tag, items)
        if tag == "=":
            return self.containers[int(items[0])]
        if tag == "i":
            return int(items[0], 16)
        if tag == "b":
            return bytes.fromhex(items[0])
        if tag == "x":
            return self._rich(*items)
        if tag == "v":
            values = [*map(self.read, items[1:])]
            return _VIEWS[items[0]](values) if self._peer else values
        if tag == "N":
            return _array(items[0], [], self.read(items[1]))[()] if self._peer else self.read(items[1])
        if self._peer is not None:
            return self._peer.resolve(tag, items, self)
        raise ValueError(f"{tag!r} is no value")

    def change(self, place: int, content: list[Any]) -> None:
        """Give a container another content, which it has on the other side."""
        value = self.containers[place]
        if type(value).__module__ == "numpy":
            value[...] = _array(content[0], content[1], self.read(content[2]))
            return
        value.clear()
        self._fill(value, content[1:] if isinstance(value, collections.deque) else content)

    def _container(self, tag: str, items: list[Any]) -> Any:
        if tag == "n":
            nested = self.read(items[2])
            value = _array(items[0], items[1], nested) if self._peer else nested
            self.containers.append(value)
            return value
        value = _MUTABLE[tag]()
        if tag == "q":
            value, items = collections.deque(maxlen=items[0]) if self._peer else [], items[1:]
        self.containers.append(value)
        self._fill(value, items)
        return value

    def _fill(self, value: Any, items: list[Any]) -> None:
        if isinstance(value, bytearray):
            value += bytes.fromhex(items[0])
        elif isinstance(value, _MAPPINGS):
            if isinstance(value, collections.defaultdict):
                factory, *items = items
                value.default_factory = self.read(factory) if self._peer else None
            for key, item in items:
                value[self.read(key)] = self.read(item)
        elif isinstance(value, set):
            value.update(map(self.read, items))
        else:
            value.extend(map(self.read, items))

    def _rich(self, name: str, *items: Any) -> Any:
        kind, args = _RICH_NAMES[name], [*map(self.read, items)]
        if self._peer:
            return kind(*args)
        if kind is range and len(range(*args)) <= _LONGEST_RANGE:
            return [*range(*args)]
        if kind in (complex, decimal.Decimal) or (kind is fractions.Fraction and max(map(abs, args)) < 1 << 4096):
            return kind(*args)
        raise ValueError(f"a {name} is nothing that JSON has")


def _array(dtype: str, shape: Sequence[int], nested: Any) -> Any:
    if dtype.lstrip("<>|=")[:1] not in (*"biufcUS",):
        raise ValueError(f"{dtype!r} is no type of numbers or texts")
    numpy = importlib.import_module("numpy")
    return numpy.array(nested, dtype).reshape(shape)


def encode(value: Any) -> Any:
    """A value of Python or its library as JSON.

    Raises:
        TypeError: it is none.
    """
    return Writer().write(value)


def decode(data: Any) -> Any:
    """The value that an answer's code wrote, as far as it can be compared with one that JSON has.

    Raises:
        ValueError: it is none.
    """
    return Reader().read(data)


def call(function: str, args: Sequence[Any]) -> list[Any]:
    """The message that calls a function of an answer; the reply is `value` and what it returned, or `raised`."""
    writer = Writer()
    return ["call", 0, function, writer.write([*args]), writer.write({})]
