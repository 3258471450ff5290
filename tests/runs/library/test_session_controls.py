"""A session that is watched: its controls act when a step is over, and a session that is stopped ends in order."""

from __future__ import annotations

import asyncio
import json

import pytest

from rlinf.runs.library.session import SessionStopped
from tests.launching import metrics_of
from tests.runs.library.small import playing, small


async def connected(directory):
    """The feed of the session that lives there: how to ask it, and how to wait for its answer."""
    about = json.loads((directory / "run" / "live.json").read_text())
    reader, writer = await asyncio.open_unix_connection(about["socket"])

    async def answer(what):
        while heard := json.loads(await asyncio.wait_for(reader.readline(), 60)):
            if heard["kind"] == "did" and heard["id"] == what:
                return heard["said"], heard["ok"]

    async def asked(*whats):
        for what in whats:
            writer.write(json.dumps({"do": what, "id": what}).encode() + b"\n")
        while heard := json.loads(await asyncio.wait_for(reader.readline(), 60)):
            if heard["kind"] == "status" and set(whats) <= set(heard["asked"]):
                return

    return asked, answer, writer


def test_a_session_does_between_its_steps_what_it_is_asked_to(tmp_path):
    async def program():
        async with small(tmp_path) as s:
            asked, answer, writer = await connected(tmp_path)
            await asked("pause", "checkpoint")
            training = asyncio.ensure_future(s.train(s.gather([1, 2], playing(s))))
            assert await answer("pause") == ("paused after step 1", True)
            assert not training.done()
            assert await answer("checkpoint") == ("saved after step 1: checkpoints/step_000001", True)
            writer.write(b'{"do": "go_on", "id": "go_on"}\n')
            assert await answer("go_on") == ("goes on after step 1", True)
            writer.close()
            await training
            await s.train(s.gather([3, 4], playing(s)))

    asyncio.run(program())
    assert len(metrics_of(tmp_path / "run")) == 2


def test_a_session_that_is_stopped_takes_no_further_step_and_its_program_goes_on(tmp_path):
    async def program():
        taken = 0
        async with small(tmp_path) as s:
            asked, _, writer = await connected(tmp_path)
            for _ in range(9):
                if taken == 1:
                    await asked("stop")
                await s.train(s.gather([1, 2], playing(s)))
                taken += 1
                if taken == 2:
                    assert s.stopped == "asked to on its live page"
                    assert s.step == 2
                    with pytest.raises(SessionStopped, match=r"told.*after.*2"):
                        s.train([])
            pytest.fail("it took every step")
        writer.close()
        return taken

    assert asyncio.run(program()) == 2
    assert len(metrics_of(tmp_path / "run")) == 2
    assert (tmp_path / "run" / "checkpoints" / "latest").resolve().name == "step_000002"
