"""Where a job can be joined: what it leaves in its run directory, and what those who join read there.

In: an address and a token. Out: a file that only this user may read. Nothing here takes long to import: a process that
joins reads it first of all.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

TOKEN = "RLINF_JOIN_TOKEN"
"""Environment variable: the token that those who join must know; without it each start of a job makes its own."""
FILES = {"rollout": "join.json", "trainer": "join-trainer.json", "reward": "join-reward.json"}
"""By role, in the run directory, for this user alone: where to join, and the token."""


def leave(directory: Path, address: str, token: str, role: str = "rollout") -> Path:
    """Write the file of a role into a run directory, and return its path. Blocking."""
    file = directory / FILES[role]
    file.unlink(missing_ok=True)
    with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as opened:
        json.dump({"address": address, "token": token}, opened)
    return file


def read(directory: Path, role: str = "rollout") -> tuple[str, str]:
    """Address and token of the job that a run directory belongs to. Blocking.

    Raises:
        FileNotFoundError: nobody can join it now.
    """
    place = json.loads((directory / FILES[role]).read_text(encoding="utf-8"))
    return place["address"], place["token"]
