"""Whole runs under every placement: the same is learned wherever roles are, the time is accounted for, and a run that
moves, is killed while it moves, or has little memory goes on as if nothing had been."""

from __future__ import annotations

import json
import random
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from rlinf.metrics.report import fullest
from rlinf.metrics.verdict import FAMILIES, PARTS
from rlinf.placement.plan import load as load_plan
from rlinf.placement.profile import load as load_profile
from rlinf.runs.rules import load_config
from rlinf.runs.start import prepare
from rlinf.runtime.devices.memory import DeviceMemory
from rlinf.storage.directory import find_checkpoint
from tests.launching import QUICKSTART, TINY, killed, launch, metrics_of, weights_of

pytestmark = [pytest.mark.slow, pytest.mark.torchrun, pytest.mark.timeout(300)]
TEXT = (
    QUICKSTART, *TINY, "evaluation.every=0", "evaluation.problems=1", "optimizer.lr=0.01", "optimizer.warmup_steps=0",
    "reward.function=tests.own_parts.overlap", "reward.isolate=never", "algorithm.prompts_per_step=8",
    "metrics.samples=100",
)  # fmt: skip
KINDS: dict[str, tuple[str, ...]] = {
    "grpo": TEXT,
    "ppo": (*TEXT, "algorithm=ppo", "algorithm.kl={place: reward, kind: k1, beta: 0.1}", "critic.lr=0.01"),
    "toy": (
        "configs/embodied/toy.yaml", "steps=3", "log_every=1", "trials.episodes=4", "policy.horizon=5",
        "env.max_steps=7", "trace=false",
    ),
}  # fmt: skip
PLANS = {
    "grpo": "{rollout: {devices: 0-1, phases: [0]}, trainer: {devices: 1, phases: [1]}}",
    "ppo": (
        "{rollout: {devices: 0, phases: [0], items: 4}, reference: {devices: 1, phases: [0]}, critic: {devices: 1, "
        "phases: [1]}, trainer: {devices: 0, phases: [1]}}"
    ),
    "toy": "{env+policy: {devices: 1, phases: [0]}, trainer: {devices: 0, phases: [1]}}",
}
"""Placements that are none of the modes' even shares."""
BOTH, FIRST, SECOND = "0, 1", "0", "1"
WHERE = {
    "grpo collocated": {"rollout": BOTH, "trainer": BOTH},
    "grpo disaggregated": {"rollout": FIRST, "trainer": SECOND},
    "grpo hybrid": {"rollout": FIRST, "trainer": SECOND},
    "grpo plan": {"rollout": BOTH, "trainer": SECOND},
    "ppo plan": {"rollout": FIRST, "reference": SECOND, "critic": SECOND, "trainer": FIRST},
    "ppo auto": dict.fromkeys(("rollout", "trainer", "critic", "reference"), BOTH),
    "toy disaggregated": {"policy": FIRST, "trainer": SECOND},
    "toy plan": {"policy": SECOND, "trainer": FIRST},
    "toy auto": {"policy": BOTH, "trainer": BOTH},
}
"""Hosts of each role at first, for every run on two processes. (Four roles cannot be disaggregated there; those that
are placed automatically are collocated first, and then hybrid or disaggregated.)"""
ROUNDING = {"rel": 1e-4, "abs": 1e-5}
"""Two devices add up what one adds up in another order: 1e-7 of a number in float32. Adam divides by the root of tiny
second moments, and each step begins where the last one ended: after six steps, metrics were seen to differ by 6e-7, so
this leaves two orders for other machines, and is far below what one sampled token would change."""


# Every placement ------------------------------------------------------------------------------------------------------


def program(runs: list[list[str]], processes: int, directory: Path) -> str:
    """Do some runs one after the other in one job; what it printed."""
    wanted = directory / f"{processes}.jsonl"
    wanted.write_text("".join(json.dumps(run) + "\n" for run in runs))
    path = Path(__file__).parent / "programs" / "placements.py"
    return launch(str(wanted), program=path, processes=processes, timeout=250).stdout


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """A directory with a run per entry of `WHERE`, one per kind in one process, and what was printed."""
    directory = tmp_path_factory.mktemp("placements")
    alone = [[*KINDS[kind], f"output_dir={directory}", f"name={kind}"] for kind in KINDS]
    alone[0].append("steps=7")  # for the runs that move, which take more
    (directory / "alone.txt").write_text(program(alone, 0, directory))
    lines = []
    for name in WHERE:
        kind, _, mode = name.partition(" ")
        plan = directory / f"{kind}.yaml"
        plan.write_text(f"roles: {PLANS[kind]}\n")
        placement = f"placement.plan={plan}" if mode == "plan" else f"placement.mode={mode}"
        more = ["placement.profile_steps=1"] if mode == "auto" else []
        lines.append([*KINDS[kind], placement, *more, f"output_dir={directory}", f"name={kind}_{mode}"])
    (directory / "placed.txt").write_text(program(lines, 2, directory))
    return directory


