"""Judges whether a faster way of computing a model is as near to the truth as the way that transformers has.

The truth is the model's own forward in float32, of the same weights. In half precision every way rounds, each
differently, and the larger the model the more: two that differ may both be right, so they are not compared with each
other. A way is right if its error is at most `RATIO` x that of transformers' own forward in the same dtype, on average
and in the largest hundredth. Below the rounding of the truth itself nothing is an error.

No second copy of the weights is made for it: in `wide` every operation takes its tensors as float32, so that at any
moment there is the float32 copy of a single matrix, of a large one in pieces; with gradients those of one layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

RATIO = 1.5
"""By which a way may be further from the truth than transformers."""
_PIECE = 1 << 26
"""Elements of a matrix that are float32 at a time: 256 MB."""
_SAMPLE = 4096
"""Elements of each parameter's gradient that are compared."""
_TURNED = 2e-5
"""1 - cosine below which two gradients are the same: that of float32 is rounded to bfloat16 where the weights are."""


class Way(NamedTuple):
    """How a model is run."""

    words: str = ""
    """For people, with why it is not run in a faster way; empty where nobody says."""
    usual: bool = True
    """It is the fastest way that there is on a CPU, on one."""
    slow: str = ""
    """Reason why a GPU is not put to use, for an alarm; empty where it is."""


def blocks(model: Any) -> list[nn.Module]:
    """The layers of a Hugging Face model, each of which is spread, gathered and checkpointed as a whole."""
    names = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in names]


