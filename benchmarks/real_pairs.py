"""`python -m benchmarks.real_pairs`: writes configs/real/pairs.jsonl and pairs-held-out.jsonl, sums that are asked for
in a chat, with a right and a wrong answer each, for configs/real/sft.yaml and dpo.yaml.

In: the sums of configs/real; those held out there are held out here. Out: 320 and 80 rows, wrong by one or by ten.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

from benchmarks.contestants import ROOT

FOLDER = ROOT / "configs" / "real"
FORMS = ("What is {0} plus {1}?", "How much is {0} and {1}?", "{0} + {1} = ?", "Add {0} and {1}.")


def row(problem: str, draw: random.Random) -> dict[str, str]:
    """A question, and two answers to it.

    Args:
        problem: such as `26 + 28 =`.
        draw: of the wording, and of what is wrong.
    """
    first, _, second, _ = problem.split()
    right = int(first) + int(second)
    wrong = max(0, right + draw.choice((-10, -1, 1, 10)))
    question = draw.choice(FORMS).format(first, second)
    chosen, rejected = (f"{first} + {second} = {number}." for number in (right, wrong))
    return {"prompt": question, "chosen": chosen, "rejected": rejected}


def write(source: Path, into: Path, count: int, seed: int) -> None:
    """The first problems of a file as pairs."""
    draw = random.Random(seed)
    problems = [json.loads(line)["prompt"] for line in source.read_text(encoding="utf-8").splitlines()[:count]]
    into.write_text("".join(json.dumps(row(each, draw)) + "\n" for each in problems), encoding="utf-8")


if __name__ == "__main__":
    write(FOLDER / "sums.jsonl", FOLDER / "pairs.jsonl", 320, seed=0)
    write(FOLDER / "sums-held-out.jsonl", FOLDER / "pairs-held-out.jsonl", 80, seed=1)
