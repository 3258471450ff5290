"""A session that serves and learns from feedback at the same time, and goes on after it was closed."""

from __future__ import annotations

import asyncio

import pytest

from rlinf.runtime.base.errors import UserError
from tests.launching import metrics_of
from tests.runs.library.small import sevens, small

ONLINE = {"algorithm": {"name": "reinforce_pp", "kl": None}, "log_every": 1000}


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 100))


async def answered(service, count):
    return await asyncio.gather(*(service.complete("1?") for _ in range(count)))


def test_feedback_is_learned_from_while_others_are_served(tmp_path):
    async def served():
        async with small(tmp_path, **ONLINE) as s, s.online(batch=8) as service:
            first = await answered(service, 9)
            for answer in first[:8]:
                assert service.feedback(answer.id, sevens(answer.text) + (answer is first[0]))
            while not s.step:
                (during,) = await answered(service, 1)
            assert not service.feedback(first[0].id, 1.0)
            (after,) = await answered(service, 1)
            return first, during, after, service.waiting, service.counts

    first, during, after, waiting, counts = run(served())
    assert {int(version) for answer in first for version in answer.versions} == {0}
    assert after.versions.min() >= 1  # the weights were published in mid-service
    assert len({answer.id for answer in (*first, during, after)}) == 11
    assert waiting == counts.served - 8
    assert (counts.trained, counts.unknown) == (8, 1)
    (line,) = metrics_of(tmp_path / "run")
    assert (line["online/told"], line["groups"]) == (8, 8)


def test_what_waits_is_there_when_the_session_goes_on(tmp_path):
    async def first():
        async with small(tmp_path, **ONLINE) as s, s.online(batch=4) as service:
            answers = await answered(service, 6)
            for answer in answers[:3]:
                service.feedback(answer.id, 1.0)
            return [answer.id for answer in answers]

    async def second(names):
        async with small(tmp_path, resume="auto", **ONLINE) as s, s.online(batch=4) as service:
            assert service.waiting == 3
            assert not service.feedback(names[0], 1.0)
            assert service.feedback(names[5], 0.0)  # the fourth
            while not s.step:
                await answered(service, 1)
            return s.step, service.counts.trained

    assert run(second(run(first()))) == (1, 4)


def test_what_cannot_be_is_said(tmp_path):
    async def tried():
        async with small(tmp_path) as s:  # grpo
            with pytest.raises(UserError, match=r"compares.*question"):
                async with s.online():
                    pass
            with pytest.raises(ValueError, match="batch=0"):
                s.online(batch=0)
            closed = s.online()
            with pytest.raises(UserError, match="not open"):
                closed.feedback("a", 1.0)

    run(tried())


def test_a_failure_of_learning_is_raised_where_it_serves(tmp_path):
    async def served():
        async with small(tmp_path, **ONLINE) as s, s.online(batch=1) as service:

            async def broken(*_, **__):
                raise UserError("the trainer is out of order")

            s.train = broken
            (answer,) = await answered(service, 1)
            service.feedback(answer.id, 1.0)
            await asyncio.wait([service._learner])
            with pytest.raises(UserError, match=r"out.*order"):
                await service.complete("1?")
            raise KeyError("of the program's own")

    with pytest.raises(KeyError):  # not hidden by the learner's
        run(served())


def test_closing_completes_the_step_that_is_under_way_and_a_cancelled_program_ends(tmp_path):
    async def served(cancelled):
        async with small(tmp_path / str(cancelled), **ONLINE) as s:
            async with s.online(batch=4) as service:
                for answer in await answered(service, 4):
                    service.feedback(answer.id, sevens(answer.text))
                while not service._training:
                    await asyncio.sleep(0)
                if cancelled:
                    asyncio.current_task().cancel()
                    await asyncio.sleep(10)
            return s.step

    assert run(served(False)) == 1
    with pytest.raises(asyncio.CancelledError):
        run(served(True))
