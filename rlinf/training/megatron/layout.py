"""Which rank has which part of the model: Megatron's order of ranks, and the groups that communicate.

In: `ParallelConfig` and the number of ranks. Out: a place for each rank, and process groups by what they are for.
Neighbours in rank are neighbours in tensors first, then in context, then in data; stages of a pipeline are furthest
apart, since they say least to one another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from rlinf.config.learning import ParallelConfig


class Alone:
    """The process group of one rank, which has nobody to communicate with."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


ALONE = Alone()


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank is in each direction, from 0."""

    tensor: int
    context: int
    data: int
    stage: int
    expert: int
    """Which share of a mixture's experts it has."""
    twin: int
    """Which of the ranks with these experts of this stage it is."""


class Grid:
    """All ranks of one model.

    Args:
        parallel: how a copy is split.
        ranks: how many there are.

    Raises:
        ValueError: see `misfits`.
    """

    def __init__(self, parallel: ParallelConfig, ranks: int):
        if wrong := misfits(parallel, ranks):
            raise ValueError(f"trainer.parallel: {'; '.join(wrong)}")
        self.parallel, self.ranks = parallel, ranks
        self.shares = ranks // parallel.copy
        """Of the data."""

    def place(self, rank: int) -> Place:
        """Where a rank is."""
        sizes = (self.parallel.tensor, self.parallel.context, self.shares)
        tensor, rest = rank % sizes[0], rank // sizes[0]
        context, rest = rest % sizes[1], rest // sizes[1]
        data, stage = rest % sizes[2], rest // sizes[2]
        within = rank % (self.ranks // self.parallel.pipeline)
        return Place(tensor, context, data, stage, within % self.parallel.expert, within // self.parallel.expert)

    def alike(self, rank: int, same: Callable[[Place], Any]) -> tuple[int, ...]:
        """The ranks that are in the same place as `rank` in what `same` looks at, in order."""
        mine = same(self.place(rank))
        return tuple(other for other in range(self.ranks) if same(self.place(other)) == mine)


def misfits(parallel: ParallelConfig, ranks: int) -> list[str]:
    """Why so many ranks cannot be laid out in this way; none if they can."""
    wrong = []
    if ranks % parallel.copy:
        wrong.append(
            f"tensor {parallel.tensor} x pipeline {parallel.pipeline} x context {parallel.context} takes "
            f"{parallel.copy} processes per copy of the model, which does not divide {ranks}"
        )
    elif (ranks // parallel.pipeline) % parallel.expert:
        wrong.append(f"expert={parallel.expert} does not divide the {ranks // parallel.pipeline} processes of a stage")
    if parallel.interleave > 1 and parallel.pipeline == 1:
        wrong.append(f"interleave={parallel.interleave} needs a pipeline of at least 2 stages")
    return wrong


_KINDS: dict[str, Callable[[Place], Any]] = {
    "tensor": lambda at: (at.context, at.data, at.stage),
    "context": lambda at: (at.tensor, at.data, at.stage),
    "pipeline": lambda at: (at.tensor, at.context, at.data),
    "copy": lambda at: at.data,
    "data": lambda at: (at.tensor, at.context, at.stage),
    "same": lambda at: (at.tensor, at.stage),
    "stage": lambda at: at.stage,
    "part": lambda at: (at.data, at.stage),
    "expert": lambda at: (at.twin, at.stage),
    "twins": lambda at: (at.expert, at.stage),
}
"""Groups by what their members have in common. `same`: those with the same tensors; `part`: those of one stage of one
copy; `twins`: those with the same experts."""


@dataclass(frozen=True, slots=True)
class Groups:
    """The groups that a rank is in."""

    grid: Grid
    rank: int
    place: Place
    meshes: dict[str, DeviceMesh | None]
    """By kind; None where this rank is alone."""

    def group(self, kind: str) -> Any:
        """Megatron's view of a group."""
        mesh = self.meshes[kind]
        return ALONE if mesh is None else mesh.get_group()

    def collection(self) -> Any:
        """All that Megatron-core asks for."""
        from megatron.core.process_groups_config import ProcessGroupCollection

        names = {
            "tp": "tensor",
            "cp": "context",
            "pp": "pipeline",
            "ep": "expert",
            "tp_ep": "expert",
            "tp_cp": "part",
            "tp_dp_cp": "stage",
            "dp": "data",
            "dp_cp": "same",
            "expt_dp": "twins",
        }
        found = {name: self.group(kind) for name, kind in names.items()}
        return ProcessGroupCollection(**found, expt_tp=ALONE, embd=None, pos_embd=None)


async def grouped(
    grid: Grid, rank: int, mesh_of: Callable[[Sequence[int], str], Any], whole: DeviceMesh | None
) -> Groups:
    """Make a rank's groups; every rank calls this, and they are made in one order.

    Args:
        grid: of all ranks.
        rank: this one.
        mesh_of: makes a mesh of some ranks, for a purpose.
        whole: the mesh of all ranks, if there are several.
    """
    made: dict[tuple[int, ...], DeviceMesh | None] = {(rank,): None, tuple(range(grid.ranks)): whole}
    meshes: dict[str, DeviceMesh | None] = {}
    for kind, members in _members(grid, rank):
        if members not in made:
            made[members] = await mesh_of(members, kind)
        meshes[kind] = made[members]
    line = grid.alike(rank, _KINDS["pipeline"])
    meshes["way back"] = await mesh_of(line, "way back") if len(line) > 1 else None
    return Groups(grid, rank, grid.place(rank), meshes)


def _members(grid: Grid, rank: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    for kind, same in _KINDS.items():
        yield kind, grid.alike(rank, same)
    line = grid.alike(rank, _KINDS["pipeline"])
    ends = (line[0], line[-1]) if len(line) > 1 and rank in (line[0], line[-1]) else (rank,)
    yield "ends", ends
