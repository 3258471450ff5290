"""Sections of a configuration as their readers see them: keys, types, defaults, limits and docs.

A section is a dataclass of pydantic, which checks its values, and `CLOSED`: it has no other keys. The text under a
field is its documentation: `--help` and docs/config.md print it. A section with `__shorthand__ = "key"` may be given as
a single text, which is that key's; one with `__together__` takes several keys with commas between; a field of type Any
takes a mapping, null, or a text that is short for {name: text}. Rules on several keys of a section, and on what lies
within one, are its method `mistakes`, which yields (key within it, advice). `configured` lets the keys of a section be
given to a role one by one. Knows no key of ours, and imports nothing heavy.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass
from difflib import SequenceMatcher
from functools import cache, wraps
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

if TYPE_CHECKING:
    from pydantic import ConfigDict, ValidationError
    from pydantic_core import ErrorDetails

T = TypeVar("T")
CLOSED: ConfigDict = {"extra": "forbid", "use_attribute_docstrings": True}
_CLOSE_ENOUGH = 0.6  # difflib's own cutoff: below it a suggestion is more often wrong than right
_LIMITS = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}
_WORDS: dict[Any, str] = {
    int: "a whole number (int)",
    float: "a number (float)",
    str: "text (str)",
    bool: "true or false (bool)",
    dict[str, Any]: "a mapping (dict[str, Any])",
    list[int]: "a list of whole numbers, such as [0, 1]",
}


@dataclass(frozen=True, slots=True)
class Leaf:
    """One key that can be set: a field that is not a section itself."""

    key: str
    """Dotted key from the root, such as `optimizer.lr`."""
    type: Any
    """The annotation, resolved."""
    default: Any
    """The value that holds when nobody sets it."""
    doc: str
    """The text under the field."""
    limits: tuple[str, ...]
    """Of a number, or of those in a list: `("at least 1",)`."""
    examples: tuple[str, ...] = ()
    """Values that one would not guess, for errors."""

    def chosen(self, value: Any, written: Any) -> Any:
        """A value of YAML as the key takes it: a text is the characters that stand there, whatever YAML makes of such
        words (`no`, `1e3`, `0x10`, `2024-01-01`, `12:30:45`), and so are those of lists and mappings of texts.

        Args:
            value: as YAML reads it.
            written: the same with every scalar as text, None for null.
        """
        takes = {self.type, *get_args(self.type)}
        if self.is_text or takes & {list[str], dict[str, str]}:
            return written
        choices = get_args(self.type) if get_origin(self.type) is Literal else ()
        return written if value not in choices and isinstance(written, str) and written in choices else value

    def read(self, value: Any) -> Any:
        """A value as pydantic is to see it: one text is a list where texts are asked for, another key's number is a
        text, and true is no number."""
        takes = {self.type, *get_args(self.type)}
        values = value if isinstance(value, list) else [value]
        if str in takes:
            values = [str(each) if isinstance(each, int | float) else each for each in values]
        elif not takes & {bool, True, Any}:
            values = [str(each).lower() if isinstance(each, bool) else each for each in values]
        several = isinstance(value, list) or (self.type == list[str] and isinstance(value, str))
        return values if several else values[0]

    @property
    def is_text(self) -> bool:
        """It takes a text, or null at most."""
        return self.type is str or {*get_args(self.type)} == {str, type(None)}

    @property
    def expectation(self) -> str:
        """Description of the values that it takes: `a whole number (int), at least 1`."""
        if get_origin(self.type) is Literal:
            words = f"one of {', '.join(map(_choice, get_args(self.type)))}"
        elif get_origin(self.type) is tuple:
            words = f"a list of {len(get_args(self.type))} numbers"
        else:
            each = get_args(self.type) if get_origin(self.type) in (Union, types.UnionType) else (self.type,)
            words = " or ".join(_WORDS.get(one, type_name(one)) for one in each)
        return ", ".join([words, *self.limits, *(f"such as {each}" for each in self.examples)])

    @property
    def is_mapping(self) -> bool:
        """True if the key holds a free mapping, or may hold one, into which dotted keys may reach."""
        return get_origin(self.type) is dict or self.type is Any


def leaves(schema: type, prefix: str = "") -> tuple[Leaf, ...]:
    """Every key of a schema, sections flattened, in the order in which they are written."""
    return _keys(schema, prefix)[0]


def sections(schema: type, prefix: str = "") -> tuple[tuple[str, type], ...]:
    """Every section of a schema as (dotted key, dataclass), outer ones first."""
    return _keys(schema, prefix)[1]


@cache
def _keys(schema: Any, prefix: str) -> tuple[tuple[Leaf, ...], tuple[tuple[str, type], ...]]:
    plain: dict[str, Any] = get_type_hints(schema)
    keys, inner = list[Leaf](), list[tuple[str, type]]()
    for name, field in schema.__pydantic_fields__.items():
        key, annotation = f"{prefix}{name}", plain[name]
        if hasattr(annotation, "__pydantic_fields__"):
            below, further = _keys(annotation, f"{key}.")
            keys += below
            inner += [(key, annotation), *further]
            continue
        limits = dict.fromkeys(_limits(field.annotation, field.metadata))
        doc, default = _documentation(schema, name), field.get_default(call_default_factory=True)
        keys.append(Leaf(key, annotation, default, " ".join(doc.split()), tuple(limits), tuple(field.examples or ())))
    return tuple(keys), tuple(inner)


def _documentation(schema: type, name: str) -> str:
    """The text under a field, in the class that wrote it."""
    fields = (vars(base).get("__pydantic_fields__", {}).get(name) for base in schema.__mro__)
    return next((field.description for field in fields if field is not None and field.description), "")


def _limits(annotation: Any, metadata: Iterable[Any]) -> Iterator[str]:
    """Limits of a number in words, those of elements included."""
    for each in metadata:
        for name, words in _LIMITS.items():
            if (limit := getattr(each, name, None)) is not None:
                yield f"{words} {limit:g}"
    for inner in get_args(annotation):
        yield from _limits(inner, getattr(inner, "__metadata__", ()))


def settings(schema: type[T], values: Mapping[str, Any], who: str) -> T:
    """A section from keyword arguments; what is not given has its default.

    So a role takes the keys of a section as arguments of its `setup`, documented and limited in one place:

        async def setup(self, *, model: str, **given: Any) -> None:
            settings_of_mine = settings(TrainerConfig, given, "trainer")

    Args:
        schema: the section.
        values: by name; of a section within it, a mapping or the section itself.
        who: whose settings these are, for the errors.

    Raises:
        ValueError: with every name that there is not, and every value that cannot be.
    """
    from pydantic import ValidationError

    try:
        return schema(**values)
    except ValidationError as error:
        mistakes = list(_named(error, schema))
    said = (f"{key}: {advice}" if value is MISSING else f"{key}={value!r}: {advice}" for key, value, advice in mistakes)
    raise ValueError(f"{who}: {'; '.join(said)}")


def entry_mistakes(schema: type, values: Mapping[Any, Any]) -> Iterator[tuple[str, str]]:
    """(key, advice) for every mistake in a mapping that is written like a section, such as an entry of `teachers`."""
    from pydantic import ValidationError

    try:
        schema(**{str(key): value for key, value in values.items()})
    except ValidationError as error:
        for key, value, advice in _named(error, schema):
            yield key, advice if value is MISSING else f"{value!r}: {advice}"


def _named(error: ValidationError, schema: type) -> Iterator[tuple[str, Any, str]]:
    """(key, value, advice) of each error; the value is MISSING where there is no such key, or where it is not set."""
    by_key = {leaf.key: leaf for leaf in leaves(schema)}
    for each in error.errors(include_url=False):
        key = ".".join(map(str, each["loc"]))
        if each["type"] == "unexpected_keyword_argument":
            near = nearest(key, by_key)
            hint = f"did you mean {near}?" if near else f"take {', '.join(by_key)}"
            yield key, MISSING, f"unknown setting; {hint}"
        else:
            yield key, MISSING if each["type"] == "missing" else each["input"], advice(each, leaf_at(each, by_key))


def leaf_at(error: ErrorDetails, by_key: Mapping[str, Leaf]) -> Leaf:
    """The key whose value, or something in it, an error of pydantic is about."""
    return next(by_key[key] for key in accumulate(map(str, error["loc"]), "{}.{}".format) if key in by_key)


def advice(error: ErrorDetails, leaf: Leaf) -> str:
    """Advice on an error of pydantic: what the key takes, or, within a mapping, pydantic's own words."""
    if leaf.is_mapping and len(error["loc"]) > leaf.key.count(".") + 1:
        unknown = error["type"] in ("extra_forbidden", "unexpected_keyword_argument")
        return "there is no such key" if unknown else error["msg"].replace("Input should be", "expected")
    if error["type"] == "value_error":
        return error["msg"].removeprefix("Value error, ")
    too_large = "this is too large a number; " if error["type"] == "int_parsing_size" else ""
    return f"{too_large}expected {leaf.expectation}"


