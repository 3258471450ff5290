"""`rlinf launch`: a job file that starts a configuration on machines of Slurm, Kubernetes (JobSet) or SkyPilot.

In: a configuration, and how many machines with how many GPUs. Out: the file that the scheduler's own command takes, in
which torchrun starts a process per GPU on every machine. Where machines are taken away, the run writes a checkpoint in
its grace, and goes on from there when the scheduler starts it again (`--resume auto`). With `--join N` the file is that
of N engines, or with `--role trainer` replicas of the trainer, which join this run, one per GPU, wherever and whenever
they find room; with `--role reward` of N processes that score, without one. Nothing is submitted.
"""

from __future__ import annotations

import argparse
import math
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rlinf.cli.main import output_file
from rlinf.config.importing import look_in_working_directory, shipped
from rlinf.config.load import InputError, dump
from rlinf.config.schema import nearest
from rlinf.config.text import RunConfig
from rlinf.joining.address import FILES, TOKEN
from rlinf.runs.rules import load_any

_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
_PORT = 29500
_AFTER_GRACE = 10
"""Seconds that torchrun waits for its ranks once they should have written their checkpoint."""
_SHARED = "/shared"
"""Where pods and SkyPilot's machines have what outlives them."""
_JOINING = """\
trap 'told=1; kill -TERM "$joiner"' TERM  # it hands on what it has begun
await() { "$@" & joiner=$!; [ -z "$told" ] || kill -TERM "$joiner"; wait "$joiner"; }
while [ -z "$told" ]; do
    if [ -z "$3" ] || [ -e "$1/$3" ]; then
        await rlinf join "$1" --role "$2"; code=$?
        [ "$code" -eq 2 ] || SECONDS=0  # bash counts them; 2: nobody was there to join
        [ "$code" -ne 0 ] || continue
    fi
    [ -z "$told" ] && { [ -z "$4" ] || [ "$SECONDS" -lt "$4" ]; } || break
    await sleep 10
done
wait
"""
"""Shell commands that join a run again and again, as it begins and begins anew, until they are told to end. They are
given its directory or address, the role, the file of that directory that says where the role is joined, and after how
many seconds without a run they end; the last two may be empty. The directory is on a shared file system, which tells
nobody of files that other machines write: so it is looked at every 10 s, a moment beside the start of a job."""
_UNUSED = 3600
"""Seconds without a run after which a machine that is paid by the hour is given back: others take longer to find."""
_ADDRESS = "RLINF_JOIN_ADDRESS"
"""Environment variable of SkyPilot's joiners: where the run is joined, which is known once it goes on."""
_JOINERS = {"rollout": "joiners", "trainer": "replicas", "reward": "scorers"}
"""Ends of the names of jobs that join a run, by role."""
_WITHOUT_GPU = ("reward",)
"""Roles of which one that joins needs none."""
_LEAVING = 60
"""Seconds in which one that joined hands on what it has begun: a fraction of one, and what a busy machine may take."""


@dataclass(frozen=True, slots=True)
class Job:
    """A run, and the machines that it is to have."""

    name: str
    arguments: tuple[str, ...]
    """Arguments of `rlinf train`, without `--resume auto`."""
    nodes: int
    gpus: int
    """GPUs of each machine; 0 for machines without."""
    processes: int
    """Processes on each machine."""
    grace: float
    """Seconds in which the run writes its checkpoint when it is told to end."""
    config: str
    """All of the configuration, as YAML."""
    directory: str
    """Of the run, where it is started as the configuration says."""
    joined: Mapping[str, str]
    """Roles that others may join, with the address that each is joined at, as the configuration has it."""

    def joiners(self, role: str) -> str:
        """Name of the job of those that join a role."""
        return f"{self.label}-{_JOINERS[role]}"

    def gpus_to_join(self, role: str) -> int:
        """GPUs of each of those."""
        return int(self.gpus > 0 and role not in _WITHOUT_GPU)

    def joining(self, role: str) -> tuple[str, ...]:
        """Arguments of `_JOINING`, without the directory."""
        return role, FILES[role]

    def address(self, role: str) -> str | None:
        """Where a role is joined; None: it is known once the run goes on."""
        address = self.joined[role]
        return None if address.rpartition(":")[0] in ("auto", "0.0.0.0", "[::]") else address

    @property
    def shutdown(self) -> int:
        """Seconds from the signal to the kill."""
        return math.ceil(self.grace) + _AFTER_GRACE

    @property
    def label(self) -> str:
        """Its name as a DNS label, from which names of pods are made."""
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")[:40].strip("-") or "rlinf"

    def torchrun(self, nodes: str, rank: str, master: str, port: str = str(_PORT)) -> str:
        """The start of a command line that a shell reads: torchrun, and `rlinf train`.

        Args:
            nodes: how many machines there are, as the shell will have it; so are the others.
            rank: of this machine among them.
            master: address of the first one.
            port: of torchrun's store there.
        """
        return (
            f'torchrun --nnodes "{nodes}" --node-rank "{rank}" --nproc-per-node {self.processes} \\\n'
            f'    --master-addr "{master}" --master-port {port} \\\n'
            f"    --signals-to-handle {_SIGNALS} --shutdown-timeout {self.shutdown} \\\n"
            "    -m rlinf train"
        )


