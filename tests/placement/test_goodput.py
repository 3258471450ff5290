"""Goodput under failures, from event to event: against first-order arithmetic, and what elastic engines save."""

import math
from dataclasses import replace

import pytest

from benchmarks.goodput import Job, Progress, goodput


def test_without_failures_every_second_counts():
    assert goodput(replace(Job(), rate=0.0), days=1.0) == (1.0, 0, 0)


@pytest.mark.parametrize("restart", [60.0, 300.0])
def test_of_a_job_that_restarts_what_is_lost_is_checkpoints_half_an_interval_and_restarts(restart):
    job = replace(Job(), elastic=False, hosts=256, restart=restart, writing=0.0)
    share, lost, again = goodput(job, days=2000.0)
    assert again == lost == pytest.approx(2000 * 1e-3 * 8 * 256, rel=0.05)
    losses = job.pause / job.every + (job.every / 2 + restart) / job.apart
    assert share == pytest.approx(1 - losses, abs=2 * losses**2)  # second-order terms are left out


def test_a_checkpoint_counts_once_it_is_written_and_for_every_failure_after_it():
    job = replace(Job(), elastic=False, pause=2.0, restart=10.0, writing=5.0)
    speed, progress = job.every / (job.every + job.pause), Progress(job)
    progress.until(job.every / speed + 1)  # it is being written
    progress.begin_again()
    assert progress.made == 0.0
    progress.until(progress.now + 10 + (job.every + 6) / speed)
    for _ in range(3):  # the second and third find nothing new
        progress.begin_again()
        assert progress.made == pytest.approx(job.every)
        progress.until(progress.now + 1)


def test_a_lost_host_that_generated_costs_its_share_until_another_has_joined():
    job = replace(Job(), hosts=8, training=0.5, rate=0.0, answer=100.0, replaced=40.0, joining=10.0)
    progress = Progress(job)
    progress.do_without()
    progress.until(1000.0)
    assert progress.made == pytest.approx(1000 - 100 / 4)  # a quarter of those that generate, for 100 seconds


def test_four_thousand_hosts_keep_nineteen_twentieths_where_engines_have_joined_and_not_where_all_restart():
    share, lost, again = goodput(Job(), days=20.0)
    assert share >= 0.95
    assert again < lost / 3
    assert goodput(replace(Job(), elastic=False), days=20.0)[0] < 0.91
    assert math.isclose(goodput(Job(), days=20.0)[0], share)
