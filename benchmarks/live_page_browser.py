"""The page of a run in a real Chromium: how soon it is painted, whether it drops frames, and pictures of it.

    python -m benchmarks.live_page_browser                                # 10,000 steps; 64 roles for 30 s
    python -m benchmarks.live_page_browser --screenshots docs/pictures    # of a live run, a finished one, a policy's

First paint is what the browser itself notes (`first-contentful-paint`), median of five pages, each in a tab of its own,
from a file and from a server; beside it is when the first curve stood there. Frames: a page is sent `moment` and
`lanes` of 64 roles each second, and rows of metrics with them, while a script in it notes the time between animation
frames and every task longer than 50 ms; a frame counts as dropped where the next came more than 50 ms after it.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import math
import os
import random
import statistics
import sys
import tempfile
from pathlib import Path

from PIL import Image

from rlinf.dashboard.report import write_report
from tests.browser import Browser, Page
from tests.metrics.html.page.rich import StandIn, moment, places, rich_run, second

STEPS, METRICS, PAGES = 10_000, 80, 5
ROLES, SECONDS = 64, 30
LATE = 50.0
"""Milliseconds between two frames from which one was dropped: three frames of a screen's 60 a second."""
_WATCH = """(() => {
  const seen = window.seen = { gaps: [], long: [] };
  new PerformanceObserver((list) => seen.long.push(...list.getEntries().map((one) => one.duration))).observe({ type: "longtask" });
  let last = performance.now();
  const frame = (now) => { seen.gaps.push(now - last); last = now; requestAnimationFrame(frame); };
  requestAnimationFrame(frame);
})()"""  # noqa: E501


def long_run(directory: Path) -> Path:
    """A run of 10,000 steps with 80 metrics, made up."""
    directory.mkdir()
    random.seed(0)
    names = [
        "reward/mean",
        "loss",
        "kl",
        "entropy",
        "grad_norm",
        "tokens_per_s",
        "timing/training",
        "timing/generation",
    ]
    names += [f"own/metric_{number}" for number in range(METRICS - len(names) - 2)]
    with (directory / "metrics.jsonl").open("w") as file:
        for step in range(1, STEPS + 1):
            row = {name: math.sin(step / 900 + n) + random.gauss(0, 0.1) for n, name in enumerate(names)}
            file.write(json.dumps({"step": step, **row, "timing/step": 0.4, "timing/elapsed": step * 0.4}) + "\n")
    with (directory / "samples.jsonl").open("w") as file:
        for step in range(1, STEPS + 1):
            file.writelines(
                json.dumps({"step": step, "prompt": "3142>", "response": "1234", "reward": 1.0}) + "\n"
                for _ in range(8)
            )
    (directory / "environment.json").write_text(json.dumps({"steps": STEPS}))
    return directory


async def first_paint(browser: Browser, url: str) -> dict[str, float]:
    """Milliseconds from the beginning of the navigation, medians."""
    found: dict[str, list[float]] = {"paint": [], "curve": []}
    for _ in range(PAGES):
        page = await browser.open("about:blank", width=1600, height=1200)
        await page.go(url)
        await page.until("document.querySelector('.smooth') || document.querySelector('#curves .chart')")
        found["curve"].append(await page.eval("performance.now()"))
        await page.until("performance.getEntriesByName('first-contentful-paint').length")
        found["paint"].append(await page.eval("performance.getEntriesByName('first-contentful-paint')[0].startTime"))
        await page.close()
    return {name: statistics.median(values) for name, values in found.items()}


async def frames(browser: Browser, directory: Path) -> dict[str, float]:
    """Watch a page of 64 roles in 30 s of 60 updates a minute."""
    server = StandIn({"run": rich_run(directory / "live")})
    async with server.serving() as url:
        page = await browser.open(url, width=1600, height=2000)
        await server.connected.wait()
        server.say("run", "roles", **places(ROLES))
        server.say("run", "status", status="running", step=40, asked=[])
        await _updates(server, page, 3, 0)  # the first ones make what later ones change
        await page.eval(_WATCH)
        await page.send("Performance.enable", timeDomain="threadTicks")
        before = await _busy(page)
        await _updates(server, page, SECONDS, 3)
        busy = (await _busy(page) - before) / SECONDS * 1000
        seen = await page.eval("window.seen")
        assert page.errors == [], page.errors
        assert await page.eval("document.querySelectorAll('#roles .roles li').length") == ROLES
    gaps = sorted(seen["gaps"])
    return {
        "frames": len(gaps),
        "frames per second": len(gaps) / SECONDS,
        "longest gap, ms": gaps[-1],
        "99 % of gaps below, ms": gaps[int(0.99 * len(gaps))],
        "dropped": sum(gap > LATE for gap in gaps),
        "tasks over 50 ms": len(seen["long"]),
        "processor time of the page's thread per update, ms": busy,
    }


