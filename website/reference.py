"""The reference: Markdown made from docstrings, from the command line's own help, and from what both are grouped by.

In: nothing is imported for docstrings, which are read from the source; the commands' parsers are run for `--help`.
Out: `pages`, name on the site to Markdown.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
from dataclasses import dataclass

COLUMNS = 100
"""Characters of a line of help: what fits beside the navigation."""


@dataclass(frozen=True, slots=True)
class Topic:
    """A page of the reference."""

    title: str
    """Its heading."""
    about: str
    """What the page holds, in a sentence or two; Markdown."""
    names: tuple[str, ...]
    """Names of modules, classes and functions, in the order in which the page has them."""
    source: bool = False
    """Whether the code stands below each: flows are their own description."""


TOPICS = {
    "training": Topic(
        "Training",
        "A whole run in one call, and what it gives back. [From Python](../train.md) is the way in.",
        (
            "rlinf.train",
            "rlinf.train_async",
            "rlinf.Result",
            "rlinf.load_config",
            "rlinf.InputError",
            "rlinf.ConfigError",
            "rlinf.RunFailure",
        ),
    ),
    "agents": Topic(
        "Sessions and agents",
        "Runs that a program of your own drives, conversations, and tools. [Conversations and episodes](../library.md) "
        "and [agents](../agents.md) are the ways in.",
        (
            "rlinf.Session",
            "rlinf.Conversation",
            "rlinf.Reply",
            "rlinf.ContextFull",
            "rlinf.AgentLLM",
            "rlinf.tool",
            "rlinf.Tool",
            "rlinf.Tools",
        ),
    ),
    "roles": Topic(
        "Roles and data",
        "What a step is made of. [A loop of your own](../library.md#roles-by-hand) starts them by hand.",
        (
            "rlinf.Rollout",
            "rlinf.Judge",
            "rlinf.Trainer",
            "rlinf.Critic",
            "rlinf.Reference",
            "rlinf.Prompt",
            "rlinf.Sample",
            "rlinf.Group",
            "rlinf.Score",
        ),
    ),
    "actors": Topic(
        "Actors and streams",
        "The runtime, which knows nothing of learning. [Its guide](../runtime.md) explains by examples that run.",
        (
            "rlinf.Actor",
            "rlinf.endpoint",
            "rlinf.run",
            "rlinf.ActorSystem",
            "rlinf.ActorGroup",
            "rlinf.Promise",
            "rlinf.Stream",
            "rlinf.Channel",
        ),
    ),
    "flows": Topic(
        "Flows",
        "A step each, as an async function; `flow=rlinf.flows.grpo` names one, and a path of your own names yours.",
        (
            "rlinf.flows.grpo",
            "rlinf.flows.grpo_async",
            "rlinf.flows.ppo",
            "rlinf.flows.ppo_async",
            "rlinf.flows.agentic.agentic",
            "rlinf.flows.agentic.agentic_async",
            "rlinf.flows.warm_up.warm_up",
            "rlinf.flows.embodied",
            "rlinf.flows.embodied_async",
            "rlinf.flows.sac",
            "rlinf.flows.imitate",
            "rlinf.flows.record",
        ),
        source=True,
    ),
    "algorithms": Topic(
        "Algorithms",
        "Pure functions on tensors, with formulas and their sources. [Recipes](../algorithms.md) put them together.",
        (
            "rlinf.algos.algorithms",
            "rlinf.algos.advantages",
            "rlinf.algos.chunk_advantages",
            "rlinf.algos.losses",
            "rlinf.algos.critic_losses",
            "rlinf.algos.preference",
        ),
    ),
    "seams": Topic(
        "Seams",
        "Protocols that parts of your own keep: rewards, simulators, policies, engines, back ends.",
        (
            "rlinf.rewards.base",
            "rlinf.rewards.math",
            "rlinf.rewards.exact",
            "rlinf.rewards.regex",
            "rlinf.rewards.format",
            "rlinf.envs.base",
            "rlinf.models.policy.base",
            "rlinf.engines.base",
            "rlinf.training.backend",
            "rlinf.sandbox.sandbox",
        ),
    ),
}  # fmt: skip


def pages() -> dict[str, str]:
    """Every page of the reference but those that are files of docs/: name on the site to Markdown."""
    made = {f"reference/{name}.md": _topic(topic) for name, topic in TOPICS.items()}
    return {"reference/index.md": _index(), "reference/cli.md": command_line(), **made}


def _index() -> str:
    rows = [f"| [{topic.title}]({name}.md) | {_contents(topic)} |" for name, topic in TOPICS.items()]
    return "\n".join(
        [
            "# Reference",
            "",
            "Made from the source: docstrings, fields of the configuration, and what the commands say of themselves.",
            "",
            "| | |",
            "|---|---|",
            "| [Configuration](../config.md) | every key of runs on text |",
            "| [Configuration of policies that act](../config-embodied.md) | every key of runs in simulators |",
            "| [Metrics](../metrics.md) | every number that a run writes, and where it goes |",
            "| [Command line](cli.md) | `rlinf …`, every command and option |",
            *rows,
            "",
        ]
    )


def _contents(topic: Topic) -> str:
    return ", ".join(f"`{name.removeprefix('rlinf.')}`" for name in topic.names)


def _topic(topic: Topic) -> str:
    head = "---\nsearch: {boost: 0.3}\n---\n\n"  # pages that explain come before names
    blocks = [f"{head}# {topic.title}\n\n{topic.about}\n"]
    blocks += [f"::: {name}\n    options: {{show_source: {str(topic.source).lower()}}}\n" for name in topic.names]
    return "\n".join(blocks)


def command_line() -> str:
    """What `rlinf --help` and `rlinf COMMAND --help` print, a section each."""
    commands = importlib.import_module(
        "rlinf.cli.commands",
    )
    names = [*commands._ELSEWHERE, *commands._HERE]
    parts = [
        "# Command line",
        "",
        "`rlinf` and `python -m rlinf` are the same; `python launch.py` is `rlinf train`. In several processes:",
        "`torchrun --nproc-per-node N -m rlinf COMMAND …`.",
        "",
        *_help("rlinf"),
    ]
    for name in names:
        parts += _help(f"rlinf {name}", name)
    return "\n".join(parts)


def _help(title: str, *command: str) -> list[str]:
    main = importlib.import_module(
        "rlinf.cli.commands",
    ).main
    said, width = io.StringIO(), os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = str(COLUMNS)
    try:
        with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
            main([*command, "--help"])
    finally:
        if width is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = width
    return [f"## {title}", "", "```text", said.getvalue().rstrip(), "```", ""]
