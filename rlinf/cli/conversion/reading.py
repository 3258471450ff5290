"""Reads a configuration of another framework: what Hydra would have composed, as far as its files are at hand.

In: a YAML file. Out: its values by dotted key, with interpolations followed. Files that its `defaults` name are read
where they lie beside it; the others are named, since their keys are unknown here.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlinf.config.loading import InputError

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


def read(path: Path) -> Read:
    """Read a file, and the files of its `defaults` that lie beside it.

    Raises:
        InputError: it cannot be read, or is no mapping.
    """
    missing: list[str] = []
    tree = OmegaConf.create(_composed(path, missing, ()))
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
