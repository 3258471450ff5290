"""Shaping of rewards, by hand."""

import pytest
import torch

from rlinf.algos import shaping


def test_the_penalty_grows_towards_the_limit():
    lengths = torch.tensor([0, 60, 80, 90, 100, 150])
    found = shaping.overlong(lengths, longest=100, cache=20)
    assert found.tolist() == pytest.approx([0.0, 0.0, 0.0, -0.5, -1.0, -1.0])


def test_a_reward_lands_on_its_own_answers_last_token():
    mask = torch.tensor([[0, 1, 1, 0], [1, 0, 1, 1], [0, 0, 0, 0], [1, 0, 0, 0]])
    found = shaping.at_end(torch.tensor([1.0, 2.0, 3.0, 4.0]), mask)
    assert found.tolist() == [[0, 0, 1, 0], [0, 0, 0, 2], [0, 0, 0, 0], [4, 0, 0, 0]]


def test_the_divergence_is_taken_off_token_by_token_or_answer_by_answer():
    mask, kl = torch.tensor([[1, 1], [1, 0]]), torch.tensor([[1.0, 2.0], [3.0, float("nan")]])
    per_token = shaping.less_kl(torch.tensor([[0.0, 1.0], [1.0, 9.0]]), kl, mask, beta=0.1)
    torch.testing.assert_close(per_token, torch.tensor([[-0.1, 0.8], [0.7, 0.0]]))
    per_answer = shaping.less_kl(torch.tensor([1.0, 1.0]), kl, mask, beta=0.1)
    torch.testing.assert_close(per_answer, torch.tensor([0.7, 0.7]))


def test_only_what_was_cut_short_gains_the_value_ahead():
    found = shaping.bootstrap(
        torch.tensor([1.0, 1.0]), torch.tensor([True, False]), torch.tensor([4.0, float("nan")]), gamma=0.5
    )
    assert found.tolist() == [3.0, 1.0]


def test_a_chunk_sums_its_rewards_and_ends_if_any_step_does():
    rewards, dones = shaping.chunk_rewards(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[0, 0], [1, 0]]))
    assert rewards.tolist() == [3.0, 7.0]
    assert dones.tolist() == [False, True]


@pytest.mark.parametrize(
    ("level", "shape", "value"), [("token", (2, 3, 4), 1), ("action", (2, 3), 4), ("chunk", (2,), 12)]
)
def test_levels_of_log_probs(level, shape, value):
    found = shaping.logprob_level(torch.ones(2, 3, 4), level)
    assert found.shape == shape
    assert (found == value).all()


def test_agents_weigh_alike_and_so_do_an_agents_tokens():
    # trajectory 0: agent 0 speaks twice (1 and 3 tokens), agent 1 once; trajectory 1: agent 0 once
    trajectories, agents = torch.tensor([0, 0, 0, 1]), torch.tensor([0, 1, 0, 0])
    lengths = torch.tensor([1, 5, 3, 2])
    of_agents = shaping.agent_scales(trajectories, agents, lengths, turn=False)
    assert of_agents.tolist() == pytest.approx([1 / 4, 1 / 2, 1 / 4, 1.0])
    of_turns = shaping.agent_scales(trajectories, agents, lengths, agent=False)
    assert of_turns.tolist() == pytest.approx([2 * 1 / 4, 1.0, 2 * 3 / 4, 1.0])
    both = shaping.agent_scales(trajectories, agents, lengths)
    assert both.tolist() == pytest.approx((of_agents * of_turns).tolist())


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: shaping.overlong(torch.zeros(2), longest=10, cache=11), "cache=11 must be between 1 and longest=10"),
        (lambda: shaping.at_end(torch.zeros(3), torch.zeros(2, 4)), r"got \[3\] and \[2, 4\]"),
        (lambda: shaping.less_kl(torch.zeros(3), torch.zeros(2, 4), torch.zeros(2, 4), beta=1.0), r"rewards \[3\]"),
        (lambda: shaping.bootstrap(torch.zeros(2), torch.zeros(3), torch.zeros(2), gamma=1.0), r"truncated \[3\]"),
        (lambda: shaping.chunk_rewards(torch.zeros(2, 2), torch.zeros(2)), r"dones \[2\]"),
        (lambda: shaping.logprob_level(torch.zeros(2), "token"), r"got \[2\]"),
        (lambda: shaping.logprob_level(torch.zeros(2, 2, 2), "tokens"), "meant 'token'"),
        (lambda: shaping.agent_scales(torch.zeros(2), torch.zeros(3), torch.zeros(2)), r"agents \[3\]"),
    ],
)
def test_what_does_not_fit_is_named(call, text):
    with pytest.raises(ValueError, match=text):
        call()
