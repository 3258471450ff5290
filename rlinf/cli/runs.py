"""Commands around runs: `rlinf watch`, `rlinf serve`, `rlinf ledger` and `rlinf trace`.

    rlinf watch DIR [DIR ...] [--port N] [--host ADDRESS] [--open]

In: directories of runs, or of directories of runs, live or over. Out: the address of a page, which stays until Ctrl-C.

    rlinf serve --config FILE [key=value ...]

In: a configuration, whose base model is served. Out: the URL and the key of a training service, until Ctrl-C.

    rlinf ledger DIR [--json]

Adds up the ledger of a run: was every sample trained once, dropped with a reason, or is it in flight? In:
`ledger.jsonl` of a run's directory and its newest checkpoint, while the run goes on or afterwards. Out: a table, and
exit code 0 if it balances, 1 if not, 2 if there is nothing to add up.

    rlinf trace plot TRACE [TRACE ...] [-o lanes.svg] [--step N]      devices over time, side by side
    rlinf trace summary TRACE [TRACE ...] [--step N]                  shares of the time, as tables

A TRACE is the trace.json that a run writes, or the run's directory. In: these files. Out: an SVG, or text.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from rlinf.cli.main import as_input, output_file
from rlinf.config.importing import look_in_working_directory, shipped
from rlinf.config.load import InputError
from rlinf.dashboard.lanes import Lanes, device_lanes
from rlinf.dashboard.lanes_svg import device_lanes_svg
from rlinf.runs.rules import load_config
from rlinf.runs.start import run_to_end
from rlinf.storage.directory import Checkpoint, RunDirectory, find_checkpoint
from rlinf.storage.files import read_lines

if TYPE_CHECKING:
    from rlinf.data.ledger import Balance, Held
    from rlinf.runtime.system.system import ActorSystem

_BEHIND = 10
"""By how much a page that a job started stands behind the job's own processes, in the kernel's counting."""


def watch(arguments: Sequence[str]) -> None:
    """Show runs until Ctrl-C.

    Args:
        arguments: what follows `watch` on the command line.

    Raises:
        SystemExit: the arguments are none of the command's.
    """
    options = _parser().parse_args(arguments)
    with contextlib.suppress(KeyboardInterrupt):  # before it listens for it
        _watch(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rlinf watch",
        description="A page of runs, live or over. Ctrl-C ends it; the runs go on.",
    )
    parser.add_argument(
        "directories", nargs="+", metavar="DIR", help="of a run, or of directories of runs, such as outputs"
    )
    parser.add_argument("--port", type=int, metavar="N", help="default: 8265, or any if that is taken; 0: any")
    parser.add_argument(
        "--host", default="127.0.0.1", metavar="ADDRESS", help="to listen at; default: this machine alone"
    )
    parser.add_argument("--open", action="store_true", help="open the page in a browser")
    parser.add_argument("--until-ended", action="store_true", help=argparse.SUPPRESS)  # below a job: metrics.web
    return parser


def _watch(options: argparse.Namespace) -> None:
    if options.port is not None and not 0 <= options.port < 1 << 16:
        raise InputError(f"--port {options.port}: ports are numbers up to {(1 << 16) - 1}")
    named = [Path(each) for each in options.directories]
    for directory in named:
        _check(directory, begins=options.until_ended)
    from rlinf.dashboard.server import CannotListen, Where, serve

    if options.until_ended:
        os.nice(_BEHIND)
    where = Where(options.host, options.port, options.open, options.until_ended)
    try:
        asyncio.run(serve(named, where, lambda line: print(line, flush=True)))
    except CannotListen as error:
        raise InputError(str(error)) from None


def _check(directory: Path, begins: bool) -> None:
    """Is there anything to show?

    Args:
        directory: as it was named.
        begins: its run is about to begin.

    Raises:
        InputError: no.
    """
    from rlinf.dashboard.runs import runs_in

    if not directory.is_dir():
        raise InputError(f"{directory}: there is no such directory")
    if not begins and not runs_in([directory]):
        raise InputError(f"{directory} is no run's directory and has none in it: there is no metrics.jsonl")


def serve(arguments: Sequence[str]) -> None:
    """Serve the Tinker API until Ctrl-C.

    Args:
        arguments: what follows `serve` on the command line.

    Raises:
        InputError: a configuration that cannot be served.
    """
    parser = argparse.ArgumentParser(
        prog="rlinf serve", description="A training service for clients of the Tinker API. Ctrl-C ends it."
    )
    parser.add_argument("--config", metavar="FILE", help="whose base model is served; default: serve/tiny")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="sets a key, such as serve.port=8300")
    options = parser.parse_intermixed_args(arguments)
    look_in_working_directory()
    hosts = int(os.environ.get("WORLD_SIZE", "1"))
    config = load_config(shipped(options.config or "serve/tiny"), options.overrides, hosts)
    try:  # before the processes meet: torch comes with it, which takes seconds
        from rlinf.service.serve import serving, steady_products
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "google":
            raise
        raise InputError("rlinf serve needs protobuf: pip install 'rlinf[service]'") from None
    steady_products()
    service = partial(serving, config, partial(print, flush=True))
    if hosts == 1:
        asyncio.run(_serve(service))
    else:  # nobody waits for a service to move
        run_to_end(partial(_serve, service), replace(config.system, stall_after=None))


async def _serve(
    service: Callable[[ActorSystem | None], contextlib.AbstractAsyncContextManager[object]],
    system: ActorSystem | None = None,
) -> None:
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    async with service(system):
        await ended.wait()


HELD = "in_flight.json"
"""File of a checkpoint with the samples that are in flight."""


def ledger(arguments: Sequence[str]) -> int:
    """Print the balance of a run; returns the exit code.

    Args:
        arguments: what follows `ledger` on the command line.

    Raises:
        SystemExit: the arguments are none of the command's.
    """
    parser = argparse.ArgumentParser(
        prog="rlinf ledger",
        description="What became of every sample that a run has drawn. Exit code 1 if one was lost or trained twice.",
    )
    parser.add_argument("directory", metavar="DIR", help="of a run on text, which may still go on")
    parser.add_argument("--json", action="store_true", help="as one JSON object")
    options = parser.parse_args(arguments)
    with as_input(OSError):
        result = account(Path(options.directory))
    text = json.dumps(result.plain(), indent=1) if options.json else "\n".join(result.words(options.directory))
    sys.stdout.write(f"{text}\n")
    return 0 if result.balances else 1


@dataclass(frozen=True, slots=True)
class Account:
    """Balance of a run's ledger, and of its part up to the newest checkpoint."""

    whole: Balance
    """Balance of all lines."""
    checkpoint: int | None = None
    """The step of the newest checkpoint; None where there is none, or none that can be read."""
    in_checkpoint: Balance | None = None
    """Balance of the lines up to there, held against what that checkpoint has in flight; None where it keeps no
    ledger."""
    note: str = ""
    """Why the checkpoint could not be looked at."""

    @property
    def problems(self) -> list[str]:
        """Sentences on what is wrong."""
        later = (
            []
            if self.in_checkpoint is None
            else [each for each in self.in_checkpoint.problems if each not in self.whole.problems]
        )
        return [*self.whole.problems, *(f"at the checkpoint of step {self.checkpoint}: {each}" for each in later)]

    @property
    def balances(self) -> bool:
        """Nothing is wrong."""
        return not self.problems

    def plain(self) -> dict[str, Any]:
        """Return the account as JSON."""
        checkpoint = (
            {} if self.in_checkpoint is None else {"step": self.checkpoint, "in_flight": self.in_checkpoint.in_flight}
        )
        whole = replace(self.whole, dropped=dict(self.whole.dropped), tokens=dict(self.whole.tokens))  # type: ignore[arg-type]
        return {**asdict(whole), "checkpoint": checkpoint or None, "balances": self.balances, "problems": self.problems}

    def words(self, name: str) -> Iterator[str]:
        """Yield the account as lines for people."""
        whole = self.whole
        if not whole.lines:
            yield f"{name}: no step is over yet"
            return
        yield f"{name}: {_count(whole.lines, 'step')}, up to step {whole.steps}"
        rows = [("prompts drawn", whole.prompts, ""), ("samples drawn", whole.samples, "")]
        rows += (
            [("in flight at the beginning", whole.carried, "from another run's checkpoint")] if whole.carried else []
        )
        rows += [("trained", whole.trained, "")]
        rows += [(f"dropped: {reason}", count, "") for reason, count in sorted(whole.dropped.items())]
        rows += [("in flight", whole.in_flight, "")] if whole.in_flight or not whole.unknown else []
        if self.in_checkpoint is not None:
            rows += [("in its newest checkpoint", self.in_checkpoint.in_flight, f"of step {self.checkpoint}")]
        if whole.unknown or whole.elsewhere:
            rows += [
                ("unknown", whole.unknown, "the flow is the user's own, and has not trained them"),
                ("trained again or from elsewhere", whole.elsewhere, "as the user's own flow chose to"),
            ]
        for kind in ("trained", "masked", "dropped"):
            if kind == "trained" or whole.tokens[kind]:
                rows.append((f"tokens {kind}", whole.tokens[kind], "of those, too old" if kind == "masked" else ""))
        width = max(len(f"{count:,}") for _, count, _ in rows)
        yield from (f"  {what:<32}{count:>{width},}  {remark}".rstrip() for what, count, remark in rows)
        if self.note:
            yield f"  not held against a checkpoint: {self.note}"
        yield from (f"wrong: {problem}" for problem in self.problems)
        if self.balances:
            kind = "as far as the flow says" if whole.unknown or whole.elsewhere else "every sample is accounted for"
            yield f"balances: {kind}"


