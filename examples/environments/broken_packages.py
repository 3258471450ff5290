"""Small Python packages with a planted fault each, as Harbor's task directories: something to mend for coding agents.

    python -m examples.environments.broken_packages outputs/broken --count 30 --seed 0

Ten kinds of faults, from `<` for `<=` to a default that remembers. A package has three modules, one of which is broken,
and a test that fails; the tests that decide come in when the agent is done, and know more cases. What they expect was
computed by the module as it was before the fault.
"""

import argparse
import random
from dataclasses import dataclass
from pathlib import Path

NOUNS = ("orders", "tides", "letters", "trails", "looms", "ferries", "orchards", "ledgers", "signals", "kilns")


@dataclass(frozen=True)
class Kind:
    """A function, the fault that is planted in it, and arguments that it is called with."""

    source: str
    right: str
    wrong: str
    arguments: object
    """From dice to the arguments of a call."""

    @property
    def name(self):
        """Name of the function and of its module."""
        return self.source.split("(")[0].removeprefix("def ")


def numbers(dice, least=1, most=9):
    """Some small numbers."""
    return [dice.randrange(10) for _ in range(dice.randint(least, most))]


def words(dice):
    """Some words, of which a few are the same."""
    return [dice.choice(("ash", "elm", "fir", "oak", "yew")) for _ in range(dice.randint(1, 8))]


KINDS = {
    "off by one": Kind(
        "def windows(items, size):\n"
        '    """All runs of `size` neighbours."""\n'
        "    return [items[at : at + size] for at in range(len(items) - size + 1)]\n",
        "- size + 1",
        "- size",
        lambda dice: (numbers(dice, 3), dice.randint(1, 3)),
    ),
    "comparison": Kind(
        "def at_least(values, limit):\n"
        '    """How many values reach the limit."""\n'
        "    return sum(value >= limit for value in values)\n",
        ">=",
        ">",
        lambda dice: (numbers(dice, 4), dice.randrange(3, 7)),
    ),
    "wrong variable": Kind(
        "def clamped(value, low, high):\n"
        '    """The value, or the bound that it exceeds."""\n'
        "    if value > high:\n"
        "        return high\n"
        "    return max(value, low)\n",
        "return high",
        "return low",
        lambda dice: (dice.randrange(20), dice.randrange(5), dice.randrange(6, 12)),
    ),
    "lost return": Kind(
        "def middle(values):\n"
        '    """The median."""\n'
        "    ordered, half = sorted(values), len(values) // 2\n"
        "    if len(values) % 2:\n"
        "        return ordered[half]\n"
        "    return (ordered[half - 1] + ordered[half]) / 2\n",
        "        return ordered[half]\n",
        "        ordered[half]\n",
        lambda dice: (numbers(dice),),
    ),
    "default that remembers": Kind(
        "def tally(words, counts=None):\n"
        '    """How often each word stands there, added to earlier counts where there are some."""\n'
        "    counts = {} if counts is None else counts\n"
        "    for word in words:\n"
        "        counts[word] = counts.get(word, 0) + 1\n"
        "    return counts\n",
        "counts=None):",
        "counts={}):",
        lambda dice: (words(dice),),
    ),
    "whole division": Kind(
        "def average(values):\n"
        '    """The mean; 0 of nothing."""\n'
        "    return sum(values) / len(values) if values else 0\n",
        " / ",
        " // ",
        lambda dice: (numbers(dice, 2),),
    ),
    "swapped arguments": Kind(
        "def percent(part, whole):\n"
        '    """A part in percent of the whole."""\n'
        "    return _divided(part, whole) * 100\n\n\n"
        "def _divided(a, b):\n"
        "    return a / b\n",
        "_divided(part, whole) *",
        "_divided(whole, part) *",
        lambda dice: (dice.randint(1, 9), dice.choice((10, 20, 40))),
    ),
    "lost recursion": Kind(
        "def flat(items):\n"
        '    """All items of nested lists, in order."""\n'
        "    result = []\n"
        "    for item in items:\n"
        "        result += flat(item) if isinstance(item, list) else [item]\n"
        "    return result\n",
        "flat(item) if",
        "item if",
        lambda dice: ([dice.randrange(9), [dice.randrange(9), numbers(dice)], numbers(dice)],),
    ),
    "order of ties": Kind(
        "def ranking(scores):\n"
        '    """Names by falling score, and by the alphabet where scores are equal."""\n'
        "    return sorted(scores, key=lambda name: (-scores[name], name))\n",
        "(-scores[name], name)",
        "-scores[name]",
        lambda dice: ({name: dice.randrange(3) for name in dice.sample("abcdefgh", 6)},),
    ),
    "shared state": Kind(
        "def history(start, changes):\n"
        '    """The state after each change."""\n'
        "    state, states = dict(start), []\n"
        "    for key, value in changes:\n"
        "        state[key] = value\n"
        "        states.append(dict(state))\n"
        "    return states\n",
        "states.append(dict(state))",
        "states.append(state)",
        lambda dice: ({"x": 0}, [(key, dice.randrange(9)) for key in dice.sample("xyzw", 3)]),
    ),
}
"""Faults by what they are called."""
CASES = 6
"""Calls that the deciding test makes."""


