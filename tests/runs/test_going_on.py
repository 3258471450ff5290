"""What is said to whoever ended a run early: the newest checkpoint, and what goes on from it."""

import contextlib
import signal
import subprocess
import sys

import pytest

from rlinf.config.common import CheckpointConfig
from rlinf.config.load import InputError, RunFailure
from rlinf.runs.resume import beginning_anew, command, keeping_earlier_run, resume_hint, with_resume_hint
from rlinf.runs.starting import Starting
from rlinf.runtime.system.ending import Stopped
from rlinf.storage.directory import RunDirectory


@pytest.fixture
def directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    directory = RunDirectory.create(tmp_path / "outputs" / "mine")
    directory.resumed_by = command(directory.resolved)
    return directory


def checkpoint(directory, step):
    directory.begin_checkpoint(step)
    directory.finish_checkpoint(step)


def test_the_newest_checkpoint_and_a_command_are_named_as_typed_from_here(directory):
    checkpoint(directory, 5)
    checkpoint(directory, 15)
    assert resume_hint(directory, CheckpointConfig(every=5)) == (
        "the newest checkpoint is outputs/mine/checkpoints/step_000015; "
        "to go on: rlinf train --config outputs/mine/resolved.yaml --resume auto"
    )


@pytest.mark.parametrize(
    ("checkpoint", "keys"),
    [
        (CheckpointConfig(), ("checkpoint.minutes=30", "checkpoint.every=N")),
        (CheckpointConfig(every=50), ("checkpoint.every=50", "checkpoint.minutes=30")),
        (CheckpointConfig(every=50, minutes=0), ("checkpoint.every=50",)),
        (CheckpointConfig(minutes=0), ("the last step", "checkpoint.every=N")),
    ],
)
def test_without_a_checkpoint_the_keys_are_named_that_write_one(directory, checkpoint, keys):
    told = resume_hint(directory, checkpoint)
    assert told.startswith("no checkpoint ")
    assert all(key in told for key in keys)
    assert ("checkpoint.minutes" in told) == bool(checkpoint.minutes)
    assert "--resume" not in told


def test_resuming_without_a_checkpoint_names_the_earlier_run_that_has_one(directory):
    assert "outputs/mine; beginning anew" in beginning_anew(directory.path)
    assert "previous" not in beginning_anew(directory.path)
    checkpoint(directory, 5)
    RunDirectory.create(directory.path)
    assert "--resume outputs/mine.previous-1 " in beginning_anew(directory.path)


@pytest.mark.parametrize(
    ("error", "restarts", "back"),
    [
        (InputError("no rows"), None, True),
        (ValueError("a bug"), None, True),
        (InputError("no rows"), "3", False),  # torchrun starts it again, with --resume auto
        (Stopped(signal.SIGTERM, 75), None, False),  # so does a scheduler
    ],
)
def test_a_start_that_fails_leaves_the_earlier_run_where_it_was(monkeypatch, directory, error, restarts, back):
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
    monkeypatch.delenv("TORCHELASTIC_MAX_RESTARTS", raising=False)
    if restarts is not None:
        monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", restarts)
    checkpoint(directory, 5)
    again = RunDirectory.create(directory.path)
    with pytest.raises(type(error)), keeping_earlier_run(again):
        raise error
    assert directory.latest.exists() == back
    assert directory.path.with_name("mine.previous-1").exists() != back


@pytest.mark.parametrize(
    ("world", "local", "started"),
    [
        ("4", "4", "torchrun --nproc-per-node 4 -m rlinf train --config "),
        ("16", "8", "torchrun --nnodes 2 --nproc-per-node 8 -m rlinf train --config "),
    ],
)
def test_a_job_of_several_processes_is_gone_on_with_in_as_many(monkeypatch, tmp_path, world, local, started):
    monkeypatch.setenv("WORLD_SIZE", world)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    assert command(tmp_path / "a run" / "resolved.yaml").startswith(started)
    assert f"'{tmp_path}/a run/resolved.yaml'" in command(tmp_path / "a run" / "resolved.yaml")


def test_a_signal_that_ends_a_run_at_once_says_it_and_nothing_else_does(directory, capsys):
    with pytest.raises(Stopped), with_resume_hint(directory, CheckpointConfig()):
        raise Stopped(signal.SIGINT)
    told = capsys.readouterr().err
    assert told.startswith("rlinf: no checkpoint")
    assert "SIGTERM" in told, "which saves first"
    with pytest.raises(ValueError, match="a bug"), with_resume_hint(directory, CheckpointConfig()):
        raise ValueError("a bug")
    assert capsys.readouterr().err == ""
    assert not directory.report.exists(), "nothing was measured"


