"""A simulator that plays tables, so that a test says beforehand what every step brings."""

import torch

from rlinf.envs.base import ActionSpec, ArraySpec, Simulator, Transition


class Scripted(Simulator):
    """Episode after episode, every environment plays its next script: a list of (reward, terminated, success).

    The observation is (seed of the episode, steps done). It fails if an environment that has ended is not left alone.
    """

    def __init__(self, scripts, *, tells_success=True, resets_together=False):
        self.num_envs = len(scripts)
        self.resets_together = resets_together
        self.observation_spec = {"state": ArraySpec((2,), torch.float32)}
        self.action_spec = ActionSpec(torch.tensor([-1.0]), torch.tensor([1.0]))
        self._scripts = scripts
        self._tells_success = tells_success
        self.begun = [[] for _ in scripts]  # seeds of the episodes, in order
        self._at = [0 for _ in scripts]

    def reset(self, seeds, env_ids):
        assert not self.resets_together or len(env_ids) == self.num_envs
        for env, seed in zip(env_ids.tolist(), seeds.tolist(), strict=True):
            self.begun[env].append(seed)
            self._at[env] = 0
        return {"state": self._look()[env_ids]}

    def step(self, actions, active):
        rows = [(torch.nan, True, True) for _ in range(self.num_envs)]
        for env in active.nonzero().flatten().tolist():
            script = self._scripts[env][len(self.begun[env]) - 1]
            rows[env] = script[self._at[env]]
            self._at[env] += 1
        reward, terminated, success = zip(*rows, strict=True)
        return Transition(
            {"state": self._look()},
            torch.tensor(reward),
            torch.tensor(terminated),
            torch.zeros(self.num_envs, dtype=torch.bool),
            torch.tensor(success) if self._tells_success else None,
        )

    def _look(self):
        return torch.tensor(
            [[float(seeds[-1] if seeds else 0), at] for seeds, at in zip(self.begun, self._at, strict=True)]
        )

    def save(self):
        return [{"begun": list(begun), "at": at} for begun, at in zip(self.begun, self._at, strict=True)]

    def restore(self, states, env_ids):
        for env, state in zip(env_ids.tolist(), states, strict=True):
            self.begun[env], self._at[env] = list(state["begun"]), state["at"]
