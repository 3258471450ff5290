"""Kill -9 of engines and scoring processes that have joined a run, at random moments: the run goes on, and nothing is
lost or repeated.

python -m tests.drills.test_joining 20 grpo_async           # beside the run's own engine
python -m tests.drills.test_joining 20 grpo_async alone     # where they alone generate
python -m tests.drills.test_joining 20 grpo_async far       # on another machine, a network namespace, with all it has
python -m tests.drills.test_joining 20 reward               # of those that score
"""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rlinf.cli.runs import account
from rlinf.joining.address import FILES
from rlinf.storage.files import read_lines
from tests.drills.run import PATIENCE, Drill
from tests.launching import ROOT, equal, metrics_of, start, steps_noted
from tests.nodes.network import Network, Torchrun
from tests.runtime.programs.jobs import Ranks, until

pytestmark = [pytest.mark.slow, pytest.mark.torchrun, pytest.mark.timeout(240)]


def join(path: Path, role: str = "rollout"):
    """One more engine for a run, replica of its trainer, or process that scores; it has joined."""
    joiner = start("join", str(path), "--role", role, program=ROOT / "rlinf" / "__main__.py")
    until(lambda: "joined" in joiner.printed(0) or joiner.ended(), f"one that joins as {role}", PATIENCE)
    return joiner


def had_joined(joiner: Ranks) -> list[int]:
    """The exit code of one that had joined; of one that came too late, none."""
    codes = joiner.codes(PATIENCE)
    return codes if "joined" in joiner.printed(0) else []


def counted(run, path: Path, metric: str) -> None:
    """Wait until a step has counted one that joined, or the run has ended."""
    metrics = path / "metrics.jsonl"
    until(lambda: run.ended() or any(row.get(metric) for row in read_lines(metrics)), metric, PATIENCE)


def _goes_on(run, path: Path) -> None:
    """Wait until a run has done a further step, or ended."""
    before = steps_noted(path)
    until(lambda: run.ended() or steps_noted(path) > before, lambda: run.everything(), PATIENCE)


FILE = FILES["rollout"]
JOINED = ("rollout.join=127.0.0.1:0", "rollout.engine=transformers")
ALONE = ("rollout.own_engine=false",)


def killed_again_and_again(
    points: int, flow: str, directory: Path, seed: int = 0, alone: bool = False
) -> tuple[int, list[float], str]:
    """Kill engines that join; returns how many were, seconds until each had joined, and what the run said.

    Args:
        points: so many.
        flow, directory: of the run.
        seed: of the moments.
        alone: the run has no engine of its own; the one that joins last is not killed.
    """
    rng, seconds, kills = random.Random(seed), [], 0
    more = (*JOINED, "rollout.max_rows=16", *(ALONE if alone else ()))
    drill = Drill(flow, steps=8 * points + 8, more=more)
    run = start(*drill.arguments(directory, engine=False), processes=2)
    path = directory / "quickstart"
    try:
        until(
            lambda: (path / FILE).exists() if alone else steps_noted(path) or run.ended(),
            "the first step",
            PATIENCE,
        )
        while kills < points and not run.ended():
            began = time.monotonic()
            joiner = join(path)
            seconds.append(time.monotonic() - began)
            if not kills:
                counted(run, path, "rollout/joined_count")
            time.sleep(rng.random())
            if run.ended():
                break
            joiner.kill_all(signal.SIGKILL)
            joiner.codes(PATIENCE)
            kills += steps_noted(path) < drill.steps - 2  # of those in its last steps the run need not say anything
        last = join(path) if alone and not run.ended() else None
        while not run.ended():
            _goes_on(run, path)
        codes = [*run.codes(PATIENCE), *([] if last is None else had_joined(last))]
        assert set(codes) == {0}, run.everything()
    finally:
        run.end()
    found = account(path)
    assert found.balances, found.problems
    assert found.whole.steps == drill.steps
    assert not found.whole.dropped
    assert [row["step"] for row in read_lines(path / "metrics.jsonl")] == list(range(drill.steps + 1))
    return kills, seconds, run.everything()


@pytest.mark.parametrize(("flow", "alone"), [("grpo_async", False), ("grpo", False), ("agentic_async", True)])
def test_engines_that_joined_are_killed_and_the_run_goes_on(flow, alone, tmp_path):
    kills, _, said = killed_again_and_again(2, flow, tmp_path, alone=alone)
    assert said.count("has joined") >= kills
    assert said.count("is gone: ") >= kills
    assert "Traceback" not in said
    counts = [row.get("rollout/joined_count", 0) for row in metrics_of(tmp_path / "quickstart")]
    assert kills == 0 or max(counts) == 1