def slurm(job: Job, options: argparse.Namespace) -> str:
    """A batch script for `sbatch`, which is queued again when the time limit or somebody more important ends it.

    Args:
        job: what runs where.
        options: of the command; `directive` are further lines of `#SBATCH`.
    """
    directives = [
        f"--job-name={job.label}",
        f"--nodes={job.nodes} --ntasks-per-node=1",
        *([f"--gpus-per-node={job.gpus}"] if job.gpus else []),
        f"--requeue --open-mode=append --signal=B:USR1@{job.shutdown + 30}",
        *options.directive,
    ]
    start = job.torchrun("$SLURM_NNODES", "$SLURM_NODEID", "$MASTER", "$((20000 + SLURM_JOB_ID % 10000))")
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH {each}" for each in directives),
        "",
        "trap 'asked=1; kill -USR1 \"$job\"' USR1  # before the time limit; srun passes it on to every torchrun",
        'export MASTER=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        f"srun --kill-on-bad-exit=1 bash -c 'exec {start} \"$@\"' \\",
        f"    rlinf {shlex.join((*job.arguments, '--resume', 'auto'))} &",
        "job=$!",
        'wait "$job"; code=$?',
        'if [ -n "$asked" ]; then',
        '    wait "$job"  # the signal ended the first wait; now the checkpoint is written',
        '    scontrol requeue "$SLURM_JOB_ID"',
        "    exit 0",
        "fi",
        *(f"scancel --name={job.joiners(role)}  # of `launch slurm --join`: the run is over" for role in job.joined),
        'exit "$code"',
    ]
    return "\n".join(lines) + "\n"


def slurm_joiners(job: Job, options: argparse.Namespace) -> str:
    """A batch script for `sbatch`: an array of processes that join the run, each of which may be ended, queued again or
    added (`sbatch --array`) by itself.

    Args:
        job: what they join.
        options: of the command; `join` says how many, `role` as what, `directive` are further lines of `#SBATCH`.
    """
    directives = [
        f"--job-name={job.joiners(options.role)}",
        f"--array=1-{options.join} --ntasks=1",
        *(["--gpus=1"] if job.gpus_to_join(options.role) else []),
        f"--requeue --open-mode=append --signal=TERM@{_LEAVING}",
        *options.directive,
    ]
    command = shlex.join(("bash", "-c", _JOINING, "rlinf", job.directory, *job.joining(options.role)))
    return "\n".join(["#!/bin/bash", *(f"#SBATCH {each}" for each in directives), "", f"exec srun {command}"]) + "\n"


