"""Reads a configuration of another framework: what Hydra would have composed, as far as its files are at hand.

In: a YAML file, or a shell script that starts a run by `key=value …`, and further overrides. Out: the values by dotted
key, with interpolations followed. Files that `defaults` name are read where they lie beside it; the others are named,
since their keys are unknown here. A script is read and never run: assignments, arrays, defaults such as `${N:-8}` and
arithmetic are followed, and what only the machine knows stays as it is written.
"""

from __future__ import annotations

import ast
import operator
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlinf.config.load import InputError

_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "subtract": lambda one, other: one - other,
    "multiply": lambda one, other: one * other,
    "int_div": lambda one, other: one // other,
    "not": lambda value: not value,
}
"""Resolvers that RLinf registers."""


class _Numbers(yaml.SafeLoader):
    """YAML in which `1e-5` is a number, as Hydra reads it."""


_Numbers.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:\d[\d_]*\.?[\d_]*(?:[eE][-+]?\d+)|\d[\d_]*\.[\d_]*|\.\d[\d_]*(?:[eE][-+]?\d+)?)$"),
    [*"-+0123456789."],
)


@dataclass(frozen=True, slots=True)
class Read:
    """A configuration of theirs."""

    values: Mapping[str, Any]
    """By dotted key; text that names what is not at hand stays as it is written."""
    missing: tuple[str, ...]
    """What `defaults` names and was not found."""


def read(path: Path, overrides: Sequence[str] = ()) -> Read:
    """Read a file, and the files of its `defaults` that lie beside it.

    Args:
        path: of a YAML file, or of a shell script.
        overrides: `key=value` as Hydra takes them, which win over the file's.

    Raises:
        InputError: it cannot be read, is no mapping, or an override is none.
    """
    missing: list[str] = []
    if wrong := [each for each in overrides if not _OVERRIDE.fullmatch(each)]:
        raise InputError(f"{wrong[0]!r} is no override of theirs: write key=value, such as data.train_batch_size=256")
    if path.suffix == ".sh":
        base, given = _scripted(path, missing)
        whole = _overridden(base, [*given, *overrides])
    else:
        whole = _overridden(_composed(path, missing, ()), overrides)
    try:
        tree = OmegaConf.create(whole)
    except OmegaConfBaseException as error:
        raise InputError(f"{path}: {' '.join(str(error).split())}") from error
    for name, function in _FUNCTIONS.items():
        if not OmegaConf.has_resolver(name):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # omegaconf 2.4 renamed it; the new name meant another thing in 2.3
                OmegaConf.register_new_resolver(name, function)
    return Read(dict(_flat(tree, "")), tuple(dict.fromkeys(missing)))


def _composed(path: Path, missing: list[str], within: tuple[Path, ...]) -> dict[str, Any]:
    try:
        found = yaml.load(path.read_text(encoding="utf-8"), _Numbers)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InputError(f"{path} cannot be read as YAML: {error}") from error
    if not isinstance(found, dict):
        raise InputError(f"{path} is no configuration: a mapping of keys is expected")
    named = found.pop("defaults", None) or []
    whole: dict[str, Any] = {}
    for entry in named:
        for group, place in _named(entry):
            file = next((each for each in _beside(path, group) if each.is_file() and each not in within), None)
            if file is None:
                missing.append(group)
                continue
            inner: dict[str, Any] = _composed(file, missing, (*within, path))
            for part in reversed(place.split(".") if place else []):
                inner = {part: inner}
            whole = _merged(whole, inner)
    return _merged(whole, found)


def _named(entry: Any) -> Iterator[tuple[str, str]]:
    """Files that an entry of `defaults` names, and the section that each is put into."""
    pairs = entry.items() if isinstance(entry, dict) else [(entry, None)]
    for key, value in pairs:
        name = str(key)
        if name == "_self_" or name.startswith("override "):
            continue
        name, _, place = name.partition("@")
        if value is None:
            yield name, place
        else:
            yield f"{name}/{value}", place or name.lstrip("./").replace("/", ".")


def _beside(path: Path, group: str) -> Iterator[Path]:
    yield (path.parent / f"{group}.yaml").resolve()
    yield (path.parent / f"{group.removeprefix('../')}.yaml").resolve()
    yield (path.parent.parent / f"{group.removeprefix('../')}.yaml").resolve()


