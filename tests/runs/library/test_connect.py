"""A session on several processes."""

from pathlib import Path

import pytest

from tests.launching import launch, metrics_of

pytestmark = pytest.mark.torchrun


def test_roles_lie_where_the_placement_says(tmp_path):
    program = Path(__file__).parent / "programs" / "connected.py"
    done = launch(str(tmp_path), program=program, processes=2)
    assert "told (2, 2) 16.0 0.0 1" in done.stdout
    assert [line["step"] for line in metrics_of(tmp_path / "run")] == [1]
