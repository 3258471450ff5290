"""Reads a configuration of another framework: what Hydra would have composed, as far as its files are at hand.

In: a YAML file, or a shell script that starts a run by `key=value …`, and further overrides. Out: the values by dotted
key, with interpolations followed. Files that `defaults` name are read where they lie beside it; the others are named,
since their keys are unknown here. A script is read and never run: assignments, arrays, defaults such as `${N:-8}` and
arithmetic are followed, and what only the machine knows stays as it is written.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlinf.config.load import InputError

_RESOLVERS: dict[str, Callable[..., Any]] = {
    "subtract": lambda one, other: one - other,
    "multiply": lambda one, other: one * other,
    "int_div": lambda one, other: one // other,
    "not": lambda value: not value,
}
"""Those that RLinf registers."""
_COMPOSED_BY_VERL = ("ppo_trainer", "ppo_megatron_trainer")
"""Configurations that verl comes with: what they say is known (`conversions/verl.yaml`), at hand or not."""


class _Loader(yaml.SafeLoader):
    """YAML in which `1e-5` is a number, as Hydra reads it."""


_Loader.add_implicit_resolver(
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
    """Files that `defaults` names and that were not found."""


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
        base, in_script = _of_script(path, missing)
        whole = _overridden(base, [*in_script, *overrides])
    else:
        whole = _overridden(_composed(path, missing, ()), overrides)
    try:
        tree = OmegaConf.create(whole)
    except OmegaConfBaseException as error:
        raise InputError(f"{path}: {' '.join(str(error).split())}") from error
    for name, function in _RESOLVERS.items():
        if not OmegaConf.has_resolver(name):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # omegaconf 2.4 renamed it; the new name meant another thing in 2.3
                OmegaConf.register_new_resolver(name, function)
    return Read(dict(_flat(tree, "")), tuple(dict.fromkeys(missing)))


# Files and their `defaults` ------------------------------------------------------------------------------------------


def _composed(path: Path, missing: list[str], within: tuple[Path, ...]) -> dict[str, Any]:
    try:
        own = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InputError(f"{path} cannot be read as YAML: {error}") from error
    if not isinstance(own, dict):
        raise InputError(f"{path} is no configuration: a mapping of keys is expected")
    named = own.pop("defaults", None) or []
    whole: dict[str, Any] = {}
    for group, place in (each for entry in named for each in _named(entry)):
        near = group.removeprefix("../")
        nearby = (path.parent / group, path.parent / near, path.parent.parent / near)
        files = [each.with_name(f"{each.name}.yaml").resolve() for each in nearby]
        file = next((each for each in files if each.is_file() and each not in within), None)
        if file is None:
            missing.append(group)
            continue
        inner: dict[str, Any] = _composed(file, missing, (*within, path))
        for part in reversed(place.split(".") if place else []):
            inner = {part: inner}
        whole = _merged(whole, inner)
    return _merged(whole, own)


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


# Overrides -----------------------------------------------------------------------------------------------------------

_OVERRIDE = re.compile(r"(\+{0,2}|~)([A-Za-z_][\w-]*(?:[./][\w-]+)*)(?:=(.*))?", re.DOTALL)
"""Hydra's `key=value`, `+key=value`, `++key=value` and `~key`."""


