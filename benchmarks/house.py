"""How the package is cut: its size, the files that a prompt and an observation enter, and what makes it hard to read.

    python -m benchmarks.house

Lines of code are those that hold more than a docstring, a comment or nothing. Files entered are those outside the
runtime whose functions run during one step, between the call of the flow and its return, in one process: first of the
quickstart, then of an embodied run. Publishing weights is part of a step, so its files count, too.

`tests/test_house.py` holds what is counted here below ceilings that only fall.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import io
import re
import sys
import tempfile
import threading
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

PACKAGE = Path(__file__).parent.parent / "rlinf"
WATCHED = 3
"""The step that is looked at: the first ones still make what later ones reuse."""
SMALL = 60
"""Lines of code below which a module that one other imports is merged into it."""
MOST_PARAMETERS = 8
PARTICIPLES = frozenset(
    "found told said kept begun beside heard seen taken dealt made drawn asked given chosen shown known held left read "  # noqa: SIM905
    "gone meant".split()
)
"""Names that say what happened to a thing instead of what it is."""
RIDDLES = re.compile(r"(What|Who|Whether|The same|Of|As)\b")
"""Beginnings of a docstring that say nothing to someone who has read nothing else."""
_LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class House:
    """Counts over all modules of the package."""

    code: Counter[str] = field(default_factory=Counter)
    """Lines of code of each file, by its path within the package."""
    import_lines: int = 0
    importers: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """Modules that import a module, at their top or within a function."""
    signatures: list[str] = field(default_factory=list)
    """Functions of more than `MOST_PARAMETERS`."""
    long_functions: list[str] = field(default_factory=list)
    """Functions of more than 60 lines without their docstrings."""
    riddles: list[str] = field(default_factory=list)
    """Docstrings whose first line begins as `RIDDLES` do."""
    participles: list[str] = field(default_factory=list)
    """Bindings of a bare participle."""
    unformatted: int = 0
    """Places at which `# fmt: skip` keeps the formatter out."""
    bases: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """Classes of the package that other classes of it extend, and these: `path:Class`."""

    @property
    def import_share(self) -> float:
        return self.import_lines / self.code.total()

    @property
    def small_modules(self) -> list[str]:
        """Modules under `SMALL` lines of code with one importer at most."""
        return sorted(
            path
            for path, lines in self.code.items()
            if lines < SMALL and not path.endswith("__init__.py") and len(self.importers[path]) <= 1
        )

    @property
    def lone_bases(self) -> list[str]:
        """Base classes with a single subclass, which lies in another file."""
        return sorted(
            base
            for base, extending in self.bases.items()
            if len(extending) == 1 and next(iter(extending)).partition(":")[0] != base.partition(":")[0]
        )


def look() -> House:
    """Read all of the package."""
    house = House()
    homes: dict[str, list[str]] = defaultdict(list)
    extended: list[tuple[str, str]] = []
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        source = path.read_text(encoding="utf-8")
        tree = ast.parse(source)
        house.code[name] = len(code_of(source, tree))
        house.unformatted += source.count("# fmt: skip")
        _count_imports(house, name, tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(f"{name}:{node.name}")
                extended += [(_last_name(base), f"{name}:{node.name}") for base in node.bases]
            if isinstance(node, _Function):
                _measure(house, name, node)
            if isinstance(node, _Function | ast.ClassDef | ast.Module):
                text = ast.get_docstring(node)
                if text and RIDDLES.match(text):
                    house.riddles.append(f"{name}:{getattr(node, 'name', '')}: {text.splitlines()[0]}")
            house.participles += [f"{name}:{bound}" for bound in _bindings(node) if bound in PARTICIPLES]
    for base, extending in extended:
        for home in homes.get(base, []) if len(homes.get(base, [])) == 1 else []:
            house.bases[home].add(extending)
    return house


def _count_imports(house: House, name: str, tree: ast.Module) -> None:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            house.import_lines += (node.end_lineno or node.lineno) - node.lineno + 1
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("rlinf"):
            for alias in node.names:
                for module in (f"{node.module}.{alias.name}", node.module):
                    path = "/".join(module.split(".")[1:]) + ".py"
                    if (PACKAGE / path).is_file():
                        house.importers[path].add(name)
                        break


def _measure(house: House, name: str, node: _Function) -> None:
    arguments = node.args
    parameters = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    if len([each for each in parameters if each.arg not in ("self", "cls")]) > MOST_PARAMETERS:
        house.signatures.append(f"{name}:{node.name}")
    lines = (node.end_lineno or node.lineno) - node.lineno + 1
    first = node.body[0]
    if ast.get_docstring(node) is not None:
        lines -= (first.end_lineno or first.lineno) - first.lineno + 1
    if lines > 60:
        house.long_functions.append(f"{name}:{node.name}")


def _bindings(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id.strip("_")
    elif isinstance(node, ast.arg):
        yield node.arg.strip("_")


def _last_name(base: ast.expr) -> str:
    inner = base.value if isinstance(base, ast.Subscript) else base
    return inner.attr if isinstance(inner, ast.Attribute) else inner.id if isinstance(inner, ast.Name) else ""


def code_of(source: str, tree: ast.Module) -> set[int]:
    """Numbers of the lines of a file that hold code."""
    texts: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            texts.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    code = {line for token in tokens if token.type not in _LAYOUT for line in range(token.start[0], token.end[0] + 1)}
    return code - texts


def main() -> None:
    """Print all of it."""
    house = look()
    code, rooms = house.code, Counter[str]()
    for path, count in code.items():
        rooms[path.partition("/")[0]] += count
    modules = [path for path in code if not path.endswith("__init__.py")]
    print(
        f"{code.total():,} lines of code in {len(code)} files of rlinf/, {code.total() / len(modules):.0f} in a module"
    )
    print("  " + ", ".join(f"{room.removesuffix('.py')} {count:,}" for room, count in rooms.most_common()))
    print(f"  share of lines that import: {house.import_share:.1%}")
    for title, names in (
        (f"modules under {SMALL} lines with one importer", house.small_modules),
        ("base classes with a single subclass in another file", house.lone_bases),
        (f"signatures above {MOST_PARAMETERS} parameters", house.signatures),
        ("functions above 60 lines", house.long_functions),
        ("docstrings that begin with What, Who, Whether, The same, Of, As", house.riddles),
        ("bindings of a bare participle", house.participles),
    ):
        print(f"{len(names):,} {title}" + "".join(f"\n  {name}" for name in names if "--names" in sys.argv))
    print(f"{house.unformatted} of # fmt: skip")
    for title, entered in (("a prompt", prompt_files()), ("an observation", observation_files())):
        report(title, entered)


SHORT = ("steps=4", "log_every=4", "trace=false")


def prompt_files() -> dict[str, list[str]]:
    """The files that a prompt enters, by room."""
    config = ("--config", "configs/quickstart.yaml", *SHORT, "evaluation.problems=4", "sft.steps=0")
    return files_entered("rlinf.flows.grpo", config)


def observation_files() -> dict[str, list[str]]:
    """The files that an observation enters, by room."""
    config = ("--config", "configs/embodied/toy.yaml", *SHORT, "trials.episodes=0", "env.workers=0")
    return files_entered("rlinf.flows.embodied", config)


def files_entered(flow: str, arguments: Sequence[str]) -> dict[str, list[str]]:
    """The files outside the runtime that one step of a run enters, by room.

    Args:
        flow: dotted path of the flow, which bears its module's name.
        arguments: of the launcher.
    """
    from rlinf.cli.main import main as launch

    watching, calls, entered = False, 0, set[Path]()

    def note(frame: FrameType, event: str, _: Any) -> None:
        # what draws bars looks at a clock, and so into some steps
        if watching and event == "call" and threading.current_thread().name != "progress":
            entered.add(Path(frame.f_code.co_filename))

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
    for room, path in sorted(_rooms(entered)):
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
