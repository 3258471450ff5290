"""Damage to the files of a checkpoint is found before they are used, told in one line, and the one before serves."""

import contextlib
import itertools
import json
import os
import shutil
import tempfile
from pathlib import Path

import pytest

from rlinf.config.load import InputError
from rlinf.runs.rules import load_any
from rlinf.runs.start import checkpoint_to_resume, open_run_directory
from rlinf.storage.files import MANIFEST
from tests.launching import QUICKSTART, TINY, launch, metrics_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
RUN = ("--config", QUICKSTART, *TINY, "steps=2", "checkpoint.every=1", "evaluation.every=0")
STATE, MODEL, QUEUE = "state/rank_00000.safetensors", "hf/model.safetensors", "queue.json"


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A run with two checkpoints, for all tests to copy."""
    output = tmp_path_factory.mktemp("whole")
    launch(*RUN, f"output_dir={output}")
    return output / "quickstart"


@pytest.fixture
def run(whole, tmp_path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "quickstart", symlinks=True))


def truncated(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def flipped(file: Path, count: int = 64) -> None:
    content = bytearray(file.read_bytes())
    middle = len(content) // 2
    content[middle : middle + count] = bytes(255 - each for each in content[middle : middle + count])
    file.write_bytes(content)


def one_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def emptied(file: Path) -> None:
    file.write_bytes(b"")


def garbage(file: Path) -> None:
    file.write_bytes(b"\x00\xff{[" * 50)


def directory(file: Path) -> None:
    file.unlink()
    file.mkdir()


def dangling(file: Path) -> None:
    file.unlink()
    file.symlink_to("nowhere")


def rewritten(file: Path, **values) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


DAMAGES = {
    "truncated state": (lambda it: truncated(it / STATE), f"{STATE} has .* bytes instead of"),
    "flipped state": (lambda it: flipped(it / STATE), f"{STATE} has another checksum"),
    "one bit of the model": (lambda it: one_bit(it / MODEL), f"{MODEL} has another checksum"),
    "missing state": (lambda it: (it / STATE).unlink(), f"{STATE} is missing"),
    "missing directory": (lambda it: shutil.rmtree(it / "state"), "state/.* is missing"),
    "empty state": (lambda it: emptied(it / STATE), f"{STATE} has 0 bytes instead of"),
    "garbage state.json": (lambda it: garbage(it / "state/state.json"), "state/state.json has"),
    "directory for a file": (lambda it: directory(it / MODEL), f"{MODEL} is a directory"),
    "dangling link for a file": (lambda it: dangling(it / STATE), f"{STATE} is missing"),
    "garbage queue.json": (lambda it: garbage(it / QUEUE), f"{QUEUE} is not JSON"),
    "empty queue.json": (lambda it: emptied(it / QUEUE), f"{QUEUE} is not JSON"),
    "missing queue.json": (lambda it: (it / QUEUE).unlink(), f"it has no {QUEUE}"),
    "wrong step": (lambda it: rewritten(it / QUEUE, step=1), f"{QUEUE} has"),
    "no step": (lambda it: rewritten(it / QUEUE, step="two"), "does not say after which step"),
    "queue.json as a directory": (lambda it: directory(it / QUEUE), f"{QUEUE} cannot be read: Is a directory"),
    "missing manifest": (lambda it: (it / MANIFEST).unlink(), f"{MANIFEST} is missing"),
    "garbage manifest": (lambda it: garbage(it / MANIFEST), f"{MANIFEST} is no manifest"),
    "manifest of nothing": (lambda it: (it / MANIFEST).write_text('{"format": 1}'), f"{MANIFEST} is no manifest"),
    "manifest of the future": (lambda it: rewritten(it / MANIFEST, format=9), f"{MANIFEST} is of format 9"),
    "another step's name": (lambda it: it.rename(it.with_name("step_000007")), "which is not what its name"),
    "a file in its place": (lambda it: (shutil.rmtree(it), it.write_text("x")), "it cannot be read|Not a directory"),
    "everything gone": (lambda it: (shutil.rmtree(it), it.mkdir()), f"it has no {QUEUE}"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before_and_that_is_said(run, damage):
    do, told = DAMAGES[damage]
    do(run / "checkpoints" / "step_000002")
    found = checkpoint_to_resume("auto", run)
    assert found is not None
    assert found.step == 1
    (passed,) = found.passed_over
    name = passed.partition(":")[0]
    assert "\n" not in passed
    with pytest.raises(InputError, match=told) as refused:
        checkpoint_to_resume(str(run / "checkpoints" / name), run)
    assert "\n" not in str(refused.value)
    open_run_directory(run, load_any(QUICKSTART, [*TINY, "evaluation.every=0"], 1), found)
    left = {path.name for path in (run / "checkpoints").iterdir() if path.is_dir()} - {name}
    assert left <= {"latest", "step_000001", f"superseded_{name}"}


def as_nobody(do) -> None:
    """Run something in a process without privileges, which root has in spite of every permission."""
    if (child := os.fork()) == 0:
        with contextlib.suppress(BaseException):
            if os.geteuid() == 0:
                os.seteuid(65534)
            do()
            os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("what", [STATE, QUEUE, MANIFEST, "."])
def test_what_may_not_be_read_is_damage_too(run, what):
    for folder in (run, *itertools.takewhile(Path(tempfile.gettempdir()).__ne__, run.parents)):
        folder.chmod(0o755)
    (run / "checkpoints" / "step_000002" / what).chmod(0)

    def look() -> None:
        found = checkpoint_to_resume("auto", run)
        assert found is not None
        assert found.step == 1
        assert "cannot be read: Permission denied" in found.passed_over[0]

    as_nobody(look)


def test_where_no_checkpoint_is_whole_nothing_is_begun_anew_by_itself(run):
    for step in (1, 2):
        flipped(run / "checkpoints" / f"step_00000{step}" / STATE)
    with pytest.raises(InputError, match=r"step_000002: .*; step_000001: .*--resume.*starts"):
        checkpoint_to_resume("auto", run)


def test_links_and_notes_may_be_damaged_as_well(run):
    (run / "checkpoints" / "latest").unlink()
    (run / "checkpoints" / "latest").symlink_to("step_000099")
    found = checkpoint_to_resume("auto", run)
    assert found is not None
    assert found.step == 2
    with pytest.raises(InputError, match=r"leads.*step_000099"):
        checkpoint_to_resume(str(run / "checkpoints" / "latest"), run)
    garbage(run / "metrics.jsonl")
    garbage(run / "resolved.yaml")
    config = load_any(QUICKSTART, [*TINY, "evaluation.every=0"], 1)
    with pytest.raises(InputError, match=r"resolved\.yaml.*damaged:"):
        open_run_directory(run, config, found)
    (run / "resolved.yaml").unlink()
    assert open_run_directory(run, config, found).metrics.read_text() == ""


def test_a_run_says_which_checkpoints_it_passed_over_and_goes_on(run):
    flipped(run / "checkpoints" / "step_000002" / STATE)
    here = (*RUN, f"output_dir={run.parent}", "steps=3")
    refused = launch(*here, "--resume", str(run / "checkpoints" / "step_000002"), expect=2)
    assert refused.stderr.count("\n") == 1, "one line"
    assert refused.stderr.startswith("error: --resume ")
    assert "state/rank_00000.safetensors has another checksum" in refused.stderr
    done = launch(*here, "--resume", "auto")
    said = done.stdout.splitlines()
    assert "passed over, as it is damaged: step_000002: state/rank_00000.safetensors has another checksum" in said
    assert any(line.startswith("going on after step 1, from ") for line in said)
    assert [line["step"] for line in metrics_of(run)] == [1, 2, 3]


def test_whoever_uses_a_part_of_a_damaged_checkpoint_is_told_so(run):
    model = run / "checkpoints" / "latest" / "hf"
    one_bit(model / "model.safetensors")
    told = "is damaged: hf/model.safetensors has another checksum; take an earlier checkpoint"
    new = launch(*RUN, f"output_dir={run.parent / 'new'}", f"model.path={model}", expect=2)
    assert told in new.stderr
    assert not (run.parent / "new").exists()
    evaluate = ("evaluate", "--model", str(model), "--config", QUICKSTART)
    assert told in launch(*evaluate, program=Path("rlinf/__main__.py").absolute(), expect=2).stderr
