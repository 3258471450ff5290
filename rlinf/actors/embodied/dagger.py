"""DAgger (arXiv:1011.0686): the policy acts, an expert says what it would have done, and the policy learns that.

Consumes what slices of environments show; trajectories carry the expert's answers beside the policy's actions. The
trainer keeps all answers so far and takes supervised steps on them. Unblocked by the compute threads.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlinf.actors.base.base_trainer import at_least_one
from rlinf.actors.embodied.policy import PolicyActor
from rlinf.actors.embodied.remembering_trainer import RememberingTrainer
from rlinf.algos.tensor.loss_sum import LossSum
from rlinf.config.importing import resolve
from rlinf.data.demonstrations import decisions, read_demonstrations
from rlinf.data.rng import mix, uniforms
from rlinf.envs.episodes import EnvOutput
from rlinf.models.policy.base import Act, Stored
from rlinf.models.policy.build import load_policy
from rlinf.runtime.actor.actor import endpoint
from rlinf.training.adamw import adamw_of_parts
from rlinf.training.embodied.off_policy.replay_buffer import ReplayBuffer, Rows
from rlinf.training.embodied.trajectory import Trajectory, joined
from rlinf.training.embodied.trajectory_batch import ages_of, summary
from rlinf.training.optimizer import minimize, share_of

Expert = Callable[[Mapping[str, Tensor], Sequence[str] | None], Tensor]
"""From N observations and instructions to chunks of actions in [-1, 1], float32 [N, C, A]."""


class DaggerPolicy(PolicyActor):
    """Acts greedily, or now and then as the expert says, and asks the expert about everything that is seen."""

    async def setup(  # type: ignore[override]
        self,
        *,
        policy: Mapping[str, Any],
        expert: str,
        path: str | None = None,
        beta: float = 0.0,
        decay: float = 0.5,
    ) -> None:
        """Make the policy and the expert.

        Args:
            policy, path: see `PolicyActor.setup`.
            expert: dotted path of an `Expert`, or the directory of a saved policy.
            beta: share of decisions in which the expert's action is done, at version 0 of the weights.
            decay: that share falls to this much of itself with each version.

        Raises:
            ValueError: no such policy or key.
            FileNotFoundError: a directory holds no policy.
            ImportError: there is no such function.
        """
        await super().setup(policy=policy, path=path)
        self._expert = await self.compute(expert_of, expert, self.device)
        self._beta, self._decay = beta, decay

    @endpoint
    async def ask(self, output: EnvOutput) -> None:
        """Ask the expert about what a slice shows, so that one that does not fit says so before a run begins.

        Raises:
            ValueError: it does not know such observations, or its answers are no actions of this policy.
        """
        await self.on_model(self._ask, output)

    @torch.no_grad()
    def _ask(self, output: EnvOutput) -> None:
        self._decided(self._on_device(output.observation), output, True, True)

    def _decided(self, observation: Mapping[str, Tensor], output: EnvOutput, greedy: bool, keep: bool) -> Act:
        if not keep:
            return super()._decided(observation, output, greedy, keep)
        act = super()._decided(observation, output, True, keep)
        shown = self._expert(observation, output.instructions).to(act.actions)
        if shown.shape != act.actions.shape or not bool(shown.isfinite().all()):
            raise ValueError(
                f"dagger.expert: it answered {list(shown.shape)}, or numbers that are not finite; wanted are actions "
                f"{list(act.actions.shape)}: environments, actions of a chunk, numbers of an action"
            )
        shown = shown.clamp(-1.0, 1.0)
        share = self._beta * self._decay**self._version
        # a place that no policy draws from
        guided = uniforms(output.seeds[:, None], torch.tensor([-1])) < share
        actions = torch.where(guided[..., None].to(shown.device), shown, act.actions)
        inputs = self._policy.inputs(observation, output.instructions)
        return replace(act, actions=actions, stored={**inputs, "actions": self._policy.encode(shown, inputs)})


class DaggerTrainer(RememberingTrainer):
    """Owns the weights of a policy, and all that the expert ever said."""

    async def setup(  # type: ignore[override]
        self,
        *,
        policy: Mapping[str, Any],
        path: str | None = None,
        seed: int = 0,
        batch: int = 256,
        capacity: int = 1_000_000,
        updates: int = 200,
        demonstrations: str | None = None,
        failed_demonstrations: bool = False,
        lr: float = 3e-4,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        grad_clip: float = 0.5,
    ) -> None:
        """Make the policy and its optimizer.

        Args:
            policy: its configuration, see `models.policy.build`.
            path: directory of a saved one that is taken instead.
            seed: of batches.
            batch: labelled decisions per optimizer step, over all ranks.
            capacity: labelled decisions that are kept.
            updates: optimizer steps per step of the flow.
            demonstrations: directory of demonstrations to begin with; None for none.
            failed_demonstrations: begin with those that did not solve their task, too.
            lr, betas, weight_decay, grad_clip: AdamW.

        Raises:
            ValueError: a policy or a setting that cannot be had, or two ranks on a host.
            FileNotFoundError: the directory holds no demonstrations.
        """
        at_least_one("trainer", batch=batch, updates=updates)
        await self._open_mesh()
        self.policy = await self._made(policy, path)
        acting = {id(each) for each in self.policy.without_critic()}
        # A standard deviation that imitates an expert goes to 0, and leaves nothing to explore with afterwards.
        self._learning = [p for name, p in self.policy.named_parameters() if id(p) in acting and name != "log_std"]
        optimizer = adamw_of_parts([(self._learning, lr)], betas=betas, weight_decay=weight_decay)
        self._own(self.policy, optimizer)
        self._optimizer, self._clip = optimizer, grad_clip
        self._replay = ReplayBuffer(capacity)
        self._seed, self._batch, self._per_step, self._updates = seed, batch, updates, 0
        if demonstrations is not None:
            await self.compute(self._begin_with, Path(demonstrations), not failed_demonstrations)

    def _begin_with(self, directory: Path, solved: bool) -> None:
        shown = decisions(read_demonstrations(directory.expanduser(), solved=solved), self.policy.config.chunk)
        observation = {name: rows.to(self.device) for name, rows in shown.observation.items()}
        stored = self.policy.demonstrated(observation, shown.actions.to(self.device), shown.instructions)
        self._keep(stored, shown.valid)

    def _keep(self, stored: Stored, valid: Tensor) -> None:
        """Take in labelled decisions; what is learned by other means than gradients is learned at once."""
        self.policy.adapt({name: rows.to(self.device) for name, rows in stored.items()})
        self._replay.add({**stored, "valid": valid})

    def _remember(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        whole = joined(trajectories)
        valid = whole.chunks.valid.bool()
        done = valid.any(-1)
        if bool(done.any()):  # the expert answered with whole chunks, however much of them was done
            stored = {name: rows[done] for name, rows in whole.stored.items()}
            self._keep(stored, torch.ones_like(valid[done]))
        return {
            "env_steps": float(valid.sum()),
            "decisions": float(done.sum()),
            "dagger/labels": float(self._replay.added),
            "episodes/lost": float(whole.lost),
            **ages_of(trajectories, self.version),
            **summary(whole.episodes),
        }

    def _catch_up(self) -> dict[str, float]:
        parts: list[LossSum] = []
        for _ in range(self._per_step if len(self._replay) else 0):
            seed = mix(self._seed, self._updates)
            self._updates += 1
            parts.append(self._imitated(self._replay.draw(self._batch, seed), seed))
        found = self._learned(parts)
        return {**found, **({"dagger/loss": float(sum(parts[1:], parts[0]).mean())} if parts else {})}

    def _imitated(self, drawn: Rows, seed: int) -> LossSum:
        share, counts = share_of(torch.arange(len(drawn["valid"])), self.mesh)
        stored = {name: rows[share].to(self.device) for name, rows in drawn.items()}
        seeds = torch.tensor([mix(seed, row) for row in share.tolist()], device=self.device)
        loss = self.policy.imitate(stored, stored.pop("valid") & counts, seeds)
        return minimize(loss, self._learning, self._optimizer, mesh=self.mesh, grad_clip=self._clip)[0]


def expert_of(name: str, device: torch.device) -> Expert:
    """An expert by name: a function's dotted path, or the directory of a saved policy. Blocking.

    Raises:
        ValueError: the policy looks at more than what is seen now.
    """
    if not os.path.isdir(os.path.expanduser(name)):
        found: Expert = resolve(name)
        return found
    policy = load_policy(Path(name).expanduser()).to(device)
    if getattr(policy.config, "memory", 0):
        raise ValueError(f"dagger.expert: {name} has a memory, and is asked about single decisions: take another")

    def answer(observation: Mapping[str, Tensor], instructions: Sequence[str] | None) -> Tensor:
        return policy.act(observation, instructions=instructions, greedy=True).actions

    return answer
