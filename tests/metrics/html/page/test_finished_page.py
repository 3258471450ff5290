"""The page of finished runs in a real Chromium: it draws, is used by mouse and keyboard, and runs nobody's script."""

# ruff: noqa: E501  (lines of the page's own language)
from __future__ import annotations

import json

import pytest
import pytest_asyncio

from rlinf.dashboard.report import write_comparison, write_report
from rlinf.storage.files import read_lines
from tests.browser import CHROMIUM, MISSING, Browser
from tests.metrics.html.page.rich import rich_run
from tests.metrics.html.test_report import HOSTILE, run_directory

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason=MISSING),
    pytest.mark.asyncio(loop_scope="module"),
]

SHOWN = "[...document.querySelectorAll('section:not([hidden])')].map((section) => section.id)"
CLICKED = "button, summary, nav a, input[type=checkbox], input[type=radio]"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser():
    async with Browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    return write_report(rich_run(tmp_path_factory.mktemp("rich") / "run", hostile=HOSTILE)).as_uri()


async def opened(browser, url, **size):
    page = await browser.open(url, **size)
    await page.drawn()
    return page


async def test_it_draws_what_a_run_has_and_runs_no_script_of_a_model(browser, report):
    page = await opened(browser, report)
    assert await page.eval(SHOWN) == [
        "facts", "alarms", "why", "curves", "answers", "held-out", "episodes", "staleness", "time", "possible", "lanes",
        "setup",
    ]  # fmt: skip
    assert await page.eval("document.title") == "sorting: training report"
    paths = await page.eval("[...document.querySelectorAll('.smooth')].map((path) => path.getAttribute('d'))")
    assert paths
    assert all(path.startswith("M") and "L" in path and "NaN" not in path for path in paths)
    text = await page.eval("document.querySelector('main').textContent")
    assert text.count(HOSTILE) > 20
    assert await page.eval("[...document.querySelectorAll('main img, main script')].map((one) => one.src)") == [
        report.replace("report.html", "videos/step_000040/ood/env0001-episode0000-success.webp")
    ]
    await page.eval("document.querySelector('.films').scrollIntoView({behavior: 'instant'})")
    await page.until("document.querySelector('.films img').naturalWidth === 32")
    for told in (
        "Step 40 devices idled 0.1 s",
        "→ set staleness.max=1",
        "75.0%",
        "95 % interval",
        "side by side",
        "1 of the 8 answers to this prompt",
    ):
        assert told in text, told
    assert page.errors == []
    await page.close()


async def test_curves_out_of_sight_are_no_empty_boxes_for_whoever_prints_the_page(browser, report):
    page = await opened(browser, report, width=1000, height=300)
    unfolded = "[...document.querySelectorAll('.chart')].filter((one) => one.checkVisibility() && !one.hidden)"
    await page.until(f"{unfolded}.length > 10 && {unfolded}.every((one) => one.querySelector('.smooth'))")
    await page.eval("document.querySelectorAll('.groups details').forEach((one) => { one.open = true; })")
    await page.until(f"{unfolded}.length > 12 && {unfolded}.every((one) => one.querySelector('.smooth'))")
    await page.size(500, 300)
    wide = "Number(one.querySelector('.grid line').getAttribute('x2')) < one.clientWidth"
    await page.until(f"{unfolded}.every((one) => {wide})")
    assert page.errors == []
    await page.close()


async def test_what_a_run_has_nothing_for_does_not_appear(browser, tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 0.5, "timing/step": 1}\n')
    page = await opened(browser, write_report(tmp_path).as_uri())
    assert await page.eval(SHOWN) == ["facts", "curves"]
    assert await page.eval("document.querySelectorAll('nav a:not([hidden])').length") == 2
    (tmp_path / "metrics.jsonl").write_text("")
    await page.go(write_report(tmp_path).as_uri())
    await page.drawn()
    assert await page.eval(SHOWN) == []
    assert "No step" in await page.eval("document.body.innerText")
    assert page.errors == []
    await page.close()


async def test_everything_can_be_clicked(browser, report):
    page = await opened(browser, report, width=1600)
    before = await page.eval(SHOWN)
    number = 0
    while True:
        found = await page.eval(
            f"(() => {{ const all = [...document.querySelectorAll('{CLICKED}')].filter((one) => one.checkVisibility() &&"
            " !one.dataset.clicked); if (!all.length) return false; all[0].dataset.clicked = 'yes';"
            " document.querySelector('#now')?.removeAttribute('data-now'); for (const one of"
            " document.querySelectorAll('[data-now]')) one.removeAttribute('data-now'); all[0].dataset.now = 'yes';"
            " return all[0].tagName; })()"
        )
        if not found:
            break
        if await page.eval("document.querySelector('[data-now]').matches('.grow, .modes input')"):
            await page.eval("document.querySelector('[data-now]').click()")  # it is seen when the mouse is above it
        else:
            await page.click("[data-now]")
        if found == "SUMMARY":
            await page.click("[data-now]")  # shut, and open again, or the other way round
        number += 1
    await page.drawn()
    assert number > 40
    assert await page.eval(SHOWN) == before
    assert page.errors == []
    await page.close()


