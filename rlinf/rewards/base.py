"""Reward functions: `reward(response, answer, **row) -> float | Score`, plain or async, by itself or by dotted path.

In: a function, a class, a dotted path, or several of them with weights. Out: a `Reward`, which knows what it takes and
can be called with the arguments of one sample.

A function takes what it names: `response`, `answer`, `prompt` (its text), `truncated`, `response_ids`, `messages` (of a
chat prompt), or any column of the data set; with `**kwargs` it takes all but `response_ids`. One that names `responses`
scores all answers to a prompt at once, and returns a list: see `over_group`. Functions written for verl or TRL are
adapted when their parameters have the other framework's names; `verl(function)` and `trl(function)` say it explicitly.

`Scorer` calls a reward for several samples and gives one `Verdict` for each, in order, whatever happens short of the
end of the process. It lives in the child processes of `pool.py`, or in the judge's own process for functions that are
trusted. This module imports nothing heavy: child processes that run rewards start with it. A first import may take
seconds (torch: two), which is nobody's fault whose deadline is running: `ImportWatch` tells of it, and the clock of who
waits for a verdict stands still meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import importlib.abc
import importlib.machinery
import inspect
import io
import math
import pickle
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from types import ModuleType
from typing import Any, Final, Literal, TypeVar

from rlinf.config.importing import resolve
from rlinf.runtime.base.errors import defined_at, line_of


class ImportWatch(importlib.abc.MetaPathFinder):
    """Finds modules as all finders behind it do, and tells of the outermost load. Takes effect when it is made.

    Args:
        tell: called with True before a module is loaded, and with False after it, and all that it imports, was.
    """

    def __init__(self, tell: Callable[[bool], None]) -> None:
        self.tell = tell
        self.seconds = 0.0
        """Spent in loading so far."""
        self._loading = False
        sys.meta_path.insert(0, self)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec that the other finders give; its loader tells of what it does."""
        if self._loading or threading.current_thread() is not threading.main_thread():
            return None  # within another load; or the messages of two threads would mix
        others = (finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec"))
        specs = (each.find_spec(name, path, target) for each in others)
        spec = next((each for each in specs if each is not None), None)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = _Telling(self, spec.loader)
        return spec

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Tell that a module is loaded inside."""
        if self._loading:
            yield
            return
        self._loading, since = True, time.monotonic()
        self.tell(True)
        try:
            yield
        finally:
            self._loading = False
            self.seconds += time.monotonic() - since
            self.tell(False)


class _Telling(importlib.abc.Loader):
    """A loader that tells when it works, and leaves the module as if its own loader had been asked."""

    def __init__(self, watch: ImportWatch, loader: Any) -> None:
        self._watch, self._loader = watch, loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        spec.loader = self._loader  # some look at their spec
        try:
            return self._loader.create_module(spec)  # type: ignore[no-any-return]
        finally:
            spec.loader = self

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        with self._watch.loading():
            self._loader.exec_module(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


@dataclass(frozen=True, slots=True)
class Score:
    """A reward with what it is made of."""

    value: float
    """The reward itself."""
    scores: Mapping[str, float] = field(default_factory=dict)
    """Parts by name, for metrics."""
    extracted: str | None = None
    """Text that was taken as the answer itself: equal ones vote together in maj@k."""


class _NotApplicable:
    """The type of `NOT_APPLICABLE`."""

    def __repr__(self) -> str:
        return "None (does not apply)"


NOT_APPLICABLE: Final = _NotApplicable()
"""In place of a score: the function is for other problems, and the sum is of the other functions. TRL's functions say
it by None; one of ours that returns None has forgotten its `return`."""


def after_thought(response: str) -> str:
    """A response without what a model thought before it: what follows a last `</think>`, or all."""
    _, end, text = response.rpartition("</think>")
    return text.strip() if end else response


def as_list(value: Any) -> list[Any] | None:
    """Scores of several answers as a list: of a list, tensor, array or column of a table; None of anything else."""
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        return None
    if getattr(value, "ndim", 1) != 1:
        return None
    return list(value.tolist() if hasattr(value, "tolist") else value)


def as_number(value: Any) -> float | None:
    """A number of Python's, numpy's or torch's as a float; None of anything else, a text that reads like one too."""
    if isinstance(value, str | bytes | bytearray):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):  # the last is torch's, of a tensor with several numbers
        return None


_KEYWORD, _EMPTY = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.empty
_TRL_ONLY = ("prompts", "completions", "completion_ids", "trainer_state")


