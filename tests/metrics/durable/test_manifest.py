"""A manifest says what every file of a checkpoint holds, in checksums that any tool computes."""

import json
import os
import shutil
import zlib

import pytest

from rlinf.storage.directory import RunDirectory, find_checkpoint
from rlinf.storage.files import MANIFEST, Damaged, verify, verify_part, write_manifest


@pytest.fixture
def checkpoint(tmp_path):
    directory = tmp_path / "step_000003"
    for name in ("state/a", "state/b", "roles/mine/0/notes", "queue.json"):
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode() * 3_000_000 if name == "state/a" else name.encode())
    (directory / "empty").touch()
    write_manifest(directory, 3)
    return directory


def test_it_lists_every_file_with_its_size_and_crc_32(checkpoint):
    told = json.loads((checkpoint / MANIFEST).read_text())
    assert told["step"] == 3
    there = {path.relative_to(checkpoint).as_posix(): path for path in checkpoint.rglob("*") if path.is_file()}
    del there[MANIFEST]
    assert told["files"] == {
        name: {"bytes": path.stat().st_size, "crc32": f"{zlib.crc32(path.read_bytes()):08x}"}
        for name, path in there.items()
    }
    assert verify(checkpoint) == 3


def test_every_file_and_directory_is_on_the_disk_before_a_checkpoint_has_its_name(tmp_path, monkeypatch):
    directory = RunDirectory.create(tmp_path / "run")
    aside = directory.begin_checkpoint(3)
    (aside / "state").mkdir()
    (aside / "state" / "rank").write_text("weights")
    (aside / "queue.json").write_text('{"step": 3}')
    directory.metrics.write_text("{}\n")
    synced, sync, rename = [], os.fsync, type(aside).rename

    def fsync(descriptor):
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}").replace(str(directory.path), "run"))
        sync(descriptor)

    def renamed(self, target):
        synced.append("renamed")
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(type(aside), "rename", renamed)
    directory.finish_checkpoint(3)
    before, after = synced[: synced.index("renamed")], synced[synced.index("renamed") :]
    partial = "run/checkpoints/.step_000003.partial"
    names = ("", "/state", "/state/rank", "/queue.json", f"/{MANIFEST}")
    assert {f"{partial}{name}" for name in names} | {"run/metrics.jsonl"} == set(before)
    assert after[-1] == "run/checkpoints"


def test_what_differs_is_named_and_files_that_were_added_are_nobodys_business(checkpoint):
    (checkpoint / "notes.txt").write_text("mine")
    assert verify(checkpoint) == 3
    (checkpoint / "state/b").write_text("stat_/b")
    (checkpoint / "queue.json").unlink()
    with pytest.raises(Damaged, match=r"^queue\.json.*state/b.*checksum$"):
        verify(checkpoint)
    assert verify(checkpoint, below="roles") == 3
    with pytest.raises(Damaged, match="state/b"):
        verify(checkpoint, below="state")


def test_a_part_is_looked_at_by_its_own_path(checkpoint, tmp_path):
    (checkpoint / "state/b").write_text("stat_/b")
    verify_part(checkpoint / "roles")
    with pytest.raises(Damaged, match=r"step_000003.*damaged: state/b.*checksum"):
        verify_part(checkpoint / "state")
    link = tmp_path / "latest"
    link.symlink_to("step_000003")
    with pytest.raises(Damaged):
        verify_part(link / "state" / "b")
    verify_part(tmp_path)
    verify_part(tmp_path / "not there")


def test_a_manifest_does_not_lead_out_of_its_checkpoint(checkpoint):
    told = json.loads((checkpoint / MANIFEST).read_text())
    for name in ("../secret", "/etc/passwd", "state/../../secret"):
        (checkpoint / MANIFEST).write_text(json.dumps({**told, "files": {name: {"bytes": 1, "crc32": "0"}}}))
        with pytest.raises(Damaged, match="is no manifest"):
            verify(checkpoint)


def test_checkpoints_of_earlier_versions_have_none_and_are_believed(tmp_path):
    old = tmp_path / "run" / "checkpoints" / "step_000003"
    old.mkdir(parents=True)
    (old / "queue.json").write_text('{"step": 3}')
    found = find_checkpoint(tmp_path / "run")
    assert found is not None
    assert found.step == 3


def test_a_copied_link_does_not_keep_the_next_checkpoint_from_its_name(tmp_path):
    directory = RunDirectory.create(tmp_path / "run")
    for step in (3, 4):
        (directory.begin_checkpoint(step) / "queue.json").write_text(json.dumps({"step": step}))
        directory.finish_checkpoint(step)
        if step == 3:
            directory.latest.unlink()
            shutil.copytree(directory.checkpoints / "step_000003", directory.latest)
    assert os.readlink(directory.latest) == "step_000004"
