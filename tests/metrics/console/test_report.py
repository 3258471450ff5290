"""What a person reads of a run: lasting lines everywhere, a live view on a terminal only, and where the results are."""

from __future__ import annotations

import asyncio
import io
import os
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rlinf import Actor, ActorSystem, endpoint
from rlinf.config.text import MetricsConfig, RunConfig
from rlinf.data.sample import Evaluation, Group, Prompt, Sample
from rlinf.flows.evaluate import measure
from rlinf.metrics.report import LOOK_SECONDS, Report, compare, in_words, rows
from rlinf.runs.library.train import Result
from rlinf.runtime.actor.dispatch import STANDS_BY
from rlinf.runtime.system.observer import Watch
from rlinf.storage.directory import RunDirectory
from tests.metrics.console.terminal import Terminal, plain

STEP = {"reward/mean": 0.5, "timing/step": 2.0, "timing/training": 1.5, "timing/overlap": 0.0, "timing/other": 0.5}
BOUND = {
    "bound/seconds": 1.7,
    "bound/area": 1.7,
    "bound/devices": 2.0,
    "bound/efficiency": 0.85,
    "lost/imbalance": 0.2,
    "lost/overhead": 0.1,
}


def evaluation(*texts: str, right: str = "1234") -> Evaluation:
    groups = []
    for number, text in enumerate(texts):
        prompt = Prompt(number, np.zeros(1, np.int64), f"{number}>", right)
        empty = np.zeros(4, np.float32)
        sample = Sample(
            prompt, 0, np.zeros(4, np.int64), empty, empty, text, False, reward=float(text == right), outcome="ok"
        )
        groups.append(Group(prompt, (sample,)))
    return Evaluation(sum(text == right for text in texts) / len(texts), tuple(groups))


@pytest.fixture
def directory(tmp_path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "run")


def report_to(directory, watch=None, *, live="auto", steps=6, log_every=1, announced=(), out) -> Report:
    config = RunConfig(name="run", log_every=log_every, metrics=MetricsConfig(live=live))
    return Report(config, directory, 1, steps=steps, announced=announced, watch=watch, out=out)


def test_evaluations_of_different_problems_are_not_compared():
    before, after = evaluation("1", "1234"), evaluation("1234")
    (line,) = compare(before, after, 0.0)
    assert line.startswith("100.0% of 1 ")


def test_of_chats_the_table_shows_what_the_user_said_and_of_answers_the_end():
    start, end = (
        "<|im_start|>system\nYou are a helpful one.<|im_end|>\n<|im_start|>user\n",
        "<|im_end|>\n<|im_start|>ai\n",
    )

    def said(text):
        groups = [group.samples[0] for group in evaluation(text, text).groups]
        asked = [replace(one.prompt, text=f"{start}What is {n} + 2?{end}") for n, one in enumerate(groups)]
        pairs = zip(asked, groups, strict=True)
        return Evaluation(0.0, tuple(Group(each, (replace(one, prompt=each),)) for each, one in pairs))

    before, after = (
        said("The final answer to this arithmetic problem is 7"),
        said("The final answer to this problem is 2"),
    )
    _, _, first, second = compare(before, after, 0.0)
    for number, line in enumerate((first, second)):
        told = re.split(" {3,}", line.strip())
        assert told[0] == f"What is {number} + 2?"
        assert [one[0] + one[-4:] for one in told[1:3]] == ["…is 7", "…is 2"]


def test_the_answers_of_several_agents_to_a_problem_are_one_problem():
    before, after = evaluation("1", "1234"), evaluation("1234", "1234")
    helped = []
    for group in after.groups:
        other = replace(group.prompt, text="another agent's")
        helped += [group, Group(other, (replace(group.samples[0], prompt=other, agent="helper"),))]
    after = Evaluation(1.0, tuple(helped))
    assert next(compare(before, after, 0.0)).endswith(": 50.0% -> 100.0%")
    assert in_words(after, 0.0).startswith("100.0% of 2 ")


async def test_the_table_tells_the_newest_evaluation_and_no_mean_of_several(directory):
    out = io.StringIO()
    report = report_to(directory, steps=3, log_every=3, announced=["evaluation/accuracy"], out=out)
    for step, more in enumerate(({"evaluation/accuracy": 0.0}, {"evaluation/accuracy": 1.0}, {}), 1):
        report.stepped(step, STEP | more)
    assert out.getvalue().splitlines()[-1].split()[:3] == ["3", "0.500", "100.0%"]


