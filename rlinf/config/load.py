"""YAML and `key=value` in; a checked dataclass, or every mistake at once, out.

The file and the overrides are walked key by key against the schema. OmegaConf holds the values: it converts and
type-checks each single one and resolves `${key}`. It stops at its first error, so the walk goes on by itself and
gathers a `Problem` per mistake, with the line of the file that made it.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlinf.config.aliases import GONE, OF_TORCHRUN, ours
from rlinf.config.importing import near_shipped
from rlinf.config.reading import measure, read_bytes
from rlinf.config.schema import Leaf, leaves, nearest, sections

T = TypeVar("T")

COMMAND_LINE = "command line"
DEFAULT = "default"
_REFERENCE = re.compile(r"(\\*)\$\{([\w.]+\})?")
"""`${`, the backslashes before it (an odd number makes it plain text), and `key}` if that is what follows."""
_MISSING = "???"
"""By which OmegaConf says that there is no value yet."""
_CONVERTED: Any = object()
"""In place of what stands in YAML, where nobody knows that: a value of Python."""
_UNREADABLE = (
    yaml.YAMLError, OmegaConfBaseException, ValueError, OverflowError, RecursionError, TypeError, KeyError,
    AssertionError,
)  # fmt: skip
"""What reading YAML raises besides its own errors: a number of 5,000 digits, a 13th month, 5,000 opening brackets."""


class InputError(Exception):
    """A mistake in what the user gave: shown as it is, without a traceback, and the process exits with code 2."""


class RunFailure(Exception):
    """A run cannot go on, for a reason outside the code, such as a full disk or a loss that is no number: shown as it
    is, without a traceback, and the process exits with code 1."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One mistake in a configuration, as its reader needs it."""

    place: str
    """`file:line`, `command line` or `default`."""
    key: str
    """Dotted key, such as `optimizer.lr`."""
    value: Any
    """What was given; `dataclasses.MISSING` where there is no value to show."""
    advice: str
    """What is wrong, and what to write instead."""

    def __str__(self) -> str:
        shown = "" if self.value is MISSING else f" = {_short(self.value)}"
        return f"{self.place}: {self.key}{shown}: {self.advice}"


