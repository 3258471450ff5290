"""Processes that share a GPU, because torchrun started more of them on a machine than it has GPUs.

In: how many processes and GPUs there are, and where roles sit. Out: which processes share one, and what cannot be done
there. Pure logic; nobody waits here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence

from rlinf.config.placement import Placing


def first_on_same(processes: int, gpus: int) -> tuple[int, ...]:
    """Of each process of the job the first one on the same GPU; () where each has its own, or there is none.

    Args:
        processes: of the job.
        gpus: of this machine; others are taken to have as many. A process takes that of its local rank, counted round.
    """
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))  # set by torchrun; without it all share this process anyway
    if not 0 < gpus < here:
        return ()
    return tuple(number // here * here + number % here % gpus for number in range(processes))


def refused(wanted: Placing, together: Mapping[str, Sequence[int]], first: Sequence[int], gpus: int) -> Iterator[str]:
    """Complaints, each with its key, about what does not work on GPUs that processes share.

    Args:
        wanted: the section `placement`.
        together: by role that computes on all its processes together, these processes.
        first: see `first_on_same`.
        gpus: of a machine.
    """
    if not first:
        return
    fix = f"start no more processes on a machine than it has GPUs (torchrun --nproc-per-node {gpus})"
    if wanted.plan is None and (wanted.profile is not None or wanted.mode == "auto"):
        key = "mode" if wanted.profile is None else "profile"
        yield f"placement.{key}: the planner counts a GPU for each process, and here processes share GPUs: {fix}"
    for role, processes in together.items():
        on: dict[int, int] = {}
        for number in processes:
            if (other := on.setdefault(first[number], number)) != number:
                yield (
                    f"placement.{role}: its processes {other} and {number} share a GPU, where NCCL refuses to let them "
                    f"compute together: {fix}, or give it one process of each GPU"
                )
                break
