"""The figures of `benchmarks.grpo`: what is compared, judged and drawn, from made-up runs."""

import json
import math
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import grpo
from benchmarks.contestants import ROOT, TurnFailed
from benchmarks.grpo_contestants import BARE, OURS, THEIRS, Contestant, median_step
from benchmarks.grpo_judging import Line, agreement, lines
from benchmarks.grpo_ours import covered, outside
from benchmarks.grpo_plot import reward_curves
from benchmarks.grpo_turns import Command
from benchmarks.peers.grpo_job import Job, Result, peak_memory

STEPS = 12
STEPPER = """
from benchmarks.peers.grpo_job import Result, Stopwatch
result = Result("1")
watch = Stopwatch(result)
for step in range(4):
    watch.next_step()
result.tell()
"""


def result(seconds: float, *, reward: float = 0.5, peak: int = 100, outside: float | None = None) -> Result:
    took = [seconds] * STEPS
    return Result("1", took, took, [seconds / 10] * STEPS, [reward] * STEPS, peak, outside)


def contestant(system: str, *runs: Result, cores: int = 1, setting: str = "alone") -> Contestant:
    return Contestant(system, setting, cores, lambda job, directory: Command([], {}), runs=list(runs))


def verdicts(found: list[Line], what: str) -> dict[str, str]:
    return {line.other.partition(":")[0]: line.verdict for line in found if line.what.startswith(what)}


def test_twice_the_samples_per_second_passes_and_less_loses() -> None:
    trl = contestant(THEIRS, result(1.0))
    for seconds, verdict in ((0.49, "pass"), (0.51, "LOST")):
        found = lines([contestant(OURS, result(seconds, outside=0.0)), trl], samples=512)
        assert verdicts(found, "samples/s") == {"TRL, alone": verdict}


def test_the_bar_is_on_the_peers_fastest_setting() -> None:
    ours = contestant(OURS, result(0.4, outside=0.0), cores=2)
    slow = contestant(THEIRS, result(2.0), cores=2, setting="slow")
    fast = contestant(THEIRS, result(0.7), cores=1, setting="fast, on one of the cores")
    found = verdicts(lines([ours, slow, fast], samples=512), "samples/s on 2")
    assert found == {"TRL, slow": "", "TRL, fast, on one of the cores": "LOST"}


def test_speed_is_that_of_the_median_step_after_warming_up() -> None:
    assert contestant(OURS, Result("1", seconds=[9.0] * 5 + [0.5] * 6 + [50.0])).rates == [2.0]
    assert median_step([2.0]) == 2.0  # so few steps that all are warm-up: better than nothing


def test_memory_and_overhead_are_judged_beside_the_bare_loop() -> None:
    bare = contestant(BARE, result(1.0, peak=100))
    lean = lines([contestant(OURS, result(1.0, peak=129, outside=0.049)), bare], samples=1)
    fat = lines([contestant(OURS, result(1.0, peak=131, outside=0.051)), bare], samples=1)
    for what in ("peak memory", "outside the stages"):
        assert [line.verdict for line in lean if line.what.startswith(what) and line.bar] == ["pass"]
        assert [line.verdict for line in fat if line.what.startswith(what) and line.bar] == ["LOST"]


def test_curves_agree_if_their_means_are_no_further_apart_than_the_seeds() -> None:
    def curves(*rewards: float) -> list[Result]:
        return [result(1.0, reward=reward, outside=0.0) for reward in rewards]

    ours = contestant(OURS, *curves(0.50, 0.52, 0.54))
    for theirs, verdict in (((0.52, 0.54, 0.56), "pass"), ((0.60, 0.62, 0.64), "LOST")):
        found = lines([ours, contestant(THEIRS, *curves(*theirs))], samples=1)
        assert verdicts(found, "reward curves") == {"TRL": verdict}


def test_one_seed_says_nothing_about_agreement() -> None:
    found = lines([contestant(OURS, result(1.0, outside=0.0)), contestant(THEIRS, result(1.0))], samples=1)
    assert verdicts(found, "reward curves") == {"TRL": ""}


def test_agreement_tells_where_curves_are_furthest_apart() -> None:
    flat, dented = [0.5] * 20, [0.5] * 10 + [1.0] + [0.5] * 9
    met = agreement([flat, flat], [dented, dented])
    assert met.furthest == pytest.approx(0.1)  # over five steps
    assert 11 <= met.step <= 15
    assert met.spread == 0


