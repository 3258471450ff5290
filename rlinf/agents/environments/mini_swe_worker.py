"""Episodes of mini-swe-agent, for `rlinf.agents.environments.harnesses`; runs where mini-swe-agent is installed.

    python mini_swe_worker.py CONFIG SETTINGS SOCKET

A connection to the socket is an episode, and has a process of its own, which is forked when everything is imported. It
reads a line of JSON with the task, the model's URL and its key; writes a line for each command that the agent wants to
run, and reads what came of it, since the container is known at the other end only; and ends with a line that says how
the agent ended. Hanging up ends the process, whatever it does.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import sys
import threading
from typing import Any

from minisweagent.agents.default import DefaultAgent
from minisweagent.config import get_config_from_spec
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models import get_model
from minisweagent.utils.serialize import recursive_merge


class Link:
    """Lines of JSON to and from the run.

    Args:
        connection: to it.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._file = connection.makefile("rw", encoding="utf-8")
        self._lines: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        for line in self._file:
            self._lines.put(json.loads(line))
        os._exit(0)  # whatever the agent waits for, nobody waits for the agent any more

    def write(self, **message: Any) -> None:
        """Write a line."""
        self._file.write(json.dumps(message) + "\n")
        self._file.flush()

    def read(self) -> Any:
        """Wait for a line."""
        return self._lines.get()


class Container(LocalEnvironment):
    """The container of the episode, which stands at the other end.

    Args:
        link: to there.
        settings: of mini-swe-agent's local environment, whose outputs and ends it has.
    """

    def __init__(self, link: Link, **settings: Any) -> None:
        super().__init__(**settings)
        self._link = link

    def execute(self, action: dict[str, Any], cwd: str = "", *, timeout: int | None = None) -> dict[str, Any]:
        """Have a command run, and return its output and status."""
        place = {"cwd": cwd or self.config.cwd or None, "env": self.config.env}
        self._link.write(command=action.get("command", ""), seconds=timeout or self.config.timeout, **place)
        output: dict[str, Any] = self._link.read()
        self._check_finished(output)
        return output


def played(link: Link, config: dict[str, Any]) -> None:
    """Play an episode."""
    episode = link.read()
    reached = {"model_name": "openai/policy", "model_kwargs": {"api_base": episode["url"], "api_key": episode["key"]}}
    agent = DefaultAgent(
        get_model(config=recursive_merge(config.get("model"), reached)),
        Container(link, **config.get("environment", {})),
        **config.get("agent", {}),
    )
    try:
        link.write(ended=agent.run(episode["task"]).get("exit_status", ""))
    except Exception as error:  # whatever ended the agent, the other end is told
        link.write(ended=type(error).__name__, error=f"{type(error).__name__}: {error}")


def main(name: str, settings: str, path: str) -> None:
    """Fork a process for each connection."""
    config = recursive_merge(get_config_from_spec(name), json.loads(settings))
    get_model(config={**config.get("model", {}), "model_name": "openai/policy"})  # imports what each process needs
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    if os.path.exists(path):
        os.unlink(path)  # of a process that died
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(path)
    listening.listen(1024)
    while True:
        connection, _ = listening.accept()
        if os.fork() == 0:
            listening.close()
            played(Link(connection), config)
            os._exit(0)
        connection.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
