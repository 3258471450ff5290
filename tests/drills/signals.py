"""Signal drills: runs get signals at random moments; exit codes and last lines are those of docs/checkpoints.md.

    python -m tests.drills.signals --points 200 --seed 0 [--large] [--ranks 2]       (make drills)

Each point is a run of its own. A run that was told to end exits with 75 and says so, whether it saved or its grace ran
out; one that was interrupted exits with its shell's code. Never is there a traceback, an abort, or a process left;
there is a report as soon as anything was measured, and the checkpoint that is named is whole.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rlinf.storage.directory import find_checkpoint
from rlinf.storage.files import read_lines
from tests.drills.run import birth_of
from tests.launching import QUICKSTART, TINY, Ranks, start, steps_noted
from tests.runtime.programs.jobs import descendants, until

PHASES = ("start", "generation", "learning", "writing", "named", "evaluation", "end")
"""While it starts; before the first step is over; some time in a step; while a checkpoint is written, and just after it
got its name; about an evaluation; in and after the last step."""
ENDING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""Which ask for an end: code 75."""
SIGNALS = (*ENDING, signal.SIGINT, signal.SIGQUIT)
"""The others end at once: 128 and the number."""
GRACES = (0.3, 3.0, 30.0)
"""Seconds of `checkpoint.grace`: too short for anything, for some things, and long enough."""
STEPS = 8
"""Of a run."""
RESUME_ME = 75
LARGE = (
    "model.config.hidden_size=768", "model.config.num_hidden_layers=8", "model.config.num_attention_heads=12",
    "model.config.intermediate_size=3072", "algorithm.prompts_per_step=1", "algorithm.group_size=2",
    "rollout.max_new_tokens=2", "evaluation.problems=2", "sft.steps=0",
)  # fmt: skip
"""75 M parameters, with whose steps torch is busy for seconds."""
PATIENCE = 180.0
"""Seconds for a run: the machine may be busy."""


@dataclass(slots=True)
class Point:
    """One run and its signal."""

    phase: str
    """When it came."""
    number: signal.Signals
    """Which."""
    grace: float
    """The run's."""
    codes: list[int] = field(default_factory=list)
    """Exit codes of its ranks."""
    seconds: float = 0.0
    """From the signal to the last rank's end."""
    wrong: list[str] = field(default_factory=list)
    """What was not as it should be."""


def tried(point: Point, output: Path, rng: random.Random, *, large: bool = False, ranks: int = 0) -> bool:
    """Start a run, and send it the signal; False if it ended before.

    Args:
        point: which signal, when; gets what came of it.
        output: an empty directory.
        rng: of moments.
        large: a model that computes for long.
        ranks: how many processes; 0 for one without torchrun's environment.
    """
    run = output / "quickstart"
    here = start(
        "--config", QUICKSTART, *TINY, *(LARGE if large else ()), f"steps={STEPS}", "metrics.live=never",
        f"checkpoint.grace={point.grace}", f"output_dir={output}", *(["placement.trainer=1"] if ranks else []),
        processes=ranks,
    )  # fmt: skip
    try:
        if not _until(point.phase, here, run, rng):
            return False
        born = [(pid, birth) for each in here.pids for pid in (each, *descendants(each)) if (birth := birth_of(pid))]
        told, began = rng.randrange(len(here.pids)), time.monotonic()
        here.kill(told, point.number)
        point.codes = here.codes(PATIENCE)
        point.seconds = time.monotonic() - began
        point.wrong = _wrong(point, here, run, told)
        try:
            until(lambda: not [pid for pid, birth in born if birth_of(pid) == birth], "", 15)
        except AssertionError:
            point.wrong.append("a process is left")
    except AssertionError as error:
        point.wrong.append(str(error)[:2000])
    finally:
        here.end()
    return True


