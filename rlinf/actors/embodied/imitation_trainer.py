"""The trainer of runs that learn from demonstrations alone.

Consumes batches of decisions that follow from their step's number, produces metrics, versioned weights and checkpoints;
unblocked by the disk alone. Every rank reads the same batches and computes on its share of each, in micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlinf.actors.base.base_trainer import at_least_one
from rlinf.actors.embodied.policy_trainer import PolicyTrainer
from rlinf.algos.tensor.loss_sum import LossSum
from rlinf.data.demonstrations import DecisionStream, Shown, Window, open_parts
from rlinf.runtime.actor.actor import endpoint
from rlinf.training.embodied.behavior_cloning import get_used_to, imitating, loss_on, losses_of
from rlinf.training.optimizer import minimize

_ROWS = 256  # decisions on the device at a time where no micro-batch is set


class ImitationTrainer(PolicyTrainer):
    """Owns the weights of a policy that learns from demonstrations."""

    async def setup(  # type: ignore[override]
        self, *, shown: Shown, batch: int = 64, fixed: Sequence[str] = ("log_std",), seed: int = 0, **settings: Any
    ) -> None:
        """Make the policy and its optimizer, and open the demonstrations.

        Args:
            shown: what is learned from, where every rank can read it.
            batch: decisions per optimizer step, over all ranks.
            fixed: parameters that stay as they are, see `PolicyTrainer.imitate`.
            seed: of what is drawn, and of which episodes are held out.
            settings: of `PolicyTrainer`, as far as they are about the policy and its optimizer.

        Raises:
            FileNotFoundError: demonstrations are not there.
            ValueError: they are broken; or a policy or a setting that cannot be had.
        """
        at_least_one("trainer", batch=batch)
        await super().setup(seed=seed, **settings)
        self._imitating = imitating(self.policy, fixed)
        self._stream, self._watched = await self.compute(self._opened, shown, batch)

    def _check_critic(self, has_critic: bool, group_size: int) -> None:
        """A critic is neither needed nor in the way."""

    def _opened(self, shown: Shown, batch: int) -> tuple[DecisionStream, list[Any]]:
        learned, watched = open_parts(shown, self._seed)
        chunk = self.policy.config.chunk
        return DecisionStream(learned, chunk, batch=batch, seed=self._seed, memory=shown.memory), watched

    @endpoint(device=True, joint=True)
    async def imitate_steps(self, first: int, count: int) -> dict[str, float]:
        """Take optimizer steps.

        Args:
            first: number of the first one in the run, from which follows what is learned; before step 0 the policy
                learns the scale of what it looks at.
            count: how many.

        Returns:
            Metrics: `loss`, the mean over these steps, nats per number; the weights' version has gone up by one.

        Raises:
            ValueError: the demonstrations do not fit the policy, or are broken.
            FloatingPointError: the loss or its gradient is not finite; that step was not taken.
        """
        return await self.computed_jointly(self._imitate_steps, first, count)

    def _imitate_steps(self, first: int, count: int) -> dict[str, float]:
        if first == 0:
            get_used_to(self.policy, self._stream, self.device)
        learner = self._learner
        learner.begin(first // count, self._spec)
        parts, norms = [], []
        for step in range(first, first + count):
            losses = losses_of(self.policy, self._stream, step, self.device, self.mesh, self._micro_batch)
            found, norm = minimize(
                losses, self._imitating, learner.optimizer, mesh=self.mesh, grad_clip=learner.settings.grad_clip
            )
            parts.append(found)
            norms.append(norm)
        self.version += 1
        return {
            "loss": float(sum(parts[1:], parts[0]).mean()),
            "grad_norm": sum(norms) / count,
            "lr": float(learner.optimizer.param_groups[0]["lr"]),
            "optimizer_steps": float(count),
            "imitation/epochs": (first + count) * self._stream.batch / self._stream.decisions,
        }

    @endpoint(device=True, joint=True)
    async def held_out(self) -> dict[str, float]:
        """The loss on what is not learned from, nats per number, and the decisions in it; {} where nothing is."""
        return await self.computed_jointly(self._held_out)

    def _held_out(self) -> dict[str, float]:
        total: LossSum | None = None
        count = 0
        for part in self._watched:
            for place in part.places:  # one episode in memory at a time
                window = Window([part.read(place)], self.policy.config.chunk)
                for number in range(0, len(window), size := self._micro_batch or _ROWS):
                    rows = window.between(number, number + size)
                    found = loss_on(self.policy, rows, self.device, seed=count)
                    total, count = found if total is None else total + found, count + len(rows)
        return {} if total is None else {"held_out/loss": float(total.mean()), "held_out/decisions": float(count)}
