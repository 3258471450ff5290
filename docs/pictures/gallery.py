"""Makes the gallery: a picture of what each example prints, and the tables of examples/README.md.

    python -m docs.pictures.gallery                 # runs every example; minutes
    python -m docs.pictures.gallery grpo sac        # these alone; the figures of the others stay
    python -m docs.pictures.gallery --tables        # runs nothing: what the examples' docstrings and lines say now

An example runs in an empty directory of its own, as a user would start it. Its seconds are those of one core that it
and its children computed for, since a wall clock would measure what else the machine does.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "docs" / "pictures" / "gallery"
FIGURES = PICTURES / "seconds.json"
PAGE = ROOT / "examples" / "README.md"
BEGIN, END = "<!-- gallery: begin -->", "<!-- gallery: end -->"
SECTIONS = {
    "Actors": ("hello_actors", "pipeline", "two_nodes"),
    "Learning": ("grpo", "ppo_with_critic", "asynchronous", "online_feedback"),
    "Your own parts": ("custom_reward", "custom_algorithm", "custom_flow", "own_loop", "guessing_game"),
    "Agents": ("calculator", "search_r1", "code_with_tests", "self_play", "team"),
    "Robots": ("sac", "vla"),
    "Placement": ("planner", "rehearsal"),
}
"""All examples, in the order in which one may read them."""
HEAD, TAIL = 14, 16
"""Lines of an output that its picture shows: those at the beginning and at the end, if there are more."""
WIDTH = 118
"""Columns of a picture."""
ROW, COLUMN, EDGE = 17.0, 7.8, 14.0
"""Of the picture, in its units: the height of a line, the width of a character, the space around."""
COMMAND, ANSWER, GROUND = "#7fdbca", "#d6deeb", "#0f1b2d"
"""Colours of what was typed, of what was printed, and of the terminal."""


def names() -> list[str]:
    """Of all examples."""
    return [name for names in SECTIONS.values() for name in names]


def ran(name: str) -> tuple[str, float]:
    """What an example printed, and the seconds of a core that it took.

    Raises:
        subprocess.CalledProcessError: it failed; what it said on standard error was passed on.
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": str(WIDTH)}
    with tempfile.TemporaryDirectory() as directory:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(
            [sys.executable, ROOT / "examples" / f"{name}.py"],
            cwd=directory, env=environment, stdout=subprocess.PIPE, text=True, check=True,
        )  # fmt: skip
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        text = done.stdout.replace(f"{Path(directory).resolve()}/", "").replace(f"{directory}/", "")
    return text, after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def shown(text: str) -> list[str]:
    """The lines of an output that fit into a picture, without the list of files that every run ends with."""
    text = re.sub(r"(?m)^  \S+\.\w+  +.*\n(  \S+(\.\w+|/hf)  +.*\n)+", "  …\n", text)
    lines = [
        line if len(line) <= WIDTH else f"{line[: WIDTH - 1]}…" for line in text.rstrip().expandtabs().splitlines()
    ]
    return lines if len(lines) <= HEAD + TAIL + 1 else [*lines[:HEAD], "⋮", *lines[-TAIL:]]


def picture(command: str, text: str) -> str:
    """An SVG of a terminal in which a command has printed a text, for light pages and dark ones."""
    lines = [f"$ {command}", *shown(text)]
    width = 2 * EDGE + COLUMN * max(60, *map(len, lines))
    height = 2 * EDGE + ROW * len(lines)
    rows = "\n".join(
        f'<text x="{EDGE:g}" y="{EDGE + ROW * (number + 0.75):g}" textLength="{COLUMN * len(line):.1f}" '
        f'fill="{ANSWER if number else COMMAND}">{escape(line)}</text>'
        for number, line in enumerate(lines)
        if line.strip()
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
        f'height="{height:g}" role="img" aria-label="what {escape(command)} prints">\n'
        "<style>text { font: 13px ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace; "
        "white-space: pre }</style>\n"
        f'<rect width="{width:g}" height="{height:g}" rx="8" fill="{GROUND}"/>\n{rows}\n</svg>\n'
    )


def described(name: str) -> tuple[str, int]:
    """What an example shows, by the first sentence of its docstring; and its lines."""
    source = (ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8")
    said = " ".join((ast.get_docstring(ast.parse(source)) or "").partition("\n\n")[0].split())
    return said, len(source.splitlines())


def table(figures: Mapping[str, float]) -> str:
    """The examples in Markdown, by their seconds of a core."""
    pictures, parts = "../docs/pictures/gallery", []
    for section, own in SECTIONS.items():
        parts.append(f"### {section}\n\n| | what it shows | seconds | lines |\n|---|---|---|---|")
        for name in own:
            said, lines = described(name)
            image = f'<a href="{pictures}/{name}.svg"><img src="{pictures}/{name}.svg" width="280" alt="{name}"></a>'
            seconds = f"{figures[name]:.0f}" if name in figures else ""
            link = f"[{name}.py]({name}.py)"
            parts[-1] += f"\n| {image} | {link}: {said}<br>`python examples/{name}.py` | {seconds} | {lines} |"
    return "\n\n".join(parts)


def page(figures: Mapping[str, float]) -> str:
    """The page with the table that is right now."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    return f"{before}{BEGIN}\n\n{table(figures)}\n\n{END}{rest.partition(END)[2]}"


def main() -> None:
    """Run what is asked for, and write its pictures and the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="examples to run; all of them if there are none")
    parser.add_argument("--tables", action="store_true", help="run nothing, and write the tables anew")
    given = parser.parse_args()
    if unknown := [name for name in given.names if name not in names()]:
        parser.error(f"there is no example {unknown[0]}; there are {', '.join(names())}")
    PICTURES.mkdir(exist_ok=True)
    figures = json.loads(FIGURES.read_text()) if FIGURES.exists() else {}
    for name in () if given.tables else given.names or names():
        text, seconds = ran(name)
        figures[name] = round(seconds, 1)
        (PICTURES / f"{name}.svg").write_text(picture(f"python examples/{name}.py", text), encoding="utf-8")
        sys.stdout.write(f"{name}: {seconds:.1f} s of a core\n")
    FIGURES.write_text(json.dumps({name: figures[name] for name in names() if name in figures}, indent=2) + "\n")
    PAGE.write_text(page(figures), encoding="utf-8")


if __name__ == "__main__":
    main()
