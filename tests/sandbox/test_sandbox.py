"""What becomes of programs, and of their processes when nobody waits for them any more."""

import asyncio
import os
import signal
import subprocess
import sys
import time
import venv
from pathlib import Path

import pytest
import uvloop

from rlinf.sandbox import sandbox as module
from rlinf.sandbox.inside import confine
from rlinf.sandbox.limits import Limits, Result, SandboxError
from rlinf.sandbox.sandbox import Sandbox, run_python, shared

OWN = "sorted(name for name in os.listdir('.') if os.lstat(name).st_dev == os.stat('.').st_dev)"
"""What a program's directory holds of its own: an environment of this test that lies below /tmp is shown in it, too."""
FOR_EVER = "import os, time\nfor _ in range(2): os.fork()\nos.setsid() if os.getpid() != 2 else 0\ntime.sleep(1e6)"


def children(pid):
    found = []
    try:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            for child in (thread / "children").read_text().split():
                found += [int(child), *children(child)]
    except OSError:
        pass  # gone meanwhile
    return found


async def until(condition, seconds=60.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come about"
        await asyncio.sleep(0.01)


def server_of(sandbox):
    return sandbox._starting.result().process.pid


@pytest.fixture
async def sandbox():
    async with Sandbox(Limits(wall_seconds=30), at_once=2) as made:
        try:
            await made.isolation()
        except SandboxError as error:
            pytest.skip(str(error))
        yield made


async def test_a_program_runs_as_a_script_does(sandbox):
    code = f"""
import sys, os, atexit, threading
atexit.register(lambda: print("last"))
threading.Thread(target=lambda: print("thread")).start()
assert __name__ == "__main__" and sys.argv[1:] == ["-v"]
print(sys.stdin.read().upper(), open("data/in.txt").read(), {OWN}, os.getuid())
print("é", file=sys.stderr)
sys.exit(7)
"""
    found = await sandbox.run_python(code, stdin="abc", files={"data/in.txt": "é"}, args=["-v"])
    assert (found.outcome, found.exit_code, found.stderr) == ("error", 7, "é\n")
    assert sorted(found.stdout.splitlines()) == ["ABC é ['data', 'main.py'] 1000", "last", "thread"]
    assert 0 < found.seconds < 30


async def test_a_traceback_shows_the_program_alone(sandbox):
    found = await sandbox.run_python("def f():\n    return 1 / 0\nf()")
    assert found.stderr == (
        'Traceback (most recent call last):\n  File "/tmp/main.py", line 3, in <module>\n    f()\n'
        '  File "/tmp/main.py", line 2, in f\n    return 1 / 0\n           ~~^~~\nZeroDivisionError: division by zero\n'
    )
    assert "SyntaxError" in (await sandbox.run_python("def")).stderr


@pytest.mark.parametrize(
    ("code", "outcome", "status"),
    [
        ("", "ok", 0),
        ("raise SystemExit", "ok", 0),
        ("raise SystemExit('no')", "error", 1),
        ("exit(4)", "error", 4),
        ("quit()", "ok", 0),
        ("import os; os._exit(3)", "error", 3),
        ("import os; os.abort()", "killed", -6),
        ("x = bytearray(1 << 40)", "memory", 1),
        ("import sys; sys.stdout.close(); import os; os.close(1); os.close(2)", "ok", 0),
        ("import subprocess; print(subprocess.run(['/bin/echo', 'x'], check=True))", "ok", 0),
        ("import multiprocessing as m\nwith m.Pool(2) as p: assert p.map(abs, [-1, -2]) == [1, 2]", "ok", 0),
        ("import numpy; assert numpy.ones(3).sum() == 3", "ok", 0),
        ("import asyncio; asyncio.run(asyncio.sleep(0.01))", "ok", 0),
        ("import rlinf.sandbox.inside", "error", 1),
        ("print('\\ud800')", "ok", 0),
    ],
)
async def test_the_outcome_says_how_it_ended(sandbox, code, outcome, status):
    found = await sandbox.run_python(code)
    assert (found.outcome, found.exit_code) == (outcome, status), found


async def test_nothing_stays_from_one_program_to_the_next(sandbox):
    leave = "import os, builtins, json\nopen('left', 'w').write('x')\nbuiltins.print = None\njson.loads = None\n"
    assert (await sandbox.run_python(leave)).ok
    look = f"import os, json\nprint({OWN}, json.loads('1'))"
    assert (await sandbox.run_python(look)).stdout == "['main.py'] 1\n"


async def test_equal_programs_print_the_same(sandbox):
    code = "print({*'abcdefgh'}, hash('x'))"
    assert (await sandbox.run_python(code)).stdout == (await sandbox.run_python(code)).stdout


async def test_what_was_printed_before_a_limit_is_kept(sandbox):
    endless = "import time\nprint('x', flush=True)\ntime.sleep(1e6)"
    found = await sandbox.run_python(endless, limits=Limits(wall_seconds=3))  # time enough to print, on any machine
    assert (found.outcome, found.stdout, found.exit_code) == ("timeout", "x\n", None)
    found = await sandbox.run_python("while True: print('x' * 99)", limits=Limits(output_bytes=1000))
    assert (found.outcome, len(found.stdout)) == ("output", 1000)


async def test_many_calls_run_a_few_at_once(sandbox):
    most = 0

    async def one(number):
        nonlocal most
        found = await sandbox.run_python("print(input())", stdin=str(number))
        most = max(most, len(children(server_of(sandbox))) / 3)  # holder, first process, program; besides a supervisor
        return found.stdout

    count = 60
    assert await asyncio.gather(*map(one, range(count))) == [f"{number}\n" for number in range(count)]
    assert most <= 3  # two, and one that is ending


async def test_cancelling_a_run_kills_all_its_processes(sandbox):
    await sandbox.run_python("")
    task = asyncio.create_task(sandbox.run_python(FOR_EVER))
    await until(lambda: len(children(server_of(sandbox))) >= 6)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: not children(server_of(sandbox)))
    assert (await sandbox.run_python("print(1)")).stdout == "1\n"


