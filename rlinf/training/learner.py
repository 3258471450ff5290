"""The learning itself: a model, its optimizer, and the steps between them. Blocking code without any actor.

Consumes micro-batches. Between two optimizer steps only sums gather: gradients of un-normalised losses, and token
counts. `step` divides once, by the count of everything that came to all ranks; so it does not matter how the batch was
cut, or how many ranks share it. Ranks must call the same methods in the same order: each is a collective.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from rlinf.algos import losses
from rlinf.algos.spec import AlgorithmSpec
from rlinf.algos.tensor.loss_sum import Explained, LossSum, Max, Mean, Metric
from rlinf.data.packing import Packed
from rlinf.models.language.fsdp import Layout, local
from rlinf.training.backend import Loss, Optimization, Outputs
from rlinf.training.text.policy_loss import policy_loss
from rlinf.training.text.requirements import PROXIMAL

Schedule = Literal["constant", "linear", "cosine"]
"""What becomes of the learning rate after the warm-up."""
_SCHEDULES = ("constant", "linear", "cosine")
ALONE = Layout()
_BUCKET_BYTES = 1 << 26
"""Of gradients that are summed over ranks at once: enough for a network's full speed, little beside a model."""


class Learner:
    """Trains one model with AdamW, a schedule of the learning rate, and a bound on the gradient's norm.

    Args:
        module: trained in place; its frozen parameters stay as they are.
        layout: how it lies on the ranks that train it.
        lr: learning rate after warm-up.
        warmup_steps: optimizer steps over which the learning rate rises linearly; step i uses lr x i / warmup_steps.
        schedule, total_steps, min_lr_ratio: of the learning rate afterwards, see `lr_factor`.
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
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        grad_clip: float = 1.0,
    ):
        if schedule not in _SCHEDULES:
            raise ValueError(f"schedule={schedule!r} is none of {list(_SCHEDULES)}")
        if schedule != "constant" and total_steps is None:
            raise ValueError(f"schedule={schedule!r} needs total_steps, the optimizer steps of the whole run")
        self.module = module
        self._layout = layout
        self._grad_clip = grad_clip
        self._parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(self._parameters, lr=lr, betas=betas, weight_decay=weight_decay, fused=True)

        def factor(done: int) -> float:
            return lr_factor(done, schedule, warmup_steps, total_steps, min_lr_ratio)

        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, factor)
        self._sum: LossSum | None = None

    def begin(self) -> None:
        """Forget what has gathered since the last step, such as what an interrupted call left."""
        self.optimizer.zero_grad()
        self._sum = None

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
            What gathered on all ranks, and `loss`, `grad_norm` (before clipping) and `lr` of this step.

        Raises:
            ValueError: nothing came since the last step.
            FloatingPointError: the loss or the gradient is not finite; the weights have not changed.
        """
        if self._sum is None:
            raise ValueError("there is nothing to learn from: no micro-batch came since the last step")
        layout = self._layout
        if layout.copies is not None:
            sum_over_copies(self._parameters, layout.copies)
        gradients = [local(parameter.grad) for parameter in self._parameters if parameter.grad is not None]
        square = _square(gradients)  # equal in all copies: the first says it
        gathered, square_of_all = over_ranks(
            self._sum, square if layout.first_copy else torch.zeros_like(square), layout.ranks
        )
        tokens = float(gathered.weight)
        if tokens == 0:
            self.begin()
            raise ValueError("there is not one token to learn from: every response was empty")
        norm = math.sqrt(square_of_all) / tokens if square_of_all >= 0 else math.nan
        loss = float(gathered.mean())
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self.begin()
            raise FloatingPointError(
                f"loss {loss} and gradient norm {norm} over {tokens:.0f} tokens are not both finite: the step was not "
                "taken. A smaller learning rate is the usual cure"
            )
        torch._foreach_mul_(gradients, min(1.0, self._grad_clip / (norm + 1e-6)) / tokens)
        lr = float(self.schedule.get_last_lr()[0])
        self.optimizer.step()
        self.schedule.step()
        self.begin()
        return gathered, {"loss": loss, "grad_norm": norm, "lr": lr}


def learn_policy(
    learner: Optimization,
    batch: Packed,
    spec: AlgorithmSpec,
    *,
    version: int | None = None,
    compare: bool = False,
    kept: dict[str, Tensor] | None = None,
) -> None:
    """Add a micro-batch of samples to the gradient.

    Args:
        learner: what to add it to.
        batch: the samples.
        spec: the algorithm.
        version: of the weights being trained, before the update.
        compare: the weights are those that sampled: measure how far our log-probs are from the engine's.
        kept: columns beside those of `batch`, float32 [response tokens] each; our log-probs join them if the algorithm
            needs those before the update and nobody said them yet.
    """
    known = {} if kept is None else kept

    def loss(batch: Packed, outputs: Outputs) -> LossSum:
        logprobs, entropy = outputs
        if spec.needs_recomputed_logprobs and PROXIMAL not in batch.columns:
            known.setdefault(PROXIMAL, logprobs.detach())
        found = policy_loss(spec, batch, logprobs, entropy, known, version)
        if compare:
            mask = torch.ones_like(logprobs, dtype=torch.bool)
            found = found.watching(losses.mismatch(logprobs, batch.old_logprobs, mask))
        return found

    learner.accumulate([batch], loss, entropy_slope=bool(spec.entropy_bonus))


