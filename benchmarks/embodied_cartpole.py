"""PPO on CartPole in a plain loop, beside which `benchmarks.embodied` puts configs/embodied/cartpole_ppo.yaml.

`python -m benchmarks.embodied_cartpole --seed 1`. The structure, the sizes and the hyperparameters are those that
cleanrl publishes for `ppo.py`: 4 environments in this process, 128 steps each, then 4 epochs of 4 minibatches with
Adam, whose learning rate falls to 0; separate networks of two layers of 64 for actor and critic. Only the steps in all
are fewer, so that the learning rate falls within them. `--equal` takes the batches of our configuration instead: 16
environments, 64 steps, 4 epochs of 8 minibatches; `--task` another task, of choices or, as cleanrl's
`ppo_continuous_action.py`, of real numbers. `--continuous` takes sizes for those, with running scales of
observations and rewards, as that file has them. In: a seed. Out: one JSON line, see `peers.grpo_job`, whose rewards
are mean returns of the episodes that ended in each step.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers.utils import RunningMeanStd
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution, Independent, Normal

from benchmarks.peers.grpo_job import Result, Stopwatch

ADAM_EPS, GRAD_CLIP = 1e-5, 0.5
GAMMA, LAM, CLIP, VALUE_COEF = 0.99, 0.95, 0.2, 0.5
SCALED_CLIP = 10.0
"""Bound of scaled observations and rewards, as in `ppo_continuous_action.py`."""
TASK = "CartPole-v1"


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is collected, and learned at a time."""

    envs: int = 4
    horizon: int = 128
    """Steps of each environment in a step of the loop."""
    minibatches: int = 4
    """In each epoch."""
    lr: float = 2.5e-4
    """First learning rate."""
    epochs: int = 4
    entropy_coef: float = 0.01
    scaled: bool = False
    """Observations and rewards are divided by their running deviation."""
    task: str = TASK

    @property
    def step(self) -> int:
        """Environment steps of a step of the loop."""
        return self.envs * self.horizon


STEP = Sizes().step
EQUAL = Sizes(envs=16, horizon=64, minibatches=8, lr=1e-3)
"""Those of configs/embodied/cartpole_ppo.yaml."""
CONTINUOUS = Sizes(envs=16, horizon=128, minibatches=16, lr=1e-3, epochs=5, entropy_coef=0.0, scaled=True)
"""As many steps as `ppo_continuous_action.py` has, in 16 environments instead of one, with a quarter of its minibatches
and three times its learning rate, so that a run takes a minute of one core."""


def layers(inputs: int, outputs: int, gain: float) -> nn.Sequential:
    """Two hidden layers of 64, with orthogonal first weights; `gain` is the last layer's."""
    network = nn.Sequential(nn.Linear(inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs))
    for layer, scale in ((network[0], 2**0.5), (network[2], 2**0.5), (network[4], gain)):
        nn.init.orthogonal_(layer.weight, scale)
        nn.init.zeros_(layer.bias)
    return network


@dataclass(frozen=True, slots=True)
class Horizon:
    """Rollout of one step, [horizon, envs] each, observations [horizon, envs, S]."""

    observations: Tensor
    actions: Tensor
    logprobs: Tensor
    values: Tensor
    rewards: Tensor
    begins: Tensor
    """1 where an observation is the first of an episode."""

    def flat(self) -> list[Tensor]:
        """Observations, actions, log-probs and values, decision by decision."""
        return [each.flatten(0, 1) for each in (self.observations, self.actions, self.logprobs, self.values)]


