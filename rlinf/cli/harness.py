"""`rlinf evaluate --harness`: an evaluation package of others asks the model through our endpoint.

In: a saved model, the package, and its tasks. Out: a table with errors, and the package's own files beside
`results.json`. The package runs as a child process, by the Python of an environment that has it, and speaks OpenAI's
protocol to an address that is open for that long; the model answers by the engine that rollouts use.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from rlinf.config.load import InputError, RunFailure
from rlinf.config.text import RunConfig
from rlinf.flows.session import RunSession
from rlinf.placement.seats import TEXT, place
from rlinf.runs.data import load_data_of
from rlinf.runs.dry_run.models import policy_model
from rlinf.runs.dry_run.transformer import by_kind
from rlinf.runs.roles import running_of, spawn_roles
from rlinf.runs.text import roles_to_start
from rlinf.runtime.system.system import ActorSystem

MODULES = {"lm-eval": ("lm_eval", "transformers"), "inspect": ("inspect_ai",)}
"""Packages by the names that users give, and what is imported for them: a tokenizer tells where a prompt ends."""
_NAME = "policy"
"""Name of the model, as the endpoint has it."""
_IDLE = 60.0
"""Seconds for which the endpoint remembers what was asked: packages ask about thousands of texts, each once."""
_CONFIDENT = 1.96
"""Standard errors on either side of a value that 95 of 100 such intervals reach over the truth with."""


@dataclass(frozen=True, slots=True)
class HarnessRun:
    """A package, its tasks, and where it is."""

    name: str
    """`lm-eval` or `inspect`."""
    tasks: Sequence[str]
    """Names that it knows, or files."""
    output: Path
    """Directory for its files; made if need be."""
    python: str = sys.executable
    """Interpreter of an environment that has it."""
    options: Sequence[str] = ()
    """Further arguments of its command line."""


@dataclass(frozen=True, slots=True)
class Target:
    """The model that is asked."""

    url: str
    """Address of its endpoint."""
    chats: bool
    """It has a chat template."""
    tokenizer: str | None = None
    """Directory or hub name of its tokenizer; None: it has no files."""
    longest: int | None = None
    """Tokens of a prompt and its answer; None: nobody knows."""


@dataclass(frozen=True, slots=True)
class Score:
    """One measure of one task."""

    task: str
    measure: str
    value: float
    stderr: float | None = None
    """Standard error; None where the package tells none."""
    samples: int | None = None
    """Problems that it is of."""


async def evaluate_with(system: ActorSystem, config: RunConfig, harness: HarnessRun) -> list[Score]:
    """Have a package evaluate the model of a configuration; print its scores and write them as `results.json`.

    Args:
        system: where the model answers.
        config: which one, and how it samples where a request does not say.
        harness: by what.

    Raises:
        InputError: the environment has no such package.
        RunFailure: it failed, or left no scores.
    """
    config, _ = by_kind(config)
    model, _ = policy_model(config)
    data = load_data_of(config)
    chats = data.tokenizer.chat_template is not None
    if harness.name == "inspect" and not chats:
        raise InputError(
            f"{config.model.path}: its tokenizer has no chat template, and inspect speaks in conversations"
        )
    starting = roles_to_start(config, data)
    placed = place(config.placement, [kind for kind in TEXT if kind.name in starting], system.hosts)
    roles = await spawn_roles(system, placed, starting)
    more: dict[str, Any] = {"compares": None, "judges": True, "counters": {}}
    session = RunSession(running_of(config, lambda: roles, data.tokenizer, model, None, **more))
    await asyncio.to_thread(harness.output.mkdir, parents=True, exist_ok=True)
    source = config.model.tokenizer or config.model.path
    tokenizer = None if source is None or isinstance(source, Mapping) else str(source)
    async with session.serve(idle=_IDLE) as served:
        await _run(harness, Target(served.url, chats, tokenizer, session.limits[1]))
    scores = await asyncio.to_thread(_SCORES[harness.name], harness.output)
    if not scores:
        raise RunFailure(f"{harness.name} left no scores in {harness.output}")
    record = {"model": str(config.model.path), "harness": harness.name, "scores": [asdict(each) for each in scores]}
    results = harness.output / "results.json"
    await asyncio.to_thread(results.write_text, json.dumps(record, indent=1) + "\n", encoding="utf-8")
    _print(config, harness, scores)
    print(f"results: {results}")
    return scores


async def _run(harness: HarnessRun, target: Target) -> None:
    """Run the package to its end; what it prints is its own."""
    command, url = _COMMANDS[harness.name](harness, target), target.url
    key = {
        "OPENAI_API_KEY": "rlinf",
        "RLINF_API_KEY": "rlinf",
        "RLINF_BASE_URL": url,
        "NO_PROXY": "127.0.0.1,localhost",
    }
    try:
        child = await asyncio.create_subprocess_exec(harness.python, *command, env={**os.environ, **key})
    except OSError as error:
        raise InputError(f"--harness-python {harness.python} cannot be run: {error}") from None
    try:
        code = await child.wait()
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    if code == _ABSENT:
        raise InputError(
            f"{harness.python} has no {' or no '.join(MODULES[harness.name])}: pip install it into an environment of "
            "its own, and name that by --harness-python ENVIRONMENT/bin/python"
        )
    if code:
        raise RunFailure(f"{harness.name} ended with {code}; what it printed above says why")


_ABSENT = 86
"""Exit code of an environment without the package."""


def _as_program(modules: Sequence[str], program: str) -> list[str]:
    """Arguments of Python that run a module, or end with `_ABSENT` where one that it needs is not there."""
    text = (
        "import importlib.util as u, runpy, sys\n"
        f"if not all(map(u.find_spec, {[*modules]!r})): sys.exit({_ABSENT})\n"
        f"runpy.run_module({program!r}, run_name='__main__', alter_sys=True)"
    )
    return ["-c", text]


def _lm_eval(harness: HarnessRun, target: Target) -> list[str]:
    """Arguments of lm-eval: files of tasks are found by `--include_path`, and named as in them."""
    usual = "local-chat-completions" if target.chats else "local-completions"
    kind = dict(itertools.pairwise(harness.options)).get("--model", usual)
    path, tokens = (
        ("chat/completions" if "chat" in kind else "completions"),
        "tokenizer_backend=none,tokenized_requests=False",
    )
    if "chat" not in kind and target.tokenizer is not None:  # log-likelihoods are of tokens behind those of a prompt
        tokens = f"tokenizer_backend=huggingface,tokenizer={target.tokenizer},tokenized_requests=True"
    longest = "" if target.longest is None else f",max_length={target.longest}"
    files = [Path(each) for each in harness.tasks if each.endswith((".yaml", ".yml"))]
    names = [each for each in harness.tasks if Path(each) not in files] + [_task_in(file) for file in files]
    where = [part for file in files[:1] for part in ("--include_path", str(file.parent))]
    about = f"model={_NAME},base_url={target.url}/{path},{tokens},num_concurrent=16{longest}"
    template = ["--apply_chat_template"] if target.chats else []
    about_run = [
        "--model",
        kind,
        "--model_args",
        about,
        "--tasks",
        ",".join(names),
        "--output_path",
        str(harness.output),
    ]
    return [
        *_as_program(MODULES["lm-eval"][: 1 if "chat" in kind else 2], "lm_eval"),
        "run",
        *about_run,
        "--log_samples",
        *where,
        *template,
        *harness.options,
    ]


def _task_in(file: Path) -> str:
    """The name of the task in a file of lm-eval."""
    try:
        # not by a reader of YAML: such files have tags of their own, !function among them
        line = re.search(r"^task:\s*['\"]?([^'\"#\n]+)", file.read_text(encoding="utf-8"), re.M)
    except OSError as error:
        raise InputError(f"--tasks {file}: {error.strerror}") from None
    if line is None:
        raise InputError(f"--tasks {file}: it has no line `task: NAME`, which files of lm-eval have")
    return line[1].strip()


def _inspect(harness: HarnessRun, target: Target) -> list[str]:
    """Arguments of inspect, whose provider of OpenAI-like servers reads the address from the environment."""
    # it takes files by patterns, which must be relative
    tasks = [os.path.relpath(each) if Path(each.partition("@")[0]).exists() else each for each in harness.tasks]
    where = ["--model", f"openai-api/rlinf/{_NAME}", "--log-dir", str(harness.output), "--log-format", "json"]
    return [
        *_as_program(MODULES["inspect"], "inspect_ai"),
        "eval",
        *tasks,
        *where,
        "--display",
        "plain",
        *harness.options,
    ]


def lm_eval_scores(directory: Path) -> list[Score]:
    """Scores of lm-eval's newest file of results."""
    files = sorted(directory.rglob("results_*.json"), key=lambda file: file.stat().st_mtime)
    if not files:
        return []
    record = json.loads(files[-1].read_text(encoding="utf-8"))
    counts: Mapping[str, Any] = record.get("n-samples", {})
    scores = []
    for task, measures in record["results"].items():
        for key, value in measures.items():
            measure, _, how = key.partition(",")
            if not isinstance(value, int | float) or isinstance(value, bool) or measure.endswith("_stderr") or not how:
                continue
            error, count = measures.get(f"{measure}_stderr,{how}"), counts.get(task, {}).get("effective")
            stderr = float(error) if isinstance(error, int | float) else None
            scores.append(Score(task, f"{measure} ({how})" if how != "none" else measure, float(value), stderr, count))
    return scores


