"""The batch script for Slurm on docs/checkpoints.md: run by a shell, with stand-ins for what a cluster has."""

import os
import re
import signal
import subprocess
import sys

import pytest

from tests.launching import ROOT, TINY, environment, steps_noted
from tests.runtime.programs.jobs import until

pytestmark = [pytest.mark.slow, pytest.mark.torchrun, pytest.mark.timeout(300)]
SRUN = """#!/bin/bash
shift                                   # its option; a task for the one node
"$@" & task=$!
trap 'kill -USR1 $task' USR1            # as srun passes signals on
wait $task; code=$?
[ $code -gt 128 ] && { wait $task; code=$?; }
exit $code
"""
SCONTROL = """#!/bin/bash
[ "$1" = show ] && echo 127.0.0.1 || echo "$@" >> "$CALLS"
"""


def script() -> str:
    """The page's, made small enough for a test."""
    (found,) = re.findall(r"```bash\n(#!/bin/bash.*?)```", (ROOT / "docs" / "checkpoints.md").read_text(), re.DOTALL)
    arguments = " ".join((*TINY, "steps=100000", "evaluation.every=0"))
    found = found.replace("--nproc-per-node 8", "--nproc-per-node 1").replace("my.yaml", "configs/quickstart.yaml")
    found = found.replace("launch.py", str(ROOT / "launch.py"))
    return found.replace("output_dir=/shared/runs", f"output_dir=$RUNS {arguments}")


def test_its_signal_leaves_a_checkpoint_and_the_job_is_queued_again(tmp_path):
    commands = tmp_path / "bin"
    commands.mkdir()
    torchrun = f'#!/bin/bash\nexec "{sys.executable}" -m torch.distributed.run "$@"\n'
    for name, text in {"srun": SRUN, "scontrol": SCONTROL, "torchrun": torchrun}.items():
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    slurm = {"SLURM_JOB_NODELIST": "node1", "SLURM_NNODES": "1", "SLURM_NODEID": "0", "SLURM_JOB_ID": str(os.getpid())}
    more = {"PATH": f"{commands}:{os.environ['PATH']}", "CALLS": str(tmp_path / "calls"), "RUNS": str(tmp_path)}
    job = subprocess.Popen(
        ["bash", "-c", script()],
        cwd=ROOT, env=environment(**slurm, **more), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    run = tmp_path / "quickstart"
    try:
        until(lambda: job.poll() is not None or steps_noted(run) >= 1, "the first step", 150)
        job.send_signal(signal.SIGUSR1)
        said, _ = job.communicate(timeout=90)
    finally:
        job.kill()
    assert job.returncode == 0, said
    assert "told to end by SIGUSR1: stopped after step " in said
    assert (tmp_path / "calls").read_text() == f"requeue {os.getpid()}\n"
    assert list((run / "checkpoints").glob("step_*"))
