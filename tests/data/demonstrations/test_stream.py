"""Batches drawn from data sets: every decision once an epoch, whatever fits into memory and wherever a run begins."""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf.data.demonstrations import decisions, open_episodes, write_demonstrations
from rlinf.data.demonstrations.episode import About, Episodes
from rlinf.data.demonstrations.stream import DecisionStream, Part, bounded
from tests.data.demonstrations.shown import episode


class Numbered(Episodes):
    """Episodes in memory, whose step t of episode e is 100 e + t; it counts what is read."""

    format = "numbered"

    def __init__(self, lengths, offset=0):
        super().__init__("numbered")
        self.abouts = [About(rows, True, "go") for rows in lengths]
        self.offset, self.reads = offset, Counter()

    def read(self, index, *, pictures=True):
        self.reads[index] += 1
        rows = self.abouts[index].rows
        first = self.offset + 100.0 * index + torch.arange(rows + 1.0)
        actions = first[:-1].view(rows, 1, 1)
        return episode(rows, cameras=0, observation={"state": first[:, None]}, actions=actions, instruction="go")


def part_of(lengths, **changes):
    episodes = Numbered(lengths, changes.pop("offset", 0))
    return Part(episodes, tuple(range(len(lengths))), **changes)


def steps_of(found):
    return found.observation["state"].flatten().tolist()


