"""Shaping of rewards, by hand."""

import pytest
import torch

from rlinf.algos import advantages


def test_the_penalty_grows_towards_the_limit():
    lengths = torch.tensor([0, 60, 80, 90, 100, 150])
    found = advantages.overlong(lengths, longest=100, cache=20)
    assert found.tolist() == pytest.approx([0.0, 0.0, 0.0, -0.5, -1.0, -1.0])


def test_a_reward_lands_on_its_own_answers_last_token():
    mask = torch.tensor([[0, 1, 1, 0], [1, 0, 1, 1], [0, 0, 0, 0], [1, 0, 0, 0]])
    found = advantages.at_end(torch.tensor([1.0, 2.0, 3.0, 4.0]), mask)
    assert found.tolist() == [[0, 0, 1, 0], [0, 0, 0, 2], [0, 0, 0, 0], [4, 0, 0, 0]]


def test_the_divergence_is_taken_off_token_by_token_or_answer_by_answer():
    mask, kl = torch.tensor([[1, 1], [1, 0]]), torch.tensor([[1.0, 2.0], [3.0, float("nan")]])
    per_token = advantages.less_kl(torch.tensor([[0.0, 1.0], [1.0, 9.0]]), kl, mask, beta=0.1)
    torch.testing.assert_close(per_token, torch.tensor([[-0.1, 0.8], [0.7, 0.0]]))
    per_answer = advantages.less_kl(torch.tensor([1.0, 1.0]), kl, mask, beta=0.1)
    torch.testing.assert_close(per_answer, torch.tensor([0.7, 0.7]))


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda: advantages.overlong(torch.zeros(2), longest=10, cache=11),
            r"cache=11.*between 1.*longest=10",
        ),
        (lambda: advantages.at_end(torch.zeros(3), torch.zeros(2, 4)), r"got \[3\] and \[2, 4\]"),
        (lambda: advantages.less_kl(torch.zeros(3), torch.zeros(2, 4), torch.zeros(2, 4), beta=1.0), r"rewards \[3\]"),
    ],
)
def test_what_does_not_fit_is_named(call, text):
    with pytest.raises(ValueError, match=text):
        call()
