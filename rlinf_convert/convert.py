"""Writes a configuration of verl's or RLinf's as one of ours; demonstrations are left to `demonstrations.convert`.

    rlinf convert THEIRS.yaml OURS.yaml [key=value ...]
    rlinf convert THEIRS.sh OURS.yaml [key=value ...] [--table]

In: their file, with those that its `defaults` name where they lie beside it, or a script that starts a run of verl's;
and overrides of theirs (`foreign.read`). Out: our file, which says at its top how it is started and which of their keys
have no counterpart; on the terminal a line of counts, what our own checks say of it, and, with --table, what became of
every key. Nothing is left out in silence: a key without a rule has no counterpart. What their keys mean here is data,
`conversions/*.yaml`; `shared.yaml` says how rules are written.
"""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path, PurePath
from typing import Any

import yaml

from rlinf.config.embodied import EmbodiedConfig
from rlinf.config.importing import look_in_working_directory
from rlinf.config.load import ConfigError, InputError
from rlinf.config.schema import leaves, nearest
from rlinf.config.text import RunConfig
from rlinf.runs.rules import load_config, load_embodied
from rlinf_convert.foreign import Read, read

_TABLES = {"verl": "verl", "rlinf": "rlinf_text", "rlinf, embodied": "rlinf_embodied"}
"""By what a configuration is: the name of its table in `conversions`."""
_CONFIGURATIONS = (".yaml", ".yml", ".sh")
"""How the names of other frameworks' configurations end."""
_NODES, _DEVICES, _RESUME = "launch.nodes", "launch.devices", "launch.resume"
"""Arguments of the command that starts a run, which tables write as if they were keys of ours."""
_WIDTH = 116


# The command ---------------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str]) -> None:
    """Convert what is named first.

    Args:
        arguments: what follows `convert` on the command line.

    Raises:
        SystemExit: the arguments are none of the command's.
    """
    first = next((each for each in arguments if not each.startswith("-")), "")
    if not first.endswith(_CONFIGURATIONS):
        if not arguments:
            sys.stderr.write(_parser().format_usage())
        elif not first and {"-h", "--help"} & {*arguments}:
            sys.stdout.write(f"{_parser().format_help()}\n")
        from rlinf.cli import demonstrations

        demonstrations.convert_demonstrations(arguments)
        return
    options = _parser().parse_intermixed_args(arguments)
    source, target = Path(options.source), Path(options.target)
    if not source.exists():
        raise InputError(f"{source}: there is no such file")
    if target.exists():
        raise InputError(f"{target} is there already; name another file")
    if not target.absolute().parent.is_dir():
        raise InputError(f"{target}: there is no directory {target.absolute().parent}")
    conversion = convert(read(source, options.overrides))
    target.write_text(as_yaml(conversion, source.name, options.target), encoding="utf-8")
    if options.table:
        sys.stdout.writelines(f"{line}\n" for line in _rows(conversion))
    sys.stdout.writelines(f"{line}\n" for line in (*_report(conversion, source.name), target))
    sys.stdout.write(_checked(target, conversion))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rlinf convert",
        usage="rlinf convert THEIRS.yaml|THEIRS.sh OURS.yaml [key=value ...] [--table]",
        description="Write a configuration of verl's or RLinf's, or a script that starts a run of verl's, as a "
        "configuration of ours.",
    )
    parser.add_argument("source", metavar="THEIRS.yaml|THEIRS.sh", help="a file of verl's or RLinf's, .yaml or .sh")
    parser.add_argument("target", metavar="OURS.yaml", help="a file that is not there yet")
    about = "theirs, such as data.train_batch_size=256, which win"
    parser.add_argument("overrides", metavar="key=value", nargs="*", default=[], help=about)
    parser.add_argument("--table", action="store_true", help="print what became of every key")
    return parser


