import pytest

from rlinf.dashboard import runs


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch):
    """Files are looked at often, so that a test waits for what it is about alone."""
    monkeypatch.setattr(runs, "TICK", 0.01)
    monkeypatch.setattr(runs, "SEARCH", 1)
