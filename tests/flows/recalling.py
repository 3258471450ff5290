"""A task that nobody solves who does not remember: what was shown at the beginning is asked for at the end."""

import torch

from rlinf.envs.base import ActionSpec, ArraySpec, Simulator, Transition
from rlinf.models.policy.build import fitted

LENGTH = 4
"""Steps of an episode."""


class Recall(Simulator):
    """The first observation shows 1 or -1, the others 0. The last action earns 1 if it is the choice that was shown."""

    def __init__(self, num_envs):
        self.num_envs, self.max_steps = num_envs, None
        self.observation_spec = {"state": ArraySpec((2,), torch.float32)}
        self.action_spec = ActionSpec(-torch.ones(1), torch.ones(1), (2,))
        self._cue, self._at = torch.zeros(num_envs), torch.zeros(num_envs)

    def reset(self, seeds, env_ids):
        self._cue, self._at = self._cue.clone(), self._at.clone()
        self._cue[env_ids] = 2.0 * (seeds // 7 % 2) - 1.0
        self._at[env_ids] = 0.0
        return {"state": self._look()[env_ids]}

    def step(self, actions, active):
        self._at = self._at + active
        over = self._at >= LENGTH
        right = over & (actions[:, 0].sign() == self._cue)
        return Transition({"state": self._look()}, right.float(), over, torch.zeros_like(over), right)

    def _look(self):
        return torch.stack([torch.where(self._at == 0, self._cue, 0.0), self._at / LENGTH], 1)

    def save(self):
        return [{"cue": float(cue), "at": float(at)} for cue, at in zip(self._cue, self._at, strict=True)]

    def restore(self, states, env_ids):
        for env, state in zip(env_ids.tolist(), states, strict=True):
            self._cue[env], self._at[env] = state["cue"], state["at"]


def remembering(**settings):
    """A policy for it."""
    return fitted({"type": "mlp", "hidden": [16], "normalise": False, **settings}, {"state": (2,)}, 1, (2,))