class ConfigError(InputError):
    """Everything that is wrong with a configuration, reported together."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        super().__init__(
            "\n".join([f"{count} in the configuration; nothing was started.", *(f"  {each}" for each in problems)])
        )


def load(
    schema: type[T],
    path: str | Path | None,
    overrides: Sequence[str] = (),
    check: Callable[[T], Iterator[tuple[str, str]]] = lambda config: iter(()),
    given: Mapping[str, Any] | None = None,
    who: str = COMMAND_LINE,
) -> T:
    """Read a file and overrides into `schema`.

    Args:
        schema: the dataclass that says which keys there are.
        path: YAML file; None takes the defaults alone.
        overrides: `a.b=value`, later ones win; values are read as YAML.
        given: values by dotted key, as Python objects; they win over the file.
        who: gave them, for errors.
        check: yields (key, advice) for what types and limits cannot say; asked once every single value is right.

    Raises:
        ConfigError: with all problems of the file and of the overrides.
        InputError: if the file cannot be read as YAML at all.
    """
    loader = _Loader(schema)
    if path is not None:
        loader.read_file(Path(path))
    for key, value in (given or {}).items():
        loader.take(key, value, who)
    for override in overrides:
        loader.read_override(override)
    return loader.finish(check)


def dump(config: Any) -> str:
    """A configuration as YAML that `load` reads back to an equal one."""
    return OmegaConf.to_yaml(OmegaConf.create(_writable(dataclasses.asdict(config))))


class _Loader:
    """One reading of one configuration: values so far, where each came from, and what was wrong."""

    def __init__(self, schema: type) -> None:
        self.schema = schema
        self.values: DictConfig = copy.deepcopy(_structured(schema))
        self.leaves = {leaf.key: leaf for leaf in leaves(schema)}
        self.sections = dict(sections(schema))
        self.places: dict[str, str] = {}
        self.verbatim: dict[str, str] = {}
        """Texts that OmegaConf would take for something else."""
        self.problems: list[Problem] = []

    def read_file(self, path: Path) -> None:
        """Take every key of a YAML file, or note what is wrong with it."""
        try:
            text = read_bytes(path).decode("utf-8")
        except OSError as error:
            near = near_shipped(str(path)) if isinstance(error, FileNotFoundError) else None
            meant = f"; did you mean {near}?" if near else ""
            raise InputError(f"{path}: the config file cannot be read: {error.strerror or error}{meant}") from None
        except UnicodeDecodeError:
            raise InputError(f"{path}: the config file is not UTF-8 text") from None
        except ValueError as error:  # a null character in its name
            raise InputError(f"{path!r}: the config file cannot be read: {error}") from None
        try:
            tree, content = _parsed(text)
        except _UNREADABLE as error:
            raise InputError(f"{path}: the config file is not valid YAML: {_one_line(error)}") from None
        if tree is None:  # nothing but comments
            return
        if not isinstance(content, dict) or not isinstance(tree, yaml.MappingNode):
            raise InputError(f"{path}: the config file must consist of `key: value` lines")
        lines, written = {key: f"{path}:{line}" for key, line in _lines(tree)}, _written(tree)
        for key, value in content.items():
            self._take(str(key), value, lambda key: lines.get(key, str(path)), written.get(str(key), _CONVERTED))

    def read_override(self, text: str) -> None:
        """Take one `a.b=value` of the command line, or note what is wrong with it."""
        key, equals, given = text.partition("=")
        if not equals or not key.strip():
            self._note(COMMAND_LINE, text, MISSING, "write overrides as key=value, such as steps=10")
            return
        key = key.strip()
        try:
            tree, content = _parsed(f"value: {given}")
        except _UNREADABLE as error:
            if self._is_text(key):  # a text may look like anything: `data.template=Question: {question}`
                self._take(key, given, lambda key: COMMAND_LINE)
                return
            self._note(COMMAND_LINE, key, given, f"the value is not valid YAML: {_one_line(error)}")
            return
        assert isinstance(tree, yaml.MappingNode)  # of the one key that was just written
        ((_, node),) = tree.value
        plain = not isinstance(node, yaml.ScalarNode) or node.style is None
        written = given if plain and self._is_text(key) and _written(node) is not None else _written(node)
        self._take(key, content["value"], lambda key: COMMAND_LINE, written)

    def _is_text(self, key: str) -> bool:
        leaf = self.leaves.get(key)
        return leaf is not None and leaf.is_text

    def take(self, key: str, value: Any, place: str) -> None:
        """Take one value by its dotted key, or note what is wrong with it."""
        self._take(key, value, lambda _: place)

    def finish(self, check: Callable[[Any], Iterator[tuple[str, str]]]) -> Any:
        """Resolve `${key}`, apply limits and `check`, and return the dataclass; raise if anything was wrong."""
        values = {leaf.key: self._resolve(leaf) for leaf in self.leaves.values()}
        config: Any = _build(self.schema, values)  # a wrong value has left its default here, so that `check` can go on
        wrong = {problem.key for problem in self.problems}
        for key, advice in check(config):
            if key not in wrong:
                leaf = self._leaf_of(key)  # which a key below a mapping is not itself
                place = self.places.get(key if leaf is None else leaf.key, DEFAULT)
                self._note(place, key, values.get(key, MISSING), advice)
        if self.problems:
            raise ConfigError(self.problems)
        return config

    def _take(self, key: str, value: Any, place_of: Callable[[str], str], written: Any = _CONVERTED) -> None:
        """Take a value, which stands in YAML as `written` says, with every scalar as the text that it is there."""
        if key in self.sections:
            shorthand = getattr(self.sections[key], "__shorthand__", None)
            if isinstance(value, dict):
                texts = written if isinstance(written, dict) else {}
                for name, inner in value.items():
                    self._take(f"{key}.{name}", inner, place_of, texts.get(str(name), _CONVERTED))
            elif isinstance(value, str) and shorthand:
                self._take(f"{key}.{shorthand}", value, lambda _: place_of(key), written)
            elif value is not None:  # None: a section whose lines are all commented out
                names = ", ".join(field.name for field in dataclasses.fields(self.sections[key]))
                self._note(place_of(key), key, value, f"this is a section; its keys are {names}")
            return
        section, _, names = key.rpartition(".")
        if "," in names and getattr(self.sections.get(section), "__together__", False):
            for name in names.split(","):
                self._take(f"{section}.{name.strip()}", value, lambda _: place_of(key), written)
            return
        leaf = self._leaf_of(key)
        if leaf is not None:
            value = value if written is _CONVERTED or key != leaf.key else leaf.chosen(value, written)
            self._set(leaf, key, value, place_of(key))
        elif isinstance(value, dict):
            near = nearest(key, self.sections)
            advice = f"did you mean {near}?" if near else f"the sections are {', '.join(self.sections)}"
            self._note(place_of(key), key, MISSING, f"unknown section; {advice}")
        else:
            elsewhere = OF_TORCHRUN.get(key.rpartition(".")[2])
            near = None if elsewhere else ours(key, self.leaves) or nearest(key, self.leaves)
            advice = f"did you mean {near}?" if near else "--help lists every key"
            if elsewhere:
                advice = f"torchrun {elsewhere} starts as many processes"
            self._note(place_of(key), key, MISSING, f"unknown key; {GONE.get(key, advice)}")

    def _set(self, leaf: Leaf, key: str, value: Any, place: str) -> None:
        self.places[leaf.key] = place
        value = leaf.read(value)
        self.verbatim.pop(leaf.key, None)
        if value == _MISSING and leaf.is_text:
            self.verbatim[leaf.key] = value
            return
        references = (match for text in _texts(value) for match in _REFERENCE.finditer(text))
        if any(match[2] is None and len(match[1]) % 2 == 0 for match in references):
            advice = "only ${key} is followed: the file alone says what runs; write the value (\\${ is plain text)"
            self._note(place, key, value, advice)
            return
        above = key.rpartition(".")[0]
        if len(above) > len(leaf.key) and isinstance(OmegaConf.select(self.values, above), str):
            self._note(place, key, value, f"{above} is a text, which has no keys: write a mapping with this in it")
            return
        try:
            if key != leaf.key and isinstance(name := OmegaConf.select(self.values, leaf.key), str):
                OmegaConf.update(self.values, leaf.key, {"name": name}, merge=False)  # what text is short for
            OmegaConf.update(self.values, key, value, merge=False, force_add=key != leaf.key)
        except (OmegaConfBaseException, OverflowError, ValueError, RecursionError):  # the latter of huge numbers, nests
            self._note(place, key, value, f"expected {leaf.expectation}")

    def _resolve(self, leaf: Leaf) -> Any:
        """The value with `${key}` replaced; notes a reference to nothing, a wrong type, a broken limit."""
        place = self.places.get(leaf.key, DEFAULT)
        if leaf.key in self.verbatim:
            return self.verbatim[leaf.key]
        try:
            value = OmegaConf.select(self.values, leaf.key)
            if OmegaConf.is_config(value):
                value = OmegaConf.to_container(value, resolve=True)
        except (OmegaConfBaseException, RecursionError) as error:  # the latter of keys that refer to each other
            written: Any = OmegaConf.to_container(self.values, resolve=False)
            for name in leaf.key.split("."):
                written = written[name]
            self._note(place, leaf.key, written, f"{_one_line(error)}; expected {leaf.expectation}")
            return leaf.default
        if not _finite(value):
            self._note(place, leaf.key, value, f"this is not a finite number; expected {leaf.expectation}")
            return leaf.default
        if leaf.is_place and isinstance(value, str):
            value = os.path.expanduser(value)
        if leaf.allows(value):
            return value
        self._note(place, leaf.key, value, f"expected {leaf.expectation}")
        return leaf.default

    def _leaf_of(self, key: str) -> Leaf | None:
        """The leaf with this key, or the free mapping that it reaches into."""
        parts = key.split(".")
        for length in range(len(parts), 0, -1):
            leaf = self.leaves.get(".".join(parts[:length]))
            if leaf is not None and (length == len(parts) or leaf.is_mapping):
                return leaf
        return None

    def _note(self, place: str, key: str, value: Any, advice: str) -> None:
        self.problems.append(Problem(place, key, value, advice))


@functools.cache
def _structured(schema: type) -> DictConfig:
    """A schema with its defaults, to be copied: that is five times as quick as reading the schema again."""
    made: DictConfig = OmegaConf.structured(schema)
    return made


def _build(schema: type[T], values: Mapping[str, Any], prefix: str = "") -> T:
    """An instance of a schema from its leaves' values by dotted key."""
    annotations = get_type_hints(schema)
    fields = {}
    for field in dataclasses.fields(schema):  # type: ignore[arg-type]
        key, annotation = f"{prefix}{field.name}", annotations[field.name]
        is_section = dataclasses.is_dataclass(annotation)
        fields[field.name] = _build(annotation, values, f"{key}.") if is_section else values[key]  # type: ignore[arg-type]
    return schema(**fields)