@settings(max_examples=10, deadline=None)
@given(st.lists(st.integers(1, 7), min_size=1, max_size=6), st.integers(1, 9), st.sampled_from([1, 60, 150, 10**6]))
def test_every_epoch_has_every_decision_once(lengths, batch, memory):
    stream = DecisionStream([part_of(lengths)], 2, batch=batch, seed=3, memory=memory)
    count = sum(lengths)
    assert stream.decisions == count
    drawn = [step for number in range(-(-2 * count // batch)) for step in steps_of(stream.draw(number))]
    everything = sorted(100 * number + step for number, rows in enumerate(lengths) for step in range(rows))
    assert sorted(drawn[:count]) == everything
    assert sorted(drawn[count : 2 * count]) == everything


@settings(max_examples=6, deadline=None)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=5), st.sampled_from([60, 10**6]))
def test_a_batch_follows_from_its_number_alone(asked, memory):
    def fresh():
        parts = [part_of([3, 5, 2], weight=3.0), part_of([4, 1], offset=1000)]
        return DecisionStream(parts, 3, batch=7, seed=1, memory=memory)

    before = fresh()
    for number in asked:
        found, again = before.draw(number), fresh().draw(number)
        assert torch.equal(found.actions, again.actions)
        assert torch.equal(found.observation["state"], again.observation["state"])
        assert torch.equal(found.valid, again.valid)
    assert torch.equal(before.seeds(2), fresh().seeds(2))
    assert len({*before.seeds(2).tolist(), *before.seeds(3).tolist()}) == 14


@settings(max_examples=6, deadline=None)
@given(st.lists(st.floats(0.05, 10), min_size=2, max_size=4), st.integers(12, 20))
def test_each_data_set_has_its_share_of_all_batches(weights, batch):
    parts = [part_of([5], weight=weight, offset=1000 * number) for number, weight in enumerate(weights)]
    stream = DecisionStream(parts, 1, batch=batch)
    counts = Counter()
    for step in range(15):
        drawn = steps_of(stream.draw(step))
        assert len(drawn) == batch
        counts.update(int(value) // 1000 for value in drawn)
        for number, weight in enumerate(weights):
            assert abs(counts[number] - weight / sum(weights) * (step + 1) * batch) <= len(weights)


def test_only_what_fits_is_in_memory_and_it_is_read_once_an_epoch():
    part = part_of([10] * 8)  # 10 decisions of 13 bytes and a little, twice that in a window
    stream = DecisionStream([part], 1, batch=5, memory=300)
    part.episodes.reads.clear()
    for step in range(16):
        stream.draw(step)
    assert part.episodes.reads == dict.fromkeys(range(8), 1)
    assert len(stream._sets[0]._held[0]) == 2
    whole = DecisionStream([part], 1, batch=5, memory=10**6)
    part.episodes.reads.clear()
    for step in range(64):
        whole.draw(step)
    assert part.episodes.reads == dict.fromkeys(range(8), 1)  # four epochs


def test_a_batch_is_cut_as_all_decisions_are(tmp_path):
    shown = [episode(4, seed=1), episode(2, seed=2, terminated=False)]
    write_demonstrations(tmp_path, shown)
    found = DecisionStream([Part(open_episodes(tmp_path), (0, 1))], 3, batch=6).draw(0)
    wanted = decisions(shown, 3)
    place = [wanted.actions[:, 0, 0].tolist().index(value) for value in found.actions[:, 0, 0].tolist()]
    assert sorted(place) == list(range(6))
    wanted = wanted.rows(torch.tensor(place))
    for name in ("actions", "rewards", "valid", "terminated"):
        assert torch.equal(getattr(found, name), getattr(wanted, name))
    assert torch.equal(found.observation["rgb"], wanted.observation["rgb"])
    assert torch.equal(found.following["state"], wanted.following["state"])


def test_actions_are_brought_to_where_policies_act():
    part = part_of([11, 11])  # actions 0 to 10 and 100 to 110
    scaled = bounded(part, "min_max").read(1).actions.flatten()
    torch.testing.assert_close(scaled, torch.linspace(100, 110, 11) / 55 - 1)
    clipped = bounded(part, {"low": [100], "high": [105]}).read(1).actions.flatten()
    torch.testing.assert_close(clipped, (torch.arange(11.0) / 2.5 - 1).clamp(max=1))
    quantiles = bounded(part, "q01_q99").read(0).actions.flatten()
    assert quantiles[0] == -1  # what lies below a quantile is cut off
    assert bounded(part, None) is part
    constant = bounded(part_of([1]), "min_max").read(0)
    assert constant.actions.flatten().tolist() == [0.0]


WRONG = {
    "no bounds": (lambda: bounded(part_of([1]), "std"), "bounds='std' must be min_max or q01_q99"),
    "the wrong way round": (lambda: bounded(part_of([1]), {"low": [1], "high": [0]}), "low must be below high"),
    "of another action": (
        lambda: bounded(part_of([1]), {"low": [0, 0], "high": [1, 1]}).read(0), "1 numbers, and the bounds 2",
    ),
    "too small a batch": (
        lambda: DecisionStream([part_of([3])] * 3, 1, batch=5), "a batch of 5 is too small to mix 3",
    ),
    "nothing": (lambda: DecisionStream([Part(Numbered([1]), ())], 1, batch=1), "no episode to learn from"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_drawn_from_is_refused(name):
    make, told = WRONG[name]
    with pytest.raises(ValueError, match=told):
        make()


def test_data_sets_that_show_other_things_are_refused(tmp_path):
    write_demonstrations(tmp_path, [episode(2)])
    parts = [part_of([3]), Part(open_episodes(tmp_path), (0,))]
    with pytest.raises(ValueError, match=r"show.*same"):
        DecisionStream(parts, 1, batch=4).draw(0)
    write_demonstrations(tmp_path, [episode(2, cameras=0)])
    stream = DecisionStream([Part(open_episodes(tmp_path), (0, 1))], 1, batch=4)
    with pytest.raises(ValueError, match=r"episode 1.*others:.*\[3\] float32"):
        stream.draw(0)


def test_several_observations_are_seen_at_once_within_an_episode():
    found = DecisionStream([part_of([3, 2], frames=2)], 1, batch=5).draw(0)
    pairs = sorted(map(tuple, found.observation["state"].tolist()))
    assert pairs == [(0, 0), (0, 1), (1, 2), (100, 100), (100, 101)]