@pytest.mark.parametrize(("code", "said"), [(7, "sys.exit(7)"), (75, "")])
def test_code_of_the_run_that_exits_is_told_of(directory, capsys, code, said):
    with pytest.raises(SystemExit), with_resume_hint(directory, CheckpointConfig()):
        raise SystemExit(code)
    told = capsys.readouterr().err
    assert said in told
    assert bool(told) == bool(said)


@pytest.mark.parametrize("error", [Stopped(signal.SIGTERM, 75), RunFailure("the disk is full"), ValueError("a bug")])
def test_the_report_is_written_however_a_run_ends(directory, error):
    directory.metrics.write_text('{"step": 1, "loss": 0.5}\n')
    with pytest.raises(type(error)), with_resume_hint(directory, CheckpointConfig()):
        raise error
    assert "loss" in directory.report.read_text()


ENDS = {"SIGTERM": 75, "SIGUSR1": 75, "SIGHUP": 75, "SIGINT": 130, "SIGQUIT": 131}
"""Exit codes of docs/checkpoints.md for a run that starts."""


@pytest.mark.parametrize("number", [signal.Signals[name] for name in ENDS])
def test_a_signal_ends_a_run_that_starts_and_is_its_own_once_it_has_begun(monkeypatch, capsys, number):
    monkeypatch.delenv("RANK", raising=False)
    was = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
    before = signal.signal(number, was)
    try:
        with pytest.raises(SystemExit) as ended, Starting():
            signal.raise_signal(number)
        assert ended.value.code == ENDS[number.name]
        said = capsys.readouterr().err
        assert "while starting" in said
        assert ("start it again" in said) == (ended.value.code == 75)
        with Starting() as starting:
            starting.begins()
            signal.raise_signal(number)  # after its end, when it no longer listens
        assert signal.getsignal(number) == was
        signal.signal(number, signal.SIG_IGN)
        with Starting():
            signal.raise_signal(number)  # as nohup wants it
    finally:
        signal.signal(number, before)


PROCESS = """
import atexit, os, signal, sys
from rlinf.runs import starting

def told():
    os.kill(os.getpid(), getattr(signal, sys.argv[1]))

when, run = sys.argv[2], starting.Starting(process=True)
if when == "imports":
    told()
class Dropping:
    def __del__(self):
        told()
if when == "a finalizer":
    Dropping()
atexit.register(told)  # after the run's end
with run:
    run.begins()
if when == "long after":
    starting.ENDING = -1.0
elif when == "finalising":
    run._ignore()
told()
"""


def listening():
    """What a shell ignores for jobs in the background, these processes do not ignore."""
    for number in ENDS:
        signal.signal(signal.Signals[number], signal.SIG_DFL)


@pytest.mark.parametrize("number", ENDS)
def test_a_process_that_is_for_a_run_answers_signals_from_its_first_moment_to_its_last(number):
    codes = {}
    for when in ("imports", "a finalizer", "after", "finalising", "long after"):
        done = subprocess.run(
            [sys.executable, "-c", PROCESS, number, when], capture_output=True, text=True, preexec_fn=listening
        )
        codes[when] = done.returncode
        assert "Traceback" not in done.stderr
    told = dict.fromkeys(("imports", "a finalizer"), ENDS[number])
    assert codes == {**told, "after": 0, "finalising": 0, "long after": -signal.Signals[number]}


def swallowed(starting):
    with contextlib.suppress(SystemExit):
        signal.raise_signal(signal.SIGTERM)
    starting.begins()


def taken_for_a_mistake(_):
    try:
        signal.raise_signal(signal.SIGTERM)
    except BaseException as error:  # as of a configuration that could not be tried out
        raise ValueError("a mistake") from error


@pytest.mark.parametrize("starts", [swallowed, taken_for_a_mistake])
def test_a_signal_that_was_lost_on_its_way_ends_it_all_the_same(starts):
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with pytest.raises(SystemExit) as ended, Starting() as starting:
            starts(starting)
        assert ended.value.code == 75
    finally:
        signal.signal(signal.SIGTERM, before)
