"""Runs examples for a step or two, one after the other; `make drills` runs them whole, and sees that they learn.

python tests/examples/shortened.py examples/grpo.py examples/team.py
"""

import asyncio
import functools
import inspect
import runpy
import sys

import rlinf

SHORT = {"steps": 2, "answers": 200}
"""What the programs of examples take that decides how long they train."""


TRAIN = rlinf.train


def main(path: str) -> None:
    """Run the example as it is, but for how long it trains."""
    sys.argv = [path]
    program = runpy.run_path(path).get("main")
    given = SHORT.keys() & inspect.signature(program).parameters.keys() if program else ()
    if given:
        asyncio.run(program(**{name: SHORT[name] for name in given}))
    else:
        rlinf.train = _shortened(TRAIN)
        runpy.run_path(path, run_name="__main__")


def _shortened(train):
    @functools.wraps(train)
    def short(*arguments, **settings):
        few = {"steps": SHORT["steps"]}
        warm_up = {"sft": settings["sft"] | few} if "sft" in settings else {}
        return train(*arguments, **settings | few | warm_up)

    return short


if __name__ == "__main__":
    for example in sys.argv[1:]:
        main(example)
