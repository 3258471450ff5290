"""sdist and wheel: built from a copy of the repository, and used where nothing else of it is."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

from rlinf.config.importing import shipped, shipped_file
from tests.launching import QUICKSTART, ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
BUILD = "from setuptools import build_meta; import sys; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"


def run(*command: str | Path, cwd: Path, expect: int = 0) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == expect, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> tuple[Path, Path]:
    """An sdist of the repository, and the wheel that is made of it."""
    source, made = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("rlinf", "rlinf_convert", "configs"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    sdist = made / run(sys.executable, "-c", BUILD, "build_sdist", made, cwd=source).stdout.split()[-1]
    with tarfile.open(sdist) as archive:
        archive.extractall(
            made / "unpacked", **({"filter": "data"} if hasattr(tarfile, "data_filter") else {})
        )  # from 3.11.4 on
    (unpacked,) = (made / "unpacked").iterdir()
    return sdist, made / run(sys.executable, "-c", BUILD, "build_wheel", made, cwd=unpacked).stdout.split()[-1]


@pytest.fixture(scope="module")
def environment(built, tmp_path_factory) -> Path:
    """`bin` of an environment into which the wheel was installed; what it depends on is borrowed from ours."""
    place = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", place, cwd=place)
    python = place / "bin" / "python"
    pip = ("-m", "pip", "--disable-pip-version-check", "--python", python)
    run(sys.executable, *pip, "install", "--quiet", "--no-deps", "--no-compile", built[1], cwd=place)
    (packages,) = place.glob("lib/python*/site-packages")
    (packages / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return place / "bin"


def test_the_wheel_has_all_that_is_read_at_run_time_and_no_tests(built):
    names = set(zipfile.ZipFile(built[1]).namelist())
    code = [*(ROOT / "rlinf").rglob("*.py"), *(ROOT / "rlinf_convert").glob("*.py")]
    there = {path.relative_to(ROOT).as_posix() for path in code}
    pages = {path.relative_to(ROOT).as_posix() for path in (ROOT / "rlinf/dashboard/page").iterdir()}
    configs = {
        f"rlinf/config/shipped/{path.relative_to(ROOT / 'configs')}"
        for path in (ROOT / "configs").rglob("*")
        if path.suffix in (".yaml", ".npz", ".jsonl")
    }
    tables = {path.relative_to(ROOT).as_posix() for path in (ROOT / "rlinf_convert/conversions").iterdir()}
    assert there | pages | configs | tables | {"rlinf/py.typed"} <= names
    assert not [name for name in names if not name.startswith(("rlinf/", "rlinf_convert/", "rlinf-"))]


def test_the_package_says_what_it_is(built):
    with zipfile.ZipFile(built[1]) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("METADATA"))
        said = archive.read(name).decode()
    for line in (
        "Name: rlinf",
        "License-Expression: Apache-2.0",
        "Requires-Python: >=3.11",
        "# rlinf",
        "Provides-Extra: lora",
    ):
        assert line in said


def test_an_installed_rlinf_is_a_command_that_works_anywhere(environment, tmp_path):
    assert "train by a configuration" in run(environment / "rlinf", "--help", cwd=tmp_path).stdout
    where = run(environment / "python", "-c", "import rlinf; print(rlinf.__file__)", cwd=tmp_path).stdout
    assert where.startswith(str(environment.parent)), "not the repository's"
    dry_run = ("train", "--config", "quickstart", "--dry-run", "--verbose", "steps=7")
    told = run(environment / "rlinf", *dry_run, cwd=tmp_path).stdout
    assert "steps: 7" in told
    assert "# Data: " in told
    dry_run = ("train", "--config", "embodied/toy_imitation", "--dry-run", "--verbose")
    shown = run(environment / "rlinf", *dry_run, cwd=tmp_path).stdout
    assert "toy_demonstrations.npz" in shown
    wrong = run(environment / "rlinf", "train", "--config", "quickstrat", cwd=tmp_path, expect=2)
    assert "Traceback" not in wrong.stderr
    assert "theirs.yaml" in run(environment / "rlinf", "convert", "theirs.yaml", "b", cwd=tmp_path, expect=2).stderr
    assert not list(tmp_path.iterdir())


def test_a_configuration_of_ours_goes_by_its_name_unless_a_file_has_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert Path(shipped("quickstart")).samefile(ROOT / QUICKSTART)
    assert Path(shipped(QUICKSTART)).samefile(ROOT / QUICKSTART)
    assert Path(shipped("embodied/toy")).samefile(ROOT / "configs/embodied/toy.yaml")
    shown = "configs/embodied/toy_demonstrations.npz"
    assert Path(shipped_file(shown)).samefile(ROOT / shown)
    assert shipped_file("configs/embodied/../none.npz") == "configs/embodied/../none.npz"
    assert shipped_file("embodied/toy.yaml") == "embodied/toy.yaml"
    (tmp_path / "quickstart").write_text("name: mine")
    assert shipped("quickstart") == "quickstart"
    assert shipped("nothing") == "nothing"
    assert shipped("../rlinf/configs/quickstart") == "../rlinf/configs/quickstart"
