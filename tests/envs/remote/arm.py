"""What a user writes to have a robot acted on from far away: numpy alone, as a file of its own."""

import os
import time

import numpy as np


class Arm:
    """A point per environment, which each action moves; it can be told to misbehave."""

    def __init__(self, num_envs, reach=1.0, wrong=None):
        if wrong == "made":
            raise ValueError("there is no arm at this port")
        self.observation_spec = {"state": ((2,), "float32"), "rgb": ((2, 2, 3), "uint8")}
        self.action_low, self.action_high = [-1.0, -2.0], [1.0, 2.0]
        self.max_steps = 5
        self.wrong = wrong
        self.reach = reach
        self.task = np.zeros(num_envs, np.int64)
        self.place = np.zeros((num_envs, 2), np.float32)
        print("an arm that talks on its standard output")  # which must not disturb the frames

    def seen(self, rows):
        rgb = np.repeat(rows[:, :1].astype(np.uint8), 12, 1).reshape(-1, 2, 2, 3)
        return {"state": rows.copy(), "rgb": rgb}

    def reset(self, seeds, env_ids):
        self.place[env_ids] = np.stack([seeds % 7, seeds % 5], 1)
        self.task[env_ids] = seeds
        return self.seen(self.place[env_ids])

    def step(self, actions, active):
        if self.wrong == "dies" and (self.place > 90).any():
            os._exit(7)
        if self.wrong == "hangs":
            time.sleep(60)
        if self.wrong == "raises":
            raise RuntimeError("the gripper is too hot")
        self.place[active] += actions[active]
        far = np.abs(self.place).max(1) > 100 * self.reach
        still = np.zeros(len(far), bool)
        return {
            "observation": self.seen(self.place),
            "reward": -self.place[:, 0],
            "terminated": far,
            "truncated": still,
            "success": far,
        }

    def instructions(self):
        return [f"do {task}" for task in self.task]

    def save(self):
        odd = {"raw": b"\x00\xff", "#odd": [1, 2.5, None]}
        return [{"place": row.copy(), "task": task, **odd} for row, task in zip(self.place, self.task, strict=True)]

    def restore(self, states, env_ids):
        assert all(state["raw"] == b"\x00\xff" and state["#odd"] == [1, 2.5, None] for state in states)
        self.place[env_ids] = [state["place"] for state in states]
        self.task[env_ids] = [state["task"] for state in states]
