import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf.storage import reading
from rlinf.storage.reading import MetricRows

VALUES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.just(10**400)
    | st.floats(-1e12, 1e12)
    | st.text(max_size=3)
)
ROWS = st.lists(
    st.fixed_dictionaries({"step": st.integers(0, 12)}, optional={"a": VALUES, "b/c": VALUES, "d": st.just([1, 2])}),
    max_size=20,
)


def is_number(value):
    return isinstance(value, int | float) and abs(value) < 1e300


def expected(rows):
    """What the rows of each step say together, numbers alone; the last word counts."""
    found = {}
    for row in rows:
        numbers = {name: value for name, value in row.items() if is_number(value)}
        found[row["step"]] = found.get(row["step"], {}) | numbers
    return [found[step] for step in sorted(found)]


@settings(max_examples=80, deadline=None)
@given(rows=ROWS, cut=st.integers(0, 20))
def test_rows_come_back_by_step_with_their_numbers_those_of_one_step_as_one(rows, cut):
    table = MetricRows(rows[:cut])
    table.add(rows[cut:])
    assert list(table) == expected(rows)
    assert [table[-1 - place] for place in range(len(table))] == expected(rows)[::-1]
    for name in ("a", "b/c", "d"):
        assert table.values(name, after=-1) == [row[name] for row in expected(rows) if name in row]
    assert table.names == sorted({name for row in expected(rows) for name in row} - {"step"})
    assert table.after(5) == [row for row in expected(rows) if row["step"] > 5]
    assert table.values("a", after=5) == [row["a"] for row in expected(rows) if row["step"] > 5 and "a" in row]


def test_a_row_without_a_step_is_left_out():
    assert list(MetricRows([{"a": 1.0}, {"step": "2", "a": 1.0}, {"step": True}])) == []


def test_a_place_that_is_not_there_is_an_error():
    with pytest.raises(IndexError):
        MetricRows([{"step": 1}])[1]


@settings(max_examples=50, deadline=None)
@given(
    values=st.lists(st.none() | st.floats(-1e9, 1e9).map(lambda value: float(f"{value:.4g}")), min_size=1, max_size=40),
    most=st.integers(1, 12),
)
def test_a_point_of_a_curve_is_the_mean_over_its_part_of_the_steps(values, most):
    drawn = MetricRows({"step": step, "m": value} for step, value in enumerate(values)).curves(most)
    count = min(most, len(values))
    bounds = [len(values) * part // count for part in range(count + 1)]
    assert drawn["steps"] == [bound - 1 for bound in bounds[1:]]
    for part, point in enumerate(drawn["metrics"].get("m", [None] * count)):
        known = [value for value in values[bounds[part] : bounds[part + 1]] if value is not None]
        assert (point is None) == (not known)
        if known:
            assert point == pytest.approx(statistics.fmean(known), rel=1e-4, abs=1e-4 * max(map(abs, known)))


def test_points_have_as_many_digits_as_a_chart_can_show():
    values = [123456.789, 0.000123456789, -9.99999e-7, 1e300, 1e-300, 0.0, 2 / 3]
    drawn = MetricRows({"step": step, "m": value} for step, value in enumerate(values)).curves(800)
    assert drawn["metrics"]["m"] == [123460.0, 0.00012346, -1e-06, 1e300, 1e-300, 0.0, 0.66667]


def test_time_goes_by_the_clock_of_the_run_or_by_the_length_of_its_steps():
    timed = [{"step": step, "timing/step": 2.0} for step in (1, 2, 3)]
    assert MetricRows(timed).curves(800)["elapsed"] == [2.0, 4.0, 6.0]
    timed[1]["timing/elapsed"] = 9.0
    assert MetricRows(timed).curves(800)["elapsed"] == [2.0, 9.0, 6.0]


def test_environment_steps_are_told_where_every_point_has_them():
    counted = [{"step": 0, "a": 1.0}, {"step": 1, "env_steps/total": 64}, {"step": 2, "env_steps/total": 128}]
    assert MetricRows(counted).curves(800)["env_steps"] == [0, 64, 128]
    assert MetricRows([*counted, {"step": 3}]).curves(800)["env_steps"] is None
    assert MetricRows().curves(800) == {"steps": [], "elapsed": [], "env_steps": [], "metrics": {}}


def test_memory_is_bounded_neighbours_of_a_long_run_become_their_mean(monkeypatch):
    monkeypatch.setattr(reading, "MOST_ROWS", 8)
    table = MetricRows()
    for step in range(1, 10):
        table.add([{"step": step, "m": float(step), **({"rare": 1.0} if step == 4 else {})}])
    assert table.steps == [2, 4, 6, 8, 9]
    assert table.values("m") == [1.5, 3.5, 5.5, 7.5, 9.0]
    assert table.values("rare") == [1.0]
