"""What tries to leave the sandbox stays inside, and the machine is as it was."""

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from rlinf.sandbox.containers.namespaces import Namespaces
from rlinf.sandbox.containers.protocol import ContainerEnded, ContainersError
from rlinf.sandbox.limits import Limits, SandboxError
from rlinf.sandbox.sandbox import Sandbox
from tests.launching import ROOT
from tests.sandbox.attempts import EXCESSIVE, PRIVILEGED, SHOWN

LITTLE = Limits(cpu_seconds=20, wall_seconds=20, memory_bytes=256 << 20, file_bytes=16 << 20)
SHORT = replace(LITTLE, cpu_seconds=1, wall_seconds=0.5)


@pytest.fixture(scope="module")
def loop():
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def sandbox(loop):
    async def made():
        os.environ["HANDED_DOWN"] = "1"
        sandbox = Sandbox(Limits(wall_seconds=20), at_once=2)
        await sandbox.isolation()
        return sandbox

    try:
        sandbox = loop.run(made())
    except SandboxError as error:
        pytest.skip(str(error))
    finally:
        os.environ.pop("HANDED_DOWN", None)
    yield sandbox
    loop.run(sandbox.close())


@pytest.fixture(scope="module")
def outside(tmp_path_factory):
    """Things of this machine that a program must not reach, by the names that attempts have for them."""
    directory = tmp_path_factory.mktemp("outside")
    (directory / "secret").write_text("a secret")
    victim = subprocess.Popen(["sleep", "600"], env={"HANDED_DOWN": "1"})
    shared = f"sandbox-test-{os.getpid()}"
    Path(f"/dev/shm/{shared}").write_text("shared")
    with (
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_UNIX) as path,
        socket.socket(socket.AF_UNIX) as abstract,
    ):
        here = os.getcwd()
        os.chdir(directory)  # a path of a socket must be short
        path.bind("unix")
        os.chdir(here)
        path.listen(8)
        abstract.bind(f"\0{shared}")
        abstract.listen(8)
        yield {
            "directory": directory,
            "port": tcp.getsockname()[1],
            "abstract": shared,
            "shared": shared,
            "pid": victim.pid,
            "home": Path.home(),
            "root": ROOT,
            "prefix": sys.base_prefix,
            "work": "/tmp",
        }
        assert victim.poll() is None, "a program ended a process outside"
    assert {path.name for path in directory.iterdir()} == {"secret", "unix"}
    assert (directory / "secret").read_text() == "a secret"
    Path(f"/dev/shm/{shared}").unlink()
    victim.kill()
    victim.wait()


ATTEMPTS = {**SHOWN, **PRIVILEGED}


@pytest.mark.parametrize("name", ATTEMPTS)
def test_what_is_outside_cannot_be_reached(name, loop, sandbox, outside):
    result = loop.run(sandbox.run_python(ATTEMPTS[name].format(**outside)))
    assert "ESCAPED" not in result.stdout
    assert result.stdout or result.outcome == "killed", result.stderr  # it got as far as trying


OF_ITS_OWN = {
    "udp", "a listening port", "resolving a name", "the environment of every process", "its own executable, by /proc",
    "its own memory, by /proc", "descriptors, by /proc", "/proc/sys", "System V shared memory", "a message queue",
    "memory without a file", "more descriptors", "the terminal", "becoming root", "a setuid file", "capabilities",
    "a file of the root",
}  # fmt: skip
"""Attempts that a container grants: each reaches what lies in its own namespaces, of whose files it is the owner."""


def test_what_is_outside_cannot_be_reached_from_a_container(loop, outside, tmp_path):
    async def attempts():
        os.environ["HANDED_DOWN"] = "1"
        async with Namespaces(tmp_path) as containers:
            os.environ.pop("HANDED_DOWN")
            for name, code in ATTEMPTS.items():
                if not containers.boxes:  # an attempt may end the container that it is in
                    box = await containers.start(workdir="/tmp/work")
                with contextlib.suppress(ContainerEnded):
                    result = await box.run(["python", "-S", "-c", code.format(**outside)], seconds=20)
                    yield name, result

    async def all_attempts():
        async for name, result in attempts():
            assert ("ESCAPED" in result.stdout) <= (name in OF_ITS_OWN), (name, result)
            assert result.stdout or result.outcome == "killed", (name, result)

    try:
        loop.run(all_attempts())
    except ContainersError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("name", EXCESSIVE)
def test_what_takes_too_much_is_ended(name, loop, sandbox):
    code, outcomes = EXCESSIVE[name]
    result = loop.run(sandbox.run_python(code, limits=SHORT if "timeout" in outcomes else LITTLE))
    assert result.outcome in outcomes, result
    assert len(result.stdout) + len(result.stderr) <= LITTLE.output_bytes
    assert loop.run(sandbox.run_python("print('unharmed')")).stdout == "unharmed\n"


@pytest.mark.repeated
@pytest.mark.parametrize("name", SHOWN)
def test_attempts_succeed_without_a_sandbox(name, outside, tmp_path):
    code = SHOWN[name].format(**{**outside, "work": tmp_path})
    with open("/dev/null") as inherited:
        found = subprocess.run(
            [sys.executable, "-S", "-c", code],
            env={**os.environ, "HANDED_DOWN": "1"},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
            pass_fds=[inherited.fileno()],
        )
    (outside["directory"] / "written").unlink(missing_ok=True)
    (outside["directory"] / "hard").unlink(missing_ok=True)
    assert "ESCAPED" in found.stdout, found.stdout + found.stderr