def account(path: Path) -> Account:
    """Add up the ledger of a run.

    Args:
        path: the run's directory.

    Raises:
        InputError: there is no ledger, or it cannot be understood.
    """
    directory = RunDirectory(path)
    if not directory.ledger.is_file():
        if not path.is_dir():
            raise InputError(f"{path}: there is no such directory")
        kind = "the run there began before ledgers, or draws no prompts" if directory.resolved.exists() else "no run"
        raise InputError(f"{path} has no ledger.jsonl ({kind}); name the directory of a run that answers prompts")
    from rlinf.data.ledger import balance

    lines = list(read_lines(directory.ledger))
    try:
        whole = balance(lines)
        try:
            checkpoint = find_checkpoint(path)
        except ValueError as error:
            return Account(whole, note=str(error))
        if checkpoint is None or checkpoint.step not in {line["step"] for line in lines}:
            return Account(whole)
        state: Any = checkpoint.queue.get("ledger")
        if state is None:
            return Account(whole, checkpoint.step, note=f"{checkpoint.path} keeps no ledger")
        before = [line for line in lines if line["step"] <= checkpoint.step]
        return Account(whole, checkpoint.step, balance(before, held_by(checkpoint), state["since"]))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"{directory.ledger} is no ledger that this version can read: {error!r}") from error


