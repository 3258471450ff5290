"""report.html stands by itself, and carries what a model wrote as data alone. `page/` opens it in a browser."""

from __future__ import annotations

import json
import math
import os
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from rlinf.dashboard.report import _PAGE, SCRIPTS, STYLES, live_page, write_report
from rlinf.dashboard.state import MOST_POINTS, MOST_TEXT, read_run
from rlinf.storage.files import read_lines
from tests.config.test_reading import BOMB
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


def state_in(directory: Path) -> dict:
    page = write_report(directory).read_text(encoding="utf-8")
    (state,) = json.loads(page.partition('id="state">')[2].partition("</script>")[0])["runs"]
    return state


def facts_of(directory: Path) -> dict:
    return {fact["label"]: fact for fact in state_in(directory)["facts"]}


def test_it_names_the_algorithm_and_the_best_evaluation_where_one_was_asked_for(tmp_path):
    run = run_directory(tmp_path / "run", steps=4)
    assert "Best" not in facts_of(run)
    asked = "algorithm: {name: dapo}\nflow: null\nmodel: {path: null, config: {model_type: qwen2}}\n"
    (run / "resolved.yaml").write_text(f"steps: 4\n{asked}checkpoint: {{best: evaluation/accuracy}}\n")
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 2, "evaluation/accuracy": 0.875, "timing/step": 1.0}) + "\n")
    best = facts_of(run)["Best"]
    assert (best["value"], best["note"]) == ("0.875", "evaluation/accuracy, after step 2; in checkpoints/best")
    assert state_in(run)["about"][:2] == ["dapo", "a new qwen2"]


def test_a_mean_reward_that_is_no_share_is_not_told_in_points(tmp_path):
    run = run_directory(tmp_path / "run", steps=4)
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 5, "evaluation/accuracy": -1.25, "evaluation/graded": 0.5}) + "\n")
    fact = facts_of(run)["Held-out reward"]
    assert (fact["before"], fact["value"]) == ("0.250", "-1.250")
    assert fact["note"].startswith("-1.500 on ")


def test_it_shows_how_far_from_the_possible_a_step_was_if_the_run_tells(tmp_path):
    assert state_in(run_directory(tmp_path / "old"))["possible"] == {}
    directory = run_directory(tmp_path / "new")
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    bound = {"bound/seconds": 0.3, "bound/area": 0.3, "bound/devices": 2.0, "bound/efficiency": 0.6}
    lost = {"lost/imbalance": 0.15, "lost/overhead": 0.05}
    text = "".join(json.dumps(row | bound | lost if row["step"] else row) + "\n" for row in rows)
    (directory / "metrics.jsonl").write_text(text)
    possible = state_in(directory)["possible"]
    assert (round(possible["efficiency"], 6), possible["devices"]) == (0.6, 2)
    seconds = {name: round(seconds, 6) for name, seconds, _ in possible["parts"] if seconds}
    assert seconds == {"the least possible": 0.3, "imbalance": 0.15, "overhead": 0.05}


def test_nothing_in_it_comes_from_or_leads_outside(tmp_path):
    directory = run_directory(tmp_path / "run", hostile=HOSTILE)
    page = page_of(directory)
    for tag, attributes in page.tags:
        if (tag, attributes.get("href")) == ("link", "data:,"):
            continue  # no icon, so that none is asked for
        assert tag not in ("link", "iframe", "img", "object", "base", "a"), tag
        assert not {"src", "href", "onerror", "onload", "onclick", "style"} & attributes.keys(), (tag, attributes)
    assert "url(" not in (directory / "report.html").read_text(encoding="utf-8")
    (policy,) = [at["content"] or "" for tag, at in page.tags if at.get("http-equiv") == "Content-Security-Policy"]
    assert policy.startswith("default-src 'none'")
    assert "connect-src 'none'" in policy
    assert "unsafe" not in policy
    assert "connect-src 'self'" in live_page()[1]


def test_what_a_model_wrote_is_data_and_nothing_else(tmp_path):
    directory = run_directory(tmp_path / "run", hostile=HOSTILE)
    harmless, hostile = page_of(run_directory(tmp_path / "harmless")), page_of(directory)
    assert [tag for tag, _ in hostile.tags] == [tag for tag, _ in harmless.tags], "no element more than without it"
    text = (directory / "report.html").read_text(encoding="utf-8")
    assert HOSTILE not in text
    assert re.findall(r"<script[^>]*>", text) == ['<script type="application/json" id="state">', "<script>"]
    assert HOSTILE in json.dumps(state_in(directory), ensure_ascii=False).replace('\\"', '"'), "and it is all there"