def _until(phase: str, here: Ranks, run: Path, rng: random.Random) -> bool:
    """Wait for the moment; False if the run has ended before."""
    begun = rng.randint(1, STEPS - 2)
    evaluated = rng.randint(1, 3)
    came: dict[str, Callable[[], bool]] = {
        "start": lambda: "results go to" in here.printed(0),
        "generation": lambda: steps_noted(run) >= 1,  # the evaluation before the first step is noted as step 0
        "learning": lambda: steps_noted(run) > begun,
        "writing": lambda: any((run / "checkpoints").glob(".step_*.partial")),
        "named": lambda: any((run / "checkpoints").glob("step_*")),
        "evaluation": lambda: _evaluations(run) >= evaluated,
        "end": lambda: steps_noted(run) > STEPS - 1,
    }
    until(lambda: here.ended() or came[phase](), lambda: f"{phase}\n{here.everything()}", PATIENCE)
    later = {"writing": 0.01, "named": 0.01, "end": 0.4}.get(phase, 0.6)
    end = time.monotonic() + rng.uniform(0.0, later)
    while time.monotonic() < end and not here.ended():
        time.sleep(0.001)
    return not here.ended()


def _evaluations(run: Path) -> int:
    return sum("evaluation/accuracy" in line for line in read_lines(run / "metrics.jsonl"))


def _wrong(point: Point, here: Ranks, run: Path, told: int) -> list[str]:
    """What is not as docs/checkpoints.md says."""
    said, wrong = here.everything(), []
    code = point.codes[0]
    done = "done in" in here.printed(0)
    expected = {RESUME_ME} if point.number in ENDING else {128 + point.number}
    joining = len(here.pids) > 1 and steps_noted(run) == 0
    if joining:  # nobody but torchrun, which is not there, ends those that wait for one who was told to leave
        expected |= {-point.number, 1}
    if code not in (expected | {0} if done else expected):
        wrong.append(f"exit codes {point.codes}: {said[-1500:]}")
    for each in ("Traceback", "terminate called", "Fatal Python error"):
        if each in said:
            wrong.append(f"{each}: {said[-3000:]}")
    name = point.number.name
    words = (f"told to end by {name}", f"stopped by {name}", "interrupted", f"host {told} stops: {name}")
    if code != 0 and not joining and not any(each in said for each in words):
        wrong.append(f"nothing is said of the signal: {said[-1500:]}")
    if steps_noted(run) and not (run / "report.html").exists():
        wrong.append(f"no report: {said[-500:]}")
    if named := re.search(r"the newest checkpoint is \S*/(step_\d+)", said):
        found = find_checkpoint(run)
        if found is None or found.path.name != named[1] or found.passed_over:
            wrong.append(f"{named[1]} was named, and {found} is there")
    return wrong


def drilled(
    points: int, seed: int, directory: Path, say: Callable[[str], None] = print, *, large: bool = False, ranks: int = 0
) -> list[Point]:
    """Send so many signals to as many runs: phases in turn, signals and graces at random."""
    rng, found, number = random.Random(seed), list[Point](), 0
    while len(found) < points:
        phase = PHASES[len(found) % len(PHASES)]
        chosen = rng.choices(SIGNALS, (3, 2, 2, 2, 1))[0]
        point = Point(phase, chosen, rng.choice(GRACES))
        number += 1
        output = directory / str(number)
        output.mkdir()
        if not tried(point, output, rng, large=large, ranks=ranks):
            continue
        found.append(point)
        what = f"{phase:10}  {chosen.name:7}  grace {point.grace:4}"
        say(f"{len(found):4d}  {what}  {point.codes}  {point.seconds:5.1f} s")
        for each in point.wrong:
            say(f"      wrong: {each}")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run drills; 0 if all went well."""
    parser = argparse.ArgumentParser(prog="python -m tests.drills.signals", description=__doc__.partition("\n")[0])
    parser.add_argument("--points", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--large", action="store_true", help="a model of 75 M parameters")
    parser.add_argument("--ranks", type=int, default=0)
    parser.add_argument("--keep", help="a directory for the runs, which stay there")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="rlinf-drills-") as place:
        kept = Path(options.keep or place)
        kept.mkdir(parents=True, exist_ok=True)
        say = lambda line: print(line, flush=True)  # noqa: E731
        found = drilled(options.points, options.seed, kept, say, large=options.large, ranks=options.ranks)
    well = [point for point in found if not point.wrong]
    by = Counter(f"{point.phase} {point.number.name}" for point in found if point.wrong)
    print(json.dumps({"points": len(found), "as documented": len(well), "wrong": by}, indent=1))
    return 0 if len(well) == len(found) else 1


if __name__ == "__main__":
    sys.exit(main())
