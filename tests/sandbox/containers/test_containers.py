"""Containers of every provider do the same; one table of behaviour is run over all of them."""

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from aiohttp import web

from rlinf.sandbox.containers.docker import Docker
from rlinf.sandbox.containers.namespaces import Namespaces
from rlinf.sandbox.containers.protocol import LIMITS, ContainerEnded, ContainersError
from rlinf.sandbox.containers.remote import Remote, Server
from rlinf.sandbox.inside import reaper
from tests.sandbox.containers.docker_api import Daemon

TOKEN = "a token of the test"
QUICK = replace(LIMITS, file_bytes=8 << 20, memory_bytes=256 << 20, wall_seconds=20.0, output_bytes=10_000)


@contextlib.asynccontextmanager
async def namespaces(directory):
    async with Namespaces(directory / "cache") as provider:
        try:
            await (await provider.start()).end()
        except ContainersError as error:
            pytest.skip(str(error))
        yield provider


@contextlib.asynccontextmanager
async def docker(directory):
    async with namespaces(directory / "probe"):
        pass  # the daemon takes them
    async with Daemon(directory).serve() as daemon, Docker(daemon.socket, base="base", forwards=True) as provider:
        yield provider
        assert not [call for call in daemon.calls if call.startswith("POST /images")]
    assert daemon.containers == {}


@contextlib.asynccontextmanager
async def remote(directory):
    async with namespaces(directory) as provider, serving(provider) as url, Remote(url, TOKEN) as client:
        yield client


@contextlib.asynccontextmanager
async def serving(provider, most=100):
    runner = web.AppRunner(Server(provider, TOKEN, most).app(), handler_cancellation=True)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
    finally:
        await runner.cleanup()


@contextlib.asynccontextmanager
async def real(directory):
    async with Docker(base="base", forwards=True) as provider:
        yield provider


PROVIDERS = {"namespaces": namespaces, "docker": docker, "remote": remote}
if os.environ.get("DOCKER_HOST"):  # a daemon, with an image `base` that has python3
    PROVIDERS["real"] = real


@pytest.fixture(params=PROVIDERS)
async def containers(request, tmp_path):
    async with PROVIDERS[request.param](tmp_path) as provider:
        yield provider


async def test_a_command_has_its_status_output_input_directory_and_variables(containers):
    box = await containers.start(workdir="/repo", env={"A": "1", "B": "1"}, limits=QUICK)
    result = await box.run("pwd; echo $A$B; cat; echo wrong >&2; exit 3", env={"B": "2"}, stdin="given\n")
    assert (result.outcome, result.exit_code) == ("error", 3)
    assert (result.stdout, result.stderr) == ("/repo\n12\ngiven\n", "wrong\n")
    assert (await box.run("pwd", cwd="/tmp")).stdout == "/tmp\n"
    assert (await box.run(["echo", "$A", "a b"])).stdout == "$A a b\n"
    assert (await box.run(["no-such-program"])).exit_code == 127


async def test_files_stay_between_commands_and_are_no_other_containers(containers):
    one, other = await containers.start(limits=QUICK), await containers.start(limits=QUICK)
    await one.run("echo mine > /tmp/file; mkdir -p /etc/own; echo here > /etc/own/x")
    assert (await one.run("cat /tmp/file /etc/own/x")).stdout == "mine\nhere\n"
    assert (await other.run("ls /tmp /etc/own")).exit_code == 2


ASKS = """
import socket, sys
for number in range(3):
    with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as end:
        end.sendall(b"asked %d" % number)
        end.shutdown(socket.SHUT_WR)
        text = end.makefile().read()
        print(len(text), text[:7])
"""


