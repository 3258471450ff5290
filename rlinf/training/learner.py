"""The learning itself: a model, its optimizer, and the steps between them. Blocking code without any actor.

Consumes micro-batches. Between two optimizer steps only sums gather: gradients of un-normalised losses, and token
counts. `step` divides once, by the count of everything that came to all ranks; so it does not matter how the batch was
cut, or how many ranks share it. Ranks must call the same methods in the same order: each is a collective.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from rlinf.algos.tensor.loss_sum import LossSum
from rlinf.data.packing import Packed
from rlinf.models.language.fsdp import Layout
from rlinf.training.adamw import Kind, adamw
from rlinf.training.backend import Loss
from rlinf.training.learning_rate import SCHEDULES, Schedule, lr_factor
from rlinf.training.optimizer import forget_gradients, optimizer_step, sum_over_copies
from rlinf.weights.state_tensors import hyperparameters, set_hyperparameters

ALONE = Layout()


class Learner:
    """Trains one model with AdamW, a schedule of the learning rate, and a bound on the gradient's norm.

    Args:
        module: trained in place; its frozen parameters stay as they are.
        layout: how it lies on the ranks that train it.
        lr: learning rate after warm-up.
        warmup_steps: optimizer steps over which the learning rate rises linearly; step i uses lr x i / warmup_steps.
        schedule, total_steps, min_lr_ratio: of the learning rate afterwards, see `lr_factor`.
        kind: of AdamW, see `adamw`.
        betas: decay of the running means of the gradient and of its square.
        weight_decay: decoupled weight decay.
        grad_clip: a gradient with a larger global norm is scaled down to it.

    Raises:
        ValueError: an unknown schedule, or one that falls without knowing when it ends.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        layout: Layout = ALONE,
        lr: float,
        warmup_steps: int = 0,
        schedule: Schedule = "constant",
        total_steps: int | None = None,
        min_lr_ratio: float = 0.0,
        kind: Kind = "adamw",
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        grad_clip: float = 1.0,
    ):
        if schedule not in SCHEDULES:
            raise ValueError(f"schedule={schedule!r} is none of {list(SCHEDULES)}")
        if schedule != "constant" and total_steps is None:
            raise ValueError(f"schedule={schedule!r} needs total_steps, the optimizer steps of the whole run")
        self.module = module
        self._layout = layout
        self._grad_clip, self._warmup_steps = grad_clip, warmup_steps
        self._parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self.optimizer = adamw(self._parameters, kind, lr=lr, betas=betas, weight_decay=weight_decay)
        self._given = hyperparameters(self.optimizer)

        def factor(done: int) -> float:
            return lr_factor(done, schedule, warmup_steps, total_steps, min_lr_ratio)

        self._factor = factor
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, factor)
        self._sum: LossSum | None = None

    def begin(self) -> None:
        """Forget what has gathered since the last step, such as what an interrupted call left."""
        forget_gradients(self.optimizer)
        self._sum = None

    def resumed(self) -> None:
        """Go on with the hyperparameters given here, at the place in the schedule that a checkpoint brought."""
        set_hyperparameters(self.optimizer, self._given)
        self.schedule.base_lrs = [group["lr"] for group in self.optimizer.param_groups]
        self._set_rates()

    def _set_rates(self) -> None:
        """Learning rates as the schedule has them at its place."""
        factor = self._factor(self.schedule.last_epoch)
        for group, base in zip(self.optimizer.param_groups, self.schedule.base_lrs, strict=True):
            group["initial_lr"], group["lr"] = base, base * factor
        self.schedule._last_lr = [group["lr"] for group in self.optimizer.param_groups]

    def pass_over(self, count: int) -> None:
        """Let the schedule pass over optimizer steps that are not taken; but not while it warms up, which is for steps
        that are."""
        if self.schedule.last_epoch >= self._warmup_steps:
            self.schedule.last_epoch += count
            self._set_rates()

    def accumulate(self, batches: Sequence[Packed], loss: Loss, *, entropy_slope: bool = False) -> None:
        """Add the gradients of some micro-batches, one after the other; each rank must, for as many.

        Args:
            batches: moved to the model's device if they are elsewhere.
            loss: of a micro-batch and the outputs for it.
            entropy_slope: it differentiates entropies too.
        """
        device = next(self.module.parameters()).device
        for batch in (batch.to(device) for batch in batches):
            found = loss(batch, self.module(batch, entropy_slope=True) if entropy_slope else self.module(batch))
            found.total.backward()  # type: ignore[no-untyped-call]
            part = found.detach()
            self._sum = part if self._sum is None else self._sum + part

    def step(self) -> tuple[LossSum, dict[str, float]]:
        """Divide by the tokens that came to all ranks, clip, and take one optimizer step.

        Returns:
            What gathered on all ranks, and `loss`, `grad_norm` (before clipping) and `lr` of this step; and what the
            module says of itself (`numbers`).

        Raises:
            ValueError: nothing came since the last step.
            FloatingPointError: the loss or the gradient is not finite; the weights have not changed.
        """
        if self._sum is None:
            raise ValueError("there is nothing to learn from: no micro-batch came since the last step")
        try:
            gathered, norm = self._taken(self._sum)
        finally:
            self.begin()
        if float(gathered.weight) == 0:
            raise ValueError("there is not one token to learn from: every response was empty")
        lr = float(self.schedule.get_last_lr()[0])
        self.schedule.step()
        numbers = {"loss": float(gathered.mean()), "grad_norm": norm, "lr": lr}
        return gathered, {**numbers, **getattr(self.module, "numbers", {})}

    def _taken(self, mine: LossSum) -> tuple[LossSum, float]:
        """Gather gradients from all ranks and take the step; arguments and results as of `optimizer_step`."""
        layout = self._layout
        if layout.copies is not None:
            sum_over_copies(self._parameters, layout.copies)
        return optimizer_step(
            mine if layout.counts else mine.told_by_another(),
            self._parameters,
            self.optimizer,
            ranks=layout.ranks,
            leads=lambda _: layout.first_copy,
            grad_clip=self._grad_clip,
            named=self.module.named_parameters(),
        )
