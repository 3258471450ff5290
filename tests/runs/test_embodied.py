"""Runs in which a policy acts, as a user starts them: they learn, go on after a kill bit for bit, and say what is
wrong."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from tests.launching import ROOT, killed, launch, learned, metrics_of, start, steps_noted
from tests.runs.programs.held import HELD
from tests.runtime.programs.jobs import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
TOY = "configs/embodied/toy.yaml"
SMALL = ("steps=6", "log_every=1", "trials.episodes=8", "checkpoint.every=2", "policy.horizon=5", "env.max_steps=7")
STEPS = 6
PROGRAMS = Path(__file__).parent / "programs"
VARIANTS = {
    "ppo": (),
    "under way": ("env.fresh=false",),
    "actions in chunks": ("policy.settings={chunk: 3, value_level: action}", "trials.every=2"),
    "grpo": ("algorithm=grpo", "env.group_size=4", "policy.settings={value_level: null}"),
    "acting ahead": ("flow=rlinf.flows.embodied_async", "env.fresh=false"),
}
RESUMED = ("ppo", "under way", "acting ahead")


def test_the_example_learns_the_task(tmp_path):
    done = launch("--config", TOY, f"output_dir={tmp_path}")
    steps = metrics_of(tmp_path / "toy")
    assert [step["step"] for step in steps] == list(range(1, 21))
    assert steps[-1]["evaluation/success_once"] >= 0.9
    first = json.loads((tmp_path / "toy" / "metrics.jsonl").read_text().splitlines()[0])
    assert (first["step"], first["evaluation/episodes"]) == (0, 32.0)
    assert first["evaluation/success_once"] <= 0.7
    assert steps[-1]["reward/step"] > steps[0]["reward/step"]
    assert steps[-1]["env_steps/total"] == sum(step["env_steps"] for step in steps) == 20 * 16 * 20
    assert "32 trials by" in done.stdout
    run = tmp_path / "toy"
    page = (run / "report.html").read_text()
    assert '"lanes":[{' in page
    assert '"env_steps":[0,' in page
    assert json.loads((run / "trace.json").read_text())["traceEvents"]
    assert (run / "checkpoints" / "latest" / "policy" / "policy.json").is_file()
    again = launch("--config", str(run / "resolved.yaml"), "--dry-run", "--verbose")
    assert "Reach" in again.stdout


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The example with every part of the algorithm as its recipe has it, so that any recipe can be named."""
    config = yaml.safe_load((ROOT / TOY).read_text())
    del config["algorithm"]["advantage"]
    path = tmp_path_factory.mktemp("config") / "toy.yaml"
    path.write_text(yaml.safe_dump(config))
    return str(path)


@pytest.fixture(scope="module")
def runs(tmp_path_factory, plain):
    """Every variant in one go, in `whole`; and in `half`, with a stop after four steps of six."""
    directory = tmp_path_factory.mktemp("runs")
    lines = [["never", *arguments(name, directory / "whole")] for name in VARIANTS]
    for name in RESUMED:
        lines.append(["never", *arguments(name, directory / "half"), "steps=4"])
        lines.append(["auto", *arguments(name, directory / "half")])
    launch(plain, program=PROGRAMS / "many.py", text="".join(json.dumps(line) + "\n" for line in lines), timeout=200)
    return directory


def arguments(name, output):
    return [*SMALL, *VARIANTS[name], f"output_dir={output}", f"name={name.replace(' ', '_')}", "trace=false"]


def test_told_to_end_in_a_step_that_does_not_end_it_saves_the_state_before_it(tmp_path):
    """What was acted in the step that is given up is acted again: bit for bit what a run in one go learns."""
    keys = ("--config", TOY, *SMALL, f"output_dir={tmp_path}", "checkpoint.every=0", "trace=false")
    ranks = start(
        *keys,
        "flow=tests.runs.programs.held.acting",
        "checkpoint.grace=10",
        "name=told",
        HELD_AT="2",
        HELD_IN=str(tmp_path),
    )
    try:
        until(lambda: ranks.ended() or (tmp_path / HELD).exists(), "the step that does not end", 60)
        ranks.kill(0, signal.SIGTERM)
        assert ranks.codes() == [75], ranks.everything()
    finally:
        ranks.end()
    assert "stopped after step 2; step 3 " in ranks.printed(0)
    lines = [["never", *keys[2:], "name=whole"], ["auto", *keys[2:], "name=told"]]
    launch(TOY, program=PROGRAMS / "many.py", text="".join(json.dumps(line) + "\n" for line in lines))
    whole, told = policy_of(tmp_path / "whole"), policy_of(tmp_path / "told")
    assert all(torch.equal(told[name], tensor) for name, tensor in whole.items())
    assert [line["env_steps/total"] for line in metrics_of(tmp_path / "told")] == [80.0 * n for n in range(1, 7)]


def policy_of(run):
    return load_file(run / "checkpoints" / "latest" / "policy" / "policy.safetensors")


def without_trials(run):
    """What was learned, without what depends on the clock; the first half of a run has trials at its end."""
    lines = learned(run)
    return [
        {key: line[key] for key in line if not key.startswith(("evaluation/", "env_steps_per_s"))} for line in lines
    ]


def equal(one: Path, other: Path) -> None:
    """Both learned the same, bit for bit."""
    assert without_trials(one) == without_trials(other)
    assert [line["step"] for line in without_trials(one)] == list(range(1, STEPS + 1))
    mine, theirs = policy_of(one), policy_of(other)
    assert mine.keys() == theirs.keys()
    for name in mine:
        assert torch.equal(mine[name], theirs[name]), name


