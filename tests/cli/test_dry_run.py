"""What a placement would come to is said before anything starts; and what it cannot be, in one message that names key,
value and the smallest fix."""

from __future__ import annotations

import textwrap
from dataclasses import replace

import pytest

from rlinf.cli.main import main
from rlinf.config.load import ConfigError, dump
from rlinf.metrics.machine import machine
from rlinf.placement.profile import BESIDE, Footprint, Profile, Release, StageProfile, Timing, save
from rlinf.runs.dry_run.embodied import expected_horizon_warning
from rlinf.runs.rules import load_config, load_embodied
from rlinf.runs.start import check_output, prepare
from tests.cards import pretend
from tests.launching import QUICKSTART, ROOT, TINY
from tests.models.scoring.saved import saved_classifier

TOY, TOY_SAC = "configs/embodied/toy.yaml", "configs/embodied/toy_sac.yaml"
PLAN = "placement.plan={}/plan.yaml"
PROFILE = "placement.profile={}/profile.json"


def measured(*devices: int) -> StageProfile:
    """A role that two devices make a bit less than twice as fast."""
    timings = tuple(Timing(4, count, 0.5 + 4.0 / count) for count in devices)
    return StageProfile(timings, Release((0.5, 1.0)), tuple(Footprint(count, 5_000_000, 0) for count in devices))


def profile(*devices: int) -> Profile:
    """Of the tiny run on this machine, with everybody on so many devices."""
    model = prepare(load_config(QUICKSTART, TINY)).model
    stages = {
        "rollout": measured(*devices),
        "judge": StageProfile((Timing(4, 1, 0.1),), kind=BESIDE),
        "trainer": measured(*devices),
    }
    edges = (("rollout", "judge", False), ("judge", "trainer", False))
    published = (("trainer", "rollout"),)
    sync = (Timing(1, 2, 0.1),)
    return Profile(model, machine(), stages, {}, sync, "rlinf.flows.grpo", 4, edges, published)


PLANS = {
    "fits": "{rollout: {devices: 0}, trainer: {devices: 1}}",
    "tutor": "{rollout: {devices: 0}, tutor: {devices: 0}, trainer: {devices: 1}}",
    "incomplete": "{rollout: {devices: 0}}",
    "far": "{rollout: {devices: 0-5}, trainer: {devices: 1}}",
    "at once": "{rollout: {devices: 0, phases: [0]}, trainer: {devices: 0, phases: [0]}}",
    "overfull": (
        "{rollout: {devices: 0, phases: [0], active_bytes: 6000000000, parked_bytes: 1000000000}, "
        "trainer: {devices: 0, phases: [1], active_bytes: 5000000000}}"
    ),
    "misspelt": "{rollout: {devices: 0}, trainer: {device: 1}}",
}
PROFILES = {
    "good": lambda: profile(1, 2),
    "of another model": lambda: replace(profile(1, 2), model="Qwen3-600B"),
    "of another machine": lambda: replace(profile(1, 2), machine="NVIDIA H800"),
    "of another flow": lambda: replace(profile(1, 2), flow="rlinf.flows.ppo"),
    "of two devices only": lambda: profile(2),
}
WRONG = {
    "a role that there is not": (
        ("placement.trianer=0",), "", ("placement.trianer", "did you mean placement.trainer?"),
    ),
    "a role of another kind of run": ((TOY, "placement.rollout=0"), "", ("placement.rollout", "unknown key")),
    "a mode that there is not": (("placement.mode=colocated",), "", ("placement.mode = colocated", '"collocated"')),
    "processes that overlap": (
        ("placement.rollout=0-1:0-1,1",), "", ("placement.rollout = 0-1:0-1,1", "resource 1 is in '0-1:0-1' already"),
    ),
    "two processes of a trainer on one device": (
        ("placement.trainer=0:0-1",), "", ("placement.trainer = 0:0-1", "give each a device of its own"),
    ),
    "more devices than there are": (
        ("placement.trainer=0-3",), "", ("placement.trainer = 0-3", "write 0-1, or start 4 processes"),
    ),
    "a group of nodes that there is not": (
        ("placement.node_groups={big: {nodes: 0}}", "placement.trainer={node_group: bgi, placement: 0}"), "",
        ("placement.trainer", "did you mean 'big'?"),
    ),
    "too few devices for a mode": (
        ("algorithm=ppo", "placement.mode=disaggregated"), "",
        ("placement.mode = disaggregated", "needs 3 devices", "start 3 processes (torchrun --nproc-per-node 3)"),
    ),
    "a role that can never fit": (
        ("placement.mode=collocated", "placement.device_memory_gb=0.00001"), "",
        ("placement.device_memory_gb = 1e-05", "GB for the trainer) of 1e-05", "trainer.micro_batch_tokens"),
    ),
    "a plan with a role that there is not": ((PLAN,), "tutor", ("placement.plan", "places tutor", "remove it")),
    "a plan without one that there is": ((PLAN,), "incomplete", ("says nothing of trainer", "trainer: {devices: 0}")),
    "a plan for more devices": ((PLAN,), "far", ("placement.plan", "2", "does not exist")),
    "a plan with two roles on a device at once": ((PLAN,), "at once", ("placement.plan", "device 0")),
    "a plan whose devices hold too much": (
        (PLAN, "placement.device_memory_gb=8"), "overfull", ("placement.plan", "device 0", "resident to false"),
    ),
    "a plan that is misspelt": ((PLAN,), "misspelt", ("placement.plan", "roles.trainer", "devices")),
    "a plan that is not there": (("placement.plan=none.yaml",), "", ("placement.plan = none.yaml", "cannot be read")),
    "a profile that is not there": (
        ("placement.profile=none.json",), "", ("placement.profile = none.json", "a run leaves one in its directory"),
    ),
    "a profile that is none": ((PROFILE,), "none", ("placement.profile", "profile.json")),
    "a profile of another model": ((PROFILE,), "of another model", ("Qwen3-600B", "name another profile")),
    "a profile of another machine": ((PROFILE,), "of another machine", ("NVIDIA H800", "name another profile")),
    "a profile of another flow": ((PROFILE,), "of another flow", ("rlinf.flows.ppo", "name another profile")),
    "a profile without the sizes of a mode": (
        (PROFILE, "placement.mode=disaggregated"), "of two devices only",
        ("placement.mode = disaggregated", "there is collocated", "or set placement.extrapolate=true"),
    ),
    "moves under which acting goes on": (
        (TOY_SAC, "placement.mode=auto"), "",
        ("placement.mode", "auto", "name a mode, or take another flow"),
    ),
}  # fmt: skip


