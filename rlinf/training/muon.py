"""Muon for the hidden matrices of a model, and AdamW for all else: one optimizer, for whole matrices and for slices.

Muon's step on a matrix is the running mean of its gradient, made orthogonal by five steps of Newton and Schulz
(https://kellerjordan.github.io/posts/muon). These need the whole matrix, so matrices are dealt out to ranks: of those
that lie in slices each rank gathers some, makes them orthogonal and sends the slices back; of whole copies each rank
computes some for all. Running means stay where the weights are. Every number is the one that `torch.optim.Muon` has
for the same gradient, in bfloat16 as there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.modules.conv import _ConvNd
from torch.optim import Optimizer
from transformers.pytorch_utils import Conv1D

from rlinf.config.learning import LearningSettings
from rlinf.models.language.lora import ROUTERS, is_adapter
from rlinf.runtime.base.errors import WrongSetting
from rlinf.runtime.base.tensors import shard_of
from rlinf.runtime.transport.process_groups import all_gather

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the author's polynomial, whose slope at 0 is as steep as convergence to about 1 allows."""
_ITERATIONS = 5
"""Steps of it, as the author takes: singular values from 0.002 of the norm on come to 0.68 to 1.21."""
_LEAST_NORM = 1e-7
"""Least norm that a matrix is divided by, as in torch."""
_RMS = 0.2
"""Root mean square of AdamW's steps, which `match_rms_adamw` gives to Muon's (arXiv:2502.16982, eq. 4)."""


def hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that Muon is for: weights of linear layers, and of a mixture's experts, but no embedding, output
    head, router or adapter, and none of a single row or column."""
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    others = {id(parameter) for parameter in head.parameters()} if head is not None else set()
    inner: dict[int, nn.Parameter] = {}
    for name, module in model.named_modules():
        of_it = list(module.parameters(recurse=False))
        if isinstance(module, nn.Embedding | _ConvNd) or name.rpartition(".")[2] in ROUTERS or is_adapter(name):
            others |= {id(parameter) for parameter in of_it}
        elif isinstance(module, nn.Linear | Conv1D):
            inner |= {id(parameter): parameter for parameter in of_it if parameter.dim() == 2}
        else:  # experts that lie in one tensor
            inner |= {id(parameter): parameter for parameter in of_it if parameter.dim() == 3}
    return [each for key, each in inner.items() if key not in others and min(each.shape[-2:]) > 1]


class Muon(Optimizer):
    """Muon and AdamW, in two groups: first what AdamW learns, at the learning rate; then matrices, at a multiple of it.

    Args:
        parameters: to be learned.
        matrices: those of them that are Muon's; `hidden_matrices` has them.
        settings: of both.
        copies: ranks with whole copies, equal gradients and the same matrices in the same order, which share the work;
            None for one. Matrices in slices are shared by the ranks that have the slices.

    Raises:
        ValueError: there is no matrix, or one that is not spread by its rows.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        matrices: Sequence[nn.Parameter],
        settings: LearningSettings,
        copies: DeviceMesh | None = None,
    ):
        learned, muon = {id(each) for each in parameters}, settings.muon
        own = [each for each in matrices if id(each) in learned]
        if not own:
            raise WrongSetting("optimizer.kind=muon: no hidden matrix learns here; take adamw")
        if any(isinstance(each, DTensor) and list(each.placements) != [Shard(0)] for each in own):
            raise WrongSetting("optimizer.kind=muon: matrices split by trainer.parallel.tensor or expert; take adamw")
        mine = {id(each) for each in own}
        rest = [each for each in parameters if id(each) not in mine]
        lr, decay = settings.lr, settings.weight_decay
        self._adamw = torch.optim.AdamW([{"params": rest}], lr=lr, betas=settings.betas, weight_decay=decay, fused=True)
        group = {"params": own, "lr": lr * muon.lr_ratio, "weight_decay": decay, "momentum": muon.momentum}
        group |= {"nesterov": muon.nesterov, "adjust": muon.adjust}
        super().__init__([dict(self._adamw.param_groups[0]), group], {})
        self._adamw.param_groups, self._adamw.state = self.param_groups[:1], self.state
        self._copies = copies if copies is not None and copies.size() > 1 else None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Change the parameters that have a gradient; a collective."""
        assert closure is None
        self._adamw.step()
        group = self.param_groups[1]
        # alike ones together: the ranks of a round have as much to do as one another
        moved = sorted(
            (each for each in group["params"] if each.grad is not None), key=lambda one: one.shape, reverse=True
        )
        for parameter, direction in self._directions(moved, group):
            rate = group["lr"] * _adjusted(parameter.shape, group["adjust"])
            shard_of(parameter).mul_(1 - group["lr"] * group["weight_decay"]).add_(direction, alpha=-rate)

    def _directions(
        self, parameters: Sequence[nn.Parameter], group: dict[str, Any]
    ) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """This rank's part of each parameter's orthogonal step."""
        by_mesh: dict[DeviceMesh | None, list[nn.Parameter]] = {}
        for parameter in parameters:
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            by_mesh.setdefault(None if mesh is None or mesh.size() == 1 else mesh, []).append(parameter)
        for mesh, alike in by_mesh.items():
            ranks = self._copies if mesh is None else mesh
            size = 1 if ranks is None else ranks.size()
            for start in range(0, len(alike), size):
                together = alike[start : start + size]
                updates = [self._update(parameter, group) for parameter in together]
                if ranks is None:
                    yield together[0], orthogonal(updates[0])
                elif mesh is None:
                    yield from zip(together, _computed_by_turns(updates, ranks), strict=True)
                else:
                    yield from zip(together, _gathered_by_turns(together, updates, ranks), strict=True)

    def _update(self, parameter: nn.Parameter, group: dict[str, Any]) -> Tensor:
        """This rank's part of the running mean of the gradient, with the gradient once more of Nesterov, in the
        precision to go on in; the mean is moved on."""
        gradient = shard_of(parameter.grad)  # type: ignore[arg-type]
        if not (state := self.state[parameter]):
            state["momentum_buffer"] = torch.zeros_like(parameter)
        mean = shard_of(state["momentum_buffer"]).lerp_(gradient, 1 - group["momentum"])
        update = gradient.lerp(mean, group["momentum"]) if group["nesterov"] else mean
        # noise of bfloat16 comes out as large as the rest in directions without gradient; who takes float64 compares
        return update if update.dtype == torch.float64 else update.bfloat16()


def orthogonal(update: Tensor) -> Tensor:
    """U V^T of a matrix U S V^T, about: singular values far from 0 come to 0.68 to 1.21.

    Args:
        update: [..., rows, columns], in the precision to compute in; each of several by itself.
    """
    a, b, c = _COEFFICIENTS
    tall = update.size(-2) > update.size(-1)
    x = (update.mT if tall else update).flatten(0, -3) if update.dim() > 2 else (update.mT if tall else update)[None]
    norms = torch.stack([one.norm() for one in x])  # each as torch's, which sums a matrix in one order and a batch not
    x = x / norms.clamp(min=_LEAST_NORM)[:, None, None]
    for _ in range(_ITERATIONS):
        gram = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).reshape(update.shape)


def _adjusted(shape: torch.Size, adjust: str) -> float:
    """Factor of the learning rate of a matrix; by its size, as torch's `adjust_lr_fn`."""
    rows, columns = shape[-2:]
    return _RMS * math.sqrt(max(rows, columns)) if adjust == "match_rms_adamw" else math.sqrt(max(1, rows / columns))


