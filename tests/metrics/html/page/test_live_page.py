"""The page of a live run in a real Chromium: it follows what a server tells, and asks it what a reader asks."""

from __future__ import annotations

import json

import pytest
import pytest_asyncio

from tests.browser import CHROMIUM, MISSING, Browser
from tests.metrics.html.page.rich import StandIn, moment, places, rich_run, second
from tests.metrics.html.test_report import HOSTILE, run_directory

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason=MISSING),
    pytest.mark.asyncio(loop_scope="module"),
]

TEXT = "document.querySelector('{}').innerText"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser():
    async with Browser() as browser:
        yield browser


@pytest_asyncio.fixture(loop_scope="module")
async def live(browser, tmp_path):
    """(stand-in, page) of a run that is under way, and of one that is over."""
    rich_run(tmp_path / "sorting", steps=12, hostile=HOSTILE)
    run_directory(tmp_path / "earlier", steps=9)
    server = StandIn({"sorting": tmp_path / "sorting", "earlier": tmp_path / "earlier"})
    server.status["earlier"] = "finished"
    async with server.serving() as url:
        page = await browser.open(url, width=1600, height=6000)
        await server.connected.wait()
        server.say("sorting", "roles", **places())
        server.say("sorting", "status", status="running", step=12, asked=[])
        for at in (100.0, 101.0):
            server.say("sorting", "moment", **moment(at, hostile=HOSTILE))
            server.say("sorting", "lanes", **second(at))
        await page.until("document.querySelector('#minute:not([hidden]) canvas')?.width > 300")
        await page.until("document.querySelector('#queues').innerText.includes('1 of 4')")  # the second of the moments
        await page.until("document.querySelector('#curves .smooth')")
        yield server, page
        await page.close()


async def test_it_shows_what_roles_do_and_where_how_full_queues_are_and_what_devices_hold(live):
    server, page = live
    roles = await page.eval(TEXT.format("#roles"))
    for told in ("disaggregated", "4 roles", "trainer", "host 0 · node-0 · cuda:0", "0.4 s", "idle"):
        assert told in roles, told
    queues = await page.eval(TEXT.format("#queues"))
    for told in (
        "1 of 4",
        "3 ready",
        "12 put, 10 taken",
        "judge[0] waits for items",
        "rollout[2] waits for room",
        "and 3 more",
    ):
        assert told in queues, told
    assert HOSTILE in roles + queues
    memory = await page.eval(TEXT.format("#memory"))
    assert "70.1 GB of 80 GB, 88 %" in memory
    assert "3 GB" in memory
    server.say("sorting", "moment", **moment(103.0))
    await page.until("document.querySelector('#queues').innerText.includes('3 of 4')")
    told = await page.eval("document.querySelector('#minute canvas').getAttribute('aria-label')")
    assert "; 4 worked" in told
    assert page.errors == []


async def test_steps_that_come_move_the_bar_curves_sentences_and_answers(live):
    server, page = live
    assert "step 12 of 40" in await page.eval(TEXT.format("header"))
    server.say("sorting", "rows", rows=[{"step": 13, "reward/mean": 0.123, "timing/step": 0.5, "timing/elapsed": 20.0}])
    server.say("sorting", "status", status="evaluating", step=13, asked=[])
    server.say(
        "sorting",
        "explained",
        rows=[{"step": 13, "text": "all waited", "cause": "bound", "seconds": 9.0, "change": "give it more"}],
    )
    server.say("sorting", "alarms", rows=[{"step": 13, "text": "step 13: too old", "do": None}])
    server.say("sorting", "answers", steps=[13])
    await page.until("document.querySelector('header').innerText.includes('step 13 of 40')")
    await page.until("document.querySelector('#why .sentence').innerText === 'Step 13 all waited.'")
    await page.until("document.querySelector('#alarms').innerText.includes('too old')")
    await page.until("document.querySelector('#answers .picked').textContent === 'step 13'")
    await page.until("document.querySelector('#answers').innerText.includes('fetched')")
    await page.until("document.querySelector('[data-metric=\"reward/mean\"] output').textContent === '0.123'")
    assert "evaluating" in await page.eval(TEXT.format("header"))
    assert "left" in await page.eval(TEXT.format("header"))
    assert "give it more" in await page.eval(TEXT.format("#why"))
    assert page.errors == []


async def test_curves_of_a_run_that_goes_on_and_on_stay_short(live):
    server, page = live
    rows = [{"step": step, "reward/mean": step / 2000, "timing/step": 0.5} for step in range(13, 5001)]
    for at in range(0, len(rows), 500):
        server.say("sorting", "rows", rows=rows[at : at + 500])
    await page.until("document.querySelector('header').innerText.includes('5,000')")
    await page.drawn()
    line = await page.eval("document.querySelector('[data-metric=\"reward/mean\"] .smooth').getAttribute('d')")
    assert 400 < line.count("L") <= 1600
    assert await page.eval("document.querySelector('[data-metric=\"reward/mean\"] output').textContent") in (
        "2.5",
        "2.499",
        "2.4995",
    )
    assert page.errors == []


