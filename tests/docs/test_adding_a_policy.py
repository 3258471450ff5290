"""docs/adding-a-policy.md says what is true: its code runs."""

import re
from pathlib import Path

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "adding-a-policy.md").read_text(encoding="utf-8")


def test_the_code_on_the_page_runs():
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) >= 5
    exec(compile("\n".join(blocks), "docs/adding-a-policy.md", "exec"), {"__name__": "page"})
