"""Engines that join a job's own one: right answers from whoever is there, whoever comes, leaves or is killed."""

import asyncio
import contextlib
import random
from dataclasses import replace

import pytest

from rlinf.data import differences
from rlinf.data.sample import ImageRef
from rlinf.data.tokenizer import LateTokenizer
from rlinf.data.weights import Weights
from rlinf.engines.base import Sampling, StopTexts
from rlinf.engines.pool.pool import Call, Pool
from rlinf.joining.connection import Refused, connect
from rlinf.runtime.base.errors import UserError
from tests.engines import test_engine_contract as contract
from tests.engines.pooled import TOKEN
from tests.engines.test_engine_contract import begun, rest, right, started
from tests.engines.transformers.test_engine import answers, packed, ragged, request, tiny

__all__ = ["started"]

for each in (
    "a_seed_gives_the_same_answer_in_any_company",
    "requests_may_still_be_coming_and_calls_may_overlap",
    "what_cannot_be_answered_is_refused_by_its_number",
    "aborted_answers_keep_their_tokens",
    "paused_nothing_moves_and_nothing_is_lost",
    "who_leaves_takes_its_requests_along",
    "single_answers_are_those_of_a_batch_and_share_it",
    "a_caller_who_leaves_gives_its_row_back_and_the_others_get_their_answers",
    "single_answers_are_aborted_with_their_tokens_and_paused_without_loss",
):
    globals()[f"test_{each}"] = getattr(contract, f"test_{each}")


@pytest.fixture(params=["build", "joined"])
def kind(request):
    return f"tests.engines.pooled.{request.param}"


@pytest.fixture
async def pool(started):
    """A job's engine that one other has joined."""
    return await started("tests.engines.pooled.build", max_rows=4)


async def gone(pool, count=0):
    """Wait until so many are left of those that joined."""
    while len(pool.members) > count:
        await pool._changed.wait()


async def test_one_that_cannot_be_made_is_no_member_and_says_why(pool):
    with pytest.raises(TypeError, match="wings"):
        await pool.joins(wings=2)
    assert len(pool.members) == 1


async def test_both_answer_and_each_as_far_as_it_has_rows(pool):
    (member,) = pool.members
    requests = ragged(12, Sampling(9))
    asked, given = [], member.give
    member.give = lambda request, call: (asked.append((request.id, len(member.ids))), given(request, call))
    right(requests, await answers(pool, requests))
    assert 0 < len(asked) < 12
    assert max(under_way for _, under_way in asked) < member.rows
    assert pool.stats.rows > pool.own.stats.rows > 0


async def test_what_a_killed_engine_had_is_answered_by_the_others(pool):
    long = [request(i, [i + 1], Sampling(60)) for i in range(6)]
    running = await begun(pool, *long)
    (member,) = pool.members
    assert member.ids
    pool.sides[0].connection.abandon()  # as the kernel does for a process that was killed
    await gone(pool)
    found = await rest(running)
    right(long, found)
    assert pool.members == set()
    right(more := ragged(5, Sampling(5)), await answers(pool, more))


async def test_who_is_told_to_leave_hands_on_the_tokens_that_it_has(pool, monkeypatch):
    handed, put_back = [], Call.put_back
    monkeypatch.setattr(Call, "put_back", lambda call, one: (handed.append(one), put_back(call, one)))
    long = [request(i, [i + 1], Sampling(90)) for i in range(6)]
    running = await begun(pool, *long)
    pool.sides[0].leave.set()
    assert "told to leave" in await pool.sides[0]
    await gone(pool)
    right(long, await rest(running))
    assert handed
    assert all(one.partial is not None for one in handed)


async def test_an_aborted_call_waits_for_nobody_who_is_gone(pool):
    long = [request(i, [i + 1], Sampling(5000)) for i in range(6)]
    running = await begun(pool, *long)
    pool.sides[0].connection.abandon()
    await pool.abort()
    found = await rest(running)
    assert sorted(found) == list(range(6))
    assert {one.finish for one in found.values()} == {"abort"}


async def test_what_is_taken_out_is_of_either_engine_and_continues_anywhere(pool, started):
    long = [request(i, [3, i], Sampling(60, temperature=1.3)) for i in range(6)]
    running = await begun(pool, *long)
    out = await pool.take_out(range(5))
    other = await started("transformers")
    left, taken = await asyncio.gather(rest(running), answers(other, out))
    right(long, {**left, **taken})
    assert sum(one.partial is not None for one in out) > 1


