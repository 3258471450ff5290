"""Demonstrations on disk, and the decisions that are learned from."""

import pytest
import torch

from rlinf.data.demonstrations import Demonstration, Window, decisions, read_demonstrations, write_demonstrations


def shown(length=5, chunk=1, **changes):
    """An episode in which step t sees t, does t + 1 and earns 10 t."""
    steps = torch.arange(length * chunk).view(length, chunk)
    settings = {
        "observation": {"state": torch.arange(length + 1.0)[:, None] * chunk},
        "actions": (steps + 1.0)[..., None],
        "rewards": 10.0 * steps,
        "valid": torch.ones(length, chunk, dtype=torch.bool),
        "terminated": True,
        "success": True,
        "instruction": "go",
    }
    return Demonstration(**{**settings, **changes})


def test_what_was_written_is_read_in_the_order_of_writing(tmp_path):
    assert write_demonstrations(tmp_path, [shown(3), shown(4)]) == 2
    assert write_demonstrations(tmp_path, [shown(5, instruction=None)]) == 1
    found = read_demonstrations(tmp_path)
    assert [len(each.actions) for each in found] == [3, 4, 5]
    assert [each.instruction for each in found] == ["go", "go", None]
    torch.testing.assert_close(found[1].observation["state"], shown(4).observation["state"])
    assert found[1].valid.dtype == torch.bool


def test_failures_are_left_out_unless_asked_for(tmp_path):
    write_demonstrations(tmp_path, [shown(success=False), shown(success=None), shown()])
    assert [each.success for each in read_demonstrations(tmp_path)] == [None, True]
    assert len(read_demonstrations(tmp_path, solved=False)) == 3


def test_an_episode_that_was_not_finished_writing_is_not_read(tmp_path):
    write_demonstrations(tmp_path, [shown(3), shown(4)])
    (tmp_path / "episode_000001.json").unlink()
    assert [len(each.actions) for each in read_demonstrations(tmp_path)] == [3]
    write_demonstrations(tmp_path, [shown(5)])  # nor is it mixed up with what comes after it
    assert [len(each.actions) for each in read_demonstrations(tmp_path)] == [3, 5]


def test_nothing_to_read_says_what_to_do(tmp_path):
    with pytest.raises(FileNotFoundError, match="record"):
        read_demonstrations(tmp_path)
    write_demonstrations(tmp_path, [shown(success=False)])
    with pytest.raises(ValueError, match=r"none.*1 episodes"):
        read_demonstrations(tmp_path)


def test_single_steps_become_a_chunk_from_every_step_on():
    found = decisions([shown(4), shown(2, terminated=False)], 3)
    assert found.observation["state"].flatten().tolist() == [0, 1, 2, 3, 0, 1]
    assert found.following["state"].flatten().tolist() == [3, 4, 4, 4, 2, 2]
    assert found.actions[:4, :, 0].tolist() == [[1, 2, 3], [2, 3, 4], [3, 4, 0], [4, 0, 0]]
    assert found.rewards[:4].tolist() == [[0, 10, 20], [10, 20, 30], [20, 30, 0], [30, 0, 0]]
    assert found.valid.sum(1).tolist() == [3, 3, 2, 1, 2, 1]
    assert found.terminated.tolist() == [False, True, True, True, False, False]
    assert found.instructions == ("go",) * 6


def test_actions_before_a_decision_are_those_of_its_own_episode():
    window = Window([shown(4), shown(2)], 3, before=1)
    found = window.between(0, len(window))
    assert found.actions[..., 0].tolist() == [[0, 1, 2], [1, 2, 3], [2, 3, 4], [3, 4, 0], [0, 1, 2], [1, 2, 0]]
    assert found.valid.sum(1).tolist() == [2, 3, 3, 2, 2, 2]
    assert found.following["state"].flatten().tolist() == [2, 3, 4, 4, 2, 2]


def test_chunks_stay_as_they_were_recorded():
    valid = torch.tensor([[True, True], [True, False]])
    found = decisions([shown(2, chunk=2, valid=valid)], 2)
    assert found.following["state"].flatten().tolist() == [2, 4]
    assert found.actions[..., 0].tolist() == [[1, 2], [3, 0]]
    assert found.valid.tolist() == valid.tolist()
    assert found.terminated.tolist() == [False, True]
    assert decisions([shown(instruction=None)], 1).instructions is None


def test_chunks_of_another_length_are_refused():
    with pytest.raises(ValueError, match=r"2 actions.*decides 3"):
        decisions([shown(2, chunk=2)], 3)


def test_some_decisions_are_chosen_with_all_that_belongs_to_them():
    found = decisions([shown(4)], 2).rows(torch.tensor([3, 0]))
    assert len(found) == 2
    assert found.observation["state"].flatten().tolist() == [3, 0]
    assert found.rewards.tolist() == [[30, 0], [0, 10]]
    assert found.instructions == ("go", "go")


def test_an_episode_must_see_once_more_than_it_acts():
    with pytest.raises(ValueError, match=r"5 chunks.*6 observations"):
        shown(observation={"state": torch.zeros(5, 1)})
