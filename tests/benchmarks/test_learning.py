"""`python -m benchmarks.learning` starts runs as a user would, and tells of each whether it learned."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.contestants import ROOT
from benchmarks.learning_recipes import CHANGES
from benchmarks.learning_runs import Outcome, Runs, arguments, run_process
from rlinf.algos.recipes import NAMES, RECIPES
from rlinf.runs.prepare import algorithm_of
from rlinf.runs.rules import load_config
from tests.launching import TINY


@pytest.mark.parametrize("recipe", NAMES)
def test_every_recipe_is_configured_as_published_but_for_what_the_task_decides(recipe: str, tmp_path: Path) -> None:
    _, path, *settings = arguments(recipe, 0, 100, tmp_path, teacher=tmp_path)
    chosen = algorithm_of(load_config(ROOT / path, settings))
    published = RECIPES[recipe]
    assert (chosen.loss, chosen.advantage, chosen.kl) == (published.loss, published.advantage, published.kl)
    assert set(CHANGES) <= set(NAMES)


async def test_a_real_run_is_read_and_one_that_cannot_start_is_told(tmp_path: Path) -> None:
    said: list[Outcome] = []
    runs = Runs(tmp_path, 2, 2, [key for key in TINY if not key.startswith("steps=")], said.append)
    (outcome,) = await runs.all([("grpo", 3)])
    assert outcome.failure == ""
    assert 0 <= outcome.before <= 1
    assert len(outcome.rewards) == 2
    assert 0 < outcome.processor_minutes < outcome.minutes + 1
    assert said == [outcome]
    (broken,) = await Runs(tmp_path, 2, 2, ["stepps=3"]).all([("grpo", 4)])
    assert "steps" in broken.failure


async def test_a_command_is_told_by_its_exit_code_and_one_that_hangs_is_killed(tmp_path: Path) -> None:
    ended = await run_process(["sh", "-c", "echo so; exit 3"], tmp_path / "log")
    assert (ended.code, ended.output) == (3, "so\n")
    hung = await run_process(["sleep", "3600"], tmp_path / "log", patience=0.01)
    assert hung.code == -signal.SIGKILL
    assert "not done" in hung.output


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_run_ends_with_the_benchmark_that_started_it_even_in_a_session_of_its_own(
    number: signal.Signals, tmp_path: Path
) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    command = ["sh", "-c", f"setsid sh -c 'echo up; exec sleep 3600' >{fifo} & wait"]  # as torchrun starts workers
    program = (
        "import asyncio, pathlib, sys; from benchmarks.learning_runs import run_process; "
        f"asyncio.run(run_process({command}, pathlib.Path(sys.argv[1])))"
    )
    benchmark = subprocess.Popen([sys.executable, "-c", program, str(tmp_path / "log")], cwd=ROOT)
    try:
        with fifo.open() as alive:  # open as long as the run has it
            assert alive.readline() == "up\n"
            benchmark.send_signal(number)
            assert alive.read() == ""
    finally:
        benchmark.kill()
        assert benchmark.wait() == -number
