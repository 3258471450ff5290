"""What a configuration may hold, read off dataclasses: keys, types, defaults, limits and docs.

A schema is a dataclass whose fields are values or further dataclasses ("sections"). The string literal under a field
is its documentation: `--help` and docs/config.md print it. A section with `__shorthand__ = "key"` may be given as a
single text, which is that key's; one with `__together__` takes several keys with commas between; a field of type Any
takes a mapping, null, or a text that is short for {name: text}. Knows no key of ours (those are in `text.py`)
and imports nothing heavy.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cache
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")
_CLOSE_ENOUGH = 0.6  # difflib's own cutoff: below it a suggestion is more often wrong than right
_LIMITS = {
    "low": (lambda value, limit: value >= limit, "at least"),
    "above": (lambda value, limit: value > limit, "more than"),
    "high": (lambda value, limit: value <= limit, "at most"),
    "below": (lambda value, limit: value < limit, "less than"),
}
_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "bool": "true or false",
    "dict[str, Any]": "a mapping",
    "Any": "a mapping, a name or null",
    "list[int]": "a list of whole numbers, such as [0, 1]",
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
    limits: Mapping[str, float]
    """What `number(...)` was given: any of `low`, `above`, `high`, `below`."""
    is_place: bool = False
    """It names a file or directory, where `~` is the user's own."""
    example: str = ""
    """A value that one would not guess, for errors."""

    def read(self, value: Any) -> Any:
        """A value as this key takes it: `1e3`, a float to YAML, is a whole number where one is asked for, and one text
        a list where texts are."""
        if self.type == list[str]:
            return [value] if isinstance(value, str) else value
        if isinstance(value, list | tuple):
            return [self.read(each) for each in value]
        takes = {self.type, *get_args(self.type)}
        whole = isinstance(value, float) and value.is_integer() and int in takes and float not in takes
        return int(value) if whole else value

    def chosen(self, value: Any, written: Any) -> Any:
        """What a key takes of a value of YAML: a text is the characters that stand there, whatever YAML makes of such
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

    @property
    def is_text(self) -> bool:
        """It takes a text, or null at most."""
        return self.type is str or {*get_args(self.type)} == {str, type(None)}

    @property
    def expectation(self) -> str:
        """What a value must be, in words: `a whole number (int), at least 1`."""
        example = [f"such as {self.example}"] if self.example else []
        return ", ".join([_in_words(self.type), *self.limits_in_words, *example])

    @property
    def limits_in_words(self) -> list[str]:
        """The limits of the value: `["at least 1"]`."""
        return [f"{_LIMITS[name][1]} {limit:g}" for name, limit in self.limits.items()]

    @property
    def is_mapping(self) -> bool:
        """Whether the key holds a free mapping, or may hold one, into which dotted keys may reach."""
        return get_origin(self.type) is dict or self.type is Any

    def allows(self, value: Any) -> bool:
        """Whether a value of the right type is within the limits, as each element of a list must be, or a choice."""
        if value is None:
            return True
        if get_origin(self.type) is Literal:
            return value in get_args(self.type)
        if get_origin(self.type) is dict and not isinstance(value, Mapping):  # a text that was to be followed
            return False
        if get_origin(self.type) in (list, tuple) and not isinstance(value, list | tuple):
            return False
        values = value if isinstance(value, list | tuple) else [value]
        return all(_LIMITS[name][0](each, limit) for each in values for name, limit in self.limits.items())


def number(default: Any, **limits: float) -> Any:
    """A field of numbers with limits: `low` and `high` are allowed themselves, `above` and `below` are not.

    Args:
        default: value when nobody sets the key; a list or tuple has every element limited.
        **limits: any of `low`, `above`, `high`, `below`.
    """
    unknown = sorted(set(limits) - set(_LIMITS))
    if unknown:
        raise TypeError(f"number() knows the limits {', '.join(_LIMITS)}; not {', '.join(unknown)}")
    metadata = {"limits": limits}
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def place(default: Any, example: str = "") -> Any:
    """A field that names a file or directory, or something on a hub: `~` at its beginning becomes the home directory
    when the configuration is read, so that whatever opens it need not know of it.

    Args:
        default: value when nobody sets the key.
        example: a value that one would not guess, for errors.
    """
    return dataclasses.field(default=default, metadata={"place": True, "example": example})


def settings(schema: type[T], given: Mapping[str, Any], who: str) -> T:
    """A section from keyword arguments; what is not given has its default.

    So a role takes the keys of a section as arguments of its `setup`, documented and limited in one place:

        async def setup(self, *, model: str, **given: Any) -> None:
            settings_of_mine = settings(TrainerConfig, given, "trainer")

    Args:
        schema: the section.
        given: values by name; of a section within it, a mapping or the section itself.
        who: whose settings these are, for the errors.

    Raises:
        ValueError: with every name that there is not, and every value that cannot be.
    """
    known = {leaf.key: leaf for leaf in leaves(schema)}
    flat, problems = _flat(schema, given), []
    for key, value in flat.items():
        if key not in known:
            near = nearest(key, known)
            problems.append(f"{key}: unknown setting; " + (f"did you mean {near}?" if near else f"take {[*known]}"))
        elif not known[key].allows(value):
            problems.append(f"{key}={value!r}: expected {known[key].expectation}")
    if problems:
        raise ValueError(f"{who}: {'; '.join(problems)}")
    return _nested(schema, flat)


def _flat(schema: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Values by dotted key, sections within `schema` taken apart."""
    inner = {name for name, _ in sections(schema)}
    found: dict[str, Any] = {}
    for name, value in given.items():
        if name not in inner:
            found[name] = value
            continue
        known = value if isinstance(value, Mapping) else dataclasses.asdict(value)
        found |= {f"{name}.{key}": each for key, each in known.items()}
    return found