def kubernetes(job: Job, options: argparse.Namespace) -> str:
    """Manifests for `kubectl apply`: the configuration, a JobSet of one pod per machine, and who may speak to them.

    Args:
        job: what runs where.
        options: of the command; `image` has rlinf and the user's own code, `claim` is the volume for results.
    """
    start = job.torchrun(str(job.nodes), "$JOB_COMPLETION_INDEX", f"{job.label}-workers-0-0.{job.label}")
    arguments = ["--config", "/etc/rlinf/config.yaml", f"output_dir={_SHARED}/runs", "--resume", "auto"]
    container = {
        "name": "rlinf",
        "image": options.image,
        "command": ["bash", "-c", f'exec {start} "$@"', "rlinf"],
        "args": arguments,
        **({"resources": {"limits": {"nvidia.com/gpu": job.gpus}}} if job.gpus else {}),
        "volumeMounts": [
            {"name": "config", "mountPath": "/etc/rlinf"},
            {"name": "shared", "mountPath": _SHARED},
            {"name": "memory", "mountPath": "/dev/shm"},
        ],
    }
    pod = {
        "restartPolicy": "Never",  # the set begins anew as a whole
        "terminationGracePeriodSeconds": job.shutdown + _AFTER_GRACE,
        "containers": [container],
        "volumes": [
            {"name": "config", "configMap": {"name": job.label}},
            {"name": "shared", "persistentVolumeClaim": {"claimName": options.claim}},
            {"name": "memory", "emptyDir": {"medium": "Memory"}},  # NCCL's, and tensors between processes
        ],
    }
    workers = {
        "parallelism": job.nodes,
        "completions": job.nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "template": {"spec": pod},
    }
    belongs = {"matchLabels": {"jobset.sigs.k8s.io/jobset-name": job.label}}
    job_set = {
        "failurePolicy": {"maxRestarts": options.restarts},
        "network": {"enableDNSHostnames": True, "subdomain": job.label, "publishNotReadyAddresses": True},
        "replicatedJobs": [{"name": "workers", "replicas": 1, "template": {"spec": workers}}],
    }
    sources = [{"podSelector": each} for each in (belongs, *(_joiners(job, role) for role in job.joined))]
    network = {"podSelector": belongs, "policyTypes": ["Ingress"], "ingress": [{"from": sources}]}
    return _documents(
        _object("v1", "ConfigMap", job, data={"config.yaml": job.config}),
        _object("jobset.x-k8s.io/v1alpha2", "JobSet", job, spec=job_set),
        _object("networking.k8s.io/v1", "NetworkPolicy", job, spec=network),
    )


def kubernetes_joiners(job: Job, options: argparse.Namespace) -> str:
    """A Deployment for `kubectl apply`, of those who join the run; `kubectl scale` has more of them, or fewer.

    Args:
        job: what they join.
        options: of the command; `join` says how many, `role` as what, `image` and `claim` are those of the run.
    """
    container = {
        "name": "rlinf",
        "image": options.image,
        "command": ["bash", "-c", _JOINING, "rlinf", f"{_SHARED}/runs/{job.name}", *job.joining(options.role)],
        **({"resources": {"limits": {"nvidia.com/gpu": 1}}} if job.gpus_to_join(options.role) else {}),
        "volumeMounts": [{"name": "shared", "mountPath": _SHARED}],
    }
    pod = {
        "terminationGracePeriodSeconds": _LEAVING,
        "containers": [container],
        "volumes": [{"name": "shared", "persistentVolumeClaim": {"claimName": options.claim}}],
    }
    theirs = _joiners(job, options.role)
    template = {"metadata": {"labels": theirs["matchLabels"]}, "spec": pod}
    spec = {"replicas": options.join, "selector": theirs, "template": template}
    return _documents(_object("apps/v1", "Deployment", job, job.joiners(options.role), spec=spec))


def _joiners(job: Job, role: str) -> dict[str, dict[str, str]]:
    """Selects the pods of those that join a role of a run."""
    return {"matchLabels": {"rlinf.joins": job.label, "rlinf.role": role}}


def _object(version: str, kind: str, job: Job, name: str | None = None, **content: Any) -> dict[str, Any]:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name or job.label}, **content}


