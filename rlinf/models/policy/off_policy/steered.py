"""A policy that steers a frozen one: it chooses the noise that a flow policy denoises, or what is added to its actions.

    noise:     a = flow(o, w)               w = reach x tanh(u)      (DSRL, arXiv:2506.15799)
    residual:  a = clip(base(o) + reach x tanh(u))                   (arXiv:1812.03201)

Of what a flow denoises, the numbers behind the chunk and behind its actions start from 0. Only u is learned, with
critics of states and u, by sac or crossq; nothing is differentiated through the frozen policy, and it is not asked
while learning. Its weights are neither trained nor published nor saved: every process reads them from their directory,
which must stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from rlinf.models.policy.base import Drawn, Observation, Policy, PolicyConfig, Stored, looked_at
from rlinf.models.policy.off_policy.soft import SoftConfig, SoftPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class SteeredConfig(SoftConfig):
    """Of `SteeredPolicy`; `chunk` and `action_size` are those of the frozen policy."""

    base: str
    """Directory of the frozen policy, as a checkpoint's `policy` or the authors' own."""
    how: Literal["noise", "residual"] = "noise"
    """Choose the noise of a flow policy, or add to the likeliest actions of any policy."""
    reach: float = 1.5
    """Greatest number of the noise, or what is added to an action at most; 0.2 is a good first residual."""

    def __post_init__(self) -> None:
        SoftConfig.__post_init__(self)
        if not self.reach > 0.0:
            raise ValueError(f"policy steered: reach={self.reach} must be more than 0")


class SteeredPolicy(SoftPolicy):
    """Looks at "state", float32 [N, S], and at whatever the frozen policy looks at."""

    Config: ClassVar[type[PolicyConfig]] = SteeredConfig

    def __init__(self, config: SteeredConfig):
        super().__init__(config)
        self._frozen: list[Policy] = []  # in a list, so that it is no part of this module

    @property
    def base(self) -> Policy:
        """The frozen policy, on this one's device; read when it is first asked.

        Raises:
            FileNotFoundError: there is none.
            ValueError: it decides other chunks, or has no noise to choose.
        """
        if not self._frozen:
            self._frozen.append(self._opened())
        return self._frozen[0].to(next(self.parameters()).device)

    def inputs(self, observation: Observation, instructions: Sequence[str] | None = None) -> Stored:
        """The state as it came, and what the frozen policy keeps of an observation."""
        theirs = {f"base.{name}": rows for name, rows in self.base.inputs(observation, instructions).items()}
        state = looked_at(observation, "state", (self.config.state_size,), "policy steered").float()
        same = theirs.get("base.state")
        if same is not None and same.shape == state.shape and torch.equal(same, state):
            del theirs["base.state"]  # kept once
        return {"state": state, **theirs}

    def encode(self, actions: Tensor, inputs: Stored) -> Tensor:
        """There is no way back from actions.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            "policy steered: what was to be chosen for somebody else's actions is not known, so it cannot learn from "
            "demonstrations: remove off_policy.demonstrations and imitation.path; the frozen policy learns from them"
        )

    @torch.no_grad()
    def draw(self, inputs: Stored, noise: Tensor | None) -> Drawn:
        """See `Policy.draw`; not differentiable by way of the actions."""
        made, logprobs = self.proposed(inputs, noise)
        chosen = self.config.reach * torch.tanh(made)
        theirs = {name.removeprefix("base."): rows for name, rows in inputs.items() if name.startswith("base.")}
        theirs.setdefault("state", inputs["state"])
        base: Any = self.base
        if self.config.how == "noise":
            behind = (0, base.width - chosen.shape[2], 0, base.horizon - chosen.shape[1])
            actions = base.steered(theirs, torch.nn.functional.pad(chosen, behind))
        else:
            actions = base.draw(theirs, None).actions + chosen
        return Drawn(actions.clamp(-1.0, 1.0), made, logprobs, None)

    def _opened(self) -> Policy:
        from rlinf.models.policy.build import load_policy  # which imports what policies there are

        frozen = load_policy(Path(self.config.base).expanduser()).eval().requires_grad_(False)
        mine, theirs = self.config, frozen.config
        if (mine.chunk, mine.action_size) != (theirs.chunk, theirs.action_size):
            raise ValueError(
                f"policy steered: base decides {theirs.chunk} actions of {theirs.action_size} numbers, and this policy "
                f"{mine.chunk} of {mine.action_size}: set chunk={theirs.chunk}, in the environment that base is for"
            )
        if mine.how == "noise" and not hasattr(frozen, "steered"):
            raise ValueError(
                f"policy steered: base={mine.base} is a {type(frozen).__name__}, which denoises nothing: take a flow "
                "policy, or how: residual"
            )
        return frozen
