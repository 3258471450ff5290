"""Slices put together again."""

import dataclasses

import pytest
import torch

from rlinf.runtime.system.system import ActorSystem
from rlinf.training.embodied.trajectories import joined
from tests.actors.programs.control import MLP, collected


async def trajectories(**env):
    async with ActorSystem.local() as system:
        return await collected(system, {**MLP, "chunk": 2}, 4, **env)


def tensors(trajectory):
    chunks = {f.name: getattr(trajectory.chunks, f.name) for f in dataclasses.fields(trajectory.chunks)}
    return {**chunks, **trajectory.stored, "logprobs": trajectory.logprobs, "success": trajectory.success}


@pytest.mark.parametrize("slices", [2, 4])
async def test_slices_in_any_order_are_what_one_slice_would_have_been(slices):
    (whole,) = await trajectories()
    parts = await trajectories(slices=slices)
    found = joined([*parts[1:], parts[0]])
    expected, mine = tensors(whole), tensors(found)
    assert expected["truncated"].any()
    for name, tensor in expected.items():
        assert torch.equal(mine[name], tensor), name
    assert sorted(found.episodes, key=str) == sorted(whole.episodes, key=str)
    assert (found.lost, found.first, found.version) == (0, 0, 0)


async def test_simulations_come_one_after_the_other():
    (part,) = await trajectories()
    second = dataclasses.replace(
        part, rank=1, version=3, lost=2, stored={**part.stored, "state": part.stored["state"] + 9}
    )
    found = joined([second, part])
    assert torch.equal(found.stored["state"], torch.cat([part.stored["state"], second.stored["state"]], 1))
    assert (found.version, found.lost, len(found.episodes)) == (0, 2, 2 * len(part.episodes))


async def test_what_one_part_does_not_know_the_whole_does_not():
    (part,) = await trajectories()
    assert joined([part, dataclasses.replace(part, rank=1, success=None)]).success is None
    free = dataclasses.replace(part.chunks, values=None, next_values=None, final_values=None)
    assert joined([part, dataclasses.replace(part, rank=1, chunks=free)]).chunks.values is None


async def test_trajectories_of_different_lengths_are_refused():
    (part,) = await trajectories()
    shorter = dataclasses.replace(part, rank=1, logprobs=part.logprobs[1:])
    with pytest.raises(ValueError, match=r"\[4, 3\] decisions"):
        joined([part, shorter])
    with pytest.raises(ValueError, match="not one trajectory"):
        joined([])
