"""The feed of a live run: a Unix socket that only this user can open, one JSON object per line, and the page's server.

In: messages for all watchers, and lines from each. Out: the same messages to each watcher, as far as it reads them.
Who wakes whom: the first watcher wakes who measures, and the last to leave lets them rest. Nobody here ever waits for a
watcher: one that reads too slowly misses measurements, and one that sends what is no line of ours is hung up on. With
`metrics.web: true` the run starts the server of its page, as a process of its own that has nothing of the run's but its
files and its feed: it outlives the run for a while, also one that was killed, since people look at what came of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlinf.runtime.base.tasks import OwnDirectory

LONGEST = 64 * 1024
"""Bytes of a line that a watcher may send: wishes have a hundred."""
BEHIND = 1 << 20
"""Bytes that wait to be read by a watcher from which on it gets nothing new: some hundred moments of 64 roles."""
OWED = 64
"""Answers that are kept for a watcher that is behind."""
MOST = 64
"""Watchers; one more is hung up on."""
FAREWELL = 0.5
"""Seconds that watchers have to read the last words."""
LONGEST_PATH = 100
"""Bytes of a socket's path, of which the kernel takes 107."""

Message = Mapping[str, Any]


class Watcher:
    """One connection.

    Args:
        writer: its end.
        again: what it has to know when it has missed something.
    """

    def __init__(self, writer: asyncio.StreamWriter, again: Callable[[], Iterable[Message]]) -> None:
        self._writer, self._again = writer, again
        self._missed = False
        self._owed: deque[bytes] = deque(maxlen=OWED)

    def tell(self, line: bytes, *, owed: bool = False) -> None:
        """Send a line, unless it is behind.

        Args:
            line: ends with a newline.
            owed: an answer, which it gets later in that case.
        """
        transport = self._writer.transport
        if transport.is_closing():
            return
        if transport.get_write_buffer_size() > BEHIND:
            self._missed = True
            if owed:
                self._owed.append(line)
            return
        if self._missed:
            self._missed = False
            self._writer.writelines([*map(encoded, self._again()), *self._owed])
            self._owed.clear()
        self._writer.write(line)

    @property
    def reads(self) -> bool:
        """It is not behind."""
        return not self._missed

    def take_leave(self) -> None:
        """Say that nothing more will come; it hangs up when it has read what there is."""
        with contextlib.suppress(RuntimeError, OSError):  # the other side was quicker
            self._writer.write_eof()

    def hang_up(self) -> None:
        """Close the connection, with what it has not read."""
        self._writer.transport.abort()


class Feed:
    """The watchers of one run.

    Args:
        hello: what a watcher is told first, and again when it has missed something.
        hear: takes what a watcher says, with a way to answer it.
    """

    def __init__(
        self, hello: Callable[[], Iterable[Message]], hear: Callable[[Message, Callable[[Message], None]], None]
    ) -> None:
        self._hello, self._hear = hello, hear
        self._watchers: set[Watcher] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._server: asyncio.Server | None = None
        self._directory: OwnDirectory | None = None
        self.watched = asyncio.Event()
        """Somebody is there."""

    async def open(self) -> Path:
        """Listen; the socket's path.

        Raises:
            OSError: it cannot be made.
        """
        self._directory = directory = private_directory()
        path = directory.path / "feed"
        try:
            self._server = await asyncio.start_unix_server(self._serve, path, limit=LONGEST)
        except BaseException:
            directory.remove()
            raise
        os.chmod(path, 0o600)
        return path

    def tell(self, message: Message) -> None:
        """Send a message to all who watch."""
        if self._watchers:
            line = encoded(message)
            for watcher in self._watchers:
                watcher.tell(line)

    async def close(self) -> None:
        """Hang up, once those who read have read what was said."""
        if self._server is not None:
            self._server.close()
        readers = [watcher for watcher in self._watchers if watcher.reads]
        if readers:
            for watcher in readers:
                watcher.take_leave()
            await asyncio.wait([*self._tasks], timeout=FAREWELL)
        for watcher in [*self._watchers]:
            watcher.hang_up()
        if self._tasks:
            await asyncio.wait([*self._tasks])
        if self._directory is not None:
            await asyncio.to_thread(self._directory.remove)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One watcher's lines, until it hangs up or says what is no line of ours."""
        task = asyncio.current_task()
        assert task is not None
        watcher = Watcher(writer, self._hello)
        if len(self._watchers) >= MOST:
            watcher.hang_up()
            return
        self._tasks.add(task)
        self._watchers.add(watcher)
        self.watched.set()
        try:
            for message in self._hello():
                watcher.tell(encoded(message))
            while line := await reader.readline():
                request = json.loads(line)
                if not isinstance(request, dict):
                    break
                self._hear(request, lambda answer: watcher.tell(encoded(answer), owed=True))
        except (ValueError, RecursionError, OSError):  # too long, or no JSON; or it is gone
            pass
        except asyncio.CancelledError:  # by the end of the loop; asyncio's streams would log it as an error
            pass
        finally:
            self._watchers.discard(watcher)
            self._tasks.discard(task)
            if not self._watchers:
                self.watched.clear()
            watcher.hang_up()


def encoded(message: Message) -> bytes:
    """A message as a line; of ASCII, since an id that is sent back may have half a character in it."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def private_directory() -> OwnDirectory:
    """A new directory for this process, with a name that is short enough for a socket in it."""
    for place in (tempfile.gettempdir(), "/tmp"):
        if len(os.fsencode(place)) + 40 <= LONGEST_PATH:
            return OwnDirectory("live", place)
    raise OSError(f"TMPDIR={tempfile.gettempdir()} is too long for a socket's path, and there is no /tmp")


LOG = "watch.log"
"""File in a run directory: what the server complained of."""
MOST_RESTARTS = 3
"""How often a server that has died is started again."""
_OURS = re.compile(r"^(RANK|LOCAL_RANK|WORLD_SIZE|MASTER_|GROUP_|ROLE_|LOCAL_WORLD|TORCHELASTIC_|OMP_NUM_THREADS)")
"""Variables that are about the job's processes: the server is none of them."""


def command(directory: Path) -> list[str]:
    """The command that starts the server.

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
                if (match := re.search(r"https?://\S+", line)) is not None:
                    self._tell(f"live page: {match[0]}")
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
