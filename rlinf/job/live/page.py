"""The server of a run's live page, as a process of its own that the run starts: `metrics.web: true`.

In: the run's directory. Out: a line with the page's address. Who wakes whom: the server's first words, and its end,
wake the thread that listens to it. It is not ended with the run: people look at what came of it; it ends by itself a
while after, and after a run that was killed, too. It has nothing of the run's but its files and its feed.
"""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

LOG = "watch.log"
"""File in a run directory: what the server complained of."""
MOST_RESTARTS = 3
"""How often a server that has died is started again."""
_OURS = re.compile(r"^(RANK|LOCAL_RANK|WORLD_SIZE|MASTER_|GROUP_|ROLE_|LOCAL_WORLD|TORCHELASTIC_|OMP_NUM_THREADS)")
"""Variables that are about the job's processes: the server is none of them."""


def command(directory: Path) -> list[str]:
    """What starts the server.

    Args:
        directory: of the run.
    """
    return [sys.executable, "-m", "rlinf", "watch", str(directory), "--port", "0", "--until-ended"]


class Page:
    """The server of one run.

    Args:
        directory: of the run.
        say: prints a line.
        argv: what to start; default: `command`.
    """

    def __init__(self, directory: Path, say: Callable[[str], None], argv: Sequence[str] | None = None) -> None:
        self._directory, self._say = directory, say
        self._argv = [*(argv or command(directory))]
        self._loop = asyncio.get_running_loop()
        self._left = False
        self._deaths = 0

    def start(self) -> None:
        """Begin; returns at once."""
        # a daemon: the server outlives the run for a while
        threading.Thread(target=self._listen, name="live page's server", daemon=True).start()

    def leave(self) -> None:
        """The run is over: let the server go on by itself."""
        self._left = True

    def _listen(self) -> None:
        """The thread: starts the server, passes its address on, and waits for its end."""
        while not self._left and self._deaths <= MOST_RESTARTS:
            try:
                process = self._started()
            except OSError as error:
                self._tell(f"warning: the live page cannot be served: {error}")
                return
            assert process.stdout is not None
            for line in process.stdout:
                if (found := re.search(r"https?://\S+", line)) is not None:
                    self._tell(f"live page: {found[0]}")
            code = process.wait()
            process.stdout.close()
            self._deaths += 1
            if not self._left:
                self._tell(f"warning: the server of the live page ended with {code}; {self._directory / LOG} says why")
                if self._deaths == 1 and code == 2:
                    return  # a mistake in what it was asked, which it would make again

    def _started(self) -> subprocess.Popen[str]:
        environment = {name: value for name, value in os.environ.items() if not _OURS.match(name)}
        ours = str(Path(__file__).parents[3])  # a checkout need not be installed
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (ours, environment.get("PYTHONPATH"))))
        with open(self._directory / LOG, "ab") as log:
            return subprocess.Popen(
                self._argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                text=True,
                start_new_session=True,  # Ctrl-C is for the run
            )

    def _tell(self, line: str) -> None:
        if not self._left:
            self._loop.call_soon_threadsafe(self._said, line)

    def _said(self, line: str) -> None:
        if not self._left:
            self._say(line)