def type_name(annotation: Any) -> str:
    """An annotation as documentation says it: `int`, `list[int]`, `str or null`, `"a" or "b"`."""
    if annotation is type(None):
        return "null"
    if annotation is Ellipsis:
        return "..."
    if get_origin(annotation) in (Union, types.UnionType):
        return " or ".join(type_name(each) for each in get_args(annotation))
    if get_origin(annotation) is Literal:
        return " or ".join(f'"{each}"' if isinstance(each, str) else _choice(each) for each in get_args(annotation))
    if get_origin(annotation) is not None:
        return f"{annotation.__origin__.__name__}[{', '.join(map(type_name, get_args(annotation)))}]"
    return str(annotation.__name__)


def _choice(value: Any) -> str:
    """A choice as YAML has it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def nearest(key: str, candidates: Iterable[str]) -> str | None:
    """The known key that `key` was most likely meant to be, or None where nothing is close."""
    section, _, name = key.rpartition(".")

    def closeness(candidate: str) -> float:
        its_section, _, its_name = candidate.rpartition(".")
        whole = SequenceMatcher(None, key, candidate).ratio()
        last = SequenceMatcher(None, name, its_name).ratio()
        return max(whole, last if section == its_section else 0.9 * last)

    best = max(candidates, key=closeness, default=None)
    return best if best is not None and closeness(best) >= _CLOSE_ENOUGH else None


Setup = Callable[..., Coroutine[Any, Any, None]]


def configured(kind: type[Any]) -> Callable[[Setup], Setup]:
    """Let the keys of a role's settings be given one by one: `spawn(Trainer, lr=1e-4)` is short for
    `spawn(Trainer, settings=TrainerSettings(lr=1e-4))`.

        class Trainer(Actor):
            @configured(TrainerSettings)
            async def setup(self, *, model: ModelSource, settings: TrainerSettings) -> None: ...

    Args:
        kind: the class of the settings, a section of the configuration.

    Returns:
        A decorator of a `setup` that has an argument `settings`.

    Raises:
        ValueError: in `setup`, keys that there are not, with the nearest; values that cannot be; or settings of another
            kind, or keys beside them.
    """

    def decorate(setup: Setup) -> Setup:
        own = inspect.signature(setup)
        names = own.parameters.keys()

        @wraps(setup)
        async def with_settings(self: Any, **arguments_by_name: Any) -> None:
            role = self._cell.name.partition("[")[0]
            keys = {name: value for name, value in arguments_by_name.items() if name not in names}
            whole = arguments_by_name.get("settings")
            if whole is None:
                whole = settings(kind, keys, role)
            elif keys or not isinstance(whole, kind):
                wrong = f"{min(keys)} beside settings" if keys else f"settings of {type(whole).__name__}"
                raise ValueError(f"{role}: {wrong}: give one {kind.__name__}, or its keys one by one")
            arguments = {name: value for name, value in arguments_by_name.items() if name in names}
            await setup(self, **{**arguments, "settings": whole})

        optional = [each.replace(default=None) if each.name == "settings" else each for each in own.parameters.values()]
        keys = inspect.Parameter("keys", inspect.Parameter.VAR_KEYWORD)
        with_settings.__signature__ = own.replace(parameters=[*optional, keys])  # type: ignore[attr-defined]
        return with_settings

    return decorate
