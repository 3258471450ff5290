"""report.html stands by itself, draws in a browser, and lets nothing that a model wrote do anything."""

from __future__ import annotations

import json
import math
import re
import shutil
import struct
import subprocess
import zlib
from html.parser import HTMLParser
from pathlib import Path

import pytest

from rlinf.metrics.html.report import write_report
from rlinf.metrics.html.run_data import MOST_POINTS, curves, read_run
from rlinf.metrics.html.state.samples import MOST_TEXT
from tests.spans import call, write_trace
from tests.spans import step as step_of

HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">&amp;\u2028"
"""What a model may write."""


def run_directory(path: Path, steps: int = 40, hostile: str = "") -> Path:
    """A run as `Recorder` leaves it, with made-up numbers."""
    path.mkdir(parents=True, exist_ok=True)
    metrics = [{"step": 0, "evaluation/accuracy": 0.25}]
    samples = [answer(0, f"{n}{hostile}>", "wrong" + hostile, 0.0, kind="held-out") for n in range(4)]
    for step in range(1, steps + 1):
        metrics.append(
            {
                "step": step, "reward/mean": step / steps, "loss": math.sin(step) / 100, "samples": 64.0,
                "tokens_per_s": 5000.0 + step, "timing/step": 0.5, "timing/elapsed": 10.0 + step * 0.6,
                "timing/generation": 0.2, "timing/training": 0.3, "timing/overlap": 0.1, "timing/other": 0.1,
                f"own{hostile}": float(step), "kl": None,
            }
        )  # fmt: skip
        samples += [
            answer(step, f"{n}>", f"answer {n} of step {step}{hostile}", n % 2, advantage=-0.5) for n in range(8)
        ]
    metrics[-1]["evaluation/accuracy"] = 0.75
    samples += [
        answer(steps, f"{n}{hostile}>", "right" if n else "wrong" + hostile, 1.0, kind="held-out") for n in range(4)
    ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics))
    (path / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in samples))
    (path / "resolved.yaml").write_text(f"name: sorting\nsteps: {steps}\nflow: rlinf.flows.grpo\n# {hostile!r}\n")
    (path / "environment.json").write_text(json.dumps({"hosts": 2, "python": "3.11", "command": f"launch {hostile}"}))
    write_trace(path / "trace.json", [spans(steps, f"rollout{hostile}[0]"), spans(0, "trainer[0]")])
    return path


def answer(step, prompt, response, reward, **more):
    return {
        "step": step,
        "prompt": prompt,
        "response": response,
        "answer": "right",
        "reward": reward,
        "length": 5,
        **more,
    }


def spans(steps: int, actor: str):
    method = "generate" if actor.startswith("rollout") else "train"
    flow = [step_of(number, number * 1.0, number + 0.5) for number in range(1, steps + 1)]
    return flow + [call(actor, method, number + 0.1, number + 0.3) for number in range(1, 41)]


