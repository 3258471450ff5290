"""The store on which the processes of a job find each other: torchrun's, with a part of its own for every restart.

torchrun may keep one store over restarts, and with it the addresses of processes that are dead. Who meets there would
wait for them, so nobody looks at what an earlier start of the job has left. Where it makes a new store for every start
there is nothing to keep apart, and the count of restarts must not be looked at: each machine has its own, and one that
has taken another's place begins at 0.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import register_rendezvous_handler

SCHEME = "rlinf"
"""`init_method=f"{SCHEME}://"` makes torch meet here."""


def job_store() -> Store:
    """A connection to the store, by what torchrun set in the environment."""
    store, _, _ = next(dist.rendezvous("env://"))
    kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return PrefixStore(f"start/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0') if kept else 'only'}", store)


def _meet(url: str, **options: Any) -> Iterator[tuple[Store, int, int]]:
    yield job_store(), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    raise RuntimeError(f"{url} serves one meeting")


register_rendezvous_handler(SCHEME, _meet)