def runs(system: str, program: str) -> Contestant:
    command = Command([sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{program}"], {})
    return Contestant(system, "alone", 1, lambda job, directory: command)


def test_a_failing_peer_drops_out_with_its_reason_and_the_rest_goes_on() -> None:
    ours, peer = runs(OURS, STEPPER), runs(THEIRS, "sys.exit('no such library')")
    grpo.measure([ours, peer], [Path("a"), Path("b")])
    assert [len(run.seconds) for run in ours.runs] == [3, 3]
    assert peer.runs == []
    assert peer.missing is not None
    assert "no such library" in peer.missing
    assert [line.other for line in lines([peer], samples=1)] == [peer.missing]


def test_ours_failing_ends_the_run() -> None:
    with pytest.raises(TurnFailed, match="a bug"):
        grpo.measure([runs(OURS, "sys.exit('a bug')")], [Path("a")])


def test_time_outside_is_what_no_stage_covers_from_one_call_of_the_trainer_to_the_next() -> None:
    def span(kind: str, actor: str, name: str, start: float, end: float) -> dict[str, object]:
        return {"ph": "X", "cat": kind, "name": name, "ts": start, "dur": end - start, "args": {"actor": actor}}

    # Eight steps, of which the first five do not count. The calls stay open while the trainer waits, which is no work.
    calls = [span("call", "trainer[0]", "train", 1e6 * step, 1e6 * step + 9e5) for step in range(8)]
    work = [
        span("compute", "rollout[0]", "decode", 5.0e6, 5.6e6),
        span("compute", "trainer[0]", "learn", 5.5e6, 5.8e6),
    ]
    work.append(span("call", "judge[0]", "score", 6e6, 6.7e6))
    waiting = 0.1  # for our turn, between the two: in the trace, but not in the steps' time
    assert outside({"traceEvents": [*calls, *work, {"ph": "M"}]}, [9] * 5 + [1, 1 - waiting]) == pytest.approx(
        0.4 / 1.9
    )


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)).map(sorted).map(tuple)))
def test_covered_counts_every_moment_once(intervals: list[tuple[int, int]]) -> None:
    seconds = {second for start, end in intervals for second in range(start, end) if 5 <= second < 20}
    assert covered(intervals, (5, 20)) == len(seconds)


def test_the_picture_has_a_line_and_a_band_for_each_system() -> None:
    svg = ElementTree.fromstring(reward_curves({OURS: [[0.1, 0.5], [0.2, 0.6]], THEIRS: [[0.0, 1.0]]}))
    shapes = {
        kind: [each.attrib["points"] for each in svg.iter(f"{{http://www.w3.org/2000/svg}}{kind}")]
        for kind in ("polyline", "polygon")
    }
    assert {kind: len(each) for kind, each in shapes.items()} == {"polyline": 2, "polygon": 2}
    heights = [float(point.partition(",")[2]) for point in shapes["polyline"][1].split()]
    assert heights[0] - heights[1] > 200  # from reward 0 at the bottom to 1 at the top


def test_what_is_saved_can_be_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpo, "ROOT", tmp_path)
    monkeypatch.setattr(grpo, "PLOT", tmp_path / "curves.svg")
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    entered = [contestant(OURS, result(0.5, outside=0.01)), contestant(THEIRS, result(1.0))]
    saved = json.loads(grpo.save(lines(entered, 512), entered, (0.0, 0.0)).read_text())
    assert saved["runs"]["rlinf, alone"][0]["seconds"].split()[:2] == ["0.5000", "0.5000"]
    assert (tmp_path / "curves.svg").read_text().startswith("<svg")
    assert grpo.table([Line(**line) for line in saved["lines"]]).row_count == len(saved["lines"])


def test_a_result_is_heard_through_other_output(capsys: pytest.CaptureFixture[str]) -> None:
    told = Result("1", seconds=[0.5], rewards=[math.pi])
    print("progress ...", end="")
    told.tell()
    heard = Result.heard(capsys.readouterr().out)
    assert heard == told
    assert 0 < heard.peak <= peak_memory()
    with pytest.raises(ValueError, match="no line"):
        Result.heard("nothing")


def test_a_job_survives_its_file(tmp_path: Path) -> None:
    job = Job("m", [[["1>", "1"]]], 0, 8, 2, 6, 1.0, 5e-4, 5, [0.9, 0.99], 0.0, 0.3, 0.2, 0.28, "std")  # type: ignore[arg-type]
    job.write(tmp_path / "job.json")
    assert Job.read(tmp_path / "job.json") == job
