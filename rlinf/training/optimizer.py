"""One optimizer step on the mean of a loss over all ranks: for language models and for policies that act.

`optimizer_step` sums gradients over ranks and divides once, by the count of all ranks, so it does not matter how a
batch was cut or how many ranks share it. It blocks; every rank calls it in the same order, since it is a collective.
`lr_factor` is the schedule of a learning rate, which follows from the number of steps alone. `adamw` is torch's own, or
one by bitsandbytes that keeps its running means in 8 bits, a quarter of their memory; in checkpoints both look the
same, so that a run may go on with the other one.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from rlinf.algos.loss_sum import EffectiveSize, Explained, LossSum, Max, Mean, Metric, MetricGroup, within
from rlinf.config.learning import LearningSettings
from rlinf.runtime.base.errors import WrongSetting
from rlinf.runtime.base.tensors import give_back_freed, keep_freed, shard_of

Schedule = Literal["constant", "linear", "cosine"]
"""The course of the learning rate after the warm-up."""
SCHEDULES = ("constant", "linear", "cosine")


def lr_factor(done: int, schedule: Schedule, warmup_steps: int, total_steps: int | None, min_ratio: float) -> float:
    """The factor of the learning rate in the step after `done` steps.

    It rises linearly to 1 in step `warmup_steps`. Then it stays there ("constant"), or falls towards `min_ratio`, in a
    straight line ("linear") or as half a cosine (SGDR, arXiv:1608.03983, eq. 5). It would be there one step behind
    `total_steps`: the last step learns too, as in transformers, where a line ends at 1/N; a run of one step learns at
    the full rate. Later steps have the factor of the last one.
    """
    step, peak = done + 1, max(1, warmup_steps)
    if step < warmup_steps:
        return step / warmup_steps
    if schedule == "constant" or total_steps is None:
        return 1.0
    falling = max(1, total_steps + 1 - peak)
    way = min(step - peak, falling - 1) / falling
    remaining = 1.0 - way if schedule == "linear" else (1.0 + math.cos(math.pi * way)) / 2.0
    return min_ratio + (1.0 - min_ratio) * remaining


Kind = Literal["adamw", "adamw_8bit", "muon"]
_BLOCK = 256
"""Neighbours that share a scale in bitsandbytes' 8-bit states."""
_MEANS = {"exp_avg": "1", "exp_avg_sq": "2"}
"""AdamW's running means, and what ends bitsandbytes' names for them."""


def adamw(
    parameters: Sequence[nn.Parameter],
    kind: Kind = "adamw",
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    weight_decay: float = 0.0,
) -> Optimizer:
    """Make an optimizer (AdamW, arXiv:1711.05101; its states in 8 bits, arXiv:2110.02861).

    Args:
        parameters: to be learned.
        kind: "adamw", or "adamw_8bit", which needs bitsandbytes.
        lr, betas, weight_decay: as in torch's.

    Raises:
        ValueError: bitsandbytes is not installed, or it is to be Muon, which needs to know the model.
    """
    if kind == "muon":
        raise WrongSetting("optimizer.kind=muon: trainer.backend=fsdp alone has it; take adamw")
    if kind == "adamw":
        kinds = {(isinstance(each, DTensor), each.device.type, each.dtype) for each in parameters}
        alone = len(kinds) == 1 and not any(sliced or device != "cpu" for sliced, device, _ in kinds)
        optimizer = PlainAdamW if alone else torch.optim.AdamW
        return optimizer(parameters, lr=lr, betas=betas, weight_decay=weight_decay, fused=True)
    return AdamW8bit(parameters, lr=lr, betas=betas, weight_decay=weight_decay)


def adamw_of_parts(
    parts: Sequence[tuple[Sequence[nn.Parameter], float]], *, betas: tuple[float, float], weight_decay: float
) -> torch.optim.AdamW:
    """AdamW for parameters of which some are in slices and some are whole, as fast as it is on their device.

    Args:
        parts: parameters, each with their learning rate.
        betas, weight_decay: as in torch's.
    """
    groups = [
        {"params": alike, "lr": lr}
        for part, lr in parts
        for sliced in (True, False)  # no operation of torch takes both
        if (alike := [each for each in part if isinstance(each, DTensor) == sliced])
    ]
    # on a CPU the default is a dozen small operations per tensor, which took as long as the backward pass
    kinds = {(parameter.device.type, parameter.dtype) for part, _ in parts for parameter in part}
    fused = True if all(device == "cpu" for device, _ in kinds) else None
    kind = PlainAdamW if fused and len(kinds) == 1 else torch.optim.AdamW
    return kind(groups, betas=betas, weight_decay=weight_decay, fused=fused)