async def test_a_container_reaches_an_address_of_this_machine_by_a_port_of_its_own(containers):
    async def answer(reader, writer):
        writer.write((await reader.read()).upper() * 100_000)  # more than any buffer on the way
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    there = server.sockets[0].getsockname()
    async with server:
        box = await containers.start(limits=QUICK)
        port, other = await box.forward(*there), await box.forward("127.0.0.1", 1)
        asked = await box.run(["python3", "-c", ASKS, str(port)])
        assert (asked.stdout, asked.stderr) == ("700000 ASKED 0\n700000 ASKED 1\n700000 ASKED 2\n", "")
        refused = await box.run(["python3", "-c", ASKS, str(other)])  # nobody listens there: the connection ends
        assert set(refused.stdout.splitlines()) <= {"0 "}
        unknown = await box.run(["python3", "-c", ASKS, str(there[1])])  # the machine's own port is none of its
        assert "ConnectionRefusedError" in unknown.stderr
        await box.end()
        assert [task for task in asyncio.all_tasks() if task.get_name() == "forwarding of a container"] == []
        with pytest.raises(ContainerEnded):
            await box.forward(*there)


async def test_files_are_copied_in_and_out(containers, tmp_path):
    (tmp_path / "repo/inner").mkdir(parents=True)
    (tmp_path / "repo/run.sh").write_text("echo ran")
    (tmp_path / "repo/run.sh").chmod(0o755)
    (tmp_path / "repo/inner/link").symlink_to("../run.sh")
    box = await containers.start(limits=QUICK)
    await box.upload(tmp_path / "repo", "/deep/er/repo")
    await box.upload(b"bytes \0\xff", "/deep/data")
    assert (await box.run("./run.sh; readlink inner/link", cwd="/deep/er/repo")).stdout == "ran\n../run.sh\n"
    await box.run("echo changed > inner/new; mkfifo inner/pipe", cwd="/deep/er/repo")
    await box.download("/deep/er/repo", tmp_path / "back")
    await box.download("/deep/data", tmp_path / "out/data")
    assert {path.name for path in (tmp_path / "back").rglob("*")} == {"run.sh", "inner", "link", "new"}
    assert (tmp_path / "back/inner/new").read_text() == "changed\n"
    assert (tmp_path / "back/run.sh").stat().st_mode & 0o111
    assert (tmp_path / "out/data").read_bytes() == b"bytes \0\xff"
    with pytest.raises(FileNotFoundError, match="/deep/none"):
        await box.download("/deep/none", tmp_path / "none")
    with pytest.raises(ContainersError, match="absolute"):
        await box.upload(b"", "../outside")


async def test_a_download_that_leads_out_is_refused(containers, tmp_path):
    box = await containers.start(limits=QUICK)
    await box.run("mkdir /tmp/d; ln -s /etc/passwd /tmp/d/link")
    with pytest.raises(ContainersError, match="link"):
        await box.download("/tmp/d", tmp_path / "back")
    assert not (tmp_path / "back").exists()


async def test_a_snapshot_starts_containers_with_the_same_files(containers):
    box = await containers.start(workdir="/repo", env={"A": "1"}, limits=QUICK)
    await box.run("mkdir -p old/under kept; echo 1 > old/under/file; echo 1 > kept/file; echo 1 > gone")
    first = await box.snapshot()
    after = await containers.start(first, limits=QUICK)
    await after.run("rm -r old gone; mkdir old; echo 2 > old/new; echo 2 > kept/file; ln -s kept link")
    second = await after.snapshot()
    again, last = await containers.start(first, limits=QUICK), await containers.start(second, limits=QUICK)
    listing = "find . | sort | tr '\\n' ' '; cat kept/file; echo $A"
    assert (await again.run(listing)).stdout == ". ./gone ./kept ./kept/file ./old ./old/under ./old/under/file 1\n1\n"
    assert (await last.run(listing)).stdout == ". ./kept ./kept/file ./link ./old ./old/new 2\n1\n"


@pytest.mark.parametrize(
    ("outcome", "command"),
    [
        ("timeout", "sleep 1000 & trap '' TERM INT; sleep 1000"),
        ("output", "yes"),
        ("output", "yes >&2"),
        ("killed", "kill -9 $$"),
    ],
)
async def test_a_command_that_exceeds_a_limit_ends_and_its_container_lives_on(containers, outcome, command):
    box = await containers.start(limits=QUICK)
    count = "cat /proc/*/comm | grep -c -e sleep -e yes"
    before = (await box.run(f"echo kept > /tmp/file; {count}")).stdout  # a daemon's container waits by a sleep of ours
    result = await box.run(command, seconds=0.3 if outcome == "timeout" else 10)
    assert result.outcome == outcome
    assert len(result.stdout) + len(result.stderr) <= QUICK.output_bytes
    assert (await box.run("cat /tmp/file")).stdout == "kept\n"
    assert (await box.run(count)).stdout == before


