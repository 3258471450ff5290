"""An asynchronous run of agents is killed in the middle of conversations, and goes on with every one of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rlinf.agents.episodes import KINDS
from rlinf.cli.commands import main
from rlinf.data.in_flight.snapshot import read_kept
from tests.launching import killed, launch, metrics_of

SMALL = (
    "--config", "configs/agents/calculator.yaml", "flow=rlinf.flows.agentic.agentic_async", "steps=7", "sft.steps=60",
    "algorithm.prompts_per_step=6", "checkpoint.every=1", "checkpoint.keep=9", "rollout.max_rows=20",
    "evaluation.every=0", "evaluation.problems=4", "metrics.live=never", "trace=false", "log_every=1",
)  # fmt: skip


def held(checkpoint: Path) -> tuple[int, int]:
    """How many open episodes a checkpoint holds, and how many sampled tokens they have."""
    entries = read_kept(checkpoint, KINDS).entries
    assert len({entry.id for entry in entries}) == len(entries), "each task is there once"
    calls = [calls for entry in entries for task in entry.partial for calls in task.left.values()]
    return sum(map(bool, calls)), sum(call.tokens for one in calls for call in one)


@pytest.mark.parametrize(("staleness", "mode", "processes"), [(1, "mask", 0), (2, "drop", 2)])
def test_open_conversations_go_on_after_a_kill_and_not_a_token_is_made_again(
    tmp_path, capsys, staleness, mode, processes
):
    given = (*SMALL, f"output_dir={tmp_path}", f"staleness.max={staleness}", f"staleness.mode={mode}")
    run = tmp_path / "calculator"
    found: dict[Path, tuple[int, int]] = {}

    def in_conversation() -> bool:
        # Where the trainer is slow, every conversation of the next step may have ended: a later checkpoint has some.
        new = set((run / "checkpoints").glob("step_*/in_flight.json")) - set(found)
        found.update((each, held(each.parent)) for each in sorted(new))
        return any(tokens for _, tokens in found.values())

    if processes:
        given += ("placement.mode=disaggregated",)
    killed(in_conversation, *given, processes=processes)
    begun, tokens = held(max((run / "checkpoints").glob("step_*/in_flight.json")).parent)

    said = launch(*given, "--resume", "auto", processes=processes).stdout
    lines = re.findall(r"open episodes, (\d+) went on; ([\d,]+) tokens were taken from their records$", said, re.M)
    assert "began anew" not in said
    assert sum(int(taken.replace(",", "")) for _, taken in lines) == tokens
    assert sum(int(count) for count, _ in lines) == begun
    steps = metrics_of(run)
    assert [line["step"] for line in steps] == [*range(1, 8)]
    assert all(line["staleness/max"] <= staleness for line in steps)
    assert all(line["groups"] == 6 and line["samples"] == 48 for line in steps)
    assert not list((run / "checkpoints" / "latest").glob("in_flight.*")), "nothing is left at the end"
    assert main(["ledger", str(run)]) == 0
    told = capsys.readouterr().out
    assert "balances" in told
    assert re.search(r"prompts drawn +42\n", told), "and nothing was drawn in vain"
