"""Harnesses: programs and loops that work on a task in a container, asking the model for each step.

In: a task's instruction, its container and the model. Out: how it ended, as numbers by name. Three kinds: a loop of our
own with one tool; mini-swe-agent, which works outside the container and has its commands run inside; and any program
with a command line, such as Claude Code, on a copy of the container's directory or whole inside the container, which
reaches the model by a port of its own. What the model said is recorded by `llm`, whichever of them asked.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from rlinf.agents.environments import reason
from rlinf.agents.environments.worker import Worker
from rlinf.agents.tools.python import result_text
from rlinf.agents.tools.tool import conversation
from rlinf.runtime.base.errors import UserError
from rlinf.runtime.base.tasks import OwnDirectory
from rlinf.runtime.processes.supervisor import Process

_WORKER = ("-P", __file__.replace("harnesses.py", "mini_swe_worker.py"))
_VARIABLES = {
    "PYTHONPATH": None,
    "MSWEA_SILENT_STARTUP": "1",
    "MSWEA_COST_TRACKING": "ignore_errors",
    "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "3",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
}
"""Variables of its processes: our path is not theirs, a policy of ours has no price, and nothing is fetched."""
_INSIDE = '"$@" > /tmp/.harness 2>&1; status=$?; tail -c 4096 /tmp/.harness; exit $status'
"""A line of sh around a program in a container: what it prints counts as what it writes, and its end comes out."""
_AS_LONG_AS_IT_TAKES = 1e6
"""Seconds; the task's own deadline ends a program."""
PROGRAMS: dict[str, tuple[list[str], dict[str, str]]] = {
    "claude_code": (
        ["claude", "-p", "{instruction}", "--model", "policy", "--dangerously-skip-permissions"],
        {
            "ANTHROPIC_BASE_URL": "{url}",
            "ANTHROPIC_API_KEY": "{key}",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "IS_SANDBOX": "1",
        },
    ),
    "codex": (
        [
            *("codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"),
            *("-m", "policy", "-c", "openai_base_url={url}", "{instruction}"),
        ],
        {"CODEX_API_KEY": "{key}"},
    ),
    "mini": (
        [
            *("mini", "--yolo", "--exit-immediately", "--task", "{instruction}", "--model", "openai/policy"),
            *("-c", "mini.yaml", "-c", "model.model_kwargs.api_base={url}", "-c", "model.model_kwargs.api_key={key}"),
        ],
        {name: value for name, value in _VARIABLES.items() if value is not None} | {"MSWEA_CONFIGURED": "true"},
    ),
    "qwen_code": (
        ["qwen", "-y", "--auth-type", "openai", "-p", "{instruction}"],
        {"OPENAI_BASE_URL": "{url}", "OPENAI_API_KEY": "{key}", "OPENAI_MODEL": "policy"},
    ),
}
"""Command lines and variables of programs that are known by name."""


class Bash:
    """A conversation with one tool, which runs a command in the container; it ends with an answer without a call.

    Args:
        turns: most answers.
    """

    def __init__(self, turns: int = 50) -> None:
        self._turns = turns

    async def __call__(self, instruction: str, box: Any, llm: Any) -> dict[str, float]:
        """Work on a task."""

        async def bash(command: str) -> str:
            """Run a command in a shell of its own, and return what it prints and how it ended.

            Args:
                command: for bash; files stay between commands, variables and directories do not.
            """
            return result_text(await box.run(["bash", "-c", command]))

        messages = [{"role": "user", "content": instruction}]
        return {"turns": float(len(await conversation(messages, llm, self._turns, tools=[bash], runs_last=True)))}


class MiniSwe:
    """mini-swe-agent; its commands run in the container.

    Args:
        python: interpreter of the environment in which it is installed.
        config: name or path of its configuration; `mini_textbased.yaml` is for models that call no tools.
        settings: of its sections `agent`, `model` and `environment`, over the configuration's.
        starting: seconds that it has to be imported.
    """

    def __init__(
        self,
        python: str,
        *,
        config: str = "mini.yaml",
        settings: Mapping[str, Any] | None = None,
        starting: float = 300.0,
    ) -> None:
        self._starting = starting
        self._python, self._config, self._settings = python, config, json.dumps(settings or {})

    async def __aenter__(self) -> MiniSwe:
        command = [self._python, *_WORKER, self._config, self._settings]
        self._worker = Worker("mini-swe-agent", command, self._starting, env=_VARIABLES, forks=True)
        await self._worker.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._worker.__aexit__(*error)

    async def __call__(self, instruction: str, box: Any, llm: Any) -> dict[str, float]:
        """Work on a task.

        Raises:
            RuntimeError: the agent ended before the model had answered, or its process died.
            RunFailure: it died again and again.
        """
        async with self._worker.episode(task=instruction, url=llm.base_url, key=llm.api_key) as episode:
            commands = 0
            while "ended" not in (message := await episode.read()):
                commands += 1
                episode.write(**await _executed(box, message))
        return _ended(llm, "mini-swe-agent", message.get("error"), commands=float(commands))


