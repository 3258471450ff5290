"""PPO by stable-baselines3, at the sizes of configs/embodied/cartpole_ppo.yaml.

`python -m benchmarks.peers.sb3_ppo --seed 1 --task CartPole-v1`, in an environment that has requirements-sb3.txt. Its
own networks (two layers of 64 for actor and critic each), its own vector environment in this process, one thread. A
step is a rollout of 16 environments x 64 and 4 epochs of 8 minibatches; with `--continuous` the sizes are those of
`benchmarks.embodied_cartpole --continuous`, and its `VecNormalize` scales observations and rewards. Out: one JSON line,
see `grpo_job`; with `--judge` a second one, the mean return of the likeliest actions.
"""

from __future__ import annotations

import argparse

import gymnasium
import stable_baselines3
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

from benchmarks.peers.grpo_job import Result, Stopwatch

ENVS, LR = 16, 1e-3
EQUAL = {"n_steps": 64, "batch_size": 128, "n_epochs": 4}
CONTINUOUS = {"n_steps": 128, "batch_size": 128, "n_epochs": 5}


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
    parser.add_argument("--continuous", action="store_true", help="sizes for actions of real numbers, and scales")
    parser.add_argument("--judge", type=int, default=0, help="episodes of the likeliest actions at the end")
    options = parser.parse_args()
    torch.set_num_threads(1)

    def envs(count: int) -> DummyVecEnv:
        return DummyVecEnv([lambda: Monitor(gymnasium.make(options.task))] * count)

    sizes = CONTINUOUS if options.continuous else EQUAL
    learned = VecNormalize(envs(ENVS), gamma=0.99) if options.continuous else envs(ENVS)
    model = PPO(
        "MlpPolicy", learned, seed=options.seed, device="cpu", learning_rate=lambda left: LR * left,
        gamma=0.99, gae_lambda=0.95, **sizes,
    )  # fmt: skip
    result = Result(version=f"stable-baselines3 {stable_baselines3.__version__}")
    model.learn(ENVS * sizes["n_steps"] * options.turns, callback=Turns(Stopwatch(result), result))
    result.tell()
    if options.judge:
        judges = envs(options.judge)
        if options.continuous:
            judges = VecNormalize(judges, training=False, norm_reward=False)
            judges.obs_rms = learned.obs_rms
        judges.seed(options.seed + 1_000_000)
        mean, _ = evaluate_policy(model, judges, n_eval_episodes=options.judge, warn=False)
        print(f"mean return of {options.judge} episodes: {mean:.1f}")


if __name__ == "__main__":
    main()
