"""The front door: what a command line is answered with, how fast, how often, and with which exit code."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from rlinf.cli.main import describe, main, parse
from rlinf.config.importing import shipped
from rlinf.config.load import InputError
from rlinf.config.text import RunConfig
from rlinf.metrics import MetricsFile, ProgressTable
from rlinf.runs.rules import load_config
from rlinf.runs.start import train
from tests.cards import pretend
from tests.launching import QUICKSTART, ROOT, TINY, command, environment, launch, metrics_of, start, steps_noted, typed
from tests.runtime.programs.jobs import descendants, patient, until

NEVER_NEEDED = (
    "torch", "transformers", "tokenizers", "numpy", "wandb", "swanlab", "tensorboard", "aiohttp", "httpx", "accelerate",
    "scipy", "sympy", "safetensors", "huggingface_hub", "datasets", "pandas", "PIL",
)  # fmt: skip


# Command lines -------------------------------------------------------------------------------------------------------


def test_options_and_overrides_may_come_in_any_order():
    request = parse(["steps=3", "--config", "a.yaml", "x.y=-1", "--dry-run", "name=z=z"])
    assert (request.config, request.overrides, request.dry_run) == ("a.yaml", ("steps=3", "x.y=-1", "name=z=z"), True)
    assert parse(["--config=a.yaml"]).config == "a.yaml"
    assert parse(["-h"]).help


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "add --config"),
        (["--config"], r"expected.*argument"),
        (["--config", "a.yaml", "--steps=3"], "write steps=VALUE"),
        (["--conf", "a.yaml"], r"mean --config"),
        (["--config", "a.yaml", "--verbose"], "goes with --dry-run"),
    ],
)
def test_a_wrong_command_line_says_what_to_write(arguments, said):
    with pytest.raises(InputError, match=said):
        parse(arguments)


def test_a_mistake_in_the_input_is_one_message_without_traceback_and_exit_code_2(capsys):
    assert main(["--config", str(ROOT / QUICKSTART), "sft.stpes=3", "steps=many"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    first, *problems = err.splitlines()
    assert first.startswith("error: 2 problems ")
    assert [line.split()[2].strip(":") for line in problems] == ["sft.stpes", "steps"]


def test_help_lists_every_option_and_key(capsys):
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    for text in ("--config FILE", "--dry-run", "optimizer.lr: float = 1e-06", "Learning rate after warm-up."):
        assert text in out


def test_a_dry_run_prints_a_config_that_loads_to_the_same_and_where_the_roles_run(tmp_path, capsys):
    config = load_config(ROOT / QUICKSTART, ["steps=7"])
    (tmp_path / "again.yaml").write_text(describe(config, 2, whole=True))
    assert load_config(tmp_path / "again.yaml") == config
    assert "\n  trainer    devices 0-1" in describe(config, 2)
    assert "torchrun --nproc-per-node 2 would place them" in describe(config, 1)
    assert main(["--config", str(ROOT / QUICKSTART), "--dry-run", f"output_dir={tmp_path}/none"]) == 0
    told = capsys.readouterr().out
    assert "steps: 100" not in told
    assert len(told.splitlines()) < 24, "a screen"
    assert told.splitlines()[-1].startswith("Configuration: --dry-run --verbose prints every key")
    assert main(["--config", str(ROOT / QUICKSTART), "--dry-run", "--verbose", f"output_dir={tmp_path}/none"]) == 0
    assert "steps: 100" in capsys.readouterr().out
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("config", "cards"),
    [
        *((QUICKSTART, cards) for cards in (0, 1, 2, 8)),
        ("configs/agents/calculator.yaml", 1),
        ("configs/embodied/toy.yaml", 0),
    ],
)
def test_two_processes_of_what_the_pages_name_first_start_on_a_machine_with_any_number_of_gpus(
    monkeypatch, capsys, config, cards
):
    under_torchrun(monkeypatch, cards)
    assert main(["--config", str(ROOT / config), "--dry-run"]) == 0, capsys.readouterr().err
    assert "2 processes" in capsys.readouterr().out
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1", "a run leaves its process the GPUs that it had"


def under_torchrun(monkeypatch, cards, **changed):
    """This process is the first of two of a machine with so many GPUs, unless `changed` says otherwise."""
    pretend(monkeypatch, rank=0, cards=cards)
    told = {"WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "RANK": 0, "CUDA_VISIBLE_DEVICES": "0,1"} | changed
    for name, value in told.items():
        monkeypatch.setenv(name, str(value))


def test_commands_of_the_readme_name_what_runs_without_gpus():
    """Each is started with as many processes as it is written with, and leaves GPUs alone where there are some."""
    blocks = re.findall(r"(<!-- not run.*?-->\n)?```bash\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    lines = [line for unrun, text in blocks if not unrun for line in text.splitlines()]
    named = [name for line in lines for name in re.findall(r"--config (\S+)", line)]
    assert len(named) >= 3
    for name in named:
        assert load_config(shipped(name)).placement.device_kind == "cpu", name


@pytest.mark.parametrize(("cards", "runs"), [(1, False), (2, True), (8, True)])
def test_processes_beyond_the_gpus_are_refused_in_one_line(monkeypatch, capsys, cards, runs):
    under_torchrun(monkeypatch, cards)
    code = main(["--config", str(ROOT / QUICKSTART), "placement.device_kind=cuda", "--dry-run"])
    told = capsys.readouterr().err
    assert (code, told) == (0, "") if runs else code == 2
    if not runs:
        assert told.startswith("error: placement.trainer: ")
        assert "--nproc-per-node 1" in told
        assert told.count("\n") == 1


def test_the_first_process_of_another_machine_refuses_what_is_beyond_its_own_gpus(monkeypatch):
    under_torchrun(monkeypatch, cards=1, WORLD_SIZE=4, RANK=2)
    config = load_config(ROOT / QUICKSTART, ["placement.device_kind=cuda", "placement.rollout,trainer=0-3"], 4)
    with pytest.raises(InputError, match=r"placement\.trainer.*nproc-per-node 1"):
        train(config, rank=2)


def test_the_first_lines_of_a_run_that_leaves_gpus_alone_say_so(monkeypatch, capsys):
    monkeypatch.setattr("rlinf.cli.main.train", lambda *_: None)
    assert main(["--config", str(ROOT / QUICKSTART)]) == 0
    assert "placement.device_kind=cpu" in "".join(capsys.readouterr().out.splitlines()[:2])
    assert main(["--config", str(ROOT / QUICKSTART), "placement.device_kind=auto"]) == 0
    assert "device_kind" not in capsys.readouterr().out


def test_the_report_of_torchrun_ends_with_the_mistake(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", "")  # as by --log-dir /dev/null: there is none
    assert main(["--config", QUICKSTART, "stepss=1"]) == 2
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    assert main(["--config", QUICKSTART, "stepss=1"]) == 2
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=2, error_file=str(tmp_path / "error.json"))
    *_, told, _ = str(ChildFailedError("launch.py", {0: failure})).splitlines()
    assert "command line: stepss" in capsys.readouterr().err
    assert "command line: stepss" in told


def test_a_limit_of_open_files_is_one_line(monkeypatch, capsys):
    def opens(*_):
        try:
            raise OSError(errno.EMFILE, "Too many open files")
        except OSError as error:
            raise RuntimeError("a child could not be started") from error

    monkeypatch.setattr("rlinf.cli.main.load_any", opens)
    assert main(["--config", QUICKSTART]) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: too many open files: ")
    assert "ulimit -n" in said
    assert said.count("\n") == 1


FIRST_LINE = "import rlinf.cli.main as main; main.train = lambda *_: None; main.main(['--config', 'quickstart'])"
"""What a run does until its first line is out, and the next is that it starts."""


@pytest.mark.parametrize(
    ("code", "most"),
    [
        ("import rlinf", 10),
        ("from rlinf.cli.commands import main; main(['--version'])", 430),
        ("from rlinf.cli.main import main; main(['--help'])", 430),
        (f"from rlinf.cli.main import main; main(['--config', '{QUICKSTART}', 'x=1'])", 430),
        (FIRST_LINE, 430),
    ],
)
def test_help_mistakes_and_the_first_line_of_a_run_import_little_and_nothing_that_computes(code, most):
    code = f"""import sys
