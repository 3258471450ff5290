"""A process of a job ends with the code of its program, whatever its threads are stuck in."""

from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "programs" / "stuck.py"


@pytest.mark.torchrun
@pytest.mark.timeout(120)
def test_a_thread_that_is_stuck_in_a_collective_does_not_change_the_exit_code(zygotes):
    ranks = zygotes.run(PROGRAM, 2)
    try:
        assert ranks.codes(60.0) == [0, 0], ranks.everything()
    finally:
        ranks.end()
    assert ranks.printed(0) == "done\n"
    assert "do not return: threads member[0]" in ranks.complained(0)
