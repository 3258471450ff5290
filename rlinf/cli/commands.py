"""The command `rlinf`, which `python -m rlinf` is too: its commands, and the module of each.

    rlinf train --config FILE [key=value ...]       a run; `torchrun ... -m rlinf train` starts it in several processes
    rlinf evaluate --model DIR --config FILE        scores a saved model; by torchrun in several processes, too
    rlinf evaluate --model DIR --named aime24,aime25    by benchmarks
    rlinf record --config FILE --episodes N --out DIR   demonstrations of a policy, or of a script
    rlinf convert THEIRS.yaml OURS.yaml             a configuration of verl's or RLinf's as ours
    rlinf convert FROM TO --format F                demonstrations in another format, or their statistics
    rlinf join ADDRESS --role rollout               one more engine for a run that goes on
    rlinf serve --config FILE [key=value ...]       a training service, which speaks the Tinker API
    rlinf launch slurm|k8s|skypilot --config FILE   a job file that trains on many machines
    rlinf ledger DIR                                what became of every sample that a run has drawn
    rlinf watch DIR [DIR ...]                       the page of runs, while they go on and afterwards
    rlinf compare DIR DIR                           runs on one page: curves, speed, what is not the same
    rlinf plan | trace | report | config            around a run

Each command imports no more than it needs.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rlinf.cli.keys import as_markdown, as_text
from rlinf.cli.main import exit_code, output_file, quiet_when_unread
from rlinf.config.embodied import EmbodiedConfig
from rlinf.config.importing import look_in_working_directory, resolve, shipped
from rlinf.config.load import InputError
from rlinf.config.reading import parse_yaml
from rlinf.config.schema import nearest
from rlinf.config.text import RunConfig
from rlinf.runs.rules import is_embodied, load_config, load_embodied
from rlinf.runs.start import leaving_gpus

if TYPE_CHECKING:
    from rlinf.runtime.system.system import ActorSystem


_ELSEWHERE = {
    "train": ("rlinf.cli.main.main", "train by a configuration; --dry-run shows what would run, and what could not"),
    "launch": ("rlinf.cli.launch.launch", "write a job file for Slurm, Kubernetes or SkyPilot"),
    "plan": ("rlinf.cli.plan.main", "find the best placement of a profiled flow on any number of devices"),
    "record": ("rlinf.cli.demonstrations.record_demonstrations", "record demonstrations of a policy or of a script"),
    "convert": (
        "rlinf_convert.convert.main",
        "a configuration of verl's or RLinf's as ours; demonstrations in another format",
    ),
    "ledger": ("rlinf.cli.runs.ledger", "what became of every sample of a run: trained, dropped or in flight"),
    "watch": (
        "rlinf.cli.runs.watch",
        "the page of runs, live or over: curves, answers, lanes, queues; controls",
    ),
    "join": ("rlinf.cli.join.join", "one more engine for a run that goes on, on any machine that reaches it"),
    "serve": ("rlinf.cli.runs.serve", "a training service for clients of the Tinker API: many models on one base"),
    "trace": ("rlinf.cli.runs.trace", "draw or sum up what devices did over time"),
}
"""Commands with a function of their own, which reads what follows: its dotted path, and what it does."""
_HERE = ("evaluate", "report", "compare", "config")


@quiet_when_unread
def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command, importing no more than it needs; returns the exit code, as `rlinf.cli.main` does."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words and words[0] in _ELSEWHERE:
        command: Callable[[Sequence[str]], int | None] = resolve(_ELSEWHERE[words[0]][0])
        return exit_code(lambda: command(words[1:]))
    if words and not words[0].startswith("-") and words[0] not in _HERE:
        near = nearest(words[0], commands := [*_ELSEWHERE, *_HERE])
        advice = f"did you mean {near}?" if near else f"there is {', '.join(commands)}"
        print(f"error: rlinf {words[0]}: no such command; {advice}", file=sys.stderr)
        return 2
    options = _parsed(words or ["--help"])
    return exit_code(lambda: options.run(options))


def _parsed(words: Sequence[str]) -> argparse.Namespace:
    """The arguments; overrides and directories may stand on both sides of an option, which argparse alone would refuse
    below a command."""
    parser = _parser()
    options, rest = parser.parse_known_args(words)
    several = next((name for name in ("overrides", "directories") if hasattr(options, name)), None)
    strays = [] if several is None or any(each.startswith("-") for each in rest) else rest
    together = list(words)
    for each in strays:
        del together[len(together) - 1 - together[::-1].index(each)]
    options = parser.parse_args(together)  # it complains of the rest
    if several is not None:
        getattr(options, several).extend(strays)
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rlinf",
        description="Reinforcement-learning post-training. `rlinf COMMAND --help` tells more of each command.",
        epilog="In several processes: torchrun --nproc-per-node N -m rlinf COMMAND ...",
    )
    parser.add_argument("--version", action="version", version=f"rlinf {importlib.import_module('rlinf').__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, (_, about) in _ELSEWHERE.items():
        commands.add_parser(name, help=about)
    config = commands.add_parser("config", help="list every configuration key with type, default and meaning")
    config.add_argument("--embodied", action="store_true", help="those of runs in which a policy acts")
    config.add_argument("--markdown", action="store_true", help="as the page docs/config.md or docs/config-embodied.md")
    config.set_defaults(run=_config)
    evaluate = commands.add_parser("evaluate", help="answer a configuration's evaluation problems with a saved model")
    evaluate.add_argument(
        "--model",
        required=True,
        metavar="DIR",
        help="Hugging Face directory (or hub name), or a policy; of a run's directory, the newest one",
    )
    evaluate.add_argument(
        "--config",
        metavar="FILE",
        help="problems, reward and sampling, as in training; default: the resolved.yaml of the run that made the model",
    )
    evaluate.add_argument(
        "--named",
        metavar="LIST",
        help="benchmarks instead, such as aime24,aime25,gpqa-diamond; evaluation.named.NAME=FILE says where one is",
    )
    evaluate.add_argument("--harness", choices=("lm-eval", "inspect"), help="have this package evaluate it instead")
    evaluate.add_argument("--tasks", metavar="LIST", help="of the package: names or files, by commas")
    evaluate.add_argument("--harness-python", metavar="PATH", help="Python of an environment that has the package")
    evaluate.add_argument("--harness-args", metavar="TEXT", default="", help="more of its arguments: '--limit 100'")
    evaluate.add_argument("--output", metavar="FILE", help="write every answer there, or episode, a line of JSON each")
    evaluate.add_argument("overrides", nargs="*", metavar="key=value", help="set a key of the configuration")
    evaluate.set_defaults(run=_evaluate)
    report = commands.add_parser("report", help="make the report.html of a run's directory again")
    report.add_argument("directory", metavar="DIR")
    report.set_defaults(run=_report)
    compare = commands.add_parser("compare", help="several runs on one page: curves, speed, what is not the same")
    compare.add_argument("directories", nargs="+", metavar="DIR", help="directories of runs, at least two")
    compare.add_argument("--output", default="compare.html", metavar="FILE", help="the page; default: compare.html")
    compare.set_defaults(run=_compare)
    return parser


def _config(options: argparse.Namespace) -> None:
    schema: type = EmbodiedConfig if options.embodied else RunConfig
    print(as_markdown(schema) if options.markdown else as_text(schema) + "\n", end="")


def _evaluate(options: argparse.Namespace) -> None:
    resolved = _resolved_of(options.model)
    model = _saved_model(options.model)
    if (options.harness is None) != (options.tasks is None):
        raise InputError("evaluate: --harness and --tasks belong together")
    if options.config is None and options.named is None and (options.harness is None or resolved is not None):
        if resolved is None:
            raise InputError("evaluate: name a --config whose problems are answered, or benchmarks by --named")
        options.config = str(resolved)
        print(f"by the configuration of the run that made the model: {resolved}")
    options.config = None if options.config is None else shipped(options.config)
    look_in_working_directory()
    hosts = int(os.environ.get("WORLD_SIZE", "1"))
    if is_embodied(options.config):
        _evaluate_embodied(options, hosts)
        return
    place = Path(model).expanduser()
    if (place / "checkpoints").is_dir() and not (place / "config.json").is_file():
        raise InputError(f"--model {model} is the directory of a run, which has no model in checkpoints/latest/hf")
    config = load_config(options.config, [*_asked(options, hosts), f"model.path={model}"], hosts)
    if resolved is not None and not options.named and config.evaluation.data is None:
        seed = parse_yaml(resolved.read_text(encoding="utf-8")).get("seed")
        if seed != config.seed:
            print(f"seed={config.seed} draws other problems than the run had, seed={seed}: --config {resolved} has its")
    output = None if options.output is None or options.harness else output_file(options.output)
    from rlinf.cli.evaluate import evaluate_model
    from rlinf.cli.harness import HarnessRun, evaluate_with
    from rlinf.runs.prepare import refuse_idle
    from rlinf.runs.start import prepare, run_to_end

    async def main(system: ActorSystem) -> None:
        if options.harness is None:
            await evaluate_model(system, config, output)
            return
        tasks = [each.strip() for each in options.tasks.split(",") if each.strip()]
        directory, python = Path(options.output or "outputs/harness"), options.harness_python or sys.executable
        harness = HarnessRun(options.harness, tasks, directory, python, shlex.split(options.harness_args))
        await evaluate_with(system, config, harness)

    with leaving_gpus(config):
        if os.environ.get("RANK", "0") == "0" and options.config is not None:  # else nothing says how it is trained
            refuse_idle(config.placement, prepare(config, hosts))
        run_to_end(main, config.system)


def _resolved_of(model: str) -> Path | None:
    """The configuration of the run that a model is of, where it lies in a run's directory."""
    place = Path(model).expanduser().absolute()
    candidates = [each / "resolved.yaml" for each in (place, *place.parents[:3]) if (each / "checkpoints").is_dir()]
    return next((path for path in candidates if path.is_file()), None)


