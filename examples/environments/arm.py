"""A simulated arm of two joints, served as a robot would be: `serve.py --make arm.py:Arm`. It reaches for a target.

Where no action comes within `hold_after` seconds, it holds. `link` makes every answer so many seconds late, as a slow
network does.
"""

import time

import numpy as np


class Arm:
    """Angles move by actions in radians; rewards are minus the distance of the hand from the target."""

    def __init__(self, num_envs, hold_after=1.0, most_change=0.1, link=0.0):
        self.observation_spec = {"state": ((6,), "float32")}  # sines and cosines of two angles, and the way to go
        self.action_low, self.action_high = [-0.2, -0.2], [0.2, 0.2]
        self.max_steps = 30
        self.hold_after, self.most_change = hold_after, [most_change] * 2
        self.link = link
        self.angles, self.target = np.zeros((num_envs, 2)), np.zeros((num_envs, 2))
        self.speed = np.zeros((num_envs, 2))

    def way(self):
        """From the hand to the target."""
        one, both = self.angles[:, 0], self.angles.sum(1)
        return self.target - np.stack([np.cos(one) + np.cos(both), np.sin(one) + np.sin(both)], 1)

    def seen(self):
        self.taken = time.monotonic()
        time.sleep(self.link)
        return np.concatenate([np.sin(self.angles), np.cos(self.angles), self.way()], 1).astype(np.float32)

    def reset(self, seeds, env_ids):
        for place, env in enumerate(env_ids):
            draw = np.random.RandomState(seeds[place] % 2**32)
            radius, turn = draw.uniform(0.5, 1.8), draw.uniform(-np.pi, np.pi)
            self.target[env] = radius * np.cos(turn), radius * np.sin(turn)
            self.angles[env] = draw.uniform(-1, 1, 2)
        self.speed[env_ids] = 0
        return {"state": self.seen()[env_ids]}

    def step(self, actions, active):
        self.speed[active] = actions[active]
        self.angles += self.speed
        far = np.linalg.norm(self.way(), axis=1)
        return {
            "observation": {"state": self.seen()},
            "reward": (-far).astype(np.float32),
            "terminated": far < 0.15,
            "truncated": np.zeros(len(far), bool),
            "success": far < 0.15,
        }

    def hold(self):
        self.speed[:] = 0