def machines_killed(points: int, flow: str, directory: Path, seed: int = 0) -> tuple[int, list[float], str]:
    """Kill all processes of a machine whose engine has joined a run on another one; see `killed_again_and_again`."""
    rng, seconds, kills = random.Random(seed), [], 0
    path = directory / "quickstart"
    with Network() as net:
        home, spare = net.nodes
        here = (f"rollout.join={home.address}:29600", JOINED[1], "rollout.max_rows=16", "placement.trainer=0")
        arguments = Drill(flow, steps=1000 * points, more=here).arguments(directory, engine=False)
        run = Torchrun(home, [sys.executable, "-m", "rlinf", "train", *arguments], directory / "run.log", {})

        def comes(what: Callable[[], object], name: str) -> None:
            until(lambda: what() or not run.running(), lambda: f"{name}: {run.said}", PATIENCE)

        comes((path / FILE).exists, "the first step")
        while kills < points and run.running():
            before, began = run.said.count("has joined"), time.monotonic()
            joins = [sys.executable, "-m", "rlinf", "join", str(path), "--role", "rollout"]
            Torchrun(spare, joins, directory / f"joins{kills}.log", {})
            comes(lambda before=before: run.said.count("has joined") > before, "one that joins")
            seconds.append(time.monotonic() - began)
            time.sleep(2 * rng.random())
            spare.kill()
            kills += 1
            comes(lambda kills=kills: run.said.count("is gone: ") >= kills, "word of one that is gone")
            step = steps_noted(path)
            comes(lambda step=step: steps_noted(path) > step, "a step")
        assert run.running(), run.said
        for process in home.pids():
            os.kill(process, signal.SIGTERM)
        run.code(PATIENCE)
        said = run.said
    found = account(path)
    assert found.balances, found.problems
    assert not found.whole.dropped
    rows = [row["step"] for row in read_lines(path / "metrics.jsonl")]
    assert rows == list(range(len(rows)))
    return kills, seconds, said


def _alone(directory: Path, ends: Callable[[Ranks, Path], None]) -> Path:
    """A synchronous run, in which each answer is decoded by itself, of an engine that joins and another after it.

    Args:
        directory: for the run.
        ends: what becomes of the first one.
    """
    drill = Drill("grpo", steps=6, more=(*JOINED, *ALONE, "rollout.max_rows=1", "placement.trainer=0"))
    run, path = start(*drill.arguments(directory, engine=False)), directory / "quickstart"
    try:
        until(lambda: (path / FILE).exists() or run.ended(), lambda: run.everything(), PATIENCE)
        ends(join(path), path)
        second = None if run.ended() else join(path)
        assert run.codes(PATIENCE) == [0], run.everything()
        assert second is None or not any(had_joined(second))
    finally:
        run.end()
    return path


def test_a_synchronous_run_that_loses_every_engine_has_the_weights_of_one_that_lost_none(tmp_path):
    def stays(joiner: Ranks, path: Path) -> None:
        until(lambda: steps_noted(path) > 2, "some steps", PATIENCE)

    def dies(joiner: Ranks, path: Path) -> None:
        stays(joiner, path)
        joiner.kill(0)
        joiner.codes(PATIENCE)

    equal(_alone(tmp_path / "whole", stays), _alone(tmp_path / "lost", dies))


def scorers_killed(points: int, directory: Path, seed: int = 0) -> tuple[int, list[float], str]:
    """Kill processes that score for a run, beside one that stays and leaves; it is the same as one that nobody joined.

    Args:
        points: how many.
        directory: for both runs.
        seed: of the moments.

    Returns:
        How many were killed, seconds until each had joined, and what the run said.
    """
    rng, seconds, kills = random.Random(seed), [], 0
    slow = Drill(
        "grpo", steps=4 * points + 4, more=("reward.function=tests.drills.rewards.slow", "placement.trainer=0")
    )
    join_key, path = "reward.join=127.0.0.1:0", directory / "joined" / "quickstart"
    run = start(*slow.arguments(path.parent, engine=False), join_key)
    try:
        until(lambda: (path / FILES["reward"]).exists() or run.ended(), lambda: run.everything(), PATIENCE)
        stays = join(path, "reward")
        while kills < points and not run.ended():
            began = time.monotonic()
            joiner = join(path, "reward")
            seconds.append(time.monotonic() - began)
            time.sleep(rng.random() / 2)
            joiner.kill_all(signal.SIGKILL)
            joiner.codes(PATIENCE)
            kills += steps_noted(path) < slow.steps - 2  # of those in its last steps the run need not say anything
        counted(run, path, "reward/joined_answers")
        stays.kill_all(signal.SIGTERM)
        assert stays.codes(PATIENCE) == [0], stays.everything()
        assert run.codes(10 * PATIENCE) == [0], run.everything()
    finally:
        run.end()
    whole = start(*slow.arguments(directory / "whole", engine=False))
    try:
        assert whole.codes(10 * PATIENCE) == [0], whole.everything()
    finally:
        whole.end()
    equal(path, directory / "whole" / "quickstart")
    return kills, seconds, run.everything()


def test_a_run_whose_scoring_processes_are_killed_has_the_rewards_of_one_that_had_none(tmp_path):
    kills, _, said = scorers_killed(1, tmp_path)
    assert said.count("is gone: ") >= kills
    assert "Traceback" not in said
    rows = metrics_of(tmp_path / "joined" / "quickstart")
    assert max(row["reward/joined_count"] for row in rows) >= 1
    assert sum(row["reward/joined_answers"] for row in rows) > 0


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        if "reward" in sys.argv:
            done, waited, said = scorers_killed(int(sys.argv[1]), Path(directory))
        elif "far" in sys.argv:
            done, waited, said = machines_killed(int(sys.argv[1]), sys.argv[2], Path(directory))
        else:
            done, waited, said = killed_again_and_again(
                int(sys.argv[1]), sys.argv[2], Path(directory), alone="alone" in sys.argv
            )
    lines = [line.split(" answers that it had")[0] for line in said.splitlines() if " answers that it had" in line]
    had, joining = [int(line.rsplit(" ", 1)[1]) for line in lines], sorted(round(one, 2) for one in waited)
    print(f"{done} killed, which had {had} answers under way; seconds to join: {joining}")
