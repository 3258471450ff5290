"""Commands on a page: are they what the programs take?

In: the text of a block of `bash`. What trains is asked for a dry run, in this process; of other commands of ours the
arguments are read, and nothing runs. Programs, targets of make, extras and files that a command names must be there.
What is not ours (srun, kubectl, ssh) only has to be bash.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import os
import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from rlinf.cli import commands
from rlinf.cli.main import main as train
from rlinf.config.load import ConfigError
from rlinf.runs.rules import load_any
from tests.docs.snippets import ROOT

TARGETS = frozenset(re.findall(r"^([a-z0-9-]+):(?!=).*##", (ROOT / "Makefile").read_text(), re.MULTILINE))
"""Those that `make help` lists."""
EXTRAS = frozenset(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
_TORCHRUN = {"--nproc-per-node": 1, "--nnodes": 1}
"""What says how many processes there are; the other options of torchrun have a value, too, but for `--standalone`."""
_OPEN = re.compile(r"…|\.\.\.|^<.*>$")
"""What a reader is to fill in."""

_NOT_HERE = re.compile(r"there is no such|is no directory|no such module")
"""What is wrong with a path that a reader has and this machine has not."""


class Refused(AssertionError):
    """A command that would not do what the page says."""


class _Read(BaseException):
    """The arguments of a command were read; nothing is to run, and no command is to take it for an error."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options


def check(script: str, *, run: bool) -> int:
    """Check a block of bash in the working directory.

    Args:
        script: its text.
        run: whether what trains must pass a dry run here. Otherwise only its keys have to be those of a configuration.

    Returns:
        How many of its commands are ours.

    Raises:
        Refused: with the command, and what is wrong with it.
    """
    read = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True)
    if read.returncode != 0:
        raise Refused(f"bash cannot read it: {read.stderr.strip()}")
    return sum(_checked(words, run) for words in _commands(script))


def _commands(script: str) -> Iterator[list[str]]:
    """The words of each simple command; of scripts within quotes none."""
    text = re.sub(r"\\\n", " ", re.sub(r"<<'?(\w+)'?\n.*?\n\1$", "", script, flags=re.MULTILINE | re.DOTALL))
    for line in text.splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="&|;")
        lexer.whitespace_split, lexer.commenters = True, "#"
        words: list[str] = []
        try:
            for word in lexer:
                if set(word) <= set("&|;"):
                    yield words
                    words = []
                else:
                    words.append(word)
        except ValueError:  # a quotation over several lines: bash has read it
            continue
        yield words


def _checked(words: list[str], run: bool) -> bool:
    """Whether a command is ours; it is checked then."""
    told: dict[str, str] = {}
    while words and re.match(r"^\w+=", words[0]):
        name, _, value = words.pop(0).partition("=")
        told[name] = value
    words = [word for word in words if not re.match(r"^[12]?>", word)]
    processes = int(told.get("WORLD_SIZE", 1))
    if words[:1] == ["torchrun"]:
        count, words = _torchrun(words[1:])
        processes *= count
    elif words[:1] in (["python"], ["python3"]):
        words = words[1:]
    elif words[:1] == ["rlinf"]:
        words = ["-m", *words]
    elif words[:1] == ["make"]:
        _known([word for word in words[1:] if "=" not in word], TARGETS, "target of make")
        return True
    elif words[:2] in (["pip", "install"], ["uv", "pip"]):
        _known(re.findall(r"rlinf\[([\w,]+)\]", " ".join(words)), EXTRAS, "extra")
        return True
    else:
        return False
    if words[:2] == ["-m", "rlinf"]:
        _ours(words[2:], processes, run)
    elif words[:1] == ["-m"]:
        if importlib.util.find_spec(words[1]) is None:
            raise Refused(f"{words[1]}: no such module")
        _options_of(words[1], words[2:])
    elif words and words[0] not in ("-c", "-"):
        program = Path(words[0])
        if program.name == "launch.py":
            _ours(["train", *words[1:]], processes, run)
        elif run and not program.exists() and not (ROOT / program).exists():
            raise Refused(f'{program}: no such program; give the block with it `title="{program}"`')
    return True


def _torchrun(words: list[str]) -> tuple[int, list[str]]:
    """How many processes torchrun starts, and the program with its arguments."""
    counts = dict(_TORCHRUN)
    while words and words[0].startswith("-") and words[0] != "-m":
        option, equal, value = words.pop(0).partition("=")
        if option == "--standalone":
            continue
        value = value if equal else words.pop(0)
        if option in counts and value.isdigit():
            counts[option] = int(value)
    total = 1
    for count in counts.values():
        total *= count
    return total, words


def _ours(words: list[str], processes: int, run: bool) -> None:
    """Check the arguments of `rlinf`."""
    if any(_OPEN.search(word) for word in words):
        return
    if words[:1] == ["train"] and "--help" not in words:
        if run:
            _dry_run(words[1:], processes)
        else:
            _keys(words[1:])
        return
    said = io.StringIO()

    def read_only(parser: argparse.ArgumentParser, *given: object, **more: object) -> argparse.Namespace:
        raise _Read(parse_args(parser, *given, **more))

    parse_args = argparse.ArgumentParser.parse_args
    code: object = 0
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            ours = dict.fromkeys(("parse_args", "parse_intermixed_args"), read_only)
            with mock.patch.multiple(argparse.ArgumentParser, **ours):
                code = commands.main(words)
        except _Read as read:
            config, more = getattr(read.options, "config", None), getattr(read.options, "overrides", ())
            if isinstance(config, str) and Path(config).exists():
                load_any(config, list(more), processes)
        except SystemExit as ended:
            code = ended.code
    if code:
        raise Refused(f"rlinf {shlex.join(words)}: {said.getvalue()}")


def _dry_run(words: list[str], processes: int) -> None:
    said = io.StringIO()
    setting = {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes), "RANK": "0"}
    with mock.patch.dict(os.environ, setting), contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = train([*words, "--dry-run"])
    if code != 0:
        raise Refused(f"rlinf train {shlex.join(words)} in {processes} processes: {said.getvalue()[-2000:]}")


def _keys(words: list[str]) -> None:
    """Of a run that needs what is not here: its configuration, if that is here, has the keys that it sets."""
    config = words[1 + words.index("--config")]
    keys = [word for word in words if re.match(r"^[\w.]+=", word)]
    if not Path(config).exists():
        return
    try:
        load_any(config, keys, None)
    except ConfigError as error:
        wrong = [problem for problem in error.problems if not _NOT_HERE.search(str(problem))]
        if wrong:
            raise Refused(f"rlinf train {shlex.join(words)}: {wrong}") from error


def _options_of(module: str, words: list[str]) -> None:
    """A module's options stand in its source, or in that of its package."""
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin)
    files = [*source.parent.glob("*.py")] if source.name in ("__init__.py", "__main__.py") else [source]
    text = "".join(file.read_text(encoding="utf-8") for file in [*files, *(ROOT / "benchmarks").glob("*.py")])
    for word in words:
        option = word.partition("=")[0]
        if option.startswith("--") and f'"{option}"' not in text:
            raise Refused(f"{module} has no option {option}")


def _known(named: list[str], known: frozenset[str], what: str) -> None:
    for each in ",".join(named).split(","):
        if each and each not in known:
            raise Refused(f"{each}: no {what}")
