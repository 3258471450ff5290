"""Linear layers with weights of 8 bits, which a CPU reads in a quarter of the time.

`round_layers` puts an `Int8Linear` in the place of every linear layer of a model. A weight becomes one of 255 multiples
of its output's scale. While a product is computed so do its inputs, row by row: what a row gives does not depend on the
others. The product is one of whole numbers, by torch's FBGEMM, and so exact: what is lost is lost by rounding alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rlinf.placement.hardware import cpu_products

_STEPS = 127
"""Multiples of a scale on either side of 0."""
_TINY = 1e-30
"""Least of the largest elements by which a weight's are divided."""
_PIECE = 1 << 17
"""Elements that are rounded at a time, which stay in a core's cache meanwhile."""


def no_int8(on_cpu: bool) -> str | None:
    """Why a model cannot be rounded on such devices; None if it can."""
    if not on_cpu:
        return "weights of 8 bits are for CPUs; leave it at full, or set placement.device_kind=cpu"
    if "avx512_vnni" not in cpu_products() or "fbgemm" not in torch.backends.quantized.supported_engines:
        return "this CPU, or its torch, has no products of 8 bits (avx512_vnni, FBGEMM); leave it at full"
    return None


class Int8Weight:
    """A matrix [outputs, inputs], or several that are multiplied in one, of 8 bits.

    Args:
        names: of the tensors that it is made of, one below the other.
        values: multiples of the scales, int8 [outputs, inputs].
        scales: float32 [outputs].
    """

    def __init__(self, names: Sequence[str], values: Tensor, scales: Tensor):
        self.names = tuple(names)
        self.squares = (0.0, 0.0)
        """Sums over all elements of the squares of what rounding changed, and of what there was before."""
        self.exact = False
        """Round nothing but the weight, see `Int8Layers.exactly`."""
        self._pack(values, scales)

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> Int8Weight:
        """Round a tensor."""
        values, scales, squares = _rounded(tensor)
        weight = cls([name], values, scales)
        weight.squares = squares
        return weight

    @classmethod
    def joined(cls, weights: Sequence[Int8Weight]) -> Int8Weight:
        """Weights of like inputs in one."""
        values, scales = zip(*(each.unpacked() for each in weights), strict=True)
        whole = cls([name for each in weights for name in each.names], torch.cat(values), torch.cat(scales))
        whole.squares, whole.exact = _sums(each.squares for each in weights), weights[0].exact
        return whole

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Round the tensors that it is made of, and take them."""
        values, scales, squares = zip(*(_rounded(tensors[name]) for name in self.names), strict=True)
        self._pack(torch.cat(values), torch.cat(scales))
        self.squares = _sums(squares)

    def unpacked(self) -> tuple[Tensor, Tensor]:
        """Multiples, int8 [outputs, inputs], and scales, float32 [outputs]."""
        matrix, _ = torch.ops.quantized.linear_unpack(self._packed)
        return matrix.int_repr(), matrix.q_per_channel_scales().float()

    def product(self, inputs: Tensor, bias: Tensor | None = None, onto: Tensor | None = None) -> Tensor:
        """[..., inputs] to [..., outputs], to which bias and `onto` are added."""
        rows = inputs.float()
        added = bias if onto is None or bias is None else onto + bias
        added = onto if added is None else added
        if self.exact:
            values, scales = self.unpacked()
            outputs = F.linear(rows, values * scales[:, None])
            return (outputs if added is None else outputs + added).to(inputs.dtype)
        scaled = rows.abs()
        largest = scaled.amax(dim=-1, keepdim=True)  # as the norm of torch.linalg, at a tenth of its time
        # A row of zeros becomes NaN, then some whole number, and by the last factor 0 again.
        outputs = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(
            torch.div(rows, largest, out=scaled), 1 / _STEPS, _STEPS + 1, self._packed
        )
        if added is None:
            outputs.mul_(largest)
        else:
            torch.addcmul(added.float(), outputs, largest, out=outputs)
        return outputs.to(inputs.dtype)  # type: ignore[no-any-return]

    def _pack(self, values: Tensor, scales: Tensor) -> None:
        zeros = torch.zeros(len(scales), dtype=torch.int64)
        with warnings.catch_warnings():  # torch 2.13 deprecates such tensors, and has no other way to this kernel
            warnings.simplefilter("ignore", UserWarning)
            matrix = torch._make_per_channel_quantized_tensor(values, scales.double(), zeros, 0)
        self._packed = torch.ops.quantized.linear_prepack(matrix, None)


class Int8Linear(nn.Module):
    """A linear layer with a weight of 8 bits; several may share one that has the rows of each.

    Args:
        linear: whose place it takes.
        name: of that one's weight.
    """

    def __init__(self, linear: nn.Linear, name: str):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.name = name
        """Of the tensor that its weight is made of."""
        self.bias = linear.bias
        self.weight = Int8Weight.of(name, linear.weight)
        self.rows = slice(0, linear.out_features)
        """Its own of the weight's outputs."""

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = self.weight.product(inputs)[..., self.rows]
        return outputs if self.bias is None else outputs + self.bias


