"""The ring of remembered transitions: what it keeps, what it draws, and that both survive a restart."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlinf.training.embodied.replay import ReplayBuffer


def rows(first, count):
    """Rows that say when they came."""
    ages = torch.arange(first, first + count)
    return {"age": ages, "state": ages[:, None] * torch.tensor([1.0, 0.5])}


def kept(replay):
    """The ages of all rows that can be drawn."""
    return set(replay.draw(50 * len(replay), 0)["age"].tolist())


@given(capacity=st.integers(1, 7), counts=st.lists(st.integers(0, 20), min_size=1, max_size=6))
def test_the_newest_rows_are_kept_whatever_portions_they_come_in(capacity, counts):
    replay, added = ReplayBuffer(capacity), 0
    for count in counts:
        replay.add(rows(added, count))
        added += count
    assert replay.added == added
    assert len(replay) == min(added, capacity)
    if added:
        assert kept(replay) == set(range(max(0, added - capacity), added))
        drawn = replay.draw(9, 1)
        assert torch.equal(drawn["state"][:, 0], drawn["age"].float())  # rows stay whole


def test_a_draw_follows_from_its_key():
    replay = ReplayBuffer(100)
    replay.add(rows(0, 100))
    first, again, other = (replay.draw(64, 3, key)["age"] for key in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_draws_are_even():
    replay = ReplayBuffer(4)
    replay.add(rows(0, 4))
    counts = torch.bincount(replay.draw(40_000, 0)["age"]) / 40_000
    torch.testing.assert_close(counts, torch.full((4,), 0.25), rtol=0.0, atol=0.01)


@pytest.mark.parametrize("count", [0, 3, 5, 13])
def test_what_was_written_draws_and_grows_as_it_would_have(tmp_path, count):
    replay, again = ReplayBuffer(5), ReplayBuffer(5)
    replay.add(rows(0, count))
    replay.write(tmp_path)
    again.read(tmp_path)
    for each in (replay, again):
        each.add(rows(count, 3))
    assert again.added == replay.added
    mine, theirs = replay.draw(20, 8), again.draw(20, 8)
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_another_capacity_keeps_the_newest(tmp_path):
    replay, smaller = ReplayBuffer(6), ReplayBuffer(4)
    replay.add(rows(0, 9))
    replay.write(tmp_path)
    smaller.read(tmp_path)
    assert kept(smaller) == {5, 6, 7, 8}


def test_rows_that_differ_from_those_before_are_named():
    replay = ReplayBuffer(4)
    replay.add(rows(0, 1))
    with pytest.raises(ValueError, match=r"'state' is \[1, 3\]"):
        replay.add({"age": torch.zeros(1, dtype=torch.int64), "state": torch.zeros(1, 3)})
    with pytest.raises(ValueError, match=r"'state'.*None"):
        replay.add({"age": torch.zeros(1, dtype=torch.int64)})


def test_nothing_can_be_drawn_from_nothing(tmp_path):
    with pytest.raises(ValueError, match="it is empty"):
        ReplayBuffer(4).draw(1, 0)
    with pytest.raises(FileNotFoundError, match=r"replay\.json"):
        ReplayBuffer(4).read(tmp_path)


def walk(first, count, side=4):
    """Transitions of one long episode, whose pictures are all different."""
    numbers = torch.arange(first, first + count + 1)
    pictures = numbers.to(torch.uint8).view(-1, 1, 1, 1).expand(-1, side, side, 3)
    return {"age": numbers[:-1], "seen.rgb": pictures[:-1], "following.rgb": pictures[1:]}


@given(st.integers(1, 9), st.lists(st.integers(1, 12), min_size=1, max_size=6))
def test_a_picture_that_ends_one_transition_and_begins_the_next_is_kept_once(capacity, counts):
    replay, first = ReplayBuffer(capacity), 0
    for count in counts:
        replay.add(walk(first, count))
        first += count
        assert replay.pictures == len(replay) + 1  # what nobody refers to any more is gone
    drawn = replay.draw(64, 1)
    assert torch.equal(drawn["seen.rgb"][:, 0, 0, 0], drawn["age"].to(torch.uint8))
    assert torch.equal(drawn["following.rgb"][:, 3, 3, 2], (drawn["age"] + 1).to(torch.uint8))


def test_pictures_come_back_from_a_checkpoint_and_from_another_buffer(tmp_path):
    replay, read, taken = ReplayBuffer(5), ReplayBuffer(5), ReplayBuffer(5)
    replay.add(walk(0, 8))
    replay.write(tmp_path)
    read.read(tmp_path)
    taken.take(replay.tensors())
    for each in (replay, read, taken):
        each.add(walk(8, 3))
        assert each.pictures == 6
    mine = replay.draw(20, 8)
    for each in (read, taken):
        theirs = each.draw(20, 8)
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)
