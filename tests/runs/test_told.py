"""What a run says of its data: which columns it took, and what was left out."""

from __future__ import annotations

import json
import re

import pytest

from tests.launching import QUICKSTART, ROOT, TINY, launch, metrics_of
from tests.stand_in import save_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_columns_and_prompts_that_are_too_long_are_told_on_the_console_and_in_the_report(tmp_path):
    model, train = save_model(tmp_path / "model"), tmp_path / "train.jsonl"
    rows = [{"the text": "so " * (30 if n % 4 == 0 else 1) + str(n), "solution": str(n)} for n in range(16)]
    train.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = launch(
        "--config", str(ROOT / QUICKSTART), *TINY, "sft.steps=0", f"model.path={model}", f"data.train={train}",
        "data.template='{the text} ='", "data.max_prompt_tokens=25", "evaluation.every=0", f"output_dir={tmp_path}",
    )  # fmt: skip
    lines, run = done.stdout.splitlines(), tmp_path / "quickstart"
    assert f"quickstart: {train}: 16 rows; prompt from the text, answer from solution" in lines
    dropped = [int(line.get("data/dropped", 0)) for line in metrics_of(run)]
    assert dropped[-1] >= 3, "12 of 16 are drawn of which 4 are too long"
    first = next(step for step, count in enumerate(dropped, 1) if count)
    told = r"prompts? longer than data\.max_prompt_tokens=25 (was|were) left out"
    assert any(re.fullmatch(rf"step {first}: so far, {dropped[first - 1]} {told}", line) for line in lines)
    assert any(re.fullmatch(rf"{dropped[-1]} {told}", line) for line in lines)
    report = (run / "report.html").read_text()
    assert f'"label":"Prompts too long","value":"{dropped[-1]}"' in report
    assert "16 rows; prompt from the text, answer from solution" in report