def _checked(target: Path, conversion: Conversion) -> str:
    """Return the result of our own checks of the file, such as of paths that are other people's."""
    look_in_working_directory()  # as a run does: a reward function beside the file is found
    problems: list[object] = [lack] if (lack := _lacking(conversion)) else []
    try:
        (load_embodied if conversion.embodied else load_config)(str(target))
    except ConfigError as error:
        problems += error.problems
    if problems:
        return "before it can be run:\n" + "".join(f"  {problem}\n" for problem in problems)
    return "it can be tried: add --dry-run to the command at its top\n"


def _lacking(conversion: Conversion) -> str:
    """Words on a configuration that does not say which model learns, or from which data; empty for others."""
    lacking = {ours: theirs for ours, theirs in conversion.needed.items() if ours not in conversion.ours}
    if not lacking:
        return ""
    near = [match for key in lacking.values() if (match := nearest(key, conversion.absent))]
    hint = f"; meant by {' and '.join(near)}?" if near else "."
    nothing = {"model.path": "no model was", "data.train": "no data was"}
    what = "neither a model nor data was" if len(lacking) == 2 else nothing[next(iter(lacking))]
    return f"{what} found ({' and '.join(lacking.values())}){hint} Or write {' and '.join(lacking)}"


# From their keys to ours ---------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Conversion:
    """A configuration of theirs as ours, with what became of each of their keys."""

    origin: str
    """Whose it is: a key of `_TABLES`."""
    missing: tuple[str, ...] = ()
    """Files that it builds on and that are not at hand."""
    needed: Mapping[str, str] = field(default_factory=dict)
    """By our keys of the model and of the data, theirs."""
    ours: dict[str, Any] = field(default_factory=dict)
    """By our dotted key; `launch.*` are arguments of the command."""
    written: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """By their key, those of ours that it became."""
    same: dict[str, str] = field(default_factory=dict)
    """Their keys for which ours does so anyway, and why."""
    absent: dict[str, str] = field(default_factory=dict)
    """Their keys without a counterpart, and what to do."""
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


def convert(theirs: Read) -> Conversion:
    """Ours for theirs.

    Raises:
        InputError: it is of neither framework.
    """
    origin = _origin_of(theirs.values)
    table = _table(_TABLES[origin])
    conversion = Conversion(origin, theirs.missing, {} if origin.endswith("embodied") else table["needed"])
    rules = _Rules(table, theirs)
    merged: dict[str, Any] = dict(table["begin"])
    for key, value in theirs.values.items():
        outcome = rules.outcome(key, value)
        if isinstance(outcome, Absent):
            conversion.absent[key] = outcome.why
        elif isinstance(outcome, Same):
            conversion.same[key] = outcome.why
        else:
            conversion.written[key] = tuple(outcome)
            for ours, one in outcome.items():
                joined = isinstance(one, list) and ours.endswith(".args") and ours in merged
                merged[ours] = [*merged[ours], *one] if joined else one
    default_of = {leaf.key: leaf.default for leaf in leaves(RunConfig)}
    for key, value in table["defaults"].items():
        outcome = Same("said") if key in theirs.values else rules.outcome(key, value)
        for ours, one in outcome.items() if isinstance(outcome, Mapping) else ():
            if ours not in merged and (ours not in default_of or default_of[ours] != one):
                conversion.defaults[ours] = one
    conversion.ours = {**conversion.defaults, **merged}
    _complete(conversion, table, rules)
    return conversion


def _origin_of(values: Mapping[str, Any]) -> str:
    """Whose configuration it is, a key of `_TABLES`."""
    sections = {key.partition(".")[0] for key in values}
    if "actor_rollout_ref" in sections:
        return "verl"
    if "cluster" in sections or "runner" in sections:
        return "rlinf, embodied" if values.get("runner.task_type") == "embodied" or "env" in sections else "rlinf"
    raise InputError(
        "neither verl's nor RLinf's: verl's have a section actor_rollout_ref, RLinf's have cluster and runner"
    )


