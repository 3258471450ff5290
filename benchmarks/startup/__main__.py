"""Processor time of commands that start nothing, or little, and the modules that they import: `python -m
benchmarks.startup`.

Each command runs in an interpreter of its own, a few times, in turn with the same command of another checkout if one is
given (`--beside DIRECTORY`). Shown are medians and the least and the most: processor seconds of the whole process, its
end included, seconds until it printed its first line, the most memory that it had, and its modules by the package that
they belong to. `--steps 1` adds a run of the quickstart of so many steps.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from statistics import median

HERE = Path(__file__).parents[2]
_SHOWN = 8
"""Packages that are listed with their number of modules."""
_COUNTING = """
import atexit, os, runpy, sys
atexit.register(lambda: open(os.environ["MODULES"], "w").write("\\n".join(sys.modules)))
runpy.run_module("rlinf", run_name="__main__")
"""


@dataclass(frozen=True, slots=True)
class Turn:
    """One process of a command."""

    processor: float
    """Seconds of user and system."""
    first: float
    """Seconds until the first line."""
    memory: int
    """Bytes at the most."""


def turn(arguments: list[str], checkout: Path) -> Turn:
    """Run a command of a checkout."""
    environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "rlinf", *arguments]
    began = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=checkout, env=environment) as process:
        assert process.stdout is not None  # it is a pipe
        process.stdout.readline()
        first = time.perf_counter() - began
        process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"{' '.join(command)} in {checkout} ended with {process.returncode}")
    return Turn(usage.ru_utime + usage.ru_stime, first, usage.ru_maxrss * 1024)


def modules(arguments: list[str], checkout: Path) -> Counter[str]:
    """Modules that a command has imported at its end, counted by package."""
    with tempfile.NamedTemporaryFile("r") as file:
        command = [sys.executable, "-c", _COUNTING, *arguments]
        environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1", "MODULES": file.name}
        subprocess.run(command, check=True, cwd=checkout, env=environment, stdout=subprocess.DEVNULL)
        return Counter(name.partition(".")[0] for name in file.read().split("\n"))


def _row(name: str, turns: list[Turn]) -> str:
    seconds = [each.processor for each in turns]
    first, memory = median(each.first for each in turns), median(each.memory for each in turns)
    spread = f"{median(seconds):5.2f} ({min(seconds):.2f} to {max(seconds):.2f})"
    return f"  {name}: processor s {spread}; first line after {first:.2f} s; {memory / 1e6:,.0f} MB"


def main() -> None:
    """Measure each command, and print a row as soon as it is known."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--beside", type=Path, help="another checkout, which has its turns between ours")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=0, help="of a real run of the quickstart; 0: none")
    parser.add_argument("--config", default="quickstart", help="what the dry run is of")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as outputs:
        train = ["train", "--config", options.config, f"output_dir={outputs}"]
        commands = [["--help"], ["train", "--help"], [*train, "--dry-run"]]
        if options.steps:
            commands.append([*train, f"steps={options.steps}", "checkpoint.every=0", "evaluation.every=0"])
        for arguments in commands:
            print(" ".join(["rlinf", *(each for each in arguments if "output_dir" not in each)]), flush=True)
            checkouts = {"here": HERE} | ({"beside": options.beside.absolute()} if options.beside else {})
            rounds = [{name: turn(arguments, path) for name, path in checkouts.items()} for _ in range(options.rounds)]
            for name, path in checkouts.items():
                print(_row(name, [each[name] for each in rounds]), flush=True)
                count = modules(arguments, path)
                listed = ", ".join(f"{package} {number}" for package, number in count.most_common(_SHOWN))
                print(f"    {count.total():,} modules: {listed}", flush=True)
            if options.beside:
                ratios = [each["here"].processor / each["beside"].processor for each in rounds]
                print(f"  here / beside: {median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})", flush=True)


if __name__ == "__main__":
    main()