def _saved_model(named: str) -> str:
    """The model that a path leads to: that itself, the one of a checkpoint, or of a run's newest checkpoint."""
    ways = (Path(named).expanduser() / way for way in ("hf", "checkpoints/latest/hf"))
    itself = (Path(named).expanduser() / "config.json").is_file()
    return named if itself else next((str(way) for way in ways if (way / "config.json").is_file()), named)


def _asked(options: argparse.Namespace, hosts: int) -> list[str]:
    """The overrides of an evaluation: the user's, those for `--named`, and without a file all processes answer."""
    everywhere = [] if options.config or hosts == 1 else ["placement.rollout,judge,trainer=all"]
    named = [name.strip() for name in (options.named or "").split(",") if name.strip()]
    own = {each.partition("=")[0].strip() for each in options.overrides}
    if named and "evaluation.data" in own:
        raise InputError(
            "evaluation.data: --named answers benchmarks instead of it; leave one of them out, or make the data a "
            "benchmark: evaluation.named.NAME=FILE"
        )
    added = [f"evaluation.named.{name}={{}}" for name in named if f"evaluation.named.{name}" not in own]
    alone = named or (options.harness and not options.config)
    none = ["evaluation.named={}", "evaluation.data=null", "data.train=null"] if alone else []
    return [*everywhere, *none, *added, *options.overrides]


