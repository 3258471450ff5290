"""Writes a configuration of verl's or RLinf's as one of ours.

    rlinf convert THEIRS.yaml OURS.yaml [key=value ...]
    rlinf convert THEIRS.sh OURS.yaml [key=value ...] [--table]

In: their file, with those that its `defaults` name where they lie beside it, or a script that starts a run of verl's;
and overrides of theirs. Out: our file, which says at its top how
it is started and which of their keys have no counterpart; on the terminal a line of counts, what our own checks say of
it, and, with --table, what became of every key. Exit code 0, or 2 with a line that says what is wrong.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rlinf.cli.conversion.convert import THEIRS_OF, Conversion, convert
from rlinf.cli.conversion.reading import read
from rlinf.cli.conversion.writing import as_table, as_yaml, summary
from rlinf.config.importing import look_in_working_directory
from rlinf.config.load import ConfigError, InputError
from rlinf.config.schema import nearest
from rlinf.runs.rules import load_config, load_embodied


def main(arguments: Sequence[str]) -> int:
    """Convert a configuration; returns the exit code.

    Args:
        arguments: what follows `convert` on the command line.

    Raises:
        SystemExit: the arguments are none of the command's.
    """
    options = parser().parse_intermixed_args(arguments)
    source, target = Path(options.source), Path(options.target)
    try:
        if not source.exists():
            raise InputError(f"{source}: there is no such file")
        if target.exists():
            raise InputError(f"{target} is there already; name another file")
        if not target.absolute().parent.is_dir():
            raise InputError(f"{target}: there is no directory {target.absolute().parent}")
        found = convert(read(source, options.overrides))
        target.write_text(as_yaml(found, source.name, options.target), encoding="utf-8")
    except InputError as error:
        sys.stderr.write(f"error: rlinf convert: {error}\n")
        return 2
    if options.table:
        sys.stdout.write(as_table(found))
    sys.stdout.write(f"{summary(found)}\n")
    for key, why in found.absent.items():
        sys.stdout.write(f"  {key}: {why}\n")
    for key, how in found.remarks.items():
        sys.stdout.write(f"  to be looked at: {key}: {how}\n")
    for key, how in found.wanted.items():
        sys.stdout.write(f"  to be written by you: {key}: {how}\n")
    for name in found.missing:
        sys.stdout.write(f"  not read, since it is not beside {source.name}: {name}\n")
    sys.stdout.write(f"{target}\n{_checked(target, found)}")
    return 0


def _checked(target: Path, found: Conversion) -> str:
    """What our own checks say of the file, such as of paths that are other people's."""
    look_in_working_directory()  # as a run does: a reward function beside the file is found
    problems: list[object] = [lack] if (lack := _nothing_named(found)) else []
    try:
        (load_embodied if found.embodied else load_config)(str(target))
    except ConfigError as error:
        problems += error.problems
    if problems:
        return "before it can be run:\n" + "".join(f"  {problem}\n" for problem in problems)
    return "it can be tried: add --dry-run to the command at its top\n"


def _nothing_named(found: Conversion) -> str:
    """Words on a configuration that does not say which model learns, or from which data; empty for others."""
    theirs = dict(zip(("model.path", "data.train"), THEIRS_OF.get(found.origin, ()), strict=False))
    lacking = {ours: key for ours, key in theirs.items() if ours not in found.ours}
    if found.embodied or not lacking:
        return ""
    near = [match for key in lacking.values() if (match := nearest(key, found.absent))]
    meant = f"; meant by {' and '.join(near)}?" if near else "."
    what = "neither a model nor data was" if len(lacking) == 2 else _WITHOUT[next(iter(lacking))]
    return f"{what} found ({' and '.join(lacking.values())}){meant} Or write {' and '.join(lacking)}"


_WITHOUT = {"model.path": "no model was", "data.train": "no data was"}


def parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    parser = argparse.ArgumentParser(
        prog="rlinf convert",
        usage="rlinf convert THEIRS.yaml|THEIRS.sh OURS.yaml [key=value ...] [--table]",
        description="Write a configuration of verl's or RLinf's, or a script that starts a run of verl's, as a "
        "configuration of ours.",
    )
    parser.add_argument("source", metavar="THEIRS.yaml|THEIRS.sh", help="a file of verl's or RLinf's, .yaml or .sh")
    parser.add_argument("target", metavar="OURS.yaml", help="a file that is not there yet")
    parser.add_argument(
        "overrides",
        metavar="key=value",
        nargs="*",
        default=[],
        help="theirs, such as data.train_batch_size=256, which win",
    )
    parser.add_argument("--table", action="store_true", help="print what became of every key")
    return parser
