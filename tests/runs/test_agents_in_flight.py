"""An asynchronous run of agents is killed in the middle of conversations, and goes on with every one of them."""

from __future__ import annotations

import re

import pytest

from rlinf.cli.commands import main
from rlinf.data.in_flight.snapshot import read_kept
from rlinf.runs.roles import KINDS
from tests.launching import killed, launch, metrics_of

SMALL = (
    "--config", "configs/agents/calculator.yaml", "flow=rlinf.flows.agentic.agentic_async", "steps=7", "sft.steps=60",
    "algorithm.prompts_per_step=6", "checkpoint.every=4", "rollout.max_rows=20", "evaluation.every=0",
    "evaluation.problems=4", "metrics.live=never", "trace=false", "log_every=1",
)  # fmt: skip


@pytest.mark.parametrize(("staleness", "mode", "processes"), [(1, "mask", 0), (2, "drop", 2)])
def test_open_conversations_go_on_after_a_kill_and_not_a_token_is_made_again(
    tmp_path, capsys, staleness, mode, processes
):
    given = (*SMALL, f"output_dir={tmp_path}", f"staleness.max={staleness}", f"staleness.mode={mode}")
    run = tmp_path / "calculator"
    newest = run / "checkpoints" / "step_000004"
    if processes:
        given += ("placement.mode=disaggregated",)
    killed(lambda: (newest / "in_flight.json").exists(), *given, processes=processes)
    entries = read_kept(newest, KINDS).entries
    assert len({entry.id for entry in entries}) == len(entries), "each task is there once"
    tasks = [one for entry in entries for one in entry.partial]
    held = sum(call.tokens for task in tasks for calls in task.left.values() for call in calls)
    begun = sum(bool(calls) for task in tasks for calls in task.left.values())
    assert held, "conversations were open"

    said = launch(*given, "--resume", "auto", processes=processes).stdout
    lines = re.findall(r"open episodes, (\d+) went on; ([\d,]+) tokens were taken from their records$", said, re.M)
    assert "began anew" not in said
    assert sum(int(tokens.replace(",", "")) for _, tokens in lines) == held
    assert sum(int(count) for count, _ in lines) == begun
    found = metrics_of(run)
    assert [line["step"] for line in found] == [*range(1, 8)]
    assert all(line["staleness/max"] <= staleness for line in found)
    assert all(line["groups"] == 6 and line["samples"] == 48 for line in found)
    assert not list((run / "checkpoints" / "latest").glob("in_flight.*")), "nothing is left at the end"
    assert main(["ledger", str(run)]) == 0
    told = capsys.readouterr().out
    assert "balances" in told
    assert re.search(r"prompts drawn +42\n", told), "and nothing was drawn in vain"
