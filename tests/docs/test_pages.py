"""The pages in docs/ are true: their Python blocks run, in order, as one program per page."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMES = (
    "runtime", "data-and-rewards", "own-loop", "library", "train", "roles", "sft", "preferences", "sandbox", "tools",
    "flow-policies", "demonstrations", "vla", "environments",
)  # fmt: skip
PAGES = [ROOT / "docs" / f"{name}.md" for name in NAMES]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_blocks_of_a_page_run_in_order(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "__docs__"}
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S)
    assert blocks
    for block in blocks:
        exec(compile(block, str(page), "exec"), namespace)
