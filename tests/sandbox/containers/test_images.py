"""Images as files: every form is unpacked to the same tree, and nothing in one leads out of it."""

import contextlib
import hashlib
import io
import json
import os
import shutil
import subprocess
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from rlinf.sandbox.containers.namespaces import Namespaces
from rlinf.sandbox.containers.protocol import LIMITS, ContainersError

QUICK = replace(LIMITS, file_bytes=8 << 20, wall_seconds=20.0)
TREE = "cat ../etc/kept; ls /etc/gone /dir/.wh* 2>&-; ls /dir; cat /dir/z; readlink /out; pwd; echo $COLOR; cat /hard"
SEEN = "kept\nz\nz\n/\n/dir\ngreen\nz\n"


def layer(entries):
    """A tar file of (name, content, a link's aim or bytes)."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as tar:
        for name, content, *kind in entries:
            entry = tarfile.TarInfo(name)
            entry.mode, entry.uid = 0o755, 12345
            if isinstance(content, str):
                entry.type, entry.linkname = kind[0], content
                tar.addfile(entry)
            else:
                entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content))
    return file.getvalue()


def programs():
    """The shell of this machine with what it loads, and two programs more."""
    files = {}
    for name in ("sh", "cat", "ls", "readlink"):
        path = files[f"bin/{name}"] = shutil.which(name)
        lines = subprocess.run(["ldd", path], capture_output=True, text=True, check=False).stdout.split()
        files.update({word.lstrip("/"): word for word in lines if word.startswith("/")})
    return {name: Path(path).read_bytes() for name, path in files.items()}


@pytest.fixture(scope="module")
def layers():
    first = [*programs().items(), ("etc/kept", b"kept\n"), ("etc/gone", b"x"), ("dir/x", b"x"), ("dir/y/deep", b"x")]
    first += [("out", "/", tarfile.SYMTYPE), ("etc/old", b"old")]
    second = [("etc/.wh.gone", b""), ("dir/z", b"z\n"), ("dir/.wh..wh..opq", b""), ("hard", "dir/z", tarfile.LNKTYPE)]
    second += [("../../../escaped", b"x"), ("/escaped", b"x"), ("out/escaped-by-link", b"x")]
    return [layer(first), layer(second)]


CONFIG = json.dumps({"config": {"Env": ["COLOR=green", "PATH=/usr/bin:/bin"], "WorkingDir": "/dir"}}).encode()


def saved(path, layers):
    """As `docker save` writes it."""
    with tarfile.open(path, "w") as tar:
        parts = {"config.json": CONFIG, **{f"{n}/layer.tar": data for n, data in enumerate(layers)}}
        manifest = [{"Config": "config.json", "RepoTags": ["a:1"], "Layers": [*parts][1:]}]
        for name, data in {**parts, "manifest.json": json.dumps(manifest).encode()}.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    return path


def layout(path, layers):
    """An OCI layout, whose index leads to another one for several kinds of machine."""
    (path / "blobs/sha256").mkdir(parents=True)

    def blob(data, **more):
        name = hashlib.sha256(data).hexdigest()
        (path / "blobs/sha256" / name).write_bytes(data)
        return {"digest": f"sha256:{name}", "size": len(data), **more}

    manifest = {"config": blob(CONFIG), "layers": [blob(data) for data in layers]}
    other = blob(b"{}", platform={"architecture": "m68k"})
    machine = {"x86_64": "amd64", "aarch64": "arm64"}.get(os.uname().machine, os.uname().machine)
    ours = blob(json.dumps(manifest).encode(), platform={"architecture": machine})
    inner = {"manifests": [other, ours]}
    (path / "index.json").write_text(json.dumps({"manifests": [blob(json.dumps(inner).encode())]}))
    return path


def packed_layout(path, layers):
    with tarfile.open(path, "w") as tar:
        tar.add(layout(path.with_suffix(".dir"), layers), "")
    return path


@contextlib.asynccontextmanager
async def provider(directory, **more):
    async with Namespaces(directory, **more) as made:
        try:
            await (await made.start()).end()
        except ContainersError as error:
            pytest.skip(str(error))
        yield made


@pytest.mark.parametrize("form", [saved, layout, packed_layout])
async def test_every_form_of_an_image_gives_the_same_tree_and_none_leads_out(tmp_path, layers, form):
    image = form(tmp_path / "image", layers)
    async with provider(tmp_path / "cache") as containers:
        box = await containers.start(image, limits=QUICK)
        result = await box.run(TREE)
        assert (result.stdout, result.stderr) == (SEEN, "")
        assert "escaped" in (await box.run("ls /")).stdout
        assert (await box.run("ls /usr/share /work /home")).exit_code == 2  # of the machine nothing is seen
        await box.run("echo changed > /etc/kept")
        assert (await (await containers.start(image, limits=QUICK)).run("cat /etc/kept")).stdout == "kept\n"
    assert not [path for path in tmp_path.parent.rglob("escaped*") if "cache/images" not in str(path)]
    (unpacked,) = (tmp_path / "cache/images").iterdir()
    before = unpacked.stat().st_mtime_ns
    async with provider(tmp_path / "cache") as containers:  # another run has it at once
        assert (await (await containers.start(image, limits=QUICK)).run(TREE)).stdout == SEEN
    assert unpacked.stat().st_mtime_ns == before
    assert [*(tmp_path / "cache/runs").iterdir()] == []


async def test_a_directory_is_a_root_and_stays_as_it_is(tmp_path):
    root = tmp_path / "root"
    for name, content in programs().items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
        (root / name).chmod(0o755)
    (root / "file").write_text("mine\n")
    async with provider(tmp_path / "cache") as containers:
        for _ in range(2):
            box = await containers.start(root, limits=QUICK)
            assert (await box.run("cat /file; echo other > /file; cat /file")).stdout == "mine\nother\n"
    assert (root / "file").read_text() == "mine\n"
    assert not (tmp_path / "cache/images").exists()


async def test_names_are_looked_up_and_a_tool_is_asked_for_those_of_registries(tmp_path, layers, monkeypatch):
    saved(tmp_path / "a_b_1.tar", layers)
    async with provider(tmp_path / "cache", images=tmp_path) as containers:
        assert (await (await containers.start("a/b:1", limits=QUICK)).run("cat /dir/z")).stdout == "z\n"
        monkeypatch.setenv("PATH", str(tmp_path))
        with pytest.raises(ContainersError, match="docker save c:2"):
            await containers.start("c:2")
        layout(tmp_path / "stored", layers)
        tool = tmp_path / "skopeo"  # takes the part of the tool that is on no registry of packages
        tool.write_text('#!/bin/sh\n[ "$1 $2" = "copy docker://c:2" ] && /bin/cp -r ${0%/*}/stored ${3#oci:}\n')
        tool.chmod(0o755)
        assert (await (await containers.start("c:2", limits=QUICK)).run("cat /dir/z")).stdout == "z\n"
        with pytest.raises(ContainersError, match="skopeo"):
            await containers.start("d:3")


@pytest.mark.parametrize(
    "content", [b"", b"no tar at all", layer([("x", b"y")])], ids=["empty", "text", "a tar of no image"]
)
async def test_what_is_no_image_is_one_line(tmp_path, content):
    (tmp_path / "image.tar").write_bytes(content)
    async with provider(tmp_path / "cache") as containers:
        with pytest.raises(ContainersError, match=r"image\.tar") as refusal:
            await containers.start(tmp_path / "image.tar")
        assert "\n" not in str(refusal.value)
