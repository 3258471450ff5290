"""Several models on one base: sets of adapters in one pass, each row of a batch computed with those that are its own;
and `WholeWeights`, which stand in the place of the base's while a model that learns all of them computes.

The base's products are computed once over all rows, and each set of adapters adds its own, narrow product to the rows
that are its own. What a row gets is the same bit for bit whatever other rows are there, as far as `rows_apart` finds
that the machine's matrix products and vector instructions leave it so.

The output embedding's product is made in chunks of tokens, outside of its layer: `HeadProducts` is what adapters add to
the logits of a chunk.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rlinf.models.language.four_bits import Nf4
from rlinf.models.language.lora import adapted_layers, is_adapter, plain_name

_VECTOR = 32
"""Numbers that torch's vector instructions take at a time on a CPU, at most; what is left over at an end is rounded
otherwise."""
_MOST = 128
"""Rows of padding that are worth a common batch, at most."""
_ALIGNED = 64
"""Bytes on whose multiples torch lays tensors: products of some libraries round otherwise of what lies elsewhere."""


class Tenant(NamedTuple):
    """Rows of a batch that have adapters of their own."""

    adapter: str
    """Name of the adapters."""
    rows: slice
    """The tokens that are its own; those of another tenant are not among them."""
    learned: slice
    """Likewise of the learned ones, for which alone there are logits."""
    learns: bool
    """Its adapters get a gradient."""


@contextmanager
def rows_by(model: nn.Module, tenants: Sequence[Tenant]) -> Iterator[None]:
    """Compute each row with its own adapters, and those that are nobody's with the base model.

    Args:
        model: with the adapters of all.
        tenants: whose rows are where.
    """
    layers = list(adapted_layers(model))
    for layer in layers:
        layer.tenants = [each for each in tenants if each.adapter in layer.lora_A]
        layer.forward = partial(_forward, layer)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward, layer.tenants


def _forward(layer: Any, inputs: Tensor) -> Tensor:
    outputs: Tensor = layer.base_layer(inputs)
    if not layer.tenants:
        return outputs
    matrices = [matrix for each in layer.tenants for matrix in _matrices(layer, each)]
    parts = [(each.rows, float(layer.scaling[each.adapter])) for each in layer.tenants]
    return _AddProducts.apply(outputs, inputs, parts, *matrices)  # type: ignore[no-any-return]


def _matrices(layer: Any, tenant: Tenant) -> tuple[Tensor, Tensor]:
    down, up = layer.lora_A[tenant.adapter].weight, layer.lora_B[tenant.adapter].weight
    return (down, up) if tenant.learns else (down.detach(), up.detach())


class _AddProducts(torch.autograd.Function):
    """Add scale x A'ᵀ B'ᵀ of each part's own matrices to its rows of a layer's outputs, which are used up."""

    @staticmethod
    def forward(ctx: Any, outputs: Tensor, inputs: Tensor, parts: Any, *matrices: Tensor) -> Tensor:
        onto, every, narrow = outputs.flatten(0, -2), inputs.flatten(0, -2), []
        for (rows, scale), down, up in zip(parts, matrices[::2], matrices[1::2], strict=True):
            narrow.append(every[rows] @ down.t())
            onto[rows].addmm_(narrow[-1], up.t(), alpha=scale)
        ctx.mark_dirty(outputs)
        ctx.save_for_backward(inputs, *narrow, *matrices)
        ctx.parts = parts
        return outputs

    @staticmethod
    def backward(ctx: Any, *slopes: Any) -> Any:
        inputs, *saved = ctx.saved_tensors
        narrow, matrices = saved[: len(ctx.parts)], saved[len(ctx.parts) :]
        slope, every = slopes[0].flatten(0, -2), inputs.flatten(0, -2)
        for_inputs = torch.zeros_like(every) if ctx.needs_input_grad[1] else None
        gradients: list[Tensor | None] = []
        for number, (rows, scale) in enumerate(ctx.parts):
            down, up = matrices[2 * number], matrices[2 * number + 1]
            back = (slope[rows] @ up).mul_(scale)
            learns = ctx.needs_input_grad[3 + 2 * number]
            gradients += (
                [back.t() @ every[rows], (slope[rows].t() @ narrow[number]).mul_(scale)] if learns else [None] * 2
            )
            if for_inputs is not None:
                torch.mm(back, down, out=for_inputs[rows])
        return slopes[0], None if for_inputs is None else for_inputs.view_as(inputs), None, *gradients


class HeadProducts:
    """Narrow products that adapters add to logits, which are made chunk by chunk.

    The rows of each are cut into blocks from its own first on, and a block's product is made whole wherever chunks end:
    so its numbers do not depend on what lies before it.

    Args:
        rows: where each has its tokens.
        chunk: tokens whose logits exist at a time.
        matrices: of each, its narrow activations [its tokens, rank], and what makes logits of them [vocabulary, rank].
    """

    def __init__(self, rows: Sequence[slice], chunk: int, matrices: Sequence[Tensor]) -> None:
        self.rows, self._chunk, self.matrices = rows, chunk, matrices
        self._cut: dict[int, Tensor] = {}  # slopes of a block whose end is in the next chunk

    @classmethod
    def of(cls, head: Any, hidden: Tensor, chunk: int) -> HeadProducts | None:
        """Products that the adapters of an output embedding add to its logits of these hidden states, [tokens, width];
        None if none of them is in use."""
        tenants = getattr(head, "tenants", None)
        if tenants is None:
            names = () if head.disable_adapters else head.active_adapters
            tenants = [Tenant(name, slice(None), slice(None), True) for name in names if name in head.lora_A]
        matrices: list[Tensor] = []
        for each in tenants:
            down, up = _matrices(head, each)
            matrices += [(hidden[each.learned] @ down.t()) * float(head.scaling[each.adapter]), up]
        rows = [slice(*each.learned.indices(len(hidden))) for each in tenants]
        return cls(rows, chunk, matrices) if tenants else None

    def add(self, logits: Tensor, start: int) -> None:
        """Add them to the logits of a chunk that begins at `start`."""
        for number, block, whole, inside in self._blocks(start, start + len(logits)):
            narrow, up = self.matrices[2 * number : 2 * number + 2]
            product = narrow[block] @ up.t()
            logits[inside.start - start : inside.stop - start] += product[
                inside.start - whole.start : inside.stop - whole.start
            ]

    def learn(self, slope: Tensor, start: int, gradients: Sequence[Tensor | None]) -> None:
        """Add to the gradients of `matrices` what the slopes of a chunk's logits make of them, one chunk after the
        other; None: it is not asked for."""
        for number, block, whole, inside in self._blocks(start, start + len(slope)):
            own = slope[inside.start - start : inside.stop - start]
            if inside.stop < whole.stop:
                self._cut[number] = own.clone()
                continue
            if number in self._cut:
                own = torch.cat([self._cut.pop(number), own])
            if own.data_ptr() % _ALIGNED:
                own = own.clone()
            narrow, up = self.matrices[2 * number : 2 * number + 2]
            for_narrow, for_up = gradients[2 * number : 2 * number + 2]
            if for_narrow is not None:
                for_narrow[block] = own @ up
            if for_up is not None:
                for_up += own.t() @ narrow[block]

    def _blocks(self, start: int, stop: int) -> Iterator[tuple[int, slice, slice, slice]]:
        """Blocks with tokens in a chunk: whose, which of its rows, these among all tokens, and those in the chunk."""
        for number, mine in enumerate(self.rows):
            first, last = max(start, mine.start), min(stop, mine.stop)
            begin = mine.start + (first - mine.start) // self._chunk * self._chunk
            for at in range(begin, last, self._chunk) if first < last else ():
                whole = slice(at, min(at + self._chunk, mine.stop))
                block = slice(whole.start - mine.start, whole.stop - mine.start)
                yield number, block, whole, slice(max(first, at), min(last, whole.stop))


class WholeWeights:
    """All weights of a model once more, in float32 at least, to be learned apart from its own.

    Args:
        model: with adapters or without, whole on this rank.
        frozen: names of modules whose weights do not learn.

    Raises:
        ValueError: its own have 4 bits.
    """

    @torch.no_grad()
    def __init__(self, model: nn.Module, frozen: Collection[str]) -> None:
        self.named: dict[str, nn.Parameter] = {}
        """By their names in the plain model; tied ones once."""
        own: dict[nn.Parameter, nn.Parameter] = {}
        for path, weight in model.named_parameters():
            if is_adapter(path):
                continue
            if isinstance(weight, Nf4):
                raise ValueError("models of all weights need a base of more than 4 bits: leave model.lora.base out")
            name, dtype = plain_name(path), torch.promote_types(weight.dtype, torch.float32)
            learns = not {*frozen} & {*name.split(".")}
            self.named[name] = own[weight] = nn.Parameter(weight.detach().to(dtype, copy=True), learns)
        self._places = [
            (module._parameters, name, weight, own[weight])
            for module in model.modules()
            for name, weight in module._parameters.items()
            if weight is not None and weight in own
        ]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the model compute with them, and whoever asks for its parameters have them."""
        for parameters, name, _, mine in self._places:
            parameters[name] = mine
        try:
            yield
        finally:
            for parameters, name, weight, _ in self._places:
                parameters[name] = weight