class Page(HTMLParser):
    """What a browser would see in a page without running it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, data):
        self.text += data


def page_of(directory: Path) -> Page:
    return Page(write_report(directory).read_text(encoding="utf-8"))


def test_it_tells_how_the_run_went(tmp_path):
    page = page_of(run_directory(tmp_path / "run"))
    for told in (
        "sorting", "40 steps", "25.0% →", "75.0%", "+50.0 points", "0.950", "34 s", "5,020", "Step 2", "Step 40",
        "answer 3 of step 1", "answer 0 of step 40", "advantage -0.50",
        "(0.20 side by side), other 0.30",
    ):  # fmt: skip
        assert told in page.text, told
    assert len([tag for tag, at in page.tags if "data-metric" in at]) == 12
    assert "steps: 40" in page.text


def test_it_names_the_algorithm_and_the_best_evaluation_where_one_was_asked_for(tmp_path):
    run = run_directory(tmp_path / "run", steps=4)
    assert "Best" not in page_of(run).text
    asked = "algorithm: {name: dapo}\nflow: null\nmodel: {path: null, config: {model_type: qwen2}}\n"
    (run / "resolved.yaml").write_text(f"steps: 4\n{asked}checkpoint: {{best: evaluation/accuracy}}\n")
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 2, "evaluation/accuracy": 0.875, "timing/step": 1.0}) + "\n")
    text = page_of(run).text
    assert "0.875" in text
    assert "evaluation/accuracy, after step 2; in checkpoints/best" in text
    assert "dapo · a new qwen2" in text


def test_a_mean_reward_that_is_no_share_is_not_told_in_points(tmp_path):
    run = run_directory(tmp_path / "run", steps=4)
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 5, "evaluation/accuracy": -1.25, "evaluation/graded": 0.5}) + "\n")
    text = page_of(run).text
    for told in ("Held-out reward", "0.250 →", "-1.250", "-1.500 on held-out problems, after step 5"):
        assert told in text, told
    assert "points" not in text


def test_it_shows_how_far_from_the_possible_a_step_was_if_the_run_tells(tmp_path):
    assert "How far from the possible" not in Page(write_report(run_directory(tmp_path / "old")).read_text()).text
    directory = run_directory(tmp_path / "new")
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    bound = {"bound/seconds": 0.3, "bound/area": 0.3, "bound/devices": 2.0, "bound/efficiency": 0.6}
    lost = {"lost/imbalance": 0.15, "lost/overhead": 0.05}
    text = "".join(json.dumps(row | bound | lost if row["step"] else row) + "\n" for row in rows)
    (directory / "metrics.jsonl").write_text(text)
    page = write_report(directory).read_text()
    assert "60% of what is possible on 2 devices" in Page(page).text
    section = page[page.index("How far from the possible") :]
    bars = re.findall(r'<i class="(\w+)" style="margin-left:([\d.]+)%;width:([\d.]+)%">', section)
    assert {name: (float(start), float(width)) for name, start, width in bars if float(width)} == {
        "least": (0.0, 60.0),
        "imbalance": (60.0, 30.0),
        "overhead": (90.0, 10.0),
    }


def test_nothing_in_it_comes_from_or_leads_outside(tmp_path):
    directory = run_directory(tmp_path / "run", hostile=HOSTILE)
    page = page_of(directory)
    for tag, attributes in page.tags:
        assert tag not in ("link", "iframe", "img", "object", "base", "a"), tag
        assert not {"src", "href", "onerror", "onload", "onclick"} & attributes.keys(), (tag, attributes)
    assert "url(" not in (directory / "report.html").read_text(encoding="utf-8")
    (policy,) = [at["content"] or "" for tag, at in page.tags if at.get("http-equiv") == "Content-Security-Policy"]
    assert policy.startswith("default-src 'none'")
    assert "unsafe-inline" not in policy.partition("script-src")[2]


def test_what_a_model_wrote_is_text_and_nothing_else(tmp_path):
    directory = run_directory(tmp_path / "run", hostile=HOSTILE)
    harmless, hostile = page_of(run_directory(tmp_path / "harmless")), page_of(directory)
    assert [tag for tag, _ in hostile.tags] == [tag for tag, _ in harmless.tags], "no element more than without it"
    assert HOSTILE in hostile.text, "and it is shown as it was written"
    scripts = re.findall(r"<script[^>]*>", (directory / "report.html").read_text(encoding="utf-8"))
    assert scripts == ['<script type="application/json" id="numbers">', "<script>"]


def test_a_run_that_has_just_begun_or_crashed_has_a_page_too(tmp_path):
    directory = tmp_path / "begun"
    directory.mkdir()
    (directory / "metrics.jsonl").write_text("")
    assert "No step is over yet" in page_of(directory).text
    (directory / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n{"step": 2, "rew')
    (directory / "resolved.yaml").write_text("steps: 100\nname: crashed\n")
    page = page_of(directory)
    assert "1 of 100 steps" in page.text
    assert "crashed" in page.text
    (directory / "resolved.yaml").write_text("{broken: [")
    assert "{broken: [" in page_of(directory).text


def test_what_is_no_run_is_told(tmp_path):
    with pytest.raises(FileNotFoundError, match="no run's directory: it has no metrics"):
        write_report(tmp_path)


def test_a_long_run_with_long_answers_makes_a_small_page(tmp_path):
    directory = run_directory(tmp_path / "run", steps=5000)
    with (directory / "samples.jsonl").open("a") as file:
        file.writelines(json.dumps(answer(step, "p" * 50_000, "é" * 50_000, 1.0)) + "\n" for step in (1, 2500, 5000))
    assert write_report(directory).stat().st_size < 1_000_000
    run = read_run(directory)
    assert all(len(str(row["response"])) < MOST_TEXT + 50 for rows in run.answers.values() for row in rows)
    drawn = curves(run.rows)
    assert len(drawn["steps"]) == MOST_POINTS
    assert drawn["steps"][-1] == 5000
    whole = [row["reward/mean"] for row in run.rows]
    assert sum(drawn["metrics"]["reward/mean"]) / MOST_POINTS == pytest.approx(sum(whole) / len(whole), rel=1e-3)


def test_of_a_step_that_was_taken_twice_the_second_counts(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 1}\n{"step": 2, "loss": 2}\n{"step": 2, "loss": 3}\n')
    assert read_run(tmp_path).values("loss") == [1, 3]


def test_an_evaluation_that_somebody_asked_for_is_joined_to_its_step(tmp_path):
    lines = [{"step": 1, "loss": 1}, {"step": 1, "evaluation/accuracy": 0.5}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_run(tmp_path).rows == [{"step": 1, "loss": 1, "evaluation/accuracy": 0.5}]


# In a browser --------------------------------------------------------------------------------------------------------

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
in_browser = pytest.mark.skipif(
    BROWSER is None, reason="there is no Chromium on this machine: apt-get install chromium"
)


def browse(page: Path, *arguments: str) -> str:
    command = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", *arguments]
    more = [f"--user-data-dir={page.parent / 'profile'}", "--virtual-time-budget=2000", page.as_uri()]
    done = subprocess.run([*command, *more], capture_output=True, text=True, timeout=100, check=True)
    return done.stdout


def colours_of(png: Path) -> int:
    """How many different rows of pixels a PNG has, without a picture library: a blank one has but one."""
    data, at, packed = png.read_bytes(), 8, b""
    while at < len(data):
        (length,), kind = struct.unpack(">I", data[at : at + 4]), data[at + 4 : at + 8]
        if kind == b"IHDR":
            width, height, _, colour = struct.unpack(">IIBB", data[at + 8 : at + 18])
        packed += data[at + 8 : at + 8 + length] if kind == b"IDAT" else b""
        at += length + 12
    line = 1 + width * {2: 3, 6: 4}[colour]
    raw = zlib.decompress(packed)
    return len({raw[row * line : (row + 1) * line] for row in range(height)})


@in_browser
def test_a_browser_draws_every_curve_and_runs_no_script_of_a_model(tmp_path):
    page = write_report(run_directory(tmp_path / "run", hostile=HOSTILE))
    drawn = browse(page, "--dump-dom")
    assert len(re.findall(r'<path class="smooth" d="M[\d.]+ [\d.]+L', drawn)) == 12
    assert "NaN" not in re.sub(r"<script.*?</script>", "", drawn, flags=re.S)
    assert "<title>sorting: training report</title>" in drawn
    assert "owned" not in re.sub(r"<[^>]*>|document.title=[^;]*?owned", "", drawn)


@in_browser
def test_a_browser_shows_more_than_a_blank_page(tmp_path):
    page = write_report(run_directory(tmp_path / "run"))
    browse(page, f"--screenshot={tmp_path / 'page.png'}", "--window-size=1200,1600")
    assert colours_of(tmp_path / "page.png") > 200
