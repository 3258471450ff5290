"""The list, the most valuable first."""

from __future__ import annotations

import sys

from benchmarks.gpu.harness import Check, main

CHECKS: tuple[Check, ...] = ()

if __name__ == "__main__":
    sys.exit(main("checks", "benchmarks.gpu.checks", CHECKS))