class Apart(NamedTuple):
    """Common batches in which no row's results depend on the others."""

    multiple: int | None
    """Their rows are a multiple of this; None: there are none."""
    why: str = ""
    """There are none, and what helps."""


@torch.no_grad()
def rows_apart(model: nn.Module) -> Apart:
    """The smallest number of which a batch's rows must be a multiple for no row's results to depend on the others.

    Products of matrices are tried: some libraries take other ways for few rows, or cut sums among threads by how many
    there are. Vector instructions leave numbers over at the end of what each thread gets, so the multiple is one that
    leaves none. Elsewhere than on a CPU, where nothing is promised, it is 1.
    """
    weights = {tuple(each.weight.shape): each.weight for each in model.modules() if isinstance(each, nn.Linear)}
    if next(iter(weights.values())).device.type != "cpu":
        return Apart(1)
    threads = torch.get_num_threads()
    whole = _VECTOR * math.lcm(*range(1, threads + 1))
    widths = {width for shape in weights for width in shape if width >= _VECTOR // 8}
    even = [n for n in range(8, _MOST + 1, 8) if all(n * width % whole == 0 for width in widths)]
    if not even:
        return Apart(None, f"{threads} threads leave over numbers of its layers' widths: set OMP_NUM_THREADS=1")
    cheap = sorted(weights.values(), key=torch.numel)  # what fails shall do so before the vocabulary's turn
    for rows in even:
        for odd in cheap:
            if not _alike(odd, rows):
                break
        else:
            return Apart(rows)
    what = f"in products with a matrix of {list(odd.shape)}, what a row comes to depends on how many others there are"
    return Apart(None, f"{what}, with {threads} threads: set MKL_CBWR=AUTO,STRICT or OMP_NUM_THREADS=1")


def _alike(weight: Tensor, rows: int) -> bool:
    """Products of so many rows are those that the same rows have among others."""
    generator = torch.Generator().manual_seed(0)
    for transposed in (False, True):  # as they are computed forward and backward
        matrix = weight.t() if transposed else weight
        every = torch.randn(5 * rows, matrix.shape[1], generator=generator, dtype=weight.dtype)
        whole = nn.functional.linear(every, matrix)
        for start, count in ((0, rows), (rows + 3, rows), (3 * rows, 2 * rows), (1, 4 * rows)):
            if not torch.equal(
                nn.functional.linear(every[start : start + count], matrix), whole[start : start + count]
            ):
                return False
    return True
