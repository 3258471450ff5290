"""`python -m benchmarks.learning_reversed`: does a recipe learn where right answers are as long as the limit?

The task is to write five of eight letters backwards, `abcde>` to `edcba`: six tokens with the end token. It is run
twice from every seed: with a limit of 6 tokens, so that a penalty for long answers falls on the right ones, and with
one of 8, which leaves room. A recipe that gives length more weight than rightness, or that learns from groups in which
nothing is right, forgets the task in the first case; and a run that goes wrong has to say so. Shown are the greedy
accuracy on 300 held-out problems before and after, and which alarms rang.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import sys
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from benchmarks.learning_runs import Outcome, Runs
from rlinf.algos.recipes import NAMES

LETTERS, LENGTH, HELD_OUT = "abcdefgh", 5, 300
KEYS = (
    f"model.tokenizer=characters:{LETTERS}>", f"evaluation.problems={HELD_OUT}", "sft.steps=100",
    "algorithm.prompts_per_step=32", "rollout.max_rows=256",
)  # fmt: skip
"""Changes of configs/quickstart.yaml: the alphabet, a warm-up after which half of the greedy answers are right, and
batches of 32 x 8 answers."""


def write_data(directory: Path) -> list[str]:
    """Write the task's problems, those to train on and those held out; the keys that name the files."""
    words = ["".join(letters) for letters in itertools.product(LETTERS, repeat=LENGTH)]
    random.Random(0).shuffle(words)
    keys = []
    for key, part in (("evaluation.data", words[:HELD_OUT]), ("data.train", words[HELD_OUT:])):
        path = directory / f"{key}.jsonl"
        rows = (json.dumps({"prompt": f"{word}>", "answer": word[::-1]}) + "\n" for word in part)
        path.write_text("".join(rows), encoding="utf-8")
        keys.append(f"{key}={path}")
    return keys


def line(recipe: str, limit: int, outcomes: Sequence[Outcome], alarms: Sequence[str]) -> str:
    """A row of the table: accuracies of all seeds, and the alarms of any of them."""
    before, after = (
        ", ".join("failed" if each.failure else f"{100 * getattr(each, name):.1f}" for each in outcomes)
        for name in ("before", "after")
    )
    rang = "; ".join(dict.fromkeys(alarms)) or "none"
    return f"| `{recipe}` | {limit} | {before} | {after} | {rang} |"


def alarms_of(run: Path) -> list[str]:
    """Alarms that rang in a run, without its figures."""
    path = run / "alarms.jsonl"
    told = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [json.loads(each)["text"].partition(":")[0] for each in told]


def main() -> int:
    options = _options()
    kept = tempfile.TemporaryDirectory() if options.output is None else nullcontext(options.output)
    outcomes: list[Outcome] = []
    print(f"| recipe | limit, tokens | before, % ({', '.join(map(str, options.seeds))}) | after, % | alarms |")
    print("|---|---|---|---|---|")
    with kept as output:
        place = Path(output).absolute()
        place.mkdir(parents=True, exist_ok=True)
        data = write_data(place)
        for recipe, limit in itertools.product(options.recipes, options.limits):
            runs = place / f"limit-{limit}"
            keys = [*KEYS, *data, f"rollout.max_new_tokens={limit}", *options.keys]
            wanted = [(recipe, seed) for seed in options.seeds]
            found = asyncio.run(Runs(runs, options.steps, options.jobs, keys).all(wanted))
            rang = [each for seed in options.seeds for each in alarms_of(runs / f"{recipe}-{seed}")]
            print(line(recipe, limit, found, rang), flush=True)
            outcomes += found
    for outcome in outcomes:
        if outcome.failure:
            print(f"{outcome.recipe}, seed {outcome.seed}: {outcome.failure}", file=sys.stderr)
    return 1 if any(outcome.failure or outcome.after < outcome.before for outcome in outcomes) else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", type=lambda text: text.split(","), default=["dapo"], help="comma-separated")
    parser.add_argument("--limits", type=_numbers, default=[6, 8], help="tokens of an answer (default: 6,8)")
    parser.add_argument("--seeds", type=_numbers, default=[0, 1, 2], help="comma-separated (default: 0,1,2)")
    parser.add_argument("--steps", type=int, default=40, help="of each run (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, a core each (default: %(default)s)")
    parser.add_argument("--output", help="keeps the runs, and goes on with those kept (default: a temporary one)")
    parser.add_argument("keys", nargs="*", metavar="key=value", help="further keys for every run")
    found = parser.parse_args()
    if unknown := sorted({*found.recipes} - {*NAMES}):
        parser.error(f"no recipe {', '.join(unknown)}; there are {', '.join(NAMES)}")
    return found


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