def _merged(under: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(under)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merged(merged[key], value) if both else value
    return merged


def _flat(tree: DictConfig, prefix: str) -> Iterator[tuple[str, Any]]:
    for each in tree:
        key = str(each)
        name = f"{prefix}{key}"
        try:
            value = tree[key]
        except (OmegaConfBaseException, TypeError, ZeroDivisionError):  # of files not at hand, or arithmetic with those
            value = OmegaConf.to_container(tree, resolve=False)[key]  # type: ignore[call-overload, index]
        if isinstance(value, DictConfig) and len(value) and not OmegaConf.is_interpolation(tree, key):
            yield from _flat(value, f"{name}.")
        else:
            yield name, OmegaConf.to_container(value) if OmegaConf.is_config(value) else value


# Overrides and scripts -----------------------------------------------------------------------------------------------

_OVERRIDE = re.compile(r"(\+{0,2}|~)([A-Za-z_][\w-]*(?:[./][\w-]+)*)(?:=(.*))?", re.DOTALL)
"""Hydra's `key=value`, `+key=value`, `++key=value` and `~key`."""
_OF_SHELL = re.compile(r"[A-Za-z_]\w*")
_WITH_DEFAULT = re.compile(r"([A-Za-z_]\w*|\d)(?::?[-=](.*))?", re.DOTALL)
_ARRAY = re.compile(r"\$\{([A-Za-z_]\w*)\[[@*]\]\}")
_ASSIGNED = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_EXPORTED = ("export", "readonly", "local", "declare", "typeset")
_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}
_CLOSING = {"{": "}", "(": ")"}