class Scales:
    """Running scales of observations and rewards; gymnasium's wrappers of vectors refuse autoreset in the same step."""

    def __init__(self, inputs: int, envs: int) -> None:
        self._seen, self._returns = RunningMeanStd(shape=(inputs,)), RunningMeanStd(shape=())
        self._return = np.zeros(envs)

    def observed(self, seen: np.ndarray[Any, Any], learn: bool = True) -> np.ndarray[Any, Any]:
        """Observations, [envs, S], less their mean, by their deviation."""
        if learn:
            self._seen.update(seen)
        scaled = (seen - self._seen.mean) / np.sqrt(self._seen.var + 1e-8)
        return np.clip(scaled, -SCALED_CLIP, SCALED_CLIP)

    def rewarded(self, rewards: np.ndarray[Any, Any], over: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Rewards, [envs], by the deviation of discounted returns."""
        self._return = self._return * GAMMA + rewards
        self._returns.update(self._return)
        self._return[over] = 0.0
        return np.clip(rewards / np.sqrt(self._returns.var + 1e-8), -SCALED_CLIP, SCALED_CLIP)


class Loop:
    """Collect, then learn.

    Args:
        seed: of everything that is drawn.
        steps: after which the learning rate is 0.
        sizes: of the batches.
    """

    def __init__(self, seed: int, steps: int, sizes: Sizes) -> None:
        torch.manual_seed(seed)
        self._order = np.random.default_rng(seed)
        self._steps, self._sizes = steps, sizes
        self._envs = _vector(sizes.task, sizes.envs)
        space = self._envs.single_action_space
        self._real = isinstance(space, gymnasium.spaces.Box)
        (inputs,), outputs = self._envs.single_observation_space.shape, space.shape[0] if self._real else int(space.n)
        self.actor, self.critic = layers(inputs, outputs, 0.01), layers(inputs, 1, 1.0)
        self.log_std = nn.Parameter(torch.zeros(outputs))
        own = [self.log_std] if self._real else []
        self._parameters = [*self.actor.parameters(), *self.critic.parameters(), *own]
        self._optimizer = torch.optim.Adam(self._parameters, lr=sizes.lr, eps=ADAM_EPS)
        self._scales = Scales(inputs, sizes.envs) if sizes.scaled else None
        first, _ = self._envs.reset(seed=[seed * sizes.envs + number for number in range(sizes.envs)])
        self._seen, self._begins = self.observed(first), torch.ones(sizes.envs)

    def observed(self, seen: np.ndarray[Any, Any], learn: bool = True) -> Tensor:
        """Observations as the networks take them, [envs, S]; with `learn` a running scale takes them in."""
        return torch.from_numpy(self._scales.observed(seen, learn) if self._scales else seen).float()

    def drawn(self, seen: Tensor) -> Distribution:
        """The distributions of actions."""
        if self._real:
            return Independent(Normal(self.actor(seen), self.log_std.exp()), 1)
        return Categorical(logits=self.actor(seen))

    def allowed(self, actions: Tensor) -> np.ndarray[Any, Any]:
        """The actions as the task takes them: real ones within its bounds."""
        space = self._envs.single_action_space
        return np.clip(actions.numpy(), space.low, space.high) if self._real else actions.numpy()

    def likeliest(self, seen: Tensor) -> Tensor:
        """The likeliest actions."""
        return self.actor(seen) if self._real else self.actor(seen).argmax(-1)

    def step(self, index: int) -> float:
        """One step; the mean return of the episodes that ended in it, 0 if none did."""
        self._optimizer.param_groups[0]["lr"] = self._sizes.lr * (1 - index / self._steps)
        found, ended = self._collect()
        advantages = self._advantages(found)
        self._learn(found, advantages)
        return float(np.mean(ended)) if ended else 0.0

    @torch.no_grad()
    def _collect(self) -> tuple[Horizon, list[float]]:
        rows: list[tuple[Tensor, ...]] = []
        ended: list[float] = []
        for _ in range(self._sizes.horizon):
            drawn = self.drawn(self._seen)
            action, value = drawn.sample(), self.critic(self._seen)[:, 0]
            seen, reward, terminated, truncated, info = self._envs.step(self.allowed(action))
            over = terminated | truncated
            given = torch.from_numpy(self._scales.rewarded(reward, over) if self._scales else reward).float()
            rows.append((self._seen, action, drawn.log_prob(action), value, given, self._begins))
            if over.any():
                ended += info["final_info"]["episode"]["r"][over].tolist()
            self._seen, self._begins = self.observed(seen), torch.from_numpy(over).float()
        return Horizon(*(torch.stack(each) for each in zip(*rows, strict=True))), ended

    @torch.no_grad()
    def _advantages(self, found: Horizon) -> Tensor:
        """Generalised advantages (arXiv:1506.02438, eq. 16); an episode that its time limit cuts counts as over."""
        advantages = torch.zeros_like(found.rewards)
        value, goes_on, after = self.critic(self._seen)[:, 0], 1 - self._begins, torch.zeros(self._sizes.envs)
        for time in reversed(range(self._sizes.horizon)):
            error = found.rewards[time] + GAMMA * value * goes_on - found.values[time]
            advantages[time] = after = error + GAMMA * LAM * goes_on * after
            value, goes_on = found.values[time], 1 - found.begins[time]
        return advantages

    def _learn(self, found: Horizon, advantages: Tensor) -> None:
        observations, actions, logprobs, values = found.flat()
        advantages = advantages.flatten()
        returns = advantages + values
        for _ in range(self._sizes.epochs):
            for rows in np.split(self._order.permutation(self._sizes.step), self._sizes.minibatches):
                drawn, new = self.drawn(observations[rows]), self.critic(observations[rows])[:, 0]
                ratio = (drawn.log_prob(actions[rows]) - logprobs[rows]).exp()
                gain = advantages[rows]
                gain = (gain - gain.mean()) / (gain.std() + 1e-8)
                policy_loss = torch.max(-gain * ratio, -gain * ratio.clamp(1 - CLIP, 1 + CLIP)).mean()
                held = values[rows] + (new - values[rows]).clamp(-CLIP, CLIP)
                errors = torch.max((new - returns[rows]) ** 2, (held - returns[rows]) ** 2)
                loss = (
                    policy_loss - self._sizes.entropy_coef * drawn.entropy().mean() + VALUE_COEF * 0.5 * errors.mean()
                )
                self._optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(self._parameters, GRAD_CLIP)
                self._optimizer.step()


@torch.no_grad()
def judged(loop: Loop, task: str, episodes: int, seed: int) -> float:
    """Mean return of the likeliest actions over some episodes of other starts."""
    envs = _vector(task, episodes)
    seen, _ = envs.reset(seed=[seed + 1_000_000 + number for number in range(episodes)])
    total, going = np.zeros(episodes), np.ones(episodes, bool)
    while going.any():
        actions = loop.allowed(loop.likeliest(loop.observed(seen, learn=False)))
        seen, reward, terminated, truncated, _ = envs.step(actions)
        total += reward * going
        going &= ~(terminated | truncated)
    return float(total.mean())


def _vector(task: str, count: int) -> SyncVectorEnv:
    return SyncVectorEnv([partial(_made, task)] * count, autoreset_mode=AutoresetMode.SAME_STEP)


def _made(task: str) -> gymnasium.Env[Any, Any]:
    return gymnasium.wrappers.RecordEpisodeStatistics(gymnasium.make(task))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1, help="of everything that is drawn (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=117, help="of the loop (default: %(default)s)")
    parser.add_argument("--turns", type=int, help="end after so many of them (default: all)")
    parser.add_argument("--judge", type=int, default=0, help="episodes of the likeliest actions at the end")
    parser.add_argument("--equal", action="store_true", help="batches as in cartpole_ppo.yaml")
    parser.add_argument("--continuous", action="store_true", help="sizes for actions of real numbers")
    parser.add_argument("--task", default=TASK, help="gymnasium's name (default: %(default)s)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    result = Result(version=f"torch {torch.__version__}")
    sizes = replace(CONTINUOUS if options.continuous else EQUAL if options.equal else Sizes(), task=options.task)
    loop, watch = Loop(options.seed, options.steps, sizes), Stopwatch(result)
    for index in range(options.turns or options.steps):
        watch.next_step()
        result.rewards.append(loop.step(index))
    result.tell()
    if options.judge:
        mean = judged(loop, options.task, options.judge, options.seed)
        print(f"mean return of {options.judge} episodes: {mean:.1f}")


if __name__ == "__main__":
    main()
