"""Scoring groups in rounds: every group comes back with its own numbers, in order, whatever the rounds were."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rlinf.training.schedule import InOrder, LogprobPass, Packing
from tests.actors import toys


def carried_out(order):
    """What all ranks would say: each token, and its double."""
    found = []
    for part in order:
        tokens = np.concatenate([np.zeros(0), *(row.response_ids for row in part.rows)]).astype(np.float32)
        found.append(np.stack([tokens, 2 * tokens]))
    assert [numbers.shape[1] for numbers in found] == list(order[0].tokens)
    order[0].deliver(found)


@given(
    count=st.integers(0, 8),
    ranks=st.integers(1, 3),
    budget=st.integers(1, 60),
    late=st.integers(0, 2),
    order=st.permutations(range(8)),
)
async def test_groups_come_back_in_order_with_their_own_numbers(count, ranks, budget, late, order):
    batch = toys.groups(count)
    passing = LogprobPass(Packing(ranks, budget), ("one", "two"))
    waiting = []
    arriving = [batch[number] for number in order if number < count]
    async for round_ in passing.commands(arriving, InOrder()):
        waiting.append(round_)
        if len(waiting) > late:
            carried_out(waiting.pop(0))
    for round_ in waiting:
        carried_out(round_)
    assert passing.came == passing.finished.qsize() == count
    for expected in batch:
        group = passing.finished.get_nowait()
        assert group.prompt.id == expected.prompt.id
        for sample in group.samples:
            ids = sample.response_ids if sample.reward is not None else np.full(len(sample.response_ids), np.nan)
            np.testing.assert_array_equal(sample.per_token["one"], ids)
            np.testing.assert_array_equal(sample.per_token["two"], 2 * ids)


def test_a_group_comes_back_as_soon_as_its_last_round_is_done():
    first, second = toys.groups(2)
    passing = LogprobPass(Packing(1, 1), ("one", "two"))
    rounds = [*passing.push([first, second]), *passing.close()]
    for number, round_ in enumerate(rounds, 1):
        carried_out(round_)
        ready = (number >= len(first.scored)) + (number >= len(first.scored) + len(second.scored))
        assert passing.finished.qsize() == ready
