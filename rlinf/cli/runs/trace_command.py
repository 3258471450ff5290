"""Traces of runs, drawn and summed up.

    rlinf trace plot TRACE [TRACE ...] [-o lanes.svg] [--step N]      devices over time, side by side
    rlinf trace summary TRACE [TRACE ...] [--step N]                  shares of the time, as tables

A TRACE is the trace.json that a run writes, or the run's directory. In: these files. Out: an SVG, or text.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from rlinf.metrics.html.lanes import Lanes, device_lanes
from rlinf.metrics.html.lanes_svg import device_lanes_svg


def main(arguments: Sequence[str]) -> int:
    """Run one command; returns the exit code: 2 for what cannot be read or written, with a message.

    Args:
        arguments: what follows `trace` on the command line.

    Raises:
        SystemExit: the arguments are none of the commands'.
    """
    parser = argparse.ArgumentParser(prog="rlinf trace", description="Draw traces of runs, or sum them up.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    plot = commands.add_parser("plot", help="what each device did over time, several traces side by side")
    plot.add_argument("-o", "--output", default="lanes.svg", metavar="FILE", help="the SVG to write (lanes.svg)")
    plot.set_defaults(run=_plot)
    summary = commands.add_parser("summary", help="the share of the time that each role used each device")
    summary.set_defaults(run=_summary)
    for command, default in ((plot, "the one in the middle"), (summary, "all together")):
        command.add_argument("traces", nargs="+", metavar="TRACE", help="trace.json of a run, or the run's directory")
        command.add_argument("--step", type=int, metavar="N", help=f"which step of the flow; default: {default}")
    options = parser.parse_args(arguments)
    try:
        options.run(options)
    except (ValueError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


def _plot(options: argparse.Namespace) -> None:
    output = Path(options.output)
    if not output.absolute().parent.is_dir():
        raise ValueError(f"--output {output}: there is no directory {output.absolute().parent}")
    output.write_text(device_lanes_svg([device_lanes(Path(path), options.step) for path in options.traces]), "utf-8")
    sys.stdout.write(f"{output}\n")


def _summary(options: argparse.Namespace) -> None:
    console = Console()
    for path in options.traces:
        console.print(_table(device_lanes(Path(path), options.step, whole=options.step is None)))


def _table(read: Lanes) -> Table:
    shares = read.shares()
    roles = dict.fromkeys(name for _, own in shares for name in own if name not in ("moves", "idle"))
    names = [*roles, *(["moves"] if any(own["moves"] for _, own in shares) else []), "idle"]
    what = f"step {read.step}" if read.step is not None else "all steps"
    table = Table("host", *names, title=f"{read.title}: {what}, {read.seconds:.2f} s")
    for host, own in shares:
        table.add_row(str(host), *(f"{own[name]:.1%}" if own.get(name) else "" for name in names))
    return table
