"""The package stays in order: one idea a file, one name for a thing. Its ceilings only fall: see `benchmarks.house`."""

import ast
from pathlib import Path

import pytest

from benchmarks.house import look, observation_files, prompt_files
from tests.launching import ROOT

PACKAGE = ROOT / "rlinf"
MOST_LINES_ABOUT_A_FOLDER = 6
MOST_MODULES = 16
FOLDERS = sorted(path.parent for path in PACKAGE.rglob("__init__.py"))


def name(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


@pytest.fixture(scope="module")
def house():
    """The package as it is, read when a test asks: all workers collect this file, and one runs it."""
    return look()


@pytest.mark.parametrize(
    ("count", "ceiling"),
    [
        pytest.param(lambda house: house.code.total(), 92_864, id="lines of code"),
        pytest.param(lambda house: len(house.code), 485, id="files"),
        pytest.param(lambda house: house.import_share, 0.08, id="share of lines that import"),
        pytest.param(lambda house: len(house.small_modules), 24, id="small modules with one importer"),
        pytest.param(lambda house: len(house.lone_bases), 3, id="base classes with one subclass, in another file"),
        pytest.param(lambda house: len(house.signatures), 5, id="signatures above eight parameters"),
        pytest.param(lambda house: len(house.long_functions), 0, id="functions above sixty lines"),
        pytest.param(lambda house: len(house.riddles), 7, id="docstrings that say nothing at their beginning"),
        pytest.param(lambda house: len(house.participles), 30, id="names that are bare participles"),
        pytest.param(lambda house: house.unformatted, 8, id="places kept from the formatter"),
    ],
)
def test_what_makes_the_package_hard_to_read_only_falls(house, count, ceiling):
    assert count(house) <= ceiling


def test_a_long_file_says_why_it_is_one_idea(house):
    assert {path: lines for path, lines in house.code.items() if lines > 700} == {}


def test_no_folder_holds_more_modules_than_a_person_remembers():
    counts = {name(folder): len([*folder.glob("*.py")]) - 1 for folder in FOLDERS}
    too_many = {folder: count for folder, count in counts.items() if count > MOST_MODULES}
    assert {folder: count for folder, count in too_many.items() if folder != "flows" or count > 20} == {}  # a catalogue


@pytest.mark.parametrize(("files", "ceiling"), [(prompt_files, 37), (observation_files, 27)])
def test_what_one_step_enters_can_be_read_in_an_afternoon(files, ceiling):
    assert sum(map(len, files().values())) <= ceiling


def test_every_module_lies_in_a_folder():
    assert {path.name for path in PACKAGE.glob("*.py")} == {"__init__.py", "__main__.py"}
    assert [path for path in PACKAGE.rglob("*.py") if path.parent not in FOLDERS] == []


@pytest.mark.parametrize("folder", FOLDERS, ids=name)
def test_a_folder_says_in_a_few_lines_what_it_is_for(folder):
    text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8")))
    assert text, "write what lives here, and what may not"
    assert len(text.splitlines()) <= MOST_LINES_ABOUT_A_FOLDER
