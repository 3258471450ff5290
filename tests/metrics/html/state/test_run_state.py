"""RunState: what a run directory tells a page, as JSON, whatever of it is missing."""

import json

import pytest

from rlinf.dashboard.lanes import Lane, Lanes, Stretch
from rlinf.dashboard.state import FINEST, causes, lanes_json, run_state
from rlinf.metrics.verdict import over
from rlinf.storage.files import METRICS, read_lines
from tests.metrics.html.test_report import run_directory


def lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_it_tells_all_that_is_in_the_directory_and_is_json(tmp_path):
    run = run_directory(tmp_path / "run")
    lines(run / "explained.jsonl", [{"step": 1, "text": "waited", "cause": "tail", "seconds": 0.25, "change": None}])
    lines(run / "alarms.jsonl", [{"step": 3, "text": "too old", "do": "set staleness.max=1"}])
    state = run_state(run)
    assert json.loads(json.dumps(state, allow_nan=False)).keys() == state.keys()
    assert (state["name"], state["status"], state["step"], state["steps"]) == ("sorting", "finished", 40, 40)
    assert state["about"] == ["rlinf.flows.grpo", "2 processes"]
    facts = {fact["label"]: fact for fact in state["facts"]}
    assert (facts["Accuracy"]["before"], facts["Accuracy"]["value"]) == ("25.0%", "75.0%")
    assert facts["Accuracy"]["note"].startswith("+50.0 points")
    assert (facts["Time"]["value"], facts["Tokens per second"]["value"]) == ("34 s", "5,020")
    assert state["curves"]["steps"] == list(range(41))
    assert dict(state["time"]["parts"])["training"] == 0.3
    assert [row["response"] for row in state["answers"]["shown"]["40"]] == [f"answer {n} of step 40" for n in range(8)]
    assert state["answers"]["steps"] == list(range(1, 41))
    assert [len(each) for each in state["held_out"]] == [2] * 4
    assert state["sentences"][0]["text"] == "waited"
    assert state["alarms"][0]["do"] == "set staleness.max=1"
    assert [(step["step"], [lane["actor"] for lane in step["lanes"]]) for step in state["lanes"]] == [
        (2, ["rollout[0]", "trainer[0]"]), (21, ["rollout[0]", "trainer[0]"]), (40, ["rollout[0]", "trainer[0]"]),
    ]  # fmt: skip


def test_a_step_is_said_to_take_as_long_as_the_run_itself_says(tmp_path):
    run = run_directory(tmp_path / "run", steps=2)
    rows = [row | ({"timing/step": 9.0 / row["step"] ** 2} if row["step"] else {}) for row in read_lines(run / METRICS)]
    lines(run / METRICS, rows)
    state = run_state(run)
    assert (state["time"]["step"], state["time"]["over"]) == (2.25, over(rows))
    assert dict(state["compared"])["seconds of a step"] == "2.25"
    assert next(fact for fact in state["facts"] if fact["label"] == "Time")["note"] == "2.25 s per step"


@pytest.mark.parametrize(
    ("trials", "label", "before", "after"),
    [
        (({"success_once": 0.1}, {}, {"success_once": 0.75}), "Solved in trials", "10.0%", "75.0%"),
        (({"reward/mean": -317.8}, {}, {"reward/mean": 177.0}), "Return in trials", "-317.80", "177.00"),
    ],
)
def test_of_a_policy_that_acts_the_trials_come_first(tmp_path, trials, label, before, after):
    rows = [
        {"step": step, **{f"evaluation/{name}": value for name, value in {"episodes": 20.0, **found}.items() if found}}
        for step, found in enumerate(trials)
    ]
    lines(tmp_path / "metrics.jsonl", rows)
    first = run_state(tmp_path)["facts"][0]
    assert first == {"label": label, "before": before, "value": after, "note": "of 20 episodes, after step 2"}