async def test_a_killed_engine_answers_no_question_and_nobody_waits_for_it(pool):
    long = [request(i, [i + 1], Sampling(5000)) for i in range(6)]
    running = await begun(pool, *long)
    (member,) = pool.members
    asking = [asyncio.create_task(ask(range(6))) for ask in (pool.partial, pool.take_out)]
    pool.sides[0].connection.abandon()
    partial, out = await asyncio.gather(*asking)
    assert sorted(one.id for one in partial) == sorted(one.id for one in out) == list(range(6))
    assert await rest(running) == {}
    assert member not in pool.members


async def test_who_joins_in_the_middle_takes_work_and_has_the_weights(started):
    pool = await started("tests.engines.pooled.alone", max_rows=2)
    await pool.load(packed(tiny(seed=1), 4))
    more = asyncio.Event()

    async def coming(requests):
        yield from_first
        await more.wait()
        for asked in requests:
            yield asked

    from_first, *others = ragged(9, Sampling(7))
    running = asyncio.create_task(answers(pool, coming(others)))
    await pool.joins()
    (member,) = pool.members
    while not member.current:
        await pool._changed.wait()
    given, give = [], member.give
    member.give = lambda request, call: (given.append(request.id), give(request, call))
    more.set()
    found = await running
    right([from_first, *others], found, 1)
    assert given
    assert {version for one in found.values() for version in one.versions.tolist()} == {4}


async def test_without_the_newest_weights_nobody_begins_an_answer(pool):
    (member,) = pool.members
    own = dict(tiny(seed=2).named_parameters())
    await pool.load(Weights.pack(own.items(), 7))
    assert not member.current  # nobody has waited for it
    requests = ragged(8, Sampling(6))
    found = await answers(pool, requests)
    assert {version for one in found.values() for version in one.versions.tolist()} == {7}
    while not member.current:
        await pool._changed.wait()
    assert member.version == 7
    right(requests, await answers(pool, requests), 2)


def nearly(model, version):
    """The weights with a few other numbers."""
    named = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    for tensor in named.values():
        tensor.view(-1)[::50] += 1.0
    return Weights.pack(named.items(), version)


class Link:
    """Bytes of weights that a pool sends to those who joined."""

    def __init__(self, pool, monkeypatch):
        monkeypatch.setattr(differences, "LEAST_BYTES", 0)
        pool.differences, self._pool, self._sent = differences.Differences("pool", self._note), pool, []

    def _note(self, name, *, bytes):
        self._sent.append((name, bytes))  # in turn what was sent, and what all would have been

    async def loads(self, weights):
        """Load them, and return which share of the bytes went to each, once all have them."""
        self._sent.clear()
        await self._pool.load(weights)
        assert not any(member.current for member in self._pool.members)
        while not all(member.current for member in self._pool.members):
            await self._pool._changed.wait()
        sizes = [size for _, size in self._sent]
        return [some / whole for some, whole in zip(sizes[::2], sizes[1::2], strict=True)]


async def test_who_has_the_last_weights_is_sent_what_changed_and_others_the_whole(pool, monkeypatch):
    link = Link(pool, monkeypatch)
    assert await link.loads(nearly(tiny(seed=2), 1)) == [1.0]
    assert max(await link.loads(packed(tiny(seed=2), 2))) < 0.1
    requests = ragged(8, Sampling(6))
    right(requests, found := await answers(pool, requests), 2)
    assert {version for one in found.values() for version in one.versions.tolist()} == {2}
    await pool.joins()
    while not all(member.current for member in pool.members):
        await pool._changed.wait()
    shares = await link.loads(nearly(tiny(seed=2), 3))
    assert len(shares) == 2
    assert max(shares) < 0.1
    await pool.joins()  # is sent it whole
    pool.sides[0].connection.abandon()
    await gone(pool, 2)
    assert len(await link.loads(packed(tiny(seed=2), 4))) == 2
    right(requests, await answers(pool, requests), 2)


async def test_weights_that_were_overtaken_on_their_way_are_no_base_of_a_difference(pool, monkeypatch):
    link = Link(pool, monkeypatch)
    await link.loads(nearly(tiny(seed=2), 1))
    await pool.load(packed(tiny(seed=3), 2))
    await pool.load(nearly(tiny(seed=2), 3))
    await link.loads(packed(tiny(seed=2), 4))
    (member,) = pool.members
    assert member.version == 4
    requests = ragged(8, Sampling(6))
    right(requests, await answers(pool, requests), 2)


