"""`rlinf plan`: finds the best placement of a profiled flow, on devices that one need not have.

    rlinf plan --profile profile.json --devices 1024 --per-node 8 --memory-gb 80 -o plan.yaml

In: a profile.json, as every run leaves one. Out: a table of the best plan of each mode, one sentence of why, and a
plan.yaml, which `placement.plan` follows. Nothing is started. All seconds are simulated from the profile, none is
measured.
"""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from rlinf.cli.main import as_input, output_file
from rlinf.config.importing import look_in_working_directory, mistake_in, resolve
from rlinf.config.load import InputError
from rlinf.placement.grammar import PlacementError
from rlinf.placement.hardware import KNOWN, Devices
from rlinf.placement.plan import GB, save
from rlinf.placement.planner import Candidate, leaves
from rlinf.placement.profile import BESIDE, Profile, load
from rlinf.runtime.base.progress import work

if TYPE_CHECKING:
    from rlinf.placement.asynchronous import Recommendation, WithJoiners
    from rlinf.placement.auto import Choice, Row
    from rlinf.placement.simulate import Flow
    from rlinf.runtime.actor.actor import Actor


def main(arguments: Sequence[str]) -> None:
    """Run the command.

    Args:
        arguments: what follows `plan` on the command line.

    Raises:
        InputError: it cannot be planned; the text says what to change.
    """
    options = _parser().parse_args(arguments)
    look_in_working_directory()
    with as_input(PlacementError):
        _run(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rlinf plan", description="Plan a profiled flow for devices that one need not have."
    )
    parser.add_argument("--profile", required=True, metavar="FILE", help="profile.json of a run of the flow")
    parser.add_argument(
        "--devices",
        required=True,
        metavar="N",
        help="how many; of several kinds, h100=512,l40s=64, as profiled or known by their speed",
    )
    parser.add_argument("--per-node", type=int, default=1, metavar="N", help="roles take whole nodes of so many")
    parser.add_argument(
        "--memory-gb",
        type=float,
        metavar="GB",
        help="memory of a device, 10^9 bytes; left out: as known of its kind, else no limit",
    )
    parser.add_argument("--items", type=int, metavar="N", help="items (prompts) of a step; as many as were profiled")
    parser.add_argument(
        "--staleness",
        type=int,
        metavar="N",
        help="plan for answers that are begun N steps early, by a flow such as rlinf.flows.grpo_async; left out: as it "
        "was profiled",
    )
    parser.add_argument("--flow", metavar="PATH", help="dotted path of the flow function; the profiled one if left out")
    parser.add_argument(
        "--actor",
        action="append",
        default=[],
        metavar="ROLE=PATH",
        help="class of a role of your own, whose endpoints the flow calls; may be repeated",
    )
    parser.add_argument(
        "--extrapolate", action="store_true", help="use numbers of devices and items that were not measured: a guess"
    )
    parser.add_argument(
        "--joiners",
        type=int,
        nargs="+",
        default=[],
        metavar="N",
        help="tell what N engines that join the run (rollout.join) would bring, for each N",
    )
    parser.add_argument(
        "--rehearse",
        type=int,
        metavar="K",
        help="plans of each mode that are rehearsed with the real flow; left out: a few; 0: rank by formula alone",
    )
    parser.add_argument("-o", "--output", metavar="FILE", help="write the plan there, such as plan.yaml")
    return parser


