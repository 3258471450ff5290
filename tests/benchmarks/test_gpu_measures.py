"""`make bench-gpu`: every measure runs in a rehearsal, within the time of one call."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.gpu import harness
from benchmarks.gpu.harness import BUDGET
from benchmarks.gpu.measures import decode, training
from benchmarks.gpu.measures.__main__ import MEASURES, measure
from benchmarks.gpu.measuring.bars import BARS
from tests.launching import Forked

# The whole ------------------------------------------------------------------------------------------------------------


@pytest.mark.repeated  # each measure runs by `make bench-gpu GPU_ARGS=--rehearse` too
@pytest.mark.torchrun
@pytest.mark.timeout(400)
def test_all_measures_run_in_a_rehearsal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": Forked}))
    out = tmp_path / "out.json"
    common = ["--rehearse", "--out", str(out), "--work", str(tmp_path / "work")]

    assert measure(common) == 0, capsys.readouterr().out

    told = capsys.readouterr().out
    outcomes = json.loads(out.read_text())["outcomes"]
    assert {name: found["state"] for name, found in outcomes.items()} == {one.name: "measured" for one in MEASURES}
    assert "was not reached" not in told
    for name, bars in BARS.items():
        figures = outcomes[name]["figures"]
        assert figures["peak_gb"] > 0
        for bar in bars:
            assert full_scale(bar.figure) or bar.figure in figures, bar
            assert bar.limit is None or full_scale(bar.limit) or figures[bar.limit] > 0, bar
    assert told.count("rehearsed\n") == sum(
        bar.figure in outcomes[name]["figures"] for name in BARS for bar in BARS[name]
    )

    # once more, nothing is left to do; and a file stands beside itself with ratios of 1
    assert measure([*common, "--against", str(out)]) == 0
    ratios = [line.split()[-1] for line in capsys.readouterr().out.splitlines() if line.startswith("head: ")]
    assert len(ratios) == len(outcomes["head"]["figures"])
    assert set(ratios) <= {"1.000", "-"}
    with pytest.raises(SystemExit, match=r"--against .*missing\.json:"):
        measure([*common, "--against", str(tmp_path / "missing.json")])


def full_scale(figure: str) -> bool:
    """Whether a rehearsal names it otherwise, by its own sizes; and a real run would have it."""
    names = [f"graphed_r{rows}_c{context}" for context, rows in (*decode.CELLS, (600, 256))]
    names += [f"t{tokens}_{way}" for tokens in training.SIZES for way in training.WAYS]
    return any(figure.startswith(f"{name}_") for name in names)


def test_all_limits_together_stay_within_the_time_of_one_call() -> None:
    assert sum(one.limit for one in MEASURES) <= BUDGET
