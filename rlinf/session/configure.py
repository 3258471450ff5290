"""Turns keyword arguments into a checked configuration, and objects in memory into what stands in for its names.

In: what a program passes to `Session.local` or `train`. Out: a `RunConfig`, as if it had been read from a file, and the
`InMemory` objects that it cannot name; or one error with every mistake.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlinf.config.loading import ConfigError, Problem
from rlinf.config.schema import leaves, nearest, sections
from rlinf.config.supervised import SUPERVISED
from rlinf.config.text import RunConfig
from rlinf.job.validate import config_of
from rlinf.session.trl_names import OF_GIVEN_TEXTS, OURS

_SHORT = {"lr": "optimizer.lr", "engine": "rollout.engine", "backend": "trainer.backend", "lora_r": "model.lora.r"}
"""Names of keys that stand in several sections, or whose last part says little."""
_SECTIONS = ("", "algorithm", "optimizer", "rollout", "trainer", "data", "evaluation", "checkpoint", "metrics", "model")
"""Where the name of a key is looked for, in this order; a dotted key says it all. Runs on given texts look into
`supervised` first."""


def configured(run_dir: str | Path | None, settings: Mapping[str, Any], who: str) -> RunConfig:
    """A configuration from keyword arguments.

    Args:
        run_dir: directory of the run; None takes `outputs/run`.
        settings: by name: a section with a mapping of its keys (`rollout={"max_new_tokens": 8}`), a dotted key
            (`**{"optimizer.lr": 1e-6}`), or the last part of a key (`lr`, `group_size`, `steps`, `max_new_tokens`).
        who: the call, for errors.

    Raises:
        ConfigError: with every name that there is not, and every value that cannot be.
    """
    values: dict[str, Any] = {}
    problems, recipe = [], name_of(settings.get("algorithm"))
    for name, value in settings.items():
        if (key := key_of(name, recipe, value)) is None:
            problems.append(Problem(who, name, value, f"there is no such setting{_instead(name, recipe)}"))
        else:
            values[key] = value
    if problems:
        raise ConfigError(problems)
    path = Path("outputs/run" if run_dir is None else run_dir).expanduser()
    return config_of({"output_dir": str(path.parent), "name": path.name, **values}, who)


def name_of(algorithm: Any) -> Any:
    """The recipe that an argument `algorithm` names: itself, or the `name` of a mapping of keys of that section."""
    return algorithm.get("name") if isinstance(algorithm, Mapping) else algorithm


def key_of(name: str, recipe: Any = None, value: Any = None) -> str | None:
    """The dotted key that a setting's name stands for; None if there is none.

    Args:
        name: of the setting.
        recipe: name of the run's algorithm.
        value: of the setting: a text is no section, so `system="Be brief."` is `data.system`.
    """
    keys = {leaf.key for leaf in leaves(RunConfig)}
    known = keys | dict(sections(RunConfig)).keys()
    if isinstance(value, str) and name in known - keys:
        return next((key for section in _SECTIONS if (key := f"{section}.{name}") in keys), name)
    if name in known or ("." in name and name.partition(".")[0] in known):
        return name
    if name in _SHORT:
        return _SHORT[name]
    first = ("supervised", f"supervised.{recipe}") if recipe in SUPERVISED else ()
    return next((key for section in (*first, *_SECTIONS) if (key := f"{section}.{name}".lstrip(".")) in known), None)


def _instead(name: str, recipe: Any) -> str:
    """What to write in place of a setting that there is not."""
    theirs = {**OURS, **OF_GIVEN_TEXTS} if recipe in SUPERVISED else OURS
    if name in theirs:
        return f": this is TRL's name; here it is {theirs[name]}"
    if inside := [leaf.key.removesuffix(f".{name}") for leaf in leaves(RunConfig) if leaf.key.endswith(f".{name}")]:
        return f" outside of a section; did you mean {' or '.join(f'{each}={{{name!r}: …}}' for each in inside)}?"
    near = nearest(name, [*_names()])
    return f"; did you mean {near}?" if near else "; docs/config.md has every key"


def _names() -> set[str]:
    """Every name that `key_of` knows, without dots."""
    return {leaf.key.rpartition(".")[2] for leaf in leaves(RunConfig)} | dict(sections(RunConfig)).keys() | {*_SHORT}