def _complete(conversion: Conversion, table: Mapping[str, Any], rules: _Rules) -> None:
    """Write what follows from several keys together, and note what nothing says."""
    ours = rules.known["ours"] = conversion.ours
    if (places := engine_devices(ours)) is not None:
        by_mode = ours.pop("placement.mode", None) is not None
        ours |= places
        for theirs, written in conversion.written.items() if by_mode else ():
            if "placement.mode" in written:
                conversion.written[theirs] = tuple(places)
    for rule in table["afterwards"].values():
        outcome = rules.apply(rule, {})
        ours |= outcome if isinstance(outcome, Mapping) else {}
    for notes, name in ((conversion.remarks, "remarks"), (conversion.wanted, "wanted")):
        for key, rule in table[name].items():
            note = rules.apply(rule, {})
            if isinstance(note, Absent):
                notes[key] = note.why


def engine_devices(ours: Mapping[str, Any]) -> dict[str, Any] | None:
    """Placement of an engine that splits its model: a process for each part of the devices, `0-7:0-3` by twos.

    Args:
        ours: what is written so far, by dotted key.

    Returns:
        Keys in place of `placement.mode` (or of `placement.rollout`); None where nothing is to be changed.
    """
    split, devices = ours.get("rollout.engine_args.tensor_parallel", 1), ours.get(_DEVICES, 8) * ours.get(_NODES, 1)
    if not isinstance(split, int) or split < 2:
        return None
    together = ours.get("placement.mode") == "collocated"
    place = "all" if together else str(ours.get("placement.rollout"))
    span = re.fullmatch(r"(\d+)-(\d+)", f"0-{devices - 1}" if place == "all" else place)
    if span is None or (count := int(span[2]) - int(span[1]) + 1) % split:
        return None
    rollout = f"{span[0]}:0" if count == split else f"{span[0]}:0-{count // split - 1}"
    return {"placement.rollout": rollout, **({"placement.trainer": "all"} if together else {})}


# Rules ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Same:
    """Nothing is to be written: ours does so anyway, or has nothing to which it could apply."""

    why: str


@dataclass(frozen=True, slots=True)
class Absent:
    """There is no counterpart."""

    why: str


Outcome = Mapping[str, Any] | Same | Absent
"""Result of converting a key: values by keys of ours, or why there are none."""


def _table(name: str) -> dict[str, dict[str, Any]]:
    """A table with those that it builds on, and its rules by whole keys."""
    tree = yaml.safe_load((Path(__file__).parent / "conversions" / f"{name}.yaml").read_text(encoding="utf-8"))
    parts = ("begin", "defaults", "needed", "maps", "names", "forms", "rules", "afterwards", "remarks", "wanted")
    table: dict[str, dict[str, Any]] = {part: {} for part in parts}
    for base in tree.pop("base", ()):
        table = _table(base)
    for section, rules in tree.pop("rules", {}).items():
        condition, otherwise = rules.pop("if", None), rules.pop("else", None)
        for keys, rule in rules.items():
            one = {condition: rule, "else": otherwise} if condition else rule
            table["rules"] |= {f"{section}.{key}": one for key in keys.split(", ")}
    for part, content in tree.items():
        table[part] |= content
    return table


