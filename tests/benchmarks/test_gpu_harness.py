"""The harness of `make test-gpu` and `make bench-gpu`: limits, what a second call makes, and what the table says."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.gpu.harness import ROOT, Check, main

MODULE = """
import os, subprocess, sys, time
from benchmarks.gpu.scale import NotRun, Outcome

def good(scale):
    print("noise")
    (scale.work / "good").open("a").write("x")
    return Outcome(True, {"layers": scale.of(28, 2)}, "2 layers")

def bad(scale):
    (scale.work / "bad").open("a").write("x")
    return Outcome(False, {"error": 0.5}, "0.5 > 0.01")

def hangs(scale):
    for name in ("child", "child-of-another-session"):
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session="of" in name)
        (scale.work / name).write_text(str(child.pid))
    scale.keep({"first_s": 0.5})
    (scale.work / "kept").touch()
    time.sleep(600)

def breaks(scale):
    raise RuntimeError("the kernel is gone")

def lacks(scale):
    import a_package_of_nobody

def cannot(scale):
    raise NotRun("one card, this needs two")
"""

TORCH = """
from types import SimpleNamespace
cuda = SimpleNamespace(is_available=lambda: False, is_initialized=lambda: False)
"""
"""What the harness itself asks of it, where to import all of it would take most of the time; the rehearsals of checks
and measures are made with the real one."""


@pytest.fixture
def checks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Check]:
    """One of each kind."""
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "__init__.py").touch()
    (tmp_path / "made" / "subject.py").write_text(MODULE)
    (tmp_path / "torch.py").write_text(TORCH)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    limits = {"good": 60.0, "bad": 60.0, "hangs": 6.0, "breaks": 60.0, "lacks": 60.0, "cannot": 60.0}
    return [Check(name, f"subject:{name}", limit, f"criterion of {name}") for name, limit in limits.items()]


def states(out: Path) -> dict[str, str]:
    return {name: found["state"] for name, found in json.loads(out.read_text())["outcomes"].items()}


def test_each_has_its_own_process_limit_and_state(
    tmp_path: Path, checks: list[Check], capsys: pytest.CaptureFixture[str]
) -> None:
    out, work = tmp_path / "out.json", tmp_path / "work"
    work.mkdir()
    common = ["--rehearse", "--out", str(out), "--work", str(work)]

    assert main("checks", "made", checks[:1], common) == 0
    assert main("checks", "made", checks, common) == 1
    assert states(out) == {
        "good": "passed", "bad": "failed", "hangs": "timed out", "breaks": "crashed", "lacks": "not run",
        "cannot": "not run",
    }  # fmt: skip
    told = capsys.readouterr().out
    assert "0.5 > 0.01" in told
    assert "RuntimeError: the kernel is gone" in told
    assert "a_package_of_nobody is not installed" in told
    for name in ("child", "child-of-another-session"):
        child = int((work / name).read_text())
        assert not Path(f"/proc/{child}/cmdline").exists() or not Path(f"/proc/{child}/cmdline").read_bytes()
    assert json.loads(out.read_text())["outcomes"]["hangs"]["figures"] == {"first_s": 0.5}

    # good and bad were answered, so nothing asks them again, but when told to
    assert (work / "good").read_text() == "x"
    assert main("checks", "made", checks[:2], [*common, "--failed"]) == 1
    assert (work / "good").read_text() == "x"
    assert (work / "bad").read_text() == "xx"
    capsys.readouterr()
    assert main("checks", "made", checks, [*common, "--only", "good"]) == 1
    assert (work / "good").read_text() == "xx"
    assert "criterion of bad" not in capsys.readouterr().out

    # a file of other code is not gone on with
    record = json.loads(out.read_text())
    out.write_text(json.dumps({**record, "code": "other"}))
    assert main("checks", "made", checks[:1], common) == 0
    assert (work / "good").read_text() == "xxx"

    assert main("checks", "made", checks[:1], [*common[:1], "--out", str(tmp_path / "new.json"), "--budget", "1"]) == 3
    with pytest.raises(SystemExit, match=r"called nobody"):
        main("checks", "made", checks[:1], [*common, "--only", "nobody"])


def test_a_command_that_is_told_to_end_leaves_nothing_and_is_gone_on_with(tmp_path: Path, checks: list[Check]) -> None:
    out, work = tmp_path / "out.json", tmp_path / "work"
    work.mkdir()
    common = ["--rehearse", "--out", str(out), "--work", str(work)]
    two = [checks[0], dataclasses.replace(checks[2], limit=60.0)]
    program = f"from benchmarks.gpu.harness import *; sys.exit(main('checks', 'made', {two!r}, {common!r}))"
    path = os.pathsep.join([str(ROOT), str(tmp_path)])
    running = subprocess.Popen(
        [sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, text=True
    )
    assert running.stdout is not None
    for line in running.stdout:
        if "good" in line:
            break
    while not (work / "kept").exists():  # the check has begun
        time.sleep(0.05)
    running.terminate()
    assert "interrupted" in running.stdout.read()
    assert running.wait(30) == 130
    for name in ("child", "child-of-another-session"):
        pid = (work / name).read_text()
        assert not Path(f"/proc/{pid}/cmdline").exists() or not Path(f"/proc/{pid}/cmdline").read_bytes()
    assert states(out) == {"good": "passed", "hangs": "interrupted"}
    assert json.loads(out.read_text())["outcomes"]["hangs"]["figures"] == {"first_s": 0.5}, "what was known is written"
    assert main("checks", "made", checks[:1], common) == 0
    assert (work / "good").read_text() == "x"
