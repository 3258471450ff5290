"""Loading a module is told when it begins and ends, and leaves no trace on the module."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import inspect
import sys
import threading

import pytest

from rlinf.rewards.base import ImportWatch

MODULES = {
    "told_outer.py": "import told_inner, told_package.part\nVALUE = told_inner.VALUE\n",
    "told_inner.py": "VALUE = 7\n",
    "told_package/__init__.py": "",
    "told_package/part.py": "from . import other\n",
    "told_package/other.py": "",
    "told_broken.py": "import told_inner\nraise RuntimeError('no')\n",
    "told_data/words.txt": "",
}


@pytest.fixture
def told(tmp_path, monkeypatch):
    """What a watch tells while modules of a directory are loaded."""
    for name, text in MODULES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    heard: list[bool] = []
    watch = ImportWatch(heard.append)
    yield heard
    sys.meta_path.remove(watch)
    for name in [name for name in sys.modules if name.startswith("told_")]:
        del sys.modules[name]


def test_the_outermost_load_is_told_once_and_what_is_there_is_not(told):
    import told_outer  # type: ignore[import-not-found]

    assert told == [True, False]
    assert told_outer.VALUE == 7
    import told_inner  # type: ignore[import-not-found]  # noqa: F401

    importlib.import_module("told_package.part")
    assert told == [True, False]


def test_a_load_that_fails_and_a_module_that_is_missing_leave_nothing_open(told):
    with pytest.raises(RuntimeError, match="no"):
        importlib.import_module("told_broken")
    assert told == [True, False]
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("told_nowhere")
    assert told == [True, False]


def test_looking_for_a_module_is_no_load(told):
    assert importlib.util.find_spec("told_inner").origin.endswith("told_inner.py")
    assert told == []
    importlib.import_module("told_inner")
    assert told == [True, False]


def test_a_directory_without_code_can_be_imported(told):
    assert list(importlib.import_module("told_data").__path__)
    assert told[::2] == [True] * (len(told) // 2)


def test_a_module_knows_its_own_loader(told):
    found = importlib.import_module("told_inner")
    assert type(found.__spec__.loader) is type(found.__loader__) is importlib.machinery.SourceFileLoader
    assert inspect.getsource(found) == MODULES["told_inner.py"]
    importlib.reload(found)
    assert told == [True, False, True, False]


def test_other_threads_say_nothing(told):
    thread = threading.Thread(target=importlib.import_module, args=("told_outer",))
    thread.start()
    thread.join()
    assert sys.modules["told_outer"].VALUE == 7
    assert told == []
