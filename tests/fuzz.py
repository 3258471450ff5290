"""The property tests on random examples that nobody has tried, round after round, until the time is up: `make fuzz`.

    FUZZ_SECONDS=300 python -m tests.fuzz [arguments of pytest]

The suite itself draws the same examples in every clone. What is found here becomes an `@example` of its test, and is
mended. The rest of this file is the plugin of pytest that a round runs with.
"""

import os
import random
import shlex
import subprocess
import sys
import time

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In any order, so that what comes last has its share of a short time, too."""
    random.Random(config.getoption("--hypothesis-seed")).shuffle(items)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if time.time() > float(os.environ["FUZZ_UNTIL"]):
        pytest.skip("the time is up")


def main(arguments: list[str]) -> int:
    """Run rounds until the time is up or one has failed; returns its exit code."""
    seconds = float(os.environ.get("FUZZ_SECONDS", "300"))
    until, rounds = time.time() + seconds, 0
    while time.time() < until:
        rounds += 1
        seed = random.SystemRandom().randrange(2**32)
        chosen = ["-m", "hypothesis", "--hypothesis-profile=fuzz", f"--hypothesis-seed={seed}", *arguments]
        command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.fuzz", *chosen]
        print(f"fuzz: round {rounds}, {until - time.time():.0f} s left", flush=True)
        if code := subprocess.call(command, env=os.environ | {"FUZZ_UNTIL": str(until)}):
            print(f"fuzz: to see it again: python -m pytest {shlex.join(chosen)}")
            print("fuzz: make what was found an @example of its test, then mend it")
            return code
    print(f"fuzz: {rounds} rounds in {seconds:.0f} s found nothing")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