def rewarded(*rewards: float) -> Evaluation:
    """Problems whose answers got these rewards."""
    groups = [
        Group(group.prompt, (group.samples[0].judged(reward, "ok", scores={}),))
        for group, reward in zip(evaluation(*"x" * len(rewards)).groups, rewards, strict=True)
    ]
    return Evaluation(sum(rewards) / len(rewards), tuple(groups), measure(groups))


@pytest.mark.parametrize("rewards", [(-1.5, -1.226), (3.0, 4.1), (0.2, 0.9), (1.0, 2.0)])
def test_rewards_other_than_0_and_1_are_no_share_of_right_answers(rewards):
    right, graded = rewarded(1, 0), rewarded(*rewards)
    mean = f"{sum(rewards) / 2:.3f}"
    assert in_words(graded, 0.0).startswith(f"mean reward {mean} on 2 ")
    assert next(compare(right, graded, 0.0)).endswith(f": 0.500 -> {mean}")
    assert next(compare(graded, right, 0.0)).endswith(f": {mean} -> 0.500")
    assert graded.metrics["graded"] == sum(reward not in (0, 1) for reward in rewards) / 2
    assert "graded" not in right.metrics
    text = repr(Result(Path("run"), 3, before=right, after=graded))
    assert f"held-out  0.500 -> {mean}   on 2" in text
    assert "%" not in text


async def test_the_table_has_a_column_for_a_mean_reward_if_that_is_known_before(directory):
    out = io.StringIO()
    report = report_to(directory, steps=2, announced=["evaluation/accuracy"], out=out)
    report.evaluated("mean reward 3.550", {"evaluation/accuracy": 3.55, "evaluation/graded": 1.0})
    report.stepped(1, STEP)
    report.stepped(2, STEP | {"evaluation/accuracy": -1.363, "evaluation/graded": 1.0})
    _, _, header, _, last = out.getvalue().splitlines()
    assert header.split() == ["step", "reward", "held-out", "s/step", "left"]
    assert last.split()[:3] == ["2", "0.500", "-1.363"]


async def test_after_a_resume_the_column_is_named_as_before(directory):
    out = io.StringIO()
    report = report_to(directory, steps=6, announced=["evaluation/accuracy"], out=out)
    report.resumed(3, directory.path, {"evaluation/accuracy": 3.55, "evaluation/graded": 1.0})
    report.stepped(4, STEP)
    assert "held-out" in out.getvalue()
    assert "accuracy" not in out.getvalue()


def test_an_earlier_run_is_told_with_its_place_and_its_size(tmp_path):
    path, out = tmp_path / "run", io.StringIO()
    for number in range(3):
        if number:
            made = RunDirectory(path)
            made.metrics.write_text('{"step": 1}')
            made.resolved.write_text("name: run")
            (made.checkpoints / "weights").write_bytes(b"x" * 30_000_000 * number)
        directory = RunDirectory.create(path)
    report_to(directory, steps=1, out=out).begins({"trainer": [0]})
    assert "run.previous-2 (60 MB; with 1 more, 90 MB; keep_previous" in out.getvalue()


async def tell(report: Report) -> None:
    before, after = evaluation("1", "1234"), evaluation("1234", "1234")
    async with report:
        report.begins({"rollout": [0], "trainer": [0], "judge": [0]})
        report.warmed_up({"sft/loss_first": 2.0, "sft/loss": 1.0, "sft/steps": 40.0}, "worked problems")
        report.evaluated(in_words(before, 0.0))
        for step in range(1, 7):
            report.stepped(step, STEP | BOUND)
    report.ends(compare(before, after, 0.0))


async def test_in_a_file_it_is_plain_lines(directory):
    out = io.StringIO()
    directory.metrics.write_text("{}")
    directory.report.write_text("page")
    await tell(report_to(directory, out=out))
    text = out.getvalue()
    assert "\x1b" not in text
    for told in (
        "run: rollout, trainer, judge in one process",
        "loss 2.00 to 1.00",
        "before: 50.0% of 2 held-out problems answered right, greedily",
        "accuracy on 2 held-out problems, greedily: 50.0% -> 100.0%",
        "a step took 2.00 s: training 1.50, other 0.50 (the middle half of the steps, on average)",
        "85% of what is possible on 2 devices",
        "lost per step: imbalance 0.20, overhead 0.10 s",
        "report.html              curves",
        "metrics.jsonl            every step's numbers",
    ):
        assert told in text, told
    assert "profile.json" not in text
    assert "trace.json" not in text, "only what is there is listed"
    rows = [line.split() for line in text.splitlines()]
    assert ["6", "0.500", "2.00", "0", "s"] in rows
    assert rows.index(["0>", "1", "1234", "1234"]) < rows.index(["1>", "1234", "1234", "1234"]), "changed ones first"


