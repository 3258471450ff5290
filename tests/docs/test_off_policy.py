"""docs/off-policy.md says what is true: its code runs, and learns."""

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "off-policy.md"


def test_the_code_on_the_page_runs():
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 3
    exec(compile("\n".join(blocks), str(PAGE), "exec"), {"__name__": "page"})
