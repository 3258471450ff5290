"""A run that is told to end by SIGTERM or SIGUSR1 saves first, exits with 75, and goes on as if nothing had been."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launching import QUICKSTART, ROOT, TINY, environment, equal, launch, metrics_of, start, steps_noted
from tests.runs.programs.held import GO_ON, HELD
from tests.runtime.programs.jobs import free_port, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
STEPS = 30
RUN = (
    "--config", QUICKSTART, *TINY, f"steps={STEPS}", "algorithm.epochs=2", "evaluation.every=0", "checkpoint.every=0",
    "flow=tests.runs.programs.held.held",
)  # fmt: skip
GRACE = 10
"""Seconds; saving takes a small part of them, even where others keep the machine busy."""


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> Path:
    """A run from start to end in one go."""
    output = tmp_path_factory.mktemp("uninterrupted")
    launch(*RUN, f"output_dir={output}")
    return output / "quickstart"


def checkpoints(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").glob("step_*"))


def told_after(steps: int, output: Path, number: int, *more: str, processes: int = 0, rank: int = 0) -> str:
    """A run that got a signal in the step after so many; what it said."""
    held = {"HELD_AT": str(steps), "HELD_IN": str(output)}
    ranks = start(*RUN, f"output_dir={output}", *more, processes=processes, **held)
    try:
        until(lambda: ranks.ended() or (output / HELD).exists(), "the moment to tell it", 100)
        assert not ranks.ended(), ranks.everything()
        ranks.kill(rank, number)
        (output / GO_ON).touch()
        codes = ranks.codes()
    finally:
        ranks.end()
    assert codes == [75, *[0] * (len(codes) - 1)], ranks.everything()
    return ranks.printed(0)


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGUSR1, marks=pytest.mark.repeated)])
def test_it_ends_after_the_step_under_way_and_goes_on_bit_for_bit(uninterrupted, tmp_path, number):
    run = tmp_path / "quickstart"
    said = told_after(3, tmp_path, number)
    (done,) = re.findall(rf"told to end by {number.name}: stopped after step (\d+); ", said)
    assert f"/step_{int(done):06d}; to go on: rlinf train --config {run}/resolved.yaml --resume auto" in said
    assert checkpoints(run) == [f"step_{int(done):06d}"]
    assert [line["step"] for line in metrics_of(run)] == list(range(1, int(done) + 1)), "complete"
    launch(*RUN, f"output_dir={tmp_path}", "--resume", "auto")
    equal(uninterrupted, run)


@pytest.mark.torchrun
def test_a_signal_to_another_rank_ends_the_whole_job_in_order(uninterrupted, tmp_path):
    assert "told to end by SIGTERM" in told_after(
        3, tmp_path, signal.SIGTERM, "placement.trainer=1", "placement.rollout=0", processes=2, rank=1
    )
    launch(
        *RUN, f"output_dir={tmp_path}", "--resume", "auto", "placement.trainer=1", "placement.rollout=0", processes=2
    )
    equal(uninterrupted, tmp_path / "quickstart")


def test_a_step_that_does_not_end_in_time_is_given_up_and_taken_again(uninterrupted, tmp_path):
    run, here = tmp_path / "quickstart", (*RUN, f"output_dir={tmp_path}")
    ranks = start(*here, f"checkpoint.grace={GRACE}", HELD_AT="3", HELD_IN=str(tmp_path))
    try:
        until(lambda: ranks.ended() or (tmp_path / HELD).exists(), "the step that does not end", 100)
        ranks.kill(0, signal.SIGTERM)
        assert ranks.code(0) == 75, ranks.everything()  # and not after the step's thousand seconds
    finally:
        ranks.end()
    assert "after step 3; step 4 " in ranks.printed(0)
    assert checkpoints(run) == ["step_000003"]
    launch(*here, "--resume", "auto")
    equal(uninterrupted, run)


def test_a_second_signal_ends_it_at_once(tmp_path):
    ranks = start(*RUN, f"output_dir={tmp_path}", HELD_AT="1", HELD_IN=str(tmp_path))
    try:
        until(lambda: ranks.ended() or (tmp_path / HELD).exists(), "the step that does not end", 100)
        until(
            lambda: ranks.kill_all(signal.SIGTERM) or ranks.ended(), "the signal that comes late enough after the first"
        )
        assert ranks.code(0) == -signal.SIGTERM
    finally:
        ranks.end()


def test_without_grace_it_ends_at_once_as_any_program(tmp_path):
    ranks = start(*RUN, f"output_dir={tmp_path}", "checkpoint.grace=0", HELD_AT="1", HELD_IN=str(tmp_path))
    try:
        until(lambda: ranks.ended() or (tmp_path / HELD).exists(), "the step that does not end", 100)
        ranks.kill(0, signal.SIGTERM)
        assert ranks.code(0) == 128 + signal.SIGTERM
    finally:
        ranks.end()
    assert checkpoints(tmp_path / "quickstart") == []


# Under torchrun itself -----------------------------------------------------------------------------------------------


def torchrun(*arguments: str, more: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    """A run on two ranks as a user starts it."""
    how = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port()), *more)
    return subprocess.Popen(
        [sys.executable, *how, str(ROOT / "launch.py"), *arguments],
        cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


@pytest.mark.torchrun
def test_torchrun_restarts_what_was_killed_and_passes_a_signal_on_and_waits(uninterrupted, tmp_path):
    """What it restarts goes on by itself; a signal that it is told to pass on ends the job in order."""
    run, lock = tmp_path / "quickstart", tmp_path / ".quickstart.lock"
    here = (*RUN, f"output_dir={tmp_path}", "placement.trainer=1", "placement.rollout=0", "checkpoint.every=2")
    passes_on = ("--signals-to-handle", "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1")
    job = torchrun(*here, more=("--max-restarts", "1", *passes_on))
    try:
        until(lambda: job.poll() is not None or steps_noted(run) >= 5, "five steps", 150)
        killed = json.loads(lock.read_text())["pid"]
        os.kill(killed, signal.SIGKILL)
        until(lambda: job.poll() is not None or goes_on(run, lock, killed), "steps of the restarted job", 150)
        job.send_signal(signal.SIGUSR1)
        said, _ = job.communicate(timeout=150)
    finally:
        job.kill()
    assert "taken over from pid " in said
    assert "told to end by SIGUSR1: stopped after step " in said
    assert job.returncode != 0, "of torchrun's own making"
    launch(*here, "--resume", "auto", processes=2)
    equal(uninterrupted, run)


def goes_on(run: Path, lock: Path, killed: int) -> bool:
    """Another process has the run, and has done steps of its own."""
    try:
        return json.loads(lock.read_text())["pid"] != killed and steps_noted(run) >= 8
    except (FileNotFoundError, ValueError):
        return False


# Other ends ----------------------------------------------------------------------------------------------------------


def test_a_disk_that_fills_while_metrics_are_written_is_one_line(tmp_path):
    done = launch(*RUN, f"output_dir={tmp_path}", expect=1, FULL_AT="2")
    told = [line for line in done.stderr.splitlines() if "error" in line.lower()]
    assert len(told) == 1, done.stderr
    assert re.fullmatch(r"error: .*step 3 .*: No space.*--resume auto", told[0])
    assert "Traceback" not in done.stderr