def learn_answers(learner: Optimization, batch: Packed) -> None:
    """Add a micro-batch of worked answers to the gradient, by `losses.supervised`."""

    def loss(batch: Packed, outputs: Outputs) -> LossSum:
        return losses.supervised(outputs[0], torch.ones_like(outputs[0], dtype=torch.bool))

    learner.accumulate([batch], loss)


def lr_factor(done: int, schedule: Schedule, warmup_steps: int, total_steps: int | None, min_ratio: float) -> float:
    """What the learning rate is multiplied with in the step after `done` steps.

    It rises linearly to 1 in step `warmup_steps`. Then it stays there ("constant"), or falls to `min_ratio` in step
    `total_steps`, in a straight line ("linear") or as half a cosine (SGDR, arXiv:1608.03983, eq. 5), and stays there.
    """
    step = done + 1
    if step < warmup_steps:
        return step / warmup_steps
    if schedule == "constant" or total_steps is None:
        return 1.0
    way = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    left = 1.0 - way if schedule == "linear" else (1.0 + math.cos(math.pi * way)) / 2.0
    return min_ratio + (1.0 - min_ratio) * left


def _square(gradients: list[Tensor]) -> Tensor:
    """Squared norm of all together, float64 []."""
    if not gradients:
        return torch.zeros((), dtype=torch.float64)
    return torch.stack(torch._foreach_norm(gradients)).double().square().sum()


def sum_over_copies(parameters: Sequence[Tensor], copies: DeviceMesh) -> None:
    """Replace gradients by their sums over the copies of a model: one collective per bucket of them.

    Args:
        parameters: in the same order in every copy. One that has a gradient in any copy has one in all afterwards.
        copies: the ranks that hold the same part of the model.
    """
    for bucket in _buckets(parameters):
        given = torch.tensor([float(parameter.grad is not None) for parameter in bucket], device=bucket[0].device)
        for parameter in bucket:
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        gradients = [local(parameter.grad) for parameter in bucket if parameter.grad is not None]
        flat = torch.cat([*(gradient.reshape(-1) for gradient in gradients), given.to(gradients[0].dtype)])
        dist.all_reduce(flat, group=copies.get_group())
        *sums, counts = flat.split([*(gradient.numel() for gradient in gradients), len(bucket)])
        for parameter, gradient, total, count in zip(bucket, gradients, sums, counts.tolist(), strict=True):
            if not count:
                parameter.grad = None
            elif isinstance(parameter.grad, DTensor):
                gradient.copy_(total.view_as(gradient))
            else:
                parameter.grad = total.view_as(gradient)


def _buckets(parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Neighbours of one dtype, of at most `_BUCKET_BYTES` together unless one is larger."""
    bucket: list[Tensor] = []
    size = 0
    for parameter in parameters:
        mine = local(parameter).nbytes
        if bucket and (size + mine > _BUCKET_BYTES or parameter.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(parameter)
        size += mine
    if bucket:
        yield bucket


def over_ranks(mine: LossSum, square: Tensor, ranks: DeviceMesh | None) -> tuple[LossSum, float]:
    """The sums, and the squared norm, of all ranks together: one small collective, in float64."""
    if ranks is None or ranks.size() == 1:
        return mine, float(square)
    names = sorted(mine.metrics)
    tops = [metric.largest for name in names if isinstance(metric := mine.metrics[name], Max)]
    added = [part for name in names for part in _addends(mine.metrics[name])]
    flat = torch.cat([part.double().reshape(-1) for part in (*tops, square, mine.total, mine.weight, *added)])
    parts = [torch.empty_like(flat) for _ in range(ranks.size())]
    dist.all_gather(parts, flat, group=ranks.get_group())  # not reduced: some are added up and some compared
    table = torch.stack(parts)
    largest, sums = table[:, : len(tops)].amax(0), table[:, len(tops) :].sum(0)
    pieces, highs = iter(sums[3:].split([part.numel() for part in added])), iter(largest)
    metrics: dict[str, Metric] = {}
    for name in names:
        kind = type(mine.metrics[name])
        if kind is Max:
            metrics[name] = Max(next(highs))
        elif kind is Mean:
            metrics[name] = Mean(next(pieces)[0], next(pieces)[0])
        else:
            metrics[name] = Explained(next(pieces))
    return LossSum(sums[1], sums[2], metrics), float(sums[0])


def _addends(metric: Metric) -> tuple[Tensor, ...]:
    """What of a metric is added over ranks."""
    if isinstance(metric, Mean):
        return metric.total, metric.weight
    return (metric.moments,) if isinstance(metric, Explained) else ()
