"""PPO by stable-baselines3, at the sizes of configs/embodied/cartpole_ppo.yaml.

`python -m benchmarks.peers.sb3_ppo --seed 1 --task CartPole-v1`, in an environment that has requirements-sb3.txt. Its
own networks (two layers of 64 for actor and critic each), its own vector environment in this process, one thread. A
step is a rollout of 16 environments x 64 and 4 epochs of 8 minibatches. Out: one JSON line, see `grpo_job`.
"""

from __future__ import annotations

import argparse

import gymnasium
import stable_baselines3
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv

from benchmarks.peers.grpo_job import Result, Stopwatch

ENVS, HORIZON, EPOCHS, MINIBATCH, LR = 16, 64, 4, 128, 1e-3


class Turns(BaseCallback):
    """A step begins with its rollout, when it is our turn."""

    def __init__(self, watch: Stopwatch, result: Result) -> None:
        super().__init__()
        self._watch, self._result = watch, result

    def _on_rollout_start(self) -> None:
        self._watch.next_step()

    def _on_rollout_end(self) -> None:
        ended = [episode["r"] for episode in self.model.ep_info_buffer]
        self._result.rewards.append(float(sum(ended) / max(len(ended), 1)))

    def _on_step(self) -> bool:
        return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--task", default="CartPole-v1")
    parser.add_argument("--turns", type=int, default=58, help="steps (default: %(default)s)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    envs = DummyVecEnv([lambda: Monitor(gymnasium.make(options.task))] * ENVS)
    model = PPO(
        "MlpPolicy", envs, n_steps=HORIZON, batch_size=MINIBATCH, n_epochs=EPOCHS, seed=options.seed, device="cpu",
        learning_rate=lambda left: LR * left, gamma=0.99, gae_lambda=0.95,
    )  # fmt: skip
    result = Result(version=f"stable-baselines3 {stable_baselines3.__version__}")
    model.learn(ENVS * HORIZON * options.turns, callback=Turns(Stopwatch(result), result))
    result.tell()


if __name__ == "__main__":
    main()
