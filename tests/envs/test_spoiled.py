"""An episode with a number that is not finite is dropped, named and counted; the others do not notice."""

from __future__ import annotations

import logging

import pytest
import torch

from rlinf.envs.environment import MOST_STARTS, Environment, Rules, not_finite
from rlinf.envs.toy import Reach
from rlinf.envs.workers import MOST_LOSSES, EnvironmentLost, EnvironmentPool, Processes
from tests.envs.breaking import NotFinite


def still(count, actions=2):
    """Actions that move nothing, so that no episode ends by itself."""
    return torch.zeros(count, actions, 1)


def played(simulator, chunks=2, actions=None, **rules):
    environment = Environment(simulator, Rules(**rules))
    environment.reset(3)
    return [environment.step(still(simulator.num_envs) if actions is None else actions) for _ in range(chunks)]


@pytest.mark.parametrize("spoils", ["reward", "observation"])
def test_one_number_costs_the_episode_of_its_environment_alone(spoils):
    chunk = played(NotFinite(4, spoils=spoils, at=[2]))[0]
    assert chunk.lost.tolist() == [True, False, False, False]
    assert not chunk.valid[0].any()
    assert chunk.valid[1:].all()
    assert torch.isfinite(chunk.rewards).all()
    assert torch.isfinite(chunk.observation["state"]).all()
    assert (chunk.episode.tolist(), chunk.next_episode.tolist()) == ([0, 0, 0, 0], [1, 0, 0, 0])
    whole = played(Reach(4))[0]
    assert torch.equal(chunk.rewards[1:], whole.rewards[1:])


def test_the_remark_names_environment_seed_episode_and_step():
    environment = Environment(NotFinite(2, at=[2]), Rules(seed=5), first=6)
    environment.reset(3)
    (remark,) = environment.step(still(2)).remarks
    seed = environment.seed_of(0, 0)
    assert remark.startswith(f"environment 6, seed {seed} (")
    assert "3, episode 0, step 2): " in remark


def test_an_action_that_is_not_finite_is_not_done():
    actions = still(3)
    actions[1, 1] = torch.nan
    simulator = NotFinite(3)
    (chunk,) = played(simulator, 1, actions)
    assert chunk.lost.tolist() == [False, True, False]
    assert "its action " in chunk.remarks[0]
    assert simulator._done == 2  # the others did both


def test_a_group_stays_alike():
    chunk = played(NotFinite(4, at=[1]), 1, group_size=2)[0]
    assert chunk.lost.tolist() == [True, True, False, False]
    assert chunk.next_episode.tolist() == [1, 1, 0, 0]
    assert torch.equal(chunk.observation["state"][0], chunk.observation["state"][1])
    assert len(chunk.remarks) == 1


def test_a_start_is_passed_over_and_too_many_in_a_row_are_told():
    chunk = played(NotFinite(2, spoils="start", at=[0, 1]), 1)[0]
    assert chunk.episode.tolist() == [2, 0]
    assert ["its state " in remark for remark in chunk.remarks] == [True, True]
    assert not chunk.lost.any()
    with pytest.raises(ValueError, match=rf"NotFinite.reset\(\), {MOST_STARTS} times .*environment 0, seed"):
        played(NotFinite(2, spoils="start", at=range(99)))


def test_rows_are_found_in_any_floating_array():
    arrays = {"whole": torch.ones(3, dtype=torch.uint8), "flat": torch.tensor([1.0, torch.nan, 0.0])}
    assert not_finite(arrays | {"flat": torch.tensor([1e38, 3e38, 3e38])}) is None  # only their sum is infinite
    picture = torch.zeros(3, 2, 2)
    picture[2, 1, 0] = -torch.inf
    found = not_finite(arrays | {"depth": picture})
    assert found is not None
    assert found.tolist() == [False, True, True]


async def test_each_is_told_with_its_worker_and_an_environment_that_never_ends_one_ends_the_run(caplog):
    caplog.set_level(logging.WARNING)
    options = {"at": range(99)}
    async with EnvironmentPool(NotFinite, options, num_envs=2, workers=0, processes=Processes("arm")) as pool:
        (whole,) = pool.slices
        await whole.reset()
        for _ in range(MOST_LOSSES):
            await whole.step(still(2, 1))
        assert len(caplog.records) == MOST_LOSSES
        assert caplog.records[0].getMessage().endswith(", in arm")
        with pytest.raises(EnvironmentLost, match=f"environment 0.*{MOST_LOSSES + 1} episodes"):
            await whole.step(still(2, 1))