before = {{*sys.modules}}
try:
    {code}
except SystemExit:
    pass
print("imported", len({{*sys.modules}} - before), [name for name in {NEVER_NEEDED} if name in sys.modules])"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True, timeout=60
    )
    _, count, heavy = done.stdout.splitlines()[-1].split(" ", 2)
    assert heavy == "[]"
    assert int(count) <= most


def test_a_dry_run_on_text_imports_no_planner_no_simulators_nothing_that_acts_and_no_model_that_it_knows():
    assert main(["--config", QUICKSTART, "--dry-run"]) == 0, "the model is known from here on"
    code = "import sys; from rlinf.cli.main import main; main(sys.argv[1:]); sys.exit([*filter({}, sys.modules)] or 0)"
    unneeded = (
        *("rlinf.placement.planner", "rlinf.placement.simulate", "rlinf.models.policy", "rlinf.training.embodied"),
        *("transformers.modeling_utils", "transformers.generation.utils", "torch._dynamo", "torch.distributed.tensor"),
        *("torch.distributed.checkpoint", "torch.distributed.fsdp", "rlinf.models.language.policy_model", "scipy"),
    )
    arguments = [code.format(f"lambda name: name.startswith({unneeded})"), "--config", QUICKSTART, "--dry-run"]
    subprocess.run([sys.executable, "-c", *arguments], cwd=ROOT, check=True, capture_output=True, timeout=110)