def _run(options: argparse.Namespace) -> None:
    from rlinf.placement.auto import FINALISTS, choose  # torch comes with it, which takes seconds

    finalists = FINALISTS if options.rehearse is None else options.rehearse
    profile = _profile(options.profile)
    devices = _devices(options.devices, profile)
    output = None if options.output is None else output_file(options.output)
    for name in ("per_node", "items", "memory_gb"):
        value = getattr(options, name)
        if value is not None and value <= 0:
            raise InputError(f"--{name.replace('_', '-')} {value:g}: it must be more than 0")
    if options.staleness is not None and options.staleness < 0:
        raise InputError(f"--staleness {options.staleness}: it must be at least 0, which is synchronous")
    if (fewest := min(options.joiners, default=0)) < 0:
        raise InputError(f"--joiners {fewest}: it must be at least 0")
    by_kind = {kind: own.memory for kind in devices if (own := KNOWN.get(kind)) is not None and own.memory is not None}
    memory = by_kind or None if options.memory_gb is None else dict.fromkeys(devices, int(options.memory_gb * GB))
    flow = _flow(options.flow, profile) if finalists > 0 else None
    there = Devices(devices, memory, KNOWN, options.per_node)
    rows: Sequence[WithJoiners] = ()
    try:
        choice = choose(
            profile,
            there,
            flow,
            options.items,
            extrapolate=options.extrapolate,
            per_mode=max(0, finalists),
            actors=_actors(options.actor),
            staleness=options.staleness,
        )
        if options.joiners:
            from rlinf.placement.asynchronous import plan_joined

            with work("searching for plans with engines that join"):
                rows = plan_joined(
                    *(profile, there, options.joiners, options.items),
                    extrapolate=options.extrapolate,
                    staleness=choice.staleness,
                )
    except PlacementError as error:
        text = "; ".join(str(complaint) for complaint in error.complaints)
        raise InputError(text.replace("allow extrapolation,", "add --extrapolate,")) from None
    _show(choice, profile, devices, options)
    if rows:
        _show_joined(rows, options.items or profile.items)
    if output is not None:
        save(choice.plan, output)
        _tell(f"plan: {output}")


def _profile(path: str) -> Profile:
    try:
        return load(Path(path))
    except OSError as error:
        raise InputError(f"--profile {path} cannot be read: {error.strerror or error}; a run leaves one") from None
    except ValueError as error:
        raise InputError(str(error)) from None


def _devices(text: str, profile: Profile) -> dict[str, int]:
    """How many of each kind: a number where the profile knows one kind, else kind=number pairs."""
    measured = {way.kind for stage in profile.stages.values() for way in stage.ways}
    kinds = sorted(kind for kind in measured if kind != BESIDE and "+" not in kind) or ["gpu"]
    parts = [part.partition("=") for part in text.split(",")]
    if len(parts) == 1 and not parts[0][1]:
        if len(kinds) > 1:
            raise InputError(
                f"--devices {text}: the profile knows {' and '.join(kinds)}: write how many of each, as in "
                f"{','.join(f'{kind}={text}' for kind in kinds)}"
            )
        parts = [(kinds[0], "=", text)]
    counts: dict[str, int] = {}
    for kind, _, number in parts:
        if not number.strip().isdigit() or int(number) < 1:
            raise InputError(f"--devices {text}: {number or kind!r} is no number of devices; write one of at least 1")
        counts[kind.strip()] = int(number)
    if unknown := [kind for kind in counts if kind not in kinds and kind not in KNOWN]:
        raise InputError(
            f"--devices {text}: nothing was profiled on {unknown[0]!r}; there is: {', '.join(kinds)}; and known by "
            f"their speed are {', '.join(KNOWN)}"
        )
    return counts


def _flow(named: str | None, profile: Profile) -> Flow:
    path = named or profile.flow
    if not path:
        raise InputError("the profile does not name its flow: add --flow rlinf.flows.grpo, or --rehearse 0")
    if mistake := mistake_in(path, must_be_async=True):
        raise InputError(f"--flow {path}: {mistake}")
    flow: Flow = _resolved("--flow", path)
    return flow


def _actors(entries: Sequence[str]) -> dict[str, type[Actor]]:
    from rlinf.runtime.actor.actor import Actor

    actors: dict[str, type[Actor]] = {}
    for entry in entries:
        role, _, path = entry.partition("=")
        cls = _resolved("--actor", path) if path else None
        if not (inspect.isclass(cls) and issubclass(cls, Actor)):
            raise InputError(f"--actor {entry}: write ROLE=package.module.Class, a subclass of rlinf.Actor")
        actors[role] = cls
    return actors


def _resolved(key: str, path: str) -> Any:
    try:
        return resolve(path)
    except Exception as error:  # it is the user's own code that is imported
        raise InputError(f"{key} {path}: importing it failed: {type(error).__name__}: {error}") from error


