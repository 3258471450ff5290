"""`rlinf evaluate`: scores a saved model with the same engine, prompts and rewards as in training, without a trainer.

In: a configuration whose `model.path` is the model. Out: a table, and every answer as a line of JSON.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from rlinf.actors.judge import RewardError
from rlinf.agents.agent import Agent, opened
from rlinf.agents.configuration import configured_agent
from rlinf.config.load import ConfigError, InputError, Problem, RunFailure
from rlinf.config.text import RunConfig
from rlinf.data.datasets.load import Data
from rlinf.data.datasets.source import counted
from rlinf.data.sample import Evaluation, NotScored
from rlinf.flows.agentic import agentic
from rlinf.flows.session import RunSession
from rlinf.metrics.alarms import failures_text
from rlinf.metrics.report import measure_of
from rlinf.placement.seats import TEXT, place
from rlinf.rewards.base import ScoreCounts
from rlinf.runs.data import load_data_of
from rlinf.runs.dry_run.models import policy_model
from rlinf.runs.dry_run.transformer import by_kind
from rlinf.runs.evaluation import PASS, AnswerFile, answers_of, evaluate_named, evaluate_on, model_mark, with_benchmarks
from rlinf.runs.prepare import InMemory, with_tasks
from rlinf.runs.roles import Roles, running_of, spawn_roles
from rlinf.runs.text import roles_to_start
from rlinf.runtime.system.system import ActorSystem


async def evaluate_model(system: ActorSystem, config: RunConfig, output: Path | None) -> Evaluation:
    """Answer the evaluation's problems with the model of a configuration, print how good it is, and note the answers.

    Where it names benchmarks, their problems are answered and no others.

    Args:
        system: where.
        config: what.
        output: file for the answers, one JSON object per line; None writes none. Answers to benchmarks that are there
            already are taken as they are.

    Raises:
        InputError: there is no problem to answer.
        RunFailure: not one answer could be scored.
    """
    config, _ = by_kind(config)
    model, problems = policy_model(config)
    if problems:
        raise ConfigError(problems)
    agent = None if config.evaluation.named else _checked_agent(config)
    data = load_data_of(config, with_tasks(InMemory(agent=agent), config))
    if not (data.held_out or data.named):
        raise InputError("evaluation.data: name problems to evaluate on")
    answers = None
    if data.named and output is not None:
        answers = AnswerFile(output, model_mark(str(config.model.path)), config.seed)
    # a mode or a plan is for training: here nobody else is on a device
    as_written = replace(config.placement, mode=None, plan=None)
    starting = roles_to_start(config, data)
    placed = place(as_written, [kind for kind in TEXT if kind.name in starting], system.hosts)
    roles = await spawn_roles(system, placed, starting)
    start = time.perf_counter()
    try:
        if data.named:
            for note in data.notes:
                print(note)
            outcome = with_benchmarks(None, await evaluate_named(data, roles, config, model, answers))
        else:
            outcome = await _evaluated(data, roles, config, agent)
    except (NotScored, RewardError) as error:
        raise RunFailure(str(error)) from error
    _print(config, outcome, time.perf_counter() - start)
    scored = ScoreCounts.total(await roles["judge"].scored())
    if scored.failed:
        print(failures_text(scored))
    if answers is not None:
        print(f"answers: {output}")
    elif output is not None:
        saved = answers_of(outcome)
        assert saved is not None
        lines = [json.dumps(answer) + "\n" for answer in saved["answers"]]
        await asyncio.to_thread(output.write_text, "".join(lines), encoding="utf-8")
        print(f"answers: {output}")
    return outcome


def _checked_agent(config: RunConfig) -> Agent | None:
    """The agent that a configuration names, if it does.

    Raises:
        ConfigError: there is no such agent.
    """
    agent, mistakes = configured_agent(config, agentic)
    if config.agent.own_weights:
        mistakes = [
            *mistakes,
            ("agent.own_weights", config.agent.own_weights, "a saved model is what all agents share"),
        ]
    if mistakes:
        raise ConfigError([Problem("configuration", *each) for each in mistakes])
    return agent


async def _evaluated(data: Data, roles: Roles, config: RunConfig, agent: Agent | None) -> Evaluation:
    """Evaluate the model, or the agent, on a configuration's problems."""
    if agent is None:
        return await evaluate_on(data, roles, config)
    model, _ = policy_model(config)
    more: dict[str, Any] = {"compares": None, "judges": True, "counters": {}}
    session = RunSession(running_of(config, lambda: roles, data.tokenizer, model, agent, **more))
    async with opened(agent):
        return await session.evaluate(data.held_out, n=config.evaluation.samples)


def _print_named(config: RunConfig, outcome: Evaluation, seconds: float) -> None:
    console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
    console.print(f"{config.model.path}: {counted(len(outcome.named), 'benchmark')}, {seconds:.1f} s")
    table = Table()
    measures = {
        name for each in outcome.named.values() for name in each.metrics if re.fullmatch(r"(pass|maj)@\d+", name)
    }
    at_k = sorted(measures - {PASS, "maj@1"}, key=lambda name: (int(name.partition("@")[2]), name))
    for heading in ("benchmark", "problems", "each", PASS, "±", *at_k, "cut", "tokens"):
        table.add_column(heading, justify="left" if heading == "benchmark" else "right", no_wrap=True)
    for name, each in outcome.named.items():
        metrics = each.metrics
        error = metrics.get(f"{PASS}/stderr")
        table.add_row(
            name,
            f"{metrics['problems']:.0f}",
            f"{metrics['samples']:.0f}",
            f"{metrics[PASS]:.2%}",
            "" if error is None else f"{error:.2%}",
            *(f"{metrics[each]:.2%}" if each in metrics else "" for each in at_k),
            f"{metrics['truncated']:.1%}",
            f"{metrics['response_length/mean']:.0f}",
        )
    console.width = max(console.width, 80 + 11 * len(at_k))  # else each column is cut where there are many
    console.print(table)


def _print(config: RunConfig, outcome: Evaluation, seconds: float) -> None:
    if outcome.named:
        _print_named(config, outcome, seconds)
        return
    evaluation = config.evaluation
    how = "greedy" if evaluation.temperature == 0 else f"temperature {evaluation.temperature:g}"
    several = f", {evaluation.samples} answers each" if evaluation.samples > 1 else ""
    console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
    console.print(f"{config.model.path}: {counted(len(outcome.groups), 'problem')}, {how}{several}, {seconds:.1f} s")
    table = Table()
    table.add_column("measure")
    table.add_column("value", justify="right")
    accuracy, style = measure_of(outcome)
    styles = {"accuracy": style, "response_length/mean": ".1f"}
    for name, value in outcome.metrics.items():
        table.add_row(accuracy if name == "accuracy" else name, f"{value:{styles.get(name, '.1%')}}")
    console.print(table)
