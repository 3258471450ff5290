"""Random configurations go through `--dry-run`: none gives a traceback, each refused one names a key."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.cli.wild_configs import ROOT, wild
from tests.launching import environment

COUNT = 60
"""Of the 20,000 that `make fuzz-configs` tries."""


@pytest.mark.slow
@pytest.mark.timeout(600)  # about 6 s on an idle core
def test_no_configuration_gives_a_traceback():
    command = [sys.executable, "-m", "tests.cli.wild_configs", str(COUNT)]
    offline = environment(HF_HUB_OFFLINE="1", PYTHONPATH=str(ROOT))  # no network is asked for a model that there is not
    done = subprocess.run(command, capture_output=True, text=True, env=offline, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{COUNT} configurations" in done.stdout


def test_a_configuration_is_drawn_from_its_number_alone():
    assert [wild(3, number) for number in range(50)] == [wild(3, number) for number in range(50)]
    assert wild(3, 1) != wild(4, 1)
    assert {len(wild(0, number).overrides) for number in range(200)} == {0, 1, 2, 3}
