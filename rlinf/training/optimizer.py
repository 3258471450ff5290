"""One optimizer step on the mean of a loss over all ranks.

In: each rank's un-normalised sums. Out: changed parameters, the same on every rank. Gradients are added over ranks and
divided once, by what was counted on all of them: it does not matter how many share a batch. Blocking code; one
collective after the other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from rlinf.algos.tensor.loss_sum import LossSum
from rlinf.training.learner import over_ranks


def mean_step(
    loss: LossSum,
    parameters: Sequence[Tensor],
    optimizer: Optimizer,
    *,
    mesh: DeviceMesh | None = None,
    grad_clip: float = math.inf,
) -> tuple[LossSum, float]:
    """Change some parameters of an optimizer by one step; the others stay as they are.

    Args:
        loss: this rank's sums, differentiable; of weight 0 where it has no work.
        parameters: what is changed, in the same order on every rank. Gradients reach nothing else.
        optimizer: one that skips parameters without a gradient, as torch's do.
        mesh: ranks that each have a copy; None for one.
        grad_clip: a gradient with a larger norm is scaled down to it.

    Returns:
        The sums of all ranks, and the norm of the gradient before clipping.

    Raises:
        FloatingPointError: the loss or the gradient is not finite; nothing has changed.
    """
    shared = mesh if mesh is not None and mesh.size() > 1 else None
    for group in optimizer.param_groups:  # as `zero_grad`, without the profiler's marks: those cost as much as a layer
        for parameter in group["params"]:
            parameter.grad = None
    found = torch.autograd.grad(loss.total, parameters, allow_unused=True)
    gradients = [
        torch.zeros_like(parameter) if gradient is None else gradient
        for parameter, gradient in zip(parameters, found, strict=True)
    ]
    if shared is not None:
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        dist.all_reduce(flat, group=shared.get_group())
        pieces = flat.split([gradient.numel() for gradient in gradients])
        gradients = [piece.view_as(gradient) for piece, gradient in zip(pieces, gradients, strict=True)]
    square = torch.stack(torch._foreach_norm(gradients)).double().square().sum()
    leads = shared is None or shared.get_local_rank() == 0  # gradients are equal by now: one rank says how long
    gathered, total = over_ranks(loss.detach(), square if leads else torch.zeros_like(square), shared)
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
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    optimizer.step()
    return gathered, norm
