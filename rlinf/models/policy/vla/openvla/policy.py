"""OpenVLA-7B (arXiv:2406.09246): action tokens drawn one after the other, for reinforcement learning.

`draw` keeps keys and values from token to token; `score` reads all tokens in one pass, which gives the same log-probs
up to rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional
from transformers import DynamicCache

from rlinf.models.policy.base import Drawn, Evaluated, Stored
from rlinf.models.policy.vla.action_tokens import picked_by
from rlinf.models.policy.vla.openvla.network import OpenVlaNetwork


class OpenVlaPolicy(OpenVlaNetwork):
    """Looks at "rgb", uint8 [N, H, W, 3 k], reads the instruction, and draws tokens one after the other."""

    def draw(self, inputs: Stored, noise: Tensor | None) -> Drawn:
        """See `Policy.draw`."""
        cache = DynamicCache(config=self.language_model.config)
        embedded, seen = self._prefix(inputs)
        hidden = self._decode(embedded, seen, cache=cache)[:, -1]
        values = self._values(hidden)
        tokens: list[Tensor] = []
        logprobs: list[Tensor] = []
        for number in range(self.randomness):
            if number:
                seen = functional.pad(seen, (0, 1), value=True)
                hidden = self._decode(self._embedded(tokens[-1][:, None]), seen, cache=cache)[:, -1]
            each = self._logprobs(hidden)
            choice = each.argmax(-1) if noise is None else picked_by(each, noise[:, number])
            tokens.append(choice + self.bins.first)
            logprobs.append(each.gather(1, choice[:, None])[:, 0])
        made = torch.stack(tokens, 1).view(-1, self.config.chunk, self.numbers)
        actions = self.robot.to_simulator(self.bins.decode(made))
        return Drawn(actions, made, torch.stack(logprobs, 1).view(made.shape), values)

    def score(self, stored: Stored) -> Evaluated:
        """See `Policy.score`."""
        shape, tokens = stored["actions"].shape, stored["actions"].flatten(1)
        prefix, seen = self._prefix(stored)
        known = self._embedded(tokens[:, :-1])
        seen = functional.pad(seen, (0, known.shape[1]), value=True)
        hidden = self._decode(torch.cat([prefix, known], 1), seen)[:, prefix.shape[1] - 1 :]
        each = self._logprobs(hidden)
        chosen = each.gather(-1, (tokens - self.bins.first)[..., None])[..., 0]
        return Evaluated(chosen.view(shape), entropy(each).view(shape), self._values(hidden[:, 0]))

    def _prompt_state(self, inputs: Stored) -> Tensor:
        embedded, seen = self._prefix(inputs)
        return self._decode(embedded, seen)[:, -1]


def entropy(logprobs: Tensor) -> Tensor:
    """Of distributions over the last dimension, nats; a probability of 0 adds nothing."""
    return -(logprobs.exp() * logprobs.clamp(min=-1e4)).sum(-1)