def _parsed(text: str) -> tuple[yaml.Node | None, Any]:
    """A YAML text as the tree that knows its lines, and as plain values with references unresolved.

    Raises:
        ValueError: it is nested too deeply, or large once its aliases are written out. Much else: see `_UNREADABLE`.
    """
    tree = yaml.compose(text)
    if tree is not None:
        measure(tree)
    return tree, OmegaConf.to_container(OmegaConf.create(text or "{}"), resolve=False)


def _finite(value: Any) -> bool:
    numbers = value if isinstance(value, list | tuple) else [value]
    return all(math.isfinite(each) for each in numbers if isinstance(each, float))


def _lines(node: yaml.Node, prefix: str = "") -> Iterator[tuple[str, int]]:
    """(dotted key, line number from 1) of every key of a YAML tree."""
    if isinstance(node, yaml.MappingNode):
        for name, value in node.value:
            yield f"{prefix}{name.value}", name.start_mark.line + 1
            yield from _lines(value, f"{prefix}{name.value}.")


def _written(node: yaml.Node) -> Any:
    """A YAML tree with every scalar as the text that stands there: `no`, `1e3`, `0x10`, `12:30:45`; None for null."""
    if isinstance(node, yaml.MappingNode):
        return {str(name.value): _written(value) for name, value in node.value}
    if isinstance(node, yaml.SequenceNode):
        return [_written(value) for value in node.value]
    return None if node.tag == "tag:yaml.org,2002:null" else node.value


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _texts(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts(inner)


def _writable(value: Any) -> Any:
    """Plain YAML types, with a literal `${` escaped so that reading it back does not look for a key."""
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", lambda match: match[1] * 2 + r"\${", value)
    if isinstance(value, Mapping):
        return {key: _writable(inner) for key, inner in value.items()}
    return [_writable(inner) for inner in value] if isinstance(value, list | tuple) else value


def _short(value: Any) -> str:
    try:
        text = value if isinstance(value, str) else repr(_writable(value))
    except ValueError:  # Python writes no whole number of 5,000 digits
        text = "a number of thousands of digits"
    return text if len(text) <= 60 else f"{text[:57]}..."


def _one_line(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "nested too deeply, or in a circle"
    if isinstance(error, OmegaConfBaseException):
        return next(iter(str(error).splitlines()), type(error).__name__)
    return " ".join(str(error).split())
