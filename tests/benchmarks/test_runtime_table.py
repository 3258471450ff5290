"""The benchmark judges its rows by their bars, and its own contestant runs."""

import json
import sys

import pytest

from benchmarks.contestants import Contestant, TurnFailed, contestants, run
from benchmarks.runtime import Row, lines, measure, spread


def contestant(name: str, **rows: list[float]) -> Contestant:
    return Contestant(name, lambda group: ("1", {}), ("calls",), rows=rows)


def test_a_time_passes_at_most_at_its_bar_and_loses_above_it() -> None:
    row = Row("call", "call", "s", {"fast": 1.4, "slow": 1.4})
    ours, fast, slow = contestant("rlinf", call=[1.5]), contestant("fast", call=[1.0]), contestant("slow", call=[1.2])
    assert [line.verdict for line in lines(row, [ours, fast, slow])] == ["LOST", "pass"]


def test_a_rate_passes_at_least_at_its_bar() -> None:
    row = Row("calls", "rate", "/s", {"peer": 6})
    assert [line.verdict for line in lines(row, [contestant("rlinf", rate=[60]), contestant("peer", rate=[10])])] == [
        "pass"
    ]


def test_a_transfer_is_judged_as_bytes_per_second() -> None:
    row = Row("tensor", "tensor", "GB/s", {"peer": 2}, size=10**9)
    (line,) = lines(row, [contestant("rlinf", tensor=[0.5]), contestant("peer", tensor=[1.0])])
    assert (line.ours, line.theirs, line.ratio, line.verdict) == ("2 GB/s", "1 GB/s", "2 ×", "pass")


def test_ratios_are_taken_within_a_round() -> None:
    row = Row("call", "call", "s", {"peer": 1})
    ours, peer = contestant("rlinf", call=[1, 10, 100]), contestant("peer", call=[2, 20, 200])  # a machine that slows
    assert lines(row, [ours, peer])[0].ratio == "0.5 × [0.5-0.5]"


def test_a_start_is_judged_by_what_it_adds() -> None:
    row = Row("start", "startup", "s", {}, bar=1.5, over="import torch")
    ours, bare = contestant("rlinf", startup=[5.0]), contestant("import torch", startup=[4.0])
    assert [(line.ratio, line.verdict) for line in lines(row, [ours, bare])] == [("+ 1 s", "pass")]


def test_an_absent_opponent_is_shown_as_skipped() -> None:
    row = Row("call", "call", "s", {"ray": 0.25})
    assert [line.verdict for line in lines(row, [contestant("rlinf", call=[1.0])])] == ["skipped"]


def test_a_peer_that_fails_drops_out_with_its_reason_and_the_rest_goes_on() -> None:
    def fails(group: str) -> tuple[str, dict[str, float]]:
        raise TurnFailed("no such library")

    ours = Contestant("rlinf", lambda group: ("1", {"call": 1.0}), ("calls",))
    peer = Contestant("peer", fails, ("calls",))
    measure([ours, peer], ["calls"], rounds=2)
    assert ours.rows == {"call": [1.0, 1.0]}
    assert peer.missing is not None
    assert "no such library" in peer.missing


def test_spread_is_median_and_quartiles() -> None:
    assert spread([1, 2, 3, 4, 5]) == (3, 2, 4)


def test_a_failing_command_tells_its_last_words() -> None:
    with pytest.raises(TurnFailed, match="the reason"):
        run([sys.executable, "-c", "raise SystemExit('the reason')"])


@pytest.mark.slow
@pytest.mark.torchrun
def test_our_contestant_measures_a_group() -> None:
    ours = contestants()[0]
    ours.measure("queues")
    assert set(ours.rows) == {"queue", "stream"}, json.dumps(ours.rows)
