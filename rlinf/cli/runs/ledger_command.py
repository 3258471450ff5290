"""The ledger of a run, added up: was every sample trained once, dropped with a reason, or is it in flight?

    rlinf ledger DIR [--json]

In: `ledger.jsonl` of a run's directory and its newest checkpoint, while the run goes on or afterwards. Out: a table,
and exit code 0 if it balances, 1 if not, 2 if there is nothing to add up.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlinf.config.loading import InputError
from rlinf.metrics.files import read_lines
from rlinf.metrics.run_directory import Checkpoint, RunDirectory, find_checkpoint

if TYPE_CHECKING:
    from rlinf.data.in_flight.balance import Balance
    from rlinf.data.in_flight.ledger import Held

HELD = "in_flight.json"
"""File of a checkpoint with the samples that are in flight."""


def main(arguments: Sequence[str]) -> int:
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
    try:
        found = account(Path(options.directory))
    except (InputError, OSError) as error:
        sys.stderr.write(f"error: rlinf ledger: {error}\n")
        return 2
    told = json.dumps(found.plain(), indent=1) if options.json else "\n".join(found.words(options.directory))
    sys.stdout.write(f"{told}\n")
    return 0 if found.balances else 1


@dataclass(frozen=True, slots=True)
class Account:
    """What a run's ledger and its newest checkpoint say."""

    whole: Balance
    """Of all lines."""
    checkpoint: int | None = None
    """The step of the newest checkpoint; None where there is none, or none that can be read."""
    kept: Balance | None = None
    """Of the lines up to there, held against what that checkpoint has in flight; None where it keeps no ledger."""
    note: str = ""
    """Why the checkpoint could not be looked at."""

    @property
    def problems(self) -> list[str]:
        """What is wrong, in words."""
        kept = [] if self.kept is None else [each for each in self.kept.problems if each not in self.whole.problems]
        return [*self.whole.problems, *(f"at the checkpoint of step {self.checkpoint}: {each}" for each in kept)]

    @property
    def balances(self) -> bool:
        """Nothing is wrong."""
        return not self.problems

    def plain(self) -> dict[str, Any]:
        """As JSON."""
        kept = {} if self.kept is None else {"step": self.checkpoint, "in_flight": self.kept.in_flight}
        whole = replace(self.whole, dropped=dict(self.whole.dropped), tokens=dict(self.whole.tokens))  # type: ignore[arg-type]
        return {**asdict(whole), "checkpoint": kept or None, "balances": self.balances, "problems": self.problems}

    def words(self, name: str) -> Iterator[str]:
        """As lines for people."""
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
        if self.kept is not None:
            rows += [("in its newest checkpoint", self.kept.in_flight, f"of step {self.checkpoint}")]
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
    from rlinf.data.in_flight.balance import balance

    lines = list(read_lines(directory.ledger))
    try:
        whole = balance(lines)
        try:
            begun = find_checkpoint(path)
        except ValueError as error:
            return Account(whole, note=str(error))
        if begun is None or begun.step not in {line["step"] for line in lines}:
            return Account(whole)
        state: Any = begun.queue.get("ledger")
        if state is None:
            return Account(whole, begun.step, note=f"{begun.path} keeps no ledger")
        before = [line for line in lines if line["step"] <= begun.step]
        return Account(whole, begun.step, balance(before, held_by(begun), state["since"]))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"{directory.ledger} is no ledger that this version can read: {error!r}") from error


def held_by(checkpoint: Checkpoint) -> Held:
    """The samples in flight that a checkpoint holds; none where nothing was."""
    from rlinf.data.in_flight.held import held_in

    path = checkpoint.path / HELD
    return held_in(path) if path.exists() else {}


def _count(number: int, unit: str) -> str:
    return f"{number:,} {unit}{'' if number == 1 else 's'}"
