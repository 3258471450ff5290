"""torchrun is killed while its processes still import: none of them stays behind and holds the run directory."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.launching import QUICKSTART, ROOT

pytestmark = [pytest.mark.slow, pytest.mark.torchrun, pytest.mark.timeout(120)]


def children(pid: int) -> list[int]:
    """Processes that it has started."""
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def imports(pid: int) -> bool:
    """The first lines of `rlinf.__main__`, which need no torch, are behind it; to load torch takes a while."""
    return "libc10.so" in Path(f"/proc/{pid}/maps").read_text()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def until(condition, seconds: float) -> bool:
    ends = time.monotonic() + seconds
    while not (found := condition()) and time.monotonic() < ends:
        time.sleep(0.01)
    return bool(found)


@pytest.mark.skipif(sys.platform != "linux", reason="processes are told of the end of their parent on Linux alone")
def test_processes_that_still_import_end_with_torchrun(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "launch.py"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    agent = subprocess.Popen(
        [*command, "--config", QUICKSTART, f"output_dir={tmp_path}"],
        cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    ranks: list[int] = []
    try:
        assert until(lambda: len(children(agent.pid)) == 2, 60)
        ranks = children(agent.pid)
        assert until(lambda: all(map(imports, ranks)), 60)
        agent.kill()
        agent.wait()
        assert until(lambda: not any(map(alive, ranks)), 60), "ranks are left that nobody ends"
    finally:
        for pid in (agent.pid, *ranks):
            if alive(pid):
                os.kill(pid, 9)