def test_a_run_that_has_just_begun_or_broke_off_has_a_state(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    assert run_state(tmp_path)["curves"]["steps"] == []
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n{"step": 2, "rew')
    (tmp_path / "resolved.yaml").write_text("steps: 100\nname: crashed\n")
    state = run_state(tmp_path)
    assert (state["name"], state["status"], state["step"], state["steps"]) == ("crashed", "unfinished", 1, 100)


def test_what_is_no_run_is_told(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"run's directory:"):
        run_state(tmp_path)


def test_causes_add_up_and_keep_the_newest_advice():
    told = [
        {"step": 1, "cause": "tail", "seconds": 1.0, "text": "a", "change": "set x=1", "saves": 0.5},
        {"step": 2, "cause": "reward", "seconds": 1.5, "text": "b", "change": None, "saves": 0.0},
        {"step": 3, "cause": "none", "seconds": 0.0, "text": "devices were at work nearly all the time"},
        {"step": 4, "cause": "tail", "seconds": 1.0, "text": "c", "change": None, "saves": 0.0},
    ]
    assert causes(told) == [
        {"cause": "tail", "steps": 2, "seconds": 2.0, "change": "set x=1", "saves": 0.5, "text": "c"},
        {"cause": "reward", "steps": 1, "seconds": 1.5, "change": None, "saves": 0.0, "text": "b"},
    ]


def test_lanes_of_a_busy_step_stay_small():
    step = 10.0
    many = [Stretch("a", ("generation", "waiting")[n % 2], n * 1e-4, (n + 1) * 1e-4) for n in range(100_000)]
    (lane,) = lanes_json(Lanes("run", 1, step, (Lane(0, tuple(many), "a[0]"),), {}))["lanes"]
    assert sorted(activity for activity, *_ in lane["stretches"]) == ["generation", "waiting"]
    apart = [Stretch("a", "scoring", at, at + 0.5) for at in (0.0, 0.5 + step * FINEST * 1.01)]
    (lane,) = lanes_json(Lanes("run", 1, step, (Lane(0, tuple(apart), "a[0]"),), {}))["lanes"]
    assert len(lane["stretches"]) == 2


def test_videos_are_told_with_their_step_suite_and_outcome(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    for name in (
        "step_000010/env0001-episode0000-success.mp4", "step_000010/env0002-episode0000-failure.mp4",
        "step_000020/ood/env0003-episode0000.webp", "step_000020/notes.txt", "step_000020/.aside.part.mp4",
        "new/env0000-episode0000.mp4",
    ):  # fmt: skip
        (tmp_path / "videos" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "videos" / name).touch()
    found = run_state(tmp_path)["episodes"]
    assert [(each["step"], each["task"], each["success"]) for each in found] == [
        (20, "ood", None), (10, "", False), (10, "", True),
    ]  # fmt: skip
    assert found[0]["video"] == "step_000020/ood/env0003-episode0000.webp"


def test_success_is_told_before_and_after(tmp_path):
    trials = {"evaluation/episodes": 20, "evaluation/success_once/low": 0.1, "evaluation/success_once/high": 0.4}
    lines(tmp_path / "metrics.jsonl", [
        {"step": 0, "evaluation/success_once": 0.2, **trials},
        {"step": 9, "evaluation/success_once": 0.3, "evaluation/reward/mean": 1.5, **trials},
    ])  # fmt: skip
    (row,) = run_state(tmp_path)["success"]
    assert (row["before"], row["success"], row["low"], row["return"], row["episodes"]) == (0.2, 0.3, 0.1, 1.5, 20)


def test_what_a_step_used_of_its_devices_stands_beside_what_its_roles_cost(tmp_path):
    """And before it where it is the larger loss; steps before the limits were known do not count."""
    run = run_directory(tmp_path / "run", steps=6)
    own = {"bound/device": 1.0, "mfu/trainer": 0.05, "idle/trainer": 8.0}
    costs = {"timing/step": 10.0, "bound/seconds": 9.5, "bound/area": 9.5, "bound/devices": 1.0}
    found = [row | costs | (own if row["step"] > 4 else {}) for row in read_lines(run / METRICS)]
    lines(run / METRICS, found)
    possible = run_state(run)["possible"]
    assert "training used 5.0 % of its products" in possible["device"]
    assert possible["device"].startswith("10 % of")
    assert possible["idles"]