async def test_what_moved_to_a_session_of_its_own_ends_with_the_program(sandbox):
    daemon = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        time.sleep(1e6)\n"
    assert (await sandbox.run_python(daemon + "    os._exit(0)\nprint('done')")).stdout == "done\n"
    await until(lambda: not children(server_of(sandbox)))


@pytest.mark.parametrize("which", ["supervisor", "server"])
async def test_the_loss_of_a_process_of_ours_is_told_and_leaves_nothing(sandbox, which):
    await sandbox.run_python("")
    server = server_of(sandbox)
    task = asyncio.create_task(
        sandbox.run_python(FOR_EVER, limits=Limits(wall_seconds=60 if which == "supervisor" else 5))
    )
    await until(lambda: len(children(server)) >= 6)
    tree = children(server)
    os.kill(tree[0] if which == "supervisor" else server, signal.SIGKILL)
    if which == "supervisor":
        with pytest.raises(SandboxError, match=r"supervisor.*sandboxed"):
            await task
    else:
        assert (await task).outcome == "timeout"  # the supervisor does without the server
    await until(lambda: not any(Path(f"/proc/{pid}/task").exists() and children(pid) for pid in tree))
    assert (await sandbox.run_python("print(1)")).stdout == "1\n"


async def test_programs_end_with_their_owner_even_if_it_is_killed():
    code = f"""
import asyncio, sys
from rlinf.sandbox.sandbox import Sandbox
async def main():
    sandbox = Sandbox()
    await sandbox.isolation()
    print(sandbox._starting.result().process.pid, flush=True)
    await sandbox.run_python({FOR_EVER!r})
asyncio.run(main())
"""
    owner = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=subprocess.PIPE)
    try:
        line = await owner.stdout.readline()
        if not line:
            pytest.skip("no sandbox here")
        server = int(line)
        await until(lambda: len(children(server)) >= 6)
        tree = [server, *children(server)]
    finally:
        owner.kill()
    await owner.wait()
    await until(lambda: not any(Path(f"/proc/{pid}/exe").is_symlink() and _runs(pid) for pid in tree))