class PlainAdamW(torch.optim.AdamW):
    """torch's fused AdamW for parameters of one kind by its kernel alone. What torch does around that (marks for a
    compiler, looks at every kind of device, sorting) takes several times as long as the kernel on a small network."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Change the parameters that have a gradient."""
        assert closure is None
        for group in self.param_groups:
            lists: tuple[list[Tensor], ...] = ([], [], [], [], [], [])  # parameters, gradients, two means, none, steps
            self._init_group(group, *lists)
            if not lists[0]:
                continue
            torch._foreach_add_(lists[-1], 1)
            torch._fused_adamw_(
                *lists,
                lr=group["lr"],
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                amsgrad=False,
                maximize=False,
            )


class AdamW8bit(Optimizer):
    """bitsandbytes' AdamW on what this rank has of each parameter; arguments as for `adamw`.

    The means of parameters of fewer than 4,096 numbers stay in float32.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], *, lr: float, betas: tuple[float, float], weight_decay: float
    ):
        logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)  # on kernels that nobody asked for
        try:
            from bitsandbytes.optim import AdamW8bit as Theirs
        except ModuleNotFoundError:
            raise WrongSetting(
                "optimizer.kind=adamw_8bit: bitsandbytes is not installed; pip install 'rlinf[optim8]'"
            ) from None
        super().__init__(parameters, {"lr": lr, "betas": betas, "eps": 1e-8, "weight_decay": weight_decay})
        ours = [parameter for group in self.param_groups for parameter in group["params"]]
        local = [nn.Parameter(shard_of(parameter.detach())) for parameter in ours]  # the same memory
        self._own = dict(zip(ours, local, strict=True))
        self._theirs = Theirs(local, lr=lr, betas=betas, weight_decay=weight_decay)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Change the parameters that have a gradient."""
        assert closure is None
        (group,), (inner,) = self.param_groups, self._theirs.param_groups
        inner |= {key: group[key] for key in ("lr", "betas", "eps", "weight_decay")}
        for parameter, own in self._own.items():
            if parameter not in self.state:  # it was cleared, as any optimizer's can be
                self._theirs.state.pop(own, None)
            own.grad = None if parameter.grad is None or not own.numel() else shard_of(parameter.grad).contiguous()
        self._theirs.step()
        for parameter, own in self._own.items():
            own.grad = None
            if own in self._theirs.state:
                self.state[parameter] = self._theirs.state[own]

    def as_saved(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """State of AdamW for a parameter: the step, and the means in float32, sharded as the parameter is."""
        from bitsandbytes.functional import dequantize_blockwise

        if not (state := self.state.get(parameter)):
            return {}
        tensors = {"step": torch.tensor(float(state["step"]))}
        for name, end in _MEANS.items():
            mean = state[f"state{end}"]
            if mean.dtype == torch.uint8:
                scale, code = state[f"absmax{end}"], state[f"qmap{end}"]
                mean = dequantize_blockwise(mean, absmax=scale, code=code, blocksize=_BLOCK)
            tensors[name] = _like(parameter, mean)
        return tensors

    def take(self, parameter: nn.Parameter, saved: Mapping[str, Tensor]) -> None:
        """Go on from what AdamW has kept of a parameter; 8 bits are rounded to anew."""
        from bitsandbytes.functional import quantize_blockwise

        own = self._own[parameter]
        self._theirs.init_state(self._theirs.param_groups[0], own, 0, 0)
        state = self._theirs.state[own]
        state["step"] = int(saved["step"])
        for name, end in _MEANS.items():
            mean = shard_of(saved[name]).to(own.device)
            if state[f"state{end}"].dtype == torch.uint8:
                mean, scale = quantize_blockwise(mean.contiguous(), code=state[f"qmap{end}"], blocksize=_BLOCK)
                state[f"absmax{end}"] = scale.absmax
            state[f"state{end}"] = mean
        self.state[parameter] = state


def _like(parameter: Tensor, local: Tensor) -> Tensor:
    """A tensor that is spread as the parameter is, of which this rank has `local`."""
    if not isinstance(parameter, DTensor):
        return local
    mesh, places = parameter.device_mesh, parameter.placements
    return DTensor.from_local(local, mesh, places, shape=parameter.shape, stride=parameter.stride())


_BUCKET_BYTES = 1 << 26
"""Bytes of gradients that are summed over ranks at once: enough for a network's full speed, little beside a model."""


def minimize(
    loss: LossSum | Iterable[Callable[[], LossSum]],
    parameters: Sequence[Tensor],
    optimizer: Optimizer,
    *,
    mesh: DeviceMesh | None = None,
    grad_clip: float = math.inf,
) -> tuple[LossSum, float]:
    """Back-propagate a loss and take one optimizer step, where every rank has a copy of the parameters, or a slice.

    Args:
        loss: this rank's sums, differentiable; of weight 0 where it has no work. Or what makes them, micro-batch by
            micro-batch: each is made, back-propagated and let go before the next; as many on every rank.
        parameters: what is changed, in the same order on every rank; other parameters of the optimizer stay as they
            are. They may be sharded by FSDP2, all or some, over all ranks of the mesh.
        optimizer: one that skips parameters without a gradient, as torch's do.
        mesh: ranks that share the batch; None for one.
        grad_clip: see `optimizer_step`.

    Returns:
        See `optimizer_step`. Without any weight on any rank nothing changes, and the norm is 0.

    Raises:
        FloatingPointError: the loss or the gradient is not finite; nothing has changed.
    """
    forget_gradients(optimizer)
    sharded = any(isinstance(parameter, DTensor) for parameter in parameters)
    parts: list[LossSum] = []
    for make in [lambda: loss] if isinstance(loss, LossSum) else loss:
        part = make()
        if sharded:  # FSDP2 sums over ranks at the end of each backward pass
            part.total.backward()  # type: ignore[no-untyped-call]
        else:
            _add_gradients(part.total, parameters)
        parts.append(part.detach())
        del part  # with its graph, before the next one is made
    if sharded:
        _forget_others(parameters, optimizer)
    if mesh is not None and mesh.size() > 1:
        sum_over_copies([each for each in parameters if not isinstance(each, DTensor)], mesh)
    leads = sharded or mesh is None or mesh.get_local_rank() == 0
    whole = reduce(add, parts)
    try:
        return optimizer_step(whole, parameters, optimizer, ranks=mesh, leads=lambda _: leads, grad_clip=grad_clip)
    finally:
        forget_gradients(optimizer)


def _add_gradients(total: Tensor, parameters: Sequence[Tensor]) -> None:
    """Add the gradients of a sum to those of some parameters, and to nothing else; 0 for what it does not depend on."""
    for parameter, addend in zip(parameters, torch.autograd.grad(total, parameters, allow_unused=True), strict=True):
        gradient = torch.zeros_like(parameter) if addend is None else addend
        parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)