@pytest.fixture
def answer(tmp_path, monkeypatch, capsys):
    """Asks the front door, in one of so many processes; gives exit code, output, and what it said went wrong."""
    monkeypatch.chdir(ROOT)

    def ask(*given: str, hosts: int = 2, given_file: str = "", dry: bool = True) -> tuple[int, str, str]:
        if given_file in PLANS:
            (tmp_path / "plan.yaml").write_text(f"roles: {PLANS[given_file]}\n")
        elif given_file in PROFILES:
            save(PROFILES[given_file](), tmp_path / "profile.json")
        elif given_file:
            (tmp_path / "profile.json").write_text('{"version": 0}')
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", str(hosts))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(hosts))
        config, *keys = given if given and given[0] in (TOY, TOY_SAC) else (QUICKSTART, *TINY, *given)
        keys = [key.format(tmp_path) if "{}" in key else key for key in keys]
        options = ["--dry-run"] if dry else []
        code = main(["--config", config, *options, *keys, f"output_dir={tmp_path}/outputs"])
        told = capsys.readouterr()
        return code, told.out, told.err

    return ask


@pytest.mark.parametrize(("name", "dry"), [(name, place % 3 > 0) for place, name in enumerate(WRONG)])
def test_what_cannot_be_is_one_message_before_anything_starts(answer, tmp_path, name, dry):
    given, file, said = WRONG[name]
    code, _, told = answer(*given, given_file=file, dry=dry)
    assert code == 2
    assert told.count("error:") == 1
    assert "nothing was started" in told
    assert "Traceback" not in told
    for text in said:
        assert text in told, told
    assert not (tmp_path / "outputs").exists()


def test_a_step_that_is_shorter_than_episodes_is_told_dry():
    config = load_embodied(str(ROOT / TOY), ["env.ignore_terminations=false", "env.fresh=true"])
    config.env.max_steps, config.policy.horizon = 40, 10
    assert "policy.horizon: a step" in expected_horizon_warning(config)
    config.policy.horizon = 40
    assert expected_horizon_warning(config) is None


REWARDS = """
    def odd(response):
        return "abc"

    def raises(response):
        raise KeyError(response)

    def of_a_column(completion):
        return 1.0

    def half(response, answer):
        return 0.5 if response == answer else 0.0
"""


@pytest.fixture
def rewards(tmp_path, monkeypatch):
    (tmp_path / "tried_rewards.py").write_text(textwrap.dedent(REWARDS))
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize(
    ("name", "said"),
    [("odd", "returned 'abc'"), ("raises", "KeyError"), ("of_a_column", "['completion']")],
)
def test_a_reward_that_scores_nothing_is_refused_without_a_step(answer, rewards, name, said):
    code, _, told = answer(f"reward.function=tried_rewards.{name}", "reward.isolate=never", hosts=1)
    assert (code, told.count("error:")) == (2, 1)
    assert said in told
    assert "Traceback" not in told


def test_what_a_reward_gives_to_a_right_answer_is_told(answer, rewards):
    _, out, _ = answer("reward.function=tried_rewards.half", "reward.isolate=never", hosts=1)
    assert "reward: 0.5 for" in out