def adapted(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, adapted if its parameters are verl's (`solution_str`, `ground_truth`) or TRL's (`completions`)."""
    if isinstance(function, verl | trl):
        return function
    names = inspect.signature(function).parameters
    if "solution_str" in names and "ground_truth" in names:
        return verl(function)
    return trl(function) if "completions" in names else function


class _Adapter:
    """A function written for another framework.

    Args:
        function: what to call.
    """

    def __init__(self, function: Callable[..., Any]):
        self.function = function
        self.__name__ = getattr(function, "__name__", type(function).__name__)
        self._parameters = inspect.signature(function).parameters
        self._all = _takes_all(self._parameters.values())

    def _call(self, arguments: Mapping[str, Any]) -> Any:
        """Call the function with those of the arguments that it takes."""
        own = {name: item for name, item in arguments.items() if self._all or name in self._parameters}
        return self.function(**own)


class verl(_Adapter):
    """`compute_score(data_source, solution_str, ground_truth, extra_info)`, which returns a number or a dict.

    The ground truth is the column `reward_model.ground_truth` as it is, or else the answer. Of a dict, `score` is the
    reward, `pred` what was extracted, and the other numbers are parts of the score.
    """

    def __init__(self, function: Callable[..., Any]):
        super().__init__(function)
        own = {"response": _EMPTY, "answer": _EMPTY, "reward_model": None, "extra_info": None}
        self.__signature__ = _signature(own, self._parameters, ("solution_str", "ground_truth", "extra_info"))

    def __call__(self, response: str, answer: str, **row: Any) -> Any:
        """Call it for one sample."""
        model = row.pop("reward_model", None)
        truth = model["ground_truth"] if isinstance(model, Mapping) and "ground_truth" in model else answer
        arguments = {"extra_info": None, **row, "solution_str": response, "ground_truth": truth}
        return _converted(self._call(arguments), self._score)

    def _score(self, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        if "score" not in value:
            raise ValueError(f"reward {self.__name__} returned {value!r:.200} without `score`, which is the reward")
        others = {name: as_number(item) for name, item in value.items() if name not in ("score", "pred")}
        numbers = {name: number for name, number in others.items() if number is not None}
        predicted = value.get("pred")
        return Score(value["score"], numbers, None if predicted is None else str(predicted))


class trl(_Adapter):
    """`reward(prompts, completions, **columns) -> list[float]`, called with lists of one.

    Prompts and completions are texts, or lists of messages where the data set's prompts are chats. The scores may be a
    list, a tensor or an array; None among them means that the function does not apply, and the others are summed.
    Functions that compare the completions of a prompt with each other are marked by `over_group`: they get all of them.
    """

    def __init__(self, function: Callable[..., Any]):
        super().__init__(function)
        self.__over_group__ = getattr(function, "__over_group__", False)
        response = "responses" if self.__over_group__ else "response"
        own: dict[str, Any] = {response: _EMPTY, "prompt": "", "messages": None}
        if "completion_ids" in self._parameters:
            own["response_ids"] = ()
        self.__signature__ = _signature(own, self._parameters, _TRL_ONLY)

    def __call__(
        self, response: str = "", prompt: str = "", messages: Any = None, responses: Any = None, **row: Any
    ) -> Any:
        """Call it for one sample, or for a group."""
        chat, texts = messages is not None, [response] if responses is None else responses
        ids = row.pop("response_ids", [] if responses is None else [[]] * len(texts))
        arguments: dict[str, Any] = {name: [value] * len(texts) for name, value in row.items() if name != "truncated"}
        if "truncated" in row:
            arguments["truncated"] = [row["truncated"]] if responses is None else row["truncated"]
        arguments["prompts"] = [messages if chat else prompt] * len(texts)
        arguments["completions"] = [[{"role": "assistant", "content": text}] if chat else text for text in texts]
        arguments["completion_ids"] = [ids] if responses is None else ids
        arguments["trainer_state"] = None  # TRL's own state: there is none here
        return _converted(self._call(arguments), _first if responses is None else _of_group)


def _takes_all(parameters: Iterable[inspect.Parameter]) -> bool:
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


def _signature(
    own: Mapping[str, Any], inner: Mapping[str, inspect.Parameter], hidden: Sequence[str]
) -> inspect.Signature:
    """Keyword parameters: `own` with their defaults, then those of the adapted function that are columns."""
    parameters = {name: inspect.Parameter(name, _KEYWORD, default=default) for name, default in own.items()}
    columns = [each for name, each in inner.items() if name not in hidden and each.kind is not each.VAR_POSITIONAL]
    rest = [each for each in columns if each.kind is each.VAR_KEYWORD]
    parameters |= {each.name: each.replace(kind=_KEYWORD) for each in columns if each not in rest}
    return inspect.Signature([*parameters.values(), *rest])


def _first(value: Any) -> Any:
    scores = as_list(value)
    if scores is None or len(scores) != 1:
        raise ValueError(f"expected a list of one reward for one completion, got {value!r:.200}")
    return _applicable(scores)[0]


def _applicable(scores: list[Any]) -> list[Any]:
    """TRL's scores, with `NOT_APPLICABLE` in place of its None."""
    return [NOT_APPLICABLE if score is None else score for score in scores]


def _of_group(value: Any) -> Any:
    scores = as_list(value)
    return value if scores is None else _applicable(scores)


def _converted(value: Any, convert: Callable[[Any], Any]) -> Any:
    """A value converted, or a coroutine of it where it must be awaited."""

    async def convert_later() -> Any:
        return convert(await value)

    return convert_later() if inspect.isawaitable(value) else convert(value)


class BadReward(ValueError):
    """A reward function returned what is no reward; the text says which one, and where it is defined."""


F = TypeVar("F", bound=Callable[..., Any])
RewardFunction = Callable[..., Any]
"""Returns a number or a `Score`, or an awaitable of one."""


class ByValue:
    """A function that no other process could import, such as a lambda or one of the main program: as its code.

    Args:
        code: a pickle by cloudpickle.
        original: the function itself, which the process that has it goes on to use; no other process is sent it.
    """

    def __init__(self, code: bytes, original: RewardFunction | None = None):
        self.code = code
        self._original = original

    def __reduce__(self) -> tuple[Any, ...]:
        return ByValue, (self.code,)

    @staticmethod
    def of(function: RewardFunction) -> ByValue:
        """Pickle a function with all that it refers to.

        Raises:
            Exception: something that it refers to cannot be pickled, such as a lock or an open file.
        """
        import cloudpickle  # only here: the processes that read it need it, and they import it by themselves

        class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
            def reducer_override(self, each: Any) -> Any:  # a cache is pickled by name, even where no name leads to it
                if isinstance(each, _CACHE) and (_is_main(each) or "<" in each.__qualname__):
                    return _cached, (each.__wrapped__, each.cache_parameters())
                return super().reducer_override(each)

        file = io.BytesIO()
        Pickler(file).dump(function)
        return ByValue(file.getvalue(), function)

    @property
    def function(self) -> RewardFunction:
        """The function: itself in the process that has it, and made anew in others."""
        return pickle.loads(self.code) if self._original is None else self._original


_CACHE = type(functools.lru_cache(lambda: None))


def _cached(function: Any, parameters: Mapping[str, Any]) -> Any:
    """A function with an empty cache of the same size."""
    return functools.lru_cache(**parameters)(function)


def _is_main(value: Any) -> bool:
    return getattr(value, "__module__", None) == "__main__"


def name_in_main(value: Any) -> str | None:
    """The name of a function or class of the main program that a pickle of a value would refer to; None if there is
    none, so that other processes can read it. A partial, a cache or an object of the main program's refers to it too.

    Raises:
        Exception: the value cannot be pickled.
    """
    names: list[str] = []

    class Pickler(pickle.Pickler):
        def reducer_override(self, each: Any) -> Any:
            if not _is_main(each):
                return NotImplemented
            names.append(str(getattr(each, "__qualname__", type(each).__qualname__)))
            return str, ()  # nobody reads this pickle

    Pickler(io.BytesIO()).dump(value)
    return names[0] if names else None


RewardSource = RewardFunction | str | ByValue | Mapping[str, Any]
"""A function or class, its dotted path, or several parts by name: each one of those, or a mapping with `function` and
perhaps `weight` and `args`."""

OFFERED = ("response", "answer", "prompt", "truncated")
"""Arguments that every sample has. Besides: `messages` for chat prompts, and the columns of the data set."""
RESPONSES = "responses"
"""The answers to a prompt, a list of texts, in place of `response`: who names it scores whole groups."""
ON_REQUEST = "response_ids"
"""The sampled token ids, a list: only for who names it, since `**kwargs` seldom means them."""
_PART_KEYS = {"function", "weight", "args"}


def trusted(function: F) -> F:
    """Mark a reward function that cannot hang, crash or take long: it may run in the judge's own process."""
    function.__trusted__ = True  # type: ignore[attr-defined]
    return function


def over_group(function: F) -> F:
    """Mark a reward function that scores all answers to a prompt at once, by comparing them with each other.

    It takes `responses`, a list of texts, in place of `response`; `truncated` and `response_ids` are lists, too. It
    returns a list of numbers or of `Score`s, one per answer in their order. A function that names `responses` needs no
    mark; one with `**kwargs` or written for TRL does.
    """
    function.__over_group__ = True  # type: ignore[attr-defined]
    return function


@trusted
def nothing() -> float:
    """0 for every answer: where a reward model alone scores."""
    return 0.0


def load_reward(reward: RewardFunction | str | ByValue) -> RewardFunction:
    """The reward function itself.

    Args:
        reward: a function or class, its code, or its dotted path, such as "rlinf.rewards.exact".

    Raises:
        ValueError: the path leads nowhere, or not to a function.
    """
    function: Any = reward.function if isinstance(reward, ByValue) else reward
    if isinstance(reward, str):
        try:
            function = resolve(reward)
        except (ImportError, AttributeError) as error:
            raise ValueError(f"reward {reward!r} cannot be found: {error}") from error
    if not callable(function):
        raise ValueError(f"reward {reward!r} is a {type(function).__name__}, not a function")
    return function  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class Part:
    """One function of a reward, with its arguments bound by name."""

    name: str
    """Under which its value is reported when there are several."""
    function: RewardFunction
    """The function to call."""
    weight: float
    """Its share in the sum."""
    bound_names: frozenset[str]
    """Arguments that it has already, the same for every sample; they win over columns of that name."""
    names: frozenset[str]
    """Arguments that it takes from a sample."""
    needed: frozenset[str]
    """Those of `names` that have no default."""
    takes_all: bool
    """It has `**kwargs`."""
    is_async: bool
    """It returns an awaitable."""
    trusted: bool
    """It may run in the judge's own process."""
    over_group: bool = False
    """It scores all answers to a prompt at once."""
    line: str = ""
    """`path:line` where it is defined, if that is known."""
    described: str = field(init=False)
    """Its name and where it is defined, for messages."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "described", f"{self.name} ({self.line})" if self.line else self.name)

    @staticmethod
    def of(
        name: str | None, source: RewardFunction | str | ByValue, weight: float, args: Mapping[str, Any], make: bool
    ) -> Part:
        """Look a function up and read its signature.

        Args:
            name: what to call it; None for the function's own name.
            source: function, class or dotted path. A class is made with `args`, and its objects are called.
            weight: share in the sum.
            args: arguments that are the same for every sample.
            make: whether to make the object of a class; it is enough to do that where it is called.

        Raises:
            ValueError: nothing callable is there, or `args` has a name that the function does not take.
        """
        source = load_reward(source)
        own = name_of(source)
        function: Any
        if inspect.isclass(source):
            _check_args(own, args, inspect.signature(source))
            function = source(**args) if make else source.__call__
            hidden, bound_names = 0 if make else 1, frozenset[str]()  # of a class, `self`
        else:
            _check_readable(own, source)
            _check_args(own, args, inspect.signature(adapted(source)))
            bound = functools.partial(source, **args) if args else source
            if bound is not source and getattr(source, "__over_group__", False):
                over_group(bound)
            function = adapted(bound)
            hidden, bound_names = 0, frozenset(args)
        parameters = list(inspect.signature(function).parameters.values())[hidden:]
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        if by_position := [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY and p.default is p.empty]:
            raise ValueError(f"reward {own} takes {by_position} by position only{_by_name(own, source)}")
        return Part(
            name=name or own,
            function=function,
            weight=weight,
            bound_names=bound_names,
            names=frozenset(parameter.name for parameter in named) - bound_names,
            needed=frozenset(p.name for p in named if p.default is p.empty) - bound_names,
            takes_all=any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters),
            is_async=_is_async(function),
            trusted=getattr(source, "__trusted__", False),
            over_group=getattr(source, "__over_group__", False) or any(p.name == RESPONSES for p in named),
            line=defined_at(source),
        )

    def __call__(self, offered: Mapping[str, Any]) -> Any:
        """Call the function with those of the arguments that it takes; an awaitable if it is async."""
        if self.takes_all:
            refused = self.bound_names if ON_REQUEST in self.names else {*self.bound_names, ON_REQUEST}
            return self.function(**{name: value for name, value in offered.items() if name not in refused})
        return self.function(**{name: offered[name] for name in self.names if name in offered})


@dataclass(frozen=True, slots=True)
class Reward:
    """One reward function, or a weighted sum of several.

    Attributes are read off the functions; `Reward.of` makes one.
    """

    parts: tuple[Part, ...]
    """The parts that are summed."""
    several: bool
    """It is a sum, so that the parts are reported by name."""
    needed: frozenset[str] = field(init=False)
    """Arguments that a sample must have."""
    wanted: frozenset[str] | None = field(init=False)
    """Arguments that are to be offered; None for all there are."""
    is_async: bool = field(init=False)
    """Some part is async."""
    over_group: bool = field(init=False)
    """Some part scores all answers to a prompt at once, so that they are offered together."""
    trusted: bool = field(init=False)
    """All parts may run in the judge's own process."""

    def __post_init__(self) -> None:
        for name, among in (("is_async", any), ("over_group", any), ("trusted", all)):  # asked once per answer
            object.__setattr__(self, name, among(getattr(part, name) for part in self.parts))
        object.__setattr__(self, "needed", frozenset[str]().union(*(part.needed for part in self.parts)))
        names = frozenset[str]().union(*(part.names for part in self.parts))
        object.__setattr__(self, "wanted", None if any(part.takes_all for part in self.parts) else names)

    @staticmethod
    def of(source: RewardSource, args: Mapping[str, Any] | None = None, *, make: bool = True) -> Reward:
        """Find the functions.

        Args:
            source: one function, class or dotted path; or a mapping from names to such, or to mappings with
                `function` and perhaps `weight` (1 if not said) and `args`.
            args: further arguments of the one function, by name.
            make: whether to make the objects of classes.

        Raises:
            ValueError: something is not found, or said in a wrong way.
        """
        if not isinstance(source, Mapping):
            return Reward((Part.of(None, source, 1.0, args or {}, make),), several=False)
        if args:
            raise ValueError("reward: give `args` to each part, not to the sum of them")
        if not source:
            raise ValueError("reward: there is no part to sum up")
        return Reward(tuple(_part(name, part, make) for name, part in source.items()), several=True)

    @property
    def name(self) -> str:
        """For messages."""
        return " + ".join(part.name for part in self.parts)

    def ready(self) -> None:
        """Ask functions with an attribute `__ready__` whether they can work on this machine.

        Raises:
            Exception: whatever such an attribute raises, which is called with the function's bound arguments.
        """
        for part in self.parts:
            source = part.function.func if isinstance(part.function, functools.partial) else part.function
            if (ready := getattr(source, "__ready__", None)) is not None:
                ready(**getattr(part.function, "keywords", {}))

    def check(self, names: Iterable[str]) -> None:
        """See that a sample has what the functions take.

        Args:
            names: what it has: `OFFERED`, and the columns of the data set.

        Raises:
            ValueError: a function names something that is not there.
        """
        columns = {*names} - {"response", RESPONSES}
        for part in self.parts:
            there = {*columns, RESPONSES if part.over_group else "response", ON_REQUEST}
            if missing := part.needed - there:
                raise ValueError(
                    f"reward {part.name} takes {sorted(missing)}, which is no column here; there are "
                    f"{sorted(there - {ON_REQUEST})}. Rename its parameter, give it a default, or give the value in "
                    "the reward's args"
                )

    def __call__(self, offered: Mapping[str, Any]) -> Any:
        """The `Score` of a sample with these arguments; an awaitable of it if a part is async."""
        values = [part(offered) for part in self.parts]
        if self.is_async:
            return self._awaited(values)
        if type(values[0]) is float and not self.several:  # as nearly always
            return Score(_finite(self.parts[0].described, values[0]))
        return self.summed(values)

    async def _awaited(self, values: list[Any]) -> Score:
        return self.summed([await value if inspect.isawaitable(value) else value for value in values])

    def summed(self, values: Sequence[Any]) -> Score:
        """The `Score` of an answer.

        Args:
            values: what each part returned for it.

        Raises:
            BadReward: one is no finite number, or no part applies to the answer.
        """
        applying = [pair for pair in zip(self.parts, values, strict=True) if pair[1] is not NOT_APPLICABLE]
        pairs = [(part, checked(part.described, value)) for part, value in applying]
        if not pairs:
            which = " + ".join(part.described for part in self.parts)
            raise BadReward(
                f"reward {which} returned None, so nothing scores this answer: return a finite number, or add a "
                "reward that applies where this one does not"
            )
        if not self.several:
            return pairs[0][1]
        scores: dict[str, float] = {}
        for part, score in pairs:
            scores[part.name] = score.value
            scores.update({f"{part.name}/{name}": value for name, value in score.scores.items()})
        total = sum(part.weight * score.value for part, score in pairs)
        return Score(total, scores, next((score.extracted for _, score in pairs if score.extracted is not None), None))


def checked(name: str, value: Any) -> Score:
    """Turn what a reward function returned into a `Score` of finite numbers.

    Raises:
        BadReward: it is no finite number.
    """
    if isinstance(value, Score):
        scores = {part: _finite(f"{name}, part {part},", number) for part, number in value.scores.items()}
        extracted = None if value.extracted is None else str(value.extracted)
        return Score(_finite(name, value.value), scores, extracted)
    return Score(_finite(name, value))


def _finite(name: str, value: Any) -> float:
    number = value if type(value) is float else as_number(value)
    if number is None or not math.isfinite(number):
        if inspect.iscoroutine(value):
            value.close()
        raise BadReward(f"reward {name} returned {value!r:.200}: it must return a finite number, or a Score of them")
    return number


def _part(name: str, part: Any, make: bool) -> Part:
    if not isinstance(part, Mapping):
        return Part.of(name, part, 1.0, {}, make)
    if unknown := part.keys() - _PART_KEYS:
        raise ValueError(f"reward part {name!r} has {sorted(unknown)}; it takes {sorted(_PART_KEYS)}")
    if "function" not in part:
        raise ValueError(f"reward part {name!r} names no `function`")
    weight = part.get("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
        raise ValueError(f"reward part {name!r} has weight {weight!r}, which is no number")
    return Part.of(name, part["function"], float(weight), part.get("args") or {}, make)


def name_of(function: Any) -> str:
    """A function's own name, which a partial has from what it calls; of an object, its class's."""
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__name__", type(function).__name__))


def _by_name(name: str, source: Any) -> str:
    """Advice on a function that takes arguments by position: rewards are called by the names of their parameters."""
    if inspect.isbuiltin(source):
        return f": wrap it in a function that names what it takes, such as lambda response: {name}(response)"
    return "; remove the `/` from its parameters"


def _check_readable(name: str, function: Any) -> None:
    try:
        inspect.signature(function)
    except ValueError:  # of some functions that are written in C
        raise ValueError(f"reward {name} does not say what it takes{_by_name(name, function)}") from None


def _check_args(name: str, args: Mapping[str, Any], signature: inspect.Signature) -> None:
    parameters = signature.parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    if unknown := args.keys() - signature.parameters.keys():
        raise ValueError(f"reward {name} does not take {sorted(unknown)}; it takes {list(signature.parameters)}")


def _is_async(function: Any) -> bool:
    """True if a function, an object with an async `__call__`, or the function that an adapter wraps is async."""
    wrapped = getattr(function, "function", None)
    return (
        inspect.iscoroutinefunction(function)
        or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004
        or (wrapped is not None and _is_async(wrapped))
    )


Arguments = Mapping[str, Any]
"""Arguments that are offered to the reward function for one sample."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of judging one sample."""

    outcome: Literal["ok", "timeout", "error"]
    """It was scored; it took too long; it raised, crashed, or returned no number."""
    value: float | None = None
    """The reward, if it was scored."""
    scores: Mapping[str, float] = field(default_factory=dict)
    """Its parts by name."""
    extracted: str | None = None
    """Text that was taken as the answer itself."""
    remark: str = ""
    """Why it was not scored, in a line."""
    trace: str = ""
    """The traceback, if an exception was why."""
    hopeless: bool = False
    """No other sample would fare better: a module that the function needs is not installed."""
    members: Sequence[Verdict] = ()
    """Verdicts on each answer of a group that was scored as one."""

    @staticmethod
    def read(data: Any) -> Verdict:
        """The verdict that a child sent as plain data.

        Raises:
            ValueError: it is none.
        """
        try:
            data = {**data}
            verdict = Verdict(**{**data, "members": tuple(Verdict.read(one) for one in data.get("members", ()))})
        except TypeError as error:
            raise ValueError(f"{data!r:.200} is no verdict: {error}") from None
        texts = (verdict.extracted or "", verdict.remark, verdict.trace)
        numbers = [*verdict.scores.values()] if isinstance(verdict.scores, dict) else [None]
        if verdict.outcome == "ok":
            numbers.append(verdict.value)
        if (
            verdict.outcome not in ("ok", "timeout", "error")
            or not all(isinstance(text, str) for text in texts)
            or not all(type(number) is float and math.isfinite(number) for number in numbers)
        ):
            raise ValueError(f"{data!r:.200} is no verdict")
        return verdict


MOST_ROWS = 8
"""Failed answers that a judge remembers between two questions: enough to see what they have in common."""


@dataclass(frozen=True, slots=True)
class ScoreCounts:
    """Counts of answers that judges scored, or failed to score; those of several judges add up."""

    answers: int = 0
    """All of them."""
    timeouts: int = 0
    """The reward took too long."""
    errors: int = 0
    """It raised, crashed, or returned no number."""
    remark: str = ""
    """Why the first of those failed."""
    rows: tuple[Mapping[str, Any], ...] = ()
    """A few of those, as rows of samples.jsonl."""
    joined: int = 0
    """Processes that have joined to score."""
    away: int = 0
    """Answers that those have scored."""

    def __add__(self, other: ScoreCounts) -> ScoreCounts:
        return ScoreCounts(
            self.answers + other.answers,
            self.timeouts + other.timeouts,
            self.errors + other.errors,
            self.remark or other.remark,
            (*self.rows, *other.rows)[:MOST_ROWS],
            self.joined + other.joined,
            self.away + other.away,
        )

    @staticmethod
    def total(parts: Iterable[ScoreCounts]) -> ScoreCounts:
        """All of them together."""
        return sum(parts, ScoreCounts())

    @property
    def failed(self) -> float:
        """The share of answers without a reward."""
        return (self.timeouts + self.errors) / self.answers if self.answers else 0.0


_deadline: contextvars.ContextVar[asyncio.Timeout | None] = contextvars.ContextVar("deadline", default=None)
"""Deadline of the sample that an async function judges."""


@contextlib.contextmanager
def uncounted() -> Iterator[None]:
    """Time within which `reward.timeout` stands still, for an async reward that waits for its turn or has deadlines of
    its own."""
    limit, loop = _deadline.get(), asyncio.get_running_loop()
    end = None if limit is None else limit.when()
    if limit is None or end is None or end <= loop.time():
        yield
        return
    rest = end - loop.time()
    limit.reschedule(None)
    try:
        yield
    finally:
        limit.reschedule(loop.time() + rest)


class Scorer:
    """A reward function in the process where it runs.

    Args:
        source, args: as for `Reward.of`.
    """

    def __init__(self, source: RewardSource, args: Mapping[str, Any] | None = None):
        self.reward = Reward.of(source, args)
        self._runner: asyncio.Runner | None = None
        self._imports: ImportWatch | None = None

    def pauses(self, tell: Callable[[bool], None]) -> None:
        """Have `tell` called when a module begins and ends to be loaded: that counts against no deadline."""
        self._imports = ImportWatch(tell)

    def score(self, batch: Sequence[Arguments], timeout: float, budget: float) -> list[Verdict]:
        """Judge samples: plain functions one after the other, async ones together.

        Args:
            batch: arguments for each sample.
            timeout: seconds that an async function has for each.
            budget: seconds after which no further plain call is begun; the verdicts so far are returned, at least one.
        """
        if self.reward.is_async:
            if self._runner is None:  # one loop for all calls, so that sessions and pools of the function's own live on
                self._runner = asyncio.Runner(loop_factory=self._loop)
            return self._runner.run(self.together(batch, timeout))
        end = time.monotonic() + budget
        verdicts: list[Verdict] = []
        for offered in batch:
            verdicts.append(self.one(offered))
            if time.monotonic() >= end:
                break
        return verdicts

    def plain_verdicts(self, batch: Sequence[Arguments], timeout: float, budget: float) -> list[dict[str, Any]]:
        """`score` in plain data, for `Verdict.read`."""
        return [asdict(verdict) for verdict in self.score(batch, timeout, budget)]

    def one(self, offered: Arguments) -> Verdict:
        """Judge one sample, or one group, with a plain function."""
        if self.reward.over_group:
            return members(self.reward, offered, called(self.reward, offered))
        try:
            score = self.reward(offered)
        except (Exception, SystemExit) as error:  # foreign code: whatever it raises is the verdict on this sample
            return failed(error)
        return Verdict("ok", score.value, score.scores, score.extracted)

    async def together(self, batch: Sequence[Arguments], timeout: float) -> list[Verdict]:  # noqa: ASYNC109
        """Judge samples with an async function, all at once; each has `timeout` seconds."""
        return await asyncio.gather(*(self._one_async(offered, timeout) for offered in batch))

    def close(self) -> None:
        """End the loop of async functions."""
        if self._runner is not None:
            self._runner.close()

    def _loop(self) -> asyncio.AbstractEventLoop:
        """A loop whose clock, by which samples have their deadlines, stands still while modules are loaded."""
        loop, watch = asyncio.new_event_loop(), self._imports
        if watch is not None:
            loop.time = lambda: time.monotonic() - watch.seconds  # type: ignore[method-assign]
        return loop

    async def _one_async(self, offered: Arguments, seconds: float) -> Verdict:
        limit = asyncio.timeout(seconds)
        try:
            async with limit:
                _deadline.set(limit)
                if self.reward.over_group:
                    values = await asyncio.gather(*(_settled(part) for part in called(self.reward, offered)))
                    return members(self.reward, offered, values)
                score = await self.reward(offered)
        except (Exception, SystemExit) as error:
            if limit.expired():
                return Verdict("timeout", remark=f"took longer than {seconds:g} s")
            return failed(error)
        return Verdict("ok", score.value, score.scores, score.extracted)


# Groups --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Raised:
    """An exception that a part raised instead of returning a value."""

    error: BaseException


def called(reward: Reward, offered: Arguments) -> list[list[Any]]:
    """Call every part of a reward for a group.

    Args:
        reward: some part of which scores groups.
        offered: for the group: `responses`, `truncated` and `response_ids` are lists.

    Returns:
        For each part what its calls returned or raised, or awaitables of it: one for the group, or one per answer.
    """
    answers = [_of_answer(offered, index) for index in range(len(offered[RESPONSES]))]
    return [[_attempt(part, each) for each in ([offered] if part.over_group else answers)] for part in reward.parts]


def members(reward: Reward, offered: Arguments, values: Sequence[Sequence[Any]]) -> Verdict:
    """The verdict on a group, with one for each of its answers.

    Args:
        reward, offered: see `called`.
        values: what it returned, awaited.
    """
    count = len(offered[RESPONSES])
    columns: list[Sequence[Any]] = []
    for part, returned in zip(reward.parts, values, strict=True):
        if not part.over_group:
            columns.append(returned)
            continue
        (value,) = returned
        if isinstance(value, _Raised):
            return failed(value.error)
        scores = as_list(value)
        if scores is None or len(scores) != count:
            problem = f"{value!r:.100}" if scores is None else f"{len(scores)} scores"
            wanted = f"a list of {count}, one score per answer"
            return failed(
                BadReward(f"reward {part.described} returned {problem} for {count} answers: it must return {wanted}")
            )
        columns.append(scores)
    return Verdict("ok", 0.0, members=tuple(_member(reward, row) for row in zip(*columns, strict=True)))


def _member(reward: Reward, values: Sequence[Any]) -> Verdict:
    for value in values:
        if isinstance(value, _Raised):
            return failed(value.error)
    try:
        score = reward.summed(values)
    except BadReward as error:
        return failed(error)
    return Verdict("ok", score.value, score.scores, score.extracted)


def _of_answer(offered: Arguments, index: int) -> dict[str, Any]:
    """The arguments of a part that scores single answers, for one of the group."""
    one = {name: value for name, value in offered.items() if name != RESPONSES}
    one["response"] = offered[RESPONSES][index]
    for name in ("truncated", ON_REQUEST):
        if name in offered:
            one[name] = offered[name][index]
    return one


def _attempt(part: Part, offered: Arguments) -> Any:
    try:
        return part(offered)
    except (Exception, SystemExit) as error:  # foreign code, see `Scorer.one`
        return _Raised(error)


async def _settled(values: Sequence[Any]) -> list[Any]:
    async def settle(value: Any) -> Any:
        try:
            return await value if inspect.isawaitable(value) else value
        except (Exception, SystemExit) as error:  # foreign code, see `Scorer.one`
            return _Raised(error)

    return list(await asyncio.gather(*(settle(value) for value in values)))


def failed(error: BaseException) -> Verdict:
    """The verdict on a sample for which the function raised."""
    if isinstance(error, BadReward):  # raised by a line of ours, which helps nobody
        return Verdict("error", remark=str(error))
    line = line_of(error)
    where = f" ({line})" if line else ""
    return Verdict(
        "error",
        remark=f"{type(error).__name__}: {error}{where}",
        trace="".join(traceback.format_exception(error)),
        hopeless=isinstance(error, ImportError),
    )
