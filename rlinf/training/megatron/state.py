"""A split model and its optimizer in the one format of checkpoints, and back: by the names that transformers gives.

Each of Megatron's parameters is made of pieces: rectangles of tensors of the Hugging Face model, under their names in
transformers. Everything that reads or writes weights goes by them: reading checkpoints, publishing, saving, and the
running means of an optimizer, which are shaped like Megatron's parameters.

A `StateCopy` is as a model under FSDP has it (`training/checkpoint.py`), so that either goes on from what the other
saved, on any number of ranks. Nothing is communicated: each rank writes the rectangles it is the first to have, and
reads those it has.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from rlinf.training.checkpoint import (
    Restored,
    Source,
    StateCopy,
    StateFiles,
    check_fits,
    generators,
    host_copy,
    kept_by,
    optimizer_groups,
    restored,
    set_generators,
    take_over,
    told_of,
)
from rlinf.training.megatron.layers import Stage
from rlinf.training.megatron.layout import Groups, head_size
from rlinf.training.weight_sync import Part

View = Callable[[Tensor], Tensor]
"""Function from a tensor shaped like a parameter to the part that a piece is; it shares memory, and may be strided."""


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """A rectangle of a tensor of the model, which a parameter holds."""

    name: str
    """Name of the tensor, in transformers."""
    parameter: nn.Parameter
    view: View
    """Where in the parameter it is."""
    shape: tuple[int, ...]
    """Shape of the rectangle."""
    offset: tuple[int, ...]
    """Where in the tensor it begins."""
    first: bool
    """True on the first of the ranks that have it: the one that writes it."""

    def of(self, tensor: Tensor) -> Tensor:
        """The piece of a tensor shaped like the parameter; a copy where it is strided."""
        return self.view(tensor).reshape(self.shape)

    @torch.no_grad()
    def write(self, start: int, into: Tensor) -> None:
        """Copy as many rows of the piece as `into` has, from `start` on, without another copy of them."""
        view = self.view(self.parameter)
        if view.shape == self.shape:
            into.copy_(view.narrow(0, start, len(into)))
            return
        stretch = self.shape[0] // len(view)  # rows that lie behind one another
        done = 0
        while done < len(into):
            number, first = divmod(start + done, stretch)
            count = min(stretch - first, len(into) - done)
            into.narrow(0, done, count).copy_(view[number].view(-1, *self.shape[1:]).narrow(0, first, count))
            done += count

    @torch.no_grad()
    def put(self, tensor: Tensor, values: Tensor) -> None:
        """Write values, shaped like the piece, into a tensor shaped like the parameter."""
        target = self.view(tensor)
        target.copy_(values.reshape(target.shape))


@dataclass(frozen=True, slots=True)
class Sharing:
    """Which ranks have a parameter, and who of them counts it."""

    summed: str
    """Kind of the group over which its gradients are added up."""
    counts: bool
    """This rank counts it in the gradient's norm, and writes it."""
    both_ends: bool
    """The first and the last stage have it, the embedding that is tied to the head."""


def sharing(name: str, groups: Groups, tied: bool) -> Sharing:
    """Return how ranks share a parameter.

    Args:
        name: within its stage.
        groups: this rank's.
        tied: input and output embedding are one.
    """
    at = groups.place
    if ".local_experts." in name:
        return Sharing("twins", at.twin == 0, False)
    lead = at.context == 0 and at.data == 0
    spread = re.search(r"linear_(qkv|proj|fc1|fc2)\.|^embedding\.|^head$", name) is not None
    ends = tied and groups.grid.parallel.pipeline > 1 and (name == "head" or name.startswith("embedding."))
    if spread:
        return Sharing("same", lead and not (ends and name == "head"), ends)
    if name.startswith("score."):  # all ranks of a tensor compute it whole
        return Sharing("same", lead and at.tensor == 0, False)
    return Sharing("stage", lead and at.tensor == 0, False)


def pieces_of(stages: Sequence[Stage], model: Any, groups: Groups) -> Iterator[Piece]:
    """All pieces that a rank has.

    Args:
        stages: the rank's.
        model: Hugging Face's configuration.
        groups: the rank's.
    """
    for stage in stages:
        numbers = [layer.layer_number - 1 for layer in stage.decoder.layers]
        for name, parameter in stage.named_parameters():
            first = sharing(name, groups, model.tie_word_embeddings).counts
            for checkpoint_name, view, shape, offset in _parts(name, parameter, stage, numbers, model, groups):
                yield Piece(checkpoint_name, parameter, view, shape, offset, first)


