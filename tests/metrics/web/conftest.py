import pytest

from rlinf.metrics.web import shelf


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch):
    """Files are looked at often, so that a test waits for what it is about alone."""
    monkeypatch.setattr(shelf, "TICK", 0.01)
    monkeypatch.setattr(shelf, "SEARCH", 1)
