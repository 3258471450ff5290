"""The package stays in order: small modules, small folders, and a line or three on what each folder is for."""

import ast
from pathlib import Path

import pytest

from tests.launching import ROOT

PACKAGE = ROOT / "rlinf"
MOST_LINES, MOST_MODULES, MOST_LINES_ABOUT_A_FOLDER = 1400, 20, 6
"""A file holds one idea. The limits are wide, since narrow ones cut one object into several files."""
FOLDERS = sorted(path.parent for path in PACKAGE.rglob("__init__.py"))


def name(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def test_no_module_is_longer_than_a_person_reads_at_once():
    lines = {name(path): len(path.read_text(encoding="utf-8").splitlines()) for path in PACKAGE.rglob("*.py")}
    assert {module: count for module, count in lines.items() if count > MOST_LINES} == {}


def test_no_folder_holds_more_modules_than_a_person_remembers():
    counts = {name(folder): len([*folder.glob("*.py")]) - 1 for folder in FOLDERS}
    assert {folder: count for folder, count in counts.items() if count > MOST_MODULES} == {}


def test_every_module_lies_in_a_folder():
    assert {path.name for path in PACKAGE.glob("*.py")} == {"__init__.py", "__main__.py"}
    assert [path for path in PACKAGE.rglob("*.py") if path.parent not in FOLDERS] == []


@pytest.mark.parametrize("folder", FOLDERS, ids=name)
def test_a_folder_says_in_a_few_lines_what_it_is_for(folder):
    said = ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8")))
    assert said, "write what lives here, and what may not"
    assert len(said.splitlines()) <= MOST_LINES_ABOUT_A_FOLDER
