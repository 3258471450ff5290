"""README.md and README.zh.md say the same: as many sections, the same code, the same links."""

import re

from tests.docs.snippets import ROOT, Block, blocks_of, without_blocks

ENGLISH, CHINESE = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "README.zh.md"))
LINK = re.compile(r"\]\(([^)\s]+)\)")


def levels(page: str) -> list[int]:
    return [len(marks) for marks in re.findall(r"^(#+) ", without_blocks(page), re.MULTILINE)]


def code(block: Block) -> tuple[str, str, bool]:
    """Its language, its lines without comments, whether it runs."""
    lines = (re.sub(r"\s*#.*", "", line) for line in block.text.splitlines())
    return block.language, "\n".join(lines), block.not_run is None


def items(page: str) -> list[int]:
    """How many rows of tables and items of lists each section has."""
    return [len(re.findall(r"^(?:\*|\|) ", part, re.MULTILINE)) for part in without_blocks(page).split("\n## ")]


def test_both_have_the_same_sections():
    assert levels(ENGLISH) == levels(CHINESE)
    assert items(ENGLISH) == items(CHINESE)


def test_both_have_the_same_code_but_for_its_comments():
    assert [code(block) for block in blocks_of(ENGLISH)] == [code(block) for block in blocks_of(CHINESE)]


def test_both_link_to_the_same_pages_and_to_each_other():
    english, chinese = LINK.findall(ENGLISH), LINK.findall(CHINESE)
    assert english[0] == "README.zh.md"
    assert chinese[0] == "README.md"
    assert sorted(english[1:]) == sorted(chinese[1:])