def round_layers(model: nn.Module) -> None:
    """Put an `Int8Linear` in the place of every linear layer."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}  # of a tied head the embedding's
    for parent in list(model.modules()):
        for child, layer in list(parent.named_children()):
            if type(layer) is nn.Linear:
                setattr(parent, child, Int8Linear(layer, names[id(layer.weight)]))


def join(layers: Sequence[Int8Linear]) -> Int8Weight:
    """Have layers share one weight."""
    first = layers[0].weight
    if all(layer.weight is first for layer in layers):
        return first
    whole, start = Int8Weight.joined([layer.weight for layer in layers]), 0
    for layer in layers:
        layer.weight, layer.rows = whole, slice(start, start + layer.out_features)
        start += layer.out_features
    return whole


class Int8Layers:
    """The rounded layers of a model, for new weights to find.

    Args:
        model: of which `round_layers` may have rounded them.
    """

    words = "weights of 8 bits"

    def __init__(self, model: nn.Module):
        self._layers = [module for module in model.modules() if isinstance(module, Int8Linear)]

    def __bool__(self) -> bool:
        return bool(self._layers)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the tensors that they are made of, by name."""
        return {layer.name: (layer.out_features, layer.in_features) for layer in self._layers}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Round new tensors."""
        for weight in self._weights():
            weight.load(tensors)

    @property
    def error(self) -> float:
        """How far the weights are from those that came, as a share of their size (root of the sums of squares)."""
        changed, before = _sums(weight.squares for weight in self._weights())
        return (changed / before) ** 0.5 if before else 0.0

    @property
    def metrics(self) -> dict[str, float]:
        """The error by its name among metrics."""
        return {"weights/int8_error": self.error}

    def _weights(self) -> list[Int8Weight]:
        return list({id(layer.weight): layer.weight for layer in self._layers}.values())

    @contextmanager
    def exactly(self) -> Iterator[None]:
        """Have products round the weights alone: ways to compute a model are compared without what else is rounded,
        which is the same in all of them."""
        try:
            self._set_exact(True)
            yield
        finally:
            self._set_exact(False)

    def _set_exact(self, exact: bool) -> None:
        for weight in self._weights():
            weight.exact = exact


def _rounded(tensor: Tensor) -> tuple[Tensor, Tensor, tuple[float, float]]:
    """Multiples of the scales, int8 [outputs, inputs], the scales, float32 [outputs], and `Int8Weight.squares`."""
    values = torch.empty(tensor.shape, dtype=torch.int8)
    scales = torch.empty(len(tensor))
    step = max(1, _PIECE // tensor.shape[1])
    changed = before = torch.zeros(())
    for piece, into, scale in zip(tensor.detach().split(step), values.split(step), scales.split(step), strict=True):
        rows = piece.float()
        torch.amax(rows.abs(), dim=1, out=scale)
        scale.clamp_min_(_TINY).div_(_STEPS)
        multiples = rows / scale[:, None]
        nearest = multiples.round()
        into.copy_(nearest)
        changed = changed + multiples.sub_(nearest).square_().sum(1) @ scale.square()
        before = before + rows.square().sum()
    return values, scales, (float(changed), float(before))


def _sums(squares: Iterable[tuple[float, float]]) -> tuple[float, float]:
    changed, before = zip(*squares, strict=True)
    return sum(changed), sum(before)