def _overridden(tree: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """A tree with Hydra's overrides put in."""
    for each in overrides:
        match = _OVERRIDE.fullmatch(each)
        assert match is not None  # of all that come here
        *above, last = re.split(r"[./]", match[2])
        inner = tree
        for part in above:
            if not isinstance(inner.get(part), dict):
                inner[part] = {}
            inner = inner[part]
        if match[1] == "~":
            inner.pop(last, None)
        else:
            inner[last] = _value(match[3] or "")
    return tree


def _value(text: str) -> Any:
    """Parse the text behind `=` as Hydra does."""
    try:
        return yaml.load(text, _Loader) if text else None
    except yaml.YAMLError:
        return text


# Scripts -------------------------------------------------------------------------------------------------------------


def _of_script(path: Path, missing: list[str]) -> tuple[dict[str, Any], list[str]]:
    """The configuration that a script begins with, if its file is at hand, and its overrides."""
    try:
        command = _command(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read as a script: {error}") from error
    overrides = [word for word in command if _is_override(word)]
    if not overrides:
        raise InputError(
            f"{path} has no key=value of verl's: what is read is a script with `python3 -m verl.trainer.main_ppo "
            "key=value …`"
        )
    if any("sft_trainer" in word for word in command):
        raise InputError(f"{path} starts verl's supervised trainer: it has few keys, see docs/supervised.md for ours")
    named = dict(word[2:].partition("=")[::2] for word in command if word.startswith("--config-"))
    name = named.get("config-name", "").removesuffix(".yaml")
    if not name or name in _COMPOSED_BY_VERL:
        return {}, overrides
    files = [place / named.get("config-path", "") / f"{name}.yaml" for place in (path.parent, Path.cwd())]
    file = next((each for each in files if each.is_file()), None)
    if file is None:
        missing.append(name)
        return {}, overrides
    return _composed(file, missing, ()), overrides


def _is_override(word: str) -> bool:
    match = _OVERRIDE.fullmatch(word)
    return match is not None and "." in match[2] and (match[3] is not None or match[1] == "~")


def _nested(opening: str, closing: str, depth: int = 4) -> str:
    """A pattern of text in brackets, which may hold further brackets."""
    inner = rf"[^{opening}{closing}]"
    for _ in range(depth):
        inner = rf"(?:[^{opening}{closing}]|\{opening}{inner}*+\{closing})"
    return rf"\{opening}{inner}*+\{closing}"


_EXPANSION = rf"\$(?:{_nested('{', '}')}|{_nested('(', ')')}|[A-Za-z_]\w*|[^\s\"]?)"
_QUOTED = rf"'[^']*(?:'|\Z)|\"(?:\\.|{_EXPANSION}|[^\"\\$])*+(?:\"|\Z)"
_ARRAY = rf"(?<==)\((?:{_QUOTED}|{_EXPANSION}|(?<=\s)\#[^\n]*|[^)$'\"])*+\)"
_PIECE = re.compile(rf"{_QUOTED}|\\.|{_EXPANSION}", re.DOTALL)
_PIECE_IN_QUOTES = re.compile(rf"\\.|{_EXPANSION}", re.DOTALL)
_TOKEN = re.compile(
    rf"(?:\\\n)+|\#[^\n]*|(?P<end>[\n;&|])|(?P<word>(?:{_QUOTED}|\\.|{_EXPANSION}|{_ARRAY}|[^\s;&|()'\"\\$])+)",
    re.DOTALL,
)
"""Parts of a script: joined lines, comments, ends of statements, words."""
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_PARAMETER = re.compile(r"([A-Za-z_]\w*|\d)(?::?[-=](.*))?", re.DOTALL)
_WORDS_OF_SHELL = ("then", "else", "do", "if", "{", "}", "export", "readonly", "local", "declare", "typeset")


def _statements(text: str) -> Iterator[list[str]]:
    """The words of each statement, as they are written: with their quotes, and with what stands in `$(…)` and `(…)`."""
    words: list[str] = []
    for token in _TOKEN.finditer(f"{text}\n"):
        if token["word"]:
            words.append(token["word"].replace("\\\n", ""))
        elif token["end"] and words:
            yield words
            words = []


def _command(text: str) -> list[str]:
    """The words of the command of a script that has most overrides."""
    variables = _Variables()
    command: list[str] = []
    for statement in _statements(text):
        words = [word for word in statement if word not in _WORDS_OF_SHELL]
        while words and (match := _ASSIGNMENT.fullmatch(words[0])):
            variables.assign(match[1], match[3], bool(match[2]))
            del words[0]
        plain_words = variables.expanded(words)
        if sum(map(_is_override, plain_words)) > sum(map(_is_override, command)):
            command = plain_words
    return command


class _Variables:
    """Variables of a script, each with the words that it stands for: one unless it is an array."""

    def __init__(self) -> None:
        self._of: dict[str, list[str]] = {"HOME": ["~"], "PWD": ["."]}

    def assign(self, name: str, value: str, more: bool) -> None:
        """Set `name=value`, or append where it is `name+=value`."""
        array = value.startswith("(") and value.endswith(")")
        words = self._words_in(value[1:-1]) if array else [self._word(value)]
        self._of[name] = [*self._of.get(name, []), *words] if more else words

    def expanded(self, words: Sequence[str]) -> list[str]:
        """Words with what their variables stand for: none or several for an array, or for a variable without quotes."""
        result: list[str] = []
        for raw in words:
            bare = raw.strip('"')
            if (array := re.fullmatch(r"\$\{([A-Za-z_]\w*)\[[@*]\]\}", bare)) is not None:
                result += self._of.get(array[1], [])
            elif bare not in ("$@", "$*", "${@}", "${*}"):
                word = self._word(raw)
                splits = raw.startswith("$") and not raw.startswith("$(") and word != raw
                result += word.split() if splits else [word]
        return result

    def _words_in(self, text: str) -> list[str]:
        return [word for statement in _statements(text) for word in self.expanded(statement)]

    def _word(self, raw: str, quoted: bool = False) -> str:
        """A word without its quotes, with what its variables stand for."""

        def plain(piece: re.Match[str]) -> str:
            text = piece[0]
            if text[0] == "'":
                return text[1:].removesuffix("'")
            if text[0] == '"':
                return self._word(text[1:].removesuffix('"'), quoted=True)
            if text[0] == "\\":
                return text if quoted and text[1] not in '"$`\\' else text[1]
            return self._parameter(text)

        return (_PIECE_IN_QUOTES if quoted else _PIECE).sub(plain, raw)

    def _parameter(self, text: str) -> str:
        """Return the value of `$NAME`, `${NAME:-default}`, `$((1 + 2))` or `$(basename PATH)`; itself where nobody
        knows."""
        if text.startswith("$((") and text.endswith("))"):
            return self._computed(text)
        if text.startswith("$("):
            words = self._words_in(text[2:-1])
            if words[:1] == ["basename"] and len(words) == 2:
                return words[1].rstrip("/").rpartition("/")[2]
            return "." if words == ["pwd"] else text
        inner = text[2:-1] if text.startswith("${") else text[1:]
        match = _PARAMETER.fullmatch(inner)
        if match is None:
            return f"${inner}"  # without braces, which would be an interpolation of theirs
        if value := self._of.get(match[1]):
            return value[0]
        return f"${inner}" if match[2] is None else self._word(match[2])

    def _computed(self, text: str) -> str:
        """Whole numbers that a script computes."""
        inner = re.sub(r"[A-Za-z_]\w*", lambda name: (self._of.get(name[0]) or ["?"])[0], self._word(text[3:-2]))
        if not re.fullmatch(r"[\d\s()+*/%-]+", inner) or "**" in inner:
            return text
        try:
            return str(eval(inner.replace("/", "//").strip(), {"__builtins__": {}}))  # of digits and signs alone
        except (SyntaxError, TypeError, ZeroDivisionError):
            return text
