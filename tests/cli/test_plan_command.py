"""`python -m rlinf plan`: a table and a plan, or one message and exit code 2."""

import re
from dataclasses import replace

import pytest

from rlinf.cli.commands import main
from rlinf.placement.plan import load as load_plan
from rlinf.placement.profile import BESIDE, Footprint, Profile, Release, StageProfile, Timing, save


def stage(work, fixed, *, counts=(1, 2, 4, 8), held=20e9, release=None):
    """Timings of half and all of a step's items; bytes that shrink with the devices."""
    timings = tuple(Timing(items, n, (fixed + work / n) * items / 16) for n in counts for items in (8, 16))
    footprints = tuple(Footprint(n, int(held / n), int(held / n / 10), 1.0, 0.5) for n in counts)
    return StageProfile(timings, release, footprints)


def profile(flow="rlinf.flows.grpo", **stages):
    """A small GRPO run, profiled on up to eight devices."""
    stages = {
        "rollout": stage(40.0, 5.0, release=Release((0.3, 0.6, 0.8, 1.0))),
        "judge": StageProfile((Timing(16, 1, 2.0),), kind=BESIDE),
        "trainer": stage(24.0, 2.0),
        **stages,
    }
    edges = (("rollout", "judge", False), ("judge", "trainer", False))
    published = (("trainer", "rollout"),)
    return Profile("tiny", "a test", stages, {}, (Timing(1, 4, 0.5),), flow, 16, edges, published)


@pytest.fixture
def plan(tmp_path, capsys):
    """Runs the command on a profile; gives exit code, output, message."""

    def run(*arguments, of=None):
        path = tmp_path / "profile.json"
        save(of or profile(), path)
        code = main(["plan", "--profile", str(path), *arguments])
        told = capsys.readouterr()
        return code, told.out, told.err

    return run


def test_it_shows_the_best_plan_of_each_mode_and_says_that_it_is_simulated(plan):
    code, out, err = plan("--devices", "8")
    assert (code, "error" in err) == (0, False)  # a slow machine is told how far the search has come
    for mode in ("collocated", "disaggregated", "hybrid"):
        assert mode in out
    assert "SIMULATED" in out
    assert "not measured on 8 devices" in out
    assert "judge beside" in out


def test_it_writes_a_plan_that_can_be_loaded(plan, tmp_path):
    code, out, _ = plan("--devices", "4", "--memory-gb", "80", "-o", str(tmp_path / "plan.yaml"))
    made = load_plan(tmp_path / "plan.yaml")
    assert code == 0
    assert set(made.roles) == {"rollout", "judge", "trainer"}
    assert set(made.devices) <= set(range(4))
    assert made.predicted.bound_seconds <= made.predicted.step_seconds
    assert made.reason in out.replace("\n", " ")


def test_without_rehearsal_plans_are_ranked_by_formula_and_need_no_flow(plan):
    code, out, _ = plan("--devices", "8", "--rehearse", "0", of=profile(flow=""))
    assert code == 0
    assert "collocated" in out


def test_it_says_what_each_staleness_gains(plan):
    _, out, _ = plan("--devices", "8", "--rehearse", "0")
    assert "if trainers took devices over as these run out of answers (calculated, at most): collocated " in out
    assert re.search(r"staleness 1 gains \d+ %, 2 gains (\d+ %|nothing) more, 4 gains .*: take \d \(rollout \d", out)


def test_it_plans_for_answers_that_are_begun_early(plan):
    early = ("--devices", "8", "--staleness", "1")
    code, out, _ = plan(*early, "--flow", "rlinf.flows.grpo_async")
    assert (code, "begun up to 1 steps early" in out, "calculated only" in out) == (0, True, False)
    assert all(mode in out for mode in ("collocated", "disaggregated"))
    seconds = [float(text) for text in re.findall(r"disaggregated .*? (\d+\.\d+) +│ +(?:\d)", out)]
    assert seconds
    synchronous = plan("--devices", "8")[1]
    assert seconds[0] < float(re.findall(r"disaggregated .*? (\d+\.\d+) +│ +(?:\d)", synchronous)[0])
    assert "add --flow rlinf.flows.grpo_async" in plan(*early)[1]