def test_the_scripts_make_no_element_out_of_text_and_stay_small():
    for name in (*(f"{name}.js" for name in SCRIPTS), *(f"{name}.css" for name in STYLES)):
        text = (_PAGE / name).read_text(encoding="utf-8")
        assert len(text.splitlines()) <= 400, name
        for word in (
            "innerHTML",
            "outerHTML",
            "insertAdjacent",
            "document.write",
            "eval(",
            "new Function",
            'setTimeout("',
        ):
            assert word not in text, (name, word)
    assert {path.stem for path in _PAGE.iterdir()} == {*SCRIPTS, *STYLES}


def test_a_run_that_has_just_begun_or_crashed_has_a_page_too(tmp_path):
    directory = tmp_path / "begun"
    directory.mkdir()
    (directory / "metrics.jsonl").write_text("")
    assert state_in(directory)["curves"]["steps"] == []
    (directory / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n{"step": 2, "rew')
    (directory / "resolved.yaml").write_text("{broken: [")
    state = state_in(directory)
    assert (state["config_text"], state["step"]) == ("{broken: [", 1)


def test_what_is_no_run_is_told(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"run's directory:"):
        write_report(tmp_path)


def test_a_long_run_with_long_answers_makes_a_small_page(tmp_path):
    directory = run_directory(tmp_path / "run", steps=5000)
    with (directory / "samples.jsonl").open("a") as file:
        file.writelines(json.dumps(answer(step, "p" * 50_000, "é" * 50_000, 1.0)) + "\n" for step in (1, 2500, 5000))
    assert write_report(directory).stat().st_size < 1_000_000
    run = read_run(directory)
    assert all(len(str(row["response"])) < MOST_TEXT + 50 for rows in run.answers.values() for row in rows)
    drawn = run.metrics.curves(MOST_POINTS)
    assert len(drawn["steps"]) == MOST_POINTS
    assert drawn["steps"][-1] == 5000
    assert sum(drawn["metrics"]["loss"]) / MOST_POINTS == pytest.approx(
        sum(run.values("loss")) / len(run.values("loss")), abs=1e-4
    )


def test_of_a_step_that_was_taken_twice_the_second_counts(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 1}\n{"step": 2, "loss": 2}\n{"step": 2, "loss": 3}\n')
    assert read_run(tmp_path).values("loss") == [1, 3]


def test_an_evaluation_that_somebody_asked_for_is_joined_to_its_step(tmp_path):
    lines = [{"step": 1, "loss": 1}, {"step": 1, "evaluation/accuracy": 0.5}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert list(read_run(tmp_path).metrics) == [{"step": 1, "loss": 1, "evaluation/accuracy": 0.5}]


# A directory of somebody else ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["samples.jsonl", "resolved.yaml", "environment.json", "explained.jsonl", "alarms.jsonl"]
)
@pytest.mark.parametrize("kind", ["pipe", "device", "link"])
def test_what_is_no_file_of_the_run_itself_is_not_read(tmp_path, name, kind):
    (tmp_path / "secret").write_text(
        '{"step": 1, "prompt": "of another file", "response": "", "text": "of another file"}\n'
    )
    directory = run_directory(tmp_path / "run")
    (directory / name).unlink(missing_ok=True)
    match kind:
        case "pipe":
            os.mkfifo(directory / name)
        case "device":
            (directory / name).symlink_to("/dev/zero")
        case "link":
            (directory / name).symlink_to(tmp_path / "secret")
    assert "of another file" not in write_report(directory).read_text()


def test_aliases_that_stand_for_more_than_memory_holds_are_shown_as_they_are(tmp_path):
    directory = run_directory(tmp_path)
    (directory / "resolved.yaml").write_text(BOMB)
    assert read_run(directory).config == {}


@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl", "ledger.jsonl"])
def test_a_line_that_is_nested_too_deeply_is_left_out(tmp_path, name):
    directory = run_directory(tmp_path)
    with (directory / name).open("a") as file:
        file.write("[" * 100_000 + "\n")
    assert read_run(directory).steps == 40
    assert all(isinstance(row, dict) for row in read_lines(directory / name))


def test_a_link_in_place_of_the_report_is_replaced_and_not_written_through(tmp_path):
    (tmp_path / "precious").write_text("mine")
    directory = run_directory(tmp_path / "run")
    for name in (".report.html.partial", "report.html"):
        (directory / name).symlink_to(tmp_path / "precious")
    assert not write_report(directory).is_symlink()
    assert (tmp_path / "precious").read_text() == "mine"