# What a run writes ---------------------------------------------------------------------------------------------------


def test_metrics_are_on_disk_at_once_one_json_object_per_step(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path) as file:
        file.write(1, {"reward/mean": 0.5, "loss": float("nan")})
        assert json.loads(path.read_text()) == {"step": 1, "reward/mean": 0.5, "loss": None}
        file.write(2, {})
    assert len(path.read_text().splitlines()) == 2


def test_progress_is_a_line_per_few_steps_with_means_and_ends_with_the_last_step():
    out = io.StringIO()
    table = ProgressTable(steps=5, every=2, out=out)
    for step in range(1, 6):
        table.add(step, {"reward/mean": step / 10, "timing/step": 2.0})
    header, *rows = out.getvalue().splitlines()
    assert header.split() == ["step", "reward", "s/step", "left"]
    assert [row.split() for row in rows] == [
        ["2", "0.150", "2.00", "6", "s"],
        ["4", "0.350", "2.00", "2", "s"],
        ["5", "0.500", "2.00", "0", "s"],
    ]


def test_the_column_of_failures_joins_with_the_first_of_them_and_stays():
    out = io.StringIO()
    table = ProgressTable(steps=4, every=1, out=out, announced=["evaluation/accuracy"])
    for step, failed in enumerate([0.0, 0.25, 0.0, 0.5], 1):
        table.add(step, {"reward/mean": 1.0, "reward/failed": failed, "timing/step": 1.0})
    first, one, second, *rest = out.getvalue().splitlines()
    assert first.split() == ["step", "reward", "accuracy", "s/step", "left"]
    assert one.split() == ["1", "1.000", "1.00", "3", "s"]
    assert second.split() == ["step", "reward", "not", "scored", "accuracy", "s/step", "left"]
    assert [row.split()[2] for row in rest] == ["25.0%", "0.0%", "50.0%"]


def test_the_column_of_accuracy_becomes_one_of_rewards_once_they_are_no_longer_0_or_1():
    out = io.StringIO()
    table = ProgressTable(steps=3, every=1, out=out)
    for step, graded in enumerate([{}, {"evaluation/graded": 0.5}, {}], 1):
        table.add(step, {"evaluation/accuracy": step / 2, "timing/step": 1.0} | graded)
    first, one, second, *rest = out.getvalue().splitlines()
    assert [line.split()[1] for line in (first, one, second, *rest)] == [
        "accuracy", "50.0%", "held-out", "1.000", "1.500",
    ]  # fmt: skip


# Whole runs ----------------------------------------------------------------------------------------------------------


