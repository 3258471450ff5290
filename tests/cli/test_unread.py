"""A command whose reader leaves, as `head` does, ends without a word."""

from __future__ import annotations

import io
import os
import subprocess
import sys

import pytest

from rlinf.cli.main import UNREAD, quiet_when_unread
from tests.launching import ROOT

HELP, CONFIG = ("launch.py", "--help"), ("-m", "rlinf", "config")


@pytest.mark.parametrize(("command", "unbuffered"), [(HELP, ""), (CONFIG, "1")])
def test_nothing_is_said_to_nobody(command, unbuffered):
    reader, writer = os.pipe()
    os.close(reader)
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        timeout=100,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (UNREAD, "")


def test_a_pipe_of_the_program_that_breaks_is_an_error(monkeypatch):
    @quiet_when_unread
    def broken(arguments):
        raise BrokenPipeError("a worker's")

    for stdout in (sys.__stdout__, io.StringIO()):
        monkeypatch.setattr(sys, "stdout", stdout)
        with pytest.raises(BrokenPipeError, match="a worker's"):
            broken([])
