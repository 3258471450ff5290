"""40 processes on this machine join, work and end. What a controller does for 1,000 is in benchmarks/scale.py."""

from __future__ import annotations

import pytest

from tests.runtime.programs.jobs import shared_memory

pytestmark = [pytest.mark.torchrun, pytest.mark.slow, pytest.mark.timeout(300)]

HOSTS = 40


@pytest.mark.repeated
def test_forty_processes_join_share_a_stream_and_end(zygote):
    before = shared_memory()
    ranks = zygote.run("many.py", HOSTS, 10 * HOSTS)
    ranks.await_line("all as expected", seconds=120.0)
    assert ranks.codes(120.0) == [0] * HOSTS, ranks.everything()
    assert [ranks.complained(rank) for rank in range(HOSTS)] == [""] * HOSTS
    assert ranks.printed(0) == "all as expected\n"
    assert shared_memory() <= before


def test_twenty_four_processes_start_call_each_other_and_stop(zygote):
    ranks = zygote.run("all_pairs.py", 24)
    assert ranks.codes(120.0) == [0] * 24, ranks.everything()
    assert [ranks.complained(rank) for rank in range(24)] == [""] * 24
    assert ranks.printed(0).startswith("576 calls answered\n")