def _forget_others(parameters: Sequence[Tensor], optimizer: Optimizer) -> None:
    """Drop the gradients of an optimizer's parameters but for some."""
    own = {id(parameter) for parameter in parameters}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in own:
                parameter.grad = None


def optimizer_step(
    loss: LossSum,
    parameters: Sequence[Tensor],
    optimizer: Optimizer,
    *,
    ranks: DeviceMesh | None = None,
    parts: DeviceMesh | None = None,
    leads: Callable[[Tensor], bool] = lambda _: True,
    grad_clip: float = math.inf,
    named: Iterable[tuple[str, Tensor]] | None = None,
) -> tuple[LossSum, float]:
    """Divide gradients by what was counted on all ranks, clip them, and take one optimizer step.

    Args:
        loss: this rank's sums, without graph.
        parameters: whose `grad` has the un-normalised gradient, summed over ranks; they may be sharded.
        optimizer: what takes the step.
        ranks: all that share the batch, in one dimension; None for one.
        parts: those that have parts of one copy of the model and, but for them, the same of the batch; None for one,
            and where `ranks` are all there are.
        leads: whether this rank's gradient of a parameter counts in the norm; of ranks with equal gradients, one leads.
            Beside sharded parameters, those that every rank has whole count once all the same.
        grad_clip: a gradient with a larger global norm is scaled down to it.
        named: everything that the loss depends on, for the error to name what is not finite; the same on every rank.
            Default: `parameters`, by number.

    Returns:
        The sums of all ranks, and the norm of the gradient before clipping. If the sums' weight is 0, no step was taken
        and the norm is 0.

    Raises:
        FloatingPointError: the loss or the gradient is not finite; the parameters have not changed.
    """
    gradient_of = {parameter: parameter.grad for parameter in parameters if parameter.grad is not None}
    gradients = [shard_of(gradient) for gradient in gradient_of.values()]
    square = torch.zeros((), dtype=torch.float64, device=gradients[0].device if gradients else None)
    if counted := _counted_here([gradient for parameter, gradient in gradient_of.items() if leads(parameter)], ranks):
        square = torch.stack(torch._foreach_norm(counted)).double().square().sum()
    gathered, total = over_ranks(loss, sum_over_ranks(square, parts), ranks)
    count = float(gathered.weight)
    if count == 0:
        return gathered, 0.0
    norm, mean = math.sqrt(total) / count, gathered.average()
    if not (math.isfinite(mean) and math.isfinite(norm)):
        cause = _cause_of_nan(_numbered(parameters) if named is None else dict(named), optimizer, ranks, parts)
        raise FloatingPointError(
            f"loss {mean} and gradient norm {norm} are not both finite: the step was not taken. {cause}"
        )
    torch._foreach_mul_(gradients, min(1.0, grad_clip / (norm + 1e-6)) / count)
    optimizer.step()
    return gathered, norm