async def test_curves_are_found_smoothed_and_read(browser, report):
    page = await opened(browser, report)
    shown = "[...document.querySelectorAll('#curves .chart')].filter((one) => one.checkVisibility()).map((one) => one.dataset.metric)"
    everything = await page.eval(shown)
    await page.click("#curves input[type=search]")
    await page.write("TIMING tr")
    assert await page.eval(shown) == ["timing/training"]
    await page.eval(
        "(() => { const one = document.querySelector('#curves input[type=search]'); one.value = ''; one.dispatchEvent(new Event('input')); })()"
    )
    assert set(everything) <= set(await page.eval(shown))
    chart = "document.querySelector('[data-metric=\"reward/mean\"]')"
    await page.eval(f"{chart}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
    await page.drawn()
    line = f"{chart}.querySelector('.smooth').getAttribute('d')"
    smooth = await page.eval(line)
    await page.eval(
        "(() => { const one = document.querySelector('#curves input[type=range]'); one.value = 0; one.dispatchEvent(new Event('input')); })()"
    )
    await page.drawn()
    assert await page.eval(line) != smooth
    x, y = await page.eval(
        f"(() => {{ const box = {chart}.querySelector('svg').getBoundingClientRect(); return [box.right - 11, box.y + 60]; }})()"
    )
    await page.hover(x, y)
    assert await page.eval(f"{chart}.querySelector('output').textContent") == "1 at step 40"
    await page.eval(f"{chart}.querySelector('svg').focus()")
    await page.key("Home")
    await page.key("ArrowRight")
    assert await page.eval(f"{chart}.querySelector('output').textContent") == "0.05 at step 2"
    assert page.errors == []
    await page.close()


async def test_tokens_are_coloured_by_what_is_known_of_them(browser, report):
    page = await opened(browser, report)
    await page.eval("document.querySelector('#answers').scrollIntoView({behavior: 'instant'})")
    kinds = (
        "[...document.querySelectorAll('#answers .answer .tokens .token')].map((one) => one.className.split(' ')[1])"
    )
    ground = "(name) => getComputedStyle(document.querySelector(`#answers .answer .${name}`)).backgroundColor"
    found = {}
    for mode in ("logprob", "mask", "version"):
        await page.eval(f"document.querySelector('.modes input[value={mode}]').click()")
        await page.drawn()
        found[mode] = await page.eval(kinds)
    await page.eval("document.querySelector('.modes input[value=text]').click()")
    await page.drawn()
    assert (await page.eval("document.querySelector('#answers .answer .whole .read').textContent")).startswith(
        " [tool: 42"
    )
    await page.eval("document.querySelector('.modes input[value=version]').click()")
    await page.drawn()
    assert found["mask"] == ["learned"] * 6 + ["read"] + ["learned"] * 5
    assert found["version"] == ["v2"] * 5 + ["v1", "read", "v1", "v1", "v1", "v0", "v0"]
    assert found["logprob"][:3] == ["p0", "p4", "p5"]
    assert await page.eval(f"({ground})('v2')") != await page.eval(f"({ground})('v0')")
    place = (
        "(() => { const one = document.querySelector('#answers .answer .token.v2'); one.scrollIntoView({block: 'center',"
        " behavior: 'instant'}); const box = one.getBoundingClientRect(); return [box.x + 4, box.y + 8]; })()"
    )
    x, y = await page.eval(place)
    await page.hover(x, y)
    assert (
        await page.eval("document.querySelector('.tip').textContent")
        == "“Let” · log-prob 0.00, p 1 · learned · weights version 38"
    )
    await page.eval("document.querySelector('#answers .answer .tokens').focus()")
    await page.key("ArrowRight")
    await page.key("ArrowRight")
    assert "“ me” · log-prob −3.70" in await page.eval("document.querySelector('#answers .hint').textContent")
    await page.click("#answers .stepper button")
    assert await page.eval("document.querySelector('#answers .picked').textContent") != "step 40"
    await page.close()


async def test_light_and_dark_narrow_and_wide(browser, report):
    page = await opened(browser, report, width=1600)
    looks = "[getComputedStyle(document.body).backgroundColor, document.querySelector('#lanes canvas').toDataURL()]"
    await page.eval("document.querySelector('#lanes').scrollIntoView({behavior: 'instant'})")
    light = await page.eval(looks)
    await page.media(dark=True)
    await page.drawn()
    dark = await page.eval(looks)
    assert light[0] != dark[0]
    assert light[1] != dark[1], "lanes are drawn anew"
    for ground in ("dark", "light"):
        await page.media(dark=ground == "dark", still=True)
        await page.drawn()
        weak = {pair: ratio for pair, ratio in (await page.eval(CONTRAST)).items() if ratio < 4.5}
        assert weak == {}, ground
    wide = "document.documentElement.scrollWidth - innerWidth"
    assert await page.eval(wide) <= 0
    assert await page.eval("document.querySelector('nav').checkVisibility()")
    for width in (390, 800):
        await page.size(width, 844)
        await page.drawn()
        assert await page.eval(wide) <= 0, width
        assert not await page.eval("document.querySelector('nav').checkVisibility()")
    assert page.errors == []
    await page.close()


CONTRAST = """(() => {
  const style = getComputedStyle(document.documentElement), draw = document.createElement("canvas").getContext("2d");
  const light = (name) => {
    draw.fillStyle = style.getPropertyValue(`--${name}`);
    draw.fillRect(0, 0, 1, 1);
    const [r, g, b] = [...draw.getImageData(0, 0, 1, 1).data].map((part) => part / 255).map((part) => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const pairs = [["ink", "card"], ["ink", "ground"], ["soft", "card"], ["soft", "ground"], ["accent", "card"], ["good", "good-ground"], ["bad", "bad-ground"],
    ["good", "card"], ["bad", "card"], ["ink", "code"], ["soft", "code"], ["accent", "accent-ground"], ...["p1", "p2", "p3", "p4", "v0", "v1", "v2", "v3", "v4", "v5"].map((name) => ["ink", name])];
  return Object.fromEntries(pairs.map(([one, other]) => { const [low, high] = [light(one), light(other)].sort((a, b) => a - b); return [`${one} on ${other}`, (high + 0.05) / (low + 0.05)]; }));
})()"""


async def test_a_reward_of_0_throughout_is_a_curve_that_is_shown(browser, tmp_path):
    run = run_directory(tmp_path / "run", steps=3)
    rows = [row | {"reward/mean": 0.0, "grad_norm": 0.0, "clip_frac": 0.0} for row in read_lines(run / "metrics.jsonl")]
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    page = await opened(browser, write_report(run).as_uri())
    shown = await page.eval("[...document.querySelectorAll('div.group .chart')].map((one) => one.dataset.metric)")
    assert {"reward/mean", "grad_norm"} <= set(shown)
    assert "clip_frac" not in shown
    assert page.errors == []
    await page.close()


async def test_several_runs_are_side_by_side(browser, tmp_path):
    one, other = rich_run(tmp_path / "one"), run_directory(tmp_path / "other", steps=12)
    (other / "resolved.yaml").write_text((other / "resolved.yaml").read_text() + "\noptimizer: {lr: 0.5}\n")
    page = await opened(browser, write_comparison([one, other], tmp_path / "compare.html").as_uri())
    assert "beside" in await page.eval(SHOWN)
    beside = await page.eval("document.querySelector('#beside').innerText")
    for told in ("one", "other", "optimizer.lr", "0.5", "40 of 40", "12 of 12", "seconds of a step"):
        assert told in beside, told
    lines = "[...document.querySelectorAll('[data-metric=\"reward/mean\"] .smooth')].map((one) => one.parentNode.getAttribute('class'))"
    await page.eval(
        "document.querySelector('[data-metric=\"reward/mean\"]').scrollIntoView({block: 'center', behavior: 'instant'})"
    )
    await page.drawn()
    assert await page.eval(lines) == ["run0", "run1"]
    assert await page.eval("document.querySelector('h1').textContent") == "one"
    await page.click(".runs li:nth-child(2) button")
    await page.drawn()
    assert await page.eval("document.querySelector('h1').textContent") == "other"
    assert "alarms" not in await page.eval(SHOWN)
    await page.click(".runs li:nth-child(1) input")
    await page.eval(
        "document.querySelector('[data-metric=\"reward/mean\"]').scrollIntoView({block: 'center', behavior: 'instant'})"
    )
    await page.drawn()
    assert await page.eval(lines) == ["run1"]
    assert "beside" not in await page.eval(SHOWN)
    assert page.errors == []
    await page.close()


async def test_a_screenshot_is_more_than_a_blank_page(browser, report):
    page = await opened(browser, report, width=1200)
    picture = await page.picture()
    blank = await browser.open("about:blank", width=1200)
    assert len(picture) > 5 * len(await blank.picture())
    assert json.loads(await page.eval("JSON.stringify(performance.getEntriesByType('paint'))"))
    await page.close()


async def test_the_trace_of_an_agents_answer_opens_below_it(browser, report):
    page = await opened(browser, report)
    summary = await page.eval("document.querySelector('.trace summary').textContent")
    assert summary == "trace: 2 turns, 2 tool calls, 2.50 s"
    assert not await page.eval("document.querySelector('.trace').open")
    await page.eval("document.querySelector('.trace').scrollIntoView({behavior: 'instant'})")
    await page.click(".trace summary")
    assert await page.eval("document.querySelector('.trace').open")
    turns = await page.eval("[...document.querySelectorAll('.trace[open] li')].map((turn) => turn.textContent)")
    assert len(turns) == 2
    for told in (
        "after 0.10 s, took 1.25 s",
        "6 tokens",
        "ended by stop",
        "Let me look it up.",
        "search(",
        "no valid JSON",
    ):
        assert told in turns[0]
    for told in ("after 2.00 s", "[tool: 42", "So it is 42.", "reward 1", "ended by length"):
        assert told in turns[1]
