"""Small commands around a run: `python -m rlinf config` documents every key of a configuration."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from rlinf.config import RunConfig
from rlinf.config_docs import as_markdown, as_text


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m rlinf", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    config = commands.add_parser("config", help="list every configuration key with type, default and meaning")
    config.add_argument("--markdown", action="store_true", help="as the page docs/config.md")
    config.set_defaults(run=lambda options: print(_keys(options.markdown), end=""))
    options = parser.parse_args(arguments)
    options.run(options)
    return 0


def _keys(markdown: bool) -> str:
    return as_markdown(RunConfig) if markdown else as_text(RunConfig) + "\n"