def _counted_here(gradients: Sequence[Tensor], ranks: DeviceMesh | None) -> list[Tensor]:
    """The gradients that this rank counts in their norm: its shards, and where some are sharded, those that every rank
    has whole on one of them alone."""
    shards = [shard_of(each) for each in gradients if isinstance(each, DTensor)]
    whole = [each for each in gradients if not isinstance(each, DTensor)]
    alone = not shards or ranks is None or ranks.get_local_rank() == 0
    return [*shards, *(whole if alone else ())]


def _cause_of_nan(
    named: Mapping[str, Tensor], optimizer: Optimizer, ranks: DeviceMesh | None, parts: DeviceMesh | None
) -> str:
    """A hint after a loss or gradient that is not finite; a collective, to which all ranks come together."""
    steps = max((float(state.get("step", 1)) for state in optimizer.state.values() if state), default=0.0)
    counts = [(~shard_of(tensor.detach()).isfinite()).sum().double() for tensor in named.values()]
    mine = torch.stack([*counts, counts[0].new_tensor(steps)])
    wrong = sum_over_ranks(sum_over_ranks(mine, parts), ranks).tolist()
    broken = [name for name, count in zip(named, wrong, strict=False) if count]
    began = wrong[-1] == 0
    if broken:
        others = f" (and {len(broken) - 1} other parameters)" if len(broken) > 1 else ""
        return f"Before it, {broken[0]}{others} had values that are not finite: " + (
            "look at the files of the model, or at the warm-up that it came from"
            if began
            else "go on from a checkpoint of an earlier step, with a smaller learning rate"
        )
    if began:
        return (
            "It would have been this optimizer's first, so its learning rate is not the cause: look at the model "
            "(after a warm-up, at the rate of that), at the precision that it computes in, and at what it learns from"
        )
    return "A smaller learning rate is the usual cure"


def _numbered(parameters: Sequence[Tensor]) -> dict[str, Tensor]:
    return {f"parameter {number} of shape {list(one.shape)}": one for number, one in enumerate(parameters)}


def forget_gradients(optimizer: Optimizer) -> None:
    """Drop all gradients: `zero_grad` without the profiler's marks, which cost as much as a small layer."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


@dataclass(frozen=True, slots=True)
class Adam:
    """Hyperparameters of a single step of AdamW on a plain sum of losses, with the names that clients know."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0
    """A gradient with a larger norm is scaled down to it; 0 for no bound."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise ValueError(f"optim_step: {name}={value!r} must be a number")
            within("optim_step", name, value, 0.0, 1.0 if name.startswith("beta") else math.inf)
            if value == 1 and name.startswith("beta"):
                raise ValueError(f"optim_step: {name}={value} must be less than 1")

    def in_group(self, group: dict[str, Any]) -> None:
        """Set them in a group of parameters."""
        group["lr"] = torch.as_tensor(self.learning_rate) if isinstance(group["lr"], Tensor) else self.learning_rate
        group |= {"betas": (self.beta1, self.beta2), "eps": self.eps, "weight_decay": self.weight_decay}


@dataclass(frozen=True, slots=True)
class Sums:
    """Un-normalised sums of micro-batches, gathered for an optimizer step."""

    gradients: Mapping[str, Tensor]
    """By the names of the module's parameters; none of those that had no part in it."""
    loss: LossSum | None
    """Their loss; None: nothing came."""


