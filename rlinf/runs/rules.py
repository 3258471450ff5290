"""Reads and checks a configuration: `load_config(path, overrides)` gives a `RunConfig`, or one error with all mistakes.

Types, limits and rules of the keys stand beside them in `rlinf.config`; here are the rules that ask engines, recipes,
benchmarks or placement. Mistakes are listed by key. Nothing heavy is imported: checking a configuration is quick.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from rlinf.config.embodied import DAGGER, IMITATION, OFF_POLICY, EmbodiedConfig
from rlinf.config.importing import mistake_in
from rlinf.config.learning import SUPERVISED
from rlinf.config.load import ConfigError, InputError, Problem, RunFailure, dump, load
from rlinf.config.reading import read_bytes
from rlinf.config.schema import nearest
from rlinf.config.text import RunConfig
from rlinf.data.datasets.benchmarks import benchmark_mistakes
from rlinf.engines import ENGINES
from rlinf.placement.seats import INSIDE, TEXT, mistakes_in, own_kinds, teacher_kinds

__all__ = ["ConfigError", "InputError", "Problem", "RunConfig", "RunFailure", "dump", "load_config"]

_ROLE_KEYS = ("class", "hosts", "devices", "settings", "memory_gb")


def load_config(path: str | Path | None, overrides: Sequence[str] = (), hosts: int | None = None) -> RunConfig:
    """Read a configuration.

    Args:
        path: YAML file; None takes the defaults alone.
        overrides: `a.b=value`; they win over the file, later ones over earlier ones.
        hosts: number of processes of this job; given, the placement is checked against it too.

    Raises:
        ConfigError: with every mistake, before anything is started.
        InputError: if the file cannot be read as YAML at all.
    """
    return load(RunConfig, path, overrides, lambda config: _mistakes(config, hosts))


def config_of(values: Mapping[str, Any], who: str) -> RunConfig:
    """A configuration from Python values.

    Args:
        values: by dotted key; what is not there has its default.
        who: gave them, for errors.

    Raises:
        ConfigError: with every mistake.
    """
    return load(RunConfig, None, (), lambda config: _mistakes(config, None), values, who)


def _mistakes(config: RunConfig, hosts: int | None) -> Iterator[tuple[str, str]]:
    """(key, advice) for what keys alone cannot say."""
    if (engine := config.rollout.engine) not in ENGINES and (advice := mistake_in(engine)) is not None:
        yield "rollout.engine", f"{advice}; or take {' or '.join(ENGINES)}"
    yield from _recipe_mistakes(config.algorithm.name)
    yield from benchmark_mistakes(config.evaluation.named)
    yield from _roles_mistakes(config)
    kinds = (*TEXT, *own_kinds(config.roles), *teacher_kinds(config.teachers))
    yield from mistakes_in(config.placement, kinds, hosts)


def _roles_mistakes(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield mistakes in entries of `roles`, as (key, advice)."""
    names = {kind.name for kind in TEXT} | {"step", *(f"teacher_{name}" for name in config.teachers)}
    for name, entry in config.roles.items():
        key = f"roles.{name}"
        if not str(name).isidentifier() or name in names:
            yield key, "there is a role of that name: take another" if name in names else "write a Python name"
        if not isinstance(entry, Mapping) or "class" not in entry:
            yield key, "write {class: my_module.MyActor}, and hosts or devices, settings, memory_gb where it has them"
            continue
        if unknown := sorted(entry.keys() - _ROLE_KEYS):
            yield key, f"it has no {unknown[0]}; its keys are {', '.join(_ROLE_KEYS)}"
        if {"hosts", "devices"} <= entry.keys():
            yield key, "it has hosts and devices: name devices if it computes on them, else hosts"
        if not isinstance(entry.get("settings") or {}, Mapping):
            yield key, "settings: write a mapping of what its setup takes, by name"
        memory = entry.get("memory_gb", 0)
        if isinstance(memory, bool) or not isinstance(memory, int | float) or memory < 0:
            yield key, f"memory_gb: {memory!r}: write how much it holds on each of its devices, GB"
        advice = mistake_in(entry["class"]) if isinstance(entry["class"], str) else "write the dotted path of a class"
        if advice is not None:
            yield key, f"class: {advice}"


@cache
def recipe_names() -> tuple[str, ...]:
    """Names of `algos.recipes`, from its source: importing it takes torch, which takes seconds."""
    source = Path(__file__).parents[1].joinpath("algos", "recipes.py").read_text(encoding="utf-8")
    return tuple(dict.fromkeys(re.findall(r'(?:AlgorithmSpec\(\s*|\bname=)"(\w+)"', source)))


def _recipe_mistakes(name: str) -> Iterator[tuple[str, str]]:
    if name not in (names := (*recipe_names(), *SUPERVISED)):
        near = nearest(name, (*names, *OFF_POLICY, DAGGER, IMITATION))
        advice = f"did you mean {near}?" if near else f"take {', '.join(names)}"
        yield "algorithm.name", f"there is no such recipe; {advice}"


def load_any(
    path: str | Path | None, overrides: Sequence[str] = (), hosts: int | None = None
) -> RunConfig | EmbodiedConfig:
    """Read a configuration of either kind; see `load_config`."""
    return (load_embodied if is_embodied(path) else load_config)(path, overrides, hosts)


def is_embodied(path: str | Path | None) -> bool:
    """True if a file is a configuration of a policy that acts; False if it cannot be read."""
    if path is None:
        return False
    try:
        tree = yaml.compose(read_bytes(Path(path)).decode("utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return False  # reading it as any configuration tells what is wrong
    return isinstance(tree, yaml.MappingNode) and any(name.value in ("env", "imitation") for name, _ in tree.value)


def load_embodied(path: str | Path | None, overrides: Sequence[str] = (), hosts: int | None = None) -> EmbodiedConfig:
    """Read the configuration of a run in which a policy acts; arguments and errors are those of `load_config`."""
    return load(EmbodiedConfig, path, overrides, lambda config: _embodied_mistakes(config, hosts))


def _embodied_mistakes(config: EmbodiedConfig, hosts: int | None) -> Iterator[tuple[str, str]]:
    if config.algorithm.name not in (*OFF_POLICY, DAGGER, IMITATION):
        yield from _recipe_mistakes(config.algorithm.name)
    yield from mistakes_in(config.placement, INSIDE, hosts)
