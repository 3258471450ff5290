"""`rlinf convert`: a configuration of another framework's if a YAML file or a script is given, and demonstrations
otherwise."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

CONFIGURATIONS = (".yaml", ".yml", ".sh")
"""How the names of other frameworks' configurations end."""


def main(arguments: Sequence[str]) -> int:
    """Convert what is named first; returns the exit code.

    Args:
        arguments: what follows `convert` on the command line.

    Raises:
        SystemExit: the arguments are none of the command's.
    """
    first = next((each for each in arguments if not each.startswith("-")), "")
    if not first and {"-h", "--help"} & {*arguments}:
        sys.stdout.write(f"{_command('conversion.command').parser().format_help()}\n")
    if not arguments:
        sys.stderr.write(_command("conversion.command").parser().format_usage())
    return _command("conversion.command" if first.endswith(CONFIGURATIONS) else "demonstrations.convert").main(
        arguments
    )  # type: ignore[no-any-return]


def _command(room: str) -> Any:
    return import_module(f"rlinf.cli.{room}")
