"""Containers that are folders: paths of a task's machine are written as paths into one. They keep nothing apart."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

from rlinf.sandbox.limits import Result

_PATHS = re.compile(r"(?<![\w.])/(app|tests|logs|solution|opt/x)\b")

_ENVIRONMENT = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1"}


class Folder:
    """A container; `ran` are its commands."""

    def __init__(self, root, workdir, env):
        self.root, self.workdir, self.env, self.ran = Path(root), workdir or "/app", dict(env or {}), []
        self.ended = False
        self._inside(self.workdir).mkdir(parents=True, exist_ok=True)

    def _inside(self, path):
        return self.root / path.lstrip("/")

    def _words(self, text):
        return _PATHS.sub(lambda match: f"{self.root}{match.group()}", text)

    async def run(self, command, *, seconds=None, cwd=None, env=None, stdin=b""):
        words = ["sh", "-c", command] if isinstance(command, str) else list(command)
        self.ran.append(words)
        place = {"cwd": self._inside(cwd or self.workdir), "env": {**_ENVIRONMENT, **self.env, **(env or {})}}
        place["env"] = {name: self._words(value) for name, value in place["env"].items()}
        pipes = {
            "stdin": asyncio.subprocess.DEVNULL,
            "stdout": asyncio.subprocess.PIPE,
            "stderr": asyncio.subprocess.PIPE,
        }
        process = await asyncio.create_subprocess_exec(*map(self._words, words), **pipes, **place)
        try:
            out, err = await asyncio.wait_for(process.communicate(), seconds)
        except TimeoutError:
            process.kill()
            return Result("timeout", "", "", None, seconds)
        outcome = "error" if process.returncode else "ok"
        return Result(outcome, out.decode(), err.decode(), process.returncode, 0.0)

    async def upload(self, source, target):
        where = self._inside(target)
        where.parent.mkdir(parents=True, exist_ok=True)
        if Path(source).is_dir():
            shutil.copytree(source, where, dirs_exist_ok=True)
        else:
            shutil.copy(source, where)
        for path in [where, *where.rglob("*")] if where.is_dir() else [where]:
            if path.suffix == ".sh":
                path.write_text(self._words(path.read_text()))

    async def download(self, source, target):
        if not self._inside(source).exists():
            raise FileNotFoundError(source)
        if self._inside(source).is_dir():
            shutil.copytree(self._inside(source), target, dirs_exist_ok=True)
        else:
            shutil.copy(self._inside(source), target)

    async def snapshot(self):
        kept = f"{self.root}-kept"
        shutil.copytree(self.root, kept)
        return kept

    async def end(self):
        self.ended = True


class Folders:
    """Their provider; `started` are all that it has made, `images` what they were made from."""

    def __init__(self):
        self.started, self.images = [], []
        self._room = tempfile.mkdtemp(prefix="folders-")

    @property
    def ran(self):
        """All commands of all containers."""
        return [words for each in self.started for words in each.ran]

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        await self.close()

    async def close(self):
        shutil.rmtree(self._room)

    async def start(self, image=None, *, workdir=None, env=None, limits=None, network=False):
        root = os.path.join(self._room, str(len(self.started)))
        if image is not None and os.path.isdir(image):
            shutil.copytree(image, root)
        else:
            os.mkdir(root)
        self.images.append(image)
        self.started.append(Folder(root, workdir, env))
        return self.started[-1]
