"""How large the package is, and how many of its files a prompt and an observation enter on their way to a gradient.

    python -m benchmarks.house

Lines of code are those that hold more than a docstring, a comment or nothing. Files entered are those outside the
runtime whose functions run during one step, between the call of the flow and its return, in one process: first of the
quickstart, then of an embodied run. Publishing weights is part of a step, so its files count, too.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import io
import sys
import tempfile
import threading
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from rlinf.cli.main import main as launch

PACKAGE = Path(__file__).parent.parent / "rlinf"
WATCHED = 3
"""The step that is looked at: the first ones still make what later ones reuse."""
_LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def main() -> None:
    """Print both tables."""
    lines = Counter({path: code_lines(path) for path in PACKAGE.rglob("*.py")})
    rooms: Counter[str] = Counter()
    for path, count in lines.items():
        rooms[path.relative_to(PACKAGE).parts[0]] += count
    print(f"{lines.total():,} lines of code in {len(lines)} files of rlinf/")
    print("  " + ", ".join(f"{room.removesuffix('.py')} {count:,}" for room, count in rooms.most_common()))
    small = ["steps=4", "log_every=4", "trace=false"]
    text = ["--config", "configs/quickstart.yaml", *small, "evaluation.problems=4", "sft.steps=0"]
    embodied = ["--config", "configs/embodied/toy.yaml", *small, "trials.episodes=0", "env.workers=0"]
    report("a prompt", files_entered("rlinf.flows.grpo", text))
    report("an observation", files_entered("rlinf.flows.embodied", embodied))


def code_lines(path: Path) -> int:
    """Lines of a file that hold code."""
    source = path.read_text(encoding="utf-8")
    texts: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            texts.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    code = {line for token in tokens if token.type not in _LAYOUT for line in range(token.start[0], token.end[0] + 1)}
    return len(code - texts)


def files_entered(flow: str, arguments: Sequence[str]) -> dict[str, list[str]]:
    """The files outside the runtime that one step of a run enters, by room.

    Args:
        flow: dotted path of the flow, which bears its module's name.
        arguments: of the launcher.
    """
    watching, calls, found = False, 0, set[Path]()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if watching and event == "call":
            found.add(Path(frame.f_code.co_filename))

    module = importlib.import_module(flow)
    name = flow.rpartition(".")[2]
    step = getattr(module, name)

    @functools.wraps(step)
    async def watched(*args: Any, **roles: Any) -> Any:
        nonlocal watching, calls
        calls += 1
        watching = calls == WATCHED
        try:
            return await step(*args, **roles)
        finally:
            watching = False

    setattr(module, name, watched)
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        with tempfile.TemporaryDirectory() as directory, contextlib.redirect_stdout(io.StringIO()):
            code = launch([*arguments, f"output_dir={directory}"])
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
        setattr(module, name, step)
    if code:
        raise SystemExit(f"the run ended with {code}")
    rooms: dict[str, list[str]] = defaultdict(list)
    for room, path in sorted(_rooms(found)):
        rooms[room].append(path)
    return rooms


def _rooms(files: set[Path]) -> Iterator[tuple[str, str]]:
    for path in files:
        if path.is_relative_to(PACKAGE) and (parts := path.relative_to(PACKAGE).parts)[0] != "runtime":
            yield parts[0], "/".join(parts[1:]).removesuffix(".py")


def report(what: str, rooms: dict[str, list[str]]) -> None:
    """Print the files that something enters."""
    print(f"\n{what} enters {sum(map(len, rooms.values()))} files outside the runtime:")
    for room, files in rooms.items():
        print(f"  {room} {len(files)}: {', '.join(files)}")


if __name__ == "__main__":
    main()