class ScheduledOptimizer:
    """Trains a model with AdamW, a schedule of the learning rate, and a bound on the gradient's norm.

    Between two steps only sums gather: gradients of un-normalised losses, and token counts. `step` divides once, by the
    count of everything that came to all ranks; so it does not matter how the batch was cut, or how many ranks share it.
    A subclass gathers them (`accumulate`), and adds them up over its ranks (`_take_step`).

    Args:
        module: trained in place; its frozen parameters stay as they are.
        settings: of the optimizer and its schedule.
        parameters: that it trains; None: all that are not frozen.

    Raises:
        ValueError: an unknown schedule, or one that falls without knowing when it ends.
    """

    def __init__(self, module: nn.Module, settings: LearningSettings, parameters: Sequence[nn.Parameter] | None = None):
        if settings.schedule not in SCHEDULES:
            raise ValueError(f"schedule={settings.schedule!r} is none of {list(SCHEDULES)}")
        if settings.schedule != "constant" and settings.total_steps is None:
            raise ValueError(f"schedule={settings.schedule!r} needs total_steps, the optimizer steps of the whole run")
        self.module, self._settings, self._grad_clip = module, settings, settings.grad_clip
        self._leads = True  # of all ranks that share a batch, one does
        learns = (parameter for parameter in module.parameters() if parameter.requires_grad)
        self._parameters = [*(learns if parameters is None else parameters)]
        if any(parameter.device.type == "cpu" for parameter in self._parameters):
            keep_freed()  # the next step's gradients and activations are as large
        self.optimizer = self._new_optimizer()
        self._hyperparameters = hyperparameters(self.optimizer)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self._factor)
        self._sum: LossSum | None = None

    def _new_optimizer(self) -> Optimizer:
        """A new optimizer of its parameters."""
        how = self._settings
        return adamw(self._parameters, how.kind, lr=how.lr, betas=how.betas, weight_decay=how.weight_decay)

    def _factor(self, done: int) -> float:
        """Share of the learning rate that a step has after so many others."""
        how = self._settings
        return lr_factor(done, how.schedule, how.warmup_steps, how.total_steps, how.min_lr_ratio)

    def begin(self) -> None:
        """Forget what has gathered since the last step, such as what an interrupted call left."""
        forget_gradients(self.optimizer)
        self._sum = None

    def resumed(self) -> None:
        """Go on with the hyperparameters given here, at the place in the schedule that a checkpoint brought."""
        set_hyperparameters(self.optimizer, self._hyperparameters)
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
        if self.schedule.last_epoch >= self._settings.warmup_steps:
            self.schedule.last_epoch += count
            self._set_rates()

    def step(self, adam: Adam | None = None) -> tuple[LossSum, dict[str, float]]:
        """Divide by the tokens that came to all ranks, clip, and take one optimizer step.

        Args:
            adam: hyperparameters of this step, before which nothing is divided; the schedule stays where it is.

        Returns:
            What gathered on all ranks, and `loss`, `grad_norm` (before clipping) and `lr` of this step; and what the
            module says of itself (`numbers`).

        Raises:
            ValueError: nothing came since the last step, or AdamW's hyperparameters are for another optimizer.
            FloatingPointError: the loss or the gradient is not finite; the weights have not changed.
        """
        if adam is not None and self._settings.kind == "muon":
            raise ValueError(
                "optim_step: its settings are AdamW's, and optimizer.kind=muon learns matrices; take adamw"
            )
        if self._sum is None:
            raise ValueError("there is nothing to learn from: no micro-batch came since the last step")
        first = not self.optimizer.state
        try:
            with nullcontext(self._sum) if adam is None else self._at(adam, self._sum) as mine:
                gathered, norm = self._take_step(mine)
        finally:
            self.begin()
        if first:  # its running means lie behind gradients, whose place the next ones would not fill
            give_back_freed()
        if float(gathered.weight) == 0:
            raise ValueError("there is not one token to learn from: every response was empty")
        lr = float(self.schedule.get_last_lr()[0]) if adam is None else adam.learning_rate
        if adam is None:
            self.schedule.step()
        numbers = {"loss": float(gathered.mean()), "grad_norm": norm, "lr": lr}
        return gathered, {**numbers, **getattr(self.module, "numbers", {})}

    @contextmanager
    def _at(self, adam: Adam, mine: LossSum) -> Iterator[LossSum]:
        """Have other hyperparameters than its own for a step; the sums, to be divided by 1, which one rank says."""
        before, self._grad_clip = self._grad_clip, adam.grad_clip_norm or math.inf
        for group in self.optimizer.param_groups:
            adam.in_group(group)
        try:
            yield LossSum(mine.total, torch.full_like(mine.weight, float(self._leads)), mine.metrics)
        finally:
            self._grad_clip = before
            set_hyperparameters(self.optimizer, self._hyperparameters)
            self._set_rates()

    def _add(self, total: LossSum) -> None:
        """Count the loss of a micro-batch whose gradient was added."""
        part = total.detach()
        self._sum = part if self._sum is None else self._sum + part

    def hand_over(self) -> Sums:
        """Give what has gathered since the last step, and forget it here."""
        gradients = {name: one.grad for name, one in self._parameters_named() if one.grad is not None}
        sums = Sums(gradients, self._sum)
        self.begin()
        return sums

    @torch.no_grad()
    def add(self, sums: Sums) -> None:
        """Add what gathered elsewhere, or before: bit for bit as if its micro-batches came now, of one at least."""
        for name, parameter in self._parameters_named():
            if (more := sums.gradients.get(name)) is not None:
                more = more.to(parameter.device)
                parameter.grad = more if parameter.grad is None else parameter.grad.add_(more)
        if sums.loss is not None:
            self._add(sums.loss.to(self._parameters[0].device))

    def _parameters_named(self) -> Iterator[tuple[str, nn.Parameter]]:
        own = {*self._parameters}
        return ((name, one) for name, one in self.module.named_parameters() if one in own)

    def _take_step(self, mine: LossSum) -> tuple[LossSum, float]:
        """Add gradients up over the ranks and take the step; arguments and results as of `optimizer_step`."""
        raise NotImplementedError(f"{type(self).__name__} takes no step: define _take_step")


