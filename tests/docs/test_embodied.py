"""docs/embodied.md is true: the modules and pages that it names are there."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "embodied.md"


def test_what_the_page_refers_to_is_there():
    text = PAGE.read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", text)
    files = re.findall(r"(?:configs|rlinf)/[\w/]+\.(?:py|yaml)", text)
    modules = [f"rlinf/{name}" for name in re.findall(r"`((?:actors|envs)/[\w/]+\.py)`", text)]
    assert links
    assert modules
    missing = [name for name in links if not (PAGE.parent / name).is_file()]
    missing += [name for name in {*files, *modules} if not (PAGE.parent.parent / name).is_file()]
    assert not missing