def lessons(run: Path) -> list[dict[str, Any]]:
    """What a run noted of its steps, without what depends on the clock."""
    timed = (*FAMILIES, "weights/", "tokens_per_s", "env_steps_per_s", "evaluation/")
    return [{name: value for name, value in step.items() if not name.startswith(timed)} for step in metrics_of(run)]


def same_lessons(run: Path, alone: Path, *, exactly: bool = False) -> None:
    """The run learned what one process did."""
    ours, theirs = lessons(run), lessons(alone)
    assert len(ours) >= 3
    for step, one in zip(ours, theirs, strict=False):
        assert {"loss", "grad_norm", "reward/mean"} <= step.keys()
        assert step == (one if exactly else pytest.approx(one, **ROUNDING))
    assert ours[0]["grad_norm"] > 1e-3, "there was something to learn"


@pytest.mark.parametrize("name", WHERE)
def test_the_same_is_learned_under_every_placement(runs, name):
    """Bit for bit where each role computes on one device, as in one process: devices change nothing."""
    on_one = all(hosts != BOTH for hosts in WHERE[name].values())
    same_lessons(runs / name.replace(" ", "_"), runs / name.partition(" ")[0], exactly=on_one)


@pytest.mark.parametrize("name", WHERE)
def test_a_run_says_where_its_roles_are(runs, name):
    begins = f"{name.replace(' ', '_')}: "
    (line,) = [line for line in (runs / "placed.txt").read_text().splitlines()
               if line.startswith(begins) and " on host " in line]  # fmt: skip
    said = dict(re.findall(r"(\w+) on host (\d(?:, \d)*)", line))
    assert {role: said[role] for role in WHERE[name]} == WHERE[name]


@pytest.mark.parametrize("name", WHERE)
def test_what_is_lost_of_every_step_adds_up_to_what_lies_above_the_bound(runs, name):
    steps = metrics_of(runs / name.replace(" ", "_"))
    assert len(steps) == 3
    for step in steps:
        above = step["timing/step"] - step["bound/seconds"]
        parts = {part: step[f"lost/{part}"] for part in PARTS}
        assert all(seconds > -1e-9 for seconds in parts.values()), parts
        assert sum(parts.values()) == pytest.approx(above, abs=0.01 * step["timing/step"])
        assert step["bound/efficiency"] == pytest.approx(step["bound/seconds"] / step["timing/step"])
        assert 0 < step["bound/efficiency"] <= 1
        assert step["bound/devices"] == 2


def test_critics_references_and_policies_that_act_move_too(runs):
    """After the first step; that the same was learned is seen above."""
    told = (runs / "placed.txt").read_text().splitlines()
    assert "moved: rollout to host 0, trainer to host 1, critic to host 1, reference to host 1" in told
    assert "moved: policy to host 0, trainer to host 1" in told
    assert all((runs / name / "plan.yaml").exists() for name in ("ppo_auto", "toy_auto"))


def test_profiles_count_the_devices_that_roles_computed_on(runs):
    for name, sizes in {"grpo_collocated": (2, 2), "grpo_plan": (2, 1), "grpo_hybrid": (1, 1)}.items():
        stages = load_profile(runs / name / "profile.json").stages
        seen = tuple(timing.devices for role in ("rollout", "trainer") for timing in stages[role].timings)
        assert seen == sizes


# Roles that move by themselves ----------------------------------------------------------------------------------------

AUTO = ("--config", *TEXT, "placement.mode=auto", "placement.profile_steps=2", "steps=7", "checkpoint.every=1")


def killed_in_a_move(output: Path) -> Path:
    """Start a run on two processes, and kill all of it some time after it has begun to move roles: as soon as the
    checkpoint before that is written."""
    run = output / "quickstart"
    killed(
        (run / "checkpoints" / "step_000002").exists,
        *AUTO,
        f"output_dir={output}",
        processes=2,
        later=random.random() * 0.05,
    )
    return run


@pytest.fixture(scope="module")
def moved(runs, tmp_path_factory) -> tuple[Path, str]:
    """A run that was killed in its first move and gone on with, and what the rest of it printed."""
    output = tmp_path_factory.mktemp("moved")
    run = killed_in_a_move(output)
    begun = find_checkpoint(run)
    assert begun is not None
    assert begun.step == 2, "the checkpoint before the move is whole"
    assert weights_of(run)
    done = launch(*AUTO, f"output_dir={output}", "--resume", "auto", processes=2)
    return run, done.stdout


def test_a_run_that_was_killed_in_a_move_goes_on_and_moves(moved, runs):
    run, told = moved
    assert "going on after step 2" in told
    assert "placement: collocated takes" in told
    assert "measuring disaggregated" in told
    assert "moved: rollout to host 0, trainer to host 1" in told
    assert "simulated from" in told, "it planned"
    assert not (run / "checkpoints" / ".moving.partial").exists()
    assert [step["step"] for step in metrics_of(run)] == [1, 2, 3, 4, 5, 6, 7]


