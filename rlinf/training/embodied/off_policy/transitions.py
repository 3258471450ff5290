"""Trajectories as transitions: rows of a replay buffer, over one decision or several, of all episodes or of good ones.

In: trajectories that say what followed each decision. Out: rows, in the order of time and then of environment. Nobody
waits here; all of it is computation.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from rlinf.training.embodied.off_policy.replay_buffer import Rows
from rlinf.training.embodied.trajectory import Trajectory, in_order, joined


def transitions(parts: Sequence[Trajectory], *, n_step: int = 1, solved_only: bool = False) -> tuple[Trajectory, Rows]:
    """Several slices as one, and their transitions, in the order of time and then of environment.

    Args:
        parts: of all slices, in any order, with `following`.
        n_step: decisions that a transition spans, unless its episode or the trajectory ends before.
        solved_only: leave out episodes that were not solved, or did not end in this trajectory.

    Returns:
        All trajectories in one, and for the R chunks of which anything was done: `seen.*`, the policy's inputs; and
        `actions`, in its own terms; `following.*`; `rewards` of each action, 0 where it was not done, float32
        [R, n_step x C]; `steps`, how many were done, int64 [R]; `terminated`, bool [R].

    Raises:
        ValueError: there are none, they are of different lengths, or do not say what followed; or nobody says which
            episodes were solved.
    """
    whole = joined(parts)
    if whole.following is None:
        raise ValueError(
            "train: trajectories do not say what followed each decision: spawn the PolicyActor with keep_following=True"
        )
    chunks = whole.chunks
    valid = chunks.valid.bool()
    done = valid.any(-1)
    kept = done & torch.cat([_in_solved(part) for part in in_order(parts)], 1) if solved_only else done
    rows = {f"seen.{name}": stored for name, stored in whole.stored.items() if name != "actions"}
    rows["actions"] = whole.stored["actions"]
    outcome = {f"following.{name}": stored for name, stored in whole.following.items()}
    outcome["rewards"] = torch.where(valid, chunks.rewards, 0.0).float()
    outcome["steps"] = valid.sum(-1)
    outcome["terminated"] = (chunks.terminated.bool() & valid).any(-1)
    ended = ((chunks.terminated | chunks.truncated).bool() & valid).any(-1)
    rows |= several_steps(outcome, ended | ~done, n_step)
    return whole, {name: tensor[kept] for name, tensor in rows.items()}


def several_steps(outcome: Rows, last: Tensor, count: int) -> Rows:
    """What several decisions in a row came to, for every decision that they begin with.

        R_t = sum over k < n of gamma^(steps before k) r_(t + k), then bootstrapped with what followed the n-th

    (arXiv:1710.02298, section 3.) A chunk that is not the last of its episode is done whole, so rewards in a row are in
    the places that their discounts follow from.

    Args:
        outcome: `rewards` [T, N, C], `steps` and `terminated` [T, N], and `following.*` [T, N, ...].
        last: nothing of the same episode follows, bool [T, N].
        count: decisions, n; fewer where an episode or the trajectory ends before.

    Returns:
        The same names; `rewards` [T, N, n x C].
    """
    if count == 1:
        return outcome
    times, environments = last.shape
    at = torch.arange(times)[:, None].expand(times, environments).clone()  # the decision that is taken in next
    alive = torch.ones_like(last)
    end, column = at.clone(), torch.arange(environments).expand(times, environments)
    rewards, steps = [], torch.zeros_like(outcome["steps"])
    for _ in range(count):
        here = at.clamp(max=times - 1)
        rewards.append(torch.where(alive[..., None], outcome["rewards"][here, column], 0.0))
        steps += torch.where(alive, outcome["steps"][here, column], 0)
        end = torch.where(alive, here, end)
        alive = alive & ~last[here, column] & (at + 1 < times)
        at = at + 1
    found = {name: rows[end, column] for name, rows in outcome.items()}
    return {**found, "rewards": torch.cat(rewards, -1), "steps": steps}


def _in_solved(part: Trajectory) -> Tensor:
    """Which decisions belong to episodes that ended here and were solved, bool [T, N]."""
    ended = ((part.chunks.terminated | part.chunks.truncated) & part.chunks.valid).bool().any(-1)
    solved: dict[int, list[bool]] = defaultdict(list)
    for episode in part.episodes:  # in each environment in the order of time
        if episode.success_once is None:
            raise ValueError("train: only solved episodes are to be kept, and the simulator does not say which are")
        solved[episode.env - part.first].append(episode.success_once)
    number = ended.long().cumsum(0) - ended.long()  # episodes that ended before
    found = torch.zeros_like(ended)
    for env, outcomes in solved.items():
        known = torch.tensor([*outcomes, False])  # the last one goes on
        found[:, env] = known[number[:, env].clamp(max=len(outcomes))]
    return found