class _Rules:
    """A table's rules, applied to one configuration.

    Args:
        table: as `_table` reads it.
        theirs: the configuration.
    """

    def __init__(self, table: Mapping[str, Any], theirs: Read):
        self._table = table
        values = {**table["defaults"], **theirs.values}

        def of_theirs(key: str, default: Any = None) -> Any:
            value = values.get(key)
            return default if value is None else value

        def below(section: str) -> list[Any]:
            return [value for key, value in values.items() if key.startswith(f"{section}.")]

        self.known: dict[str, Any] = {"__builtins__": {}, **_FUNCTIONS, **table["maps"]}
        self.known |= {"theirs": of_theirs, "below": below, "keys": theirs.values, "missing": theirs.missing}
        for name, expression in table["names"].items():
            self.known[name] = self._value(expression, {})

    def outcome(self, key: str, value: Any) -> Outcome:
        """Convert one key of theirs: to values by keys of ours, or to why there are none."""
        section, _, last = key.rpartition(".")
        if last == "_target_":
            return Same("a class of theirs")
        rule = self._rule_of(key)
        if rule is None:
            quiet = value is None or value is False or value in ("", [], {})
            return Same("off, or not set") if quiet else Absent("no key of ours is known to mean this")

        def applied(value: Any) -> Outcome:
            local = {"key": key, "section": section, "last": last, "parts": [each.strip() for each in last.split(",")]}
            return self.apply(rule, {**local, "value": value, **_of_value(value)})

        if value == "???":  # to be set by whoever runs it, unless it may be left out
            unset = applied(None)
            return unset if isinstance(unset, Same) else Absent("it is to be set by whoever runs it")
        if isinstance(value, str) and re.search(r"\$[\w({]", value):  # of a shell, or an interpolation
            return Absent(f"its value {value} refers to what is not in this file")
        try:
            return applied(value)
        except (TypeError, ValueError, ArithmeticError):
            return Absent(f"its value {value!r}, or that of a key that belongs to it, is of another kind than expected")

    def _rule_of(self, key: str) -> Any:
        """The rule of a key: its own, or that of the nearest `.*` above; None if there is none."""
        parts, rules = key.split("."), self._table["rules"]
        above = (".".join([*parts[:count], "*"]) for count in range(len(parts) - 1, 0, -1))
        return next((rules[each] for each in (key, *above) if each in rules), None)

    def apply(self, rule: Any, local: Mapping[str, Any]) -> Outcome:
        """Apply a rule, with the names that only its key knows."""
        if isinstance(rule, Mapping):
            holds = (each for each in rule if each == "else" or self._value(each, local))
            return self.apply(rule[first], local) if (first := next(holds, None)) else Same("")
        sign, _, text = rule.partition(" ")
        if sign in ("==", "!!"):
            return (Same if sign == "==" else Absent)(self._text(text, local))
        if sign != "->":
            form = self._table["forms"][sign]
            return self.apply(_filled(form, text.split(" ", len({*re.findall(r"\$\d", str(form))}) - 1)), local)
        key, computed, expression = text.partition("= ")
        key = self._text(key, local).strip()
        if not computed:
            return Same("null leaves the default") if local["value"] is None else {key: local["value"]}
        result = self._value(expression, local)
        return {key: result} if key else result  # type: ignore[no-any-return]

    def _value(self, expression: str, local: Mapping[str, Any]) -> Any:
        return eval(expression, {**self.known, **local})  # of files that come with this package, never of a user's

    def _text(self, text: str, local: Mapping[str, Any]) -> str:
        return re.sub(r"\{([^{}:]+)\}", lambda each: str(self._value(each[1], local)), text)


def _filled(form: Any, arguments: Sequence[str]) -> Any:
    """A form with arguments in place of `$1`, `$2` ..."""
    if isinstance(form, Mapping):
        return {_filled(condition, arguments): _filled(rule, arguments) for condition, rule in form.items()}
    return re.sub(r"\$(\d)", lambda each: arguments[int(each[1]) - 1], form)


def _of_value(value: Any) -> dict[str, Callable[..., Any]]:
    """Functions of the value that expressions have."""
    return {
        "off": lambda *quiet: value is None or value in ([], {}, *quiet),
        "known": lambda names: isinstance(value, str | int | float | bool) and value in names,
        "others": lambda names: [each for each in _many(value) if each is not None and each not in names],
    }


