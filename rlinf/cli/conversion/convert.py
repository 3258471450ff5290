"""A configuration of verl's or RLinf's as one of ours, with what became of each of their keys.

In: what `reading.read` read. Out: our keys, and lists: what is written, what ours does anyway, what has no
counterpart, what is still to be written. Nothing is left out in silence: a key without a rule has no counterpart.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rlinf.cli.conversion.implied import acting, engine_devices, to_be_written
from rlinf.cli.conversion.reading import Read
from rlinf.cli.conversion.rules import Absent, Given, Outcome, Rule, Same, Table, rule_of
from rlinf.config.load import InputError
from rlinf.config.schema import leaves
from rlinf.config.text import RunConfig

_TABLES = {"verl": "verl", "rlinf": "rlinf_text", "rlinf, embodied": "rlinf_embodied"}
"""By what a configuration is: the module of its table, which has `TABLE` and `DEFAULTS`."""
THEIRS_OF = {
    "verl": ("actor_rollout_ref.model.path", "data.train_files"),
    "rlinf": ("actor.model.model_path", "data.train_data_paths"),
}
"""By the same, for text: their keys of the model and of the data."""
_IGNORED = "_target_"
_REFERS = re.compile(r"\$[\w({]")
"""A variable of a shell, a command, or an interpolation."""
_OURS = {leaf.key: leaf.default for leaf in leaves(RunConfig)}
_REWARD = "custom_reward_function.path"
BY_DATA_SOURCE = (
    "verl chooses a scorer by each row's data_source; rlinf.rewards.math does what those for GSM8K, MATH, AIME, DAPO "
    "and Geometry3K do (the boxed answer, or else the last number). For programs write rlinf.rewards.code; or, with "
    "verl installed, verl's own: verl.utils.reward_score.default_compute_score"
)
_NO_RULE = "no key of ours is known to mean this"


@dataclass(slots=True)
class Conversion:
    """What became of a configuration."""

    origin: str
    """Whose it is: a key of `_TABLES`."""
    ours: dict[str, Any] = field(default_factory=dict)
    """By our dotted key; `launch.*` are arguments of the command."""
    written: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Of their keys, those of ours that they became."""
    same: dict[str, str] = field(default_factory=dict)
    """Their keys for which ours does so anyway, and why."""
    absent: dict[str, str] = field(default_factory=dict)
    """Their keys without a counterpart, and what to do."""
    missing: tuple[str, ...] = ()
    """Files that it builds on and that are not at hand."""
    defaults: dict[str, Any] = field(default_factory=dict)
    """By our dotted key, what theirs does where nobody says anything, and ours does not."""
    remarks: dict[str, str] = field(default_factory=dict)
    """By our dotted key, what is to be looked at before it is run."""
    wanted: dict[str, str] = field(default_factory=dict)
    """Keys of ours that a run needs and that theirs do not say, and how to find their values."""

    @property
    def embodied(self) -> bool:
        """A policy acts."""
        return self.origin.endswith("embodied")

    @property
    def keys(self) -> int:
        """How many keys it has."""
        return len(self.written) + len(self.same) + len(self.absent)

    @property
    def translated(self) -> float:
        """Share of its keys that are written or done anyway."""
        return 1 - len(self.absent) / self.keys if self.keys else 1.0


def origin_of(values: Mapping[str, Any]) -> str:
    """Whose configuration it is.

    Raises:
        InputError: it cannot be told.
    """
    sections = {key.partition(".")[0] for key in values}
    if "actor_rollout_ref" in sections:
        return "verl"
    if "cluster" in sections or "runner" in sections:
        return "rlinf, embodied" if values.get("runner.task_type") == "embodied" or "env" in sections else "rlinf"
    raise InputError(
        "neither verl's nor RLinf's: verl's have a section actor_rollout_ref, RLinf's have cluster and runner"
    )


def convert(read: Read) -> Conversion:
    """Ours for theirs.

    Raises:
        InputError: it is of neither framework.
    """
    found = Conversion(origin_of(read.values), missing=read.missing)
    module = importlib.import_module(f"rlinf.cli.conversion.tables.{_TABLES[found.origin]}")
    table: Table = module.TABLE
    theirs: Mapping[str, Any] = getattr(module, "THEIRS", {})
    given = Given({**theirs, **read.values})
    merged: dict[str, Any] = dict(module.DEFAULTS)
    for key, value in read.values.items():
        if key.rpartition(".")[2] == _IGNORED:
            found.same[key] = "a class of theirs"
            continue
        outcome = _outcome(rule_of(table, key), key, value, given)
        if isinstance(outcome, Absent):
            found.absent[key] = outcome.why
        elif isinstance(outcome, Same):
            found.same[key] = outcome.why
        else:
            found.written[key] = tuple(outcome)
            for ours, one in outcome.items():
                joined = isinstance(one, list) and ours.endswith(".args") and ours in merged
                merged[ours] = [*merged[ours], *one] if joined else one
    found.ours = merged
    left_out = {key: value for key, value in theirs.items() if key not in read.values}
    for key, value in left_out.items():
        outcome = _outcome(table[key], key, value, given)
        if isinstance(outcome, Mapping):
            found.defaults |= {ours: one for ours, one in outcome.items() if _says_something(ours, one, merged)}
    found.ours = {**found.defaults, **merged}
    _complete(found)
    if read.values.get(_REWARD) is None and "reward.function" in found.ours and theirs:
        found.remarks["reward.function"] = BY_DATA_SOURCE
    if theirs and "steps" not in found.ours and "trainer.total_epochs" not in read.values:
        found.remarks["steps"] = "theirs says neither epochs nor steps, which is 30 epochs: set it"
    return found


def _outcome(rule: Rule | None, key: str, value: Any, given: Given) -> Outcome:
    """What becomes of one key."""
    if rule is None:
        quiet = value is None or value is False or value in ("", [], {})
        return Same("off, or not set") if quiet else Absent(_NO_RULE)
    if value == "???" and isinstance(quiet_rule := rule(key, None, given), Same):
        return quiet_rule
    return _unresolved(value) or rule(key, value, given)


def _says_something(key: str, value: Any, written: Mapping[str, Any]) -> bool:
    """Whether a default of theirs is to be written: it is neither ours nor overridden."""
    return key not in written and (key not in _OURS or _OURS[key] != value)


def _complete(found: Conversion) -> None:
    """Write what follows from several keys together, and note what nothing says."""
    if (places := engine_devices(found.ours)) is not None:
        by_mode = found.ours.pop("placement.mode", None) is not None
        found.ours |= places
        for theirs, ours in found.written.items() if by_mode else ():
            if "placement.mode" in ours:
                found.written[theirs] = tuple(places)
    if found.embodied:
        found.ours |= acting(found.ours, found.missing)
        found.wanted = dict(to_be_written(found.ours, found.missing))


def _unresolved(value: Any) -> Absent | None:
    if isinstance(value, str) and _REFERS.search(value):
        return Absent(f"its value {value} refers to what is not in this file")
    return Absent("it is to be set by whoever runs it") if value == "???" else None
