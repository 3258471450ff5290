"""Runs examples for a step or two, one after the other; `make drills` runs them whole, and sees that they learn.

python tests/examples/shortened.py examples/grpo.py examples/team.py
"""

import asyncio
import functools
import inspect
import runpy
import sys

import rlinf

SHORT = {"steps": 1, "answers": 200}
"""What the programs of examples take that decides how long they train."""
FEW, SMALL = 2, {"prompts_per_step": 4, "group_size": 8}
"""Steps of `rlinf.train`, and the most that a step has."""

TRAIN = rlinf.train


def main(path: str) -> None:
    """Run the example as it is, but for how long it trains."""
    sys.argv = [path]
    program = runpy.run_path(path).get("main")
    parameters = inspect.signature(program).parameters if program else {}
    given = {name: SHORT[name] for name in SHORT.keys() & parameters.keys()}
    if "system" in parameters:
        rlinf.run(functools.partial(program, **given), hosts=1)
    elif given:
        asyncio.run(program(**given))
    else:
        rlinf.train = _shortened(TRAIN)
        runpy.run_path(path, run_name="__main__")


def _shortened(train):
    @functools.wraps(train)
    def short(*arguments, **settings):
        few = {"steps": FEW}
        warm_up = {"sft": settings["sft"] | few} if "sft" in settings else {}
        small = {name: min(most, settings[name]) for name, most in SMALL.items() if name in settings}
        return train(*arguments, **settings | few | small | warm_up)

    return short


if __name__ == "__main__":
    for example in sys.argv[1:]:
        main(example)