class _Wide(TorchFunctionMode):
    """Has operations take float32 for tensors, and dtypes, of half precision; what they write into stays as it is."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if func is F.embedding:
            return _widened(func(*args, **kwargs))
        if func is F.linear and args[1].numel() > _PIECE and not kwargs:
            return _by_pieces(*args)
        if name == "__get__":  # a dtype, or nothing that depends on it
            return _widened(func(*args, **kwargs))
        target = name == "__setitem__" or name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))
        first, rest = (args[:1], args[1:]) if target else ((), args)
        out = {"out": kwargs.pop("out")} if "out" in kwargs else {}
        return func(*first, *tree_map(_widened, rest), **tree_map(_widened, kwargs), **out)


_HALF = (torch.bfloat16, torch.float16)


def length_of_text(tokens: int, dtype: torch.dtype) -> int:
    """Tokens of a made-up text: without half precision, where faults stand out from no rounding, half as many."""
    return tokens if dtype in _HALF else max(1, tokens // 2)


def _widened(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.float() if value.dtype in _HALF else value
    return torch.float32 if isinstance(value, torch.dtype) and value in _HALF else value


def _by_pieces(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A product with a large matrix, of which a piece at a time is float32."""
    rows = max(1, _PIECE // weight.shape[1])
    biases = [None] * len(weight.split(rows)) if bias is None else bias.split(rows)
    parts = zip(weight.split(rows), biases, strict=True)
    return torch.cat([F.linear(inputs.float(), part.float(), _widened(some)) for part, some in parts], dim=-1)


@contextmanager
def wide(model: nn.Module, blocks: Sequence[nn.Module]) -> Iterator[None]:
    """Have a model compute in float32 from weights of half precision.

    Args:
        model: all of it.
        blocks: its layers; with gradients each keeps its input alone.
    """
    inside = {id(part) for block in blocks for part in block.modules()}
    single = [
        part
        for part in model.modules()
        if id(part) not in inside
        and (next(part.children(), None) is None or next(part.parameters(recurse=False), None) is not None)
    ]
    before = [(part, part.__dict__.get("forward")) for part in (*blocks, *single)]
    for part in blocks:
        part.forward = _wide_block(getattr(part.forward, "uncheckpointed", part.forward))  # type: ignore[method-assign]
    for part in single:
        part.forward = _wide_forward(part.forward)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for part, forward in before:
            del part.forward
            if forward is not None:
                part.forward = forward


def _wide_forward(inner: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(inner)
    def forward(*arguments: Any, **keywords: Any) -> Any:
        with _Wide():
            return inner(*arguments, **keywords)

    return forward


def _wide_block(inner: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(inner)
    def forward(*arguments: Any, **keywords: Any) -> Any:
        again = _wide_forward(inner)
        if not torch.is_grad_enabled():
            return again(*arguments, **keywords)
        return checkpoint(partial(again, **keywords), *arguments, use_reentrant=False, preserve_rng_state=False)

    return forward


@dataclass(frozen=True, slots=True, eq=False)
class Results:
    """Numbers that a way gives for made-up texts."""

    numbers: Tensor
    """Log-probs, or others that count alike, of any shape."""
    gradient: Tensor | None = None
    """Gradient of something that depends on all of them, see `sampled_gradient`; None where it is not asked for."""


@dataclass(frozen=True, slots=True, eq=False)
class Truth:
    """Right numbers for made-up texts, and how far from them transformers itself is in the model's dtype."""

    exact: Results
    """In float32."""
    theirs: Results
    """By transformers in the model's own dtype."""
    dtype: torch.dtype = torch.float32
    """In which `exact` was computed; that of the model, where it cannot be computed in float32."""

    @classmethod
    def of(
        cls, compute: Callable[[], Results], model: nn.Module, blocks: Sequence[nn.Module], dtype: torch.dtype
    ) -> Self:
        """Compute both.

        Args:
            compute: runs the model by its own forward.
            model, blocks: see `wide`.
            dtype: in which it computes.
        """
        theirs = compute()
        if dtype not in _HALF:
            return cls(theirs, theirs, dtype)
        with wide(model, blocks):
            return cls(compute(), theirs)

    def at(self, *where: Any) -> Truth:
        """Part of the numbers, by their indices."""
        return Truth(Results(self.exact.numbers[where]), Results(self.theirs.numbers[where]), self.dtype)

    def refuses(self, ours: Results, texts: Tensor | None = None) -> str | None:
        """Why another way is not taken, with how far off it is; None if it is as near to the truth as transformers.

        Args:
            ours: by that way.
            texts: to which text each number belongs, int64 [numbers]: then most texts decide, since in one text alone
                rounding may have chosen other experts.
        """
        exact, own, theirs = (each.numbers.float() for each in (self.exact, ours, self.theirs))
        if own.shape != exact.shape:
            return f"it gives numbers of shape {list(own.shape)}, where {list(exact.shape)} would be right"
        bars = self._bars(exact, theirs)
        parts: list[Any] = [slice(None)] if texts is None else [texts == text for text in texts.unique()]
        near = [_within(_error(own[part], exact[part]), bars) for part in parts]
        if sum(near) * 2 <= len(near):
            errors = ("{:.2g} (1 in 100: {:.2g})".format(*_error(each, exact)) for each in (own, theirs))
            return "it is off by {} nats, where transformers is by {}".format(*errors)
        if ours.gradient is None or self.exact.gradient is None or self.theirs.gradient is None:
            return None
        gaps = [_turn(gradient, self.exact.gradient) for gradient in (ours.gradient, self.theirs.gradient)]
        if gaps[0] <= RATIO * max(gaps[1], _TURNED):
            return None
        return f"its gradient's cosine is {gaps[0]:.2g} below 1, where that of transformers is by {gaps[1]:.2g}"

    def _bars(self, exact: Tensor, theirs: Tensor) -> tuple[float, float]:
        """The largest mean error, and the largest of its 99th percentiles."""
        largest = float(exact.masked_fill(~exact.isfinite(), 0.0).abs().max()) if exact.numel() else 0.0
        least = torch.finfo(self.dtype).eps ** 0.5 / 3 * largest  # 1e-4 of it in float32
        mean, tail = _error(theirs, exact)
        return RATIO * max(mean, least / 10), RATIO * max(tail, least)


def _within(error: tuple[float, float], bars: tuple[float, float]) -> bool:
    return all(own <= bar for own, bar in zip(error, bars, strict=True))  # NaN is not


def _error(own: Tensor, exact: Tensor) -> tuple[float, float]:
    """Mean and 99th percentile of how far numbers are off; those that are not finite must be the same."""
    same = (own == exact) | (own.isnan() & exact.isnan())
    off = torch.where(same, 0.0, (own - exact).abs()).flatten()
    if not off.numel():
        return 0.0, 0.0
    return float(off.mean()), float(off.kthvalue(max(1, round(0.99 * off.numel()))).values)


def _turn(one: Tensor, other: Tensor) -> float:
    """1 - cosine of two vectors; 0 if both are 0."""
    if one.shape != other.shape:
        return torch.inf
    one, other = one.double(), other.double()
    sizes = float(one.norm() * other.norm())
    return 1.0 - float(one @ other) / sizes if sizes else float((one - other).norm())


def sampled_gradient(module: nn.Module) -> Tensor:
    """Some elements of every parameter's gradient on this rank, float32 [elements]; the gradients are gone."""
    from torch.distributed.tensor import DTensor  # which takes half a second

    parts = [torch.empty(0)]
    for parameter in module.parameters():
        if (grad := parameter.grad) is not None:
            flat = (grad.to_local() if isinstance(grad, DTensor) else grad).detach().flatten()
            parts.append(flat[:: max(1, flat.numel() // _SAMPLE)].float().cpu())
            parameter.grad = None
    return torch.cat(parts)
