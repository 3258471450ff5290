"""Runs over several machines: `torchrun` on each, with the product's own entry point unless a test has another."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.launching import launch, metrics_of
from tests.nodes.network import PORT, ROOT, SUBNET, Network, Node, Torchrun, why_not
from tests.nodes.runs import GRPO


@pytest.fixture(autouse=True, scope="session")
def _machines():
    if reason := why_not():
        pytest.skip(reason)


@pytest.fixture
def two_machines():
    with Network() as network:
        yield network


@pytest.fixture
def torchrun(tmp_path):
    """Start torchrun on machines, each with this many processes; their output is under the test's directory."""
    started = []

    def start(
        nodes: list[Node],
        *arguments: str,
        processes: int = 1,
        master: str = f"{SUBNET}.1",
        how: Sequence[str] = (),
        program: Path = ROOT / "launch.py",
        **more: str,
    ) -> list[Torchrun]:
        jobs = []
        for node in nodes:
            meet = how or (f"--node-rank={node.number}", f"--master-addr={master}", f"--master-port={PORT}")
            line = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--nproc-per-node={processes}"]
            log = tmp_path / f"{node.name}-{len(started)}.log"
            jobs.append(Torchrun(node, [*line, *meet, str(program), *arguments], log, more))
            started.append(jobs[-1])
        return jobs

    return start


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory) -> Path:
    """The directory of a GRPO run on one machine, with nothing in its way."""
    output = tmp_path_factory.mktemp("undisturbed")
    launch(*GRPO, f"output_dir={output}", processes=2)
    noted = metrics_of(output / "quickstart")
    assert len({line["reward/mean"] for line in noted}) > 3, "runs that learn nothing are all equal"
    assert all(line["grad_norm"] > 0 for line in noted[:3])
    return output / "quickstart"
