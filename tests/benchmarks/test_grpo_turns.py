"""Contestants of `benchmarks.grpo` take steps in turn, one at a time."""

import sys
from pathlib import Path

from benchmarks.contestants import ROOT, TurnFailed
from benchmarks.grpo_turns import Command, in_turn

STEPPER = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from benchmarks.peers.grpo_job import Result, Stopwatch

log, name, steps = Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
watch = Stopwatch(Result("1"))
for step in range(steps):
    watch.next_step()
    with log.open("a") as file:
        file.write(f"{name}<")
        file.flush()
        sum(range(100_000))
        file.write(f"{name}>")
    if step == 1 and len(sys.argv) > 5:
        sys.exit(sys.argv[5])
print("done", name)
with log.open("a") as file:
    file.write(f"{name}.")
"""


def stepper(log: Path, name: str, steps: int, *failure: str) -> Command:
    return Command([sys.executable, "-c", STEPPER, str(ROOT), str(log), name, str(steps), *failure], {})


def test_one_step_each_in_turn_until_all_have_ended(tmp_path: Path) -> None:
    log = tmp_path / "log"
    outcomes = in_turn([stepper(log, "a", 3), stepper(log, "b", 2), stepper(log, "c", 3)])
    assert [str(outcome).strip() for outcome in outcomes] == ["done a", "done b", "done c"]
    assert log.read_text() == "a<a>b<b>c<c>a<a>b<b>b.c<c>a<a>a.c<c>c."


def test_one_that_fails_says_why_and_the_others_go_on(tmp_path: Path) -> None:
    log = tmp_path / "log"
    fails = Command([sys.executable, "-c", "import sys; sys.exit('at the start')"], {})
    failed, late, well = in_turn([fails, stepper(log, "a", 3, "in the second step"), stepper(log, "b", 3)])
    assert isinstance(failed, TurnFailed)
    assert "at the start" in str(failed)
    assert isinstance(late, TurnFailed)
    assert "in the second step" in str(late)
    assert str(well).strip() == "done b"
    assert log.read_text() == "a<a>b<b>a<a>b<b>b<b>b."
