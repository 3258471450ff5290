"""The server of the page as a child of the run: its address is told once, and it may die without harm."""

from __future__ import annotations

import asyncio
import os
import sys
import threading

from rlinf.runs.live.feed import LOG, MOST_RESTARTS, Page, command


class Said(asyncio.Queue):
    """The lines that people are told."""

    def __init__(self):
        super().__init__()
        self.say = self.put_nowait

    async def next(self):
        return await asyncio.wait_for(self.get(), 60)


def program(text):
    return [sys.executable, "-c", text]


async def test_the_address_is_told_and_the_server_is_none_of_the_jobs_processes(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    told = tmp_path / "told"
    text = f"import os; open({str(told)!r}, 'w').write(repr(sorted(os.environ)) + str(os.getsid(0) == os.getpid()));"
    said = Said()
    page = Page(tmp_path, said.say, program(text + "print('see http://127.0.0.1:1/?token=x', flush=True)"))
    page.start()
    assert await said.next() == "live page: http://127.0.0.1:1/?token=x"
    page.leave()
    written = told.read_text()
    assert "'RANK'" not in written
    assert "TORCHELASTIC" not in written
    assert "PYTHONPATH" in written
    assert written.endswith("True"), "a session of its own: Ctrl-C is for the run"


async def test_a_server_that_dies_is_started_again_but_not_for_ever(tmp_path):
    said = Said()
    Page(tmp_path, said.say, program("import sys; sys.stderr.write('no\\n'); sys.exit(3)")).start()
    lines = [await said.next() for _ in range(MOST_RESTARTS + 1)]
    assert all(f"ended with 3; {tmp_path / LOG}" in line for line in lines)
    assert (tmp_path / LOG).read_text() == "no\n" * (MOST_RESTARTS + 1)


async def test_a_mistake_in_what_it_was_asked_is_told_once(tmp_path):
    said = Said()
    Page(tmp_path, said.say, program("import sys; sys.exit(2)")).start()
    assert "ended with 2" in await said.next()
    for thread in [each for each in threading.enumerate() if each.name == "live page's server"]:
        await asyncio.to_thread(thread.join, 30)  # then no second one can come
    await asyncio.sleep(0)
    assert said.empty()


async def test_a_server_that_cannot_be_started_is_told(tmp_path):
    said = Said()
    Page(tmp_path, said.say, [str(tmp_path / "nothing")]).start()
    assert "warning: the live page cannot be served: " in await said.next()


def test_the_server_is_ours(tmp_path):
    assert command(tmp_path) == [
        sys.executable, "-m", "rlinf", "watch", str(tmp_path), "--port", "0", "--until-ended"
    ]  # fmt: skip
    assert os.path.isabs(sys.executable)