def _overridden(tree: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """A tree with Hydra's overrides put in."""
    for each in overrides:
        found = _OVERRIDE.fullmatch(each)
        assert found is not None  # of all that come here
        *above, last = re.split(r"[./]", found[2])
        inner = tree
        for part in above:
            below = inner.get(part)
            inner[part] = below if isinstance(below, dict) else {}
            inner = inner[part]
        if found[1] == "~":
            inner.pop(last, None)
        else:
            inner[last] = _value(found[3] or "")
    return tree


def _value(text: str) -> Any:
    """What Hydra makes of the text behind `=`."""
    try:
        return yaml.load(text, _Numbers) if text else None
    except yaml.YAMLError:
        return text


def _scripted(path: Path, missing: list[str]) -> tuple[dict[str, Any], list[str]]:
    """The configuration that a script begins with, if its file is at hand, and its overrides."""
    try:
        script = _Script(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read as a script: {error}") from error
    command = script.command
    overrides = [word for word in command if _is_override(word)]
    if not overrides:
        raise InputError(
            f"{path} has no key=value of verl's: what is read is a script with `python3 -m verl.trainer.main_ppo "
            "key=value …`"
        )
    if any("sft_trainer" in word for word in command):
        raise InputError(f"{path} starts verl's supervised trainer: it has few keys, see docs/sft.md for ours")
    named = dict(word[2:].partition("=")[::2] for word in command if word.startswith("--config-"))
    name = named.get("config-name", "").removesuffix(".yaml")
    if not name or name in _COMPOSED_BY_VERL:
        return {}, overrides
    places = [path.parent, Path.cwd()]
    files = [place / named.get("config-path", "") / f"{name}.yaml" for place in places]
    file = next((each for each in files if each.is_file()), None)
    if file is None:
        missing.append(name)
        return {}, overrides
    return _composed(file, missing, ()), overrides


_COMPOSED_BY_VERL = ("ppo_trainer", "ppo_megatron_trainer")
"""Configurations that verl comes with: what they say is known (`tables`), whether they are at hand or not."""


def _is_override(word: str) -> bool:
    found = _OVERRIDE.fullmatch(word)
    return found is not None and "." in found[2] and (found[3] is not None or found[1] == "~")


@dataclass(slots=True)
class _Script:
    """A shell script, as far as it says what a command is given.

    Args:
        text: of the script.
    """

    text: str
    variables: dict[str, list[str]] = field(default_factory=lambda: {"HOME": ["~"], "PWD": ["."]})
    """By name: the words that each stands for, one unless it is an array."""
    command: list[str] = field(default_factory=list)
    """The words of the command with most overrides."""

    def __post_init__(self) -> None:
        for statement in _statements(self.text):
            words = [word for word in statement if word not in ("then", "else", "do", "if", "{", "}")]
            while words and (words[0] in _EXPORTED or _ASSIGNED.match(words[0])):
                self._assign(words.pop(0))
            given = [word for each in words for word in self._words(each)]
            if sum(map(_is_override, given)) > sum(map(_is_override, self.command)):
                self.command = given

    def _assign(self, word: str) -> None:
        found = _ASSIGNED.match(word)
        if found is None:
            return
        value, name = word[found.end() :], found[1]
        if value.startswith("(") and value.endswith(")"):
            words = [each for inner in _statements(value[1:-1]) for one in inner for each in self._words(one)]
        else:
            words = [self._expanded(value)]
        self.variables[name] = [*self.variables.get(name, []), *words] if found[2] else words

    def _words(self, raw: str) -> list[str]:
        """A word of a command, expanded: none or several where it is an array, or a variable without quotes."""
        bare = raw.strip('"')
        if (array := _ARRAY.fullmatch(bare)) is not None:
            return self.variables.get(array[1], [])
        if bare in ("$@", "$*", "${@}", "${*}"):
            return []
        expanded = self._expanded(raw)
        is_variable = raw.startswith("$") and not raw.startswith("$(") and expanded != raw
        return expanded.split() if is_variable else [expanded]

    def _expanded(self, raw: str) -> str:
        """A word without its quotes, with what its variables stand for."""
        pieces: list[str] = []
        at, quoted = 0, False
        while at < len(raw):
            character = raw[at]
            if character == '"':
                quoted, at = not quoted, at + 1
            elif character == "'" and not quoted:
                end = raw.find("'", at + 1)
                end = len(raw) if end < 0 else end
                pieces.append(raw[at + 1 : end])
                at = end + 1
            elif character == "\\" and at + 1 < len(raw):
                keep = quoted and raw[at + 1] not in '"$`\\'
                pieces.append(raw[at : at + 2] if keep else raw[at + 1])
                at += 2
            elif character == "$":
                end = _end_of_expansion(raw, at)
                pieces.append(self._parameter(raw[at:end]))
                at = end
            else:
                pieces.append(character)
                at += 1
        return "".join(pieces)

    def _parameter(self, text: str) -> str:
        """What `$NAME`, `${NAME:-default}`, `$((1 + 2))` or `$(basename PATH)` means; itself where nobody knows."""
        if text.startswith("$((") and text.endswith("))"):
            return self._computed(text)
        if text.startswith("$("):
            words = [word for each in _statements(text[2:-1]) for one in each for word in self._words(one)]
            if words[:1] == ["basename"] and len(words) == 2:
                return words[1].rstrip("/").rpartition("/")[2]
            return "." if words == ["pwd"] else text
        inner = text[2:-1] if text.startswith("${") else text[1:]
        found = _WITH_DEFAULT.fullmatch(inner)
        if found is None:
            return f"${inner}"  # without braces, which would be an interpolation of theirs
        known = self.variables.get(found[1])
        if known:
            return known[0]
        return f"${inner}" if found[2] is None else self._expanded(found[2])

    def _computed(self, text: str) -> str:
        """Whole numbers that a script computes."""
        inner = self._expanded(text[3:-2])
        inner = _OF_SHELL.sub(lambda name: (self.variables.get(name[0]) or ["?"])[0], inner)
        try:
            return str(_arithmetic(ast.parse(inner.strip(), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError):
            return text


def _arithmetic(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_arithmetic(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_arithmetic(node.left), _arithmetic(node.right))
    raise ValueError("no whole number")


def _end_of_expansion(text: str, start: int) -> int:
    """Where what begins with the `$` at `start` ends."""
    opening = text[start + 1 : start + 2]
    if opening not in _CLOSING:
        found = _OF_SHELL.match(text, start + 1)
        return found.end() if found is not None else min(start + 2, len(text))
    depth = 0
    for at in range(start + 1, len(text)):
        depth += (text[at] == opening) - (text[at] == _CLOSING[opening])
        if depth == 0:
            return at + 1
    return len(text)


def _statements(text: str) -> Iterator[list[str]]:
    """The words of each statement, as they are written: with their quotes, and with what stands in `$(…)` and `(…)`."""
    words: list[str] = []
    start: int | None = None
    at, quote = 0, ""
    while at <= len(text):
        character = text[at] if at < len(text) else "\n"
        if character == "\\" and quote != "'":
            if text[at + 1 : at + 2] == "\n" and start is None:
                at += 2
                continue
            start = at if start is None else start
            at += 2
            continue
        if quote and at < len(text):
            quote = "" if character == quote else quote
        elif character in "'\"":
            start, quote = at if start is None else start, character
        elif character == "$" and text[at + 1 : at + 2] in _CLOSING:
            start = at if start is None else start
            at = _end_of_expansion(text, at)
            continue
        elif character == "(" and start is not None and text[at - 1] == "=":
            at = _end_of_array(text, at)
            continue
        elif character == "#" and start is None:
            at = text.find("\n", at)
            at = len(text) if at < 0 else at
            continue
        elif character in " \t\r\n;&|()":
            if start is not None:
                words.append(text[start:at].replace("\\\n", ""))
                start = None
            if character in "\n;&|" and words:
                yield words
                words = []
        elif start is None:
            start = at
        at += 1


def _end_of_array(text: str, start: int) -> int:
    """Where the array whose `(` is at `start` ends, whatever its comments and quotes hold."""
    at, quote = start + 1, ""
    while at < len(text):
        if quote:
            quote = "" if text[at] == quote else quote
        elif text[at] in "'\"":
            quote = text[at]
        elif text[at] == "$" and text[at + 1 : at + 2] in _CLOSING:
            at = _end_of_expansion(text, at)
            continue
        elif text[at] == "#" and text[at - 1].isspace():
            at = text.find("\n", at)
            if at < 0:
                break
        elif text[at] == ")":
            return at + 1
        at += 1
    return len(text)
