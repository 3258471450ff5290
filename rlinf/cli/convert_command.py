"""`rlinf convert`: a configuration of another framework's if a YAML file is given, and demonstrations otherwise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module


def main(arguments: Sequence[str]) -> int:
    """Convert what is named first; returns the exit code.

    Args:
        arguments: what follows `convert` on the command line.

    Raises:
        SystemExit: the arguments are none of the command's.
    """
    first = next((each for each in arguments if not each.startswith("-")), "")
    room = "conversion.command" if first.endswith((".yaml", ".yml")) else "demonstrations.convert"
    command: Callable[[Sequence[str]], int] = import_module(f"rlinf.cli.{room}").main
    return command(arguments)