@pytest.mark.parametrize("name", VARIANTS)
def test_it_runs_and_changes_the_policy(runs, name):
    run = runs / "whole" / name.replace(" ", "_")
    steps = metrics_of(run)
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    assert {"env_steps", "env_steps_per_s", "episodes", "reward/mean", "staleness/mean"} <= steps[-1].keys()
    assert any(step["optimizer_steps"] > 0 for step in steps)
    tried = [step["step"] for step in steps if "evaluation/success_once" in step]
    assert tried == ([2, 4, 6] if "trials.every=2" in VARIANTS[name] else [6])
    older = load_file(run / "checkpoints" / "step_000004" / "policy" / "policy.safetensors")
    assert not torch.equal(policy_of(run)["log_std"], older["log_std"])


@pytest.mark.parametrize("name", RESUMED)
def test_it_goes_on_bit_for_bit(runs, name):
    equal(runs / "half" / name.replace(" ", "_"), runs / "whole" / name.replace(" ", "_"))


def test_where_episodes_go_on_over_steps_they_are_another_experience(runs):
    """Seven steps in an episode and five decisions in a step: fresh episodes never reach their limit."""
    fresh, under_way = (without_trials(runs / "whole" / name) for name in ("ppo", "under_way"))
    assert all(step.get("episodes/length", 0) <= 5 for step in fresh)
    assert any(step.get("episodes/length", 0) > 5 for step in under_way)


def test_nothing_is_acted_ahead_over_a_checkpoint(runs):
    """Checkpoints come after every second step, and the weights that act are at most one version old."""
    assert [step["staleness/mean"] for step in metrics_of(runs / "whole" / "acting_ahead")] == [0, 1] * 3
    assert [step["staleness/mean"] for step in metrics_of(runs / "whole" / "under_way")] == [0] * STEPS


@pytest.mark.parametrize("name", ["under way"])
def test_a_killed_run_goes_on_as_if_it_had_not_been(runs, plain, tmp_path, name):
    run = tmp_path / "under_way"
    killed(lambda: steps_noted(run) >= 4, "--config", plain, *arguments(name, tmp_path))
    launch("--config", plain, *arguments(name, tmp_path), "--resume", "auto")
    equal(run, runs / "whole" / "under_way")


@pytest.mark.torchrun
def test_two_processes_and_child_processes_learn_what_one_process_does(runs, plain, tmp_path):
    launch("--config", plain, *arguments("ppo", tmp_path), "env.workers=2", "placement.trainer=1", processes=2)
    equal(tmp_path / "ppo", runs / "whole" / "ppo")


# What is wrong is one message ----------------------------------------------------------------------------------------

WRONG = {
    "a key that the policy has not": (("policy.settings={hiden: [8]}",), ("hiden", "did you mean hidden?")),
    "a policy without its sizes": (("policy.type=cnn",), ("policy cnn needs image",)),
    "a policy that looks at what there is not": (
        ("policy.type=cnn", "policy.settings={image: [16, 16, 3]}"), ("'rgb'", "the observation has not"),
    ),
    "advantages for text": (("algorithm=rloo",), ("'rloo'", "take ppo or grpo")),
    "a part for text": (("algorithm=deepseek_grpo", "env.group_size=4"), ("kl is for text", "take a recipe without")),
    "groups that begin at different times": (("algorithm=grpo", "env.group_size=4", "env.fresh=false"), ("env.fresh",)),
    "an option that the simulator has not": (("env.options={dimz: 2}",), ("dimz",)),
    "an option refused in a child process": (("env.options={dims: 7}", "env.workers=2"), ("dims=7 must be 1 or 2",)),
    "a flow that wants more": (("flow=own.hungry",), ("flow", "critic", "step, env, policy, trainer")),
    "a reward that is no number": (("env.simulator=own.Broken",), ("step 1", "not finite")),
}  # fmt: skip
OWN = """
from rlinf.envs.toy import Reach

async def hungry(step, env, policy, trainer, critic):
    return {}

class Broken(Reach):
    def step(self, actions, active):
        moved = super().step(actions, active)
        moved.reward[:] = float("nan")
        return moved
"""


@pytest.fixture(scope="module")
def answers(plain, tmp_path_factory):
    """What the front door answers to each wrong input: exit code, what it said, child processes that are left."""
    directory = tmp_path_factory.mktemp("wrong")
    (directory / "own.py").write_text(OWN)
    lines = [["--config", plain, *SMALL, *given, f"output_dir={directory}"] for given, _ in WRONG.values()]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    done = launch(program=PROGRAMS / "answers.py", text=text, cwd=directory, timeout=200)
    told = [json.loads(line.removeprefix("told ")) for line in done.stdout.splitlines() if line.startswith("told ")]
    assert not (directory / "toy" / "checkpoints" / "latest").exists()
    return dict(zip(WRONG, told, strict=True))


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_is_said_once_and_nothing_is_left_running(answers, name):
    code, told, left = answers[name]
    assert code == (1 if name == "a reward that is no number" else 2), told
    assert "Traceback" not in told
    assert told.count("error:") == 1, told
    for text in WRONG[name][1]:
        assert text in told, told
    assert left == ""


def test_a_wrong_input_ends_the_process_with_exit_code_2(plain, tmp_path):
    done = launch("--config", plain, *SMALL, "algorithm=rloo", f"output_dir={tmp_path}", expect=2)
    assert "Traceback" not in done.stderr
    assert done.stderr.count("error:") == 1
