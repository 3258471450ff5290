"""`rlinf convert`: a configuration of another framework's if a YAML file or a script is given, and demonstrations
otherwise."""

from __future__ import annotations

import sys
from collections.abc import Sequence

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
    from rlinf.cli.conversion import command  # each way imports what the other has no use for

    if not first and {"-h", "--help"} & {*arguments}:
        sys.stdout.write(f"{command.parser().format_help()}\n")
    if not arguments:
        sys.stderr.write(command.parser().format_usage())
    if first.endswith(CONFIGURATIONS):
        return command.main(arguments)
    from rlinf.cli.demonstrations import convert

    return convert(arguments)
