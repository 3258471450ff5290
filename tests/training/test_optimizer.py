"""One optimizer step: the mean over what was counted, clipped as torch clips, or nothing at all."""

import copy
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlinf.algos.loss_sum import LossSum
from rlinf.training.optimizer import PlainAdamW, minimize, optimizer_step, share_of


@dataclass
class Rank:
    """What `share_of` asks of a mesh."""

    number: int
    ranks: int

    def size(self):
        return self.ranks

    def get_local_rank(self):
        return self.number


@given(rows=st.integers(1, 9), ranks=st.integers(1, 5))
def test_every_row_counts_on_one_rank_and_no_rank_is_left_without_work(rows, ranks):
    shares = [share_of(torch.arange(rows), Rank(number, ranks)) for number in range(ranks)]
    assert sorted(row for share, counts in shares if counts for row in share.tolist()) == list(range(rows))
    assert all(len(share) for share, _ in shares)
    assert share_of(torch.arange(rows), None)[0].tolist() == list(range(rows))


def learner():
    """A layer, its optimizer, and the sum of a loss over five rows."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(3, 2).double()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    total = layer(torch.randn(5, 3, dtype=torch.float64)).square().sum()
    return layer, optimizer, LossSum(total, torch.tensor(5.0, dtype=torch.float64))


@pytest.mark.parametrize("bound", [0.5, 1e9])
def test_the_step_is_that_of_the_mean_clipped_by_torch(bound):
    """However the gradient is made: by `minimize`, or piece by piece before `optimizer_step`."""
    expected, optimizer, loss = learner()
    (loss.total / 5).backward()
    length = float(torch.nn.utils.clip_grad_norm_(expected.parameters(), bound))
    optimizer.step()
    whole, optimizer, loss = learner()
    _, norm = minimize(loss, list(whole.parameters()), optimizer, grad_clip=bound)
    pieces, optimizer, loss = learner()
    loss.total.backward()
    gathered, other = optimizer_step(loss.detach(), list(pieces.parameters()), optimizer, grad_clip=bound)
    assert norm == other == pytest.approx(length)
    assert float(gathered.mean()) == pytest.approx(float(loss.total.detach()) / 5)
    for found in (whole, pieces):
        for parameter, wanted in zip(found.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(parameter, wanted)


@pytest.mark.parametrize(("factor", "weight"), [(torch.nan, 5.0), (torch.inf, 5.0), (1.0, 0.0)])
def test_without_a_finite_loss_over_something_nothing_changes(factor, weight):
    layer, optimizer, loss = learner()
    before = copy.deepcopy(layer.state_dict())
    loss = LossSum(loss.total * factor, torch.tensor(weight, dtype=torch.float64))
    if weight:
        with pytest.raises(FloatingPointError, match=r"step.*taken"):
            minimize(loss, list(layer.parameters()), optimizer)
    else:
        assert minimize(loss, list(layer.parameters()), optimizer)[1] == 0.0
    assert all(torch.equal(before[name], tensor) for name, tensor in layer.state_dict().items())


def test_steps_by_the_kernel_alone_are_those_of_torch():
    rates, finished = [1e-2, 2e-3], []
    for kind in (torch.optim.AdamW, PlainAdamW):
        torch.manual_seed(3)
        parameters = [torch.nn.Parameter(torch.randn(shape)) for shape in ((5, 3), (7,), (2, 2))]
        groups = [{"params": parameters[:2], "lr": rates[0]}, {"params": parameters[2:], "lr": rates[1]}]
        optimizer = kind(groups, betas=(0.9, 0.99), weight_decay=0.1, fused=True)
        for step in range(7):
            for parameter in parameters:
                parameter.grad = torch.randn_like(parameter)
            if step % 3 == 0:  # one that had no part in the loss
                parameters[2].grad = None
            optimizer.load_state_dict(optimizer.state_dict())
            optimizer.step()
        finished.append([*parameters, *(optimizer.state[parameter]["step"] for parameter in parameters)])
    assert all(torch.equal(theirs, ours) for theirs, ours in zip(*finished, strict=True))
