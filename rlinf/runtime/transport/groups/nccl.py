"""NCCL's communicators: how they are made, and what of torch's own handling of failures is left on.

Flows in: a store, the members' ranks, a deadline. Flows out: `ProcessGroupNCCL` objects. Nobody is woken here.

Torch watches over NCCL with threads of its own, which by default end the process: at an operation's timeout, and when
they are stuck themselves. A process that is ended so says nothing of the actor, call or host that failed. So the
runtime's deadline comes first (`process_group.py`), and the settings here leave torch what is needed beyond it.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist

PATIENCE = 60.0
"""Seconds after the runtime's deadline until torch's watchdog aborts what is still under way: by then the runtime has
raised its own error, and told all members to abort."""
DUMP_SECONDS = 0.5
"""Torch waits four times as long before it cleans up after a failure, for dumps that nobody asked for; else 15."""


def settings(deadline: float) -> dict[str, str]:
    """The environment that torch reads when it makes a communicator.

    Args:
        deadline: seconds of the longest operation.
    """
    return {
        # 2 is to abort the communicators. 3, the default, is to throw in a thread of torch's, which ends the process.
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
        # With it no watchdog would run, and `synchronize` would block the thread that posts.
        "TORCH_NCCL_BLOCKING_WAIT": "0",
        # Kills the process when the watchdog itself is stuck, in a driver that does not answer: the last resort.
        "TORCH_NCCL_ENABLE_MONITORING": "1",
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": str(int(2 * (deadline + PATIENCE))),
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": str(int(1000 * DUMP_SECONDS)),
    }


def prepare(deadline: float) -> None:
    """Set what torch is to read, unless the user has set it; before a communicator is made."""
    for name, value in settings(deadline).items():
        os.environ.setdefault(name, value)


def communicator(store: Any, position: int, size: int, deadline: float) -> Any:
    """A `ProcessGroupNCCL` that torch knows nothing of. NCCL itself connects the members at the first operation, which
    blocks until all of them have posted it.

    Args:
        store: of this communicator alone; a connection of its own, since it blocks.
        position: of this host among the members.
        size: how many members there are.
        deadline: seconds that the runtime gives an operation.
    """
    prepare(deadline)
    store.set_timeout(timedelta(seconds=deadline))  # of the exchange by which members find each other
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=deadline + PATIENCE)
    # Streams come from a pool of 32 that are dealt out in turn, one pool per priority: not the one of the compute.
    options.is_high_priority_stream = True
    return dist.ProcessGroupNCCL(store, position, size, options)