_Part = tuple[str, View, tuple[int, ...], tuple[int, ...]]
_COPIED = {
    "input_layernorm": "input_layernorm",
    "pre_mlp_layernorm": "post_attention_layernorm",
    "self_attention.q_layernorm": "self_attn.q_norm",
    "self_attention.k_layernorm": "self_attn.k_norm",
    "mlp.router": "mlp.gate",
}


def _parts(
    name: str, parameter: Tensor, stage: Stage, numbers: Sequence[int], model: Any, groups: Groups
) -> Iterator[_Part]:
    rank, shape = groups.place.tensor, tuple(parameter.shape)
    none = (0,) * len(shape)
    if name.startswith("embedding.") or name == "head":
        embeds = name != "head" or model.tie_word_embeddings
        checkpoint_name, rows = "model.embed_tokens.weight" if embeds else "lm_head.weight", stage.own_rows
        yield checkpoint_name, lambda it: it[:rows], (rows, shape[1]), (rank * stage.rows, 0)
        return
    if name.startswith("score."):
        yield name, _itself, shape, none
        return
    if name == "decoder.final_layernorm.weight":
        yield "model.norm.weight", _itself, shape, none
        return
    matched = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)\.(weight|bias)", name)
    assert matched is not None, name
    prefix, inner, kind = f"model.layers.{numbers[int(matched[1])]}", matched[2], matched[3]
    if inner in _COPIED:
        yield f"{prefix}.{_COPIED[inner]}.{kind}", _itself, shape, none
    elif inner == "self_attention.linear_qkv":
        yield from _attention(f"{prefix}.self_attn", kind, shape, rank, model)
    elif inner in ("self_attention.linear_proj", "mlp.linear_fc2"):
        to = "self_attn.o_proj" if inner.startswith("self") else "mlp.down_proj"
        yield f"{prefix}.{to}.{kind}", _itself, shape, (0, rank * shape[1])
    elif inner == "mlp.linear_fc1":
        half = shape[0] // 2
        for place, to in enumerate(("gate_proj", "up_proj")):
            view = _rows(place * half, half)
            yield f"{prefix}.mlp.{to}.{kind}", view, (half, *shape[1:]), (rank * half, 0)
    else:
        expert = re.fullmatch(r"mlp\.experts\.local_experts\.(\d+)\.linear_fc([12])", inner)
        assert expert is not None, name
        here = stage.config.num_moe_experts // groups.grid.parallel.expert
        number = groups.place.expert * here + int(expert[1])
        to = "gate_up_proj" if expert[2] == "1" else "down_proj"
        yield f"{prefix}.mlp.experts.{to}", lambda it: it[None], (1, *shape), (number, 0, 0)


def _attention(prefix: str, kind: str, shape: tuple[int, ...], rank: int, model: Any) -> Iterator[_Part]:
    """Megatron has, for each key head, its queries, its key and its value behind one another."""
    size, many = head_size(model), model.num_attention_heads // model.num_key_value_heads
    groups = shape[0] // ((many + 2) * size)

    def view(first: int, count: int) -> View:
        return lambda it: it.view(groups, many + 2, size, *shape[1:])[:, first : first + count]

    for to, first, count in (("q_proj", 0, many), ("k_proj", many, 1), ("v_proj", many + 1, 1)):
        rows = groups * count * size
        yield f"{prefix}.{to}.{kind}", view(first, count), (rows, *shape[1:]), (rank * rows, *[0] * (len(shape) - 1))


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _rows(start: int, count: int) -> View:
    return lambda tensor: tensor.narrow(0, start, count)


class Files:
    """The tensors of a saved model, by the names that they have in transformers' model.

    Args:
        files: the safetensors file of each tensor of the checkpoint.
    """

    def __init__(self, files: Mapping[str, Path]):
        self._files = files
        self._open: dict[Path, Any] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._files or self._of_expert(name, 0)[0] in self._files

    def read(self, piece: Piece) -> Tensor:
        """Read a piece's part of a tensor."""
        at = tuple(slice(start, start + size) for start, size in zip(piece.offset, piece.shape, strict=True))
        if piece.name in self._files:
            return self._slice(piece.name)[at]  # type: ignore[no-any-return]
        # transformers joins the matrices of experts, and checkpoints have them one by one
        parts = [
            torch.cat([self._slice(name)[...] for name in self._of_expert(piece.name, number)])
            for number in range(at[0].start, at[0].stop)
        ]
        return torch.stack(parts)[(slice(None), *at[1:])]

    def _slice(self, name: str) -> Any:
        path = self._files[name]
        if path not in self._open:
            self._open[path] = safe_open(path, framework="pt").__enter__()
        return self._open[path].get_slice(name)

    @staticmethod
    def _of_expert(name: str, number: int) -> list[str]:
        prefix, _, kind = name.rpartition(".")
        return [
            f"{prefix}.{number}.{each}.weight"
            for each in (("gate_proj", "up_proj") if "gate" in kind else ("down_proj",))
        ]