async def test_controls_ask_the_server_and_stopping_asks_the_reader_first(live):
    server, page = live
    await page.click("[data-do=checkpoint]")
    await page.until("document.querySelector('.said').textContent === 'checkpoint: after this step'")
    run, what, headers = server.asked[-1]
    assert (run, what, headers["X-Rlinf"]) == ("sorting", "checkpoint", "1")
    server.say("sorting", "status", status="running", step=12, asked=["evaluate"])
    await page.until("document.querySelector('[data-do=evaluate]').disabled")
    await page.click("[data-do=stop]")
    await page.until("document.querySelector('dialog').open")
    await page.click("dialog button[autofocus]")
    await page.until("!document.querySelector('dialog').open")
    assert [what for _, what, _ in server.asked] == ["checkpoint"]
    await page.click("[data-do=stop]")
    await page.click("dialog button.danger")
    await page.until("document.querySelector('.said').textContent === 'stop: after this step'")
    assert [what for _, what, _ in server.asked] == ["checkpoint", "stop"]
    await page.click("[data-do=pause]")
    server.say("sorting", "status", status="paused", step=12, asked=[])
    await page.until("document.querySelector('[data-do=go_on]').checkVisibility()")
    assert not await page.eval("document.querySelector('[data-do=pause]').checkVisibility()")
    server.say("sorting", "status", status="ended", step=12, asked=[])
    await page.until("!document.querySelector('.controls').checkVisibility()")
    assert await page.eval("document.querySelector('.said').checkVisibility()"), "how it ended can still be read"
    assert not await page.eval("document.querySelector('#minute').checkVisibility()")
    assert page.errors == []


async def test_a_job_that_is_gone_is_told_with_what_to_do(live):
    server, page = live
    server.status["sorting"] = "ended without saying so"
    server.say("sorting", "status", status="ended", step=12, asked=[])
    await page.until("document.querySelector('.away').innerText.includes('--resume auto')")
    assert await page.eval(TEXT.format(".state")) == "ended without saying so"
    assert page.errors == []


async def test_an_evaluation_that_was_asked_for_is_at_a_glance_soon(live):
    server, page = live
    path = server.runs["sorting"] / "metrics.jsonl"
    row = {"step": 12, "evaluation/accuracy": 0.987}
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")
    server.say("sorting", "rows", rows=[row])
    await page.until("document.querySelector('#facts').innerText.includes('98.7%')")
    assert page.errors == []


async def test_runs_are_picked_and_one_that_appears_is_there(live):
    server, page = live
    assert await page.eval("document.querySelector('h1').textContent") == "sorting"
    await page.click(".runs li:nth-child(2) button")
    await page.until("document.querySelector('h1').textContent === 'earlier'")
    await page.until("document.querySelector('#beside:not([hidden])')?.innerText.includes('9 of 9')")
    server.runs["new"] = server.runs["earlier"]
    server.status["new"] = "running"
    server.say(None, "runs", runs=server.listed())
    await page.until("document.querySelector('.runs li:nth-child(3)')?.innerText.includes('new')")
    assert page.errors == []


async def test_a_server_that_goes_away_is_told_and_come_back_to(live):
    server, page = live
    server.connected.clear()
    server.hang_up()
    await page.until("document.querySelector('.lost').innerText.includes('does not answer')")
    await server.connected.wait()
    await page.until("document.querySelector('.lost').hidden")
    server.say("sorting", "status", status="saving", step=12, asked=[])
    await page.until("document.querySelector('header').innerText.includes('saving')")


async def test_curves_stand_below_their_headings_whichever_run_is_looked_at_first(browser, tmp_path):
    run_directory(tmp_path / "over", steps=5)
    server = StandIn({"first": tmp_path / "over", "second": tmp_path / "over"})
    server.status["first"] = "finished"
    async with server.serving() as url:
        page = await browser.open(url, width=1600, height=3000)
        await page.until("document.querySelector('#curves .smooth')")
        assert await page.eval("document.querySelector('.runs button[aria-current=true]').textContent") == "second"
        assert "Learning" in await page.eval("document.querySelector('#curves .group h3')?.textContent ?? ''")
        await page.close()


async def test_everything_of_a_live_page_can_be_clicked_while_it_is_updated(live):
    server, page = live
    clicked = json.dumps("summary, .roles li, .queues li, .grow, nav a, .stepper button, .newest input, .modes label")
    for at in range(102, 106):
        server.say("sorting", "moment", **moment(float(at), roles=64))
        server.say("sorting", "lanes", **second(float(at), roles=64))
        await page.eval(f"[...document.querySelectorAll({clicked})].forEach((one) => one.click())")
        await page.drawn()
    await page.eval("[...document.querySelectorAll('section > details')].forEach((one) => { one.open = true; })")
    await page.until("document.querySelectorAll('#roles .roles li').length === 64")
    await page.size(390, 844)
    await page.media(dark=True, still=True)
    await page.drawn()
    assert await page.eval("document.documentElement.scrollWidth - innerWidth") <= 0
    assert page.errors == []