def test_it_says_what_engines_that_join_bring_and_up_to_which_number(plan):
    code, out, _ = plan("--devices", "4", "--rehearse", "0", "--joiners", "4", "2")
    rows = re.findall(
        r"│ +(\d) │ rollout (\d), judge beside, trainer \d │ +([\d.]+) │ +([\d.]+) │ +([\d.]+) │ \w+", out
    )
    assert (code, [row[0] for row in rows]) == (0, ["0", "2", "4"])
    seconds, speeds, bounds = ([float(row[place]) for row in rows] for place in (2, 3, 4))
    assert seconds == sorted(seconds, reverse=True)
    assert speeds == [pytest.approx(16 / each, rel=0.01) for each in seconds]
    assert all(least <= each for least, each in zip(bounds, seconds, strict=True))
    assert re.search(r"engines that join: 2 gain \d+ %, 4 gain \d+ % more: take 4", out)


def test_what_another_staleness_brings_is_not_known_of_a_run_that_began_early(plan):
    stale = replace(profile(), staleness=1)
    code, out, _ = plan("--devices", "8", "--rehearse", "0", of=stale)
    assert (code, "begun up to 1 steps early" in out, "gains" in out) == (0, True, False)
    code, _, said = plan("--devices", "8", "--staleness", "2", of=stale)
    assert (code, said.count("\n")) == (2, 1)
    assert "measured with a staleness of 1" in said
    assert plan("--devices", "8", "--staleness", "-1")[0] == 2


def test_roles_take_whole_nodes(plan, tmp_path):
    code, _, _ = plan("--devices", "64", "--per-node", "8", "--extrapolate", "-o", str(tmp_path / "plan.yaml"))
    sizes = [len(role.devices) for role in load_plan(tmp_path / "plan.yaml").roles.values() if role.devices]
    assert code == 0
    assert all(size % 8 == 0 or 8 % size == 0 for size in sizes)


def test_it_says_that_devices_stay_idle_beyond_what_was_measured(plan):
    code, out, _ = plan("--devices", "100", "--rehearse", "1")
    assert code == 0
    assert "--extrapolate guesses" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--devices", "8", "--items", "4096"), "8 to 16 items"),
        (("--devices", "0"), "--devices 0"),
        (("--devices", "tpu=8"), "'tpu'"),
        (("--devices", "8", "--memory-gb", "-3"), "--memory-gb -3"),
        (("--devices", "8", "--memory-gb", "1"), "'rollout'"),
        (("--devices", "8", "--memory-gb", "2.6"), r"0\.1 GB"),
        (("--devices", "8", "--flow", "rlinf.flows.ppo"), "'critic'"),
        (("--devices", "8", "--flow", "rlinf.flows.grpoo"), "grpoo"),
        (("--devices", "8", "-o", "/nowhere/plan.yaml"), "/nowhere"),
        (("--devices", "8", "--actor", "judge=json.loads"), "judge=json"),
        (("--devices", "8", "--joiners", "-1"), "--joiners -1"),
        (("--devices", "8", "--rehearse", "0", "--joiners", "8"), "'rollout' is known on up to 8"),
    ],
)
def test_what_cannot_be_planned_gets_one_message_and_exit_code_2(plan, arguments, message):
    code, _, err = plan(*arguments)
    assert code == 2
    assert err.startswith("error: ")
    assert err.count("error: ") == 1
    assert "Traceback" not in err
    assert re.search(message, err)


def test_a_profile_that_is_none_is_refused(tmp_path, capsys):
    for text, message in ((None, "cannot be read"), ("{}", "not a profile: version is None"), ("[", "not a profile")):
        path = tmp_path / "profile.json"
        if text is not None:
            path.write_text(text, encoding="utf-8")
        assert main(["plan", "--profile", str(path), "--devices", "8"]) == 2
        assert message in capsys.readouterr().err


def test_a_stage_that_the_flow_does_not_have_is_refused(plan):
    code, _, err = plan("--devices", "8", of=profile(tutor=stage(4.0, 1.0)))
    assert code == 2
    assert "has no role 'tutor'" in err