async def test_what_a_command_leaves_in_the_background_goes_on(containers):
    box = await containers.start(limits=QUICK)
    assert (await box.run("(sleep 0.2; echo late > /tmp/late) > /dev/null 2>&1 & echo now")).stdout == "now\n"
    assert (await box.run("while [ ! -e /tmp/late ]; do sleep 0.05; done; cat /tmp/late")).stdout == "late\n"


async def test_commands_run_at_once_and_one_that_is_cancelled_is_killed(containers):
    box = await containers.start(limits=QUICK)
    long = asyncio.create_task(box.run("echo > /tmp/begun; sleep 1234; echo > /tmp/late"))
    assert (await box.run("while [ ! -e /tmp/begun ]; do sleep 0.02; done; echo both")).stdout == "both\n"
    long.cancel()
    with pytest.raises(asyncio.CancelledError):
        await long
    line = (
        "for n in $(seq 200); do grep -qs ^sleep.1234 /proc/[0-9]*/comm /proc/[0-9]*/cmdline || break; sleep 0.05; done"
    )
    assert (await box.run(f"{line}; test -e /tmp/late; echo $?")).stdout == "1\n"


async def test_memory_is_bounded_in_one_process_and_in_many(tmp_path):
    async with namespaces(tmp_path) as provider:
        box = await provider.start(limits=replace(QUICK, memory_bytes=100 << 20))
        assert (await box.run(["python3", "-c", "b'x' * (1 << 30)"])).outcome == "memory"
        part = "python3 -c 'import time; x = b\"x\" * (40 << 20); time.sleep(9)'"
        assert (await box.run(f"{part} & {part} & {part} & wait")).outcome == "memory"
        assert (await box.run("echo alive")).stdout == "alive\n"


async def test_a_container_that_writes_too_much_is_ended_with_the_cause(containers):
    box = await containers.start(limits=QUICK)
    assert (await box.run("dd if=/dev/zero of=/tmp/big bs=1M count=30 2>/dev/null; sleep 5")).outcome == "disk"
    with pytest.raises(ContainerEnded, match="disk"):
        await box.run("true")


async def test_a_fork_bomb_and_its_memory_are_bounded(containers):
    box = await containers.start(limits=replace(QUICK, processes=40))
    bomb = await box.run("bomb() { bomb | bomb & }; bomb; sleep 1", seconds=3)
    assert bomb.outcome in ("ok", "error", "timeout", "memory", "output")
    with contextlib.suppress(ContainerEnded):  # where its processes could not be ended one by one
        assert (await box.run("true", seconds=5)).outcome in ("ok", "error", "timeout")
    await box.end()


async def test_an_ended_container_says_so_and_ending_it_again_is_harmless(containers):
    box = await containers.start(limits=QUICK)
    await box.end()
    await box.end()
    with pytest.raises(ContainerEnded, match="ended"):
        await box.run("true")


async def test_an_image_that_does_not_exist_is_one_line(containers):
    with pytest.raises(ContainersError, match="nowhere:1") as refusal:
        await containers.start("nowhere:1")
    assert "\n" not in str(refusal.value)


async def test_of_this_machine_nothing_is_seen_but_programs(tmp_path):
    async with namespaces(tmp_path) as provider:
        box = await provider.start(limits=QUICK)
        secret = Path(tmp_path / "secret")
        secret.write_text("x")
        assert (await box.run(f"cat {secret} /etc/shadow; touch /usr/x; ls /home")).stdout == ""
        assert (await box.run("ls /proc | grep -c '^[0-9]'")).stdout in ("4\n", "5\n")
        refused = await box.run("for c in 'mount -t tmpfs x /tmp' 'unshare -U true' 'chroot /'; do $c && echo $c; done")
        assert refused.stdout == ""