LOCAL_CHOICES = frozenset({"params", "param_names", "foreach", "fused", "capturable", "differentiable"})
"""Keys of an optimizer's groups that say how it computes on this machine, not what."""


def hyperparameters(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Learning rate, decay and the like of each of an optimizer's groups, such as they are now."""
    return [
        {key: value for key, value in group.items() if key not in LOCAL_CHOICES} for group in optimizer.param_groups
    ]


def set_hyperparameters(optimizer: Optimizer, groups: Sequence[Mapping[str, Any]]) -> None:
    """Set what `hyperparameters` gave, in place of what a checkpoint brought."""
    for group, values in zip(optimizer.param_groups, groups, strict=True):
        group.update(values)


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


def sum_over_ranks(tensor: Tensor, ranks: DeviceMesh | None) -> Tensor:
    """A tensor added up over ranks."""
    if ranks is not None and ranks.size() > 1:
        tensor = tensor.clone()
        dist.all_reduce(tensor, group=ranks.get_group())
    return tensor


def sum_over_copies(parameters: Sequence[Tensor], copies: DeviceMesh) -> None:
    """Replace gradients by their sums over the copies of a model: one collective per bucket of them.

    Args:
        parameters: in the same order in every copy. One that has a gradient in any copy has one in all afterwards.
        copies: the ranks that hold the same part of the model.
    """
    for bucket in _buckets(parameters):
        has_gradient = torch.tensor(
            [float(parameter.grad is not None) for parameter in bucket], device=bucket[0].device
        )
        for parameter in bucket:
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        gradients = [shard_of(parameter.grad) for parameter in bucket if parameter.grad is not None]
        flat = torch.cat([*(gradient.reshape(-1) for gradient in gradients), has_gradient.to(gradients[0].dtype)])
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
        mine = shard_of(parameter).nbytes
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
        kind, own = type(mine.metrics[name]), mine.metrics[name]
        if isinstance(own, MetricGroup):
            metrics[name] = MetricGroup(next(pieces).view(own.sums.shape), own.metrics)
        elif kind is Max:
            metrics[name] = Max(next(highs))
        elif kind is Mean:
            metrics[name] = Mean(next(pieces)[0], next(pieces)[0])
        else:
            metrics[name] = (EffectiveSize if kind is EffectiveSize else Explained)(next(pieces))
    return LossSum(sums[1], sums[2], metrics), float(sums[0])


def _addends(metric: Metric) -> tuple[Tensor, ...]:
    """The part of a metric that is added over ranks."""
    if isinstance(metric, Mean):
        return metric.total, metric.weight
    if isinstance(metric, MetricGroup):
        return (metric.sums,)
    return () if isinstance(metric, Max) else (metric.moments,)