def test_what_it_learned_is_what_a_run_that_never_moved_did(moved, runs):
    run, _ = moved
    same_lessons(run, runs / "grpo")
    ours, theirs = answers(run), answers(runs / "grpo")
    assert ours.keys() == theirs.keys(), "every prompt comes once, in its step"
    assert ours == theirs
    assert len(ours) == 7 * 8


def answers(run: Path) -> dict[tuple[int, int], list[str]]:
    """By step and prompt, the prompt and its answers."""
    found = defaultdict(list)
    for line in (run / "samples.jsonl").read_text().splitlines():
        row = json.loads(line)
        if "prompt_id" in row:
            found[row["step"], row["prompt_id"]] += [row["prompt"], row["response"]]
    return dict(found)


def test_roles_that_moved_are_elsewhere_and_it_leaves_a_plan_and_a_profile(moved):
    run, _ = moved
    events = json.loads((run / "trace.json").read_text())["traceEvents"]
    host = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    steps = {event["name"]: (event["ts"], event["ts"] + event["dur"])
             for event in events if event.get("ph") == "X" and event["name"].startswith("step ")}  # fmt: skip

    def hosts(step: int, work: str) -> set[str]:
        start, end = steps[f"step {step}"]
        return {host[event["pid"]] for event in events if event["name"] == work and start <= event.get("ts", -1) < end}

    both = {"host 0", "host 1"}
    assert (hosts(4, "generate"), hosts(4, "train")) == (both, both)
    assert (hosts(5, "generate"), hosts(5, "train")) == ({"host 0"}, {"host 1"})
    plan = load_plan(run / "plan.yaml")
    assert {role: entry.devices for role, entry in plan.roles.items() if entry.devices}
    stages = load_profile(run / "profile.json").stages
    for role in ("rollout", "trainer"):
        assert {timing.devices for timing in stages[role].timings} >= {1, 2}


def test_roles_move_while_answers_for_later_steps_are_under_way_and_none_is_lost(tmp_path):
    done = launch(
        "--config", *TEXT, "flow=rlinf.flows.grpo_async", "staleness.max=2", "placement.mode=auto",
        "placement.profile_steps=2", "steps=4", f"output_dir={tmp_path}", processes=2,
    )  # fmt: skip
    assert "moved: rollout to host 0, trainer to host 1" in done.stdout
    run = tmp_path / "quickstart"
    assert max(step["staleness/max"] for step in metrics_of(run)) <= 2
    learned = defaultdict(set)
    for step, prompt in answers(run):
        learned[prompt].add(step)
    assert sorted(learned) == list(range(4 * 8)), "every prompt that was drawn was learned from"
    assert all(len(steps) == 1 for steps in learned.values()), "and once"


# Little memory --------------------------------------------------------------------------------------------------------


def largest(processes: int) -> int:
    """Bytes of the largest role on a device; there is not room for all of them in little more than that."""
    held = prepare(load_config(TEXT[0], (*TEXT[1:], "placement.mode=collocated"), processes), processes).held
    active = [bytes_ for bytes_, _ in held.values()]
    assert max(active) * 1.01 < sum(active)
    return max(active)


@pytest.mark.parametrize("processes", [0, 2])
def test_roles_that_do_not_fit_side_by_side_take_turns_within_the_limit(runs, tmp_path, processes):
    limit = 1.01 * largest(max(1, processes)) / 1e9
    done = launch(
        "--config", *TEXT, "placement.mode=collocated", f"placement.device_memory_gb={limit}",
        f"output_dir={tmp_path}", processes=processes,
    )  # fmt: skip
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("devices that roles share held at most")]
    held, capacity = (float(word) for word in line.split() if word[0].isdigit())
    assert 0 < held <= capacity == pytest.approx(limit, rel=1e-3)
    run = tmp_path / "quickstart"
    same_lessons(run, runs / "grpo", exactly=processes == 0)
    moves = {event["name"] for event in json.loads((run / "trace.json").read_text())["traceEvents"]}
    assert {"onload", "offload"} <= moves
    assert all(step["timing/switching"] > 0 for step in metrics_of(run))


def test_the_fullest_device_is_told_and_only_where_there_is_a_limit():
    devices = {0: DeviceMemory(90_000_000, 5, 5, 70_000_000), 1: DeviceMemory(90_000_000, 5, 5, 81_000_000)}
    (line,) = fullest(devices)
    assert "0.081 of 0.09 GB" in line
    assert not list(fullest({0: DeviceMemory(None, 5, 5, 70)}))
    assert not list(fullest({0: DeviceMemory(100, 0, 0, 0)})), "nobody shares it"