def inspect_scores(directory: Path) -> list[Score]:
    """Scores of the newest log of each of inspect's tasks.

    Raises:
        RunFailure: a task did not end well.
    """
    logs: dict[str, Any] = {}
    for file in sorted(directory.glob("*.json"), key=lambda file: file.stat().st_mtime):
        record = json.loads(file.read_text(encoding="utf-8"))
        if "eval" in record:
            logs[record["eval"]["task"]] = record
    scores = []
    for task, log in logs.items():
        if log["status"] != "success":
            reason = (log.get("error") or {}).get("message", log["status"])
            raise RunFailure(f"inspect: task {task} ended with: {reason}")
        for scorer in log["results"]["scores"]:
            measures = {name: each["value"] for name, each in scorer["metrics"].items()}
            error = measures.pop("stderr", None)
            count = log["results"].get("completed_samples")
            scores += [
                Score(task, f"{name} ({scorer['name']})", value, error, count) for name, value in measures.items()
            ]
    return scores


_COMMANDS = {"lm-eval": _lm_eval, "inspect": _inspect}
_SCORES = {"lm-eval": lm_eval_scores, "inspect": inspect_scores}


def _print(config: RunConfig, harness: HarnessRun, scores: Sequence[Score]) -> None:
    console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
    console.print(f"{config.model.path}, by {harness.name}")
    table = Table()
    for heading in ("task", "measure", "value", "±", "95 % between", "problems"):
        table.add_column(heading, justify="left" if heading in ("task", "measure") else "right", no_wrap=True)
    for each in scores:
        has_error = each.stderr is not None and not math.isnan(each.stderr)
        error = each.stderr if has_error and each.stderr is not None else 0.0
        between = f"{each.value - _CONFIDENT * error:.3f} to {each.value + _CONFIDENT * error:.3f}" if has_error else ""
        count = "" if each.samples is None else str(each.samples)
        table.add_row(each.task, each.measure, f"{each.value:.4f}", f"{error:.4f}" if has_error else "", between, count)
    console.print(table)