def fill(pieces: Sequence[Piece], values: Mapping[str, Tensor] | Files) -> list[str]:
    """Give parameters their values.

    Args:
        pieces: of this rank.
        values: whole tensors by name, or a saved model.

    Returns:
        The names that they do not have, whose pieces stay as they are.
    """
    missing = []
    for piece in pieces:
        if piece.name not in values:
            missing.append(piece.name)
            continue
        if isinstance(values, Files):
            piece.put(piece.parameter.data, values.read(piece))
        else:
            at = tuple(slice(start, start + size) for start, size in zip(piece.offset, piece.shape, strict=True))
            piece.put(piece.parameter.data, values[piece.name][at])
    return missing


Shapes = Mapping[str, Tensor]
"""The parameters of transformers' model, without memory, by name and in its order."""


@dataclass(frozen=True, slots=True)
class _Rectangle:
    """The pieces of one tensor that a rank has, which together are a rectangle of it."""

    name: str
    """Name of the tensor, in transformers."""
    pieces: list[Piece]
    """Each in its place; no two have a number in common."""
    first: tuple[int, ...]
    """Where in the tensor it begins."""
    size: tuple[int, ...]
    """Its shape."""

    @staticmethod
    def of(name: str, pieces: list[Piece]) -> _Rectangle:
        """Return the rectangle that all pieces of a tensor make up."""
        first = tuple(map(min, zip(*(piece.offset for piece in pieces), strict=True)))
        ends = ([a + b for a, b in zip(piece.offset, piece.shape, strict=True)] for piece in pieces)
        size = tuple(last - start for last, start in zip(map(max, zip(*ends, strict=True)), first, strict=True))
        assert sum(prod(piece.shape) for piece in pieces) == prod(size), name
        return _Rectangle(name, pieces, first, size)

    def gathered(self, of: Callable[[Piece], Tensor]) -> Tensor:
        """One tensor in host memory of what its pieces have, [*size]; `of` gives what is shaped like a parameter."""
        whole = torch.empty(self.size, dtype=of(self.pieces[0]).dtype)
        for piece in self.pieces:
            whole[self._place(piece)].copy_(piece.of(of(piece)))
        return whole

    def read(self, source: Source, key: str, whole: Sequence[int], into: Callable[[Piece], Tensor]) -> None:
        """Read it of a tensor of the shape `whole`, and put it where its pieces are."""
        dtype = source.stored.state_dict_metadata[key].properties.dtype  # type: ignore[union-attr]
        local = torch.empty(self.size, dtype=dtype)
        source.fill({key: Part.of(local, whole, self.first)})
        for piece in self.pieces:
            piece.put(into(piece), local[self._place(piece)])

    def _place(self, piece: Piece) -> tuple[slice, ...]:
        """Place of a piece in the rectangle."""
        places = zip(piece.offset, self.first, piece.shape, strict=True)
        return tuple(slice(a - b, a - b + size) for a, b, size in places)


def _rectangles(pieces: Iterable[Piece]) -> Iterator[_Rectangle]:
    by_name: dict[str, list[Piece]] = {}
    for piece in pieces:
        by_name.setdefault(piece.name, []).append(piece)
    for name, members in by_name.items():
        yield _Rectangle.of(name, members)


@dataclass(frozen=True, slots=True, eq=False)
class SplitModel:
    """A model as one of its ranks has it."""

    module: nn.Module
    """The rank's part."""
    pieces: Sequence[Piece]
    """The part's tensors, under the names of transformers."""
    shapes: Shapes
    """Shapes of the whole model."""
    rank: int
    """The rank."""
    ranks: int
    """The number of them."""