def skypilot(job: Job, options: argparse.Namespace) -> str:
    """A task for `sky jobs launch`, which finds other machines when spot machines are taken away.

    Args:
        job: what runs where.
        options: of the command; `gpu` is the kind of GPU, `volume` one of SkyPilot, for results: a bucket has no links.

    Raises:
        InputError: the kind of GPU, or the volume, is not named.
    """
    if options.volume is None:
        raise InputError("--volume: which volume of SkyPilot's is for results; a bucket has no links")
    start = job.torchrun("$SKYPILOT_NUM_NODES", "$SKYPILOT_NODE_RANK", "$MASTER")
    arguments = [each for each in job.arguments if not each.startswith("output_dir=")]
    run = (
        'MASTER=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)\n'
        f"exec {start} \\\n    {shlex.join((*arguments, f'output_dir={_SHARED}/runs', '--resume', 'auto'))}\n"
    )
    token = {"secrets": {TOKEN: ""}} if job.joined else {}  # the run makes one unless it is given one
    return _task(job.label, job.nodes, job.gpus, options, run=run, **token)


def skypilot_joiners(job: Job, options: argparse.Namespace) -> str:
    """A task for `sky jobs launch` of one machine that joins the run; each launch of it is one more, which finds
    another machine by itself, and ends when there has been no run for an hour.

    Args:
        job: what it joins.
        options: of the command; `role` says as what, `volume` is that of the run; None: by address and token.

    Raises:
        InputError: the kind of GPU is not named.
    """
    place: dict[str, Any] = {}
    if options.volume is not None:
        words = shlex.join((f"{_SHARED}/runs/{job.name}", *job.joining(options.role), str(_UNUSED)))
    else:
        place = {"envs": {_ADDRESS: job.address(options.role)}, "secrets": {TOKEN: None}}
        words = f"\"${_ADDRESS}\" {options.role} '' {_UNUSED}"
    return _task(
        job.joiners(options.role),
        1,
        job.gpus_to_join(options.role),
        options,
        run=f"set -- {words}\n{_JOINING}",
        **place,
    )


def _task(name: str, nodes: int, gpus: int, options: argparse.Namespace, **content: Any) -> str:
    """A task of SkyPilot's on so many machines with so many GPUs each."""
    if gpus and options.gpu is None:
        raise InputError(f"--gpu: which kind of GPU, such as H100; {gpus} of each machine are wanted (--gpus 0: none)")
    resources = {
        **({"accelerators": f"{options.gpu}:{gpus}"} if gpus else {}),
        "use_spot": options.spot,
        "job_recovery": {"max_restarts_on_errors": options.restarts},
    }
    task = {
        "name": name,
        "num_nodes": nodes,
        "resources": resources,
        "workdir": ".",
        **({"volumes": {_SHARED: options.volume}} if options.volume is not None else {}),
        "setup": "pip install -e .\n",
        **content,
    }
    return _documents(task)


class _Readable(yaml.SafeDumper):
    """Writes text of several lines as such, and what occurs twice twice."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Readable.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None),
)


def _documents(*each: Mapping[str, Any]) -> str:
    return yaml.dump_all(each, Dumper=_Readable, sort_keys=False, width=120, explicit_start=len(each) > 1)


_KINDS: dict[str, tuple[Callable[[Job, argparse.Namespace], str], str, str]] = {
    "slurm": (slurm, "a batch script", "sbatch"),
    "k8s": (kubernetes, "a JobSet with its configuration", "kubectl apply -f"),
    "skypilot": (skypilot, "a task, for spot machines of any cloud", "sky jobs launch"),
}
"""For each kind of job file, the function that writes it, what it is, and the command that takes it."""
_JOINING_KINDS = {"slurm": slurm_joiners, "k8s": kubernetes_joiners, "skypilot": skypilot_joiners}
"""The functions that write the job file of those who join a run."""


def launch(arguments: Sequence[str]) -> None:
    """Run the command: write a job file.

    Args:
        arguments: what follows `launch` on the command line.

    Raises:
        InputError: what was given cannot be right.
        SystemExit: the arguments are none of the command's.
    """
    kind = arguments[0] if arguments else "--help"
    if kind in ("-h", "--help"):
        sys.stdout.write("usage: rlinf launch KIND --config FILE [key=value ...] [--nodes N] [--gpus N]; KIND is\n")
        sys.stdout.writelines(f"  {name:<10}{what}, for `{then} FILE`\n" for name, (_, what, then) in _KINDS.items())
        sys.stdout.write("`rlinf launch KIND --help` tells more.\n")
        return
    if kind not in _KINDS:
        near = nearest(kind, _KINDS)
        raise InputError(f"launch {kind}: " + (f"did you mean {near}?" if near else f"there is {', '.join(_KINDS)}"))
    write, *_ = _KINDS[kind]
    options = _parser(kind).parse_intermixed_args(arguments[1:])
    look_in_working_directory()
    job = _job(options)
    if (count := options.join) is not None:
        if (role := options.role) not in job.joined:
            raise InputError(
                f"--join {count} --role {role}: the run lets nobody join; set {role}.join=auto:29600 for both job files"
            )
        write = _JOINING_KINDS[kind]
    text = write(job, options)
    if options.output is None:
        sys.stdout.write(text)
    else:
        output_file(options.output).write_text(text, encoding="utf-8")
        sys.stdout.write(f"{_command(kind, job, options)}\n")


def _command(kind: str, job: Job, options: argparse.Namespace) -> str:
    """The command that takes the file that was written: SkyPilot's is given it once for each of those that join."""
    *_, then = _KINDS[kind]
    if options.join is None or kind != "skypilot":
        return f"{then} {options.output}"
    by_address = options.volume is None
    extra = [f"--env {_ADDRESS}"] if by_address and job.address(options.role) is None else []
    extra += [f"--secret {TOKEN}"] if by_address else []
    return f"for each in $(seq {options.join}); do {' '.join((then, '-y -d', *extra, options.output))}; done"


