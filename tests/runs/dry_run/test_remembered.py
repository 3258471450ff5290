"""Trials of models: what was found once is not tried again, unless what it depends on has changed."""

from __future__ import annotations

import pytest

from rlinf.runs.dry_run import transformer
from rlinf.runs.dry_run.transformer import remembered


@pytest.fixture
def trials(monkeypatch, tmp_path):
    """Notes which trials were made, with an empty cache."""
    monkeypatch.setattr(transformer, "CACHE", tmp_path / "cache")
    made = []

    def trial(what, result=None):
        return remembered(what, lambda: made.append(what) or result)

    trial.made = made
    return trial


def test_what_was_found_is_not_tried_again(trials):
    assert [trials("a", [3, 1]), trials("b", None), trials("a", [3, 1]), trials("b")] == [[3, 1], None, [3, 1], None]
    assert trials.made == ["a", "b"]


def test_other_versions_or_other_code_are_tried_anew(trials, monkeypatch, tmp_path):
    trials("a")
    monkeypatch.setattr(transformer.torch, "__version__", "0")
    trials("a")
    engine = tmp_path / "engine.py"
    engine.write_text("")
    monkeypatch.setattr(transformer, "_ENGINE", engine)
    trials("a")
    trials("a")
    assert trials.made == ["a"] * 3


def test_what_failed_is_tried_again(trials):
    def fails():
        raise ValueError("heads do not divide")

    for _ in range(2):
        with pytest.raises(ValueError, match="heads"):
            remembered("a", fails)
    trials("a", 1)
    assert trials.made == ["a"]


def test_a_cache_that_cannot_be_written_or_read_is_none(trials, monkeypatch, tmp_path):
    trials("a", 1)
    (file,) = (tmp_path / "cache" / "trials").iterdir()
    file.write_text("{")
    assert trials("a", 1) == 1
    (tmp_path / "plain").write_text("")
    monkeypatch.setattr(transformer, "CACHE", tmp_path / "plain")
    assert [trials("a", 1), trials("a", 1)] == [1, 1]
    assert trials.made == ["a"] * 4
