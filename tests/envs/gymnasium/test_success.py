"""A success entry that `info` never has is told of once, with what `info` has."""

import logging

import pytest

from rlinf.envs.gymnasium import SuccessEntry


def told(entry: SuccessEntry, infos: list[dict], caplog: pytest.LogCaptureFixture, episodes: int = 3) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(episodes):
            entry.begin()
            for info in infos:
                entry.of(info)
    return [record.getMessage() for record in caplog.records]


def test_a_misspelt_name_is_told_once_with_the_one_that_is_meant(caplog):
    infos = [{"is_success": True, "_is_success": True, "distance": 1.0}]
    (line,) = told(SuccessEntry("is_sucess"), infos, caplog)
    assert line.startswith("env.options.success=is_sucess: ")
    assert line.endswith("is_success?")


@pytest.mark.parametrize("name", ["solved", None])
def test_an_entry_that_comes_at_the_end_alone_or_one_that_nobody_named_is_nothing_to_tell_of(name, caplog):
    assert told(SuccessEntry(name), [{"distance": 1.0}, {"solved": True}], caplog) == []


def test_an_environment_without_any_info_is_told_of(caplog):
    (line,) = told(SuccessEntry("solved"), [{}], caplog)
    assert "it had nothing" in line


def test_the_first_of_the_usual_names_counts():
    entry = SuccessEntry(None)
    assert [entry.of(info) for info in ({"is_success": 0, "success": 1}, {"is_success": 0}, {})] == [1, 0, None]
