"""The part of a Dockerfile that is carried out without Docker: a base image, directories, files, variables, commands.

In: a directory with a Dockerfile. Out: a `Recipe`, which makes a started container what the image would be. FROM,
WORKDIR, COPY and ADD of files beside it, ENV, ARG with a default and RUN are carried out; what only says how an image
is started (CMD, ENTRYPOINT, EXPOSE, LABEL, HEALTHCHECK, STOPSIGNAL, MAINTAINER) changes nothing here; all else is
refused, with its line.
"""

from __future__ import annotations

import json
import posixpath
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlinf.runtime.base.errors import UserError

_WITHOUT_EFFECT = {"CMD", "ENTRYPOINT", "EXPOSE", "LABEL", "HEALTHCHECK", "STOPSIGNAL", "MAINTAINER"}
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_BUILDING = 1800.0
"""Seconds that a RUN may take."""


@dataclass(frozen=True, slots=True)
class Step:
    """A directory to make, files to copy, or a command to run."""

    line: int
    workdir: str
    env: Mapping[str, str]
    command: tuple[str, ...] = ()
    files: tuple[tuple[Path, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Recipe:
    """An image as steps from a base."""

    base: str
    workdir: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    steps: tuple[Step, ...] = ()

    async def carry_out(self, box: Any) -> str:
        """Make a container what the image says; returns what went wrong, or ""."""
        for step in self.steps:
            for source, target in step.files:
                await box.upload(source, target)
            if not step.files and not step.command:
                await box.run(["mkdir", "-p", step.workdir])
            elif step.command:
                result = await box.run(step.command, seconds=_BUILDING, cwd=step.workdir, env=step.env)
                if not result.ok:
                    lines = (result.stdout + result.stderr).strip().splitlines() or [f"{result.outcome}"]
                    return f"environment/Dockerfile:{step.line}: RUN failed ({result.outcome}): {lines[-1][:300]}"
        return ""


def recipe_of(folder: Path, image: str | None, workdir: str | None) -> Recipe:
    """Read the recipe of an environment.

    Args:
        folder: with the Dockerfile.
        image: a prebuilt one, in place of it.
        workdir: where commands run, in place of the Dockerfile's.

    Raises:
        UserError: there is neither, or a line of it is not carried out here.
    """
    path = folder / "Dockerfile"
    if image:
        return Recipe(image, workdir)
    if any(folder.glob("docker-compose.y*ml")) or not path.exists():
        raise UserError(f"harbor: {folder}: one container from a Dockerfile, or environment.docker_image, is what runs")
    reading = _Reading(folder, workdir)
    for line, directive, rest in _directives(path.read_text()):
        try:
            reading.take(line, directive, rest)
        except ValueError as error:
            raise UserError(f"harbor: {path}:{line}: {directive}: {error}") from error
    if reading.base is None:
        raise UserError(f"harbor: {path}: there is no FROM")
    return Recipe(reading.base, workdir or reading.workdir, reading.env, tuple(reading.steps))


class _Reading:
    """State between the lines of a Dockerfile."""

    def __init__(self, folder: Path, workdir: str | None) -> None:
        self._folder = folder
        self.base: str | None = None
        self.workdir = workdir
        self.env: dict[str, str] = {}
        self.steps: list[Step] = []
        self._arguments: dict[str, str] = {}

    def take(self, line: int, directive: str, rest: str) -> None:
        """Take a line.

        Raises:
            ValueError: it is not carried out here.
        """
        if directive in _WITHOUT_EFFECT:
            return
        if "<<" in rest and directive in ("RUN", "COPY"):
            raise ValueError("texts within the Dockerfile (<<) are not read; COPY a file")
        takes = {
            "FROM": self._from,
            "WORKDIR": self._workdir_of,
            "ENV": self._env_of,
            "ARG": self._argument,
            "RUN": self._run,
            "COPY": self._copy,
            "ADD": self._copy,
        }
        if directive not in takes:
            raise ValueError(f"not carried out here; {', '.join(takes)} are")
        takes[directive](line, rest)

    def _from(self, _: int, rest: str) -> None:
        words = [word for word in rest.split() if not word.startswith("--")]
        if self.base is not None or not words:
            raise ValueError("an image with several stages is not built here")
        self.base = self._expanded(words[0])

    def _workdir_of(self, line: int, rest: str) -> None:
        self.workdir = posixpath.join(self.workdir or "/", self._expanded(rest))
        self._step(line)

    def _env_of(self, _: int, rest: str) -> None:
        self.env |= self._pairs(rest)

    def _argument(self, _: int, rest: str) -> None:
        self._arguments |= self._pairs(rest if "=" in rest else f"{rest}=")

    def _run(self, line: int, rest: str) -> None:
        words = json.loads(rest) if rest.startswith("[") else ["sh", "-c", re.sub(r"^(--\S+\s+)+", "", rest)]
        self._step(line, command=tuple(words))

    def _copy(self, line: int, rest: str) -> None:
        words = json.loads(rest) if rest.startswith("[") else shlex.split(rest)
        flags, words = [w for w in words if w.startswith("--")], [w for w in words if not w.startswith("--")]
        if any(flag.startswith("--from") for flag in flags) or any("://" in word for word in words) or len(words) < 2:
            raise ValueError("files come from beside the Dockerfile, and go to a path")
        target = posixpath.normpath(posixpath.join(self.workdir or "/", self._expanded(words[-1])))
        into = words[-1].endswith(("/", ".")) or len(words) > 2
        files = []
        for word in words[:-1]:
            matches = sorted(self._folder.glob(word.strip("/"))) if word.strip("/.") else [self._folder]
            if not matches:
                raise ValueError(f"there is no {word} beside it")
            for source in matches:
                name = f"{target}/{source.name}" if not source.is_dir() and (into or len(matches) > 1) else target
                files.append((source, name))
        self._step(line, files=tuple(files))

    def _step(self, line: int, *, command: tuple[str, ...] = (), files: tuple[tuple[Path, str], ...] = ()) -> None:
        env = {**self._arguments, **self.env}
        self.steps.append(Step(line, self.workdir or "/", env, command, files))

    def _pairs(self, rest: str) -> dict[str, str]:
        words = shlex.split(rest)
        if "=" not in words[0]:  # the old form: a name, and all else is its value
            return {words[0]: self._expanded(rest.partition(" ")[2].strip())}
        return {name: self._expanded(value) for name, _, value in (word.partition("=") for word in words)}

    def _expanded(self, text: str) -> str:
        values = {"PATH": _PATH, **self._arguments, **self.env}
        if "${" in re.sub(r"\$\{\w+\}", "", text):
            raise ValueError("variables with defaults or other signs in them are not expanded here")
        return re.sub(r"\$(?:(\w+)|\{(\w+)\})", lambda name: values.get(name[1] or name[2], ""), text)


def _directives(text: str) -> Iterator[tuple[int, str, str]]:
    """Number of the first line, directive and the rest, continued lines joined."""
    joined, first = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        first = first if joined else number
        joined += line.strip()
        if joined.endswith("\\"):
            joined = joined[:-1] + " "
            continue
        directive, _, rest = joined.partition(" ")
        yield first, directive.upper(), rest.strip()
        joined = ""