async def test_without_held_out_problems_there_is_no_accuracy(directory):
    out = io.StringIO()
    report_to(directory, out=out).ends()
    assert "accuracy" not in out.getvalue()
    assert "results in" in out.getvalue()


async def test_a_resumed_run_says_from_where(directory, tmp_path):
    out = io.StringIO()
    report_to(directory, out=out).resumed(50, tmp_path / "run" / "checkpoints" / "step_000050")
    assert "after step 50" in out.getvalue()
    assert "step_000050" in out.getvalue()


async def test_what_a_model_wrote_cannot_steer_the_terminal(directory):
    out = io.StringIO()
    wild = evaluation("\x1b[2J\x1b]0;owned\x07" + "x" * 500 + "\nnew line")
    report_to(directory, out=out).ends(compare(wild, wild, 0.0))
    assert "\x1b" not in out.getvalue()
    assert "\x07" not in out.getvalue()
    assert "xx new line " in out.getvalue(), "on one line"
    assert max(map(len, out.getvalue().splitlines())) < 200


@pytest.mark.parametrize(
    ("live", "term", "drawn"), [("auto", "xterm", True), ("auto", "dumb", False), ("never", "xterm", False)]
)
async def test_on_a_terminal_there_is_a_live_view_unless_it_is_unwanted(directory, monkeypatch, live, term, drawn):
    monkeypatch.setenv("TERM", term)
    terminal = Terminal(columns=100)
    await tell(report_to(directory, live=live, out=terminal.out))
    text = plain(terminal.text())
    assert ("step 6 of 6" in text) is drawn
    assert ("s/step" in text) is not drawn, "one or the other"
    assert text.rindex("accuracy on 2") > text.rfind("step 6 of 6")


async def test_a_failure_leaves_the_last_state_and_its_own_error(directory, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    report = report_to(directory, out=terminal.out)

    async def fail() -> None:
        async with report:
            report.stepped(2, STEP)
            raise FloatingPointError("the loss is no number")

    with pytest.raises(FloatingPointError, match="no number"):
        await fail()
    report.line("what comes after it")
    text = plain(terminal.text())
    assert text.index("step 2 of 6") < text.index("what comes after")


class Sleeper(Actor):
    @endpoint
    async def sleep(self) -> None:
        await asyncio.sleep(3 * LOOK_SECONDS)


async def test_the_live_view_shows_what_the_roles_do_and_leaves_no_task_behind(directory, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    async with ActorSystem.local(1) as system:
        sleeper = await system.spawn(Sleeper, name="sleeper")
        watch = await Watch.start(system)
        tasks = asyncio.all_tasks()
        async with report_to(directory, watch, out=terminal.out):
            await sleeper[0].sleep()
        left = {task for task in asyncio.all_tasks() if task.get_name() != STANDS_BY}
        assert left <= tasks
    assert "sleeper  running sleep" in plain(terminal.text())


async def test_cancelling_a_run_ends_the_view(directory, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()

    async def run() -> None:
        async with (
            ActorSystem.local(1) as system,
            report_to(directory, await Watch.start(system), out=terminal.out) as report,
        ):
            report.stepped(1, STEP)
            await asyncio.Event().wait()

    task = asyncio.create_task(run())
    while "step 1 of 6" not in plain(terminal.so_far()):
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert "step 1 of 6" in plain(terminal.text())


def test_held_out_problems_are_the_same_ones_each_time():
    kept = rows(evaluation("1234", "7", "1234"), count=2)
    assert [(row["prompt"], row["response"], row["reward"], row["kind"]) for row in kept] == [
        ("0>", "1234", 1.0, "held-out"),
        ("1>", "7", 0.0, "held-out"),
    ]


def test_paths_are_shown_as_one_would_type_them(monkeypatch, tmp_path):
    from rlinf.metrics.report import _short_path

    monkeypatch.chdir(tmp_path)
    assert _short_path(tmp_path / "a" / "b") == os.path.join("a", "b")
    assert _short_path(Path("/elsewhere")) == "/elsewhere"
