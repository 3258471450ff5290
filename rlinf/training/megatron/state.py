"""A split model and its optimizer in the one format of checkpoints, and back: by the names that transformers gives.

In: pieces, and an optimizer whose running means are shaped like Megatron's parameters. Out: a `StateCopy` as a model
under FSDP has it (`weights/train_state.py`), so that either goes on from what the other saved, on any number of ranks.
Nothing is communicated: each rank writes the rectangles it is the first to have, and reads those it has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from rlinf.training.megatron.pieces import Piece
from rlinf.weights.parts import Part
from rlinf.weights.state_tensors import generators, kept_by, optimizer_groups, set_generators, take_over
from rlinf.weights.train_state import FORMAT, Restored, Source, StateCopy, StateFiles, check_fits, host_copy, to_json

Shapes = Mapping[str, Tensor]
"""The parameters of transformers' model, without memory, by name and in its order."""


def _rectangles(pieces: Sequence[Piece]) -> Iterator[tuple[str, list[Piece], tuple[int, ...], tuple[int, ...]]]:
    """The pieces of each tensor, which together are one rectangle, and where it begins and how large it is."""
    by_name: dict[str, list[Piece]] = {}
    for piece in pieces:
        by_name.setdefault(piece.name, []).append(piece)
    for name, members in by_name.items():
        first = tuple(map(min, zip(*(piece.offset for piece in members), strict=True)))
        ends = ([a + b for a, b in zip(piece.offset, piece.shape, strict=True)] for piece in members)
        size = tuple(last - start for last, start in zip(map(max, zip(*ends, strict=True)), first, strict=True))
        assert sum(prod(piece.shape) for piece in members) == prod(size), name
        yield name, members, first, size


def _within(piece: Piece, first: Sequence[int]) -> tuple[slice, ...]:
    """Where a piece is in the rectangle that begins at `first`."""
    return tuple(slice(a - b, a - b + size) for a, b, size in zip(piece.offset, first, piece.shape, strict=True))


def copy_split_state(
    module: nn.Module,
    pieces: Sequence[Piece],
    shapes: Shapes,
    optimizer: Optimizer,
    schedule: LRScheduler,
    version: int,
    extra: Mapping[str, Any],
    *,
    rank: int,
    ranks: int,
) -> StateCopy:
    """Copy what this rank is the first to have to host memory; blocking.

    Args:
        module: this rank's part of the model.
        pieces: what it has, under the names of transformers.
        shapes: of the whole model.
        optimizer, schedule: of the part.
        version, extra, rank, ranks: as for `copy_state`.
    """
    shards: dict[str, Tensor] = {}
    offsets: dict[str, tuple[int, ...]] = {}

    def keep(key: str, members: Sequence[Piece], first: tuple[int, ...], size: tuple[int, ...], of: Any) -> None:
        shard = torch.empty(size, dtype=of(members[0]).dtype)
        for piece in members:
            shard[_within(piece, first)].copy_(piece.of(of(piece)))
        shards[key], offsets[key] = shard, first

    for name, members, first, size in _rectangles([piece for piece in pieces if piece.first]):
        keep(f"model.{name}", members, first, size, lambda piece: piece.parameter.detach())
        kept = {piece.parameter: kept_by(optimizer, piece.parameter) for piece in members}
        for key, value in kept[members[0].parameter].items():
            if value.dim():
                keep(
                    f"optimizer.{name}.{key}",
                    members,
                    first,
                    size,
                    lambda piece, kept=kept, key=key: kept[piece.parameter][key],
                )
            elif not any(first):  # of the ranks with parts of it, one has where it begins
                shards[f"optimizer.{name}.{key}"] = host_copy(value.view(1))
                offsets[f"optimizer.{name}.{key}"] = (0,)
    for key, state in generators(rank, module).items():
        shards[key], offsets[key] = state, (0,)
    about = None
    if rank == 0:
        about = to_json(
            {
                "format": FORMAT,
                "version": version,
                "ranks": ranks,
                "optimizer": _groups(module, optimizer, shapes),
                "schedule": schedule.state_dict(),
                "extra": dict(extra),
            }
        )
    return StateCopy(rank, about, shards, offsets, {})


def _groups(module: nn.Module, optimizer: Optimizer, shapes: Shapes) -> dict[str, Any]:
    """What `optimizer_groups` says, of the whole model."""
    said = optimizer_groups(module, optimizer)
    (group,) = said["groups"]
    return {**said, "groups": [{**group, "parameters": list(shapes)}]}


def load_split_state(
    module: nn.Module,
    pieces: Sequence[Piece],
    shapes: Shapes,
    optimizer: Optimizer,
    schedule: LRScheduler,
    source: Path | Source,
    *,
    rank: int,
) -> Restored:
    """Take over a state that any number of ranks saved under any back end; blocking. Arguments as above.

    Raises:
        FileNotFoundError, ValueError: as of `load_state`.
    """
    try:
        found: Source = StateFiles(source) if isinstance(source, Path) else source
        about, stored = found.about, found.stored
        check_fits(
            found.name, stored, {f"model.{name}": shape for name, shape in shapes.items()},
            _groups(module, optimizer, shapes), about,
        )  # fmt: skip
        there = stored.state_dict_metadata
        state: dict[nn.Parameter, tuple[str, dict[str, Tensor]]] = {
            parameter: (name, {}) for name, parameter in module.named_parameters()
        }
        keys = {key.rpartition(".")[2] for key in there if key.startswith("optimizer.")}
        random = {key: value for key, value in generators(rank, module).items() if key in there}
        found.fill(random)
        for name, members, first, size in _rectangles(pieces):
            _read(found, f"model.{name}", shapes[name].shape, members, first, size, lambda it: it.parameter.data)
            for key in keys:
                stem = f"optimizer.{name}.{key}"
                if stem not in there:
                    continue
                if key in about["optimizer"]["scalars"]:
                    value = torch.empty(1)
                    found.fill({stem: value})
                    for piece in members:
                        state[piece.parameter][1][key] = value.view(()).clone()
                    continue
                for piece in members:
                    state[piece.parameter][1].setdefault(key, torch.zeros_like(piece.parameter.data))
                _read(
                    found,
                    stem,
                    shapes[name].shape,
                    members,
                    first,
                    size,
                    lambda it, key=key: state[it.parameter][1][key],
                )
    except SafetensorError as error:
        raise ValueError(f"{source} is damaged: resume from an earlier checkpoint ({error})") from error
    take_over(optimizer, state, about["optimizer"])
    if about["schedule"] is not None:
        schedule.load_state_dict(about["schedule"])
    set_generators(random, module)
    return Restored(int(about["version"]), dict(about["extra"]))


def _read(
    source: Source,
    key: str,
    whole: Sequence[int],
    members: Sequence[Piece],
    first: tuple[int, ...],
    size: tuple[int, ...],
    into: Any,
) -> None:
    """Read one rectangle, and put it where its pieces are."""
    dtype = source.stored.state_dict_metadata[key].properties.dtype  # type: ignore[union-attr]
    local = torch.empty(size, dtype=dtype)
    source.fill({key: Part.of(local, whole, first)})
    for piece in members:
        piece.put(into(piece), local[_within(piece, first)])