def copy_split_state(
    model: SplitModel, optimizer: Optimizer, schedule: LRScheduler, version: int, extra: Mapping[str, Any]
) -> StateCopy:
    """Copy what this rank is the first to have to host memory; blocking.

    Args:
        model: what the rank has.
        optimizer, schedule: of its part.
        version, extra: as for `copy_state`.
    """
    shards: dict[str, Tensor] = {}
    offsets: dict[str, tuple[int, ...]] = {}
    for part in _rectangles(piece for piece in model.pieces if piece.first):
        key = f"model.{part.name}"
        shards[key], offsets[key] = part.gathered(lambda piece: piece.parameter.detach()), part.first
        states = {piece.parameter: kept_by(optimizer, piece.parameter) for piece in part.pieces}
        for what, value in states[part.pieces[0].parameter].items():
            key = f"optimizer.{part.name}.{what}"
            if value.dim():
                shards[key] = part.gathered(lambda piece, states=states, what=what: states[piece.parameter][what])  # type: ignore[misc]
                offsets[key] = part.first
            elif not any(part.first):  # of the ranks with parts of it, one has where it begins
                shards[key], offsets[key] = host_copy(value.view(1)), (0,)
    for key, state in generators(model.rank, model.module).items():
        shards[key], offsets[key] = state, (0,)
    about = None if model.rank else told_of(version, model.ranks, _groups(model, optimizer), schedule, extra)
    return StateCopy(model.rank, about, shards, offsets, {})


def _groups(model: SplitModel, optimizer: Optimizer) -> dict[str, Any]:
    """The optimizer's groups as `optimizer_groups` says them, for the parameters of the whole model."""
    groups = optimizer_groups(model.module, optimizer)
    (group,) = groups["groups"]
    return {**groups, "groups": [{**group, "parameters": list(model.shapes)}]}


def load_split_state(model: SplitModel, optimizer: Optimizer, schedule: LRScheduler, source: Path | Source) -> Restored:
    """Take over a state that any number of ranks saved under any back end; blocking. Arguments as above.

    Raises:
        FileNotFoundError, ValueError: as of `load_state`.
    """
    try:
        stored_state: Source = StateFiles(source) if isinstance(source, Path) else source
        about, stored = stored_state.about, stored_state.stored
        check_fits(
            stored_state.name,
            stored,
            {f"model.{name}": shape for name, shape in model.shapes.items()},
            _groups(model, optimizer),
            about,
        )
        own = generators(model.rank, model.module)
        random = {key: value for key, value in own.items() if key in stored.state_dict_metadata}
        stored_state.fill(random)
        state: dict[nn.Parameter, tuple[str, dict[str, Tensor]]] = {
            parameter: (name, {}) for name, parameter in model.module.named_parameters()
        }
        names = {key.rpartition(".")[2] for key in stored.state_dict_metadata if key.startswith("optimizer.")}
        for part in _rectangles(model.pieces):
            whole = model.shapes[part.name].shape
            part.read(stored_state, f"model.{part.name}", whole, lambda piece: piece.parameter.data)
            of_pieces = {piece.parameter: state[piece.parameter][1] for piece in part.pieces}
            _read_optimizer(stored_state, part, whole, names, of_pieces)
    except SafetensorError as error:
        raise ValueError(f"{source} is damaged: resume from an earlier checkpoint ({error})") from error
    take_over(optimizer, state, about["optimizer"])
    set_generators(random, model.module)
    return restored(about, schedule)


def _read_optimizer(
    source: Source,
    part: _Rectangle,
    whole: Sequence[int],
    names: Iterable[str],
    state: Mapping[nn.Parameter, dict[str, Tensor]],
) -> None:
    """Read an optimizer's state of one tensor.

    Args:
        source: what was saved.
        part: what is here of the tensor.
        whole: the tensor's shape.
        names: what optimizers keep of some tensors, by their names.
        state: of each parameter of the part, where to put it, by the optimizer's names.
    """
    for what in names:
        key = f"optimizer.{part.name}.{what}"
        if key not in source.stored.state_dict_metadata:
            continue
        if what in source.about["optimizer"]["scalars"]:
            value = torch.empty(1)
            source.fill({key: value})
            for piece in part.pieces:
                state[piece.parameter][what] = value.view(()).clone()
            continue
        for piece in part.pieces:
            state[piece.parameter].setdefault(what, torch.zeros_like(piece.parameter.data))
        part.read(source, key, whole, lambda piece, what=what: state[piece.parameter][what])  # type: ignore[misc]
