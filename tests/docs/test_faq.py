"""The lines that the page quotes are lines of ours."""

import ast
import re

import pytest

from tests.launching import ROOT

PAGE = (ROOT / "docs" / "faq.md").read_text(encoding="utf-8").partition("## What can go wrong")[2]
ROWS = [row.split(" | ") for row in PAGE.splitlines() if row.startswith("| ") and not row.startswith("| what is seen")]
QUOTES = [quote for row in ROWS for quote in re.findall(r"`([^`]+ [^`]+)`", row[1])]
HOLE = "\0"


def _text(node: ast.AST) -> str:
    """A string of the source as it is printed, with holes where values stand."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(each) if isinstance(each, ast.Constant) else HOLE for each in node.values)
    return HOLE


@pytest.fixture(scope="module")
def texts():
    files = [*(ROOT / "rlinf").rglob("*.py")]
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in files]
    kinds = (ast.Constant, ast.JoinedStr)
    return "\n".join({_text(node) for tree in trees for node in ast.walk(tree) if isinstance(node, kinds)})


@pytest.mark.parametrize("quote", QUOTES)
def test_a_line_of_the_page_is_one_that_we_print(quote, texts):
    for part in re.split(r"…|\.\.\.", quote):
        fixed = part.strip(" .:,;")
        if len(fixed) > 3:
            assert fixed in texts, fixed