def _evaluate_embodied(options: argparse.Namespace, hosts: int) -> None:
    from rlinf.runs.embodied import acting, in_words, measured, try_policy, written

    config = load_embodied(options.config, acting(options.model, options.overrides), hosts)
    if not config.eval_suites:
        raise InputError("trials.episodes: name how many episodes to try")
    output = None if options.output is None else output_file(options.output)
    from rlinf.metrics.tables import success_table
    from rlinf.runs.evaluation import new_evaluation
    from rlinf.runs.resume import check_parts
    from rlinf.runs.start import run_to_end

    if os.environ.get("RANK", "0") == "0":
        check_parts(config)

    model, outputs = Path(config.policy.path or options.model), Path(config.output_dir).expanduser()

    async def main(system: ActorSystem) -> None:
        with new_evaluation(model, outputs) if output is None else nullcontext(output.absolute().parent) as directory:
            await evaluate_in(system, directory)

    async def evaluate_in(system: ActorSystem, directory: Path) -> None:
        videos = directory / "videos"
        tried = await try_policy(system, config, videos if config.trials.videos else None)
        metrics = measured(tried)
        print(f"{options.model}: {in_words(metrics)}")
        for line in success_table(None, metrics):
            print(line)
        about = {"policy": config.policy.path, "configuration": options.config, "overrides": options.overrides}
        files = {"evaluation": (directory / "evaluation.json", written(tried, **about))}
        if output is not None:
            rows = [
                json.dumps({"suite": name, **asdict(each)}) for name, episodes in tried.items() for each in episodes
            ]
            files["episodes"] = (output, "".join(f"{row}\n" for row in rows))
        for what, (path, text) in files.items():
            await asyncio.to_thread(path.write_text, text, encoding="utf-8")
            print(f"{what}: {path}")
        if config.trials.videos:
            print(f"videos: {videos / 'step_000000'}")

    run_to_end(main, config.system)


def _report(options: argparse.Namespace) -> None:
    directory = _run_directory(options.directory)
    from rlinf.dashboard.report import write_report

    print(write_report(directory))


def _compare(options: argparse.Namespace) -> None:
    directories, target = [_run_directory(each) for each in options.directories], output_file(options.output)
    if len(directories) < 2:
        raise InputError(f"{directories[0]} alone has nothing to be compared with; name another run")
    from rlinf.dashboard.report import in_lines, write_comparison

    for line in in_lines(directories):
        print(line)
    print(f"page: {write_comparison(directories, target).absolute()}")


def _run_directory(named: str) -> Path:
    directory = Path(named)
    if not (directory / "metrics.jsonl").is_file():
        siblings = directory.parent.iterdir() if directory.parent.is_dir() else ()
        runs = [each.name for each in siblings if (each / "metrics.jsonl").is_file()]
        near = nearest(directory.name, runs)
        advice = f"; did you mean {directory.parent / near}?" if near else ""
        raise InputError(f"{directory} is no run's directory: it has no metrics.jsonl{advice}")
    return directory