async def test_of_a_trainers_own_tensors_others_get_a_copy(pool):
    model = tiny(seed=3)
    parameters = dict(model.named_parameters())
    await pool.load(Weights.lent(parameters.items(), lambda: 5))
    for parameter in parameters.values():
        parameter.data.zero_()
    (member,) = pool.members
    while not member.current:
        await pool._changed.wait()
    requests = ragged(4, Sampling(5))
    asker = Call(lambda: None)
    for asked in requests:
        member.give(asked, asker)
    found = {}
    reading = asker.read()
    while len(found) < len(requests):
        found |= {one.id: one for one in await anext(reading)}
    right(requests, found, 3)


async def test_what_names_pictures_or_is_listened_to_stays_with_the_jobs_own_engine(pool):
    (member,) = pool.members
    member.give = None
    image = ImageRef("cat", "cat.png")
    with pytest.raises(ValueError, match=r"request 0.*images"):
        await answers(pool, [replace(request(0, [1], Sampling(2)), images=(image,))])
    right([asked := request(1, [1], Sampling(4))], {1: await pool.answer(asked, lambda tokens: None)})


async def under_way(member, count):
    """Wait until an engine has so many requests, all with tokens."""
    while len(member.ids) < count or any(one.partial is None for one in await member.partial(member.ids)):
        await asyncio.sleep(0)


@pytest.mark.parametrize("end", ["killed", "told to leave"])
async def test_single_answers_of_who_is_gone_are_given_by_the_others(pool, end):
    (member,) = pool.members
    long = [request(i, [i + 1], Sampling(90)) for i in range(6)]
    tasks = [asyncio.create_task(pool.answer(asked)) for asked in long]
    await under_way(member, 3)
    pool.sides[0].connection.abandon() if end == "killed" else pool.sides[0].leave.set()
    right(long, {one.id: one for one in await asyncio.gather(*tasks)})
    assert pool.members == set()
    assert pool._ones == {}


async def test_who_waits_for_a_single_answer_may_leave_or_abort_it(pool):
    (member,) = pool.members
    long = [request(i, [i + 1], Sampling(5000)) for i in range(4)]
    tasks = [asyncio.create_task(pool.answer(asked)) for asked in long]
    await under_way(member, 2)
    assert await pool.take_out(range(4)) == []
    leaving = min(member.ids)
    tasks[leaving].cancel()
    await asyncio.gather(tasks[leaving], return_exceptions=True)
    assert leaving not in member.ids
    await pool.abort()
    found = await asyncio.gather(*tasks, return_exceptions=True)
    assert {one.finish for number, one in enumerate(found) if number != leaving} == {"abort"}


async def test_a_conversation_stays_with_whoever_has_read_it(pool):
    (member,) = pool.members
    given, give = [], member.give
    member.give = lambda request, asker: (given.append(request.conversation), give(request, asker))
    for turn in range(3):
        asked = [replace(request(10 * turn + i, [i + 1] * (turn + 1), Sampling(5)), conversation=i) for i in range(4)]
        found = await asyncio.gather(*(pool.answer(one) for one in asked))
        right(asked, {one.id: one for one in found})
    assert sorted(given) == sorted(3 * [*set(given)])
    assert 0 < len(set(given)) < 4
    await pool.forget([*range(4)])
    assert pool._talks == {}


async def test_who_does_not_know_the_token_is_told_nothing(pool):
    host, _, port = pool.where.rpartition(":")
    with pytest.raises(Refused, match="another token"):
        await connect(host, int(port), "of another job")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"x" * 48)
    assert len(await reader.read()) < 64  # its greeting, and then the end
    writer.close()
    assert len(pool.members) == 1


async def test_an_address_that_is_taken_is_named_with_its_key(pool, started):
    other = await started("transformers")
    with pytest.raises(UserError, match=rf"rollout\.join={pool.where}: .*cannot listen"):
        await Pool(other, other._compute, {}, "rollout[0]").listen(pool.where, None)


async def test_a_job_that_does_not_know_the_token_is_not_joined():
    async def pretends(reader, writer):
        writer.write(b"rlinf join 1\n" + bytes(16))
        await reader.readexactly(48)
        writer.write(bytes(32))
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(pretends, "127.0.0.1", 0)
    async with server:
        with pytest.raises(Refused, match="does not know"):
            await connect("127.0.0.1", server.sockets[0].getsockname()[1], TOKEN)