def _runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def test_the_loop_goes_on_while_programs_run(sandbox):
    await sandbox.run_python("")
    running = [asyncio.create_task(sandbox.run_python("import time; time.sleep(1e6)")) for _ in range(2)]
    others = asyncio.gather(*(sandbox.run_python("sum(range(10 ** 6))") for _ in range(8)))
    await until(lambda: len(children(server_of(sandbox))) >= 4)  # a program and its supervisor, each
    for task in running:  # they end because the loop says so, and not at their limit
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert all(result.ok for result in await others)


async def test_a_refusal_says_what_to_do_and_weak_must_be_asked_for(monkeypatch):
    def refused(weak, preload, reason, spawn=module._spawn):
        if not weak:
            raise SandboxError("unshare: Operation not permitted.")
        return spawn(weak, preload, reason)

    monkeypatch.setattr(module, "_spawn", refused)
    with pytest.raises(SandboxError, match=r"Operation.*permitted"):
        await Sandbox().run_python("")
    async with Sandbox(allow_weak=True) as weak:
        if os.geteuid() == 0 and not all(map(module._others_may_enter, (sys.base_prefix, sys.prefix))):
            with pytest.raises(SandboxError, match=r"start.*ordinary"):
                await weak.isolation()
            return
        told = await weak.isolation()
        assert (told.level, told.reason) == ("weak", "unshare: Operation not permitted.")
        await _works_without_namespaces(weak)


async def _works_without_namespaces(weak):
    assert (await weak.run_python("print(input())", stdin="x")).stdout == "x\n"
    assert "PermissionError" in (await weak.run_python("import socket; socket.socket()")).stderr
    found = await weak.run_python(FOR_EVER, limits=Limits(wall_seconds=0.5))
    assert found.outcome == "timeout"
    await until(lambda: not children(server_of(weak)))


@pytest.mark.parametrize("name", ["/etc/x", "../x", "a/../../x", "", "a\0b"])
async def test_files_lie_in_the_directory(sandbox, name):
    with pytest.raises(ValueError, match="relative path"):
        await sandbox.run_python("", files={name: "x"})


@pytest.mark.parametrize("name", ["cpu_seconds", "memory_bytes", "processes"])
def test_limits_are_above_zero(name):
    with pytest.raises(ValueError, match=name):
        Limits(**{name: 0})


async def test_tools_of_one_loop_share_a_sandbox(sandbox):
    assert shared() is shared()
    assert isinstance(await run_python("print(1)"), Result)
    await shared().close()


def test_loops_one_after_the_other_leave_no_servers(sandbox):
    def used(run):
        async def use():
            assert (await run_python("print(1)")).stdout == "1\n"
            return shared()._starting.result().process

        return run(use())

    first, second = used(asyncio.run), used(uvloop.run)
    assert first.poll() is not None
    assert second.poll() is None