def held_by(checkpoint: Checkpoint) -> Held:
    """The samples in flight that a checkpoint holds; none where nothing was."""
    from rlinf.data.ledger import held_in

    path = checkpoint.path / HELD
    return held_in(path) if path.exists() else {}


def _count(number: int, unit: str) -> str:
    return f"{number:,} {unit}{'' if number == 1 else 's'}"


def trace(arguments: Sequence[str]) -> None:
    """Run one command.

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
    with as_input(ValueError, OSError):
        options.run(options)


def _plot(options: argparse.Namespace) -> None:
    output = output_file(options.output)
    output.write_text(device_lanes_svg([device_lanes(Path(path), options.step) for path in options.traces]), "utf-8")
    sys.stdout.write(f"{output}\n")


def _summary(options: argparse.Namespace) -> None:
    console = Console()
    for path in options.traces:
        console.print(_table(device_lanes(Path(path), options.step, whole=options.step is None)))


def _table(lanes: Lanes) -> Table:
    shares = lanes.shares()
    roles = dict.fromkeys(name for _, own in shares for name in own if name not in ("moves", "idle"))
    names = [*roles, *(["moves"] if any(own["moves"] for _, own in shares) else []), "idle"]
    what = f"step {lanes.step}" if lanes.step is not None else "all steps"
    table = Table("host", *names, title=f"{lanes.title}: {what}, {lanes.seconds:.2f} s")
    for host, own in shares:
        table.add_row(str(host), *(f"{own[name]:.1%}" if own.get(name) else "" for name in names))
    return table