def check_run_directory(path: Path) -> None:
    """What a run of `TINY` must leave."""
    lines = metrics_of(path)
    assert [line["step"] for line in lines] == [1, 2, 3]
    named = {
        "reward/mean",
        "response_length/mean",
        "clip_frac",
        "kl",
        "entropy",
        "grad_norm",
        "tokens_per_s",
        "timing/step",
    }
    for line in lines:
        assert named <= line.keys()
    assert [line["step"] for line in lines if "evaluation/accuracy" in line] == [2, 3]
    samples = [json.loads(line) for line in (path / "samples.jsonl").read_text().splitlines()]
    assert {sample["step"] for sample in samples} == {0, 1, 2, 3}
    assert "evaluation/accuracy" in (path / "report.html").read_text()
    assert json.loads((path / "trace.json").read_text())["traceEvents"]
    assert load_config(path / "resolved.yaml").steps == 3
    checkpoints = {entry.name for entry in (path / "checkpoints").iterdir()}
    assert checkpoints == {"step_000002", "step_000003", "latest"}
    assert os.readlink(path / "checkpoints" / "latest") == "step_000003"


@pytest.mark.slow
def test_one_process_runs_the_whole_and_the_model_loads(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    done = typed("--config", QUICKSTART, *TINY, f"output_dir={tmp_path}")
    check_run_directory(tmp_path / "quickstart")
    assert "rollout, judge, trainer in one process" in done.stdout
    assert "accuracy on 20 held-out problems" in done.stdout
    slow = r"(?m)^.+: (.+, )?\d+:\d\d gone.*\n|^.+: done in \d+:\d\d\n"  # what takes long on a busy machine
    assert re.sub(slow, "", done.stderr) == "", "nothing but our own lines"
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "quickstart" / "checkpoints" / "latest" / "hf")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "quickstart" / "checkpoints" / "latest" / "hf")
    prompt = tokenizer("3142>", return_tensors="pt")
    assert model.generate(**prompt, max_new_tokens=2, min_new_tokens=2).shape == (1, 7)


@pytest.mark.slow
@pytest.mark.torchrun
def test_two_processes_run_the_same_with_roles_on_their_hosts(tmp_path):
    done = launch("--config", QUICKSTART, *TINY, f"output_dir={tmp_path}", processes=2)
    check_run_directory(tmp_path / "quickstart")
    assert "rollout on host 0, 1, judge on host 0, trainer on host 0, 1" in done.stdout
    assert "sharding replicate, which auto chose by no limit of memory" in done.stdout
    assert done.stdout.count("accuracy on 20 held-out problems") == 1, "one rank speaks for all"
    assert "Traceback" not in done.stderr


MORE_WRONG = ("sft.stpes=1", "model.config.hiden_size=8")


@pytest.mark.slow
@pytest.mark.torchrun
@pytest.mark.parametrize(
    "wrong", ["placement.trainer=2", *(pytest.param(key, marks=pytest.mark.repeated) for key in MORE_WRONG)]
)
def test_under_torchrun_one_process_says_the_mistake_and_it_fails_the_job(tmp_path, wrong):
    done = typed("--config", QUICKSTART, wrong, f"output_dir={tmp_path}", processes=2, expect=1)
    ours, _, torchruns = done.stderr.partition("ChildFailedError")
    assert ours.count("1 problem in the configuration; nothing was started.") == 1
    assert all(wrong.partition("=")[0] in said for said in (ours, torchruns)), "the last that is printed says it, too"
    assert "exitcode  : 2" in done.stderr
    assert not (tmp_path / "quickstart").exists()


@pytest.mark.slow
@pytest.mark.torchrun
def test_help_and_dry_run_are_printed_once_by_several_processes():
    assert launch("--help", processes=2).stdout.count("usage:") == 1
    assert launch("--config", QUICKSTART, "--dry-run", processes=2).stdout.count("Roles: 2 processes") == 1


