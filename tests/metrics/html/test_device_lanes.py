"""Lanes of devices: work, moves, leases and idleness of each, read off a trace; and several traces as one plain SVG."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from docs.pictures.make import MODES, run
from rlinf.dashboard.lanes import HELD, LOADING, PARKING, Lanes, device_lanes
from rlinf.dashboard.lanes_svg import MOST_LANES, device_lanes_svg
from rlinf.runtime.base.clock import run_virtual
from tests.spans import call, lease, move, step, wait, wait_for_lease, write_trace

SVG = "{http://www.w3.org/2000/svg}"
STEP = [step(1, 0.0, 1.0), step(2, 1.0, 11.0)]
TURNS = [
    call("rollout[0]", "generate", 1.0, 5.0),
    lease("rollout[0]", "generate", 1.0, 6.0),
    move("rollout[0]", "offload", 6.0, 7.0),
    move("trainer[0]", "onload", 7.0, 8.0),
    call("trainer[0]", "train", 1.5, 10.0),
    wait("trainer[0]", "train", "rollout.generate", 1.5, 6.0),
    wait_for_lease("trainer[0]", "train", 6.0, 8.0),
    lease("trainer[0]", "train", 8.0, 10.0),
    call("rollout[0]", "load", 10.5, 11.0),
]
"""On one device in turns, in the second step."""


def traced(path, *hosts):
    write_trace(path, hosts)
    return path


def drawn(text, *names):
    """The bars of some roles, as (class or fill, x, width)."""
    bars = [
        (rect.attrib.get("class", rect.attrib.get("fill")), float(rect.attrib["x"]), float(rect.attrib["width"]))
        for rect in ET.fromstring(text).iter(SVG + "rect")
        if (tip := rect.find(SVG + "title")) is not None and tip.text.startswith(names)
    ]
    assert bars, names
    return bars


def test_a_device_shows_work_moves_and_leases_of_its_roles(tmp_path):
    read = device_lanes(traced(tmp_path / "t.json", STEP + TURNS), 2)
    (lane,) = read.lanes
    assert (read.title, read.step, read.seconds) == ("t", 2, 10.0)
    assert [(use.name, use.activity, use.start, use.end) for use in lane.work] == [
        ("rollout", "generation", 0.0, 4.0),
        ("trainer", "training", 7.0, 9.0),
        ("rollout", "sync", 9.5, 10.0),
    ]
    assert [(use.name, use.activity, use.start, use.end) for use in lane.of(LOADING, PARKING)] == [
        ("rollout", "parking", 5.0, 6.0),
        ("trainer", "loading", 6.0, 7.0),
    ]
    assert [(use.name, use.start, use.end) for use in lane.of(HELD)] == [("rollout", 0.0, 5.0), ("trainer", 7.0, 9.0)]
    assert set(lane.rows().values()) == {0}
    assert (lane.busy, read.busy) == (6.5, 0.65)
    ((host, shares),) = read.shares()
    assert host == 0
    assert shares == pytest.approx({"rollout": 0.45, "trainer": 0.2, "moves": 0.2, "idle": 0.15})


def test_roles_that_work_at_once_on_a_device_lie_below_each_other(tmp_path):
    beside = [call("judge[0]", "score", 2.0, 4.0)]
    (lane,) = device_lanes(traced(tmp_path / "t.json", STEP + TURNS + beside), 2).lanes
    assert lane.rows() == {"rollout": 0, "judge": 1, "trainer": 0}
    assert lane.busy == 6.5, "time in which two work counts once"


def test_a_device_that_did_nothing_in_the_step_is_shown_as_idle(tmp_path):
    path = traced(tmp_path / "t.json", STEP + TURNS, [call("judge[0]", "score", 0.1, 0.5)])
    read = device_lanes(path, 2)
    assert [(lane.host, lane.work) for lane in read.lanes][1] == (1, [])
    assert read.shares()[1] == (1, {"moves": 0.0, "idle": 1.0})
    assert "host 1" in device_lanes_svg([read])


def test_without_a_wish_the_step_in_the_middle_is_taken(tmp_path):
    spans = [step(number, float(number), number + 1.0) for number in range(1, 10)]
    assert device_lanes(traced(tmp_path / "t.json", spans)).step == 5
    whole = device_lanes(tmp_path / "t.json", whole=True)
    assert (whole.step, whole.seconds) == (None, 9.0)


def test_a_run_is_called_by_its_directory_and_found_by_it(tmp_path):
    (tmp_path / "collocated").mkdir()
    traced(tmp_path / "collocated" / "trace.json", STEP + TURNS)
    assert device_lanes(tmp_path / "collocated").title == "collocated"


def test_traces_lie_side_by_side_on_one_time_scale(tmp_path):
    slow = [span._replace(start=2 * span.start, end=2 * span.end) for span in STEP + TURNS]
    paths = traced(tmp_path / "fast.json", STEP + TURNS), traced(tmp_path / "slow.json", slow)
    text = device_lanes_svg([device_lanes(path, 2) for path in paths])
    (_, left, narrow), (_, right, wide) = drawn(text, "rollout: generation")
    assert wide == pytest.approx(2 * narrow, abs=0.2)
    assert right > left + 2 * narrow
    assert drawn(text, "trainer: training")[0][0] != drawn(text, "rollout: generation")[0][0]
    assert {kind for kind, _, _ in drawn(text, "rollout: parking", "trainer: loading")} == {"url(#stripes)"}
    words = [element.text for element in ET.fromstring(text).iter(SVG + "text")]
    assert {"fast", "slow", "device 0", "step 2: 10 s, devices busy 65%", "idle"} <= set(words)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_picture_is_plain_svg_and_holds_all_it_draws(tmp_path, count):
    path = traced(tmp_path / "<b>&.json", STEP + TURNS, [call("<i>[0]", "<u>", 1.2, 3.0)])
    text = device_lanes_svg([device_lanes(path, 2)] * count)
    root = ET.fromstring(text)
    assert {element.tag for element in root.iter()} <= {
        SVG + name for name in ("svg", "title", "style", "defs", "pattern", "rect", "text", "line")
    }
    assert "prefers-color-scheme:dark" in text
    assert "http" not in text.replace('xmlns="http://www.w3.org/2000/svg"', "")
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    for shape in root.iter(SVG + "rect"):
        if "x" in shape.attrib:
            assert 0 <= float(shape.attrib["x"]) <= float(shape.attrib["x"]) + float(shape.attrib["width"]) <= width
    assert all(
        0 < float(word.attrib["y"]) < height and float(word.attrib["x"]) < width for word in root.iter(SVG + "text")
    )


def test_two_roles_of_one_activity_have_colours_of_their_own(tmp_path):
    spans = [*STEP, *(call(f"{name}[0]", "score", 1.0 + n, 2.0 + n) for n, name in enumerate("abcdefgh"))]
    text = device_lanes_svg([device_lanes(traced(tmp_path / "t.json", spans), 2)])
    assert len({drawn(text, f"{name}: scoring")[0][0] for name in "abcdefgh"}) == 8


def test_a_picture_stays_small_however_much_happened(tmp_path):
    spans = [step(1, 0.0, 1.0)]
    for number in range(5_000):
        at = number / 5_000
        spans.append(call("judge[0]", "score", at, at + 2e-5))
        spans.append(lease("judge[0]", "score", at, at + 3e-5))
    hosts = [spans] + [[call("judge[1]", "score", 0.1, 0.2)]] * (MOST_LANES + 4)
    text = device_lanes_svg([device_lanes(traced(tmp_path / "t.json", *hosts))])
    assert len(text) < 60_000
    assert "and 5 more" in text


def test_a_step_that_took_no_time_is_drawn(tmp_path):
    path = traced(tmp_path / "t.json", [step(1, 1.0, 1.0), call("a[0]", "work", 1.0, 1.0)])
    ET.fromstring(device_lanes_svg([device_lanes(path)]))


@pytest.fixture(scope="module")
def modes(tmp_path_factory) -> dict[str, Lanes]:
    """What the three runs of the picture in the documentation did."""
    read = {}
    for mode, places in MODES.items():
        path = tmp_path_factory.mktemp("modes") / f"{mode}.json"
        run_virtual(run(places, path))
        read[mode] = device_lanes(path)
    return read


def test_the_documentations_picture_shows_what_its_modes_are(modes):
    """Collocated, every device serves every role; disaggregated, each serves one, and nobody moves."""
    roles = {mode: [{use.name for use in lane.work} for lane in read.lanes] for mode, read in modes.items()}
    assert roles["collocated"] == [{"rollout", "judge", "trainer"}] * 4
    assert roles["disaggregated"] == [{"rollout"}, {"rollout"}, {"judge"}, {"trainer"}]
    assert not any(lane.of(LOADING, PARKING) for lane in modes["disaggregated"].lanes)
    assert all(lane.of(LOADING, PARKING) for lane in modes["collocated"].lanes)
    for read in modes.values():
        for lane in read.lanes:
            assert set(lane.rows().values()) == {0}, "no two roles compute on one device at once"
