"""The benchmark's own contestant runs, and a command that fails is told of."""

import json
import sys

import pytest

from benchmarks.contestants import Contestant, TurnFailed, contestants, run


def contestant(name: str, **rows: list[float]) -> Contestant:
    return Contestant(name, lambda group: ("1", {}), ("calls",), rows=rows)


def test_a_failing_command_tells_its_last_words() -> None:
    with pytest.raises(TurnFailed, match="the reason"):
        run([sys.executable, "-c", "raise SystemExit('the reason')"])


@pytest.mark.slow
@pytest.mark.torchrun
def test_our_contestant_measures_a_group() -> None:
    ours = contestants()[0]
    ours.measure("queues")
    assert set(ours.rows) == {"queue", "stream"}, json.dumps(ours.rows)
