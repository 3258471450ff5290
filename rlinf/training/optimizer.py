"""One optimizer step on the mean of a loss over all ranks: for language models and for policies that act.

In: each rank's un-normalised sums, and gradients of them. Out: changed parameters. Gradients are summed over ranks and
divided once, by the count of all ranks, so it does not matter how a batch was cut or how many ranks share it. Blocking
code; every rank calls the same functions in the same order, since each is a collective.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from rlinf.algos.tensor.loss_sum import Explained, LossSum, Max, Mean, Metric


def minimize(
    loss: LossSum,
    parameters: Sequence[Tensor],
    optimizer: Optimizer,
    *,
    mesh: DeviceMesh | None = None,
    grad_clip: float = math.inf,
) -> tuple[LossSum, float]:
    """Back-propagate a loss and take one optimizer step, where every rank has a copy of the parameters.

    Args:
        loss: this rank's sums, differentiable; of weight 0 where it has no work.
        parameters: what is changed, in the same order on every rank; other parameters of the optimizer stay as they
            are, and gradients reach nothing else.
        optimizer: one that skips parameters without a gradient, as torch's do.
        mesh, grad_clip: see `optimizer_step`.

    Returns:
        See `optimizer_step`. Without any weight on any rank nothing changes, and the norm is 0.

    Raises:
        FloatingPointError: the loss or the gradient is not finite; nothing has changed.
    """
    forget_gradients(optimizer)
    found = torch.autograd.grad(loss.total, parameters, allow_unused=True)
    gradients = [
        torch.zeros_like(parameter) if gradient is None else gradient
        for parameter, gradient in zip(parameters, found, strict=True)
    ]
    for parameter, gradient in zip(parameters, sum_over_ranks(gradients, mesh), strict=True):
        parameter.grad = gradient
    return optimizer_step(loss.detach(), parameters, optimizer, mesh=mesh, copies=True, grad_clip=grad_clip)


def optimizer_step(
    loss: LossSum,
    parameters: Sequence[Tensor],
    optimizer: Optimizer,
    *,
    mesh: DeviceMesh | None = None,
    copies: bool = False,
    grad_clip: float = math.inf,
) -> tuple[LossSum, float]:
    """Divide gradients by what was counted on all ranks, clip them, and take one optimizer step.

    Args:
        loss: this rank's sums, without graph.
        parameters: whose `grad` has the un-normalised gradient, summed over ranks; they may be sharded.
        optimizer: what takes the step.
        mesh: the ranks; None for one.
        copies: every rank has the whole gradient; else each has its shards of it.
        grad_clip: a gradient with a larger global norm is scaled down to it.

    Returns:
        The sums of all ranks, and the norm of the gradient before clipping. If the sums' weight is 0, no step was taken
        and the norm is 0.

    Raises:
        FloatingPointError: the loss or the gradient is not finite; the parameters have not changed.
    """
    gradients = [_local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    square = torch.zeros((), dtype=torch.float64)
    if gradients:
        square = torch.stack(torch._foreach_norm(gradients)).double().square().sum()
    if copies and mesh is not None and mesh.get_local_rank():
        square = torch.zeros_like(square)  # all ranks have the same: the first one's counts
    gathered, total = over_ranks(loss, square, mesh)
    count = float(gathered.weight)
    if count == 0:
        return gathered, 0.0
    norm, mean = math.sqrt(total) / count, float(gathered.mean())
    if not (math.isfinite(mean) and math.isfinite(norm)):
        raise FloatingPointError(
            f"loss {mean} and gradient norm {norm} are not both finite: the step was not taken. A smaller learning "
            "rate is the usual cure"
        )
    torch._foreach_mul_(gradients, min(1.0, grad_clip / (norm + 1e-6)) / count)
    optimizer.step()
    return gathered, norm


def forget_gradients(optimizer: Optimizer) -> None:
    """Drop all gradients: `zero_grad` without the profiler's marks, which cost as much as a small layer."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def share_of(rows: Tensor, mesh: DeviceMesh | None) -> tuple[Tensor, bool]:
    """This rank's rows of a minibatch, and whether they count.

    Where there are fewer rows than ranks, a rank without one computes on the first all the same, since it takes part in
    collectives; its loss must have weight 0.

    Args:
        rows: of all ranks, [n], at least one.
        mesh: ranks that each have a copy of the model; None for one.
    """
    mine = rows if mesh is None else rows[mesh.get_local_rank() :: mesh.size()]
    return (mine, True) if len(mine) else (rows[:1], False)


def sum_over_ranks(tensors: Sequence[Tensor], mesh: DeviceMesh | None) -> Sequence[Tensor]:
    """Tensors of one dtype summed over ranks, by one collective for all of them."""
    if mesh is None or mesh.size() == 1:
        return tensors
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    dist.all_reduce(flat, group=mesh.get_group())
    pieces = flat.split([tensor.numel() for tensor in tensors])
    return [piece.view_as(tensor) for piece, tensor in zip(pieces, tensors, strict=True)]


def over_ranks(mine: LossSum, square: Tensor, mesh: DeviceMesh | None) -> tuple[LossSum, float]:
    """The sums of all ranks, and the squared norm of all their gradients: two small collectives, in float64."""
    if mesh is None or mesh.size() == 1:
        return mine, float(square)
    names = sorted(mine.metrics)
    tops = [metric.largest for name in names if isinstance(metric := mine.metrics[name], Max)]
    added = [part for name in names for part in _addends(mine.metrics[name])]
    sums = torch.cat([part.double().reshape(-1) for part in (square, mine.total, mine.weight, *added)])
    dist.all_reduce(sums, group=mesh.get_group())
    largest = torch.stack([top.double() for top in tops]) if tops else sums.new_empty(0)
    if tops:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=mesh.get_group())
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


def _local(tensor: Tensor) -> Tensor:
    """The shard of a tensor that this rank has; the tensor itself where it is whole."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
