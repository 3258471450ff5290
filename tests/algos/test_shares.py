"""Several processes with uneven shares of a batch learn what one with all of it does."""

from pathlib import Path

import pytest

from tests.launching import launch

RANKS = 3


@pytest.mark.torchrun
def test_three_processes_with_uneven_shares_get_the_gradient_of_one(tmp_path):
    program = Path(__file__).parent / "programs" / "shares.py"
    said = launch(str(tmp_path / "store"), program=program, processes=RANKS, GLOO_SOCKET_IFNAME="lo").stdout
    assert said.splitlines() == ["equal"] * RANKS
