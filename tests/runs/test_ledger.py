"""The ledger of whole runs: whatever a flow does with what it draws, every sample is accounted for, or said to be
unknown."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlinf.cli.runs import account
from rlinf.storage.files import read_lines
from tests.launching import QUICKSTART, TINY, launch, metrics_of

pytestmark = pytest.mark.slow
REWARD = "reward.function=tests.drills.rewards.reward"
RUN = ("--config", QUICKSTART, *TINY, "evaluation.every=0", "trace=false", "metrics.live=never")


def whole(output: Path, *overrides: str):
    """The balance of a whole run."""
    launch(*RUN, f"output_dir={output}", *overrides)
    return account(output / "quickstart").whole


def test_prompts_that_teach_nothing_are_dropped_with_their_reason(tmp_path):
    """With answers of one token or two, many groups have equal rewards; surplus prompts are those of a round that was
    asked for when the batch became full."""
    rounds = ("algorithm=dapo", "algorithm.sampling={max_rounds: 4}", "rollout.max_new_tokens=2", REWARD)
    found = whole(tmp_path, *rounds)
    assert found.balances, found.problems
    assert set(found.dropped) <= {"equal rewards", "surplus"}
    assert found.dropped["equal rewards"] > 0
    assert found.samples == found.trained + sum(found.dropped.values())
    drawn = sum(line["sampling/drawn"] for line in metrics_of(tmp_path / "quickstart"))
    assert found.prompts == drawn


def test_what_only_the_critic_learns_from_is_no_training(tmp_path):
    found = whole(tmp_path, "algorithm=ppo", "critic.head_start=1")
    assert found.balances, found.problems
    assert (found.samples, found.trained, found.dropped) == (3 * 16, 2 * 16, {"critic only": 16})


@pytest.mark.parametrize("flow", ["agentic", "agentic_async"])
def test_attempts_of_agents_that_fail_are_dropped(tmp_path, flow):
    agents = (f"flow=rlinf.flows.agentic.{flow}", "agent.function=tests.runs.programs.ledgers.failing", REWARD)
    found = whole(tmp_path, *agents)
    assert found.balances, found.problems
    assert found.samples == found.trained + found.dropped["failed"] == 3 * 16
    assert found.dropped["failed"] > 0


def test_tasks_of_agents_that_teach_nothing_are_replaced_too(tmp_path):
    agents = ("flow=rlinf.flows.agentic.agentic", "agent.function=tests.runs.programs.ledgers.coarse", REWARD)
    found = whole(tmp_path, *agents, "algorithm=dapo", "algorithm.sampling={max_rounds: 4}")
    assert found.balances, found.problems
    assert found.dropped["equal rewards"] > 0
    metrics = metrics_of(tmp_path / "quickstart")
    assert found.prompts == sum(line["sampling/drawn"] for line in metrics) > 3 * 4
    assert any(line["sampling/kept"] for line in metrics)


def test_answers_that_cannot_be_scored_are_dropped(tmp_path):
    found = whole(tmp_path, "reward.function=tests.runs.programs.ledgers.picky", "rollout.max_new_tokens=4")
    assert found.balances, found.problems
    assert found.samples == found.trained + found.dropped["unscored"] == 3 * 16
    assert found.dropped["unscored"] > 0


@pytest.mark.parametrize(
    ("flow", "trained", "unknown", "elsewhere"),
    [("never", 0, 48, 0), ("twice", 96, 0, 48), ("in_halves", 48, 0, 0), ("half", 24, 24, 0)],
)
def test_a_flow_of_ones_own_is_believed_as_far_as_its_trainer_tells(tmp_path, flow, trained, unknown, elsewhere):
    found = whole(tmp_path, f"flow=tests.runs.programs.ledgers.{flow}", "algorithm.epochs=1")
    assert found.balances, found.problems
    assert (found.samples, found.trained, found.unknown, found.elsewhere) == (48, trained, unknown, elsewhere)


def test_asynchronous_steps_train_everything_once_and_drop_what_is_too_old(tmp_path):
    ahead = (
        "flow=rlinf.flows.grpo_async",
        "steps=6",
        "staleness.max=1",
        "rollout.carry=3",
        "staleness.mode=drop",
        REWARD,
    )
    found = whole(tmp_path, *ahead)
    assert found.balances, found.problems
    assert found.samples == found.trained + sum(found.dropped.values()) + found.in_flight
    lines = list(read_lines(tmp_path / "quickstart" / "ledger.jsonl"))
    assert any("in_flight" in line for line in lines)