def _computed_by_turns(updates: Sequence[Tensor], ranks: DeviceMesh) -> list[Tensor]:
    """Orthogonal matrices that each rank has whole; of so many ranks, each computes one at most for all."""
    me, longest = ranks.get_local_rank(), max(each.numel() for each in updates)
    mine = updates[0].new_zeros(longest)
    if me < len(updates):
        mine[: updates[me].numel()] = orthogonal(updates[me]).flatten()
    parts = mine.new_empty(ranks.size() * longest)
    all_gather(parts.view(torch.uint8), mine.view(torch.uint8), group=ranks.get_group())
    rows = parts.view(ranks.size(), longest)
    return [row[: each.numel()].view_as(each) for row, each in zip(rows, updates, strict=False)]


def _gathered_by_turns(parameters: Sequence[Tensor], updates: Sequence[Tensor], ranks: DeviceMesh) -> list[Tensor]:
    """Slices of orthogonal matrices of which each rank has a slice; of so many ranks, each gathers and computes one."""
    me, size = ranks.get_local_rank(), ranks.size()
    whole = parameters[me].shape if me < len(parameters) else torch.Size([0])
    row = math.prod(whole[1:])
    own = [
        max(0, min(-(-whole[0] // size), whole[0] - rank * -(-whole[0] // size))) * row for rank in range(size)
    ]  # torch.chunk's sizes
    slices = [each.numel() for each in updates] + [0] * (size - len(updates))
    matrix = _exchanged(torch.cat([each.flatten() for each in updates]), slices, own, ranks)
    if me < len(parameters):
        matrix = orthogonal(matrix.view(whole)).flatten()
    back = _exchanged(matrix, own, slices, ranks)
    return [part.view_as(each) for part, each in zip(back.split(slices), updates, strict=False)]


def _exchanged(mine: Tensor, sent: Sequence[int], received: Sequence[int], ranks: DeviceMesh) -> Tensor:
    """Send so many numbers to each rank, one behind another, and return those that each sent here."""
    width, result = mine.element_size(), mine.new_empty(sum(received))
    # as bytes, since gloo has no exchange in bfloat16
    dist.all_to_all_single(
        result.view(torch.uint8),
        mine.contiguous().view(torch.uint8),
        [width * each for each in received],
        [width * each for each in sent],
        group=ranks.get_group(),
    )
    return result
