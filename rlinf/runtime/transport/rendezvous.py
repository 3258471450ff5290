"""The store on which the processes of a job find each other, with a part of its own for every restart.

On one machine it is a file that this user alone can reach: whoever can write where the processes look for each other's
addresses can point them elsewhere, and torchrun's store listens on every address and asks nobody for a password. Its
place is the directory that torchrun makes for the logs of a start of the job, whose processes all know it.

On several machines it is torchrun's. torchrun may keep one store over restarts, and with it the addresses of processes
that are dead. Who meets there would wait for them, so nobody looks at what an earlier start of the job has left. Where
it makes a new store for every start there is nothing to keep apart, and the count of restarts must not be looked at:
each machine has its own, and one that has taken another's place begins at 0.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, Store
from torch.distributed.rendezvous import register_rendezvous_handler

SCHEME = "rlinf"
"""`init_method=f"{SCHEME}://"` makes torch meet here."""


def job_store() -> Store:
    """A connection to the store, by what torchrun set in the environment."""
    if (directory := _private_directory()) is not None:
        port = os.environ.get("MASTER_PORT", "")  # of another job that one of the processes starts, it is another one
        return FileStore(str(directory / f"rlinf-store-{port}"), -1)
    store, _, _ = next(dist.rendezvous("env://"))
    kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return PrefixStore(f"start/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0') if kept else 'only'}", store)


def _private_directory() -> Path | None:
    """The directory that torchrun makes anew for every start of a job on one machine, within one that its user alone
    may enter; None on several machines, without torchrun, or where others may enter.

    It is there for logs and errors: `RUN/attempt_N/LOCAL_RANK/error.json`, where RUN is of the job and private.
    """
    file, local = os.environ.get("TORCHELASTIC_ERROR_FILE"), os.environ.get("LOCAL_WORLD_SIZE")
    if not file or local is None or local != os.environ.get("WORLD_SIZE"):
        return None
    attempt = Path(file).absolute().parents[1]
    try:
        about = attempt.parent.lstat()
    except OSError:  # a container of its own for each process
        return None
    private = stat.S_ISDIR(about.st_mode) and not about.st_mode & 0o077 and about.st_uid == os.geteuid()
    return attempt if private and attempt.is_dir() else None


def _meet(url: str, **options: Any) -> Iterator[tuple[Store, int, int]]:
    yield job_store(), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    raise RuntimeError(f"{url} serves one meeting")


register_rendezvous_handler(SCHEME, _meet)
