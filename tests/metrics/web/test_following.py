"""What pages are told while runs go on, end, die, come and begin anew."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import shutil
import threading

import pytest

from rlinf.dashboard import events
from rlinf.dashboard import runs as followed
from rlinf.dashboard.events import ClientQueue, Job, TooSlow, known_steps
from rlinf.dashboard.runs import RunTail, runs_in
from rlinf.storage import reading
from tests.metrics.web.watching import add, dead_pid, job, open_page, write_live, write_run


async def test_the_list_has_all_runs_below_a_directory_and_those_that_are_named(tmp_path):
    write_run(tmp_path / "outputs" / "a", steps=3, planned=9)
    write_run(tmp_path / "outputs" / "sweep" / "seed 1", steps=2)
    write_run(tmp_path / "outputs" / "a" / "videos" / "not a run")
    write_run(tmp_path / "b")
    (tmp_path / "outputs" / "notes").mkdir()
    async with open_page(tmp_path / "outputs", tmp_path / "b", tmp_path / "outputs" / "a") as page:
        runs = await page.json("/api/runs")
    assert [(run["name"], run["status"], run["step"], run["steps"]) for run in runs] == [
        ("a", "ended", 3, 9),
        ("sweep/seed 1", "finished", 2, 2),
        ("b", "finished", 4, 4),
    ]
    assert len({run["id"] for run in runs}) == 3


@pytest.mark.parametrize(
    ("live", "status"),
    [
        ({}, "running"),
        ({"machine": "node7"}, "running on node7"),
        ({"pid": "dead"}, "ended without saying so"),
        ({"pid": "none"}, "finished"),
    ],
)
async def test_a_run_says_whether_its_job_lives(tmp_path, live, status):
    run = write_run(tmp_path / "r")
    write_live(run, **(live | {"pid": dead_pid()} if live.get("pid") == "dead" else live))
    async with open_page(run) as page:
        (told,) = await page.json("/api/runs")
        assert told["status"] == status
        assert (await page.json(f"/api/runs/{told['id']}/state"))["status"] == status


async def test_a_run_on_another_machine_says_how_to_see_it_live(tmp_path):
    run = write_run(tmp_path / "my run")
    async with open_page(run) as page:
        path = f"/api/runs/{await page.run()}/state"
        assert (await page.json(path))["elsewhere"] is None
        write_live(run, machine="node7")
        told = (await page.json(path))["elsewhere"]
    assert told["machine"] == "node7"
    ssh = shlex.split(told["command"])
    assert ssh[:-1] == ["ssh", "-t", "-L", "8266:127.0.0.1:8266", "--", "node7"]
    assert shlex.split(ssh[-1]) == ["rlinf", "watch", str(run), "--port", "8266"]


async def test_a_run_that_never_took_a_step_is_not_called_finished(tmp_path):
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "metrics.jsonl").touch()
    async with open_page(tmp_path / "r") as page:
        assert (await page.json("/api/runs"))[0]["status"] == "ended"


async def test_a_job_that_is_killed_changes_no_file_and_its_end_is_told(tmp_path, monkeypatch):
    run = write_run(tmp_path / "r")
    write_live(run)
    async with open_page(run) as page:
        path = f"/api/runs/{await page.run()}/state"
        assert (await page.json(path))["status"] == "running"
        monkeypatch.setattr(Job, "lives", False)
        assert (await page.json(path))["status"] == "ended without saying so"


async def test_a_number_that_another_process_has_by_now_is_no_sign_of_life(tmp_path):
    run = write_run(tmp_path / "r")
    write_live(run)
    os.utime(run / "live.json", (1e9, 1e9))  # written long before this process began
    async with open_page(run) as page:
        assert (await page.json("/api/runs"))[0]["status"] == "ended without saying so"


async def test_a_page_is_sent_rows_answers_sentences_and_alarms_as_they_are_written(tmp_path):
    run = write_run(tmp_path / "r", steps=2, planned=9)
    async with open_page(run) as page:
        name = await page.run()
        async with page.events(f"runs={name}") as events:
            await events.next("runs")
            add(run, "metrics.jsonl", {"step": 3, "reward/mean": 0.5})
            told = await events.next("rows")
            assert (told["run"], told["rows"][-1]) == (name, {"step": 3, "reward/mean": 0.5})
            assert (await events.next("runs"))["runs"][0]["step"] == 3
            add(run, "samples.jsonl", {"step": 3, "prompt": "p", "response": "new"})
            assert (await events.next("answers"))["steps"] == [3]
            add(run, "explained.jsonl", {"step": 3, "text": "training waited", "cause": "tail"})
            assert (await events.next("explained"))["rows"][0]["cause"] == "tail"
            add(run, "alarms.jsonl", {"step": 3, "text": "log-probs differ", "do": "look"})
            assert (await events.next("alarms"))["rows"] == [{"step": 3, "text": "log-probs differ", "do": "look"}]
            assert (await page.json(f"/api/runs/{name}/answers?step=3"))[0]["response"] == "new"
            add(run, "metrics.jsonl", {"step": 3, "evaluation/accuracy": 0.75})
            merged = {"step": 3, "reward/mean": 0.5, "evaluation/accuracy": 0.75}
            assert (await events.next("rows"))["rows"][-1] == merged


async def test_half_a_line_waits_for_its_other_half(tmp_path):
    run = write_run(tmp_path / "r", steps=2)
    async with open_page(run) as page, page.events(f"runs={await page.run()}") as events:
        await events.next("runs")
        with (run / "metrics.jsonl").open("a") as file:
            file.write('{"step": 3, "loss"')
            file.flush()
            add(run, "alarms.jsonl", {"step": 2, "text": "now"})
            await events.next("alarms")
            file.write(": 0.5}\n")
            file.flush()
            assert (await events.next("rows"))["rows"][-1] == {"step": 3, "loss": 0.5}


async def test_what_came_between_a_state_and_the_events_is_not_lost_nor_what_came_without_a_connection(tmp_path):
    run = write_run(tmp_path / "r", steps=2)
    async with open_page(run) as page:
        name = await page.run()
        assert (await page.json(f"/api/runs/{name}/state"))["step"] == 2
        add(run, "metrics.jsonl", {"step": 3, "loss": 3.0})
        async with page.events(f"runs={name}&since=2") as events:
            assert [row["step"] for row in (await events.next("rows"))["rows"]] == [3]
            add(run, "metrics.jsonl", {"step": 4, "loss": 4.0})
            await events.next("rows")
            last = events.id
        add(run, "metrics.jsonl", {"step": 5, "loss": 5.0})
        async with page.events(f"runs={name}&since=2", **{"Last-Event-ID": last}) as events:
            assert [row["step"] for row in (await events.next("rows"))["rows"]] == [5]


async def test_a_run_that_goes_on_from_a_checkpoint_is_shown_anew(tmp_path):
    run = write_run(tmp_path / "r", steps=6)
    async with open_page(run) as page:
        name = await page.run()
        async with page.events(f"runs={name}") as events:
            await events.next("runs")
            kept = (run / "metrics.jsonl").read_text().splitlines(keepends=True)[:4]
            (run / "aside").write_text("".join(kept))
            (run / "aside").replace(run / "metrics.jsonl")
            assert (await events.next("anew"))["run"] == name
        assert (await page.json(f"/api/runs/{name}/state"))["step"] == 3


async def test_a_run_that_comes_later_appears_and_one_that_is_removed_goes(tmp_path):
    write_run(tmp_path / "outputs" / "a")
    async with open_page(tmp_path / "outputs") as page, page.events("runs=") as events:
        assert [run["name"] for run in (await events.next("runs"))["runs"]] == ["a"]
        write_run(tmp_path / "elsewhere").rename(tmp_path / "outputs" / "b")
        assert [run["name"] for run in (await events.next("runs"))["runs"]] == ["a", "b"]
        shutil.rmtree(tmp_path / "outputs" / "a")
        while [run["name"] for run in (await events.next("runs"))["runs"]] != ["b"]:
            pass


async def test_several_runs_are_shown_side_by_side(tmp_path):
    first, second = write_run(tmp_path / "o" / "a"), write_run(tmp_path / "o" / "b")
    async with open_page(tmp_path / "o") as page:
        names = [run["id"] for run in await page.json("/api/runs")]
        async with page.events(f"runs={','.join(names)}") as events:
            await events.next("runs")
            add(second, "metrics.jsonl", {"step": 5, "loss": 1.0})
            assert (await events.next("rows"))["run"] == names[1]
            add(first, "metrics.jsonl", {"step": 5, "loss": 2.0})
            assert (await events.next("rows"))["run"] == names[0]


async def test_a_job_is_listened_to_while_a_page_shows_it_and_no_longer(tmp_path):
    run = write_run(tmp_path / "r", steps=2, planned=9)
    async with job(run) as alive, open_page(run) as page:
        name = await page.run()
        await page.json(f"/api/runs/{name}/state")
        assert not alive.heard.is_set()
        async with page.events(f"runs={name}") as events:
            assert (await events.next("status"))["status"] == "generating step 3"
            while (await events.next("runs"))["runs"][0]["status"] != "generating step 3":
                pass
            alive.tell({"kind": "moment", "time": 1.0, "actors": []})
            assert (await events.next("moment")) == {"kind": "moment", "time": 1.0, "actors": [], "run": name}
        await alive.left.wait()
        assert not alive.listeners


async def test_who_comes_later_is_told_who_is_where_and_the_last_minute(tmp_path):
    run = write_run(tmp_path / "r", steps=2, planned=9)
    async with job(run) as alive, open_page(run) as page:
        alive.greeting.insert(0, {"kind": "roles", "mode": "disaggregated", "roles": []})
        name = await page.run()
        async with page.events(f"runs={name}") as first:
            await first.next("status")
            for second in range(100):
                alive.tell({"kind": "lanes", "start": second, "end": second + 1, "lanes": []})
            while (await first.next("lanes"))["end"] != 100:
                pass
            async with page.events(f"runs={name}") as later:
                assert (await later.next("roles", "status"))["kind"] == "roles"
                assert (await later.next("status"))["step"] == 2
                assert (await later.next("lanes"))["end"] == 40
        assert len(alive.listeners) <= 1  # one connection for both


@pytest.mark.parametrize("rubbish", [b"rubbish\n", b"[1]\n", b'{"kind": "format_disk"}\n', b"\xff\xfe\n", b"7\n"])
async def test_what_a_feed_should_not_say_is_left_out(tmp_path, rubbish):
    run = write_run(tmp_path / "r", steps=2)
    async with job(run) as alive, open_page(run) as page, page.events(f"runs={await page.run()}") as events:
        await events.next("status")
        alive.tell(rubbish)
        alive.tell({"kind": "moment", "time": 2.0})
        assert (await events.next("moment", "format_disk"))["time"] == 2.0


async def test_a_feed_that_breaks_off_is_listened_to_again_as_long_as_the_job_lives(tmp_path):
    run = write_run(tmp_path / "r", steps=2)
    async with job(run) as alive, open_page(run) as page, page.events(f"runs={await page.run()}") as events:
        assert (await events.next("status"))["status"] == "generating step 3"
        alive.hang_up()
        assert (await events.next("status"))["status"] == "ended"
        assert (await events.next("status"))["status"] == "generating step 3"


async def test_pages_are_told_that_a_job_has_ended(tmp_path):
    run = write_run(tmp_path / "r", steps=2, planned=9)
    async with open_page(run) as page, page.events(f"runs={await page.run()}") as events:
        async with job(run):
            while (await events.next("runs"))["runs"][0]["status"] != "generating step 3":
                pass
        told = {}
        while told.get("status") != "ended" or told.get("runs") != "ended":
            event = await events.next("status", "runs")
            told[event["kind"]] = event["runs"][0]["status"] if event["kind"] == "runs" else event["status"]


@pytest.mark.parametrize("what", ["checkpoint", "evaluate", "pause", "go_on", "stop"])
async def test_a_job_does_what_it_is_asked_and_is_left_alone_again(tmp_path, what):
    run = write_run(tmp_path / "r")
    async with job(run) as alive, open_page(run) as page:
        assert await page.do(await page.run(), what) == (200, {"said": f"{what} after step 3", "ok": True})
        await alive.left.wait()


async def test_who_shows_the_run_hears_what_another_page_asked_for(tmp_path):
    run = write_run(tmp_path / "r")
    async with job(run) as alive, open_page(run) as page:
        name = await page.run()
        async with page.events(f"runs={name}") as events:
            await events.next("status")
            await page.do(name, "pause")
            assert (await events.next("did"))["said"] == "pause after step 3"
            assert alive.asked == ["pause"]


async def test_a_run_without_a_job_cannot_be_asked_and_says_why(tmp_path, monkeypatch):
    run = write_run(tmp_path / "r")
    async with open_page(run) as page:
        name = await page.run()
        assert await page.do(name, "stop") == (409, {"said": "no job writes to this run any more"})
        write_live(run, pid=dead_pid())
        assert await page.do(name, "stop") == (409, {"said": "no job writes to this run any more"})
        write_live(run, machine="node7")
        assert await page.do(name, "stop") == (409, {"said": "its job is on node7: watch it there"})
        write_live(run)
        assert await page.do(name, "stop") == (409, {"said": "nobody answers at the job's socket"})
        monkeypatch.setattr(followed, "PATIENCE", 0.05)
        async with job(run) as alive:
            alive.silent = True
            asked = {"said": "asked: it is done between two steps, and told then", "ok": True}
            assert await page.do(name, "stop") == (200, asked)


async def test_a_page_that_does_not_take_what_it_is_sent_is_sent_away(monkeypatch):
    monkeypatch.setattr(events, "MOST_EVENTS", 3)
    box = ClientQueue({})
    for second in range(9):
        box.put({"run": "a", "kind": "moment", "time": second})
    assert json.loads((await box.next()).partition("data: ")[2])["time"] == 8  # moments do not pile up
    for _ in range(4):
        box.put({"run": "a", "kind": "lanes"})
    with pytest.raises(TooSlow):
        await box.next()


async def test_an_event_wakes_who_waits_for_one():
    box = ClientQueue({"a": 3})
    waiting = asyncio.create_task(box.next())
    await asyncio.sleep(0)
    box.put({"run": "a", "kind": "rows", "rows": [{"step": 7}]})
    assert (await waiting).startswith("id: a:7\ndata: ")
    box.put({"run": "a", "kind": "anew"})
    assert (await box.next()).startswith("id: a:0\n")


@pytest.mark.parametrize(
    ("written", "known"),
    [("a:3,b:0", {"a": 3, "b": 0}), ("", {}), ("a:,b", {}), ("a:-1,:4,b:x,c:5", {"c": 5}), ("a:" + "9" * 20, {})],
)
def test_the_id_of_an_event_is_read_with_care(written, known):
    assert known_steps(written) == known


async def test_a_run_that_has_only_just_begun_is_shown_without_anything(tmp_path):
    (tmp_path / "r").mkdir()
    async with job(tmp_path / "r"), open_page(tmp_path / "r") as page:
        name = await page.run()
        state = await page.json(f"/api/runs/{name}/state")
        assert (state["step"], state["status"], state["curves"]["steps"]) == (0, "running", [])


async def test_a_file_that_is_damaged_is_said_to_be_and_the_rest_is_shown(tmp_path):
    run = write_run(tmp_path / "r")
    (run / "trace.json").write_text("[")
    async with open_page(run) as page:
        name = await page.run()
        async with await page.get(f"/api/runs/{name}/lanes") as answer:
            assert (answer.status, "trace.json" in (await answer.json())["said"]) == (500, True)
        assert (await page.json(f"/api/runs/{name}/state"))["step"] == 4


async def test_a_trace_is_read_once_for_all_pages_until_it_is_another_one(tmp_path, monkeypatch):
    run, read = write_run(tmp_path / "r"), []
    monkeypatch.setattr(followed, "run_lanes", lambda directory: read.append(directory) or [len(read)])
    async with open_page(run) as page:
        path = f"/api/runs/{await page.run()}/lanes"
        assert await asyncio.gather(*(page.json(path) for _ in range(3))) == [[1]] * 3
        (run / "trace.json").write_text("[]")
        assert [await page.json(path), await page.json(path)] == [[2], [2]]


async def test_a_file_of_one_endless_line_is_said_to_be_and_fills_no_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "LONGEST", 1 << 12)
    run = write_run(tmp_path / "r")
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b"x" * 20_000)
    async with open_page(run) as page:
        state = await page.json(f"/api/runs/{await page.run()}/state")
    assert state["step"] == 4
    assert state["about"][-1] == "metrics.jsonl: 1 line left out, longer than any that a run writes"


async def test_what_was_read_for_a_page_that_has_gone_is_told_to_the_others(tmp_path):
    (found,) = runs_in([write_run(tmp_path / "r", steps=2)])
    run, other = RunTail(found), ClientQueue({})
    await run.show(other)
    add(tmp_path / "r", "metrics.jsonl", {"step": 3, "loss": 3.0})
    read, begun, go_on = run._read, threading.Event(), threading.Event()

    def slowly():
        begun.set()
        assert go_on.wait(30)
        return read()

    run._read = slowly
    gone = asyncio.create_task(run.state())
    await asyncio.to_thread(begun.wait, 30)
    gone.cancel()
    await asyncio.wait([gone])
    assert gone.cancelled()
    go_on.set()
    assert "id: " in (told := await asyncio.wait_for(other.next(), 30))
    assert '"step": 3' in told
    await run.leave()


async def test_one_damaged_run_does_not_keep_the_others_from_being_followed(tmp_path, monkeypatch):
    bad, good = write_run(tmp_path / "o" / "bad"), write_run(tmp_path / "o" / "good")
    read = RunTail._read

    def damaged(self):
        if self.run.directory == bad:
            raise KeyError("what no file should have")
        return read(self)

    async with open_page(tmp_path / "o") as page:
        names = [run["id"] for run in await page.json("/api/runs")]
        async with page.events(f"runs={','.join(names)}") as events:
            await events.next("runs")
            monkeypatch.setattr(RunTail, "_read", damaged)
            add(bad, "metrics.jsonl", {"step": 5, "loss": 1.0})
            add(good, "metrics.jsonl", {"step": 5, "loss": 2.0})
            assert (await events.next("rows"))["run"] == names[1]