def _nested(schema: type[T], flat: Mapping[str, Any]) -> T:
    """The section that has these values, by dotted key."""
    inner = {name: kind for name, kind in sections(schema) if "." not in name}
    made: dict[str, Any] = {key: value for key, value in flat.items() if "." not in key}
    for name, kind in inner.items():
        below = {key.removeprefix(f"{name}."): value for key, value in flat.items() if key.startswith(f"{name}.")}
        made[name] = _nested(kind, below)
    return schema(**made)


def leaves(schema: type, prefix: str = "") -> Iterator[Leaf]:
    """Every key of a schema, sections flattened, in the order in which they are written."""
    docs, annotations = field_docs(schema), get_type_hints(schema)
    for field in dataclasses.fields(schema):
        key, annotation = f"{prefix}{field.name}", annotations[field.name]
        if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
            yield from leaves(annotation, f"{key}.")
        else:
            given = field.metadata
            limits, is_place, example = given.get("limits", {}), given.get("place", False), given.get("example", "")
            yield Leaf(key, annotation, _default(field), docs.get(field.name, ""), limits, is_place, example)


def sections(schema: type, prefix: str = "") -> Iterator[tuple[str, type]]:
    """Every section of a schema as (dotted key, dataclass), outer ones first."""
    annotations = get_type_hints(schema)
    for field in dataclasses.fields(schema):
        if dataclasses.is_dataclass(annotations[field.name]):
            yield f"{prefix}{field.name}", annotations[field.name]
            yield from sections(annotations[field.name], f"{prefix}{field.name}.")


@cache
def field_docs(schema: type) -> Mapping[str, str]:
    """The string literal under each field of a dataclass, those it inherited included, as one line each."""
    body = ast.parse(textwrap.dedent(inspect.getsource(schema))).body[0]
    assert isinstance(body, ast.ClassDef)
    bases = [base for base in schema.__bases__ if dataclasses.is_dataclass(base)]
    docs = {name: doc for base in bases for name, doc in field_docs(base).items()}
    for field, below in zip(body.body, body.body[1:], strict=False):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(below, ast.Expr)
            and isinstance(below.value, ast.Constant)
        ):
            docs[field.target.id] = " ".join(str(below.value.value).split())
    return docs


def type_name(annotation: Any) -> str:
    """An annotation as documentation says it: `int`, `list[int]`, `str or null`, `"a" or "b"`."""
    if annotation is type(None):
        return "null"
    if get_origin(annotation) in (Union, types.UnionType):
        return " or ".join(type_name(each) for each in get_args(annotation))
    if get_origin(annotation) is Literal:
        return " or ".join(map(_choice, get_args(annotation)))
    if get_origin(annotation) is not None:
        return str(annotation).replace("typing.", "")
    return str(annotation.__name__)


def _choice(value: Any) -> str:
    """As YAML has it."""
    return str(value).lower() if isinstance(value, bool) else f'"{value}"'


def nearest(key: str, known: Iterable[str]) -> str | None:
    """The known key that `key` was most likely meant to be, or None where nothing is close."""
    section, _, name = key.rpartition(".")

    def closeness(candidate: str) -> float:
        its_section, _, its_name = candidate.rpartition(".")
        whole = SequenceMatcher(None, key, candidate).ratio()
        last = SequenceMatcher(None, name, its_name).ratio()
        return max(whole, last if section == its_section else 0.9 * last)

    best = max(known, key=closeness, default=None)
    return best if best is not None and closeness(best) >= _CLOSE_ENOUGH else None


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    raise TypeError(f"the config field {field.name} has no default; every field needs one")


def _in_words(annotation: Any) -> str:
    name = type_name(annotation)
    if get_origin(annotation) is Literal:
        return f"one of {', '.join(_choice(each).strip(chr(34)) for each in get_args(annotation))}"
    if get_origin(annotation) in (Union, types.UnionType):
        return " or ".join(_WORDS.get(type_name(each), type_name(each)) for each in get_args(annotation))
    if get_origin(annotation) is tuple:
        return f"a list of {len(get_args(annotation))} numbers"
    return f"{_WORDS[name]} ({name})" if name in _WORDS else name
