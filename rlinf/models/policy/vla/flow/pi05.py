"""pi0.5 (arXiv:2504.16054): pi0 whose expert is conditioned on time by its norms, and whose state is written or absent.

The state is written into the prompt as whole numbers; where the embodiment has none, as in pi_RL's models for LIBERO,
the prompt is that of pi0. The value head reads the mean output of the language model over
pictures and all places for words, pads included, detached (arXiv:2510.25889, section 4.3).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from rlinf.models.policy.layers import perceptron
from rlinf.models.policy.vla.embodiment.table import PI05_PROMPT
from rlinf.models.policy.vla.flow.matching import Field, Velocity, sinusoids
from rlinf.models.policy.vla.flow.pi0 import _PERIODS, PiPolicy, Seen
from rlinf.models.policy.vla.flow.prompts import cleaned, written


class Pi05Policy(PiPolicy):
    """pi0.5: there is no token of the state, and time conditions the expert's norms."""

    model = "pi05"
    adaptive = True
    scale = "q01_q99"
    prompt_length = 200

    def _projections(self, width: int, expert: int) -> None:
        self.action_in_proj = nn.Linear(width, expert)
        self.time_mlp_in = nn.Linear(expert, expert)
        self.time_mlp_out = nn.Linear(expert, expert)
        self.action_out_proj = nn.Linear(expert, width)

    def _critic(self, language: int, expert: int) -> nn.Module:
        hidden = self.config.critic_hidden or (1024, 512, 256)
        return perceptron(language, hidden, 1, gain=0.0, activation=nn.ReLU)

    def _tokens(self, texts: Sequence[str], state: Tensor | None) -> Tensor:
        if state is None or not self.state_size:
            return super()._tokens(texts, state)
        rows = zip(texts, self._normal(state), strict=True)
        return self.prompts.encode(
            [(PI05_PROMPT.format(instruction=cleaned(text), state=written(numbers)),) for text, numbers in rows]
        )

    def velocity(self, context: Seen) -> Velocity:
        """See `FlowPolicy.velocity`. Actions see each other."""
        mask = torch.ones(self.horizon, self.horizon, dtype=torch.bool, device=context.prefix.read.device)

        def at(x: Tensor, t: Tensor) -> Field:
            time = self.time_mlp_in(sinusoids(t, self.time_mlp_in.in_features, *_PERIODS))
            condition = functional.silu(self.time_mlp_out(functional.silu(time)))
            expert: Any = self.paligemma_with_expert.gemma_expert
            features = expert(self.action_in_proj(x), context.prefix, mask, condition)
            return Field(self.action_out_proj(features), features)

        return at

    def values(self, context: Seen, features: Tensor | None) -> Tensor | None:
        """See `FlowPolicy.values`."""
        if self.critic is None:
            return None
        found: Tensor = self.critic(context.prefix.hidden.float().mean(1).detach())
        return found[:, 0]