def _parser(kind: str) -> argparse.ArgumentParser:
    _, what, then = _KINDS[kind]
    parser = argparse.ArgumentParser(
        prog=f"rlinf launch {kind}", description=f"Write {what}, for `{then} FILE`. Nothing is submitted."
    )
    parser.add_argument("--config", required=True, metavar="FILE", help="as of `rlinf train`")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as of `rlinf train`")
    parser.add_argument("--nodes", type=int, default=1, metavar="N", help="machines (1)")
    parser.add_argument("--gpus", type=int, default=8, metavar="N", help="GPUs of each machine (8); 0 for none")
    parser.add_argument("--processes", type=int, metavar="N", help="on each machine; as many as it has GPUs, or 1")
    parser.add_argument("--output", metavar="FILE", help="where to write it; stdout if this is not given")
    about = "the job of N processes that join the run, one per GPU where they need one, instead of the run's own"
    parser.add_argument("--join", type=int, metavar="N", help=about)
    about = "as what they join: rollout, engines that generate (the default); trainer, replicas; reward, to score"
    parser.add_argument("--role", choices=tuple(FILES), default="rollout", help=about)
    if kind == "slurm":
        about = "a further line of #SBATCH, such as --directive=--time=24:00:00; may be given several times"
        parser.add_argument("--directive", action="append", default=[], metavar="TEXT", help=about)
        return parser
    parser.add_argument("--restarts", type=int, default=10, metavar="N", help="how often it may begin again (10)")
    if kind == "k8s":
        parser.add_argument("--image", required=True, help="of a container, with rlinf and your own code")
        parser.add_argument("--claim", required=True, help="PersistentVolumeClaim that all pods can write, for results")
        return parser
    parser.add_argument("--gpu", metavar="KIND", help="such as H100")
    parser.add_argument("--spot", action="store_true", help="machines that may be taken away at any time")
    about = "volume of SkyPilot's for results; with --join it may be left out, where no volume is shared"
    parser.add_argument("--volume", help=about)
    return parser


def _job(options: argparse.Namespace) -> Job:
    """Raises InputError if there can be no such job."""
    for name, least in (("nodes", 1), ("gpus", 0), ("processes", 1), ("restarts", 0), ("join", 1)):
        if (value := getattr(options, name, None)) is not None and value < least:
            raise InputError(f"--{name} {value}: at least {least}")
    processes = options.processes or max(1, options.gpus)
    path = shipped(options.config)
    config = load_any(path, options.overrides, options.nodes * processes)
    arguments = ("--config", str(path), *options.overrides)
    grace = config.checkpoint.grace
    text = config if isinstance(config, RunConfig) else None
    joined = {role: at for role in FILES if text is not None and (at := getattr(text, role).join) is not None}
    where = str(Path(config.output_dir, config.name))
    return Job(config.name, arguments, options.nodes, options.gpus, processes, grace, dump(config), where, joined)
