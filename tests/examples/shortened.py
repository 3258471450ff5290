"""Runs an example for a step or two; `make drills` runs it whole, and sees that it learns.

python tests/examples/shortened.py examples/grpo.py
"""

import asyncio
import functools
import inspect
import runpy
import sys

import rlinf

SHORT = {"steps": 2, "answers": 200}
"""What the programs of examples take that decides how long they train."""


def main(path: str) -> None:
    """Run the example as it is, but for how long it trains."""
    sys.argv = [path]
    program = runpy.run_path(path).get("main")
    given = SHORT.keys() & inspect.signature(program).parameters.keys() if program else ()
    if given:
        asyncio.run(program(**{name: SHORT[name] for name in given}))
    else:
        rlinf.train = _shortened(rlinf.train)
        runpy.run_path(path, run_name="__main__")


def _shortened(train):
    @functools.wraps(train)
    def short(*arguments, **settings):
        few = {"steps": SHORT["steps"]}
        warm_up = {"sft": settings["sft"] | few} if "sft" in settings else {}
        return train(*arguments, **settings | few | warm_up)

    return short


if __name__ == "__main__":
    main(sys.argv[1])