async def _executed(box: Any, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Run a command of mini-swe-agent's, and return what its own environments return."""
    words = ["bash", "-c", wanted["command"]]
    result = await box.run(words, seconds=wanted["seconds"], cwd=wanted["cwd"], env=wanted["env"])
    ended = "" if result.outcome in ("ok", "error") else f"the command was stopped: {result.outcome}"
    status = -1 if ended else result.exit_code
    return {"output": result.stdout + result.stderr, "returncode": status, "exception_info": ended}


class Program:
    """A program with a command line. It works on this machine, with its user's rights, on a copy of the container's
    directory, and with a home of its own; what it leaves goes back into the container.

    Args:
        command: its words; `{instruction}`, `{url}` and `{key}` stand for the task and the model's endpoint.
        env: variables, likewise.
        inside: it works in the container, whose image has it, and sees nothing of this machine but the endpoint.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str] | None = None, *, inside: bool = False) -> None:
        if not inside and shutil.which(command[0]) is None:
            raise UserError(f"harness: there is no program {command[0]!r} on PATH")
        self._command, self._env, self._inside = list(command), dict(env or {}), inside

    async def __call__(self, instruction: str, box: Any, llm: Any) -> dict[str, float]:
        """Work on a task.

        Raises:
            RuntimeError: the program ended before the model had answered.
        """
        work = self._in_container if self._inside else self._on_copy
        url = await _inside(box, llm.base_url) if self._inside else llm.base_url
        values = {"instruction": instruction, "url": url, "key": llm.api_key}
        words = [_filled(word, values) for word in self._command]
        failure = await work(box, words, {name: _filled(value, values) for name, value in self._env.items()})
        return _ended(llm, words[0], failure)

    async def _in_container(self, box: Any, words: Sequence[str], env: Mapping[str, str]) -> str | None:
        """Run it in the container; returns why it failed."""
        result = await box.run(["sh", "-c", _INSIDE, "sh", *words], env=env, seconds=_AS_LONG_AS_IT_TAKES)
        how = f"exited with status {result.exit_code}" if result.outcome == "error" else f"ended by {result.outcome}"
        return None if result.ok else f"it {how}: {reason(result.stdout + result.stderr)}"

    async def _on_copy(self, box: Any, words: Sequence[str], env: Mapping[str, str]) -> str | None:
        """Run it on a copy of the container's directory; returns why it failed."""
        room = await asyncio.to_thread(OwnDirectory, "harness")
        try:
            work, home = room.path / "work", room.path / "home"
            home.mkdir()
            await box.download(box.workdir, work)
            variables = {**os.environ, "HOME": str(home), **env}
            program = Process(words, channel=False, env=variables, cwd=work, log=None, lines=20)
            try:
                status = await asyncio.shield(program.exited)
            finally:
                await program.end()
                await box.run(["find", box.workdir, "-mindepth", "1", "-delete"])
                await box.upload(work, box.workdir)
        finally:
            await asyncio.to_thread(room.remove)
        last = reason("\n".join(program.output))
        return f"it exited with status {status}: {last}" if status else None


async def _inside(box: Any, url: str) -> str:
    """The URL by which a container reaches what a URL of this machine names."""
    there = urlsplit(url)
    port = await box.forward(there.hostname, there.port)
    return there._replace(netloc=f"127.0.0.1:{port}").geturl()


def _ended(llm: Any, name: str, failure: str | None, **more: float) -> dict[str, float]:
    """Numbers of a harness that has ended; one that failed before the model was asked is no attempt.

    Raises:
        RuntimeError: it failed before.
    """
    if failure is not None and not llm.trajectories.turns:
        raise RuntimeError(f"{name}: {failure}")
    return {"harness_failed": float(failure is not None), **more}


def harness_of(choice: str | Mapping[str, Any] | Sequence[str] | None) -> Any:
    """The harness that a configuration names.

    Args:
        choice: None for the loop of our own; a name; words of a command line; or a mapping with the `name`, or the
            `command`, and further arguments.

    Raises:
        UserError: there is none of this name, or it takes other arguments.
    """
    wanted: dict[str, Any] = {"name": choice} if isinstance(choice, str) else {}
    if isinstance(choice, Mapping):
        wanted = dict(choice)
    elif choice is not None and not isinstance(choice, str):
        wanted = {"command": list(choice)}
    name = wanted.pop("name", None if "command" in wanted else "bash")
    makers: dict[Any, Any] = {None: Program, "bash": Bash, "mini_swe": MiniSwe}
    if name in PROGRAMS:
        command, env = PROGRAMS[name]
        wanted = {"command": wanted.pop("command", command), "env": {**env, **wanted.pop("env", {})}, **wanted}
        name = None
    if name not in makers:
        names = ", ".join(sorted([*PROGRAMS, "bash", "mini_swe"]))
        raise UserError(f"harness={name!r}: there are {names}, and any command line")
    try:
        return makers[name](**wanted)
    except TypeError as error:
        raise UserError(f"harness {name or 'command'}: {error}") from error


def _filled(text: str, values: Mapping[str, str]) -> str:
    for name, value in values.items():
        text = text.replace(f"{{{name}}}", value)
    return text