def cases_of(kind, dice):
    """Calls with their right results, of which the fault changes at least the first one."""
    right, wrong = _function(kind, kind.source), _function(kind, kind.source.replace(kind.right, kind.wrong))
    wrong(*kind.arguments(random.Random(1)))  # a fault may show from the second call on
    while True:
        calls = [kind.arguments(dice) for _ in range(CASES)]
        cases = [(f"{kind.name}({', '.join(map(repr, call))})", right(*call)) for call in calls]
        if wrong(*calls[0]) != cases[0][1]:
            return cases


def _function(kind, source):
    scope = {}
    exec(source, scope)
    return scope[kind.name]


def _tests(package, kind, cases):
    """Each case twice: what is called a second time, after all others, may have been changed by them."""
    methods = [
        f"    def test_{at}(self):\n        self.assertEqual({call}, {value!r})\n"
        for at, (call, value) in enumerate(cases * 2)
    ]
    head = f"import unittest\n\nfrom {package}.{kind.name} import {kind.name}\n\n\nclass Test(unittest.TestCase):\n"
    return head + "\n".join(methods)


def files_of(number, seed=0):
    """A task directory: relative paths to texts, and the name of the fault."""
    dice = random.Random(f"{seed}/{number}")
    fault = list(KINDS)[number % len(KINDS)]
    kind, package = KINDS[fault], dice.choice(NOUNS)
    neighbours = dice.sample([each for each in KINDS.values() if each is not kind], 2)
    cases = cases_of(kind, dice)
    app = f"environment/app/{package}"
    return fault, {
        "instruction.md": (
            f"The package `{package}` in /app has a fault: `python3 -m unittest` fails there.\n"
            f"Find it in `{package}/`, and mend it. Leave the tests as they are.\n"
        ),
        "task.toml": (
            f'version = "1.0"\n\n[metadata]\nfault = "{fault}"\n\n'
            "[agent]\ntimeout_sec = 300.0\n\n[verifier]\ntimeout_sec = 60.0\n"
        ),
        "environment/Dockerfile": "FROM python:3.11-slim\nWORKDIR /app\nCOPY app/ /app/\n",
        f"{app}/__init__.py": "",
        **{f"{app}/{each.name}.py": each.source for each in neighbours},
        f"{app}/{kind.name}.py": kind.source.replace(kind.right, kind.wrong),
        f"environment/app/test_{kind.name}.py": _tests(package, kind, cases[:2]),
        "tests/test_hidden.py": _tests(package, kind, cases),
        "tests/test.sh": (
            "#!/bin/bash\ncd /app\n"
            "if PYTHONPATH=/app python3 -m unittest discover -s /tests -p test_hidden.py; then\n"
            "    echo 1 > /logs/verifier/reward.txt\nelse\n    echo 0 > /logs/verifier/reward.txt\nfi\n"
        ),
        "solution/solve.sh": f"#!/bin/bash\ncat > /app/{package}/{kind.name}.py <<'EOF'\n{kind.source}EOF\n",
    }


def write(folder, count=30, seed=0):
    """Write task directories, and return their paths."""
    paths = []
    for number in range(count):
        fault, files = files_of(number, seed)
        paths.append(Path(folder) / f"{number:02d}-{fault.replace(' ', '-')}")
        for name, text in files.items():
            path = paths[-1] / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    return paths


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder")
    parser.add_argument("--count", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    print(f"{len(write(given.folder, given.count, given.seed))} tasks in {given.folder}")
