"""Two machines train together, near and far, disturbed and not; and what is lost when one is lost."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlinf.cli.runs import account
from tests.launching import QUICKSTART, TINY, equal
from tests.nodes.network import PORT, ROOT, Network, Torchrun, ip
from tests.nodes.runs import GRPO, SHARDED, STEPS, all_steps_once, steps_noted
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
        ports = [[place for place in node.ports() if not place.startswith("127.")] for node in nodes]
        assert len(ports[0]) >= 2, "RPC and torchrun's store"
        assert ports[1], "RPC"
        program = ROOT / "tests/runtime/programs/strangers.py"
        for whence, found in ((stranger, ports[0] + ports[1]), *zip(nodes, ports, strict=True)):
            tried = subprocess.run(whence.command(sys.executable, program, *found), capture_output=True, text=True)
            assert tried.stdout.startswith("bothered"), tried.stderr
        succeeded(jobs)
    all_steps_once(tmp_path / "quickstart")
    equal(undisturbed, tmp_path / "quickstart")


def test_ppo_with_both_models_sharded_over_two_far_machines_of_two_processes(torchrun, tmp_path):
    with Network(delay=0.003) as network:
        shards = ("placement.trainer=1-2", "placement.critic=0-3", "algorithm.name=ppo", "steps=5")
        jobs = torchrun(
            network.nodes, *SHARDED, *shards, f"output_dir={tmp_path}", processes=2, master=network.nodes[0].name
        )
        succeeded(jobs)
    all_steps_once(tmp_path / "quickstart", 5)


def test_weights_cross_the_link_once_however_many_processes_of_the_other_machine_want_them(torchrun, two_machines):
    jobs = torchrun(two_machines.nodes, processes=2, program=Path(__file__).with_name("publishing.py"))
    succeeded(jobs)
    published = int(re.search(r"published (\d+)", jobs[0].said)[1])
    crossed = two_machines.nodes[0].sent()
    assert published <= crossed < 1.1 * published, f"{crossed / published:.2f} times what was published"


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


# Losses ----------------------------------------------------------------------------------------------------------

HOST_TIMEOUT = 8.0
ENDING = 10.0
"""Seconds after `host_timeout` within which nothing is left of a job that lost a machine."""
LOSABLE = (*GRPO, f"system.host_timeout={HOST_TIMEOUT}")


def over(node):
    return lambda: not node.pids()


def test_both_sides_of_a_link_that_is_cut_for_ever_end_and_the_run_can_be_resumed(
    torchrun, undisturbed, two_machines, tmp_path
):
    jobs = torchrun(two_machines.nodes, *LOSABLE, f"output_dir={tmp_path}")
    under_way(tmp_path, jobs, steps=12)
    two_machines.nodes[1].cut()
    start = time.monotonic()
    for job, lost in zip(jobs, ("host 1 ", "host 0"), strict=True):
        until(over(job.node), lambda job=job: f"{job.node.pids()} ending:\n{job.said}", HOST_TIMEOUT + ENDING)
        assert time.monotonic() - start < HOST_TIMEOUT + ENDING
        assert job.code() != 0
        assert lost in job.said, job.said
        assert "has not answered since" in job.said, job.said
    two_machines.nodes[1].heal()
    succeeded(torchrun(two_machines.nodes, *LOSABLE, f"output_dir={tmp_path}", "--resume", "auto"))
    all_steps_once(tmp_path / "quickstart")
    equal(undisturbed, tmp_path / "quickstart")


def test_a_run_survives_by_itself_a_killed_process_and_then_the_power_of_a_machine(
    torchrun, undisturbed, two_machines, tmp_path
):
    nodes = two_machines.nodes
    arguments = (*LOSABLE, f"output_dir={tmp_path}", "--resume", "auto")

    def elastic(node):
        # its own name stands for 127.0.0.1, so torchrun cannot know by itself that it is the endpoint
        meet = (f"--rdzv-endpoint={nodes[0].address}:{PORT}", f"--rdzv-conf=is_host={int(node is nodes[0])}")
        how = ("--max-restarts=2", "--rdzv-backend=c10d", "--rdzv-id=run", *meet, f"--local-addr={node.address}")
        # with torchrun's default, a machine in another's place waits for a MASTER_ADDR that nobody sets
        return torchrun([node], *arguments, how=how, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")

    jobs = [*elastic(nodes[0]), *elastic(nodes[1])]
    under_way(tmp_path, jobs, steps=12)
    (rank,) = nodes[1].ranks()
    os.kill(rank, signal.SIGKILL)
    said = lambda: "\n".join(job.said for job in jobs)  # noqa: E731
    until(lambda: "going on after step 10" in jobs[0].said, said, 60)
    under_way(tmp_path, jobs, steps=22)
    nodes[1].cut()
    nodes[1].kill()
    until(lambda: "has not answered since" in jobs[0].said, said, HOST_TIMEOUT + ENDING)
    nodes[1].heal()
    succeeded([jobs[0], *elastic(nodes[1])])
    all_steps_once(tmp_path / "quickstart")
    equal(undisturbed, tmp_path / "quickstart")


def test_the_example_of_two_nodes_runs_in_namespaces_of_its_own_and_leaves_none_behind():
    before = ip("netns", "list")
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "two_nodes.py")],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "two network namespaces"
    assert "rank 0 runs on node-0" in done.stdout
    assert "rank 1 runs on node-1" in done.stdout
    assert done.stdout.count("were there after") == 3
    assert ip("netns", "list") == before


def test_a_machine_that_joined_and_is_cut_off_is_lost_and_the_run_goes_on(two_machines, tmp_path):
    job, spare = two_machines.nodes
    more = ("rollout.join=10.77.0.1:29600", "rollout.max_rows=4", "evaluation.every=0", f"output_dir={tmp_path}")
    train = [sys.executable, "-m", "rlinf", "train", "--config", QUICKSTART, *TINY, *more, "steps=150"]
    run = Torchrun(job, train, tmp_path / "run.log", {})
    path = tmp_path / "quickstart"
    until(lambda: (path / "join.json").exists() or not run.running(), lambda: run.said, 100)
    join = [sys.executable, "-m", "rlinf", "join", path, "--role", "rollout"]
    joined = Torchrun(spare, join, tmp_path / "join.log", {})
    until(lambda: "has joined" in run.said or not run.running(), lambda: run.said + joined.said, 100)
    before = steps_noted(tmp_path)
    until(lambda: steps_noted(tmp_path) > before + 2 or not run.running(), lambda: run.said, 100)
    spare.cut()
    until(lambda: "is gone: " in run.said or not run.running(), lambda: run.said, 100)
    before = steps_noted(tmp_path)
    assert run.code() == 0, run.said
    assert "machine-1" in run.said
    assert steps_noted(tmp_path) == 151 > before + 1, run.said
    assert joined.code() == 1
    assert "error: rlinf join 10.77.0.1:29600" in joined.said
    assert account(path).balances
