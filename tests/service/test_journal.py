"""The journal of a service by itself: what was waited for outlives a death, and damage is told from its traces."""

import asyncio

import pytest

from rlinf.config.load import InputError
from rlinf.service.journal import ANSWERS, Journal, Record


async def written(root):
    journal = Journal(root)
    journal.request("m", "m:1", {"call": "a", "seq_id": 1}, b"\0\n\xff")
    journal.request("m", "m:1", {"call": "a", "seq_id": 1}, b"\0\n\xff")  # the same again
    journal.request("m", "m:2", {"call": "b", "seq_id": 2})
    journal.result("m", "m:1", b"bytes", wait=False)
    await journal.synced()
    return journal


async def test_requests_and_results_are_read_in_their_order(tmp_path):
    await (await written(tmp_path)).close()
    line = Journal(tmp_path).recover()["m"]
    assert [(each.facts["id"], each.body) for each in line.requests(done=True)] == [("m:1", b"\0\n\xff"), ("m:2", b"")]
    assert [each.facts["id"] for each in line.requests(done=False)] == ["m:2"]
    assert line.results == {"m:1": b"bytes"}


async def test_a_segment_begins_with_what_is_not_over_and_the_one_before_keeps_results(tmp_path):
    journal = await written(tmp_path)
    journal.begin("m", 1, [Record({"saved": True})], {})
    journal.result("m", "m:2", {"type": "b"}, wait=True)
    await journal.synced()
    line = Journal(tmp_path).recover()["m"]
    assert line.number == 1
    assert [each.facts["id"] for each in line.requests(done=True)] == ["m:2"]
    assert line.results == {"m:1": b"bytes", "m:2": {"type": "b"}}
    journal.begin("m", 2, [], {"m:2": {"type": "b"}})
    await journal.synced()
    assert Journal(tmp_path).recover()["m"].results == {"m:2": {"type": "b"}}
    journal.end("m")
    await journal.close()
    assert Journal(tmp_path).recover() == {}


async def test_a_segment_leaves_the_state_alone_that_is_being_written(tmp_path):
    journal = await written(tmp_path)
    for number in (1, 2):
        journal.state("m", number).mkdir()
    later = journal.state("m", 3).with_name(f".{journal.state('m', 3).name}")
    later.mkdir()
    journal.begin("m", 2, [Record({"saved": True})], {})
    await journal.synced()
    assert {path.name for path in (tmp_path / "m").glob("*.state")} == {"000000002.state", later.name}


async def test_a_torn_end_is_cut_and_damage_before_it_is_an_error(tmp_path):
    await (await written(tmp_path)).close()
    path = tmp_path / "m" / "000000000.log"
    whole = path.read_bytes()
    for torn in (whole[:-1], whole + b"\0" * 50, whole + whole[:20]):
        path.write_bytes(torn)
        line = Journal(tmp_path).recover()["m"]
        assert len(line.records) == 2
        assert path.stat().st_size <= len(whole)
    path.write_bytes(whole[:20] + b"?" + whole[21:])
    with pytest.raises(InputError, match=r"000000000.log.*byte 0"):
        Journal(tmp_path).recover()


async def test_nothing_is_answered_any_more_when_the_disk_takes_nothing(tmp_path):
    (tmp_path / "m").write_text("no directory")
    journal = Journal(tmp_path)
    journal.put("m", {"call": "a"})
    for _ in range(2):
        with pytest.raises(OSError, match="m"):
            await journal.synced()
    await asyncio.wait_for(journal.close(), 60)


async def test_answers_that_had_a_result_are_not_asked_for_again(tmp_path):
    journal = Journal(tmp_path)
    journal.request(ANSWERS, "s:sample:0:1", {"call": "asample"})
    journal.result(ANSWERS, "s:sample:0:1", b"text", wait=True)
    await journal.synced()
    again = Journal(tmp_path)
    assert again.recover()[ANSWERS].requests(done=False) == []
    again.begin(ANSWERS, 1, [], {})
    await again.synced()
    assert Journal(tmp_path).recover()[ANSWERS].records == []
