"""World models: networks that predict what a simulator would show next and reward, and whether it would end.

Recorded transitions in; observations, rewards and ends of episodes out, which nobody simulated. `envs/learned.py` makes
simulators of them and says what a world model has; `actors/world_trainer.py` teaches them. `EnsembleWorld` is ours for
small states: several networks that learn from other draws of the same transitions and disagree where they know little.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from rlinf.algos.loss_sum import LossSum, Mean
from rlinf.data.rng import ONE_AT_A_TIME, mix, uniforms

Latent = dict[str, Tensor]
"""All that a world model knows of N episodes between two steps, N rows in every tensor."""
_LEAST_SCALE = 1e-3
"""Least standard deviation that something is divided by: what hardly ever changes is not blown up."""
_FAR = 8.0
"""Standard deviations at which inputs and what is learned are cut off: a number that hardly ever changed would be
enormous when it does, and one such transition would outweigh all others."""
_MARGIN = 0.1
"""Share of the range of recorded states, and of rewards, by which predictions may leave it: beyond it nothing was ever
seen, and errors that feed on themselves go there."""


class EnsembleWorld(nn.Module):
    """Networks that predict the state's change, the reward and the end (ME-TRPO, arXiv:1802.10592).

        s' = s + f_i(s, a),   r = g_i(s, a) - penalty * disagreement(s, a),   end: h_i(s, a) > 0

    with the member i drawn anew for every step of every episode, from the episode's seed. Episodes begin in recorded
    states (short branches of MBPO, arXiv:1906.08253). Disagreement is the standard deviation of the members'
    predictions, each on the scale of what it predicts, in the mean over the numbers of the state and the reward; it
    stands in for the error that nobody knows (MOPO, arXiv:2005.13239, section 4.2).

    Args:
        state_size: numbers of the observation's "state", S.
        action_size: numbers of an action, A.
        members: networks, K.
        hidden: sizes of each one's hidden layers.
        places: recorded states that episodes begin in.
        penalty: weight of the disagreement in the reward, in the reward's own standard deviations.
        seed: of the first weights.
    """

    looks_at = ("state",)
    starts: Tensor
    """Recorded states that episodes begin in, float32 [places, S]."""
    state_mean: Tensor
    state_scale: Tensor
    state_low: Tensor
    state_high: Tensor
    change_mean: Tensor
    change_scale: Tensor
    reward_mean: Tensor
    reward_scale: Tensor
    reward_low: Tensor
    reward_high: Tensor

    def __init__(
        self,
        state_size: int,
        action_size: int,
        *,
        members: int = 5,
        hidden: Sequence[int] = (128, 128),
        places: int = 1024,
        penalty: float = 0.0,
        seed: int = 0,
    ):
        super().__init__()
        if min(members, places, *hidden) < 1:
            raise ValueError(f"world: members={members}, places={places} and hidden={[*hidden]} must be at least 1")
        self.state_size, self.action_size, self.members, self.penalty = state_size, action_size, members, penalty
        self.shows = {"state": ((state_size,), torch.float32)}
        sizes = (state_size + action_size, *hidden, state_size + 2)
        with ONE_AT_A_TIME, torch.random.fork_rng(devices=[]):
            torch.manual_seed(mix(seed))
            pairs = list(itertools.pairwise(sizes))
            self.weights = nn.ParameterList(
                torch.randn(members, fan_in, fan_out) / math.sqrt(fan_in) for fan_in, fan_out in pairs
            )
            self.biases = nn.ParameterList(torch.zeros(members, 1, fan_out) for _, fan_out in pairs)
        for name, size in (("state", state_size), ("change", state_size), ("reward", 1)):
            self.register_buffer(f"{name}_mean", torch.zeros(size))
            self.register_buffer(f"{name}_scale", torch.ones(size))
        for name, size in (("state", state_size), ("reward", 1)):
            self.register_buffer(f"{name}_low", torch.full((size,), -math.inf))
            self.register_buffer(f"{name}_high", torch.full((size,), math.inf))
        self.register_buffer("starts", torch.zeros(places, state_size))

    def begin(self, seeds: Tensor) -> tuple[Latent, dict[str, Tensor]]:
        """Begin episodes in recorded states.

        Args:
            seeds: one per episode, int64 [n], on the model's device.

        Returns:
            What is known of them, and their first observations.
        """
        starts = self.starts
        state = starts[_choices(seeds, len(starts))]
        return {"state": state}, {"state": state}

    def advance(
        self, latent: Latent, actions: Tensor, seeds: Tensor
    ) -> tuple[Latent, dict[str, Tensor], Tensor, Tensor, Tensor | None]:
        """Predict one step.

        Args:
            latent: of N episodes.
            actions: in [-1, 1], float32 [N, A].
            seeds: of what is drawn in this step, one per episode, int64 [N].

        Returns:
            What is known after it; observations; rewards, float32 [N]; where the task ended, bool [N]; and where it is
            solved: None, since nobody told this model.
        """
        change, reward, end = self(latent["state"], actions)
        apart = torch.cat([change, reward[..., None]], -1).std(0, correction=0).mean(-1)  # on the scale of each
        row = torch.arange(len(actions), device=actions.device)
        member = _choices(seeds, self.members)
        moved = latent["state"] + change[member, row] * self.change_scale + self.change_mean
        state = torch.minimum(torch.maximum(moved, self.state_low), self.state_high)
        earned = reward[member, row] * self.reward_scale + self.reward_mean
        earned = torch.minimum(torch.maximum(earned, self.reward_low), self.reward_high)
        earned = earned - self.penalty * self.reward_scale * apart
        return {"state": state}, {"state": state}, earned, end[member, row] > 0, None

    def forward(self, states: Tensor, actions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Predictions of every member, on the scale of each: changes of the state [K, N, S], rewards [K, N], and the
        log-odds of an end [K, N].

        Args:
            states: [N, S], or of each member [K, N, S].
            actions: in [-1, 1], as many.
        """
        scaled = ((states - self.state_mean) / self.state_scale).clamp(-_FAR, _FAR)
        rows = torch.cat([scaled, actions.clamp(-1.0, 1.0)], -1)
        hidden = rows.expand(self.members, *rows.shape[-2:])
        for number, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            hidden = torch.baddbmm(bias, hidden, weight)
            hidden = nn.functional.silu(hidden) if number + 1 < len(self.weights) else hidden
        return hidden[..., :-2], hidden[..., -2], hidden[..., -1]

    def loss(self, rows: Mapping[str, Tensor]) -> LossSum:
        """Squared errors on the scale of what is predicted, in the mean over the state's numbers, plus that of the
        reward, plus the cross-entropy of ends; a sum over members and transitions.

        Args:
            rows: transitions of each member, [K, B, ...]: `state`, `actions`, `following.state`, `reward` and
                `terminated`.
        """
        change, reward, end = self(rows["state"], rows["actions"])
        moved = (rows["following.state"] - rows["state"] - self.change_mean) / self.change_scale
        earned = (rows["reward"] - self.reward_mean) / self.reward_scale
        of_state = (change - moved.clamp(-_FAR, _FAR)).square().mean(-1)
        of_reward = (reward - earned.clamp(-_FAR, _FAR)).square()
        of_end = nn.functional.binary_cross_entropy_with_logits(end, rows["terminated"].float(), reduction="none")
        weight = torch.tensor(of_state.numel(), dtype=torch.float64, device=of_state.device)
        parts = {"state_error": of_state, "reward_error": of_reward, "end_error": of_end}
        return LossSum(
            (of_state + of_reward + of_end).sum(),
            weight,
            {name: Mean(part.detach().double().sum(), weight) for name, part in parts.items()},
        )

    @torch.no_grad()
    def measure(self, rows: Mapping[str, Tensor]) -> None:
        """Take over the scales and the range of recorded transitions, and states to begin in.

        Args:
            rows: transitions, [R, ...], drawn evenly from all that there are.
        """
        change = rows["following.state"] - rows["state"]
        reward = rows["reward"][:, None]
        states = torch.cat([rows["state"], rows["following.state"]])
        for name, values in (("state", states), ("change", change), ("reward", reward)):
            getattr(self, f"{name}_mean").copy_(values.mean(0))
            getattr(self, f"{name}_scale").copy_(values.std(0, correction=0).clamp(min=_LEAST_SCALE))
        for name, values in (("state", states), ("reward", reward)):
            low, high = values.amin(0), values.amax(0)
            getattr(self, f"{name}_low").copy_(low - _MARGIN * (high - low))
            getattr(self, f"{name}_high").copy_(high + _MARGIN * (high - low))
        starts = self.starts
        starts.copy_(rows["state"][torch.arange(len(starts), device=starts.device) % len(rows["state"])])


def _choices(seeds: Tensor, count: int) -> Tensor:
    """One of so many for each seed, int64 [n]."""
    first = torch.zeros((), dtype=torch.int64, device=seeds.device)
    return (uniforms(seeds, first) * count).long().clamp(max=count - 1)
