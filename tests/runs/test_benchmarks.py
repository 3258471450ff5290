"""Benchmarks beside training and by `rlinf evaluate`: their metrics, and evaluations that go on where they ended."""

from __future__ import annotations

import json

import pytest

from tests.launching import QUICKSTART, ROOT, TINY, launch, metrics_of
from tests.stand_in import save_model, save_problems

pytestmark = pytest.mark.slow


def by_name(*arguments: str, expect: int = 0):
    return launch("evaluate", *arguments, program=ROOT / "rlinf" / "__main__.py", expect=expect)


def answers(path):
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return {(row["benchmark"], row["id"], row["index"]): row["text"] for row in rows}


def test_an_evaluation_that_ended_early_goes_on_and_comes_to_the_same(tmp_path):
    model, out = save_model(tmp_path / "model"), tmp_path / "answers.jsonl"
    problems = save_problems(tmp_path / "aime.jsonl", 30, prompt="problem")
    asked = (
        f"evaluation.named.aime24={{data: {problems}, samples: 2, max_new_tokens: 6}}",
        "--model", str(model), "--named", "aime24,aime25", "--output", str(out),
        f"evaluation.named.aime25={{data: {problems}, samples: 3, max_new_tokens: 3, temperature: 1.0, k: [2, 3]}}",
        "reward.workers=1", "reward.function=rlinf.rewards.math",
    )  # fmt: skip
    said = by_name(*asked).stdout
    whole, table = answers(out), said[said.index("┃") : said.rindex("┘")]
    assert all(f" {name} " in table for name in ("pass@2", "maj@2", "pass@3", "maj@3")), "as asked"
    assert len(whole) == 30 * 2 + 30 * 3
    lines = out.read_bytes()
    out.write_bytes(lines[: len(lines) * 2 // 5])  # somewhere within a line
    said = by_name(*asked).stdout
    assert answers(out) == whole
    assert said[said.index("┃") : said.rindex("┘")] == table
    done = by_name(*asked, "evaluation.named.aime24.temperature=0.9", expect=2)
    assert "its answers to aime24" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_benchmarks_are_evaluated_beside_the_problems_of_a_run(tmp_path):
    problems = tmp_path / "sorted.jsonl"
    problems.write_text("".join(json.dumps({"prompt": f"{n}>", "answer": str(n)}) + "\n" for n in (12, 2134, 1, 4)))
    entry = {"data": str(problems), "template": "{prompt}", "samples": 4, "temperature": 1.0, "k": [4]}
    entry |= {"reward": "rlinf.rewards.exact", "max_new_tokens": 4}
    launch("--config", QUICKSTART, *TINY, f"output_dir={tmp_path}", f"evaluation.named={json.dumps({'mine': entry})}")
    last = metrics_of(tmp_path / "quickstart")[-1]
    found = {name.removeprefix("evaluation/mine/") for name in last if name.startswith("evaluation/mine/")}
    assert found >= {"pass@1", "pass@1/stderr", "pass@1/stderr_problems", "pass@4", "maj@4", "truncated"}
    assert (last["evaluation/mine/problems"], last["evaluation/mine/samples"]) == (4, 4)
    assert "evaluation/accuracy" in last
    launch(
        "--config", QUICKSTART, *TINY, f"output_dir={tmp_path}", f"evaluation.named={json.dumps({'mine': entry})}",
        "steps=4", "--resume", "auto",
    )  # fmt: skip
    again = metrics_of(tmp_path / "quickstart")[-1]
    assert {name for name in again if name.startswith("evaluation/mine/")} == {
        f"evaluation/mine/{name}" for name in found
    }


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--model", "tests"), "name a --config whose problems are answered, or benchmarks by --named"),
        (("--model", "tests", "--named", "aime26"), "there is no benchmark of that name"),
    ],
)
def test_what_is_not_there_is_one_line(arguments, said):
    done = by_name(*arguments, expect=2)
    assert said in done.stderr
    assert "Traceback" not in done.stderr
