"""The two programs that run in the sandbox besides the answer; each talks to the judge over a channel.

`candidate` holds the answer's code and does with it what it is asked to. `tests` runs assertions; whatever name they
use that is neither Python's nor theirs is the answer's, and stands for what the judge carries to the candidate. So the
answer never shares a process, a file or an object with what it is compared with: it sees arguments, and sends values
back. Values of Python and its library are copied, and what a call changed in its arguments is changed in the originals.
Objects of the answer's own classes stay where they are, and so do functions and objects of the tests: on the other
side, something stands for them that asks.

What an object of the answer says of itself counts between objects of the answer alone. Compared with a value of the
tests it is equal only if it is one of Python's types underneath, by the content of that; nothing else that is expected
is ever shown to it.

This file is run as a program and imports the standard library, and of ours only what `judge.py` sends along (`_SENT`).
"""

from __future__ import annotations

import builtins
import functools
import importlib
import inspect
import io
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

from rlinf.rewards.code.peer import BINARY, CONVERSIONS, DEEDS, ITEMS, UNARY, Link, Peer, awaited
from rlinf.rewards.code.runner import pytest_module, run_test
from rlinf.rewards.code.values import BASES, SHARED_NAMES

PREAMBLE = """
import bisect, collections, copy, functools, heapq, itertools, math, operator, random, re, string
from bisect import *
from collections import *
from functools import *
from heapq import *
from itertools import *
from math import ceil, comb, factorial, floor, gcd, inf, log, log2, sqrt
from typing import *
"""
"""Imports that published harnesses make before an answer's code, since prompts with signatures leave them out."""
_RECURSION = 50_000
"""Depth of recursion that an answer may use, as in LiveCodeBench's harness."""
_PRINTED = 1 << 18
"""Characters that an answer prints during a call which tests can look at."""


# The answer ----------------------------------------------------------------------------------------------------------


class _Print(io.StringIO):
    """Keeps the first characters that are printed."""

    def write(self, text: str) -> int:
        super().write(text[: max(0, _PRINTED - self.tell())])
        return len(text)