def _many(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _listed(names: Iterable[Any]) -> str:
    return ", ".join(map(str, names))


def _trained_on(name: str) -> str:
    """NAME of a simulator's file, `env/train/NAME` or `env/NAME`; empty for any other, and for one of evaluations."""
    kind, _, rest = name.partition("/")
    return rest.removeprefix("train/") if kind == "env" and not rest.startswith("eval/") else ""


_FUNCTIONS: dict[str, Any] = {
    **{each.__name__: each for each in (bool, dict, filter, float, int, isinstance, len, map, round, set, str)},
    "many": _many,
    "listed": _listed,
    "whole": lambda value: isinstance(value, int),
    "stem": lambda path: PurePath(path).stem,
    "trained_on": _trained_on,
}
"""Functions that expressions may call."""


# What is written and printed -----------------------------------------------------------------------------------------


def as_yaml(conversion: Conversion, source: str, target: str) -> str:
    """Our configuration, with the command that starts it and what has no counterpart as comments.

    Args:
        conversion: what became of theirs.
        source, target: names of their file and of ours.
    """
    origin = conversion.origin
    lines = [f"Converted from {source} ({origin}) by `rlinf convert`.", "", f"    {_command(conversion, target)}", ""]
    if conversion.missing:
        lines += [f"Not read, since they are not beside it: {', '.join(conversion.missing)}.", ""]
    if conversion.wanted:
        lines.append("To be written by you, since theirs does not say it:")
        lines += [*(f"  {key}: {how}" for key, how in conversion.wanted.items()), ""]
    if conversion.defaults:
        defaults = ", ".join(f"{key}={value}" for key, value in conversion.defaults.items())
        lines += [*textwrap.wrap(f"Left out there, and so as {origin} has it by default: {defaults}.", _WIDTH), ""]
    if conversion.remarks:
        lines.append("To be looked at:")
        for key, how in conversion.remarks.items():
            lines += textwrap.wrap(f"{key}: {how}", _WIDTH, initial_indent="  ", subsequent_indent="    ")
        lines.append("")
    if conversion.absent:
        lines.append("Without a counterpart here:")
        lines += [f"  {key}: {why}" for key, why in conversion.absent.items()]
    head = "".join(f"# {line}".rstrip() + "\n" for line in lines).rstrip("# \n") + "\n"
    tree: dict[str, Any] = {}
    order = [one.name for one in fields(EmbodiedConfig if conversion.embodied else RunConfig)]
    places = {name: place for place, name in enumerate(order)}
    for key in sorted(conversion.ours, key=lambda key: places.get(key.partition(".")[0], len(places))):
        if not key.startswith("launch."):
            _put(tree, key.split("."), conversion.ours[key])
    return f"{head}\n{yaml.safe_dump(tree, sort_keys=False, width=_WIDTH, default_flow_style=None)}"


def _put(tree: dict[str, Any], parts: list[str], value: Any) -> None:
    *above, last = parts
    for part in above:
        inner = tree.setdefault(part, {})
        tree = inner if isinstance(inner, dict) else tree
    tree[last] = value


def _command(conversion: Conversion, target: str) -> str:
    nodes, devices = conversion.ours.get(_NODES, 1), conversion.ours.get(_DEVICES, 8)
    several = f"--nnodes {nodes} " if nodes != 1 else ""
    resume = conversion.ours.get(_RESUME)
    tail = "" if resume is None else f" --resume {resume}"
    return f"torchrun {several}--nproc-per-node {devices} -m rlinf train --config {target}{tail}"


def _rows(conversion: Conversion) -> Iterator[str]:
    """A line for every key, in the order of what became of them."""
    width = max(map(len, (*conversion.written, *conversion.same, *conversion.absent)), default=0)
    for key, ours in conversion.written.items():
        yield f"{key:<{width}}  ->  {', '.join(f'{each}={conversion.ours[each]}' for each in ours)}"
    for key, value in conversion.defaults.items():
        yield f"{'(left out)':<{width}}  ->  {key}={value}"
    for sign, keys in (("==", conversion.same), ("!!", conversion.absent)):
        for key, why in keys.items():
            yield f"{key:<{width}}  {sign}  {why}"


def _report(conversion: Conversion, source: str) -> Iterator[str]:
    """How many keys became what, and what is left to be done."""
    origin, defaults = conversion.origin, len(conversion.defaults)
    yield (
        f"{conversion.keys} keys of {origin}: {len(conversion.written)} written, {len(conversion.same)} done anyway, "
        f"{len(conversion.absent)} without a counterpart ({conversion.translated:.0%} translated)"
        + (f"; {defaults} of {origin}'s defaults beside" if defaults else "")
    )
    yield from (f"  {key}: {why}" for key, why in conversion.absent.items())
    yield from (f"  to be looked at: {key}: {how}" for key, how in conversion.remarks.items())
    yield from (f"  to be written by you: {key}: {how}" for key, how in conversion.wanted.items())
    yield from (f"  not read, since it is not beside {source}: {name}" for name in conversion.missing)