def test_packages_below_a_temporary_directory_of_a_pth_file_and_of_the_user_are_shown(sandbox, tmp_path):
    """And read only: `tmp_path` lies below /tmp, of which a program otherwise has its own."""
    venv.create(tmp_path / "env", with_pip=False)
    own = next((tmp_path / "env" / "lib").glob("python*/site-packages"))
    user = tmp_path / "user" / own.relative_to(tmp_path / "env")
    for number, place in enumerate((own, tmp_path / "other" / "site-packages", user)):
        place.mkdir(parents=True, exist_ok=True)
        (place / f"pack{number}.py").write_text(f"value = {number}")
    (own / "more.pth").write_text(str(tmp_path / "other" / "site-packages"))
    (tmp_path / "env" / "pyvenv.cfg").write_text(
        (tmp_path / "env" / "pyvenv.cfg").read_text().replace("packages = false", "packages = true")
    )
    program = f"""
import os, pack0, pack1, pack2
def refused(call, *args):
    try:
        call(*args)
    except OSError as error:
        return True
first = {tmp_path.parts[2]!r}
print(pack0.value, pack1.value, pack2.value, refused(os.rename, first, "x"), refused(os.mkdir, first + "/x"),
    refused(os.mkdir, {str(own / "x")!r}), sorted(os.listdir(".")) == sorted([first, "main.py"]))
"""
    script = (
        f"import asyncio; from rlinf.sandbox.sandbox import run_python; print(asyncio.run(run_python({program!r})))"
    )
    found = subprocess.run(
        [tmp_path / "env" / "bin" / "python", "-c", script],
        env={
            **os.environ,
            "PYTHONPATH": str(Path(module.__file__).parents[2]),
            "PYTHONUSERBASE": str(tmp_path / "user"),
        },
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "0 1 2 True True True True" in found.stdout, found.stdout + found.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="the other tests run as an ordinary user already")
def test_it_works_as_an_ordinary_user(tmp_path):
    """As `nobody`, on whom the interpreter is shown in the place where it was installed."""
    script = tmp_path / "as_nobody.sh"
    top = Path(sys.base_prefix).parents[-2]
    script.write_text(
        f"""set -e
mount --make-rprivate /
mkdir -p /mnt && mount -t tmpfs none /mnt && mkdir /mnt/base /mnt/venv /mnt/rlinf
mount --bind {sys.base_prefix} /mnt/base; mount --bind {sys.prefix} /mnt/venv
mount --bind {Path(module.__file__).parents[1]} /mnt/rlinf
if [ {top} != /usr ]; then mount -t tmpfs -o mode=755 none {top}; mkdir -p {sys.base_prefix}
  mount --bind /mnt/base {sys.base_prefix}; fi
export PYTHONPATH=/mnt HOME=/
exec setpriv --reuid 65534 --regid 65534 --clear-groups {sys.base_prefix}/bin/python3 - <<'PY'
import asyncio, os
from rlinf.sandbox import sandbox as module
from rlinf.sandbox.sandbox import Sandbox
from rlinf.sandbox.limits import Limits, SandboxError
async def main():
    assert os.getuid() == 65534
    try:
        async with Sandbox() as s:
            print((await s.isolation()).level)
            print((await s.run_python("import os; print(os.getuid(), os.listdir())")).stdout)
            bomb = await s.run_python("import os\\nwhile True:\\n  try: os.fork()\\n  except OSError: pass",
                limits=Limits(wall_seconds=0.5))
            print(bomb.outcome)
    except SandboxError as error:
        print("refused", error)
    module._spawn = lambda weak, preload, reason, spawn=module._spawn: spawn(True, preload, reason)
    async with Sandbox(allow_weak=True) as s:
        print((await s.isolation()).level)
        print((await s.run_python("import os; print(os.getuid() == 65534, os.listdir())")).stdout)
        print((await s.run_python("import socket; socket.socket()")).exit_code)
        reached = []
        kill = "os.kill(%d, 0)" % os.getpid()
        for attempt in ("open('/etc/passwd')", "open('/proc/self/environ')", "os.listdir('/')", kill):
            reached.append((await s.run_python("import os; " + attempt)).exit_code)
        print(*reached)
        print((await s.run_python("import os; os.mkdir('a'); open('a/b', 'w'); os.kill(os.getpid(), 0)")).exit_code)
        short = Limits(wall_seconds=0.5)
        print((await s.run_python("import time, os; os.fork(); time.sleep(99)", limits=short)).outcome)
asyncio.run(main())
PY
"""
    )
    found = subprocess.run(
        ["unshare", "--mount", "sh", str(script)], capture_output=True, text=True, timeout=60, cwd="/"
    )
    assert found.returncode == 0, found.stderr
    words = found.stdout.split()
    if words[0] != "refused":
        assert words[:5] == ["namespaces", "1000", "['main.py']", "timeout", "weak"]
    walls = ["1", "1", "1", "1"] if confine.version() >= 6 else words[-6:-2]  # nothing to be had from older kernels
    assert words[-10:] == ["weak", "True", "['main.py']", "1", *walls, "0", "timeout"]
