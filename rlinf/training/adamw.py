"""AdamW for trainers: torch's own, or one by bitsandbytes that keeps its running means in 8 bits.

In: parameters, whole or sharded by FSDP2. Out: an optimizer as torch's are. What the 8-bit one keeps is a quarter of
AdamW's two means in float32; in checkpoints both look the same, so that a run may go on with the other one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from rlinf.data.offload import shard_of

Kind = Literal["adamw", "adamw_8bit"]
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
        ValueError: bitsandbytes is not installed.
    """
    if kind == "adamw":
        return torch.optim.AdamW(parameters, lr=lr, betas=betas, weight_decay=weight_decay, fused=True)
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
    on_cpu = all(parameter.device.type == "cpu" for part, _ in parts for parameter in part)
    return torch.optim.AdamW(groups, betas=betas, weight_decay=weight_decay, fused=True if on_cpu else None)


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
            raise ValueError(
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
            own.grad = None if parameter.grad is None or not own.numel() else shard_of(parameter.grad).contiguous()
        self._theirs.step()
        for parameter, own in self._own.items():
            own.grad = None
            if own in self._theirs.state:
                self.state[parameter] = self._theirs.state[own]

    def as_saved(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """What AdamW would keep of a parameter: the step, and the means in float32, sharded as the parameter is."""
        from bitsandbytes.functional import dequantize_blockwise

        if not (kept := self.state.get(parameter)):
            return {}
        found = {"step": torch.tensor(float(kept["step"]))}
        for name, end in _MEANS.items():
            mean = kept[f"state{end}"]
            if mean.dtype == torch.uint8:
                scale, code = kept[f"absmax{end}"], kept[f"qmap{end}"]
                mean = dequantize_blockwise(mean, absmax=scale, code=code, blocksize=_BLOCK)
            found[name] = _like(parameter, mean)
        return found

    def take(self, parameter: nn.Parameter, saved: Mapping[str, Tensor]) -> None:
        """Go on from what AdamW has kept of a parameter; 8 bits are rounded to anew."""
        from bitsandbytes.functional import quantize_blockwise

        own = self._own[parameter]
        self._theirs.init_state(self._theirs.param_groups[0], own, 0, 0)
        kept = self._theirs.state[own]
        kept["step"] = int(saved["step"])
        for name, end in _MEANS.items():
            mean = shard_of(saved[name]).to(own.device)
            if kept[f"state{end}"].dtype == torch.uint8:
                mean, scale = quantize_blockwise(mean.contiguous(), code=kept[f"qmap{end}"], blocksize=_BLOCK)
                kept[f"absmax{end}"] = scale.absmax
            kept[f"state{end}"] = mean
        self.state[parameter] = kept


def _like(parameter: Tensor, local: Tensor) -> Tensor:
    """A tensor that is spread as the parameter is, of which this rank has `local`."""
    if not isinstance(parameter, DTensor):
        return local
    mesh, places = parameter.device_mesh, parameter.placements
    return DTensor.from_local(local, mesh, places, shape=parameter.shape, stride=parameter.stride())
