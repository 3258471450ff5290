"""Arrangement of a model's copies over ranks: which ranks make up each, and which share of the data each rank computes.

Ranks that compute a micro-batch together are neighbours, tensor ranks the nearest.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from math import lcm
from typing import Literal, get_args

from rlinf.config.learning import ParallelConfig
from rlinf.runtime.base.errors import WrongSetting

Sharding = Literal["shard", "replicate", "hybrid"]
"""One copy in slices over all ranks (FSDP2); a whole copy on every rank (data parallel), or on those that compute
together; one copy per machine, in slices over its ranks (HSDP)."""


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Ranks and their parts."""

    copies: tuple[tuple[int, ...], ...]
    """The ranks of each copy of the model."""
    shares: tuple[int, ...]
    """For each rank, the share of a round of micro-batches that it computes, from 0."""
    together: tuple[tuple[int, ...], ...]
    """The ranks of each share, tensor ranks next to each other."""

    def copy_of(self, rank: int) -> tuple[int, ...]:
        """The ranks of the copy that a rank has a part of."""
        return next(copy for copy in self.copies if rank in copy)

    def alike(self, rank: int) -> list[int]:
        """The ranks that have the same part of other copies, one per copy, this one among them."""
        place = self.copy_of(rank).index(rank)
        return [copy[place] for copy in self.copies]


def arranged(sharding: Sharding, machines: Sequence[Hashable], parallel: ParallelConfig) -> Arrangement:
    """Arrange ranks.

    Args:
        sharding: how the model lies.
        machines: of each rank, where it is.
        parallel: how one copy is split.

    Raises:
        ValueError: there is no such sharding, or so many ranks cannot be arranged so.
    """
    if sharding not in get_args(Sharding):
        raise ValueError(f"sharding={sharding!r} is none of {list(get_args(Sharding))}")
    at_once = parallel.tensor * parallel.context
    least = lcm(at_once, parallel.expert)
    if sharding == "hybrid":
        groups: dict[Hashable, list[int]] = {}
        for rank, machine in enumerate(machines):
            groups.setdefault(machine, []).append(rank)
        copies = [tuple(ranks) for ranks in groups.values()]
        counts = [len(ranks) for ranks in copies]
        if len(set(counts)) > 1:
            raise ValueError(
                f"sharding='hybrid' needs as many ranks on every machine, and there are {counts}: place them so, or "
                "take 'shard' or 'replicate'"
            )
        _check(counts[0], least, parallel, "processes per machine, each of which has a copy (sharding: hybrid)")
    else:
        _check(len(machines), least, parallel, "processes")
        size = len(machines) if sharding == "shard" else least
        copies = [tuple(range(start, start + size)) for start in range(0, len(machines), size)]
    together = [copy[start : start + at_once] for copy in copies for start in range(0, len(copy), at_once)]
    shares = [0] * len(machines)
    for number, ranks in enumerate(together):
        for rank in ranks:
            shares[rank] = number
    return Arrangement(tuple(copies), tuple(shares), tuple(together))


def _check(ranks: int, least: int, parallel: ParallelConfig, what: str) -> None:
    if ranks % least:
        split = [f"{name} {size}" for name in ("tensor", "context") if (size := getattr(parallel, name)) > 1]
        parts = [f"a copy of the model is split over {' x '.join(split)} processes"] if split else []
        parts += [f"its experts over {parallel.expert}"] if parallel.expert > 1 else []
        raise WrongSetting(
            f"trainer.parallel: {', '.join(parts)}, so the number of processes must be a multiple of {least}, and "
            f"there are {ranks} {what}"
        )


def stages_refused(parallel: ParallelConfig) -> Iterator[str]:
    """Yield the settings of `parallel` that only other back ends support, in words."""
    for name in ("pipeline", "interleave"):
        if (size := getattr(parallel, name)) > 1:
            yield f"trainer.parallel.{name}={size}: fsdp has no stages; take tensor and context, or megatron"