FLOW = """
async def {name}(step, rollout, judge{more}):
    groups = [group async for group in judge.score.map(rollout.generate(step.prompts, n=step.group_size))]
    {end}
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "more", "end", "expect", "said"),
    [
        ("only_try", "", "return {'reward/mean': len(groups) / 4}", 0, "1.000"),
        ("silent", "", "return None", 2, "returned None"),
        ("odd", ", referee", "return {}", 2, "it takes referee"),
        ("buggy", "", "return {'x': 1 / 0}", 1, "ZeroDivisionError"),
    ],
)
def test_a_flow_of_ones_own_in_the_current_directory(tmp_path, name, more, end, expect, said):
    (tmp_path / "own_flow.py").write_text(FLOW.format(name=name, more=more, end=end))
    arguments = ["--config", str(ROOT / QUICKSTART), *TINY, f"flow=own_flow.{name}", "steps=1", "sft.steps=0"]
    done = launch(*arguments, "checkpoint.every=0", expect=expect, cwd=tmp_path)
    assert said in done.stdout + done.stderr
    assert ("Traceback" in done.stderr) == (expect == 1), "a bug keeps its traceback, a mistake in the input has none"


@pytest.mark.slow
def test_the_example_of_a_flow_of_ones_own_runs(tmp_path):
    launch("--config", QUICKSTART, *TINY, "flow=examples.custom_flow.best_of_n", f"output_dir={tmp_path}")
    assert [line["step"] for line in metrics_of(tmp_path / "quickstart")] == [1, 2, 3]


def test_a_run_directory_that_cannot_be_made_is_a_mistake_in_the_input(tmp_path):
    (tmp_path / "file").write_text("")
    from rlinf.runs.start import open_run_directory

    with pytest.raises(InputError, match=r"output_dir:.*run directory"):
        open_run_directory(tmp_path / "file" / "run", RunConfig(), None)


LONG = ("--config", QUICKSTART, *TINY, "steps=100000", "system.host_timeout=4")


@pytest.mark.torchrun
def test_a_killed_process_ends_a_run_with_one_line_that_says_how_to_go_on(tmp_path):
    run = [*LONG, f"output_dir={tmp_path}"]
    process = subprocess.Popen(
        command(*run, processes=2),
        cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    metrics = tmp_path / "quickstart" / "metrics.jsonl"
    until(lambda: metrics.exists() and metrics.read_text(), "the first step", 90)
    ranks = descendants(process.pid)
    lost = next(pid for pid in ranks if b"\0RANK=1\0" in Path(f"/proc/{pid}/environ").read_bytes())
    os.kill(lost, signal.SIGKILL)
    begun = time.monotonic()
    _, err = process.communicate(timeout=60)
    assert time.monotonic() - begun < patient(14.0)
    assert process.returncode not in (0, None)
    told_of_the_loss(err, lost)
    assert not [pid for pid in ranks if Path(f"/proc/{pid}/stat").exists()]


@pytest.mark.torchrun
def test_so_does_a_silent_one(tmp_path):
    run = start(*LONG, f"output_dir={tmp_path}", processes=2)
    until(lambda: run.ended() or steps_noted(tmp_path / "quickstart"), "the first step", 90)
    run.kill(1, signal.SIGSTOP)
    begun = time.monotonic()
    codes = run.codes(60)
    assert time.monotonic() - begun < patient(14.0)
    assert codes == [1, -signal.SIGKILL], run.everything()
    told_of_the_loss(run.complained(0), run.pids[1])


def told_of_the_loss(err, lost):
    """A run says in one line that it lost its second process, and how to go on."""
    before, told, rest = err.partition(f"error: host 1 (pid {lost} on ")
    line, _, after = rest.partition("\n")
    assert told, err
    assert re.search(r"\) was lost at [\d:]+, and with it .*trainer\[1\].*: \S", line)
    assert "; --resume auto goes on from its last checkpoint, torchrun --max-restarts N does so by itself." in line
    assert "host 1" not in after
    assert "rlinf/" not in before + after, "frames help nobody whose machine is gone; torchrun adds some of its own"


@pytest.mark.slow
def test_ctrl_c_ends_a_run_without_a_traceback_and_says_how_to_go_on(tmp_path):
    run = start("--config", QUICKSTART, *TINY, "steps=100000", "checkpoint.every=0", f"output_dir={tmp_path}")
    until(lambda: steps_noted(tmp_path / "quickstart"), "the first step", 90)
    run.kill(0, signal.SIGINT)
    assert run.code(0, 20) == 130
    told = run.complained(0)
    assert "Traceback" not in told
    assert "rlinf: no checkpoint is there to go on from: " in told
    assert "checkpoint.minutes=30" in told