async def test_the_label_of_docker_containers_has_what_is_gone_removed(tmp_path):
    async with namespaces(tmp_path / "probe"):
        pass
    async with Daemon(tmp_path).serve() as daemon:
        other = {"Labels": {reaper.LABEL: "another-machine/1/1"}}
        gone = {"Labels": {reaper.LABEL: f"{socket.gethostname()}/1/123"}}
        daemon.containers.update(other=(other, None), gone=(gone, None), foreign=({"Labels": {}}, None))
        daemon.images["kept-by-gone"] = (None, gone["Labels"])
        script = (
            "import asyncio, sys\nfrom rlinf.sandbox.containers.docker import Docker\n"
            "async def main():\n box = await Docker(sys.argv[1]).start('base')\n"
            " print(box.name, flush=True)\n await asyncio.sleep(1000)\nasyncio.run(main())"
        )
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", script, daemon.socket, stdout=-1)
        name = (await process.stdout.readline()).decode().strip()
        assert {*daemon.containers} == {"other", "foreign", name}
        assert {*daemon.images} == {"base"}
        removed = asyncio.Event()
        daemon.removed = removed
        process.kill()
        async with asyncio.timeout(30):
            await removed.wait()  # by the watcher, which outlives what it watches
        assert {*daemon.containers} == {"other", "foreign"}


async def test_what_docker_is_asked_for(tmp_path):
    async with namespaces(tmp_path / "probe"):
        pass
    async with Daemon(tmp_path).serve() as daemon, Docker(daemon.socket) as provider:
        box = await provider.start("base", workdir="/repo", env={"A": "1"}, limits=QUICK, network=True)
        body = daemon.bodies[box.name]
        assert (body["Env"], body["WorkingDir"]) == (["A=1"], "/repo")
        host = body["HostConfig"]
        assert (host["Memory"], host["PidsLimit"], host["NetworkMode"]) == (256 << 20, 256, "bridge")


async def test_no_daemon_and_no_server_are_one_line_each(tmp_path):
    for provider, named in (
        (Docker(tmp_path / "none.sock"), "none.sock"),
        (Remote("http://127.0.0.1:9", TOKEN), "127.0.0.1:9"),
    ):
        with pytest.raises(ContainersError, match=named) as refusal:
            await provider.start()
        assert "\n" not in str(refusal.value)
        await provider.close()


def test_a_remote_provider_takes_its_address_and_token_from_variables(monkeypatch):
    for name in ("RLINF_CONTAINERS_URL", "RLINF_CONTAINERS_TOKEN"):
        monkeypatch.delenv(name, raising=False)
        with pytest.raises(ContainersError, match=name):
            Remote()
        monkeypatch.setenv(name, "http://there")
    Remote()


def test_the_server_is_not_started_without_a_token():
    env = {**os.environ, "RLINF_CONTAINERS_TOKEN": "short"}
    command = [sys.executable, "-m", "rlinf.sandbox.containers.remote"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: RLINF_CONTAINERS_TOKEN")
    assert done.stderr.count("\n") == 1


async def test_a_server_of_containers_asks_for_its_token_bounds_them_and_ends_those_of_clients_that_are_gone(tmp_path):
    async with namespaces(tmp_path) as provider, serving(provider, most=1) as url:
        with pytest.raises(ContainersError, match="token"):
            await Remote(url, "another token").start()
        async with Remote(url, TOKEN) as client:
            await client.start(limits=QUICK)
            with pytest.raises(ContainersError, match="--most"):
                await client.start(limits=QUICK)
    async with namespaces(tmp_path) as provider, serving(provider) as url:
        script = (
            "import asyncio, sys\nfrom rlinf.sandbox.containers.remote import Remote\n"
            "async def main():\n box = await Remote(*sys.argv[1:]).start()\n"
            " print(box.name, flush=True)\n await box.run('sleep 1000', seconds=1000)\nasyncio.run(main())"
        )
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", script, url, TOKEN, stdout=-1)
        name = (await process.stdout.readline()).decode().strip()
        assert [box.name for box in provider.boxes] == [name]
        process.kill()
        async with asyncio.timeout(60):
            while provider.boxes:
                await asyncio.sleep(0.01)
