"""A converted configuration as a YAML file for people, and what became of each key as a table."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import yaml

from rlinf.cli.conversion.convert import Conversion
from rlinf.cli.conversion.tables.shared import DEVICES, NODES, RESUME
from rlinf.config.embodied import EmbodiedConfig
from rlinf.config.text import RunConfig

_WIDTH = 116


def as_yaml(found: Conversion, source: str, target: str) -> str:
    """Our configuration, with the command that starts it and what has no counterpart as comments.

    Args:
        found: the conversion.
        source, target: names of their file and of ours.
    """
    lines = [f"Converted from {source} ({found.origin}) by `rlinf convert`.", "", f"    {_command(found, target)}", ""]
    if found.missing:
        lines += [f"Not read, since they are not beside it: {', '.join(found.missing)}.", ""]
    if found.wanted:
        lines.append("To be written by you, since theirs does not say it:")
        lines += [*(f"  {key}: {how}" for key, how in found.wanted.items()), ""]
    if found.defaults:
        said = ", ".join(f"{key}={value}" for key, value in found.defaults.items())
        lines += [*textwrap.wrap(f"Left out there, and so as {found.origin} has it by default: {said}.", _WIDTH), ""]
    if found.remarks:
        lines.append("To be looked at:")
        lines += [*(line for key, how in found.remarks.items() for line in _wrapped(key, how)), ""]
    if found.absent:
        lines.append("Without a counterpart here:")
        lines += [f"  {key}: {why}" for key, why in found.absent.items()]
    head = "".join(f"# {line}".rstrip() + "\n" for line in lines).rstrip("# \n") + "\n"
    tree: dict[str, Any] = {}
    places = {one.name: place for place, one in enumerate(fields(EmbodiedConfig if found.embodied else RunConfig))}
    for key, value in sorted(found.ours.items(), key=lambda item: places.get(item[0].partition(".")[0], len(places))):
        if not key.startswith("launch."):
            _put(tree, key.split("."), value)
    body = yaml.safe_dump(tree, sort_keys=False, width=_WIDTH, default_flow_style=None)
    return f"{head}\n{body}"


def _wrapped(key: str, text: str) -> list[str]:
    return textwrap.wrap(f"{key}: {text}", _WIDTH, initial_indent="  ", subsequent_indent="    ")


def as_table(found: Conversion) -> str:
    """What became of every key, in their order of fate."""
    return "".join(f"{line}\n" for line in _rows(found))


def summary(found: Conversion) -> str:
    """One line: how many keys became what."""
    defaults = f"; {len(found.defaults)} of {found.origin}'s defaults beside" if found.defaults else ""
    return (
        f"{found.keys} keys of {found.origin}: {len(found.written)} written, {len(found.same)} done anyway, "
        f"{len(found.absent)} without a counterpart ({found.translated:.0%} translated){defaults}"
    )


def _rows(found: Conversion) -> Iterator[str]:
    width = max(map(len, (*found.written, *found.same, *found.absent)), default=0)
    for key, ours in found.written.items():
        yield f"{key:<{width}}  ->  {', '.join(f'{each}={found.ours[each]}' for each in ours)}"
    for key, value in found.defaults.items():
        yield f"{'(left out)':<{width}}  ->  {key}={value}"
    for key, why in found.same.items():
        yield f"{key:<{width}}  ==  {why}"
    for key, why in found.absent.items():
        yield f"{key:<{width}}  !!  {why}"


def _command(found: Conversion, target: str) -> str:
    nodes, devices = found.ours.get(NODES, 1), found.ours.get(DEVICES, 8)
    several = f"--nnodes {nodes} " if nodes != 1 else ""
    resume = found.ours.get(RESUME)
    tail = "" if resume is None else f" --resume {resume}"
    return f"torchrun {several}--nproc-per-node {devices} -m rlinf train --config {target}{tail}"


def _put(tree: dict[str, Any], parts: list[str], value: Any) -> None:
    *above, last = parts
    for part in above:
        inner = tree.setdefault(part, {})
        tree = inner if isinstance(inner, dict) else tree
    tree[last] = value
