"""Job files for schedulers: the script for Slurm is run by a shell with stand-ins, the others are read."""

import os
import signal
import subprocess
import sys

import pytest
import yaml

from rlinf.cli.launch import launch
from rlinf.config.load import InputError
from rlinf.runs.rules import load_config
from tests.launching import ROOT, TINY, environment, steps_noted
from tests.runtime.programs.jobs import until

QUICKSTART = ("--config", str(ROOT / "configs" / "quickstart.yaml"))
SRUN = """#!/bin/bash
shift                                   # its option; a task for the one node
"$@" & task=$!
trap 'kill -USR1 $task' USR1            # as srun passes signals on
wait $task; code=$?
[ $code -gt 128 ] && { wait $task; code=$?; }
exit $code
"""
SCONTROL = """#!/bin/bash
[ "$1" = show ] && echo 127.0.0.1 || echo "$@" >> "$CALLS"
"""


def written(capsys, *arguments):
    launch(arguments)
    return capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.torchrun
@pytest.mark.timeout(300)
def test_a_signal_of_slurms_leaves_a_checkpoint_and_the_job_is_queued_again(tmp_path, capsys):
    more = (f"output_dir={tmp_path}", "steps=100000", "evaluation.every=0", "checkpoint.grace=50")
    script = written(capsys, "slurm", *QUICKSTART, "--gpus", "0", *TINY, *more)
    commands = tmp_path / "bin"
    commands.mkdir()
    torchrun = f'#!/bin/bash\nexec "{sys.executable}" -m torch.distributed.run "$@"\n'
    for name, text in {"srun": SRUN, "scontrol": SCONTROL, "torchrun": torchrun}.items():
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    slurm = {"SLURM_JOB_NODELIST": "node1", "SLURM_NNODES": "1", "SLURM_NODEID": "0", "SLURM_JOB_ID": str(os.getpid())}
    path = {"PATH": f"{commands}:{os.environ['PATH']}", "CALLS": str(tmp_path / "calls")}
    job = subprocess.Popen(
        ["bash", "-c", script],
        cwd=ROOT, env=environment(**slurm, **path), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    run = tmp_path / "quickstart"
    try:
        until(lambda: job.poll() is not None or steps_noted(run) >= 1, "the first step", 150)
        job.send_signal(signal.SIGUSR1)
        said, _ = job.communicate(timeout=90)
    finally:
        job.kill()
    assert job.returncode == 0, said
    assert "told to end by SIGUSR1: stopped after step " in said
    assert (tmp_path / "calls").read_text() == f"requeue {os.getpid()}\n"
    assert list((run / "checkpoints").glob("step_*"))


def test_slurm_gets_machines_gpus_further_lines_and_its_signal_before_the_kill(capsys):
    script = written(
        capsys, "slurm", *QUICKSTART, "--nodes", "3", "steps=7", "--gpus", "4", "--directive=--time=9", "name=it's mine"
    )
    lines = [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH")]
    assert {"--gpus-per-node=4", "--time=9", "--nodes=3 --ntasks-per-node=1", "--job-name=it-s-mine"} <= {*lines}
    assert "--nproc-per-node 4 " in script
    shell = ["bash", "-c", f"srun() {{ shift 4; printf '%s|' \"$@\"; }}; scontrol() {{ :; }}\n{script}\nwait"]
    given = subprocess.run(shell, capture_output=True, text=True, check=True).stdout
    assert given == "|".join(("rlinf", *QUICKSTART, "steps=7", "name=it's mine", "--resume", "auto", ""))


def test_a_job_set_has_a_pod_per_machine_and_the_whole_configuration(tmp_path, capsys):
    output = tmp_path / "job.yaml"
    arguments = ("--nodes", "2", "--gpus", "4", "--image", "an/image", "--claim", "runs", "--output", str(output))
    assert written(capsys, "k8s", *QUICKSTART, "steps=7", *arguments) == f"kubectl apply -f {output}\n"
    config, job_set, network = yaml.safe_load_all(output.read_text())
    (tmp_path / "config.yaml").write_text(config["data"]["config.yaml"])
    assert load_config(tmp_path / "config.yaml") == load_config(QUICKSTART[1], ["steps=7"])
    (workers,) = job_set["spec"]["replicatedJobs"]
    job = workers["template"]["spec"]
    assert (job["parallelism"], job["completions"], job["completionMode"]) == (2, 2, "Indexed")
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 4}
    name, domain = job_set["metadata"]["name"], job_set["spec"]["network"]["subdomain"]
    assert f'--master-addr "{name}-{workers["name"]}-0-0.{domain}"' in container["command"][2]
    assert "--nproc-per-node 4 " in container["command"][2]
    mounted = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    assert container["args"][1] == f"{mounted['config']}/config.yaml"
    assert {each["name"] for each in pod["volumes"]} == {*mounted}
    assert network["spec"]["podSelector"]["matchLabels"] == {"jobset.sigs.k8s.io/jobset-name": name}


JOINED = ("rollout.join=auto:29600", "output_dir=/shared/runs")
RLINF = """#!/bin/bash
trap 'echo left; exit 0' TERM
echo "$@"
[ -e "$2/fails" ] && rm "$2/fails" && exit 1
while :; do sleep 0.05; done
"""


def test_slurms_joiners_are_an_array_that_joins_when_the_run_is_there_and_leaves_when_it_is_told(tmp_path, capsys):
    script = written(capsys, "slurm", *QUICKSTART, *JOINED, "--join", "5", "--directive=--time=9")
    lines = [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH")]
    assert {"--array=1-5 --ntasks=1", "--gpus=1", "--time=9", "--job-name=quickstart-joiners"} <= {*lines}
    assert "scancel --name=quickstart-joiners" in written(capsys, "slurm", *QUICKSTART, *JOINED)
    run, sleeps = tmp_path / "quickstart", tmp_path / "sleeps"
    script = written(capsys, "slurm", *QUICKSTART, JOINED[0], f"output_dir={tmp_path}", "--join", "1")
    commands = {"srun": '#!/bin/bash\nexec "$@"\n', "rlinf": RLINF, "sleep": f"#!/bin/bash\necho >> {sleeps}\n"}
    for name, text in commands.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    job = subprocess.Popen(["bash", "-c", script], env=environment(**path), stdout=subprocess.PIPE, text=True)
    try:
        until(lambda: sleeps.exists() and sleeps.stat().st_size > 1, "waits for the run")
        run.mkdir()
        (run / "fails").touch()
        (run / "join.json").touch()
        said = [job.stdout.readline(), job.stdout.readline()]
        job.send_signal(signal.SIGTERM)
        rest, _ = job.communicate(timeout=60)
    finally:
        job.kill()
    assert said == [f"join {run} --role rollout\n"] * 2  # the first of them failed
    assert rest == "left\n"


def test_joiners_of_kubernetes_are_a_deployment_that_may_speak_to_the_run(capsys):
    own = ("--image", "an/image", "--claim", "runs")
    (joiners,) = yaml.safe_load_all(written(capsys, "k8s", *QUICKSTART, JOINED[0], *own, "--join", "3"))
    assert (joiners["kind"], joiners["spec"]["replicas"]) == ("Deployment", 3)
    *_, network = yaml.safe_load_all(written(capsys, "k8s", *QUICKSTART, JOINED[0], *own))
    labels = joiners["spec"]["template"]["metadata"]["labels"]
    assert joiners["spec"]["selector"]["matchLabels"] == labels
    assert {"podSelector": {"matchLabels": labels}} in network["spec"]["ingress"][0]["from"]
    *_, closed = yaml.safe_load_all(written(capsys, "k8s", *QUICKSTART, *own))
    assert len(closed["spec"]["ingress"][0]["from"]) == 1
    (container,) = joiners["spec"]["template"]["spec"]["containers"]
    assert container["command"][-3:] == ["/shared/runs/quickstart", "rollout", "join.json"]


def test_a_task_of_skypilots_has_its_gpus_and_a_volume(capsys):
    task = yaml.safe_load(
        written(capsys, "skypilot", *QUICKSTART, "--nodes", "2", "--gpu", "H100", "--spot", "--volume", "runs")
    )
    assert (task["num_nodes"], task["volumes"]) == (2, {"/shared": "runs"})
    assert (task["resources"]["accelerators"], task["resources"]["use_spot"]) == ("H100:8", True)
    assert "output_dir=/shared/runs --resume auto" in task["run"]


CODES = """#!/bin/bash
trap 'echo left; exit 0' TERM
echo "$@"
read -r code < "$CODES" && sed -i 1d "$CODES"
[ -z "$code" ] || exit "$code"
while :; do sleep 0.05; done
"""


def test_skypilots_joiners_are_tasks_of_one_machine_that_join_again_until_nobody_is_there(tmp_path, capsys):
    own = (*QUICKSTART, "trainer.join=auto:29601", "--join", "3", "--role", "trainer", "--gpu", "H100", "--spot")
    joiner = yaml.safe_load(written(capsys, "skypilot", *own, "--gpus", "8"))
    assert (joiner["name"], joiner["num_nodes"]) == ("quickstart-replicas", 1)
    assert (joiner["resources"]["accelerators"], joiner["resources"]["use_spot"]) == ("H100:1", True)
    assert (joiner["envs"], joiner["secrets"]) == ({"RLINF_JOIN_ADDRESS": None}, {"RLINF_JOIN_TOKEN": None})
    for name, text in {"rlinf": CODES, "sleep": "#!/bin/bash\nexec /bin/sleep 0.05\n"}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    codes = tmp_path / "codes"
    codes.write_text("2\n1\n0\n2\n")  # nobody there yet, the run is lost, it ends, nobody is there: it begins anew
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "CODES": str(codes), "RLINF_JOIN_ADDRESS": "10.0.0.1:29601"}
    script = ["bash", "-c", joiner["run"]]
    job = subprocess.Popen(script, env=environment(**path), stdout=subprocess.PIPE, text=True)
    try:
        said = [job.stdout.readline() for _ in range(5)]
        job.send_signal(signal.SIGTERM)
        rest, _ = job.communicate(timeout=60)
    finally:
        job.kill()
    assert (said, rest, job.returncode) == (["join 10.0.0.1:29601 --role trainer\n"] * 5, "left\n", 0)
    codes.write_text("2\n")
    gives_up = ["bash", "-c", joiner["run"].replace("3600", "0")]
    assert subprocess.run(gives_up, env=environment(**path), capture_output=True, text=True).returncode == 0


def test_skypilots_joiners_are_told_what_the_configuration_does_not_say(tmp_path, capsys):
    task = str(tmp_path / "task.yaml")
    own = ("skypilot", *QUICKSTART, "--join", "3", "--gpus", "0", "--output", task)
    loop = "for each in $(seq 3); do sky jobs launch -y -d "
    assert written(capsys, *own, JOINED[0]) == (
        f"{loop}--env RLINF_JOIN_ADDRESS --secret RLINF_JOIN_TOKEN {task}; done\n"
    )
    assert written(capsys, *own, "rollout.join=10.0.0.1:2") == f"{loop}--secret RLINF_JOIN_TOKEN {task}; done\n"
    assert yaml.safe_load((tmp_path / "task.yaml").read_text())["envs"] == {"RLINF_JOIN_ADDRESS": "10.0.0.1:2"}
    assert written(capsys, *own, JOINED[0], "--volume", "runs") == f"{loop}{task}; done\n"
    joiner = yaml.safe_load((tmp_path / "task.yaml").read_text())
    assert joiner["volumes"] == {"/shared": "runs"}
    assert joiner["run"].startswith("set -- /shared/runs/quickstart rollout join.json 3600\n")
    run = yaml.safe_load(written(capsys, "skypilot", *QUICKSTART, JOINED[0], "--gpus", "0", "--volume", "runs"))
    assert run["secrets"] == {"RLINF_JOIN_TOKEN": ""}


def test_replicas_of_the_trainer_are_jobs_of_their_own_beside_the_engines(capsys):
    both = (*QUICKSTART, *JOINED, "trainer.join=auto:29601")
    script = written(capsys, "slurm", *both, "--join", "2", "--role", "trainer")
    assert "--job-name=quickstart-replicas" in script
    assert script.endswith(" rlinf /shared/runs/quickstart trainer join-trainer.json\n")
    assert {"scancel --name=quickstart-joiners", "scancel --name=quickstart-replicas"} <= {
        line.partition("  #")[0] for line in written(capsys, "slurm", *both).splitlines()
    }
    own = ("--image", "an/image", "--claim", "runs")
    *_, network = yaml.safe_load_all(written(capsys, "k8s", *both, *own))
    deployments = [
        next(yaml.safe_load_all(written(capsys, "k8s", *both, *own, "--join", "3", "--role", role)))
        for role in ("rollout", "trainer")
    ]
    selectors = [each["spec"]["selector"] for each in deployments]
    assert selectors[0] != selectors[1]
    assert [each["metadata"]["name"] for each in deployments] == ["quickstart-joiners", "quickstart-replicas"]
    assert [each["podSelector"] for each in network["spec"]["ingress"][0]["from"]][1:] == selectors


def test_processes_that_score_want_no_gpu(capsys):
    joins = (*QUICKSTART, "reward.join=auto:29602", "reward.isolate=always", "--join", "2", "--role", "reward")
    script = written(capsys, "slurm", *joins)
    assert "--job-name=quickstart-scorers" in script
    assert "--gpus" not in script
    assert script.endswith(" reward join-reward.json\n")
    (deployment,) = yaml.safe_load_all(written(capsys, "k8s", *joins, "--image", "an/image", "--claim", "runs"))
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert "resources" not in container


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["slrum"], "slurm"),
        (["slurm", *QUICKSTART, "--nodes", "0"], "--nodes 0"),
        (["slurm", *QUICKSTART, "--nodes", "2", "--gpus", "4", "placement.trainer=0-8"], "placement.trainer"),
        (["skypilot", *QUICKSTART, "--volume", "runs"], "--gpu"),
        (["skypilot", *QUICKSTART, "--gpu", "H100"], "--volume"),
        (["slurm", *QUICKSTART, "--join", "2"], "rollout.join"),
        (["slurm", *QUICKSTART, *JOINED, "--join", "2", "--role", "trainer"], "trainer.join"),
        (["slurm", *QUICKSTART, "--output", "/no/such/place"], "/no/such"),
    ],
)
def test_what_cannot_be_right_is_named(arguments, named):
    with pytest.raises(InputError, match=named):
        launch(arguments)