def _show(choice: Choice, profile: Profile, devices: Mapping[str, int], options: argparse.Namespace) -> None:
    count = sum(devices.values())
    items = options.items or profile.items
    early = f", begun up to {choice.staleness} steps early," if choice.staleness else ""
    title = (
        f"{options.flow or profile.flow}: a step of {items:,} items{early} on {count:,} devices, SIMULATED from the "
        "profile"
    )
    table = Table(title=title)
    for name in ("mode", "devices per role", "calculated s", "rehearsed s", "of bound", "bubble", "peak GB", "chunks"):
        table.add_column(name, justify="left" if name in ("mode", "devices per role") else "right")
    for row in choice.best_of_modes:
        table.add_row(*_cells(row, choice))
    Console(width=max(120, Console().width)).print(table)
    _tell(f"bound: {choice.bound.in_words()}")
    _tell(choice.reason)
    wanted = options.rehearse is None or options.rehearse > 0
    if choice.staleness and wanted and choice.rows[0].rehearsed is None:
        _tell("calculated only: the flow works on one step at a time; add --flow rlinf.flows.grpo_async, or its like")
    if choice.handovers:
        gains = (f"{mode} {one.seconds:,.3f} s, {one.gain:.0%} quicker" for mode, one in choice.handovers.items())
        _tell(f"if trainers took devices over as these run out of answers (calculated, at most): {'; '.join(gains)}")
    if choice.recommended is not None:
        _tell(_recommended(choice.recommended))
    used = len(choice.plan.devices)
    most = max((timing.devices for stage in profile.stages.values() for timing in stage.timings), default=0)
    if used < count and most < count and not options.extrapolate:
        _tell(f"{count - used} devices stay idle: nothing was measured on more than {most}; --extrapolate guesses")
    elif used < count:
        _tell(f"{count - used} devices stay idle, which bubble counts: no plan that uses them is quicker")
    if options.extrapolate:
        _tell("Extrapolated: sizes that were not measured are a guess, at scale a bold one.")
    _tell(
        f"All seconds are simulated from {profile.machine}, not measured on {count:,} devices "
        f"(took {choice.took:.1f} s here)."
    )


def _show_joined(rows: Sequence[WithJoiners], items: int) -> None:
    """A table of numbers of engines that join, and up to which more of them pay."""
    from rlinf.placement.asynchronous import advice

    names = ("joiners", "devices per role", "step s", "items/s", "bound s", "set by", "without them s")
    table = Table(title="the best plans with engines that join, CALCULATED")
    for name in names:
        table.add_column(name, justify="left" if name in ("devices per role", "set by") else "right")
    for row in rows:
        seconds = row.candidate.seconds
        numbers = (f"{seconds:,.3f}", f"{items / seconds:,.3g}", f"{row.bound.seconds:,.3f}", row.bound.binding)
        table.add_row(str(row.count), _sizes(row.candidate), *numbers, f"{row.alone:,.3f}")
    Console(width=max(120, Console().width)).print(table)
    _tell(advice(rows))


def _sizes(candidate: Candidate) -> str:
    return ", ".join(f"{leaf.stage.name} {leaf.option.devices or 'beside'}" for leaf in leaves(candidate.tree))


def _recommended(best: Recommendation) -> str:
    """Describe the gain of each staleness, and the best split at the one to take."""
    row = next(row for row in best.rows if row.staleness == best.staleness)
    share = row.bound.efficiency(row.candidate.seconds)
    seconds = f"{row.candidate.seconds:,.3f} s a step, calculated, {share:.0%} of its bound"
    return f"{best.text} ({_sizes(row.candidate)}: {seconds})"


def _tell(line: str) -> None:
    sys.stdout.write(f"{line}\n")


def _cells(row: Row, choice: Choice) -> list[str]:
    sizes = ", ".join(f"{name} {_place(role.devices)}" for name, role in row.plan.roles.items())
    rehearsed = "-" if row.rehearsed is None else f"{row.rehearsed:,.3f}"
    peak = f"{row.peak_bytes / GB:.1f}" if row.peak_bytes else "-"
    shares = (f"{choice.bound.efficiency(row.seconds):.0%}", f"{row.bubble:.0%}")
    return [row.mode, sizes, f"{row.calculated:,.3f}", rehearsed, *shares, peak, str(row.chunks)]


def _place(devices: Sequence[int]) -> str:
    return str(len(devices)) if devices else "beside"