@pytest.mark.parametrize("says", ["nothing", "nonsense", "that it failed"])
async def test_who_says_nothing_or_nonsense_is_lost_and_the_job_goes_on(says, started):
    pool = await started("tests.engines.pooled.alone", max_rows=1)
    pool._silence = 0.05 if says == "nothing" else 60.0
    host, _, port = pool.where.rpartition(":")
    connection = await connect(host, int(port), TOKEN)
    connection.send("ready", {"rows": 4, "name": "somebody"})
    while not pool.members:
        await pool._changed.wait()
    requests = ragged(5, Sampling(6))
    running = asyncio.create_task(answers(pool, requests))
    while not any(member.ids for member in pool.members) and not running.done():
        await pool._changed.wait()
    if says != "nothing":
        connection.send(*(("completions", 3) if says == "nonsense" else ("failed", "no memory")))
    right(requests, await running)
    await gone(pool)
    await connection.close()


@pytest.mark.parametrize("seed", range(3))
async def test_whoever_comes_goes_or_is_killed_every_request_is_answered_once_and_right(seed, started):
    rng = random.Random(seed)
    pool = await started("tests.engines.pooled.alone", max_rows=3)
    calls = [[replace(one, id=one.id + 100 * n) for one in ragged(14, Sampling(12), seed=n)] for n in range(2)]

    async def slowly(requests):
        for asked in requests:
            for _ in range(rng.randrange(8)):
                await asyncio.sleep(0)
            yield asked

    running = [asyncio.create_task(answers(pool, slowly(requests))) for requests in calls]
    while not all(task.done() for task in running):
        if len(pool.members) < 2:
            side = await pool.joins()
        for _ in range(rng.randrange(60)):
            await asyncio.sleep(0)
        side = rng.choice(pool.sides)
        if rng.random() < 0.7:
            side.connection.abandon()
        else:
            side.leave.set()
    for requests, task in zip(calls, running, strict=True):
        right(requests, await task)
    for side in pool.sides:
        side.connection.abandon()
    with contextlib.suppress(TimeoutError):
        await gone(pool)
    assert pool._calls == []


async def test_without_an_engine_of_its_own_answers_wait_for_one_each_time_and_go_on_from_what_was_handed_on(started):
    pool = await started("tests.engines.pooled.nobody", max_rows=4)
    await pool.load(packed(tiny(seed=1), 4))
    long = [request(i, [i + 1], Sampling(40)) for i in range(5)]
    singles = [replace(one, id=one.id + 10) for one in long]
    running = asyncio.create_task(answers(pool, long))
    tasks = [asyncio.create_task(pool.answer(asked)) for asked in singles]
    for ended in ("killed", "told to leave", None):
        assert not running.done()
        side = await pool.joins()
        (member,) = pool.members
        while ended and len([one for one in await pool.partial(range(20)) if one.partial is not None]) < 3:
            await asyncio.sleep(0)
        if ended == "killed":
            side.connection.abandon()
        elif ended:
            side.leave.set()
        if ended:
            await gone(pool)
            assert {*range(10, 15)} <= {one.id for one in await pool.partial(range(20))}
    right(long, await running, 1)
    assert member.version == pool.version == 4
    found = await asyncio.gather(*tasks)
    right(singles, {one.id: one for one in found}, 1)
    assert pool._ones == {}


async def test_who_knows_no_more_than_an_outline_of_the_model_answers_by_the_weights_that_come(started):
    pool = await started("tests.engines.pooled.nobody", max_rows=4)
    model = tiny(seed=1)
    await pool.load(packed(model, 4))
    await pool.joins(model.config)
    requests = ragged(6, Sampling(8))
    right(requests, await answers(pool, requests), 1)
    stops = StopTexts.of(LateTokenizer({"characters": "ab"}))
    assert [stops.complete([3, token], ["ab", "<eos>"]) for token in (4, 1, 3)] == [True, True, False]


async def test_what_waits_for_an_engine_is_taken_out_aborted_or_cancelled_without_one(started):
    pool = await started("tests.engines.pooled.nobody")
    task = asyncio.create_task(pool.answer(request(1, [1], Sampling(4))))
    cancelled = asyncio.create_task(pool.answer(request(2, [1], Sampling(4))))
    last = asyncio.create_task(pool.answer(request(3, [1], Sampling(4))))
    running = asyncio.create_task(answers(pool, [request(9, [1], Sampling(4))]))
    for _ in range(5):
        await asyncio.sleep(0)
    cancelled.cancel()
    await asyncio.wait([cancelled])
    assert cancelled.cancelled()
    await pool.abort()
    assert [(await one).finish for one in (task, last)] == ["abort", "abort"]
    assert await running == {}
    with pytest.raises(ValueError, match=r"request 4.*own_engine"):
        await pool.answer(replace(request(4, [1], Sampling(2)), images=(ImageRef("cat", "cat.png"),)))
