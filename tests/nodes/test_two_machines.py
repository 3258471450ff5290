"""Two machines train together, near and far, disturbed and not; and what is lost when one is lost."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from tests.nodes.network import ROOT, Network
from tests.nodes.runs import GRPO, SHARDED, STEPS, all_steps_once, equal, steps_noted
from tests.runtime.programs.jobs import until

pytestmark = [pytest.mark.nodes, pytest.mark.timeout(400)]


def succeeded(jobs):
    codes = [job.code() for job in jobs]
    assert codes == [0] * len(jobs), "\n".join(f"--- {job.node.name}\n{job.said}" for job in jobs)


def under_way(output, jobs, steps=3):
    """Wait until a run has so many steps behind it."""
    until(
        lambda: steps_noted(output) > steps or not all(job.running() for job in jobs),
        lambda: "\n".join(f"--- {job.node.name}\n{job.said[-3000:]}" for job in jobs),
        100,
    )
    assert all(job.running() for job in jobs), "\n".join(f"--- {job.node.name}\n{job.said}" for job in jobs)
    assert steps_noted(output) < STEPS, "it is over already"


def test_two_machines_learn_what_one_does_while_strangers_try_every_port(torchrun, undisturbed, tmp_path):
    with Network(3) as network:
        *nodes, stranger = network.nodes
        for node in nodes:
            node.slow_down()
        jobs = torchrun(nodes, *GRPO, f"output_dir={tmp_path}")
        under_way(tmp_path, jobs)
        ports = [place for node in nodes for place in node.ports() if not place.startswith("127.")]
        assert len(ports) >= 3, "RPC on each and torchrun's store"
        program = ROOT / "tests/runtime/programs/strangers.py"
        tried = subprocess.run(stranger.command(sys.executable, program, *ports), capture_output=True, text=True)
        assert tried.stdout.startswith("bothered"), tried.stderr
        succeeded(jobs)
    all_steps_once(tmp_path / "quickstart")
    equal(undisturbed, tmp_path / "quickstart")


def test_ppo_with_both_models_sharded_over_two_far_machines_of_two_processes(torchrun, tmp_path):
    with Network(delay=0.003) as network:
        shards = ("placement.trainer=1-2", "placement.critic=0-3", "algorithm.name=ppo", "steps=5")
        jobs = torchrun(network.nodes, *SHARDED, *shards, f"output_dir={tmp_path}", processes=2)
        succeeded(jobs)
    all_steps_once(tmp_path / "quickstart", 5)


def test_a_link_that_is_cut_for_twenty_seconds_costs_nothing_but_time(torchrun, undisturbed, two_machines, tmp_path):
    jobs = torchrun(two_machines.nodes, *GRPO, f"output_dir={tmp_path}")
    under_way(tmp_path, jobs)
    two_machines.nodes[1].cut()
    time.sleep(20.0)
    before = steps_noted(tmp_path)
    two_machines.nodes[1].heal()
    succeeded(jobs)
    assert before < STEPS, "it did not even wait for the other machine"
    all_steps_once(tmp_path / "quickstart")
    equal(undisturbed, tmp_path / "quickstart")