@pytest.mark.parametrize("name", ["/proc/x", "/dev/null", "{}/" + "x" * 300])
def test_a_run_directory_that_cannot_be_made_is_told(tmp_path, name):
    config = load_config(QUICKSTART, [*TINY, f"output_dir={name.format(tmp_path)}"])
    with pytest.raises(ConfigError, match=r"output_dir =.*made"):
        check_output(config)
    check_output(load_config(QUICKSTART, [*TINY, f"output_dir={tmp_path}/a/b"]))
    assert list(tmp_path.iterdir()) == []


def test_a_policy_that_acts_is_tried_dry(capsys):
    assert main(["--config", str(ROOT / TOY), "--dry-run"]) == 0
    told = capsys.readouterr().out
    assert "policy 0.001, trainer 0.00" in told
    assert "Time: not known" in told


def test_roles_are_listed_with_their_devices_and_memory(answer):
    code, out, _ = answer("placement.mode=hybrid", "placement.device_memory_gb=1", "algorithm=ppo")
    assert code == 0
    told = out[out.index("Roles") :]
    assert "; hybrid, taking turns" in told
    assert "rollout    device 0" in told
    assert "critic     device 1" in told
    assert "GB, at least: trainer" in told
    assert "of 1;" in told
    assert "Time: not known" in told


def test_two_processes_on_one_gpu_are_told_and_refused_where_they_would_compute_together(answer, monkeypatch):
    pretend(monkeypatch, rank=0, cards=1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    auto = "placement.device_kind=auto"
    code, out, _ = answer(auto, "placement.rollout=0", "placement.trainer=1")
    assert code == 0
    assert "on 1 GPU; disaggregated" in out
    code, _, told = answer(auto, "placement.trainer=0-1")
    assert code == 2
    assert told.startswith("error: placement.trainer: ")
    assert "--nproc-per-node 1" in told
    assert told.count("\n") == 1


def test_devices_of_roles_stand_in_one_column(answer, tmp_path):
    _, out, _ = answer(f"reward_model.path={saved_classifier(tmp_path)}", hosts=1)
    rows = [line for line in out.splitlines() if line.endswith((" device 0", " host 0"))]
    assert {row.rsplit(" ", 2)[0].strip() for row in rows} == {"rollout", "judge", "reward_model", "trainer"}
    assert {len(row) - len(row.rsplit(" ", 2)[1]) for row in rows} == {len("  reward_model  0")}


def test_one_process_says_how_many_would_place_the_roles(answer):
    _, out, _ = answer("placement.trainer=0-2", hosts=1)
    assert "--nproc-per-node 3" in out


def test_with_a_profile_the_time_the_bound_and_the_modes_are_predicted(answer):
    code, out, _ = answer(PROFILE, "placement.mode=auto", given_file="good")
    assert code == 0
    told = out[out.index("Time") :]
    assert "is possible (" in told
    seconds = {line.split()[0]: float(line.split()[1]) for line in told.splitlines() if line.endswith(")")
               and line.split()[0] in ("collocated", "disaggregated", "hybrid")}  # fmt: skip
    assert seconds.keys() == {"collocated", "disaggregated"}, "of two stages none is left to take turns"
    shortest = min(seconds.values())
    assert f"{shortest:.3g} s a step" in told, "the quickest is taken"
    assert shortest >= 5.0, "two stages of 2.5 s on both devices, with half a second each that does not shrink"


def test_a_named_mode_is_followed_even_if_another_is_quicker(answer):
    for mode in ("collocated", "disaggregated"):
        _, out, _ = answer(PROFILE, f"placement.mode={mode}", given_file="good")
        assert f"each; {mode}" in out


@pytest.mark.parametrize(
    "given",
    [
        ("placement.mode=disaggregated",),
        (PROFILE, "placement.mode=auto"),
        (PLAN, "placement.device_memory_gb=0.5"),
        ("placement.rollout=0-1:0-3", "placement.trainer={node_group: big, placement: all}",
         "placement.node_groups={big: {nodes: 0}}"),
    ],
)  # fmt: skip
def test_what_is_printed_loads_as_the_same_configuration(answer, tmp_path, given):
    code, out, told = answer("--verbose", *given, given_file="fits" if PLAN in given else "good")
    assert code == 0, told
    again = tmp_path / "again.yaml"
    again.write_text(out)
    config = load_config(str(again), (), 2)
    keys = [key.format(tmp_path) if key in (PLAN, PROFILE) else key for key in given]
    assert config == load_config(QUICKSTART, (*TINY, *keys, f"output_dir={tmp_path}/outputs"), 2)
    assert dump(config).strip() == out[: out.index("# Roles")].strip()


def test_sizes_that_were_not_measured_are_guessed_if_that_is_asked_for(answer):
    code, out, told = answer(
        PROFILE, "placement.mode=disaggregated", "placement.extrapolate=true", given_file="of two devices only"
    )
    assert code == 0, told
    assert "disaggregated" in out[out.index("Time") :]
