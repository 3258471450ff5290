"""`python -m benchmarks.real_chain_sum`: writes configs/real/chain-sum.jsonl and chain-sum-held-out.jsonl, sums and
differences of two or three numbers below 100, by `chain_sum` of reasoning-gym.

In: the package reasoning-gym, in the Python that runs this. Out: 640 and 200 rows, none of which has another's
expression. `--rows` and `--terms` make more, or longer ones.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from itertools import islice

from benchmarks.real_pairs import FOLDER


def rows(seed: int, terms: int) -> Iterator[dict[str, str]]:
    """Problems without end: the package's question and answer, and the expression that is asked for."""
    import reasoning_gym

    spec = {"min_terms": 2, "max_terms": terms, "min_digits": 1, "max_digits": 2}
    known = set()
    for entry in reasoning_gym.create_dataset("chain_sum", seed=seed, size=10**6, **spec):
        expression = entry["metadata"]["expression"]
        if expression not in known:
            known.add(expression)
            yield {"prompt": entry["question"], "answer": entry["answer"], "expression": expression}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=640, help="problems to learn from (default: %(default)s)")
    parser.add_argument("--terms", type=int, default=3, help="at most so many numbers (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    options = parser.parse_args()
    try:
        drawn = list(islice(rows(options.seed, options.terms), 200 + options.rows))
    except ImportError as error:
        sys.exit(f"error: {error}; pip install reasoning-gym")
    for name, part in (("chain-sum-held-out", drawn[:200]), ("chain-sum", drawn[200:])):
        text = "".join(json.dumps(row) + "\n" for row in part)
        (FOLDER / f"{name}.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