async def _busy(page: Page) -> float:
    """Seconds of processor time that the page's main thread has had: it does not count others on the machine."""
    told = (await page.send("Performance.getMetrics"))["metrics"]
    return next(float(each["value"]) for each in told if each["name"] == "TaskDuration")


async def _updates(server: StandIn, page: Page, count: int, first: int) -> None:
    loop = asyncio.get_running_loop()
    begun = loop.time()
    for number in range(count):
        at = 100.0 + first + number
        server.say("run", "moment", **moment(at, ROLES))
        server.say("run", "lanes", **second(at, ROLES, parts=8))
        row = {"reward/mean": random.random(), "loss": random.random(), "timing/step": 1.0, "timing/elapsed": at}
        server.say("run", "rows", rows=[{"step": 41 + first + number, **row}])
        await asyncio.sleep(max(0.0, begun + number + 1 - loop.time()))


async def measure() -> None:
    """Print both."""
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        report = write_report(long_run(place / "long"))
        server = StandIn({"long": place / "long"})
        async with Browser() as browser:
            async with server.serving() as url:
                for name, where in (("report.html from a file", report.as_uri()), ("rlinf watch's page", url)):
                    told = await first_paint(browser, where)
                    print(f"{name}: first paint {told['paint']:.0f} ms, curves {told['curve']:.0f} ms")
            for name, value in (await frames(browser, place)).items():
                print(f"{ROLES} roles, {SECONDS} s: {name} {value:.4g}")


# Pictures -------------------------------------------------------------------------------------------------------------

_ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}


async def started(*arguments: str) -> asyncio.subprocess.Process:
    """A command of ours."""
    command = (sys.executable, "-m", "rlinf", *arguments)
    return await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, env=_ENVIRONMENT)


async def watched(directory: Path) -> tuple[asyncio.subprocess.Process, str]:
    """`rlinf watch` of a directory, and its address."""
    watcher = await started("watch", str(directory), "--port", "0")
    assert watcher.stdout is not None
    async for line in watcher.stdout:
        if b"http://" in line:
            return watcher, next(word for word in line.decode().split() if word.startswith("http://"))
    raise RuntimeError("rlinf watch ended without an address")


def small(png: bytes) -> bytes:
    """A picture of few colours, as a page has them, in a third of its bytes."""
    file = io.BytesIO()
    Image.open(io.BytesIO(png)).convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE).save(
        file, "png", optimize=True
    )
    return file.getvalue()


async def shoot(page: Page, path: Path) -> None:
    """A picture, when what is to be drawn is drawn."""
    for _ in range(3):
        await page.drawn()
    data = await asyncio.to_thread(small, await page.picture())
    await asyncio.to_thread(path.write_bytes, data)
    print(f"{path}: {len(data) / 1000:.0f} kB")


async def screenshots(target: Path) -> None:
    """Take pictures of a text run while it learns and when it is over, of a policy's run; light, dark and narrow."""
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        async with Browser() as browser:
            run = place / "quickstart"
            (run / "checkpoints").mkdir(parents=True)
            text = ("quickstart", "steps=80", f"output_dir={place}", "metrics.token_rows=8", "evaluation.every=25")
            job = await started("train", "--config", *text)
            drained = asyncio.create_task(job.communicate())
            while not (run / "metrics.jsonl").is_file():
                if job.returncode is not None:
                    raise RuntimeError("the run ended before its first step")
                await asyncio.sleep(0.5)
            watcher, url = await watched(run)
            try:
                page = await browser.open(url, width=1440, height=1500)
                await page.until("/step [2-9]\\d /.test(document.querySelector('header').innerText)", 300)
                await page.until("document.querySelector('#minute:not([hidden]) canvas')?.width > 300", 60)
                await shoot(page, target / "live-page.png")
                await page.media(dark=True)
                await shoot(page, target / "live-page-dark.png")
                await page.media()
                await page.size(390, 1400)
                await shoot(page, target / "live-page-narrow.png")
                await page.size(1440, 1100)
                await drained
                await page.go(url)
                await page.until("document.querySelector('#answers .answer')", 60)
                await shoot(page, target / "finished-page.png")
                await page.eval("document.querySelector('#answers').scrollIntoView({behavior: 'instant'})")
                await shoot(page, target / "finished-page-answers.png")
            finally:
                watcher.terminate()
                await watcher.wait()
            policy = ("configs/embodied/toy.yaml", f"output_dir={place}", "trials.videos=4", "name=policy")
            await (await started("train", "--config", *policy)).communicate()
            page = await browser.open((place / "policy" / "report.html").as_uri(), width=1440, height=1100)
            await page.eval("document.querySelector('#episodes').scrollIntoView({behavior: 'instant'})")
            await shoot(page, target / "policy-page.png")


def main() -> None:
    """Measure, or take pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--screenshots", type=Path, metavar="DIR", help="take pictures instead, into this directory")
    options = parser.parse_args()
    asyncio.run(measure() if options.screenshots is None else screenshots(options.screenshots))


if __name__ == "__main__":
    main()