class Answer(Peer):
    """The side of an answer's code: does whatever it is asked to."""

    def __init__(self, link: Link, scope: dict[str, Any]):
        super().__init__(link)
        self._scope = scope

    def perform(self, verb: str, number: int, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Do what a request asks for."""
        if number == 0:
            thing = self._global(name)
            name = "" if verb == "call" else name
        else:
            thing = self.mine(number)
        if verb == "name":
            return thing
        if verb == "call":
            return (getattr(thing, name) if name else thing)(*args, **kwargs)
        if verb == "get":
            return getattr(thing, name)
        if verb == "set":
            return setattr(thing, name, args[0])
        if verb == "do":
            return DEEDS[name](thing, *args)
        if verb == "has":
            return hasattr(type(thing), name)
        raise ValueError(f"{verb!r} is nothing that can be asked for")

    def _global(self, name: str) -> Any:
        if name not in self._scope and "Solution" in self._scope:  # as LeetCode has it
            return getattr(self._scope["Solution"](), name)
        if name not in self._scope:
            raise NameError(f"name {name!r} is not defined")
        return self._scope[name]

    def printed(self) -> str:
        """The text that the answer's code printed since the last call."""
        text, sys.stdout = sys.stdout.getvalue() if isinstance(sys.stdout, _Print) else "", _Print()
        return text

    def number_of(self, value: Any) -> int | None:
        """The number of what the tests handed over."""
        return (
            getattr(value, "__dict__", {}).get("_handed") if isinstance(value, _Handed | types.FunctionType) else None
        )

    def name_of(self, value: Any) -> tuple[str, str] | None:
        """Python's own types alone: the tests take no other class or function from here."""
        name = getattr(value, "__name__", None) if isinstance(value, type) else None
        return ("builtins", name) if name and SHARED_NAMES.get(name) is value else None

    def named(self, module: str, name: str) -> Any:
        """A function or class of the library that tests handed over."""
        return functools.reduce(getattr, name.split(".") if name else (), importlib.import_module(module))

    def facts(self, value: Any) -> dict[str, Any]:
        """Its class, if it is one of the answer's; the type underneath; whether it is awaited, or iterated once."""
        kind = type(value)
        facts: dict[str, Any] = {}
        if kind.__module__ not in sys.stdlib_module_names:
            facts["class"] = self.keep(kind)
        facts["base"] = next((base.__name__ for base in BASES if isinstance(value, base)), "")
        facts["awaited"] = inspect.iscoroutine(value)
        facts["once"] = hasattr(kind, "__next__")
        return facts

    def standing(self, number: int, facts: dict[str, Any]) -> Any:
        """Make the stand-in for something that the tests handed over."""
        if "function" not in facts:
            return _Handed(self, number)

        def handed(*args: Any, **kwargs: Any) -> Any:
            return self.ask("call", number, "", args, kwargs)

        async def handed_async(*args: Any, **kwargs: Any) -> Any:
            return self.ask("do", self.number_of(handed(*args, **kwargs)) or 0, "await")

        function = handed_async if facts["async"] else handed
        function.__name__ = function.__qualname__ = facts["function"]
        function.__doc__ = facts["doc"]
        function.__dict__["_handed"] = number
        return function


def _deed(name: str) -> Callable[..., Any]:
    """A method that asks the other side."""

    def method(self: Any, *args: Any) -> Any:
        return self.__dict__["_peer"].ask("do", self.__dict__["_handed"], name, args)

    return method


class _Handed:
    """An object of a class that the tests define, handed over to the answer."""

    def __init__(self, peer: Peer, number: int):
        self.__dict__.update(_peer=peer, _handed=number)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.__dict__["_peer"].ask("get", self.__dict__["_handed"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        self.__dict__["_peer"].ask("set", self.__dict__["_handed"], name, [value])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it where it is."""
        return self.__dict__["_peer"].ask("call", self.__dict__["_handed"], "", args, kwargs)

    __len__, __iter__, __next__, __getitem__ = map(_deed, ("len", "iter", "next", "getitem"))
    __lt__, __eq__, __hash__, __str__, __bool__ = map(_deed, ("lt", "eq", "hash", "str", "bool"))


def candidate(link: Link) -> None:
    """Run an answer's code, then do with what it defines as the judge asks."""
    sys.setrecursionlimit(_RECURSION)
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    scope = module.__dict__
    peer = Answer(link, scope)
    builtins.input = lambda prompt="": peer.ask("do", 0, "input", [prompt])
    sys.stdout = _Print()
    try:
        exec(PREAMBLE, scope)
        exec(compile(link.receive(), "solution.py", "exec"), scope)
    except BaseException as error:
        link.send(["raised", f"{type(error).__name__}: {error}"[:500]])
        return
    link.send(["value", None])
    peer.printed()
    while True:
        peer.answer(link.receive())


# The tests -----------------------------------------------------------------------------------------------------------


class Remote:
    """Something of the answer: a name that it defines, or an object that it returned.

    Args:
        peer: the answer's side.
        number, name: of the thing; a name alone is looked up when it is used.
        facts: see `Answer.facts`.
    """

    _mixed = False
    """It came of an operator between a thing of the answer and a value of the tests."""

    def __init__(self, peer: Asserted, number: int, name: str = "", facts: dict[str, Any] | None = None):
        self.__dict__.update(_peer=peer, _number=number, _name=name, _facts=facts or {})

    def _do(self, deed: str, *args: Any) -> Any:
        here = self.__dict__
        return here["_peer"].ask("do", here["_number"], deed if here["_number"] else here["_name"], args)

    def _bare(self) -> Any:
        """The value underneath, of one of Python's types; itself if its class has none."""
        return self._do("plain") if self._facts.get("base") else self

    def _binary(self, deed: str, other: Any, swapped: bool = False) -> Any:
        """An operator: between things of the answer theirs, else that of the type underneath.

        An object of a class that the tests name may be combined with values of the tests, if that gives an object
        again: a number that it gave could be made to fit what it was combined with.
        """
        if isinstance(other, Remote) and type(other) is Remote:
            first, second = (other, self) if swapped else (self, other)
            return first._do(deed, second)
        if self._facts.get("base"):
            return DEEDS[deed](*((other, self._bare()) if swapped else (self._bare(), other)))
        if deed in _ORDER or not self._peer.names(self._facts.get("class")):
            return NotImplemented
        method = f"__r{deed.strip('_')}__" if swapped else f"__{deed.strip('_')}__"
        if not self._peer.ask("has", self._number, method):
            return NotImplemented
        value = self._peer.ask("call", self._number, method, [other])
        if type(value) is not Remote or value._facts.get("base"):
            return NotImplemented
        value.__dict__["_mixed"] = value is not self or deed not in _IN_PLACE
        return value

    def _unary(self, deed: str, *args: Any) -> Any:
        if self._mixed:
            raise TypeError(f"{deed} of what came of a value of the tests")
        return DEEDS[deed](self._bare(), *args) if self._facts.get("base") else self._do(deed, *args)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return SHARED_NAMES.get(self.__dict__["_facts"].get("base", ""), Remote)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it where it is."""
        return self._peer.ask("call", self._number, self._name, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in _ASKED:
            raise AttributeError(name)
        return self._peer.ask("get", self._known(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._peer.ask("set", self._known(), name, [value])

    def _known(self) -> int:
        """Its number; that of a name is asked for."""
        if self._number:
            return int(self._number)
        thing = self._peer.ask("name", 0, self._name)
        return thing._number if type(thing) is Remote else thing._far

    def __eq__(self, other: object) -> bool:
        equal = other is self or self._binary("eq", other)
        return equal is True

    def __ne__(self, other: object) -> bool:
        if type(other) is Remote and other is not self:
            return self._binary("ne", other) is not False
        return not self == other

    def __hash__(self) -> int:
        return hash(self._bare()) if self._facts.get("base") else int(self._do("hash"))

    def __bool__(self) -> bool:
        return True if not self._number else bool(self._unary("bool"))

    def __contains__(self, item: Any) -> bool:
        if self._facts.get("base"):
            return item in self._bare()
        own = self._peer.names(self._facts.get("class")) and self._peer.ask("has", self._number, "__contains__")
        return bool(self._do("contains", item)) if own else any(each is item or each == item for each in self)

    def __iter__(self) -> Iterator[Any]:
        if self._facts.get("once"):
            return self
        iterator = iter(self._bare()) if self._facts.get("base") else self._do("iter")
        return iterator if hasattr(type(iterator), "__next__") else iter(iterator)

    def __instancecheck__(self, value: Any) -> bool:
        return type(value) is Remote and self._peer.ask("do", value._number, "isinstance", [self]) is True

    def __subclasscheck__(self, value: Any) -> bool:
        return type(value) is Remote and self._peer.ask("do", value._known(), "issubclass", [self]) is True

    def __await__(self) -> Iterator[Any]:
        return _coroutine(self).__await__()

    async def __anext__(self) -> Any:
        return self._do("anext")

    async def __aenter__(self) -> Any:
        return self._do("aenter")

    async def __aexit__(self, *error: Any) -> Any:
        return self._do("aexit", *error[:2], None)

    def __exit__(self, *error: Any) -> Any:
        return self._do("exit", *error[:2], None)

    def __mro_entries__(self, bases: Any) -> Any:
        raise TypeError(f"a test derives from {self._name or 'a class'} of the answer, which cannot be judged")


_ORDER = ("eq", "ne", "lt", "le", "gt", "ge")
_IN_PLACE = ("iadd", "isub", "imul", "ior")
_ASKED = ("__name__", "__qualname__", "__wrapped__", "__annotations__", "__defaults__", "__members__", "__post_init__")
"""Attributes with such names that no protocol of Python looks for."""


def _unary(deed: str) -> Callable[..., Any]:
    return lambda self, *args: self._unary(deed, *args)


def _binary(deed: str, swapped: bool = False) -> Callable[..., Any]:
    return lambda self, other: self._binary(deed, other, swapped)


for _name in (*BINARY, "divmod"):
    setattr(Remote, f"__{_name.strip('_')}__", _binary(_name))
    setattr(Remote, f"__r{_name.strip('_')}__", _binary(_name, True))
for _name in (*_IN_PLACE, "lt", "le", "gt", "ge"):
    setattr(Remote, f"__{_name}__", _binary(_name))
for _name in (*UNARY, *ITEMS, "len", "next", *CONVERSIONS, "round", "reversed", "enter", "aiter", "dir"):
    setattr(Remote, f"__{_name}__", _unary(_name))


async def _coroutine(remote: Remote) -> Any:
    return remote._do("await")


class Asserted(Peer):
    """The side of the tests: what was handed over can be called, and objects of the tests' classes looked into."""

    def __init__(self, link: Link):
        super().__init__(link)
        self._classes: set[int] = set()

    def names(self, kind: int | None) -> bool:
        """True if the tests name a class of the answer, as a class."""
        return kind in self._classes

    def look_up(self, name: str) -> Any:
        """Ask the answer for the thing that it has by a name."""
        thing = self.ask("name", 0, name)
        if type(thing) is Remote:
            thing.__dict__["_name"] = ""
            if name[:1].isupper():
                self._classes.add(thing._number)
        return thing

    def perform(self, verb: str, number: int, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Do what the answer's code asks for."""
        if (verb, number, name) == ("do", 0, "input"):
            return input(*args)
        thing = self.mine(number)
        own = type(thing).__module__ == "tests"
        if verb == "call" and not name and callable(thing):
            return thing(*args, **kwargs)
        if verb == "do" and name == "await" and inspect.isawaitable(thing):
            return awaited(thing)
        if verb == "do" and (own or (name in ("iter", "next") and isinstance(thing, Iterator))) and name in _LOOKS:
            return DEEDS[name](thing, *args)
        if own and verb in ("get", "set") and not name.startswith("__"):
            return getattr(thing, name) if verb == "get" else setattr(thing, name, args[0])
        raise TypeError(f"a {type(thing).__name__} of the tests does not give {name or verb}")

    def number_of(self, value: Any) -> int | None:
        """The number of what is the answer's."""
        return value._known() if type(value) is Remote else None

    def name_of(self, value: Any) -> tuple[str, str] | None:
        """Functions, classes and modules of the library."""
        if isinstance(value, types.ModuleType):
            return (value.__name__, "") if value.__name__ in sys.stdlib_module_names else None
        owner = getattr(value, "__objclass__", None)
        kind = owner if owner is not None else value
        module, name = getattr(kind, "__module__", None), getattr(value, "__qualname__", "")
        if not isinstance(module, str) or module not in sys.stdlib_module_names or not isinstance(name, str):
            return None
        try:
            there = functools.reduce(getattr, name.split("."), importlib.import_module(module))
        except (ImportError, AttributeError):
            return None
        return (module, name) if there is value else None

    def named(self, module: str, name: str) -> Any:
        """One of Python's own types."""
        return SHARED_NAMES[name]

    def facts(self, value: Any) -> dict[str, Any]:
        """How it is called, if it is a function."""
        if isinstance(value, _OBJECTS) or not callable(value) or type(value).__module__ == "tests":
            return {}
        name, doc = getattr(value, "__name__", "function"), getattr(value, "__doc__", None)
        texts = (name if isinstance(name, str) else "function", doc if isinstance(doc, str) else None)
        return {"function": texts[0], "doc": texts[1], "async": inspect.iscoroutinefunction(value)}

    def standing(self, number: int, facts: dict[str, Any]) -> Any:
        """Make the stand-in for something of the answer."""
        remote = Remote(self, number, "", facts)
        return _coroutine(remote) if facts.get("awaited") else remote


_LOOKS = ("len", "iter", "next", "getitem", "lt", "eq", "hash", "str", "bool")
_OBJECTS = (Iterator, io.IOBase)


class _Scope(dict[str, Any]):
    """Names of tests: those that are not known are the answer's."""

    def __init__(self, peer: Asserted):
        super().__init__(__name__="tests", __run_test__=functools.partial(run_test, self))
        self._peer = peer
        self.entry = ""

    def __missing__(self, name: str) -> Any:
        if hasattr(builtins, name):
            raise KeyError(name)
        return _of_answer(self._peer, self.entry if name == "candidate" and self.entry else name)


class _Solution(types.ModuleType):
    """The answer as a module, for tests that import it."""

    def __init__(self, peer: Asserted):
        super().__init__("solution")
        self.__dict__["_peer"] = peer

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _of_answer(self.__dict__["_peer"], name)


def _of_answer(peer: Asserted, name: str) -> Any:
    """The thing that the answer has by a name; if it has none, a stand-in that fails when it is used."""
    try:
        return peer.look_up(name)
    except NameError:
        return Remote(peer, 0, name)


def tests(link: Link) -> None:
    """Run assertions one after the other, and tell of each."""
    order = link.receive()
    peer = Asserted(link)
    scope = _Scope(peer)
    sys.modules["tests"] = module = types.ModuleType("tests")
    sys.modules["solution"] = _Solution(peer)
    sys.modules["pytest"] = pytest_module()
    try:
        exec(order["context"], scope)
    except Exception:
        pass  # a prompt that is no program: what it defines is the answer's, then
    scope.pop(order["entry"], None)
    scope.entry = order["entry"]
    try:
        exec(compile(order["setup"], "tests.py", "exec"), scope)
    except BaseException as error:
        if not peer.asked or (isinstance(error, ImportError | SyntaxError) and error is not peer.raised):
            link.send(["broken", f"{type(error).__name__}: {error}"])
            return
        order["pieces"] = ["raise AssertionError"] * len(order["pieces"])  # it was the answer that failed
    module.__dict__.update(scope)
    for piece in order["pieces"]:
        try:
            exec(compile(piece, "test.py", "exec"), scope)
            passed = True
        except BaseException:
            passed = False
        link.send(["passed" if passed else "failed"])


if __name__ == "__main__":
    {"candidate": candidate, "tests": tests}[sys.argv[1]](Link())
